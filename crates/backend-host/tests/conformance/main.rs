//! The shared suite on CPU ranks: threads of this process, and between nodes a transport made for tests; then processes of one
//! node.

mod apart;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/double.rs"]
mod double;

use apart::Apart;
use common::{Host, Network};
use double::Double;
use ep_conformance::Setup;
use ep_core::machine::FarLanes;

struct Doubles;

impl Network for Doubles {
    type Transport = Double;

    /// Lanes are shared in half of the communicators, and roles' own in the others.
    fn transport(&self, setup: &Setup) -> Double {
        let far_lanes = if setup.seed.is_multiple_of(2) { FarLanes::One } else { FarLanes::PerRole };
        Double::new(far_lanes, setup.seed)
    }

    fn far_lanes(&self) -> FarLanes {
        FarLanes::One
    }
}

ep_conformance::suite!(Host { network: Doubles, campaign: 400, largest: (4, 4), absent: None }, processes: Apart);
