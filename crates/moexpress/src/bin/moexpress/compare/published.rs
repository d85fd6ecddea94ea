//! What DeepEP V1 publishes, and with which parameters it was measured.
//!
//! Source: the performance section of the documentation of <https://github.com/deepseek-ai/DeepEP> (V1, `docs/legacy.md`):
//! H800s with NVLink of about 160 GB/s, one ConnectX-7 card of 400 Gb/s a GPU.

use ep_core::{Error, Topology};

/// Ranks of a node there.
const LOCALS: u32 = 8;

/// One published row: for a dispatch and a combine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figure {
    pub(crate) ranks: u32,
    /// Low latency: microseconds. Normal: GB/s.
    pub(crate) published: [f64; 2],
    /// Whether NVLink carries what stays in a node; otherwise the network carries all.
    pub(crate) nvlink: bool,
}

const fn row(ranks: u32, dispatch: f64, combine: f64) -> Figure {
    Figure { ranks, published: [dispatch, combine], nvlink: true }
}

/// 128 tokens a rank, hidden 7168, top-8, fp8 there and bf16 back; microseconds. Those of 128 and 256 ranks are older.
pub(crate) const LOW_LATENCY: [Figure; 6] = [
    row(8, 77.0, 114.0),
    row(16, 118.0, 195.0),
    row(32, 155.0, 273.0),
    row(64, 173.0, 314.0),
    Figure { nvlink: false, ..row(128, 192.0, 369.0) },
    Figure { nvlink: false, ..row(256, 194.0, 360.0) },
];

/// 4096 tokens a rank, hidden 7168, top-4 of the nodes, top-8, 24 multiprocessors; GB/s of the narrowest link, rows that
/// stay on their rank or node counted in.
pub(crate) const NORMAL: [Figure; 4] =
    [row(8, 153.0, 158.0), row(16, 43.0, 43.0), row(32, 58.0, 57.0), row(64, 51.0, 50.0)];

impl Figure {
    pub(crate) fn topology(&self) -> Result<Topology, Error> {
        if self.nvlink { Topology::new(self.ranks / LOCALS, LOCALS) } else { Topology::new(self.ranks, 1) }
    }
}
