//! What ports post.

use ep_core::port::{Cell, Counter, LaneId, LaneKind, Offset, Span, Ticket};
use ep_core::trace::Verb;
use ep_core::{Fault, Nanos, Rank, layout, topology::Reach};

use super::World;
use super::events::{Class, Event, Notice};
use super::links::{Departure, Flight};
use super::mail::Publish;
use super::model::Model;
use super::ports::Slot;
use crate::memory;

/// The numbers of the ends of a lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ends {
    pub(super) posted: u32,
    /// Where it leads to; none in another partition.
    pub(super) reached: Option<u32>,
}

/// The numbers of what a publish raises: what was last published, and the cell, unless that is in another partition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    published: u32,
    cell: Option<u32>,
}

/// What a put hands to the port of its rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handed {
    pub(super) queue: LaneId,
    /// Where it leads to; none in another partition.
    pub(super) reached: Option<u32>,
    pub(super) ticket: u64,
    /// As counted.
    pub(super) bytes: u64,
}

impl World {
    pub(crate) fn put(&mut self, port: u32, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let to = to.span(from.len);
        let Some(Ends { posted, reached }) = self.admit(port, "put", lane, &[from, to])? else {
            return Ok(self.last_ticket(port, lane));
        };
        if reached.is_some() {
            self.foresee_put(posted, lane.peer, to.offset);
        }
        let rank = self.slots[port as usize].rank;
        self.record(port, Verb::Put { lane, to: to.offset.0, len: to.len });
        let bytes = self.counted(lane.kind, from.len);
        let ticket = self.ranks[rank].tickets.issue(self.now, posted, false);
        let state = self.lanes.posted_mut(posted);
        (state.puts, state.put) = (state.puts.wrapping_add(1), ticket);
        if reached.is_some() {
            let (source, target) = (self.windows.place(rank), self.windows.place(lane.peer));
            let windows = self.windows.as_mut_slice();
            memory::copy(windows, (source, from.offset.0), (target, to.offset.0), from.len);
        } else {
            self.mail_bytes((rank, from.offset), (lane.peer, to.offset), from.len);
        }
        self.hand(port, Handed { queue: self.queue(rank, lane), reached, ticket, bytes });
        Ok(Ticket(ticket))
    }

    /// What a put or get of nothing is as far as.
    pub(super) fn last_ticket(&mut self, port: u32, lane: LaneId) -> Ticket {
        Ticket(self.ends(port, lane).map_or(0, |ends| self.lanes.posted(ends.posted).issued()))
    }

    pub(crate) fn get(&mut self, port: u32, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let to = to.span(from.len);
        let rank = self.slots[port as usize].rank;
        if self.layout.has_lane(rank, lane) && self.layout.topology().reach(rank, lane.peer) == Reach::Far {
            return Err(Fault::NotOffered { verb: "get", lane });
        }
        let Some(Ends { posted: number, .. }) = self.admit(port, "get", lane, &[from, to])? else {
            return Ok(self.last_ticket(port, lane));
        };
        let (source, target) = (self.windows.place(lane.peer), self.windows.place(rank));
        memory::copy(self.windows.as_mut_slice(), (source, from.offset.0), (target, to.offset.0), from.len);
        self.record(port, Verb::Get { lane, from: from.offset.0, len: from.len });
        let ticket = self.ranks[rank].tickets.issue(self.now, number, true);
        self.lanes.posted_mut(number).get = ticket;
        let bytes = self.counted(lane.kind, from.len);
        let (from, class) = (lane.peer, Class::Near);
        let Model { post, near, .. } = self.timing.model;
        let leave = Event::Leave { from, to: rank, class, get: true, lane: number, ticket, bytes };
        self.sides[from].side(class).due += 1;
        self.ranks[rank].in_flight += 1;
        self.post(port, post, near.latency, leave);
        Ok(Ticket(ticket))
    }

