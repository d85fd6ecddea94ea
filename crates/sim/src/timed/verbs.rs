//! What ports post.

use ep_core::port::{Cell, LaneId, LaneKind, Offset, Span, Ticket};
use ep_core::trace::Verb;
use ep_core::{Fault, Nanos, Rank, layout, topology::Reach};

use super::World;
use super::cells::Target;
use super::events::{Class, Event, Notice};
use super::links::Flight;
use super::model::Model;
use super::ports::Slot;
use crate::memory;
use crate::world::carrier;

impl World {
    pub(crate) fn put(&mut self, port: u32, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let to = to.span(from.len);
        let Some(number) = self.admit(port, "put", lane, &[from, to])? else {
            return Ok(Ticket(self.lane_number(port, lane).map_or(0, |number| self.lanes.lane(number).issued())));
        };
        self.foresee_put(number, lane.peer, to.offset);
        let rank = self.slots[port as usize].rank;
        self.record(port, Verb::Put { lane, to: to.offset.0, len: to.len });
        let bytes = self.counted(lane.kind, from.len);
        let ticket = self.ranks[rank.index()].tickets.issue(self.now, number, false);
        let state = self.lanes.lane_mut(number);
        (state.puts, state.put) = (state.puts.wrapping_add(1), ticket);
        memory::copy(&mut self.windows, (rank.index(), from.offset.0), (lane.peer.index(), to.offset.0), from.len);
        self.hand(port, ticket, Flight { lane: number, to: lane.peer, get: None, bytes });
        Ok(Ticket(ticket))
    }

    pub(crate) fn get(&mut self, port: u32, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let to = to.span(from.len);
        let rank = self.slots[port as usize].rank;
        if self.layout.has_lane(rank, lane) && self.layout.topology().reach(rank, lane.peer) == Reach::Far {
            return Err(Fault::NotOffered { verb: "get", lane });
        }
        let Some(number) = self.admit(port, "get", lane, &[from, to])? else {
            return Ok(Ticket(self.lane_number(port, lane).map_or(0, |number| self.lanes.lane(number).issued())));
        };
        memory::copy(&mut self.windows, (lane.peer.index(), from.offset.0), (rank.index(), to.offset.0), from.len);
        self.record(port, Verb::Get { lane, from: from.offset.0, len: from.len });
        let ticket = self.ranks[rank.index()].tickets.issue(self.now, number, true);
        self.lanes.lane_mut(number).get = ticket;
        let bytes = self.counted(lane.kind, from.len);
        let (from, class) = (lane.peer, Class::Near);
        let Model { post, near, .. } = self.timing.model;
        let leave = Event::Leave { from, to: rank, class, get: true, lane: number, ticket, bytes };
        self.sides[from.index()].side(class).due += 1;
        self.post(port, post, near.latency, leave);
        Ok(Ticket(ticket))
    }

    pub(crate) fn publish(&mut self, port: u32, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        let Slot { rank, role, generation, .. } = self.slots[port as usize];
        let class = self.class(rank, lane.peer);
        let carrier = match class {
            Class::Far => carrier(&self.layout, self.far_lanes, cell.lane),
            Class::Near => cell.lane,
        };
        if cell.writer != rank || carrier != lane.kind {
            self.broken("F4", (rank, role), format!("published {cell:?} on {lane}, to which it does not belong"));
            return Ok(());
        }
        if value >> layout::VALUE_BITS != 0 {
            self.broken("F4", (rank, role), format!("published {value}, which does not fit a cell"));
            return Ok(());
        }
        if !self.layout.has_lane(rank, lane) {
            return Err(Fault::NotOffered { verb: "publish", lane });
        }
        let bits = layout::stamp(generation, value);
        let target = self.target(port, lane.peer, cell);
        let published = self.cells.published_mut(target);
        if *published > bits {
            let seen = layout::value_in(generation, *published);
            self.broken("F4", (rank, role), format!("lowered {cell:?} of rank {} from {seen} to {value}", lane.peer));
            return Ok(());
        }
        *published = bits;
        self.record(port, Verb::Publish { lane, cell, value });
        let (number, after) = self.puts_before(port, lane);
        let notice = Notice { from: rank, lane: number, cell: target.cell, after, bits };
        // A rank hears at once what it tells itself.
        let latency = if lane.peer == rank { Nanos(0) } else { self.timing.model.link(class).latency };
        self.post(port, self.timing.model.publish, latency, Event::Arrive(notice));
        Ok(())
    }

