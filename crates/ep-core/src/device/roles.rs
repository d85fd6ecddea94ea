//! The roles of a launch as a table: which warp does what, for whom.
//!
//! Kernels find no role by arithmetic: a warp takes the row of its number. So a role that another topology adds is a row more.
//! There are two kinds of tables. A [`RoleRow`] serves one peer on one track; the launch has as many warps as the table has rows.
//! A [`BlockRole`] serves all peers on the tracks of its block, and shares its duty with other warps; every block has the same rows.
//!
//! In low latency all blocks do the same: each sends a share of a batch, and receives another. [`LowRoles`] says who does what is done once.

use crate::layout::{Kind, Layout};
use crate::port::{Duty, Role};
use crate::topology::Rank;
use crate::{c_enum, c_struct};

c_enum! {
    /// What a warp does of a duty that several warps of a block share.
    pub enum Task = "EP_TASK" {
        /// Nothing.
        None = 0,
        /// Moves rows, or sums them.
        Rows = 1,
        /// Writes headers of rows.
        Headers = 2,
        /// Tells peers which rows are there.
        Tail = 3,
        /// Tells peers which rows have been taken.
        Credit = 4,
    }
}

c_struct! {
    /// A role that every block of a launch has.
    #[derive(Eq)]
    pub struct BlockRole = "EpBlockRole" {
        /// EP_DUTY_...
        pub duty: u32,
        /// EP_TASK_...
        pub task: u32,
        /// Its number among the roles of the block with this duty and task.
        pub index: u32,
        /// How many there are.
        pub count: u32,
    }
}

/// The roles of a block of at most `N` warps: for each duty and task so many warps, in this order. Warps beyond have no task.
///
/// # Panics
/// When there are more roles than warps.
pub fn block_roles<const N: usize>(plan: &[(Duty, Task, u32)]) -> [BlockRole; N] {
    let mut rows = [BlockRole::default(); N];
    let roles = plan.iter().flat_map(|&(duty, task, count)| {
        (0..count).map(move |index| BlockRole { duty: duty.number(), task: task as u32, index, count })
    });
    let mut left = &mut rows[..];
    for role in roles {
        let (row, rest) = left.split_first_mut().expect("a block has a warp for each of its roles");
        *row = role;
        left = rest;
    }
    rows
}

c_struct! {
    /// A role of a launch.
    #[derive(Eq)]
    pub struct RoleRow = "EpRole" {
        /// EP_DUTY_...
        pub duty: u32,
        /// The rank that it serves.
        pub peer: u32,
        /// The track that it serves.
        pub track: u32,
        /// The channel that the track carries.
        pub channel: u32,
    }
}

c_struct! {
    /// Who does what is done once in a launch of low latency. What it sends is cut into as many shares as there are blocks, which other
    /// blocks may take over; what it receives, blocks divide among themselves.
    #[derive(Eq)]
    pub struct LowRoles = "EpLowRoles" {
        /// The share with which go the counts, which are said ahead of all rows.
        pub tells: u32,
        /// Shares with which go the rows' headers, of neighbouring tokens each: this and those before it, so many.
        pub tellers: u32,
        /// Tokens whose headers go with each of these, at most.
        pub told: u32,
        /// So many blocks move what is received, from the first on.
        pub moves: u32,
        /// The block that tells the user how many rows have come.
        pub counts: u32,
        /// The warp of a block that finds where a row goes, and says so there.
        pub addresses: u32,
    }
}

/// Units of headers that go with one share. With more, a block says them for microseconds; with fewer, more blocks find all rows' order first, which takes as
/// long. Between 64 and 320 it makes little difference.
const UNITS_OF_TELLER: u64 = 128;

/// The roles of a launch of low latency of `blocks` blocks of `warps` warps, which says `units` units of headers of each of its tokens ahead of the rows.
/// The last shares have the fewest rows, or none, and the last warp of a block the least to do with them. The last block moves no rows, unless there is no
/// other.
pub fn low_roles(blocks: u32, warps: u32, tokens: u32, units: u32) -> LowRoles {
    let last = blocks.saturating_sub(1);
    let wanted = (u64::from(tokens) * u64::from(units)).div_ceil(UNITS_OF_TELLER);
    let tellers = u32::try_from(wanted).unwrap_or(u32::MAX).clamp(1, blocks.max(1));
    let told = tokens.div_ceil(tellers);
    LowRoles { tells: last, tellers, told, moves: last.max(1), counts: last, addresses: warps.saturating_sub(1) }
}

