//! The proxy's thread, and what it shares with the control plane.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use ep_core::device::FarStatus;
use ep_core::transport::Lanes;

use super::lane::Lane;
use super::memory::Reached;

/// Turns in which nothing moved, after which each yields.
const PATIENCE: u32 = 1000;
/// Turns from one look at what the transport knows of broken lanes to the next.
const LOOK: u32 = 256;

#[derive(Debug)]
pub(super) struct Shared<L, M> {
    /// The thread has it for a turn at a time.
    work: Mutex<Work<L>>,
    pub(super) memory: M,
    /// Calls of the control plane that want it: the thread lets them go first.
    wanted: AtomicU32,
    pub(super) stop: AtomicBool,
    /// The thread has ended.
    pub(super) ended: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Work<L> {
    pub(super) transport: L,
    pub(super) lanes: Vec<Lane>,
    /// From a connection to the next offer.
    pub(super) connected: bool,
}

impl<L: Lanes, M: Reached> Shared<L, M> {
    pub(super) const fn new(transport: L, lanes: Vec<Lane>, memory: M) -> Self {
        Self {
            work: Mutex::new(Work { transport, lanes, connected: false }),
            memory,
            wanted: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Work<L>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the control plane: between two turns of the thread.
    pub(super) fn between_turns(&self) -> MutexGuard<'_, Work<L>> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let work = self.lock();
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        work
    }

    /// Until it is told to stop.
    pub(super) fn run(self: Arc<Self>) {
        let _ending = Ending(&*self);
        let (mut idle, mut turns) = (0, 0u32);
        while !self.stop.load(Ordering::Relaxed) {
            turns = turns.wrapping_add(1);
            let moved = self.lock().turn(&self.memory, turns.is_multiple_of(LOOK));
            idle = if moved { 0 } else { idle + 1 };
            while self.wanted.load(Ordering::Relaxed) > 0 {
                thread::yield_now();
            }
            if idle > PATIENCE {
                idle = PATIENCE;
                thread::yield_now();
            } else if idle > 0 {
                std::hint::spin_loop();
            }
        }
    }
}

impl<L: Lanes> Work<L> {
    /// Lets every lane go on; with `look` those that broke without a verb are found, too. Whether anything moved.
    pub(super) fn turn<M: Reached>(&mut self, memory: &M, look: bool) -> bool {
        let Self { transport, lanes, connected } = self;
        if !*connected {
            return false;
        }
        transport.progress();
        let mut moved = false;
        for lane in lanes {
            moved |= lane.turn(memory, transport);
            if look
                && lane.fault.is_none()
                && let Some(fault) = transport.broken(lane.id.peer)
            {
                lane.fail(memory, fault);
            }
        }
        moved
    }
}

/// Tells all lanes that nobody posts any more, however the thread ends.
struct Ending<'a, L: Lanes, M: Reached>(&'a Shared<L, M>);

impl<L: Lanes, M: Reached> Drop for Ending<'_, L, M> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
        self.0.lock().lanes.iter().for_each(|lane| lane.fifo.end(&self.0.memory, FarStatus::Gone));
    }
}
