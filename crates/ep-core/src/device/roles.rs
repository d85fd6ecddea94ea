//! The roles of a launch as a table: which warp does what, for whom.
//!
//! Kernels find no role by arithmetic: a warp takes the row of its number. So a role that another topology adds is a row more.

use crate::c_struct;
use crate::layout::{Kind, Layout};
use crate::port::{Duty, Role};
use crate::topology::Rank;

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

/// The roles by which rank `me` moves the rows of an operation through the rings of its node, channel by channel: a call with fewer channels
/// takes as many rows from the start ([`ring_roles_of`]).
///
/// In a dispatch each rank of the node has a sender and a receiver here, and this rank a collector, which takes in its own rows. In a combine
/// each has a returner, and this rank a reducer in its place.
pub fn ring_roles(layout: &Layout, me: Rank, kind: Kind) -> Vec<RoleRow> {
    let topology = layout.topology();
    let node = topology.node_of(me);
    let row = |duty: Duty, peer: Rank, channel: u32| {
        let Role { duty, track, .. } = Role::serving(duty, peer, layout.near_track(node, channel));
        RoleRow { duty: duty.number(), peer: peer.0, track: track.into(), channel }
    };
    let mut rows = Vec::new();
    for channel in 0..layout.settings().rings().channels {
        for peer in topology.ranks_of(node) {
            match (kind, peer == me) {
                (Kind::Combine, true) => rows.push(row(Duty::Reducer, peer, channel)),
                (Kind::Combine, false) => rows.push(row(Duty::Returner, peer, channel)),
                (_, true) => rows.push(row(Duty::Collector, peer, channel)),
                (_, false) => rows.extend([row(Duty::Sender, peer, channel), row(Duty::Receiver, peer, channel)]),
            }
        }
    }
    rows
}

/// How many rows of the table a call with so many channels takes.
pub fn ring_roles_of(layout: &Layout, kind: Kind, channels: u32) -> u32 {
    let ranks = layout.topology().ranks_per_node();
    channels * if kind == Kind::Combine { ranks } else { 2 * ranks - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;
    use crate::shape::Shape;
    use crate::topology::Topology;

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
            assert!(rows.iter().all(|row| (3..6).contains(&row.peer)), "the ranks of the own node");
            let own: Vec<_> = rows.iter().filter(|row| row.peer == 4).map(|row| row.duty).collect();
            let due = if kind == Kind::Combine { Duty::Reducer } else { Duty::Collector };
            assert_eq!(own, [due.number(); 3]);
            assert!(rows.iter().all(|row| row.track == 3 + row.channel), "tracks of the own node");
        }
    }
}
