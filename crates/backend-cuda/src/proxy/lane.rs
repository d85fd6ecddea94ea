//! One lane of the proxy: from its FIFO to the transport, and back.

use std::collections::VecDeque;

use ep_core::device::FarStatus;
use ep_core::port::{LaneId, LaneKind, Ticket};
use ep_core::transport::Lanes;
use ep_core::{Error, Fault, LaneCause};

use super::command::Command;
use super::fifo::Taker;
use super::memory::Reached;

/// Commands of a lane that are posted before the next lane has its turn.
const BURST: usize = 32;

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) id: LaneId,
    /// The transport's queue that takes what is posted, named after its first lane.
    queue: LaneId,
    pub(super) fifo: Taker,
    /// Taken, and the transport had no room for it.
    held: Option<Command>,
    /// Commands that the transport has accepted, ever.
    posted: u64,
    /// Puts whose sources may still be read: how many commands came before each, and its ticket.
    unsettled: VecDeque<(u64, Ticket)>,
    /// What had [landed](Lanes::landed) when the transport was asked for them last; none: to be asked.
    asked: Option<u64>,
    /// What the device was told last.
    settled: u64,
    credited: u64,
    pub(super) fault: Option<Fault>,
    /// Whether anything moved since this was asked last.
    has_moved: bool,
    #[cfg(test)]
    pub(super) plant: super::tests::Plant,
}

impl Lane {
    pub(super) fn new(id: LaneId, queue: LaneId, fifo: Taker) -> Self {
        Self {
            id,
            queue,
            fifo,
            held: None,
            posted: 0,
            unsettled: VecDeque::new(),
            asked: None,
            settled: 0,
            credited: 0,
            fault: None,
            has_moved: false,
            #[cfg(test)]
            plant: super::tests::Plant::Nothing,
        }
    }

    /// Begins anew. Nobody posts.
    ///
    /// # Errors
    /// As [`Reached::write_state`].
    pub(super) fn reset<M: Reached>(&mut self, memory: &M) -> Result<(), Error> {
        let Self { held, posted, unsettled, asked, settled, credited, fault, has_moved, .. } = self;
        (*held, *posted, *asked, *settled, *credited, *fault, *has_moved) = (None, 0, None, 0, 0, None, false);
        unsettled.clear();
        self.fifo.reset(memory)
    }

    /// Nothing is posted any more, for this reason.
    pub(super) fn fail<M: Reached>(&mut self, memory: &M, fault: Fault) {
        if self.fault.is_none() {
            let status = if matches!(fault, Fault::LaneBroken { .. }) { FarStatus::Broken } else { FarStatus::Refused };
            self.fault = Some(fault);
            self.fifo.end(memory, status);
        }
        self.held = None;
        self.unsettled.clear();
    }

    pub(super) fn broken(&self, cause: LaneCause) -> Fault {
        Fault::LaneBroken { lane: self.id, cause }
    }

    /// Posts what has come, and tells the device how far its commands are. Whether anything moved.
    pub(super) fn turn<L: Lanes, M: Reached>(&mut self, memory: &M, lanes: &mut L) -> bool {
        let before = (self.fifo.taken(), self.posted, self.settled);
        if self.id.kind == LaneKind::Watch {
            self.fifo.beat(memory);
        }
        if self.fault.is_none()
            && let Err(fault) = self.post(memory, lanes).and_then(|()| self.settle(memory, lanes))
        {
            self.fail(memory, fault);
        }
        if self.fault.is_some() {
            // Read, so that a device which does not look at its lane's status is not kept.
            while self.fifo.take(memory).is_some() {}
        }
        self.credit(memory);
        let moved = before != (self.fifo.taken(), self.posted, self.settled);
        self.has_moved |= moved;
        moved
    }

    /// Whether anything was under way since this was asked last.
    pub(super) fn was_busy(&mut self) -> bool {
        std::mem::take(&mut self.has_moved) || !self.is_idle()
    }

    fn post<L: Lanes, M: Reached>(&mut self, memory: &M, lanes: &mut L) -> Result<(), Fault> {
        for _ in 0..BURST {
            let Some(command) = self.next(memory)? else { break };
            if !self.accepted(lanes, command)? {
                self.held = Some(command);
                break;
            }
        }
        Ok(())
    }

    /// The next command to post.
    fn next<M: Reached>(&mut self, memory: &M) -> Result<Option<Command>, Fault> {
        if let Some(held) = self.held.take() {
            return Ok(Some(held));
        }
        #[cfg(test)]
        if self.plant == super::tests::Plant::CreditEarly {
            self.fifo.credit(memory, u64::MAX >> 1);
        }
        #[cfg(test)]
        let taken = match self.plant {
            super::tests::Plant::Halves => self.fifo.take_by_half(memory),
            _ => self.fifo.take(memory),
        };
        #[cfg(not(test))]
        let taken = self.fifo.take(memory);
        let Some(words) = taken else { return Ok(None) };
        let refused = Fault::NotOffered { verb: "a command that is none", lane: self.id };
        Command::of(words).ok_or(refused).map(Some)
    }

    /// Whether the transport had room for it.
    fn accepted<L: Lanes>(&mut self, lanes: &mut L, command: Command) -> Result<bool, Fault> {
        let accepted = match command {
            Command::Put { from, to } => {
                let ticket = lanes.put(self.queue, from, to)?;
                self.asked = None;
                self.unsettled.extend(ticket.map(|ticket| (self.posted, ticket)));
                ticket.is_some()
            }
            Command::Publish { at, bits } => lanes.raise(self.queue, at, bits)?,
        };
        self.posted += u64::from(accepted);
        Ok(accepted)
    }

    /// Settled is what comes before the first put whose source may still be read.
    fn settle<L: Lanes, M: Reached>(&mut self, memory: &M, lanes: &mut L) -> Result<(), Fault> {
        if !self.unsettled.is_empty() {
            // Looked at before the question: what lands in between is asked for again.
            let landed = lanes.landed(self.queue.peer);
            if landed.is_none() || landed != self.asked {
                self.asked = landed;
                while let Some(&(_, ticket)) = self.unsettled.front()
                    && lanes.flush(self.queue, ticket)?
                {
                    self.unsettled.pop_front();
                }
            }
        }
        let settled = self.unsettled.front().map_or(self.posted, |&(before, _)| before);
        #[cfg(test)]
        let settled = if self.plant == super::tests::Plant::SettledEarly { self.posted } else { settled };
        if settled != self.settled {
            self.settled = settled;
            self.fifo.settle(memory, settled);
        }
        Ok(())
    }

    fn credit<M: Reached>(&mut self, memory: &M) {
        let taken = self.fifo.taken();
        #[cfg(test)]
        if self.plant == super::tests::Plant::CreditEarly {
            return;
        }
        if taken != self.credited {
            self.credited = taken;
            self.fifo.credit(memory, taken);
        }
    }

    /// Whether nothing that was taken waits for the transport.
    pub(super) fn is_idle(&self) -> bool {
        self.held.is_none() && self.unsettled.is_empty()
    }
}
