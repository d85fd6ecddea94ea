//! Both ends of the rings with each neighbour, for the life of a generation.

use crate::error::Fault;
use crate::layout::{Kind, Layout, Queues};
use crate::machine::Machine;
use crate::plant::Plant;
use crate::port::{Cell, Counter, Duty, LaneKind, Role};
use crate::ring::{Consumer, Geometry, Producer};
use crate::roles::{Operation, RoleFuture, Standing, coordinate};
use crate::settings::{OutboxSteps, Rings};
use crate::topology::{Rank, Reach};

/// The rings with each rank, and how they are cut now.
#[derive(Debug)]
pub(super) struct Links {
    /// None after an operation whose rows lay in outboxes.
    cut: Option<Rings>,
    /// `[ranks]`.
    out: Vec<Tracks<Producer>>,
    inn: Vec<Tracks<Consumer>>,
}

/// Something for each track that two ranks have: those of all nodes within a node, those along the rail between nodes, and
/// none where the ranks are no neighbours.
#[derive(Clone, Debug)]
struct Tracks<T> {
    first: u16,
    each: Vec<T>,
}

impl<T> Tracks<T> {
    fn place(&self, track: u16) -> Option<usize> {
        track.checked_sub(self.first).map(usize::from)
    }

    fn get(&self, track: u16) -> Option<&T> {
        self.each.get(self.place(track)?)
    }

    fn get_mut(&mut self, track: u16) -> Option<&mut T> {
        let place = self.place(track)?;
        self.each.get_mut(place)
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut T)> {
        (self.first..).zip(&mut self.each)
    }

    /// Each of them, to be taken once.
    fn takeable(&mut self) -> Tracks<Option<&mut T>> {
        Tracks { first: self.first, each: self.each.iter_mut().map(Some).collect() }
    }
}

impl Links {
    /// Fresh rings of `me`, cut as the communicator says.
    pub(super) fn new(layout: &Layout, me: Rank) -> Self {
        let (topology, cut) = (*layout.topology(), layout.settings().rings());
        let first_far = layout.far_track(0);
        let tracks = |peer: Rank| match topology.reach(me, peer) {
            Reach::Near => 0..first_far,
            Reach::Far if topology.local_of(me) == topology.local_of(peer) => {
                first_far..first_far + cut.channels as u16
            }
            _ => 0..0,
        };
        fn each<T>(tracks: std::ops::Range<u16>, ring: impl Fn(u16) -> T) -> Tracks<T> {
            Tracks { first: tracks.start, each: tracks.map(ring).collect() }
        }
        let out = |peer| each(tracks(peer), |track| Producer::new(layout.geometry(&cut, track)));
        let inn = |peer| each(tracks(peer), |track| Consumer::new(layout.geometry(&cut, track)));
        Self { cut: Some(cut), out: topology.all().map(out).collect(), inn: topology.all().map(inn).collect() }
    }

    /// Where the rings with `peer`, of this rail, stand on each channel of a call.
    fn standings(&self, layout: &Layout, peer: Rank, channels: u32) -> Vec<Standing> {
        let standing = |channel| {
            let track = layout.far_track(channel);
            let (out, inn) = (self.out[peer.index()].get(track)?, self.inn[peer.index()].get(track)?);
            Some(Standing { tail: out.tail(), index: out.index(), head: inn.head() })
        };
        (0..channels).filter_map(standing).collect()
    }

    /// The coordinators of all queues to rail peers that lanes share: from where the rings stand now.
    pub(super) fn coordinators<'a, M: Machine>(&self, operation: &'a Operation<'_, M>) -> Vec<RoleFuture<'a>> {
        let coordinator = |queue: u8, peer: Rank| {
            let standings = self.standings(operation.layout, peer, operation.rings.channels);
            let role = Queues::poster(queue, peer);
            let port = operation.port(role);
            operation.role(role, async move { coordinate(operation, port, (queue, peer), &standings).await })
        };
        let to_all = |queue| operation.rail.iter().map(move |&peer| coordinator(queue, peer));
        operation.queues().shared().flat_map(to_all).collect()
    }

