//! Both ends of the rings with each neighbour, for the life of a generation.

use crate::error::Fault;
use crate::layout::Layout;
use crate::machine::Machine;
use crate::port::{Cell, Counter, Duty, LaneKind, Role};
use crate::ring::{Consumer, Producer};
use crate::roles::{Operation, RoleFuture, Standing, coordinate};
use crate::settings::Rings;
use crate::topology::{Rank, Reach};

/// The rings with each rank, `[ranks][tracks]`, empty for ranks that are no neighbours, and how they are cut now.
#[derive(Debug)]
pub(super) struct Links {
    cut: Rings,
    out: Vec<Vec<Producer>>,
    inn: Vec<Vec<Consumer>>,
}

impl Links {
    /// Fresh rings of `me`, cut as the communicator says.
    pub(super) fn new(layout: &Layout, me: Rank) -> Self {
        let (topology, cut) = (*layout.topology(), layout.settings().rings());
        let tracks = |peer: Rank| match topology.reach(me, peer) {
            Reach::Near => 0..layout.far_track(0),
            Reach::Far if topology.local_of(me) == topology.local_of(peer) => {
                layout.far_track(0)..layout.far_track(cut.channels)
            }
            _ => 0..0,
        };
        // Far rings stand behind the near ones that a rail peer does not have, so that tracks stay indices.
        let all = |peer: Rank| 0..tracks(peer).end;
        let out =
            topology.all().map(|peer| all(peer).map(|track| Producer::new(layout.geometry(&cut, track))).collect());
        let inn =
            topology.all().map(|peer| all(peer).map(|track| Consumer::new(layout.geometry(&cut, track))).collect());
        Self { cut, out: out.collect(), inn: inn.collect() }
    }

    /// Where the rings with `peer`, of this rail, stand on each channel of a call.
    pub(super) fn standings(&self, layout: &Layout, peer: Rank, channels: u32) -> Vec<Standing> {
        let standing = |channel| {
            let track = usize::from(layout.far_track(channel));
            let (out, inn) = (&self.out[peer.index()][track], &self.inn[peer.index()][track]);
            Standing { tail: out.tail(), index: out.index(), head: inn.head() }
        };
        (0..channels).map(standing).collect()
    }

    /// The coordinators of all rail peers, where there are any: from where the rings stand now.
    pub(super) fn coordinators<'a, M: Machine>(&self, operation: &'a Operation<'_, M>) -> Vec<RoleFuture<'a>> {
        if !operation.is_coordinated() {
            return Vec::new();
        }
        let coordinator = |&peer: &Rank| {
            let standings = self.standings(operation.layout, peer, operation.rings.channels);
            let role = Role::serving(Duty::Coordinator, peer, operation.layout.far_track(0));
            let port = operation.port(role);
            operation.role(role, async move { coordinate(operation, port, peer, &standings).await })
        };
        operation.rail.iter().map(coordinator).collect()
    }

    /// The ends of all rings, to be handed to roles.
    pub(super) fn ends(&mut self) -> Ends<'_> {
        fn each<T>(rings: &mut [Vec<T>]) -> Vec<Vec<Option<&mut T>>> {
            rings.iter_mut().map(|tracks| tracks.iter_mut().map(Some).collect()).collect()
        }
        Ends { out: each(&mut self.out), inn: each(&mut self.inn) }
    }

    /// Cuts the rings anew for an operation that asks for another cut: once all rings into a peer are empty.
    pub(super) async fn cut<M: Machine>(&mut self, operation: &Operation<'_, M>) -> Result<(), Fault> {
        if operation.rings == self.cut {
            return Ok(());
        }
        let mut port = operation.port(Role::new(Duty::Control));
        let geometry = |track| operation.layout.geometry(&operation.rings, track);
        for peer in operation.neighbours() {
            for (track, ring) in (0u16..).zip(&mut self.out[peer.index()]) {
                if !ring.is_empty() {
                    let head = Cell::new(peer, LaneKind::Credit(track), Counter::Head);
                    port.wait(head, ring.tail()).await?;
                    ring.settle();
                }
            }
            for (track, ring) in (0u16..).zip(&mut self.out[peer.index()]) {
                ring.restart(geometry(track));
            }
            for (track, ring) in (0u16..).zip(&mut self.inn[peer.index()]) {
                ring.restart(geometry(track));
            }
        }
        self.cut = operation.rings;
        Ok(())
    }
}

/// Ends of rings, each to be taken once.
pub(super) struct Ends<'a> {
    out: Vec<Vec<Option<&'a mut Producer>>>,
    inn: Vec<Vec<Option<&'a mut Consumer>>>,
}

impl<'a> Ends<'a> {
    /// The filling end of the ring on `track` to `peer`; none when there is none, or it was taken.
    pub(super) fn out(&mut self, peer: Rank, track: u16) -> Option<&'a mut Producer> {
        self.out.get_mut(peer.index())?.get_mut(usize::from(track))?.take()
    }

    /// The emptying end of the ring on `track` from `peer`; none when there is none, or it was taken.
    pub(super) fn inn(&mut self, peer: Rank, track: u16) -> Option<&'a mut Consumer> {
        self.inn.get_mut(peer.index())?.get_mut(usize::from(track))?.take()
    }
}
