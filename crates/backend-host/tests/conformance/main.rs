//! The shared suite on CPU ranks: threads of this process, and between nodes a transport made for tests; then processes of one
//! node.

#[path = "../common/apart.rs"]
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
use ep_core::transport::NoTransport;

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

/// Ranks that are processes meet on one node only: the transport made for tests joins threads.
struct OneNode;

impl Network for OneNode {
    type Transport = NoTransport;

    fn transport(&self, _: &Setup) -> NoTransport {
        NoTransport
    }

    fn far_lanes(&self) -> FarLanes {
        FarLanes::PerRole
    }
}

ep_conformance::suite!(
    Host { network: Doubles, campaign: 400, largest: (4, 4), one_in: 1, absent: None },
    processes: Apart {
        network: OneNode,
        campaign: 60,
        one_in: 4,
        one_node: Some("ranks that are processes have no transport for tests between nodes"),
        absent: None,
    }
);
