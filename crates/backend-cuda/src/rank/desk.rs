//! What a warp that sums rows of rings has in shared memory: `EpDesk`.

use crate::args::{COLUMNS, FETCHES, FOUND_BYTES, ROUTE_BYTES, TOKEN_ROWS_BYTES, TOKENS_AHEAD, TOKENS_HELD};

/// Bytes of a part of a row, of `columns` units of each lane.
const fn part(columns: u32) -> u32 {
    columns * 512
}

/// A desk's size, but for its depth.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Desk {
    ranks: u32,
    nodes: u32,
    topk: u32,
}

impl Desk {
    pub(super) const fn new(ranks: u32, nodes: u32, topk: u32) -> Self {
        Self { ranks, nodes, topk }
    }

    /// Bytes, as `ep_desk_bytes` has them, where `depth` parts are on their way.
    pub(super) const fn bytes(self, depth: u32, columns: u32) -> u32 {
        let rows = self.ranks / self.nodes + self.nodes - 1;
        let tokens = TOKENS_AHEAD * (rows * (FOUND_BYTES + 4 * self.topk) + TOKEN_ROWS_BYTES);
        (depth * part(columns) + tokens + self.ranks * (ROUTE_BYTES + 4 * TOKENS_HELD)).next_multiple_of(16)
    }

    /// How many parts are on their way to each of `warps` desks that have so many bytes together, and the bytes of one.
    pub(super) fn fitting(self, warps: u32, bytes: u32) -> (u32, u32) {
        let depths = [FETCHES, FETCHES / 2, FETCHES / 4];
        let depth = depths.into_iter().find(|&depth| warps * self.bytes(depth, COLUMNS) <= bytes);
        let depth = depth.unwrap_or(FETCHES / 4);
        (depth, self.bytes(depth, COLUMNS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn desks_fit_into_a_block() {
        let desks = |ranks, nodes, memory: u32| Desk::new(ranks, nodes, 8).fitting(8, memory - ranks * 32);
        for (ranks, nodes) in [(1, 1), (8, 1), (2, 2), (4, 2), (16, 2), (64, 8)] {
            let (depth, bytes) = desks(ranks, nodes, 226 << 10);
            assert!(depth == FETCHES && 8 * bytes <= 226 << 10, "{ranks} ranks of {nodes} nodes: {bytes}");
        }
        assert_eq!(desks(16, 2, 163 << 10).0, 8);
        assert!(8 * desks(72, 1, 226 << 10).1 <= (226 << 10) - 72 * 32);
    }
}
