//! Queues between nodes: which lanes to a rank share one, and who posts to it.

use super::Layout;
use crate::terms::{Duty, LaneId, LaneKind, Role};
use crate::topology::{Rank, Reach};

/// The queue to a rank of another node that takes what is posted on a lane.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Queue {
    /// One for this lane alone: the role that posts on the lane posts to it.
    #[default]
    Own,
    /// The one with this number, with all lanes to the rank that name the same: a *coordinator* posts to it, and takes
    /// from the roles what they would have posted.
    Shared(u8),
}

/// Which queue takes what: the table by which lanes to a rank of another node map to queues.
///
/// A lane is what roles think of: a path with cells of its own, and one poster. A queue is what a machine has (a queue
/// pair, a work queue): what is posted to it leaves in order, and it admits one poster, too. Where every lane has a
/// queue of its own, both are the same. Where queues are scarce, lanes share them:
///
/// | lane | [`PER_ROLE`](Self::PER_ROLE) | [`ROWS_AND_CREDIT`](Self::ROWS_AND_CREDIT) | [`ROWS_WITH_CREDIT`](Self::ROWS_WITH_CREDIT) | [`ONE`](Self::ONE) |
/// |---|---|---|---|---|
/// | rows and tails of all tracks | own | 0 | 0 | 0 |
/// | credit of all tracks | own | 1 | 0 | 0 |
/// | control | own | own | own | 0 |
/// | watch, low latency | own | own | own | own |
///
/// Whatever the table says, cells stay where they are and belong to the same lane; a peer need not know the table.
/// Roles and coordinators name lanes, and a machine looks up the queue of each ([`Queues::queue`]).
///
/// Two kinds of lanes never share:
///
/// - *Watch*: it must be heard when rows are stuck. A suspicion would wait where the coordinator waits, for room in the
///   queue; a verdict is told after a failure, when the coordinators have ended and the shared queues were stopped, or
///   cut.
/// - *Low latency*: an operation is the caller's between its two halves, and no role of it runs that could take the
///   mail. Each of its lanes has one posting role already.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Queues {
    rows: Queue,
    credit: Queue,
    control: Queue,
}

impl Queues {
    /// A queue for each role: every lane has its own.
    pub const PER_ROLE: Self = Self::new(Queue::Own, Queue::Own, Queue::Own);
    /// One for the rows of all tracks and one for their credit.
    pub const ROWS_AND_CREDIT: Self = Self::new(Queue::Shared(0), Queue::Shared(1), Queue::Own);
    /// One for the rows and the credit of all tracks together.
    pub const ROWS_WITH_CREDIT: Self = Self::new(Queue::Shared(0), Queue::Shared(0), Queue::Own);
    /// One for everything that can share.
    pub const ONE: Self = Self::new(Queue::Shared(0), Queue::Shared(0), Queue::Shared(0));
    /// The tables that have names.
    pub const NAMED: [Self; 4] = [Self::PER_ROLE, Self::ROWS_AND_CREDIT, Self::ROWS_WITH_CREDIT, Self::ONE];

    /// A table: the queue of the rows (of all tracks, with their tails), of their credit, and of the control lane.
    pub const fn new(rows: Queue, credit: Queue, control: Queue) -> Self {
        Self { rows, credit, control }
    }

    /// The queue of a lane to a rank of another node.
    pub const fn of(self, kind: LaneKind) -> Queue {
        match kind {
            LaneKind::Data(_) => self.rows,
            LaneKind::Credit(_) => self.credit,
            LaneKind::Control => self.control,
            LaneKind::Watch | LaneKind::LowRows | LaneKind::LowRow(_) | LaneKind::LowDone | LaneKind::Mailbox(..) => {
                Queue::Own
            }
        }
    }

    /// Whether lanes of this kind are posted to the shared queue with this number.
    pub const fn carries(self, number: u8, kind: LaneKind) -> bool {
        matches!(self.of(kind), Queue::Shared(shared) if shared == number)
    }

    /// The numbers of the shared queues, each once.
    pub fn shared(self) -> impl Iterator<Item = u8> {
        let all = [self.rows, self.credit, self.control];
        let numbers = all.into_iter().enumerate().filter(move |(at, queue)| !all[..*at].contains(queue));
        numbers.filter_map(|(_, queue)| match queue {
            Queue::Own => None,
            Queue::Shared(number) => Some(number),
        })
    }

    /// The coordinator that posts what belongs to `lane` of rank `from`; none where the role that has it to post does
    /// so itself: within a node, and where the lane has a queue of its own.
    #[inline]
    pub fn coordinator(self, layout: &Layout, from: Rank, lane: LaneId) -> Option<Role> {
        let Queue::Shared(number) = self.of(lane.kind) else { return None };
        let far = layout.topology().reach(from, lane.peer) == Reach::Far;
        far.then(|| Self::poster(number, lane.peer))
    }

    /// The coordinator that posts to the shared queue `number` to `peer`.
    pub const fn poster(number: u8, peer: Rank) -> Role {
        Role::serving(Duty::Coordinator, peer, number as u16)
    }

    /// The queue that takes what rank `from` posts on `lane`, named after the first lane that it carries: rows before
    /// credit before control.
    #[inline]
    pub fn queue(self, layout: &Layout, from: Rank, lane: LaneId) -> LaneId {
        let Queue::Shared(number) = self.of(lane.kind) else { return lane };
        if layout.topology().reach(from, lane.peer) != Reach::Far {
            return lane;
        }
        let first = layout.far_track(0);
        let kinds = [LaneKind::Data(first), LaneKind::Credit(first), LaneKind::Control];
        let kind = kinds.into_iter().find(|&kind| self.carries(number, kind)).unwrap_or(lane.kind);
        LaneId { kind, ..lane }
    }

