//! One FIFO: where its parts lie, and the end that takes.

use std::sync::atomic::Ordering;

use ep_core::device::FarStatus;
use ep_core::{Error, c_struct};

use super::command::{is_whole, phase, rings};
use super::memory::{Reached, word};

c_struct! {
    /// The state of a lane whose posts a thread of the host carries out: the writing end of its FIFO.
    pub(super) struct Fifo = "EpFifo" {
        /// Address of the commands, 16 bytes each.
        pub commands: u64,
        /// Address of the EpFifoAnswers.
        pub answers: u64,
        /// Commands that there is room for, as the power of two.
        pub log_slots: u32,
        /// Zero.
        pub reserved: u32,
        /// Commands written, ever.
        pub issued: u64,
        /// Of those, up to the last put.
        pub put: u64,
        /// EpFifoAnswers.taken, as last seen.
        pub taken: u64,
        /// The second word of the last command, where it has no bell; zero.
        pub silent: u64,
        /// Zero.
        pub rest: u64,
    }
}

c_struct! {
    /// What the thread of the host says. Each number has one word, which never falls.
    pub(super) struct FifoAnswers = "EpFifoAnswers" {
        /// Commands that were taken, ever: their slots may be written.
        pub taken: u64,
        /// Commands up to which the sources of all puts may be overwritten.
        pub settled: u64,
        /// EP_FAR_OK, or why nothing is posted any more.
        pub status: u64,
        /// Rises as long as the thread goes on; of a lane of Watch.
        pub pulse: u64,
        /// Zero.
        pub rest: [u64; 4],
    }
}

const COMMAND: usize = 16;

/// The end of a FIFO that takes, and answers.
#[derive(Debug)]
pub(super) struct Taker {
    /// Where it begins in the memory.
    at: usize,
    log_slots: u32,
    /// Commands taken, ever.
    next: u64,
    /// Commands seen: no bell is before the last of them, of those that were not taken.
    seen: u64,
    /// Commands up to the last bell seen.
    rung: u64,
}

impl Taker {
    /// Bytes of a FIFO.
    pub(super) const fn bytes(log_slots: u32) -> usize {
        let bytes = size_of::<Fifo>() + size_of::<FifoAnswers>() + (COMMAND << log_slots);
        bytes.next_multiple_of(64)
    }

    pub(super) const fn new(at: usize, log_slots: u32) -> Self {
        Self { at, log_slots, next: 0, seen: 0, rung: 0 }
    }

    const fn answers(&self) -> usize {
        self.at + size_of::<Fifo>()
    }

    const fn commands(&self) -> usize {
        self.answers() + size_of::<FifoAnswers>()
    }

    /// Where the lane's state lies for the device.
    pub(super) fn state<M: Reached>(&self, memory: &M) -> u64 {
        memory.state(self.at)
    }

    /// Empties it; both ends begin anew. Nobody posts.
    ///
    /// # Errors
    /// As [`Reached::write_state`].
    pub(super) fn reset<M: Reached>(&mut self, memory: &M) -> Result<(), Error> {
        (self.next, self.seen, self.rung) = (0, 0, 0);
        for at in (self.at..self.at + Self::bytes(self.log_slots)).step_by(8) {
            word(memory, at).store(0, Ordering::Relaxed);
        }
        let device = |at: usize| memory.device() + at as u64;
        let (commands, answers) = (device(self.commands()), device(self.answers()));
        let fifo = Fifo { commands, answers, log_slots: self.log_slots, ..Fifo::default() };
        memory.write_state(self.at, zerocopy::transmute!(fifo))
    }

    /// Commands taken, ever.
    pub(super) const fn taken(&self) -> u64 {
        self.next
    }

    /// The words of the next command, once it and the bell behind it are there.
    pub(super) fn take<M: Reached>(&mut self, memory: &M) -> Option<[u64; 2]> {
        if self.next == self.rung {
            self.listen(memory);
        }
        let taken = (self.next < self.rung).then(|| self.words(memory, self.next));
        self.next += u64::from(taken.is_some());
        taken
    }

    /// The same by one who hears no bells: a planted fault.
    #[cfg(test)]
    pub(super) fn take_unheard<M: Reached>(&mut self, memory: &M) -> Option<[u64; 2]> {
        let taken = self.whole(memory, self.next);
        self.next += u64::from(taken.is_some());
        taken
    }

    /// The same by one who looks at the first word alone: a planted fault.
    #[cfg(test)]
    pub(super) fn take_by_half<M: Reached>(&mut self, memory: &M) -> Option<[u64; 2]> {
        let words = self.words(memory, self.next);
        let half = is_whole([words[0]; 2], phase(self.next, self.log_slots));
        self.next += u64::from(half);
        half.then_some(words)
    }

    /// Looks for the next bell. That of the last command may ring later than it is written.
    fn listen<M: Reached>(&mut self, memory: &M) {
        self.seen = self.seen.max(self.next);
        let mut last = self.whole(memory, self.seen);
        while let Some(words) = last {
            if rings(words) {
                self.rung = self.seen + 1;
                return;
            }
            last = self.whole(memory, self.seen + 1);
            self.seen += u64::from(last.is_some());
        }
    }

    /// The words of a command, once both are there.
    fn whole<M: Reached>(&self, memory: &M, index: u64) -> Option<[u64; 2]> {
        let words = self.words(memory, index);
        is_whole(words, phase(index, self.log_slots)).then_some(words)
    }

    /// What lies in the slot of a command.
    fn words<M: Reached>(&self, memory: &M, index: u64) -> [u64; 2] {
        let slot = index & ((1 << self.log_slots) - 1);
        let at = self.commands() + COMMAND * slot as usize;
        // What the device did before it rang is visible when the second word was seen with its bell.
        [0, 8].map(|part| word(memory, at + part).load(Ordering::Acquire))
    }

    /// Gives credit for what was taken: it was read before.
    pub(super) fn credit<M: Reached>(&self, memory: &M, taken: u64) {
        word(memory, self.answers() + std::mem::offset_of!(FifoAnswers, taken)).store(taken, Ordering::Release);
    }

    pub(super) fn settle<M: Reached>(&self, memory: &M, settled: u64) {
        word(memory, self.answers() + std::mem::offset_of!(FifoAnswers, settled)).store(settled, Ordering::Release);
    }

    /// A sign of life.
    pub(super) fn beat<M: Reached>(&self, memory: &M) {
        let pulse = word(memory, self.answers() + std::mem::offset_of!(FifoAnswers, pulse));
        pulse.store(pulse.load(Ordering::Relaxed) + 1, Ordering::Release);
    }

    /// Says why nothing is posted any more, unless that was said.
    pub(super) fn end<M: Reached>(&self, memory: &M, status: FarStatus) {
        let place = word(memory, self.answers() + std::mem::offset_of!(FifoAnswers, status));
        // Told already: the first reason counts.
        let _ = place.compare_exchange(0, status as u64, Ordering::AcqRel, Ordering::Relaxed);
    }
}
