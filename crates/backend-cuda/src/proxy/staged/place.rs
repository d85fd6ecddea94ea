//! Where a lane's records and counts lie.

use ep_core::Layout;
use ep_core::layout::Queues;
use ep_core::port::{Cell, Counter, LaneId, Offset};
use ep_core::topology::Reach;
use ep_core::{Rank, transport::Transport};

/// Records of a lane that its sender has written and its receiver has not read, at most.
pub(super) const RECORDS: u64 = 64;
/// Bytes of a record.
pub(super) const RECORD: u64 = 32;
/// Bytes of all records of a lane, at one end.
const RING: u64 = RECORDS * RECORD;

/// Where what one lane needs lies: offsets in mirrors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    /// Records to the peer, where this rank writes them.
    pub(super) outbox: Offset,
    /// The same, where they arrive in the peer's mirror.
    pub(super) arrive: Offset,
    /// Records of the peer, where they arrive here.
    pub(super) inbox: Offset,
    /// The cell at the peer that counts records to it.
    pub(super) told: Offset,
    /// The own cell that counts records of the peer.
    pub(super) heard: Offset,
    /// The cell at the peer that counts those that this rank has read.
    pub(super) credit: Offset,
    /// The own cell that counts those that the peer has read.
    pub(super) credited: Offset,
}

/// The layout of a mirror: that of the window, and records behind it.
#[derive(Clone, Debug)]
pub(super) struct Mirrored {
    pub(super) layout: Layout,
    /// Where records begin.
    records: u64,
    /// Queues to one rank, at most.
    most: u64,
    queues: Queues,
}

impl Mirrored {
    /// Beside windows of this layout, for the queues of a transport.
    pub(super) fn new(layout: &Layout, transport: &impl Transport) -> Self {
        let (queues, topology) = (transport.far_lanes(), layout.topology());
        let most = topology.all().map(|to| queues.between(layout, Rank(0), to).len()).max().unwrap_or(0) as u64;
        let bytes = u64::from(topology.ranks()) * most * 2 * RING;
        // Records are words.
        let records = layout.window_bytes().next_multiple_of(64);
        let behind = records - layout.window_bytes() + bytes;
        Self { layout: layout.followed_by(behind), records, most, queues }
    }

    /// Of the lanes of `me` to ranks of other nodes, in their order.
    pub(super) fn places(&self, me: Rank) -> Vec<(LaneId, Place)> {
        let topology = self.layout.topology();
        let far = topology.all().filter(|&peer| topology.reach(me, peer) == Reach::Far);
        let of_peer = |peer| {
            let kinds = self.queues.between(&self.layout, me, peer);
            (0..)
                .zip(kinds)
                .map(move |(number, kind)| (LaneId { peer, kind }, self.place(me, LaneId { peer, kind }, number)))
        };
        far.flat_map(of_peer).collect()
    }

    /// Both ends number the queues between them alike.
    fn place(&self, me: Rank, lane: LaneId, number: u64) -> Place {
        let ring = |of: Rank, arriving: u64| {
            let index = (u64::from(of.0) * self.most + number) * 2 + arriving;
            Offset(self.records + index * RING)
        };
        // Windows' own cells are raised by records, so a lane's line in a mirror is free for two counts.
        let line = |writer| self.layout.cell(Cell { writer, lane: lane.kind, counter: Counter::Probe }, 0).0 & !63;
        Place {
            outbox: ring(lane.peer, 0),
            arrive: ring(me, 1),
            inbox: ring(lane.peer, 1),
            told: Offset(line(me)),
            heard: Offset(line(lane.peer)),
            credit: Offset(line(me) + 8),
            credited: Offset(line(lane.peer) + 8),
        }
    }
}

#[cfg(test)]
mod tests {
    use ep_core::{Settings, Shape, Topology};
    use ep_loop::Loop;

    use super::*;

    #[test]
    fn what_two_ranks_call_the_same_place_is_one_and_no_two_lanes_share_any() {
        let topology = Topology::new(3, 2).unwrap();
        let shape = Shape::builder().experts(6).topk(1).hidden(64).max_tokens(4).build().unwrap();
        for low_latency in [false, true] {
            let settings = Settings::builder(&shape, &topology).channels(2).low_latency(low_latency).build().unwrap();
            let layout = Layout::new(&shape, &topology, &settings).unwrap();
            for queues in Queues::NAMED {
                let mirrored = Mirrored::new(&layout, &Loop::new().queues(queues));
                let (regions, mirrors) = (layout.regions(), mirrored.layout.regions());
                assert_eq!(mirrors[..regions.len()], regions[..], "a mirror has a window's offsets");
                assert_eq!(mirrors.last().unwrap().span.end(), mirrored.layout.window_bytes());
                let all: Vec<_> = topology.all().map(|me| mirrored.places(me)).collect();
                for me in topology.all() {
                    let mut rings = Vec::new();
                    for (lane, place) in &all[me.index()] {
                        let back = LaneId { peer: me, ..*lane };
                        let (_, there) = all[lane.peer.index()].iter().find(|(other, _)| *other == back).unwrap();
                        assert_eq!((place.arrive, place.told), (there.inbox, there.heard));
                        assert_eq!(place.credit, there.credited);
                        rings.extend([place.outbox.0, place.inbox.0]);
                    }
                    rings.sort_unstable();
                    assert!(rings.windows(2).all(|two| two[1] - two[0] >= RING), "{rings:?}");
                    assert!(rings.first().is_none_or(|&first| first >= layout.window_bytes()));
                    assert!(rings.last().is_none_or(|&last| last + RING <= mirrored.layout.window_bytes()));
                }
            }
        }
    }
}
