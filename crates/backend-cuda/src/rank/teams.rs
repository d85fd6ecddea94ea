//! How many warps of a block play a role of a combine through rings together: a team (`ep_combine_team.h`).

use crate::args::{RING_WARPS, TEAMS_WARPS};

/// Warps of a team at most.
const MOST: u32 = 4;
/// Warps of a block at least, where there are more roles than blocks: with fewer it is no faster.
const LEAST_WARPS: u32 = 4;

/// What a block plays.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Teams {
    /// Roles of a block.
    pub(super) roles: u32,
    /// Warps of each.
    pub(super) warps: u32,
}

impl Teams {
    /// Those that play so many roles on `blocks` blocks: of several nodes as many warps a role as a block carries. A warp's instructions bound it, so roles
    /// are spread over all multiprocessors that there are.
    pub(super) fn new(roles: u32, blocks: u32, nodes: u32) -> Self {
        let roles = roles.div_ceil(blocks).min(RING_WARPS);
        if nodes == 1 {
            return Self { roles: roles.max(LEAST_WARPS), warps: 1 };
        }
        let warps = (TEAMS_WARPS / roles).clamp(1, MOST);
        Self { roles: roles.max(LEAST_WARPS / warps), warps }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By channels and ranks: 32 of two nodes of a rank and of two of two, 8 of two of eight.
    #[test]
    fn a_block_carries_its_roles_with_all_their_warps() {
        let teams = |roles, nodes| {
            let Teams { roles, warps } = Teams::new(roles, 24, nodes);
            (roles, warps)
        };
        assert_eq!([64, 128, 192].map(|roles| teams(roles, 2)), [(3, 4), (6, 2), (8, 1)]);
        assert_eq!([2, 24, 25].map(|roles| teams(roles, 2)), [(1, 4), (1, 4), (2, 4)]);
        assert_eq!([2, 96, 97, 192].map(|roles| teams(roles, 1)), [(4, 1), (4, 1), (5, 1), (8, 1)]);
        for roles in 1..400 {
            let (roles, warps) = teams(roles, 2);
            assert!(roles * warps <= TEAMS_WARPS && roles <= RING_WARPS && roles * warps >= LEAST_WARPS);
        }
    }
}