    pub(crate) fn publish(&mut self, port: u32, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        let Slot { rank, role, generation, .. } = self.slots[port as usize];
        let class = self.class(rank, lane.peer);
        if cell.writer != rank || cell.lane != lane.kind {
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
        let published = self.cells.published_mut(target.published);
        if *published > bits {
            let seen = layout::value_in(generation, *published);
            self.broken("F4", (rank, role), format!("lowered {cell:?} of rank {} from {seen} to {value}", lane.peer));
            return Ok(());
        }
        *published = bits;
        self.record(port, Verb::Publish { lane, cell, value });
        if cell.counter == Counter::Alarm && class == Class::Near {
            // Its writer looks at it from afar when it gives up the reader. Bytes lie there from when they are posted, as a put's do.
            let (peer, at) = (self.windows.place(lane.peer), self.layout.cell(cell, generation).0);
            self.windows.as_mut_slice()[peer].store(at, bits);
        }
        let before = self.puts_before(port, lane);
        let cost = self.timing.model.publish;
        // A rank hears at once what it tells itself.
        let latency = if lane.peer == rank { Nanos(0) } else { self.timing.model.link(class).latency };
        if let Some(cell) = target.cell {
            let (number, after) =
                before.map_or((Notice::NO_LANE, 0), |(ends, puts)| (ends.reached.unwrap_or(Notice::NO_LANE), puts));
            self.ranks[rank].in_flight += 1;
            self.post(port, cost, latency, Event::Arrive(Notice { from: rank, lane: number, cell, after, bits }));
        } else {
            let at = self.spend_on_post(port, cost) + latency;
            let after = before.map(|(_, puts)| puts);
            self.goes_abroad(rank, lane.peer);
            let lane = self.queue(rank, lane);
            self.mail_publish(Publish { at, from: rank, lane, cell, generation, after, bits });
        }
        Ok(())
    }

    /// The role hands a put to the port of its rank, at its own time. That is an event, since other roles may hand something
    /// before; but it waits for none where the role only posts and nothing else is due.
    pub(super) fn hand(&mut self, port: u32, handed: Handed) {
        let Slot { rank, only_posts, .. } = self.slots[port as usize];
        let Handed { queue, reached, ticket, bytes } = handed;
        let class = self.class(rank, queue.peer);
        match reached {
            Some(_) => self.ranks[rank].in_flight += 1,
            None => self.goes_abroad(rank, queue.peer),
        }
        let due = &mut self.sides[rank].side(class).due;
        let at_once = only_posts && *due == 0;
        *due += u32::from(!at_once);
        let cost = self.timing.model.post;
        if at_once {
            let now = self.spend_on_post(port, cost);
            let left = match reached {
                Some(number) => {
                    self.leave((rank, now), class, Flight { lane: number, to: queue.peer, get: None, bytes })
                }
                None => self.leave_abroad((rank, now), Departure { lane: queue, bytes }),
            };
            self.events += 1;
            return self.settle(rank, ticket, left);
        }
        let leave = match reached {
            Some(number) => Event::Leave { from: rank, to: queue.peer, class, get: false, lane: number, ticket, bytes },
            None => Event::LeaveAbroad { from: rank, lane: queue, ticket, bytes },
        };
        self.post(port, cost, Nanos(0), leave);
    }

    /// The role spends `cost` on posting; returns its time.
    fn spend_on_post(&mut self, port: u32, cost: Nanos) -> Nanos {
        let begin = self.clock(port);
        let slot = &mut self.slots[port as usize];
        slot.clock = begin + cost;
        slot.clock
    }

    /// The role spends `cost` on posting something that happens `latency` later.
    fn post(&mut self, port: u32, cost: Nanos, latency: Nanos, event: Event) {
        let at = self.spend_on_post(port, cost) + latency;
        self.agenda.enter(at, event);
    }

    /// What the port publishes to. Mostly it is what it published to last.
    fn target(&mut self, port: u32, reader: Rank, cell: Cell) -> Target {
        let Slot { generation, target, .. } = self.slots[port as usize];
        if let Some((.., target)) = target.filter(|(to, last, _)| (*to, *last) == (reader, cell)) {
            return target;
        }
        let published = self.cells.published_number(&self.layout, reader, cell, generation);
        let here = self.ranks.has(reader);
        let cell_number = here.then(|| self.cells.number(&self.layout, reader, cell, generation));
        let target = Target { published, cell: cell_number };
        self.slots[port as usize].target = Some((reader, cell, target));
        target
    }

    /// The lane of the puts that a publish follows, and how many there are, if it ever had any.
    fn puts_before(&mut self, port: u32, lane: LaneId) -> Option<(Ends, u32)> {
        let Slot { rank, lane: last, .. } = self.slots[port as usize];
        let ends = match last.filter(|(id, _)| *id == lane) {
            Some((_, ends)) => ends,
            None => {
                let posted = self.lanes.published(&self.layout, rank, self.queue(rank, lane))?;
                self.remember_ends(port, lane, posted)
            }
        };
        let posted = self.lanes.posted(ends.posted);
        (posted.put > 0).then_some((ends, posted.puts))
    }

    /// The queue that takes what `rank` posts on `lane`. Lanes that share one are one lane here.
    fn queue(&self, rank: Rank, lane: LaneId) -> LaneId {
        self.far_lanes.queue(&self.layout, rank, lane)
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

    /// The ends of a lane that the port posts to, if there is such a lane.
    pub(super) fn ends(&mut self, port: u32, lane: LaneId) -> Option<Ends> {
        let Slot { rank, lane: last, .. } = self.slots[port as usize];
        if let Some((_, ends)) = last.filter(|(id, _)| *id == lane) {
            return Some(ends);
        }
        if !self.layout.has_lane(rank, lane) {
            return None;
        }
        let posted = self.lanes.posted_number(&self.layout, rank, self.queue(rank, lane));
        Some(self.remember_ends(port, lane, posted))
    }

    /// Finds the other end of a lane that the port posts to, and notes both.
    fn remember_ends(&mut self, port: u32, lane: LaneId, posted: u32) -> Ends {
        let rank = self.slots[port as usize].rank;
        let here = self.ranks.has(lane.peer);
        let reached = here.then(|| self.lanes.reached_number(&self.layout, rank, self.queue(rank, lane)));
        let ends = Ends { posted, reached };
        self.slots[port as usize].lane = Some((lane, ends));
        ends
    }

    /// Checks a verb that posts; none when there is nothing to transfer.
    pub(super) fn admit(
        &mut self,
        port: u32,
        verb: &'static str,
        lane: LaneId,
        spans: &[Span],
    ) -> Result<Option<Ends>, Fault> {
        let Some(ends) = self.ends(port, lane) else { return Err(Fault::NotOffered { verb, lane }) };
        if spans.iter().any(|span| span.len == 0) {
            return Ok(None);
        }
        spans.iter().try_for_each(|span| span.within(self.layout.window_bytes()))?;
        Ok(Some(ends))
    }

    /// The bytes to count for a transfer: rows travel on data lanes and, when they are pulled, on credit lanes.
    pub(super) fn counted(&self, kind: LaneKind, bytes: u64) -> u64 {
        match kind {
            LaneKind::Data(_) | LaneKind::Credit(_) | LaneKind::LowRows => self.timing.elision.counted(bytes),
            _ => bytes,
        }
    }
}
