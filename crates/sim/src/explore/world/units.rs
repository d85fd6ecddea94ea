//! Units: put, delivered whole and one by one, polled and waited for.

use std::task::{Context, Poll};

use ep_core::port::{
    LaneId, Need, Offset, Span, Tag, Ticket, UNIT_BYTES, UNIT_DATA, Units, pack_unit, unit_bytes, unit_count,
    unpack_unit,
};
use ep_core::trace::Verb;
use ep_core::{Fault, Rank, topology::Reach};

use super::World;
use super::ports::{Parked, Slot};
use super::verbs::Passage;
use crate::explore::lane::Transfer;
use crate::explore::race::End;

const UNIT: usize = UNIT_BYTES as usize;

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
        let Slot { rank, role, actor, .. } = self.slots[port as usize];
        self.near_lane(rank, verb, lane)?;
        let Some((number, passage)) = self.admit(port, verb, lane, &[from, to])? else {
            return Ok(self.last_ticket(port, lane));
        };
        if !to.offset.0.is_multiple_of(UNIT_BYTES) {
            self.broken("F11", (rank, role), format!("put units to {}, which is no place of a unit", to.offset.0));
            return Ok(self.last_ticket(port, lane));
        }
        if self.units_here(lane.peer, to, tag, &mut []) > 0 {
            let tag = tag.bits();
            self.broken("F11", (rank, role), format!("put units of tag {tag} over units that bear it already"));
            return Ok(self.last_ticket(port, lane));
        }
        let ticket = match passage {
            Passage::Due(due) => self.transfer(number, Transfer { tag: Some(tag), due, ..Transfer::put(from, to) }),
            Passage::Lost => {
                let lane = self.lanes.lane_mut(number);
                lane.issued += 1;
                lane.issued
            }
        };
        if let Some(race) = &mut self.race {
            let (source, target) = (End { window: rank, span: from }, End { window: lane.peer, span: to });
            let touched = race.put_units(actor, (number, ticket), (source, target), tag);
            self.check(touched);
        }
        self.record(port, Verb::Put { lane, to: to.offset.0, len: to.len });
        Ok(Ticket(ticket))
    }

    pub(crate) fn poll_units(&mut self, port: u32, units: &Units, into: &mut [u8]) -> Result<bool, Fault> {
        let Slot { rank, actor, .. } = self.slots[port as usize];
        self.check_units(rank, "poll of units", units)?;
        let come = self.units_here(rank, units.span(), units.tag, into) == unit_count(units.len);
        if let Some(race) = &mut self.race {
            let touched = race.poll_units(actor, units.span(), units.tag, come);
            self.check(touched);
        }
        Ok(come)
    }

    /// Starts a wait for units.
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
        self.slots[port as usize].since = self.now;
        if let Some(outcome) = self.evaluate_units(port, units, or) {
            return Poll::Ready(outcome);
        }
        let slot = &mut self.slots[port as usize];
        slot.needs.clear();
        slot.needs.extend_from_slice(or);
        slot.units.clear();
        slot.units.extend_from_slice(units);
        self.park(port, Parked::Units, context);
        Poll::Pending
    }

    /// Polls a role that [`World::begin_wait_units`] parked.
    pub(crate) fn resume_wait_units(
        &mut self,
        port: u32,
        units: &[Units],
        or: &[Need],
        context: &Context<'_>,
    ) -> Poll<Result<usize, Fault>> {
        if !self.granted(port, context) {
            return Poll::Pending;
        }
        let outcome = self.evaluate_units(port, units, or);
        if outcome.is_none() {
            self.park(port, Parked::Units, context);
        }
        outcome.map_or(Poll::Pending, Poll::Ready)
    }

    /// How a wait for units ends now, if it does.
    fn evaluate_units(&mut self, port: u32, units: &[Units], or: &[Need]) -> Option<Result<usize, Fault>> {
        let Some(first) = units.first() else { return self.evaluate(port, or) };
        let Slot { rank, generation, deadline, since, .. } = self.slots[port as usize];
        if let Some(index) = units.iter().position(|units| self.have_come(rank, units)) {
            let Units { lane, len, .. } = units[index];
            self.record(port, Verb::Units { lane, len, waited: self.now - since });
            return Some(Ok(index));
        }
        if let Some(index) = or.iter().position(|need| self.value(rank, generation, need.cell) >= need.at_least) {
            self.acquire(port, or[index].cell);
            return Some(Ok(units.len() + index));
        }
        let gone = |rank: Rank| self.ranks[rank.index()].gone();
        if let Some(units) = units.iter().find(|units| gone(units.lane.peer)) {
            return Some(Err(units.gone()));
        }
        if let Some(need) = or.iter().find(|need| gone(need.cell.writer)) {
            return Some(Err(need.gone()));
        }
        let seen = self.units_here(rank, first.span(), first.tag, &mut []);
        (self.now >= deadline).then(|| Err(first.unmet(seen, self.now - since)))
    }

    /// Whether all units of a payload have come to a rank.
    fn have_come(&self, rank: Rank, units: &Units) -> bool {
        self.units_here(rank, units.span(), units.tag, &mut []) == unit_count(units.len)
    }

    /// A piece of a put of units lands. Where tests have it that the machine tears units, some land in halves: the tag with the
    /// first, like stores of 8 bytes.
    pub(super) fn deliver_units(&mut self, number: u32, piece: Transfer, tag: Tag) {
        let (from, to) = (self.lanes.lane(number).from, self.lanes.lane(number).to);
        for first in (0..piece.len).step_by(UNIT_DATA as usize) {
            let mut data = [0; UNIT_DATA as usize];
            let data = &mut data[..(piece.len - first).min(UNIT_DATA) as usize];
            self.windows[from.index()].read(piece.from + first, data);
            let (unit, at) = (pack_unit(data, tag), piece.to + first / UNIT_DATA * UNIT_BYTES);
            if self.torn_units && self.adversary.below(2) == 0 {
                self.windows[to.index()].write(at + 8, &unit[8..]);
                let len = (data.len() as u64).min(8);
                self.lanes.lane_mut(number).keep(Transfer {
                    tag: None,
                    from: piece.from + first,
                    to: at,
                    len,
                    ..piece
                });
            } else {
                self.windows[to.index()].write(at, &unit);
            }
        }
        self.notify_units(to, Offset(piece.to).span(unit_bytes(piece.len)));
    }

    /// Makes every port of `rank` ready that waits for units which have come, the last of them in `span`.
    fn notify_units(&mut self, rank: Rank, span: Span) {
        for at in 0..self.ranks[rank.index()].ports.len() {
            let port = self.ranks[rank.index()].ports[at];
            let Slot { parked, units, .. } = &self.slots[port as usize];
            let meets = |awaited: Span| awaited.offset.0 < span.end() && span.offset.0 < awaited.end();
            let come = |units: &Units| meets(units.span()) && self.have_come(rank, units);
            if *parked == Parked::Units && units.iter().any(come) {
                self.make_ready(port);
            }
        }
    }

    /// How many units of `span` bear `tag` in a rank's window. Their data goes to `into`, as far as that is long.
    pub(super) fn units_here(&self, rank: Rank, span: Span, tag: Tag, into: &mut [u8]) -> u64 {
        let mut places = into.chunks_mut(UNIT_DATA as usize);
        let (mut unit, mut come) = ([0; UNIT], 0);
        for at in (span.offset.0..span.end()).step_by(UNIT) {
            self.windows[rank.index()].read(at, &mut unit);
            let place = places.next();
            if let Some(data) = unpack_unit(&unit, tag) {
                place.into_iter().for_each(|place| place.copy_from_slice(&data[..place.len()]));
                come += 1;
            }
        }
        come
    }

    /// Refuses to look for units where none can come.
    fn check_units(&self, rank: Rank, verb: &'static str, units: &Units) -> Result<(), Fault> {
        self.near_lane(rank, verb, units.lane)?;
        units.span().within(self.layout.window_bytes())
    }

    /// Units come by near lanes only.
    fn near_lane(&self, rank: Rank, verb: &'static str, lane: LaneId) -> Result<(), Fault> {
        let has = self.layout.has_lane(rank, lane) && self.layout.topology().reach(rank, lane.peer) != Reach::Far;
        if has { Ok(()) } else { Err(Fault::NotOffered { verb, lane }) }
    }
}
