//! Injected faults, and what a rank does to stop its lanes.

use ep_core::port::{LaneId, LaneKind, Scope};
use ep_core::{Nanos, Rank};

use super::World;
use super::suspend::Suspension;
use super::verbs::Passage;
use crate::explore::lane::NEVER;
use ep_core::incident::Incident;

/// A fault of lanes, and the effects it has seen.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneFault {
    from: Rank,
    to: Rank,
    /// The queue that it hits, by its first lane; none: all.
    queue: Option<LaneKind>,
    after: u64,
    seen: u64,
    /// How late effects are; none: they vanish.
    by: Option<Nanos>,
}

impl World {
    pub(super) fn inject(&mut self, incident: &Incident) {
        match *incident {
            Incident::Delay { from, to, kind, by, after } => {
                let queue = self.queue_hit(from, to, kind);
                self.lane_faults.push(LaneFault { from, to, queue, after, seen: 0, by: Some(by) });
            }
            Incident::LoseLane { from, to, kind, after } => {
                let queue = self.queue_hit(from, to, kind);
                self.lane_faults.push(LaneFault { from, to, queue, after, seen: 0, by: None });
            }
            Incident::Crash { rank, after, noticed } => {
                let state = &mut self.ranks[rank.index()];
                state.crash_after = after;
                state.noticed = noticed;
            }
            Incident::Suspend { rank, after } => {
                self.ranks[rank.index()].suspension = Suspension::After(after);
            }
            Incident::Exit { rank } => self.ranks[rank.index()].exits = true,
            Incident::Starve { rank } => self.ranks[rank.index()].starved = true,
        }
    }

    /// What befalls a lane befalls all that share its queue.
    fn queue_hit(&self, from: Rank, peer: Rank, kind: Option<LaneKind>) -> Option<LaneKind> {
        kind.map(|kind| self.far_lanes.queue(&self.layout, from, LaneId { peer, kind }).kind)
    }

    /// What becomes of an effect that is posted to a queue now.
    pub(super) fn passage(&mut self, from: Rank, to: Rank, queue: LaneKind) -> Passage {
        let mut passage = Passage::Due(self.now);
        for fault in &mut self.lane_faults {
            if (fault.from, fault.to) != (from, to) || fault.queue.is_some_and(|hit| hit != queue) {
                continue;
            }
            fault.seen += 1;
            if fault.seen <= fault.after {
                continue;
            }
            self.disturbed = true;
            passage = match (passage, fault.by) {
                (Passage::Due(due), Some(by)) => Passage::Due(due.max(self.now + by)),
                _ => Passage::Lost,
            };
        }
        passage
    }

    /// The rank dies: what it has in flight lands or vanishes, and its future is to be dropped.
    pub(super) fn crash(&mut self, rank: Rank) {
        self.disturbed = true;
        self.crashing = Some(rank);
        self.ranks[rank.index()].crashed = true;
        self.running -= 1;
        self.settle(rank, Scope::All);
        self.hang_up(rank);
    }

    /// The rank's process ends well: everything that it posted arrives, then its peers learn that it is gone.
    pub(super) fn exit(&mut self, rank: Rank) {
        self.disturbed = true;
        let numbers: Vec<u32> = self.lanes.of(rank).collect();
        numbers.into_iter().for_each(|number| self.deliver_all(number));
        let state = &mut self.ranks[rank.index()];
        state.crashed = true;
        state.noticed = true;
        self.hang_up(rank);
    }

    /// The rank is no more: gets from it never come, and who waits for it hears so if that is noticed.
    fn hang_up(&mut self, rank: Rank) {
        for number in 0..self.lanes.len() {
            let lane = self.lanes.lane_mut(number);
            if lane.to == rank {
                lane.late = true;
                lane.transfers.iter_mut().filter(|transfer| transfer.get).for_each(|transfer| transfer.due = NEVER);
                self.lanes.update(number, self.now);
            }
        }
        if self.ranks[rank.index()].gone() {
            self.notify_where(|world, slot| world.concerns(slot, rank));
        }
    }

    /// The rank stops lanes.
    pub(crate) fn reset(&mut self, rank: Rank, scope: Scope) {
        if !self.ranks[rank.index()].crashed {
            self.settle(rank, scope);
        }
    }
}
