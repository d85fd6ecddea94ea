//! How many warps of a block play a role of rings between nodes together: a team (`ep_team.h`).

use super::desk::Desk;
use crate::args::{CARRY_STAGES, FETCHES, RING_WARPS, TEAMS_WARPS};

/// Warps of a team at most.
const MOST: u32 = 6;
/// Beyond so many a warp more brings less than bytes on their way do.
const USUAL: u32 = 4;
/// Warps of a block at least, where there are more roles than blocks: with fewer it is no faster.
const LEAST_WARPS: u32 = 4;

/// What all lanes of a warp fetch at a time, in bytes, of each stage.
const ROOM_STEP: u32 = 512 * CARRY_STAGES;

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

    /// The same, with fewer warps a role, and then fewer roles a block, as far as it takes for the desks of `role_count` roles to have room on `blocks`
    /// blocks; the parts on their way to each warp, and the bytes of a desk. Where there is never room, the least of all. Of more than [`USUAL`] warps none is
    /// worth that others have fewer parts on their way.
    pub(super) fn fitting(mut self, role_count: u32, blocks: u32, desk: Desk, room: u32) -> (Self, u32, u32) {
        let least = role_count.div_ceil(blocks);
        loop {
            let (depth, bytes) = desk.fitting(self.roles, self.warps, room);
            if self.warps > USUAL && depth < FETCHES {
                self.warps -= 1;
                continue;
            }
            if self.roles * bytes <= room || (self.warps == 1 && self.roles <= least) {
                return (self, depth, bytes);
            }
            if self.warps > 1 {
                self.warps -= 1;
            } else {
                self.roles -= 1;
            }
        }
    }

    /// Each warp's room for a row of so many bytes on its way, as much of it as fits; and the shared memory of a block, of `memory` bytes, where each
    /// team has so many bytes, too.
    pub(super) fn rooms(self, of_team: u32, row: u32, memory: u32) -> (u32, u32) {
        let (before, warps) = ((self.roles * of_team).next_multiple_of(128), self.roles * self.warps);
        let fits = memory.saturating_sub(before) / warps / ROOM_STEP * ROOM_STEP;
        let room = row.next_multiple_of(ROOM_STEP).min(fits).max(ROOM_STEP);
        (room, before + warps * room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of eight warps and twelve, and rows of 14 KiB, 32 KiB and 80 bytes.
    #[test]
    fn a_warp_has_room_for_a_row_where_it_fits() {
        let rooms = |roles, warps, row| Teams { roles, warps }.rooms(8 * 72 + 48, row, 226 << 10).0;
        assert_eq!(
            [rooms(2, 4, 14336), rooms(3, 4, 14336), rooms(8, 1, 32768), rooms(2, 4, 80)],
            [14336, 14336, 26624, 2048]
        );
        for (roles, row) in [(1, 1), (3, 14336), (8, 1 << 20)] {
            for memory in [64 << 10, 99 << 10, 163 << 10, 227 << 10] {
                let (room, bytes) = Teams { roles, warps: 12 / roles }.rooms(40 * 72 + 48, row, memory);
                assert!(room.is_multiple_of(ROOM_STEP) && bytes <= memory, "{roles} {row} {memory}: {room} {bytes}");
            }
        }
    }

    /// Eight roles of a warp on 98 KiB: what does not fit is told by its size, as the host compares that.
    #[test]
    fn rooms_that_do_not_fit_are_larger_than_the_memory() {
        let bytes =
            |ranks_per_node: u32| Teams { roles: 8, warps: 1 }.rooms(ranks_per_node * 72 + 48, 14336, 98 << 10).1;
        assert!(bytes(8) <= 98 << 10 && bytes(128) <= 98 << 10, "{} {}", bytes(8), bytes(128));
        assert!(bytes(160) > 98 << 10, "{}", bytes(160));
    }

    /// 64 ranks of 8 nodes whose tokens have 32 choices, on 163 KiB: a channel and four of them.
    #[test]
    fn where_desks_are_large_a_block_carries_fewer_roles() {
        let room = (163 << 10) - 64 * 32;
        for (roles, most) in [(64, 8), (71, 24), (71 * 4, 132)] {
            let teams = Teams::new(roles, most, 8);
            let (fitting, _, bytes) = teams.fitting(roles, most, Desk::new(64, 8, 32), room);
            let fits = fitting.roles * bytes <= room;
            assert!(fits == (roles.div_ceil(most) < 8), "{roles} on {most}: {fitting:?} of {bytes}");
            assert!(roles.div_ceil(fitting.roles) <= most && fitting.warps <= teams.warps);
        }
        let teams = |roles, memory: u32| {
            let teams = Teams::new(roles, 24, 2);
            (teams, teams.fitting(roles, 24, Desk::new(2, 2, 8), memory - 64))
        };
        for (roles, warps) in [(64, 4), (48, 6)] {
            let (teams, (fitting, depth, _)) = teams(roles, 226 << 10);
            assert!(fitting == teams && (teams.warps, depth) == (warps, FETCHES), "{roles}: {fitting:?}, {depth}");
        }
        let (_, (fitting, depth, _)) = teams(48, 163 << 10);
        assert_eq!((fitting.warps, depth), (4, FETCHES), "with six warps four parts would be on their way to each");
    }

    /// By channels and ranks: 32 of two nodes of a rank and of two of two, 8 of two of eight.
    #[test]
    fn a_block_carries_its_roles_with_all_their_warps() {
        let teams = |roles, nodes| {
            let Teams { roles, warps } = Teams::new(roles, 24, nodes);
            (roles, warps)
        };
        assert_eq!([64, 128, 192].map(|roles| teams(roles, 2)), [(3, 4), (6, 2), (8, 1)]);
        assert_eq!([2, 24, 25].map(|roles| teams(roles, 2)), [(1, 6), (1, 6), (2, 6)]);
        assert_eq!([2, 96, 97, 192].map(|roles| teams(roles, 1)), [(4, 1), (4, 1), (5, 1), (8, 1)]);
        for roles in 1..400 {
            let (roles, warps) = teams(roles, 2);
            assert!(roles * warps <= TEAMS_WARPS && roles <= RING_WARPS && roles * warps >= LEAST_WARPS);
        }
    }
}
