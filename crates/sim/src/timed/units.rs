//! Units: a put of them is a put whose end is seen without a publish, and which counts 16 bytes for every 12.
//!
//! Their bytes are copied when they are posted, as those of puts are; which of them have come stands in a table of its own.

use std::collections::BTreeMap;
use std::task::{Context, Poll};

use ep_core::port::{
    LaneId, Need, Offset, Span, Tag, Ticket, UNIT_BYTES, UNIT_DATA, Units, pack_unit, unit_bytes, unit_count,
    unpack_unit,
};
use ep_core::trace::Verb;
use ep_core::{Fault, Rank, layout, topology::Reach};

use super::World;
use super::events::{Event, Notice};
use super::ports::{Held, Slot};
use super::verbs::{Ends, Handed};

/// A put of units that is on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posted {
    to: Rank,
    span: Span,
    tag: Tag,
}

/// The units that have come to one rank, by their first bytes: where those of one tag end.
#[derive(Debug, Default)]
pub(super) struct Come {
    runs: BTreeMap<u64, (u64, Tag)>,
}

impl Come {
    /// Units have come, over whatever lay there.
    fn add(&mut self, span: Span, tag: Tag) {
        let (start, end) = (span.offset.0, span.end());
        let before = self.runs.range(..start).next_back().map(|(&at, &run)| (at, run));
        if let Some((at, (until, old))) = before.filter(|(_, (until, _))| *until > start) {
            self.runs.insert(at, (start, old));
            if until > end {
                self.runs.insert(end, (until, old));
            }
        }
        let covered: Vec<u64> = self.runs.range(start..end).map(|(&at, _)| at).collect();
        for at in covered {
            if let Some((until, old)) = self.runs.remove(&at).filter(|(until, _)| *until > end) {
                self.runs.insert(end, (until, old));
            }
        }
        self.runs.insert(start, (end, tag));
    }

    /// How many units of a range have come with this tag.
    fn count(&self, span: Span, tag: Tag) -> u64 {
        let (start, end) = (span.offset.0, span.end());
        let first = self.runs.range(..start).next_back().map_or(start, |(&at, _)| at);
        let within = self.runs.range(first..end).filter(|(_, (_, of))| *of == tag);
        within.map(|(&at, &(until, _))| until.min(end).saturating_sub(at.max(start)) / UNIT_BYTES).sum()
    }
}

impl World {
    pub(crate) fn put_units(
        &mut self,
        port: u32,
        lane: LaneId,
        from: Span,
        to: Offset,
        tag: Tag,
    ) -> Result<Ticket, Fault> {
        let (verb, to) = ("put of units", to.span(unit_bytes(from.len)));
        let Slot { rank, role, .. } = self.slots[port as usize];
        self.near_lane(rank, verb, lane)?;
        let Some(Ends { posted, reached }) = self.admit(port, verb, lane, &[from, to])? else {
            return Ok(self.last_ticket(port, lane));
        };
        if !to.offset.0.is_multiple_of(UNIT_BYTES) {
            self.broken("F11", (rank, role), format!("put units to {}, which is no place of a unit", to.offset.0));
            return Ok(self.last_ticket(port, lane));
        }
        self.record(port, Verb::Put { lane, to: to.offset.0, len: to.len });
        let bytes = unit_bytes(self.counted(lane.kind, from.len));
        let ticket = self.ranks[rank].tickets.issue(self.now, posted, false);
        let state = self.lanes.posted_mut(posted);
        (state.puts, state.put) = (state.puts.wrapping_add(1), ticket);
        let after = state.puts;
        let mut data = [0; UNIT_DATA as usize];
        for (first, at) in (0..from.len).step_by(UNIT_DATA as usize).zip((to.offset.0..).step_by(UNIT_BYTES as usize)) {
            let data = &mut data[..(from.len - first).min(UNIT_DATA) as usize];
            self.windows[rank].read(from.offset.0 + first, data);
            self.windows[lane.peer].write(at, &pack_unit(data, tag));
        }
        self.hand(port, Handed { queue: lane, reached, ticket, bytes });
        let number = self.units.add(Posted { to: lane.peer, span: to, tag });
        let at = self.clock(port) + self.timing.model.near.latency;
        self.ranks[rank].in_flight += 1;
        let lane = reached.unwrap_or(Notice::NO_LANE);
        let notice = Notice { from: rank, lane, cell: Notice::UNITS, after, bits: number.into() };
        self.agenda.enter(at, Event::Arrive(notice));
        Ok(Ticket(ticket))
    }

    /// A put of units is there, all of it.
    pub(super) fn come(&mut self, number: u32) {
        let Posted { to, span, tag } = self.units.take(number);
        self.ranks[to].come.add(span, tag);
        for at in 0..self.ranks[to].polling.len() {
            let port = self.ranks[to].polling[at];
            let Slot { held, units, .. } = &self.slots[port as usize];
            if *held == Held::Units && units.iter().any(|units| self.have_come(to, units)) {
                self.wake(port);
            }
        }
    }

    fn have_come(&self, rank: Rank, units: &Units) -> bool {
        self.units_seen(rank, units) == unit_count(units.len)
    }

