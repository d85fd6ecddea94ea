//! The shared suite on the simulator, where one coordinator posts for all roles to each rank of another node.

mod explore;

use ep_core::machine::FarLanes;
use explore::Simulator;

ep_conformance::suite!(Simulator { far_lanes: FarLanes::One, campaign: 300 });
