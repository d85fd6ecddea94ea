//! Who waits for what, when a run stands still.

use ep_core::port::{LaneId, Need, Units, unit_count};

use super::World;
use super::ports::{Parked, Slot};
use crate::violation::{Awaited, Report, Waiting};

impl World {
    /// Who waits for what.
    pub(super) fn report(&self) -> Box<Report> {
        let alive = self.ranks.iter().zip(self.layout.topology().all());
        let unfinished = alive.filter(|(state, _)| !state.finished && !state.crashed).map(|(_, rank)| rank).collect();
        let ports = self.ranks.iter().flat_map(|state| &state.ports).map(|&port| &self.slots[port as usize]);
        let roles = ports.filter(|slot| slot.parked != Parked::Not).map(|slot| self.waiting(slot));
        let mut waiting: Vec<Waiting> = roles.chain(self.meeting.waiting()).collect();
        waiting.sort_by_key(|waiting| (waiting.rank, waiting.role));
        Box::new(Report { seed: self.seed, events: self.events, time: self.now, unfinished, waiting })
    }

    fn waiting(&self, slot: &Slot) -> Waiting {
        let awaits = match slot.parked {
            Parked::Not | Parked::Turn => vec![Awaited::Turn],
            Parked::Needs | Parked::Units => {
                let units = |units: &Units| {
                    let seen = self.units_here(slot.rank, units.span(), units.tag, &mut []);
                    Awaited::Units { lane: units.lane, seen, awaited: unit_count(units.len) }
                };
                let payloads = if slot.parked == Parked::Units { slot.units.as_slice() } else { &[] };
                let cell = |need: &Need| {
                    let seen = self.value(slot.rank, slot.generation, need.cell);
                    Awaited::Cell { cell: need.cell, seen, awaited: need.at_least }
                };
                payloads.iter().map(units).chain(slot.needs.iter().map(cell)).collect()
            }
            Parked::Flush { lane, upto } => {
                let lane = self.lanes.lane(lane);
                let id = LaneId { peer: lane.to, kind: lane.kind };
                vec![Awaited::Flush { lane: id, seen: lane.unsettled(upto).unwrap_or(upto), awaited: upto }]
            }
        };
        Waiting { rank: slot.rank, role: Some(slot.role), op: slot.op, awaits }
    }
}
