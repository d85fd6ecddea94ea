//! Effects arrive.

use ep_core::Rank;
use ep_core::port::{LaneId, Scope, UNIT_DATA, unit_count};

use super::World;
use crate::explore::lane::Transfer;
use crate::memory;

impl World {
    /// Delivers one effect, or a piece of one, of the active lane at `index`. False when the adversary holds back the
    /// only one there is, which `forced` forbids.
    pub(super) fn deliver(&mut self, index: usize, forced: bool) -> bool {
        let number = self.lanes.active()[index];
        let lane = self.lanes.lane(number);
        let due = match lane.late {
            false => lane.transfers.len(),
            true => lane.transfers.iter().filter(|transfer| transfer.due <= self.now).count(),
        };
        let pick = self.adversary.below(due + usize::from(lane.publishable(self.now)));
        if pick < due {
            self.deliver_transfer(number, pick);
        } else if !forced && self.adversary.holds() {
            return false;
        } else {
            self.deliver_publish(number);
        }
        self.lanes.update(number, self.now);
        true
    }

    /// Delivers the `pick`-th due transfer of a lane, or a piece of it.
    fn deliver_transfer(&mut self, number: u32, pick: usize) {
        let now = self.now;
        let lane = self.lanes.lane_mut(number);
        let index = match lane.late {
            false => pick,
            true => {
                let mut due = lane.transfers.iter().enumerate().filter(|(_, transfer)| transfer.due <= now);
                due.nth(pick).map_or(0, |(index, _)| index)
            }
        };
        let Transfer { tag, len, .. } = lane.transfers[index];
        let (start, end) = match tag {
            None => self.adversary.tears(len),
            Some(_) => {
                let (first, last) = self.adversary.scatters(unit_count(len));
                (first * UNIT_DATA, len.min(last * UNIT_DATA))
            }
        };
        let (from, to) = (lane.from, lane.to);
        let piece = lane.take(index, start, end);
        let Transfer { get, from: source, to: target, len, .. } = piece;
        match tag {
            Some(tag) => self.deliver_units(number, piece, tag),
            None => {
                let (reader, writer) = if get { (to, from) } else { (from, to) };
                memory::copy(&mut self.windows, (reader.index(), source), (writer.index(), target), len);
            }
        }
        self.notify_flusher(number);
    }

    /// Delivers the oldest publish of a lane.
    fn deliver_publish(&mut self, number: u32) {
        let lane = self.lanes.lane_mut(number);
        let to = lane.to;
        let Some(publish) = lane.publishes.pop_front() else { return };
        let window = &mut self.windows[to.index()];
        if window.load(publish.at) > publish.bits {
            return;
        }
        window.store(publish.at, publish.bits);
        if let Some(race) = &mut self.race {
            race.landed(to, publish.at, publish.carried);
        }
        self.notify(to, publish.cell, publish.generation);
    }

    /// Each effect in flight on the lanes of `scope` that `rank` posted to is applied, wholly or in part, or dropped; then nothing
    /// of it is left.
    pub(super) fn settle(&mut self, rank: Rank, scope: Scope) {
        let numbers: Vec<u32> = self.lanes.of(rank).collect();
        for number in numbers {
            let lane = self.lanes.lane(number);
            if !scope.covers(LaneId { peer: lane.to, kind: lane.kind }) {
                continue;
            }
            let in_flight = lane.transfers.len() + lane.publishes.len();
            for _ in 0..self.adversary.below(in_flight + 1) {
                self.deliver_any(number);
            }
            let lane = self.lanes.lane_mut(number);
            lane.transfers.clear();
            lane.publishes.clear();
            lane.late = false;
            let issued = lane.issued;
            self.lanes.update(number, self.now);
            self.notify_flusher(number);
            if let Some(race) = &mut self.race {
                race.settled(rank, number, issued);
            }
        }
    }

    /// Delivers whatever the rules allow next on a lane, due or not.
    fn deliver_any(&mut self, number: u32) {
        let lane = self.lanes.lane_mut(number);
        lane.late = false;
        lane.transfers.retain(|transfer| transfer.due < crate::explore::lane::NEVER);
        let transfers = lane.transfers.len();
        let publishable = lane.publishes.front().is_some_and(|publish| publish.blockers == 0);
        if transfers + usize::from(publishable) == 0 {
            return;
        }
        match self.adversary.below(transfers + usize::from(publishable)) {
            pick if pick < transfers => self.deliver_transfer(number, pick),
            _ => self.deliver_publish(number),
        }
    }

    /// Delivers everything that is still in flight when all ranks have finished.
    pub(super) fn drain(&mut self) {
        for number in 0..self.lanes.len() {
            self.deliver_all(number);
        }
    }

    /// Delivers everything that is in flight on a lane.
    pub(super) fn deliver_all(&mut self, number: u32) {
        while !self.lanes.lane(number).transfers.is_empty() || !self.lanes.lane(number).publishes.is_empty() {
            self.deliver_any(number);
        }
        self.lanes.update(number, self.now);
    }
}