    pub(crate) fn poll_units(&self, port: u32, units: &Units, into: &mut [u8]) -> Result<bool, Fault> {
        let Slot { rank, .. } = self.slots[port as usize];
        self.check_units(rank, "poll of units", units)?;
        let mut unit = [0; UNIT_BYTES as usize];
        let places = (units.at.0..).step_by(UNIT_BYTES as usize);
        let seen = into.chunks_mut(UNIT_DATA as usize).zip(places).all(|(place, at)| {
            self.windows[rank].read(at, &mut unit);
            unpack_unit(&unit, units.tag).is_some_and(|data| {
                place.copy_from_slice(&data[..place.len()]);
                true
            })
        });
        Ok(seen && self.have_come(rank, units))
    }

    /// Starts a wait for units at the port's clock.
    pub(crate) fn begin_wait_units(
        &mut self,
        port: u32,
        units: &[Units],
        or: &[Need],
        context: &Context<'_>,
    ) -> Poll<Result<usize, Fault>> {
        let Slot { rank, role, .. } = self.slots[port as usize];
        if let Some(fault) = units.iter().find_map(|units| self.check_units(rank, "wait for units", units).err()) {
            return Poll::Ready(Err(fault));
        }
        if let Some(need) = or.iter().find(|need| !self.layout.has_cell(need.cell)) {
            self.broken("F8", (rank, role), format!("waits for {:?}, which is not in the layout", need.cell));
            return Poll::Pending;
        }
        self.watch(port, or);
        let slot = &mut self.slots[port as usize];
        slot.units.clear();
        slot.units.extend_from_slice(units);
        slot.since = self.now;
        self.end_wait_units(port, context)
    }

    /// Polls a role that [`World::begin_wait_units`] held.
    pub(crate) fn resume_wait_units(&mut self, port: u32, context: &Context<'_>) -> Poll<Result<usize, Fault>> {
        if self.granted(port, context) { self.end_wait_units(port, context) } else { Poll::Pending }
    }

    /// Ends a wait for units if it is over, or holds the role.
    fn end_wait_units(&mut self, port: u32, context: &Context<'_>) -> Poll<Result<usize, Fault>> {
        let Slot { rank, generation, deadline, since, needs, units, .. } = &self.slots[port as usize];
        let (rank, deadline, waited) = (*rank, *deadline, self.now - *since);
        let value = |number: u32| layout::value_in(*generation, self.cells.bits(number));
        let met = || needs.iter().position(|watched| value(watched.number) >= watched.need.at_least);
        let come = units.iter().position(|units| self.have_come(rank, units));
        let outcome = if let Some(index) = come.or_else(|| met().map(|at| units.len() + at)) {
            Ok(index)
        } else if self.now < deadline {
            self.ranks[rank].polling.push(port);
            self.hold(port, Held::Units, context);
            return Poll::Pending;
        } else {
            let first = needs.first().map(|watched| (watched.need, value(watched.number)));
            let unmet = units.first().map(|units| units.unmet(self.units_seen(rank, units), waited));
            Err(unmet.unwrap_or_else(|| Need::unmet(first, rank, waited)))
        };
        let came = come.map(|index| units[index]);
        if outcome.is_ok() {
            self.slots[port as usize].clock = self.now + self.timing.model.poll;
        }
        if let Some(Units { lane, len, .. }) = came {
            self.record(port, Verb::Units { lane, len, waited });
        }
        Poll::Ready(outcome)
    }

    /// How many of the units that a port waits for have come.
    pub(super) fn units_seen(&self, rank: Rank, units: &Units) -> u64 {
        self.ranks[rank].come.count(units.span(), units.tag)
    }

    /// Refuses to look for units where none can come.
    fn check_units(&self, rank: Rank, verb: &'static str, units: &Units) -> Result<(), Fault> {
        self.near_lane(rank, verb, units.lane)?;
        units.span().within(self.layout.window_bytes())
    }

    /// Units come by near lanes only, and so from the same partition.
    fn near_lane(&self, rank: Rank, verb: &'static str, lane: LaneId) -> Result<(), Fault> {
        let has = self.layout.has_lane(rank, lane) && self.layout.topology().reach(rank, lane.peer) != Reach::Far;
        if has { Ok(()) } else { Err(Fault::NotOffered { verb, lane }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_later_lies_over_what_came_before() {
        let (mut come, [old, new]) = (Come::default(), [Tag::of(1), Tag::of(3)]);
        let span = |first: u64, units: u64| Offset(first * UNIT_BYTES).span(units * UNIT_BYTES);
        come.add(span(10, 10), old);
        assert_eq!((come.count(span(0, 40), old), come.count(span(12, 3), old)), (10, 3));
        come.add(span(14, 2), new);
        assert_eq!((come.count(span(10, 10), old), come.count(span(10, 10), new)), (8, 2));
        come.add(span(8, 8), new);
        assert_eq!((come.count(span(0, 40), old), come.count(span(0, 40), new)), (4, 8));
        come.add(span(0, 40), old);
        assert_eq!((come.count(span(0, 40), old), come.runs.len()), (40, 1));
        assert_eq!(come.count(span(20, 0), old), 0);
    }
}