    /// The queues from `from` to `to`, a rank of another node, each named after its first lane; none where they are of
    /// one node, or are no neighbours.
    ///
    /// Ranks of a rail have those of throughput mode. With low latency every rank has its lanes, and the watch lane, to
    /// every other.
    pub fn between(self, layout: &Layout, from: Rank, to: Rank) -> Vec<LaneKind> {
        let mut queues = Vec::new();
        for kind in far_lanes(layout, from, to) {
            let queue = self.queue(layout, from, LaneId { peer: to, kind }).kind;
            if !queues.contains(&queue) {
                queues.push(queue);
            }
        }
        queues
    }
}

/// The lanes from `from` to `to`, a rank of another node.
fn far_lanes(layout: &Layout, from: Rank, to: Rank) -> Vec<LaneKind> {
    let (topology, low) = (layout.topology(), layout.settings().low_latency());
    if topology.reach(from, to) != Reach::Far {
        return Vec::new();
    }
    let rail = topology.local_of(from) == topology.local_of(to);
    let mut lanes = Vec::new();
    if rail || low {
        lanes.push(LaneKind::Watch);
    }
    if rail {
        lanes.push(LaneKind::Control);
        let tracks = (0..layout.settings().rings().channels).map(|channel| layout.far_track(channel));
        lanes.extend(tracks.flat_map(|track| [LaneKind::Data(track), LaneKind::Credit(track)]));
    }
    if low {
        lanes.extend([LaneKind::LowRows, LaneKind::LowDone]);
    }
    lanes
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::{Settings, Shape, Topology};

    fn layout(low: bool) -> Layout {
        let topology = Topology::new(3, 2).unwrap();
        let shape = Shape::builder().experts(6).topk(2).hidden(16).max_tokens(4).build().unwrap();
        let settings = Settings::builder(&shape, &topology).channels(2).low_latency(low).build().unwrap();
        Layout::new(&shape, &topology, &settings).unwrap()
    }

    /// Every table that there is, up to the numbers.
    fn tables() -> Vec<Queues> {
        let queues = [Queue::Own, Queue::Shared(0), Queue::Shared(1), Queue::Shared(2)];
        let with = |rows| move |credit| queues.map(|control| Queues::new(rows, credit, control));
        queues.into_iter().flat_map(|rows| queues.into_iter().flat_map(with(rows))).collect()
    }

    #[test]
    fn every_lane_has_one_queue_and_every_queue_one_poster() {
        let layout = layout(true);
        let (from, peer) = (Rank(0), Rank(2));
        for table in tables() {
            let queues = table.between(&layout, from, peer);
            let mut lanes = BTreeMap::<LaneKind, Vec<LaneKind>>::new();
            let mut posters = BTreeMap::<LaneKind, BTreeSet<Option<Role>>>::new();
            for kind in far_lanes(&layout, from, peer) {
                let lane = LaneId { peer, kind };
                let queue = table.queue(&layout, from, lane);
                assert_eq!(table.queue(&layout, from, queue), queue, "a queue is its own: {table:?}");
                lanes.entry(queue.kind).or_default().push(kind);
                posters.entry(queue.kind).or_default().insert(table.coordinator(&layout, from, lane));
            }
            assert_eq!(BTreeSet::from_iter(lanes.keys()), BTreeSet::from_iter(&queues), "{table:?}");
            for (queue, posters) in &posters {
                // One coordinator for all its lanes, or the one role of its one lane.
                let one = posters.len() == 1 && (!posters.contains(&None) || lanes[queue].len() == 1);
                assert!(one, "{queue:?} of {table:?}: {posters:?} for {:?}", lanes[queue]);
            }
            let coordinators: BTreeSet<Role> = posters.into_values().flatten().flatten().collect();
            assert_eq!(coordinators, table.shared().map(|number| Queues::poster(number, peer)).collect());
        }
    }

    #[test]
    fn the_named_tables() {
        let layout = layout(false);
        let (rows, credit) = (LaneKind::Data(layout.far_track(0)), LaneKind::Credit(layout.far_track(0)));
        let between = |table: Queues, to| table.between(&layout, Rank(0), Rank(to));
        for peer in [2, 4] {
            assert_eq!(between(Queues::PER_ROLE, peer).len(), 2 + 2 * 2);
            assert_eq!(between(Queues::ROWS_AND_CREDIT, peer), [LaneKind::Watch, LaneKind::Control, rows, credit]);
            assert_eq!(between(Queues::ONE, peer), [LaneKind::Watch, rows]);
        }
        for (table, peer) in Queues::NAMED.into_iter().flat_map(|table| [0, 1, 3, 5].map(|peer| (table, peer))) {
            assert!(between(table, peer).is_empty(), "only the rail has lanes in throughput mode");
        }
    }

    #[test]
    fn low_latency_is_a_full_mesh_on_queues_of_its_own() {
        let layout = layout(true);
        for table in Queues::NAMED {
            let between = |to| table.between(&layout, Rank(0), Rank(to));
            assert_eq!(between(3), [LaneKind::Watch, LaneKind::LowRows, LaneKind::LowDone]);
            assert!(between(1).is_empty());
        }
        assert_eq!(Queues::ONE.between(&layout, Rank(0), Rank(2)).len(), 4);
    }

    #[test]
    fn within_a_node_every_lane_is_its_own_queue() {
        let layout = layout(false);
        for kind in (0..LaneKind::count(layout.tracks())).map(LaneKind::from_index) {
            let lane = LaneId { peer: Rank(1), kind };
            assert_eq!(Queues::ONE.queue(&layout, Rank(0), lane), lane);
            assert_eq!(Queues::ONE.coordinator(&layout, Rank(0), lane), None);
        }
    }
}
