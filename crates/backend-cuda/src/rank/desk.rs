//! What a warp that sums rows of rings has in shared memory, or between nodes a team of them: `EpDesk`.

use crate::args::{
    BATON_BYTES, COLUMNS, FETCHES, FOUND_BYTES, LEAD_BYTES, ROUTE_BYTES, TEAM_HELD, TOKEN_ROWS_BYTES, TOKENS_AHEAD,
    TOKENS_HELD,
};

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

    /// Bytes, as `ep_desk_bytes` has them, where `depth` parts are on their way to each of `warps` warps.
    pub(super) const fn bytes(self, depth: u32, columns: u32, warps: u32) -> u32 {
        let rows = self.ranks / self.nodes + self.nodes - 1;
        let of_token = rows * (FOUND_BYTES + 4 * self.topk) + TOKEN_ROWS_BYTES;
        let (lead, of_rank) = if self.nodes > 1 {
            (LEAD_BYTES + BATON_BYTES, ROUTE_BYTES + 4 * TEAM_HELD + 4)
        } else {
            (0, ROUTE_BYTES + 4 * TOKENS_HELD)
        };
        let of_warp = depth * part(columns) + TOKENS_AHEAD * of_token;
        (warps * of_warp + lead + self.ranks * of_rank).next_multiple_of(16)
    }

    /// How many parts are on their way to each of `warps` warps of `desks` desks that have so many bytes together, and the bytes of a desk.
    pub(super) fn fitting(self, desks: u32, warps: u32, bytes: u32) -> (u32, u32) {
        let depths = [FETCHES, FETCHES / 2, FETCHES / 4];
        let depth = depths.into_iter().find(|&depth| desks * self.bytes(depth, COLUMNS, warps) <= bytes);
        let depth = depth.unwrap_or(FETCHES / 4);
        (depth, self.bytes(depth, COLUMNS, warps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn desks_fit_into_a_block() {
        let desks = |ranks, nodes, memory: u32| Desk::new(ranks, nodes, 8).fitting(8, 1, memory - ranks * 32);
        for (ranks, nodes) in [(1, 1), (8, 1), (2, 2), (4, 2), (16, 2)] {
            let (depth, bytes) = desks(ranks, nodes, 226 << 10);
            assert!(depth == FETCHES && 8 * bytes <= 226 << 10, "{ranks} ranks of {nodes} nodes: {bytes}");
        }
        assert_eq!(desks(16, 2, 163 << 10).0, 4);
        assert!(8 * desks(72, 1, 226 << 10).1 <= (226 << 10) - 72 * 32);
    }

    #[test]
    fn desks_of_teams_fit_into_a_block() {
        for memory in [163 << 10, 226 << 10] {
            for (ranks, nodes, desks, warps) in
                [(2, 2, 2, 6), (4, 2, 4, 3), (2, 2, 3, 4), (4, 2, 6, 2), (16, 2, 4, 3), (16, 2, 6, 2), (64, 8, 8, 1)]
            {
                let (depth, bytes) = Desk::new(ranks, nodes, 8).fitting(desks, warps, memory - ranks * 32);
                assert!(desks * bytes <= memory - ranks * 32, "{ranks} ranks of {nodes} nodes: {depth} of {bytes}");
            }
        }
        assert_eq!(Desk::new(2, 2, 8).fitting(3, 4, 226 << 10).0, FETCHES);
    }
}
