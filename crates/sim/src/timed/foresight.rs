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
    /// Looks at what a put within the partition will need.
    pub(super) fn foresee_put(&self, lane: u32, to: Rank, at: Offset) {
        black_box((self.lanes.posted(lane).puts, self.windows[to].first_look(at.0)));
    }

    /// Looks at what the events of a slice of the agenda, which begins, will need.
    pub(super) fn foresee(&self) {
        for event in self.agenda.slice() {
            match *event {
                Event::Arrive(notice) | Event::Raise(notice) => {
                    if notice.lane != Notice::NO_LANE {
                        black_box(self.lanes.reached(notice.lane).puts);
                    }
                    if notice.cell != Notice::UNITS {
                        black_box(self.cells.bits(notice.cell));
                    }
                }
                Event::Reach(rank, class) => {
                    if let Some((_, flight)) = self.sides[rank].flying(class).filter(|(_, flight)| flight.get.is_none())
                    {
                        black_box(self.lanes.reached(flight.lane).puts);
                    }
                }
                Event::Enter { lane, .. } => {
                    black_box(self.lanes.reached(lane).puts);
                }
                Event::Leave { .. }
                | Event::LeaveAbroad { .. }
                | Event::Resume(_)
                | Event::Settled(_)
                | Event::Matter(_) => {}
            }
        }
    }
}
