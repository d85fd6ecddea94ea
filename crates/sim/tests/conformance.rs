//! The shared suite on the simulator, where every role has a far lane of its own.

mod explore;

use ep_core::machine::FarLanes;
use explore::Simulator;

ep_conformance::suite!(Simulator { far_lanes: FarLanes::PerRole, campaign: 2000 });
