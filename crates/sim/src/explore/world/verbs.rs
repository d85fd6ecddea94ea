//! What ports and windows do at once: post effects, read and write the own window.

use ep_core::port::{Cell, Duty, LaneId, Offset, Role, Span, Ticket};
use ep_core::trace::Verb;
use ep_core::{Fault, Nanos, Rank, layout, topology::Reach};

use super::World;
use super::ports::Slot;
use crate::explore::lane::{NEVER, Publish, Transfer};
use crate::explore::race::End;
use crate::violation::AccessKind;

/// What becomes of an effect that was posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Passage {
    /// It may be delivered from then on.
    Due(Nanos),
    /// It vanishes.
    Lost,
}

impl World {
    pub(crate) fn put(&mut self, port: u32, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let to = to.span(from.len);
        let Some((number, passage)) = self.admit(port, "put", lane, &[from, to])? else {
            return Ok(self.last_ticket(port, lane));
        };
        let Slot { rank, actor, .. } = self.slots[port as usize];
        let ticket = match passage {
            Passage::Due(due) => self.transfer(number, Transfer { due, ..Transfer::put(from, to) }),
            Passage::Lost => {
                let lane = self.lanes.lane_mut(number);
                lane.issued += 1;
                lane.issued
            }
        };
        if let Some(race) = &mut self.race {
            let (source, target) = (End { window: rank, span: from }, End { window: lane.peer, span: to });
            let touched = race.put(actor, number, ticket, source, target);
            self.check(touched);
        }
        self.record(port, Verb::Put { lane, to: to.offset.0, len: to.len });
        Ok(Ticket(ticket))
    }

    pub(crate) fn get(&mut self, port: u32, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let to = to.span(from.len);
        let Slot { rank, actor, .. } = self.slots[port as usize];
        if self.layout.has_lane(rank, lane) && self.layout.topology().reach(rank, lane.peer) == Reach::Far {
            return Err(Fault::NotOffered { verb: "get", lane });
        }
        let Some((number, passage)) = self.admit(port, "get", lane, &[from, to])? else {
            return Ok(self.last_ticket(port, lane));
        };
        let due = match passage {
            Passage::Due(due) if !self.ranks[lane.peer.index()].crashed => due,
            // Unlike a put, a get that vanished is noticed: its bytes never come.
            _ => NEVER,
        };
        let ticket = self.transfer(number, Transfer { get: true, due, ..Transfer::put(from, to) });
        if let Some(race) = &mut self.race {
            let (source, target) = (End { window: lane.peer, span: from }, End { window: rank, span: to });
            let touched = race.get(actor, number, ticket, source, target);
            self.check(touched);
        }
        self.record(port, Verb::Get { lane, from: from.offset.0, len: from.len });
        Ok(Ticket(ticket))
    }

    pub(crate) fn publish(&mut self, port: u32, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        let Slot { rank, role, generation, actor, .. } = self.slots[port as usize];
        if cell.writer != rank || cell.lane != lane.kind {
            self.broken("F4", (rank, role), format!("published {cell:?} on {lane}, to which it does not belong"));
            return Ok(());
        }
        if value >> layout::VALUE_BITS != 0 {
            self.broken("F4", (rank, role), format!("published {value}, which does not fit a cell"));
            return Ok(());
        }
        // A cell has eight bytes: a span that is never empty, in every layout that has the lane.
        let Some((number, passage)) = self.admit(port, "publish", lane, &[])? else { return Ok(()) };
        let at = self.layout.cell(cell, generation).0;
        let bits = layout::stamp(generation, value);
        let before = self.last_published(number, at);
        if before > bits {
            let seen = layout::value_in(generation, before);
            self.broken("F4", (rank, role), format!("lowered {cell:?} of rank {} from {seen} to {value}", lane.peer));
            return Ok(());
        }
        let issued = self.lanes.lane(number).issued;
        let carried = self.race.as_mut().map(|race| race.publish(actor, number, issued)).unwrap_or_default();
        if let Passage::Due(due) = passage {
            let lane = self.lanes.lane_mut(number);
            let blockers = lane.puts();
            lane.publishes.push_back(Publish { cell, at, generation, bits, after: issued, blockers, due, carried });
            lane.late |= due > self.now;
            self.lanes.update(number, self.now);
        }
        self.record(port, Verb::Publish { lane, cell, value });
        Ok(())
    }