/// The roles by which rank `me` moves the rows of an operation through rings, channel by channel: a call with fewer channels
/// takes as many rows from the start ([`ring_roles_of`]).
///
/// In a dispatch each other rank of the node has a sender and a receiver here, and this rank a collector, which takes in its own rows. In a
/// combine each has a returner, and this rank a reducer in its place.
///
/// Each other node adds roles. In a dispatch: a sender to its rank on this rail; a forwarder of what that rank sends; and a receiver for each of its other
/// ranks, whose rows another rank of this node forwards. In a combine: a gatherer for its rank on this rail, and a returner for each of its other ranks.
pub fn ring_roles(layout: &Layout, me: Rank, kind: Kind) -> Vec<RoleRow> {
    let topology = layout.topology();
    let mut rows = Vec::new();
    for channel in 0..layout.settings().rings().channels {
        let row = |duty: Duty, peer: Rank, track: u16| {
            let Role { duty, track, .. } = Role::serving(duty, peer, track);
            RoleRow { duty: duty.number(), peer: peer.0, track: track.into(), channel }
        };
        for node in topology.all_nodes() {
            let track = layout.near_track(node, channel);
            for peer in topology.ranks_of(node) {
                let own = (node == topology.node_of(me), topology.local_of(peer) == topology.local_of(me));
                match (kind, own) {
                    (Kind::Combine, (true, true)) => rows.push(row(Duty::Reducer, peer, track)),
                    (Kind::Combine, (false, true)) => rows.push(row(Duty::Gatherer, peer, track)),
                    (Kind::Combine, (_, false)) => rows.push(row(Duty::Returner, peer, track)),
                    (_, (true, true)) => rows.push(row(Duty::Collector, peer, track)),
                    (_, (true, false)) => {
                        rows.extend([row(Duty::Sender, peer, track), row(Duty::Receiver, peer, track)]);
                    }
                    (_, (false, true)) => {
                        let far = layout.far_track(channel);
                        rows.extend([row(Duty::Sender, peer, far), row(Duty::Forwarder, peer, track)]);
                    }
                    (_, (false, false)) => rows.push(row(Duty::Receiver, peer, track)),
                }
            }
        }
    }
    rows
}

/// How many rows of the table a call with so many channels takes.
pub fn ring_roles_of(layout: &Layout, kind: Kind, channels: u32) -> u32 {
    let topology = layout.topology();
    channels * if kind == Kind::Combine { topology.ranks() } else { topology.dispatch_roles() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;
    use crate::shape::Shape;
    use crate::topology::Topology;

    #[test]
    fn roles_of_a_block_are_numbered_within_their_duty_and_task() {
        let plan = [(Duty::Sender, Task::Rows, 2), (Duty::Receiver, Task::Rows, 1), (Duty::Sender, Task::Tail, 1)];
        let rows = block_roles::<6>(&plan);
        let seen = rows.map(|row| (row.duty, row.task, row.index, row.count));
        let [sender, receiver] = [Duty::Sender, Duty::Receiver].map(Duty::number);
        let due = [(sender, 1, 0, 2), (sender, 1, 1, 2), (receiver, 1, 0, 1), (sender, 3, 0, 1)];
        assert_eq!(seen[..4], due);
        assert_eq!(rows[4..], [BlockRole::default(); 2], "no task");
    }

    #[test]
    #[should_panic(expected = "a warp for each of its roles")]
    fn a_block_has_room_for_its_roles() {
        block_roles::<2>(&[(Duty::Placer, Task::Rows, 2), (Duty::Placer, Task::Headers, 1)]);
    }

    #[test]
    fn each_launch_of_low_latency_has_somebody_for_each_role() {
        let launches =
            [1, 2, 16, 512].into_iter().flat_map(|blocks| [0, 1, 36, 512, u32::MAX].map(|tokens| (blocks, tokens)));
        for (blocks, tokens) in launches {
            let roles = low_roles(blocks, 16, tokens, 9);
            assert!(roles.tells < blocks && roles.counts < blocks && roles.addresses < 16);
            assert!((1..=roles.tells + 1).contains(&roles.tellers), "{blocks} blocks, {tokens} tokens: {roles:?}");
            assert!(u64::from(roles.tellers) * u64::from(roles.told) >= tokens.into(), "all are told: {roles:?}");
            assert!((1..=blocks).contains(&roles.moves), "{blocks} blocks: {roles:?}");
            assert!(blocks == 1 || roles.moves <= roles.counts, "who counts moves nothing: {roles:?}");
        }
    }

    #[test]
    fn a_call_with_fewer_channels_takes_rows_from_the_start() {
        let topology = Topology::new(2, 3).unwrap();
        let shape = Shape::builder().experts(6).topk(1).hidden(16).max_tokens(4).build().unwrap();
        let settings = Settings::builder(&shape, &topology).channels(3).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        for kind in [Kind::Dispatch, Kind::Combine] {
            let rows = ring_roles(&layout, Rank(4), kind);
            for channels in 1..=3 {
                let (taken, left) = rows.split_at(ring_roles_of(&layout, kind, channels) as usize);
                assert!(
                    taken.iter().all(|row| row.channel < channels) && left.iter().all(|row| row.channel >= channels)
                );
            }
            let of = |peer| {
                let of_peer = rows.iter().filter(move |row| row.peer == peer && row.channel == 1);
                of_peer.map(|row| (row.duty, row.track)).collect::<Vec<_>>()
            };
            // Tracks of channel 1 for rows of the other node, of the own one, and between nodes.
            let [far, near, rail] = [1, 4, 7];
            let due =
                |duties: &[(Duty, u32)]| duties.iter().map(|(duty, track)| (duty.number(), *track)).collect::<Vec<_>>();
            match kind {
                Kind::Combine => {
                    assert_eq!(of(4), due(&[(Duty::Reducer, near)]), "the own rank");
                    assert_eq!(of(5), due(&[(Duty::Returner, near)]), "a rank of the own node");
                    assert_eq!(of(1), due(&[(Duty::Gatherer, far)]), "the rail's rank of the other node");
                    assert_eq!(of(2), due(&[(Duty::Returner, far)]), "another rank of it");
                }
                _ => {
                    assert_eq!(of(4), due(&[(Duty::Collector, near)]));
                    assert_eq!(of(5), due(&[(Duty::Sender, near), (Duty::Receiver, near)]));
                    assert_eq!(of(1), due(&[(Duty::Sender, rail), (Duty::Forwarder, far)]));
                    assert_eq!(of(2), due(&[(Duty::Receiver, far)]));
                }
            }
        }
    }
}
