//! How the blocks of a dispatch are made: by the shared memory that a block has.

use crate::args::{DISPATCH_WARPS, PLACE_BYTES};

/// A piece of a row is at most so long: a few rows then fit into shared memory, whatever the hidden size.
const PIECE: u64 = 16 << 10;
/// So many movers of a block keep its share of the links busy; with more memory they rather load further ahead.
const MOVERS_THAT_FILL: u32 = 9;

/// How the blocks of a dispatch are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DispatchShape {
    /// Warps of a block that move payloads.
    pub(super) movers: u32,
    /// Pieces that a mover has in shared memory.
    pub(super) stages: u32,
    /// Bytes of a piece.
    pub(super) piece: u32,
    /// Pieces of a row.
    pub(super) pieces: u32,
}

impl DispatchShape {
    /// For rows of `stride` bytes as they travel, with at most `movers` movers and `stages` stages, in `shared_memory` bytes of a block.
    /// 0 stages: three, where that leaves enough movers, or two.
    pub(super) fn new(stride: u64, ranks: u32, shared_memory: u32, movers: u32, stages: u32) -> Self {
        let pieces = stride.div_ceil(PIECE).max(1);
        let piece = stride.div_ceil(pieces).next_multiple_of(16).max(16);
        // Barriers of at most 32 movers with 8 stages, places of all ranks, alignment.
        let room = u64::from(shared_memory).saturating_sub(32 * 8 * 8 + u64::from(ranks) * PLACE_BYTES as u64 + 256);
        let fitting = (room / piece) as u32;
        let stages = if stages == 0 { 2 + u32::from(fitting / 3 >= MOVERS_THAT_FILL) } else { stages };
        let stages = stages.clamp(2, 8).min((fitting / 2).max(2));
        let movers = (fitting / stages).clamp(1, movers.clamp(1, DISPATCH_WARPS));
        Self { movers, stages, piece: piece as u32, pieces: pieces as u32 }
    }

    pub(super) const fn shared_memory(&self, ranks: u32) -> u32 {
        let bars = (self.movers * self.stages * 8).next_multiple_of(16);
        (bars + ranks * PLACE_BYTES).next_multiple_of(128) + self.movers * self.stages * self.piece
    }
}