    pub(crate) fn peek(&mut self, port: u32, cell: Cell) -> u64 {
        if !self.layout.has_cell(cell) {
            let Slot { rank, role, .. } = self.slots[port as usize];
            self.broken("F8", (rank, role), format!("peeked at {cell:?}, which is not in the layout"));
            return 0;
        }
        self.acquire(port, cell)
    }

    /// Copies out of a rank's window, for a port or its main line.
    pub(crate) fn read(&mut self, who: (Rank, Option<u32>), from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        let span = from.span(into.len() as u64);
        span.within(self.layout.window_bytes())?;
        self.windows[who.0.index()].read(from.0, into);
        self.touched(who, AccessKind::Read, span);
        Ok(())
    }

    /// Copies into a rank's window, for a port or its main line.
    pub(crate) fn write(&mut self, who: (Rank, Option<u32>), to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        let span = to.span(bytes.len() as u64);
        span.within(self.layout.window_bytes())?;
        self.windows[who.0.index()].write(to.0, bytes);
        self.touched(who, AccessKind::Write, span);
        Ok(())
    }

    fn touched(&mut self, (rank, port): (Rank, Option<u32>), kind: AccessKind, span: Span) {
        if span.len == 0 || self.race.is_none() {
            return;
        }
        let actor = self.actor(rank, port);
        if let Some(race) = &mut self.race {
            let touched = race.access(actor, kind, span);
            self.check(touched);
        }
    }

    /// Checks a verb that posts an effect, and counts it against the faults; none when there is nothing to transfer.
    pub(super) fn admit(
        &mut self,
        port: u32,
        verb: &'static str,
        lane: LaneId,
        spans: &[Span],
    ) -> Result<Option<(u32, Passage)>, Fault> {
        let Slot { rank, role, actor, .. } = self.slots[port as usize];
        if !self.layout.has_lane(rank, lane) {
            return Err(Fault::NotOffered { verb, lane });
        }
        if spans.iter().any(|span| span.len == 0) {
            return Ok(None);
        }
        spans.iter().try_for_each(|span| span.within(self.layout.window_bytes()))?;
        if self.ranks[lane.peer.index()].gone() {
            return Err(Fault::PeerGone { peer: lane.peer, phase: lane.kind.phase() });
        }
        let number = self.queue(rank, lane);
        self.check_poster(number, (rank, role), lane);
        if let Some(other) = self.race.as_mut().and_then(|race| race.posts(actor, number)) {
            let other = other.1.map_or_else(|| "main line".into(), |role| role.to_string());
            self.broken("F4", (rank, role), format!("posted on {lane} at the same time as {other}"));
        }
        let queue = self.lanes.lane(number).kind;
        Ok(Some((number, self.passage(rank, lane.peer, queue))))
    }

    /// A queue that lanes share has one poster: its coordinator, or in a test of verbs the first that posts.
    fn check_poster(&mut self, number: u32, (rank, role): (Rank, Role), lane: LaneId) {
        let Some(coordinator) = self.far_lanes.coordinator(&self.layout, rank, lane) else { return };
        let first = if role.duty == Duty::Probe { role } else { coordinator };
        let poster = *self.lanes.lane_mut(number).poster.get_or_insert(first);
        if poster != role {
            self.broken("F4", (rank, role), format!("posted on {lane}, whose queue admits one poster: {poster}"));
        }
    }

    pub(super) fn last_ticket(&mut self, port: u32, lane: LaneId) -> Ticket {
        let number = self.queue(self.slots[port as usize].rank, lane);
        Ticket(self.lanes.lane(number).issued)
    }

    pub(super) fn transfer(&mut self, number: u32, transfer: Transfer) -> u64 {
        let lane = self.lanes.lane_mut(number);
        let ticket = lane.post(transfer);
        lane.late |= transfer.due > self.now;
        self.lanes.update(number, self.now);
        ticket
    }

    /// The bits that were last published to the cell at `at` of the lane's peer, delivered or not.
    fn last_published(&self, number: u32, at: u64) -> u64 {
        let lane = self.lanes.lane(number);
        let waiting = lane.publishes.iter().rev().find(|publish| publish.at == at);
        waiting.map_or_else(|| self.windows[lane.to.index()].load(at), |publish| publish.bits)
    }
}
