//! Waits and flushes: when they are over, and how they end.

use std::task::{Context, Poll};

use ep_core::port::{Cell, LaneId, Need, Ticket};
use ep_core::trace::Verb;
use ep_core::{Fault, Nanos, Rank};

use super::World;
use super::ports::{NONE, Parked, Slot};

impl World {
    /// Starts a wait.
    pub(crate) fn begin_wait(
        &mut self,
        port: u32,
        needs: &[Need],
        context: &Context<'_>,
    ) -> Poll<Result<usize, Fault>> {
        let Slot { rank, role, .. } = self.slots[port as usize];
        if let Some(need) = needs.iter().find(|need| !self.layout.has_cell(need.cell)) {
            self.broken("F8", (rank, role), format!("waits for {:?}, which is not in the layout", need.cell));
            return Poll::Pending;
        }
        if let Some(need) = needs.first() {
            self.record(port, Verb::Wait { cell: need.cell, at_least: need.at_least });
        }
        self.slots[port as usize].since = self.now;
        if let Some(outcome) = self.evaluate(port, needs) {
            return Poll::Ready(outcome);
        }
        self.slots[port as usize].needs.clear();
        self.slots[port as usize].needs.extend_from_slice(needs);
        self.park(port, Parked::Needs, context);
        Poll::Pending
    }

    /// Polls a role that [`World::begin_wait`] parked.
    pub(crate) fn resume_wait(
        &mut self,
        port: u32,
        needs: &[Need],
        context: &Context<'_>,
    ) -> Poll<Result<usize, Fault>> {
        if !self.granted(port, context) {
            return Poll::Pending;
        }
        let outcome = self.evaluate(port, needs);
        if outcome.is_none() {
            self.park(port, Parked::Needs, context);
        }
        outcome.map_or(Poll::Pending, Poll::Ready)
    }

    /// Starts a flush of a lane.
    pub(crate) fn begin_flush(
        &mut self,
        port: u32,
        lane: LaneId,
        upto: Ticket,
        context: &Context<'_>,
    ) -> Poll<Result<(), Fault>> {
        let rank = self.slots[port as usize].rank;
        if !self.layout.has_lane(rank, lane) {
            return Poll::Ready(Err(Fault::NotOffered { verb: "flush", lane }));
        }
        let number = self.queue(rank, lane);
        self.slots[port as usize].since = self.now;
        let parked = Parked::Flush { lane: number, upto: upto.0 };
        if let Some(outcome) = self.evaluate_flush(port, number, upto.0) {
            return Poll::Ready(outcome);
        }
        self.lanes.lane_mut(number).flusher = Some(port);
        self.park(port, parked, context);
        Poll::Pending
    }

    /// Polls a role that [`World::begin_flush`] parked.
    pub(crate) fn resume_flush(
        &mut self,
        port: u32,
        lane: LaneId,
        upto: Ticket,
        context: &Context<'_>,
    ) -> Poll<Result<(), Fault>> {
        if !self.granted(port, context) {
            return Poll::Pending;
        }
        let number = self.queue(self.slots[port as usize].rank, lane);
        let outcome = self.evaluate_flush(port, number, upto.0);
        if outcome.is_none() {
            self.lanes.lane_mut(number).flusher = Some(port);
            self.park(port, Parked::Flush { lane: number, upto: upto.0 }, context);
        }
        outcome.map_or(Poll::Pending, Poll::Ready)
    }

    /// How a wait ends now, if it does.
    pub(super) fn evaluate(&mut self, port: u32, needs: &[Need]) -> Option<Result<usize, Fault>> {
        let Slot { rank, generation, deadline, since, .. } = self.slots[port as usize];
        let met = needs.iter().position(|need| self.value(rank, generation, need.cell) >= need.at_least);
        let outcome = if let Some(index) = met {
            self.acquire(port, needs[index].cell);
            Ok(index)
        } else if let Some(need) = needs.iter().find(|need| self.ranks[need.cell.writer.index()].gone()) {
            Err(need.gone())
        } else if self.now >= deadline {
            let waited = self.now - since;
            Err(Need::unmet(needs.first().map(|need| (*need, self.value(rank, generation, need.cell))), rank, waited))
        } else {
            return None;
        };
        self.record(port, Verb::Woke { index: outcome.ok() });
        Some(outcome)
    }

