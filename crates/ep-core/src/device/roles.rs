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
    let (nodes, ranks) = (layout.topology().nodes(), layout.topology().ranks_per_node());
    let of_channel = match kind {
        Kind::Combine => nodes * ranks,
        // Two of each other rank of the node and of each rail peer, one of each other rank.
        _ => nodes * ranks + (ranks - 1) + (nodes - 1),
    };
    channels * of_channel
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
