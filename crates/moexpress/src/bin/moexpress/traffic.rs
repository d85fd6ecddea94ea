//! Rows and bytes by the hop they took.

use std::ops::AddAssign;

use ep_core::engine::stats::Stats;
use ep_core::topology::Reach;
use ep_core::{Rank, Topology};

/// Rows over one kind of hop, each counted once, by its sender; and their bytes on the wire, headers included.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Flow {
    pub(crate) rows: u64,
    pub(crate) bytes: u64,
}

impl Flow {
    fn since(self, earlier: Self) -> Self {
        Self { rows: self.rows - earlier.rows, bytes: self.bytes - earlier.bytes }
    }
}

impl AddAssign for Flow {
    fn add_assign(&mut self, more: Self) {
        self.rows += more.rows;
        self.bytes += more.bytes;
    }
}

/// What all ranks sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Traffic {
    /// Copied within a rank.
    pub(crate) own: Flow,
    /// Within a node.
    pub(crate) near: Flow,
    /// Between nodes.
    pub(crate) far: Flow,
}

impl Traffic {
    /// Sums up the statistics of all ranks, `[ranks]`.
    pub(crate) fn of<'a>(topology: &Topology, stats: impl Iterator<Item = &'a Stats>) -> Self {
        let mut sum = Self::default();
        for (rank, stats) in (0..).map(Rank).zip(stats) {
            for (peer, with) in (0..).map(Rank).zip(&stats.peers) {
                *sum.flow(topology.reach(rank, peer)) += Flow { rows: with.rows_sent, bytes: with.bytes_sent };
            }
        }
        sum
    }

    /// What was sent after `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        Self { own: self.own.since(earlier.own), near: self.near.since(earlier.near), far: self.far.since(earlier.far) }
    }

    /// The same rows, each of `bytes` bytes: with elided payload, ranks count shorter ones.
    pub(crate) fn weighed(self, bytes: u64) -> Self {
        let flow = |flow: Flow| Flow { bytes: flow.rows * bytes, ..flow };
        Self { own: flow(self.own), near: flow(self.near), far: flow(self.far) }
    }

    const fn flow(&mut self, reach: Reach) -> &mut Flow {
        match reach {
            Reach::Own => &mut self.own,
            Reach::Near => &mut self.near,
            Reach::Far => &mut self.far,
        }
    }
}

#[cfg(test)]
mod tests {
    use ep_core::engine::stats::PeerStats;

    use super::*;

    #[test]
    fn every_row_and_byte_counts_once() {
        let peer = |sent, received| PeerStats {
            rows_sent: sent,
            rows_received: received,
            bytes_sent: 10 * sent,
            bytes_received: 10 * received,
            ..PeerStats::default()
        };
        let stats = [
            Stats { peers: vec![peer(1, 1), peer(2, 5)], ..Stats::default() },
            Stats { peers: vec![peer(5, 2), peer(3, 3)], ..Stats::default() },
        ];
        let traffic = Traffic::of(&Topology::new(1, 2).unwrap(), stats.iter());
        assert_eq!((traffic.own, traffic.near), (Flow { rows: 4, bytes: 40 }, Flow { rows: 7, bytes: 70 }));
        assert_eq!(traffic.weighed(16).near, Flow { rows: 7, bytes: 112 });
        let split = Traffic::of(&Topology::new(2, 1).unwrap(), stats.iter());
        assert_eq!((split.near, split.far), (Flow::default(), Flow { rows: 7, bytes: 70 }));
    }
}