    /// The ends of all rings, to be handed to roles.
    pub(super) fn ends(&mut self) -> Ends<'_> {
        Ends {
            out: self.out.iter_mut().map(Tracks::takeable).collect(),
            inn: self.inn.iter_mut().map(Tracks::takeable).collect(),
        }
    }

    /// Cuts the rings anew for an operation that asks for another cut: once all rings into a peer are empty. Outboxes are cut anew by
    /// every operation, as those of a dispatch and of a combine share their memory; they are empty when it has ended. Where they share it
    /// with rings, too, a peer's outbox is when the peer is done with the operation before: others may be slower than this rank.
    pub(super) async fn cut<M: Machine>(&mut self, operation: &Operation<'_, M>) -> Result<(), Fault> {
        let pulled = operation.pulled;
        if !pulled && self.cut == Some(operation.rings) {
            return Ok(());
        }
        let mut port = operation.port(Role::new(Duty::Control));
        let laid =
            (pulled && operation.kind != Kind::Combine).then(|| operation.layout.outbox(&operation.rings, 0).slots());
        let steps = operation.outbox_steps();
        let geometry = |track| {
            let geometry = operation.layout.geometry(&operation.rings, track);
            match steps {
                Some(OutboxSteps { chunk, credit, .. }) => {
                    Geometry { slots: laid.unwrap_or(geometry.slots), chunk, credit }
                }
                None => geometry,
            }
        };
        for peer in operation.neighbours() {
            if !pulled && self.cut.is_none() && !operation.plants(Plant::RingsOverOutboxes) {
                port.wait(Cell::new(peer, LaneKind::Control, Counter::Done), operation.op - 1).await?;
            }
            for (track, ring) in self.out[peer.index()].iter_mut() {
                if !ring.is_empty() {
                    let head = Cell::new(peer, LaneKind::Credit(track), Counter::Head);
                    port.wait(head, ring.tail()).await?;
                    ring.settle();
                }
            }
            for (track, ring) in self.out[peer.index()].iter_mut() {
                ring.restart(geometry(track));
                steps.inspect(|steps| ring.narrow(steps.window));
            }
            for (track, ring) in self.inn[peer.index()].iter_mut() {
                ring.restart(geometry(track));
            }
        }
        self.cut = (!pulled).then_some(operation.rings);
        Ok(())
    }
}

/// Ends of rings, each to be taken once.
pub(super) struct Ends<'a> {
    out: Vec<Tracks<Option<&'a mut Producer>>>,
    inn: Vec<Tracks<Option<&'a mut Consumer>>>,
}

impl<'a> Ends<'a> {
    /// The filling end of the ring on `track` to `peer`; none when there is none, or it was taken.
    pub(super) fn out(&mut self, peer: Rank, track: u16) -> Option<&'a mut Producer> {
        self.out.get_mut(peer.index())?.get_mut(track)?.take()
    }

    /// The emptying end of the ring on `track` from `peer`; none when there is none, or it was taken.
    pub(super) fn inn(&mut self, peer: Rank, track: u16) -> Option<&'a mut Consumer> {
        self.inn.get_mut(peer.index())?.get_mut(track)?.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Settings, Shape, Topology};

    #[test]
    fn only_rings_that_exist_are_held() {
        let topology = Topology::new(128, 8).unwrap();
        let shape = Shape::builder().experts(1024).topk(8).hidden(7168).max_tokens(128).build().unwrap();
        let settings = Settings::builder(&shape, &topology).channels(4).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        let mut links = Links::new(&layout, Rank(9));
        let held = |links: &Links| links.out.iter().map(|tracks| tracks.each.len()).sum::<usize>();
        assert_eq!(held(&links), 7 * 128 * 4 + 127 * 4);
        let mut ends = links.ends();
        for track in [0, layout.far_track(0) - 1] {
            assert!(ends.out(Rank(8), track).is_some() && ends.inn(Rank(8), track).is_some(), "of the node");
            assert!(ends.out(Rank(8), track).is_none(), "taken");
            assert!(ends.out(Rank(17), track).is_none(), "a rank of the rail has no near rings");
        }
        for track in [layout.far_track(0), layout.far_track(3)] {
            assert!(ends.out(Rank(17), track).is_some() && ends.inn(Rank(17), track).is_some(), "of the rail");
            assert!(ends.inn(Rank(8), track).is_none(), "a rank of the node has no far rings");
        }
        assert!(ends.out(Rank(18), 0).is_none() && ends.out(Rank(9), 0).is_none(), "no neighbour");
        assert!(ends.inn(Rank(17), layout.far_track(4)).is_none(), "no such channel");
    }
}
