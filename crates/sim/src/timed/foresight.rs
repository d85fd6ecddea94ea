//! Looks at the memory that the next events will need, all at once.
//!
//! Of a large cluster nearly every event meets a lane and a cell that are in no cache. One after the other, each costs a wait
//! for memory; looked at together, before, many cost little more than one.

use std::hint::black_box;

use ep_core::Rank;
use ep_core::port::Offset;

use super::World;
use super::events::{Event, Notice};

impl World {
    /// Looks at what a put will need.
    pub(super) fn foresee_put(&self, lane: u32, to: Rank, at: Offset) {
        black_box((self.lanes.lane(lane).puts, self.windows[to.index()].first_look(at.0)));
    }

    /// Looks at what the events of a slice of the agenda, which begins, will need.
    pub(super) fn foresee(&self) {
        for event in self.agenda.slice() {
            match *event {
                Event::Arrive(notice) | Event::Raise(notice) => {
                    if notice.lane != Notice::NO_LANE {
                        black_box(self.lanes.lane(notice.lane).reached);
                    }
                    black_box(self.cells.bits(notice.cell));
                }
                Event::Reach(rank, class) => {
                    if let Some((_, flight)) = self.sides[rank.index()].flying(class) {
                        black_box(self.lanes.lane(flight.lane).reached);
                    }
                }
                Event::Leave { .. } | Event::Resume(_) | Event::Settled(_) => {}
            }
        }
    }
}