    /// The role hands a put to the port of its rank, at its own time. That is an event, since other roles may hand something
    /// before; but it waits for none where the role only posts and nothing else is due.
    fn hand(&mut self, port: u32, ticket: u64, flight: Flight) {
        let Slot { rank, only_posts, .. } = self.slots[port as usize];
        let Flight { lane, to, bytes, .. } = flight;
        let class = self.class(rank, to);
        let due = &mut self.sides[rank.index()].side(class).due;
        if only_posts && *due == 0 {
            let handed = self.spend_on_post(port, self.timing.model.post);
            let left = self.leave((rank, handed), class, flight);
            self.events += 1;
            return self.settle(rank, lane, ticket, left);
        }
        *due += 1;
        let leave = Event::Leave { from: rank, to, class, get: false, lane, ticket, bytes };
        self.post(port, self.timing.model.post, Nanos(0), leave);
    }

    /// The role spends `cost` and has something more on its way; returns its time.
    fn spend_on_post(&mut self, port: u32, cost: Nanos) -> Nanos {
        let slot = &mut self.slots[port as usize];
        slot.clock = slot.clock + cost;
        self.ranks[slot.rank.index()].in_flight += 1;
        slot.clock
    }

    /// The role spends `cost`; `latency` after that the event happens.
    fn post(&mut self, port: u32, cost: Nanos, latency: Nanos, event: Event) {
        let at = self.spend_on_post(port, cost) + latency;
        self.agenda.enter(at, event);
    }

    /// The cell of `reader` that the port publishes to. Mostly it is the one that it published to last.
    fn target(&mut self, port: u32, reader: Rank, cell: Cell) -> Target {
        let Slot { generation, target, .. } = self.slots[port as usize];
        if let Some((.., target)) = target.filter(|(to, last, _)| (*to, *last) == (reader, cell)) {
            return target;
        }
        let target = self.cells.target(&self.layout, reader, cell, generation);
        self.slots[port as usize].target = Some((reader, cell, target));
        target
    }

    /// The lane of the puts that a publish follows, and how many there are.
    fn puts_before(&mut self, port: u32, lane: LaneId) -> (u32, u32) {
        let Slot { rank, lane: last, .. } = self.slots[port as usize];
        let number = match last.filter(|(id, _)| *id == lane) {
            Some((_, number)) => Some(number),
            None => self.lanes.published(&self.layout, rank, lane),
        };
        let Some(number) = number else { return (Notice::NO_LANE, 0) };
        self.slots[port as usize].lane = Some((lane, number));
        let lane = self.lanes.lane(number);
        if lane.put == 0 { (Notice::NO_LANE, 0) } else { (number, lane.puts) }
    }

    /// The link between two ranks.
    fn class(&self, rank: Rank, peer: Rank) -> Class {
        match self.layout.topology().reach(rank, peer) {
            Reach::Far => Class::Far,
            _ => Class::Near,
        }
    }

    pub(crate) fn peek(&mut self, port: u32, cell: Cell) -> u64 {
        let Slot { rank, role, generation, ref needs, .. } = self.slots[port as usize];
        // Mostly it is the cell that the role waited for last.
        if let Some(watched) = needs.first().filter(|watched| watched.need.cell == cell) {
            return layout::value_in(generation, self.cells.bits(watched.number));
        }
        if !self.layout.has_cell(cell) {
            self.broken("F8", (rank, role), format!("peeked at {cell:?}, which is not in the layout"));
            return 0;
        }
        let number = self.cells.find(&self.layout, rank, cell, generation);
        layout::value_in(generation, number.map_or(0, |number| self.cells.bits(number)))
    }

    /// The number of a lane that the port posts to, if there is such a lane.
    pub(super) fn lane_number(&mut self, port: u32, lane: LaneId) -> Option<u32> {
        let Slot { rank, lane: last, .. } = self.slots[port as usize];
        if let Some((_, number)) = last.filter(|(id, _)| *id == lane) {
            return Some(number);
        }
        if !self.layout.has_lane(rank, lane) {
            return None;
        }
        let number = self.lanes.number(&self.layout, rank, lane);
        self.slots[port as usize].lane = Some((lane, number));
        Some(number)
    }

    /// Checks a verb that posts; none when there is nothing to transfer.
    fn admit(&mut self, port: u32, verb: &'static str, lane: LaneId, spans: &[Span]) -> Result<Option<u32>, Fault> {
        let Some(number) = self.lane_number(port, lane) else { return Err(Fault::NotOffered { verb, lane }) };
        if spans.iter().any(|span| span.len == 0) {
            return Ok(None);
        }
        spans.iter().try_for_each(|span| span.within(self.layout.window_bytes()))?;
        Ok(Some(number))
    }

    /// The bytes to count for a transfer: rows travel on data lanes and, when they are pulled, on credit lanes.
    fn counted(&self, kind: LaneKind, bytes: u64) -> u64 {
        match kind {
            LaneKind::Data(_) | LaneKind::Credit(_) | LaneKind::LowRows => self.timing.elision.counted(bytes),
            _ => bytes,
        }
    }
}
