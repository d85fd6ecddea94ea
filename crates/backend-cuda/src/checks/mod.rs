//! Kernels that are built for tests: seeded delays, poisoned memory, planted faults, incidents, and events of rings.
//!
//! [`Builder::checks`](crate::Builder::checks) has them compiled with `EP_TEST`, beside the others and under keys of their own: without it
//! nothing of this is in a kernel. What they do is in `kernels/checks/ep_test.h`.

mod events;
mod rings;

use std::sync::Arc;

use ep_core::incident::Incident;
use ep_core::{Nanos, Rank};
use zerocopy::IntoBytes;

use crate::args;
use crate::driver::{DeviceMemory, Mapped, Stream};
use crate::error::CudaError;

pub use crate::args::Plant;
pub use events::{RingEvent, Step};
pub use rings::{RingFault, SlotsOfRings, check_rings};

/// Rank, or lane, that is none.
const NONE: u32 = u32::MAX;

/// What kernels that are built for tests do beside their work.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Checks {
    /// Delays are drawn from it; 0: none.
    pub seed: u64,
    /// No drawn delay is longer. At most some seconds.
    pub longest: Nanos,
    /// Windows are filled with a pattern before they are used, and what was read from slots is overwritten by it.
    pub poison: bool,
    /// What is done wrong.
    pub plant: Option<Plant>,
    /// What goes wrong. Exits need nothing: a rank leaves when its endpoint is dropped.
    pub incidents: Vec<Incident>,
    /// What a verb of a starved rank takes longer; 0: [`SLOWLY`].
    pub slowly: Nanos,
    /// Events of rings that each rank has room for; 0: none are kept.
    pub events: u32,
}

/// What a verb of a starved rank takes longer, where nothing else is said.
pub const SLOWLY: Nanos = Nanos(50_000);

impl Checks {
    /// Whether windows are filled with a pattern before they are used.
    pub(crate) const fn poisons(&self) -> bool {
        self.poison
    }

    /// Of rank `me`, whose operations may take `allowed`.
    fn args(&self, me: Rank, allowed: Nanos) -> args::Test {
        let limit = |nanos: Nanos| u32::try_from(nanos.0).unwrap_or(u32::MAX);
        let mut test = args::Test {
            seed: if self.longest == Nanos(0) { 0 } else { self.seed },
            longest: limit(self.longest).max(1),
            plant: self.plant.map_or(0, |plant| plant as u32),
            poison: self.poison.into(),
            late_to: NONE,
            late_lane: NONE,
            room: self.events,
            ..args::Test::default()
        };
        // A count of verbs or effects is small, or as good as endless.
        let count = |after: u64| i32::try_from(after).unwrap_or(i32::MAX);
        for incident in &self.incidents {
            match *incident {
                Incident::Starve { rank } if rank == me => {
                    test.slow = limit(if self.slowly == Nanos(0) { SLOWLY } else { self.slowly })
                }
                Incident::Crash { rank, after, .. } if rank == me => (test.crashes, test.verbs) = (1, count(after)),
                Incident::Delay { from, to, kind, by, after } if from == me => {
                    test.late_to = to.0;
                    test.late_lane = kind.map_or(NONE, |kind| kind.index() as u32);
                    // What comes after the deadline comes in a generation that does not look at it.
                    (test.late, test.lost, test.unharmed) = (by.0, (by >= allowed).into(), count(after));
                }
                Incident::LoseLane { from, to, kind, after } if from == me => {
                    test.late_to = to.0;
                    test.late_lane = kind.map_or(NONE, |kind| kind.index() as u32);
                    (test.lost, test.unharmed) = (1, count(after));
                }
                _ => {}
            }
        }
        test
    }
}

/// An `EpTest` on the device, and what belongs to it.
#[derive(Debug)]
pub(crate) struct TestDevice {
    memory: DeviceMemory,
    events: DeviceMemory,
    crashed: Arc<Mapped>,
    room: u32,
    /// Whether the others learn of a crash of this rank.
    pub(crate) is_noticed: bool,
}

/// Where an `EpTest` counts events.
const COUNT: usize = std::mem::offset_of!(args::Test, count);

impl TestDevice {
    pub(crate) fn new(stream: &Arc<Stream>, checks: &Checks, me: Rank, allowed: Nanos) -> Result<Self, CudaError> {
        let crashed = Arc::new(Mapped::zeroed(stream.device(), 16)?);
        let events = DeviceMemory::zeroed(stream, checks.events as usize * size_of::<args::Event>())?;
        let memory = DeviceMemory::zeroed(stream, size_of::<args::Test>())?;
        let kept = if checks.events > 0 { events.address() } else { 0 };
        let args = args::Test { host: crashed.address(), events: kept, ..checks.args(me, allowed) };
        memory.write(stream, 0, args.as_bytes())?;
        Ok(Self {
            memory,
            events,
            crashed,
            room: checks.events,
            is_noticed: checks
                .incidents
                .iter()
                .any(|incident| matches!(*incident, Incident::Crash { rank, noticed: true, .. } if rank == me)),
        })
    }

    pub(crate) const fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Whether the rank has crashed: its kernels do nothing any more.
    pub(crate) fn has_crashed(&self) -> bool {
        self.crashed.word(0) != 0
    }

    /// Tells whether the rank has crashed for as long as it is kept.
    pub(crate) fn crashed(&self) -> Arc<Mapped> {
        Arc::clone(&self.crashed)
    }

    /// The events of rings since the last call, and how many found no room. Waits for the stream.
    pub(crate) fn events(&self, stream: &Stream) -> Result<(Vec<RingEvent>, u32), CudaError> {
        let mut count = [0; 4];
        self.memory.read(stream, COUNT, &mut count)?;
        let count = u32::from_le_bytes(count);
        let kept = count.min(self.room);
        let mut events = vec![args::Event::default(); kept as usize];
        self.events.read(stream, 0, events.as_mut_bytes())?;
        self.memory.write(stream, COUNT, &[0; 4])?;
        Ok((events.iter().map(RingEvent::from).collect(), count - kept))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ep_core::port::LaneKind;

    #[test]
    fn incidents_are_those_of_the_rank_they_name() {
        let checks = Checks {
            incidents: vec![
                Incident::Crash { rank: Rank(1), after: u64::MAX, noticed: false },
                Incident::LoseLane { from: Rank(2), to: Rank(0), kind: Some(LaneKind::Control), after: 3 },
            ],
            ..Checks::default()
        };
        let [first, second, third] = [0, 1, 2].map(|rank| checks.args(Rank(rank), Nanos(1)));
        assert_eq!((first.crashes, first.late_to, first.seed), (0, NONE, 0));
        assert_eq!((second.crashes, second.verbs), (1, i32::MAX));
        assert_eq!((third.late_to, third.late_lane, third.lost, third.unharmed), (0, 1, 1, 3));
    }
}
