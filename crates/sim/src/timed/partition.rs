//! How a cluster is simulated in parts.
//!
//! What leaves a node takes the far link's latency at least, so nodes need not know of each other more often: each node is
//! a *partition* with a world of its own, and all go through time in *stretches* as long as that latency (the *lookahead*).
//! Between two stretches they exchange letters. What comes out is the same however many threads do it.
//!
//! Where the far link has no latency, or there is one node, there is one partition.

use std::ops::Range;

use ep_core::{Nanos, Rank, Topology};

use super::NEVER;
use super::model::Model;

/// The partitions of a cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Partitions {
    /// Ranks of each.
    ranks: u32,
    count: usize,
    /// What happens in one partition is felt in others so much later at least.
    lookahead: Nanos,
}

impl Partitions {
    pub(crate) fn new(topology: &Topology, model: &Model) -> Self {
        if topology.nodes() > 1 && model.far.latency > Nanos(0) {
            let (ranks, count) = (topology.ranks_per_node(), topology.nodes() as usize);
            Self { ranks, count, lookahead: model.far.latency }
        } else {
            Self { ranks: topology.ranks(), count: 1, lookahead: NEVER }
        }
    }

    /// How many there are.
    pub(crate) const fn count(&self) -> usize {
        self.count
    }

    /// The partition of a rank.
    pub(super) const fn of(&self, rank: Rank) -> usize {
        (rank.0 / self.ranks) as usize
    }

    /// The ranks of a partition.
    pub(super) const fn ranks(&self, partition: usize) -> Range<u32> {
        let first = partition as u32 * self.ranks;
        first..first + self.ranks
    }

    /// The end of a stretch that begins at `start`.
    pub(super) fn end_of_stretch(&self, start: Nanos) -> Nanos {
        Nanos(start.0.saturating_add(self.lookahead.0))
    }

    /// What a message from one rank to another takes besides what the model says, where the two are apart.
    pub(super) const fn delay(&self) -> Nanos {
        if self.count == 1 { Nanos(0) } else { self.lookahead }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One nanosecond more, and what leaves a partition at the begin of a stretch would be due in another before its end.
    #[test]
    fn a_stretch_is_as_long_as_the_far_latency_and_no_longer() {
        let model = Model::h800_cx7();
        let partitions = Partitions::new(&Topology::new(2, 4).unwrap(), &model);
        assert_eq!(partitions.end_of_stretch(Nanos(70)), Nanos(70) + model.far.latency);
        assert_eq!(partitions.delay(), model.far.latency);
        assert_eq!((partitions.count(), partitions.ranks(1)), (2, 4..8));
        let one = Partitions::new(&Topology::new(1, 4).unwrap(), &model);
        assert_eq!((one.count(), one.delay(), one.end_of_stretch(Nanos(70))), (1, Nanos(0), NEVER));
    }
}
