//! A network made of software between the nodes: at a rate and a latency for a third of the communicators each, so that verbs
//! are under way while roles go on.

use std::time::Duration;

use ep_conformance::Setup;
use ep_core::layout::Queues;
use ep_core::transport::AnyTransport;
use ep_loop::Loop;

use crate::common::{Host, Network};

pub(crate) struct Loops;

/// The same where ranks are processes.
pub(crate) struct Apart;

impl Network for Apart {
    fn transport(&self, setup: &Setup) -> AnyTransport {
        AnyTransport::new(paced(setup).between_processes())
    }

    fn far_lanes(&self) -> Queues {
        Queues::ONE
    }
}

impl Network for Loops {
    fn transport(&self, setup: &Setup) -> AnyTransport {
        AnyTransport::new(paced(setup))
    }

    fn far_lanes(&self) -> Queues {
        Queues::ONE
    }
}

/// Each table of lanes and queues has a fourth of the communicators.
fn paced(setup: &Setup) -> Loop {
    let network = Loop::new().queues(Queues::NAMED[setup.seed as usize % Queues::NAMED.len()]);
    let paced = match setup.seed % 3 {
        0 => Ok(network),
        1 => network.latency(Duration::from_micros(20)),
        _ => network.bytes_per_second(500_000_000).and_then(|network| network.queue_depth(7)),
    };
    paced.expect("within limits")
}

/// Schedules are the machine's affair here: most seeds change nothing. [`Double`](crate::double::Double) has them all.
pub(crate) const RANKS: Host<Loops> = Host { network: Loops, campaign: 20, largest: (3, 2), one_in: 8 };