    /// How a flush ends now, if it does.
    fn evaluate_flush(&mut self, port: u32, number: u32, upto: u64) -> Option<Result<(), Fault>> {
        let Slot { actor, deadline, since, .. } = self.slots[port as usize];
        let lane = self.lanes.lane(number);
        let (peer, kind) = (lane.to, lane.kind);
        let id = LaneId { peer, kind };
        let outcome = match lane.unsettled(upto) {
            None => {
                if let Some(race) = &mut self.race {
                    race.flushed(actor, number, upto.min(self.lanes.lane(number).issued));
                }
                Ok(())
            }
            Some(_) if self.ranks[peer.index()].gone() => Err(Fault::PeerGone { peer, phase: kind.phase() }),
            Some(seen) if self.now >= deadline => {
                let waited = self.now - since;
                Err(Fault::Timeout { phase: kind.phase(), peer, lane: id, seen, awaited: upto, waited })
            }
            Some(_) => return None,
        };
        if outcome.is_ok() {
            self.record(port, Verb::Flushed { lane: id });
        }
        Some(outcome)
    }

    /// Makes every port of `rank` that waits for `cell`, or for anything that can no longer come, ready if its wait is over.
    pub(super) fn notify(&mut self, rank: Rank, cell: Cell, generation: u16) {
        for at in 0..self.ranks[rank.index()].ports.len() {
            let port = self.ranks[rank.index()].ports[at];
            let slot = &self.slots[port as usize];
            let met = matches!(slot.parked, Parked::Needs | Parked::Units)
                && slot.ready_at == NONE
                && slot.generation == generation
                && slot
                    .needs
                    .iter()
                    .any(|need| need.cell == cell && self.value(rank, generation, cell) >= need.at_least);
            if met {
                self.make_ready(port);
            }
        }
    }

    /// Makes the port that flushes a lane ready, if that is over.
    pub(super) fn notify_flusher(&mut self, number: u32) {
        let lane = self.lanes.lane(number);
        let Some(port) = lane.flusher else { return };
        let over = match self.slots[port as usize].parked {
            Parked::Flush { lane: flushed, upto } if flushed == number => lane.unsettled(upto).is_none(),
            _ => return,
        };
        if over {
            self.lanes.lane_mut(number).flusher = None;
            self.make_ready(port);
        }
    }

    /// Makes every waiting port ready for which `over` holds.
    pub(super) fn notify_where(&mut self, over: impl Fn(&Self, &Slot) -> bool) {
        for port in 0..self.slots.len() as u32 {
            let slot = &self.slots[port as usize];
            if slot.parked.waits() && over(self, slot) {
                self.make_ready(port);
            }
        }
    }

    /// Whether a port waits for something that only `peer` can do.
    pub(super) fn concerns(&self, slot: &Slot, peer: Rank) -> bool {
        match slot.parked {
            Parked::Needs => slot.needs.iter().any(|need| need.cell.writer == peer),
            Parked::Units => {
                let needs = || slot.needs.iter().any(|need| need.cell.writer == peer);
                slot.units.iter().any(|units| units.lane.peer == peer) || needs()
            }
            Parked::Flush { lane, .. } => self.lanes.lane(lane).to == peer,
            _ => false,
        }
    }

    /// The first deadline of a waiting port.
    pub(super) fn first_deadline(&self) -> Option<Nanos> {
        let waits = |slot: &&Slot| {
            let suspended = self.ranks[slot.rank.index()].suspension.is_on();
            slot.parked.waits() && !suspended
        };
        let waiting = self.slots.iter().filter(waits);
        waiting.map(|slot| slot.deadline).min()
    }
}
