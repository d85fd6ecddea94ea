//! Dispatch and combine, composed of plan and roles: throughput mode here, low latency in [`low_latency`].
//!
//! [`Endpoint`] is what users see; [`Engine`] implements it over any [`Machine`] whose roles run on a CPU. Operations are
//! numbered, the same on all ranks; each runs its roles and, beside them, a watch role. When a role fails, all stop, the
//! lanes are reset, the verdict goes to every peer, and the communicator is poisoned until [`Endpoint::recover`].
//!
//! Results outside of the window lie in [`Buffer`]s, whose memory serves later calls once they are dropped. What a contract leaves
//! undefined in them (rows beyond the received ones) is what an earlier call left there.

mod by_expert;
mod checks;
mod combine;
mod desk;
mod dispatch;
pub mod endpoint;
pub mod handle;
mod links;
pub mod low_latency;
mod mark;
mod movers;
mod recover;
pub mod stats;

use std::future::Future;
use std::pin::pin;
use std::rc::Rc;

use futures_util::future::{Either, select};
use tracing::Instrument;

pub use crate::buffers::{Age, Ages, Arena, Buffer, Extent, Held, HostRows, Lease, Piece, Scales};
pub use desk::Desk;
pub use endpoint::{
    ByExpert, Combine, Combined, Counts, Dispatch, Endpoint, Event, ExpertSlots, Ready, Received, Routing, Scalar,
};
pub use handle::{Handle, Kept, Replay};
pub use low_latency::LowLatency;
pub use mark::Mark;
pub use stats::{PeerStats, Stats, Ways};

use crate::buffers::Pool;
use crate::error::{Error, Failure, Fault};
use crate::layout::{Block, Kind, Layout};
use crate::machine::Machine;
use crate::plan::Routed;
use crate::port::{Nanos, Scope};
use crate::roles::{Board, Operation, Times, Vigil, given_up, last_words, verdict, watch};
use crate::settings::{OutboxUse, Rings};
use crate::topology::{Rank, RankSet, Reach, Topology};
use links::Links;
use low_latency::Low;

/// An endpoint whose roles run as futures on the thread of its rank, over the ports of a [`Machine`].
#[derive(Debug)]
pub struct Engine<M: Machine> {
    machine: M,
    desk: Desk,
    neighbours: Neighbours,
    /// Made by the first operation of throughput mode: who only uses low latency needs none.
    links: Option<Links>,
    low: Low,
    vigil: Vigil,
    /// Memory of results outside of the window.
    pool: Pool,
    /// But for the ways of rows, which the desk counts.
    stats: Stats,
}

/// The ranks that a rank has lanes with.
#[derive(Debug)]
struct Neighbours {
    /// The other ranks of its node, ascending.
    near: Vec<Rank>,
    /// The ranks of other nodes with its local index, ascending.
    rail: Vec<Rank>,
}

impl Neighbours {
    fn of(topology: &Topology, me: Rank, mask: &RankSet) -> Self {
        let takes_part = |rank: &Rank| *rank != me && !mask.contains(*rank);
        let rail = topology.all_nodes().map(|node| topology.rank_at(node, topology.local_of(me)));
        Self {
            near: topology.ranks_of(topology.node_of(me)).filter(takes_part).collect(),
            rail: rail.filter(takes_part).collect(),
        }
    }
}

impl<M: Machine> Engine<M> {
    /// An endpoint over `machine`, in generation 1.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for settings with outboxes, where the machine's ports do not [get](crate::port::Port::get).
    pub fn new(machine: M) -> Result<Self, Error> {
        if machine.layout().settings().has_outboxes() && !machine.capabilities().get {
            return Err(Error::unsupported("pulled placement, or outboxes", "a machine whose ports can get"));
        }
        let (layout, me, nobody) = (machine.layout().clone(), machine.rank(), RankSet::new());
        Ok(Self {
            neighbours: Neighbours::of(layout.topology(), me, &nobody),
            links: None,
            low: Low::new(&layout, me, &nobody, [layout.settings().operations_before(); 2]),
            vigil: Vigil::new(layout.topology().ranks() as usize),
            pool: Pool::default(),
            stats: Stats::new(&layout),
            desk: Desk::new(layout, me),
            machine,
        })
    }

    /// The machine underneath.
    pub const fn machine(&self) -> &M {
        &self.machine
    }

    /// The layout of every rank's window.
    pub const fn layout(&self) -> &Layout {
        self.desk.layout()
    }

    /// Bytes of a row of the experts' results.
    fn result_bytes(&self) -> usize {
        self.desk.shape().result_bytes() as usize
    }
}

/// A started operation and the state of the engine that its work changes.
struct Started<'a, M: Machine> {
    operation: Operation<'a, M>,
    links: &'a mut Links,
    vigil: &'a mut Vigil,
    arena: &'a Arena,
    pool: &'a Pool,
    granted: &'a mut Option<Block>,
}

/// How an operation ended on this rank.
struct Ended<T> {
    result: Result<T, Failure>,
    waited: Vec<Nanos>,
}

impl<M: Machine> Engine<M> {
    /// Numbers and starts the next operation. `alike`: what all ranks say alike beside the rings, the dispatch that is replayed and options.
    fn start(&mut self, kind: Kind, (rings, outbox): (Rings, OutboxUse), alike: u64) -> Started<'_, M> {
        let started = self.machine.now();
        let op = self.desk.start();
        let ranks = self.desk.layout.topology().ranks() as usize;
        let operation = Operation {
            machine: &self.machine,
            layout: &self.desk.layout,
            me: self.desk.me,
            mask: &self.desk.mask,
            near: &self.neighbours.near,
            rail: &self.neighbours.rail,
            listeners: self.low.listeners(self.desk.layout.settings()),
            op,
            first_op: self.desk.first_op,
            generation: self.desk.generation,
            kind,
            rings,
            pulled: self.desk.layout.is_pulled(),
            outbox,
            settings: self.desk.layout.hash(&rings).wrapping_add(alike),
            times: Times::new(started, self.desk.layout.settings().deadline()),
            board: Rc::new(Board::new(ranks)),
        };
        let links = self.links.get_or_insert_with(|| Links::new(&self.desk.layout, self.desk.me));
        let granted = &mut self.desk.granted;
        Started { operation, links, vigil: &mut self.vigil, arena: &self.desk.arena, pool: &self.pool, granted }
    }

    /// Takes note of how an operation ended.
    fn end<T>(&mut self, ended: Ended<T>) -> Result<T, Error> {
        for (peer, waited) in self.stats.peers.iter_mut().zip(ended.waited) {
            peer.waited = peer.waited + waited;
        }
        let value = self.desk.end(ended.result)?;
        self.stats.operations += 1;
        Ok(value)
    }

    /// Counts the rows that a dispatch moved over each link; a combine moves as many the other way.
    fn count_rows(&mut self, routed: &Routed, dispatch: bool) {
        let row = *self.desk.layout.row();
        let wire = if dispatch { row } else { row.results() }.wire_bytes();
        let topology = *self.desk.layout.topology();
        let (me, exchange) = (self.desk.me, &routed.exchange);
        let sources =
            |gate: Rank| topology.all_nodes().map(move |node| topology.rank_at(node, topology.local_of(gate)));
        for (rank, peer) in topology.all().zip(&mut self.stats.peers) {
            let (sent, received) = match topology.reach(me, rank) {
                Reach::Own => (exchange.rows(me, me), exchange.rows(me, me)),
                Reach::Near => {
                    let sent: u32 = sources(me).map(|source| exchange.rows(source, rank)).sum();
                    (sent, sources(rank).map(|source| exchange.rows(source, me)).sum())
                }
                Reach::Far if topology.local_of(rank) == topology.local_of(me) => {
                    let node = topology.node_of(rank).index();
                    (routed.by_node[node].len() as u32, routed.fanout[node].tokens().len() as u32)
                }
                Reach::Far => (0, 0),
            };
            let (sent, received) = if dispatch { (sent, received) } else { (received, sent) };
            peer.count(sent.into(), received.into(), wire);
        }
    }
}

/// Runs the roles of an operation beside its watch. When it fails: stops everything, finds the culprit, tells all peers.
async fn run<M: Machine, T>(
    operation: &Operation<'_, M>,
    vigil: &mut Vigil,
    work: impl Future<Output = Result<T, Fault>>,
) -> Ended<T> {
    let span = tracing::info_span!("operation", kind = operation.kind.name(), rank = operation.me.0, op = operation.op);
    async {
        let outcome = {
            let (work, watch) = (pin!(work), pin!(watch(operation, vigil)));
            match select(work, watch).await {
                Either::Left((result, _)) => result,
                Either::Right((fault, _)) => Err(fault),
            }
        };
        let outcome = outcome.and_then(|value| given_up(operation, vigil).map_or(Ok(value), Err));
        let result = match outcome {
            Ok(value) => {
                vigil.retract(operation).await;
                Ok(value)
            }
            Err(fault) => Err(fail(operation, vigil, fault).await),
        };
        Ended { result, waited: operation.board.waited() }
    }
    .instrument(span)
    .await
}

/// Ends a failed operation: its roles have stopped already.
async fn fail<M: Machine>(operation: &Operation<'_, M>, vigil: &mut Vigil, fault: Fault) -> Failure {
    operation.machine.reset(Scope::All).await;
    let fault = last_words(operation, vigil, fault);
    let (culprit, reporter) = verdict(operation, vigil, &fault).await;
    let failure = Failure { op: operation.op, culprit, reporter, fault };
    tracing::error!(%failure, "operation failed");
    vigil.spread(operation, culprit).await;
    failure
}

impl<M: Machine> Endpoint for Engine<M> {
    type Buf = HostRows<M::Window>;
    type Array<T: Scalar> = Vec<T>;
    type Stream = ();
    type Event = Ready;

    fn desk(&self) -> &Desk {
        &self.desk
    }

    fn now(&self) -> Nanos {
        self.machine.now()
    }

    fn rows(&mut self, bytes: &[u8], rows: u32) -> Result<Self::Buf, Error> {
        let row = self.desk.row_bytes_of(bytes.len(), rows);
        HostRows::from_bytes(&self.pool, bytes, rows, row)
    }

    fn bytes(&self, rows: &Self::Buf) -> Result<Vec<u8>, Error> {
        rows.to_vec()
    }

    fn array<T: Scalar>(&mut self, values: &[T]) -> Result<Vec<T>, Error> {
        Ok(values.to_vec())
    }

    fn values<T: Scalar>(&self, array: &Vec<T>) -> Result<Vec<T>, Error> {
        Ok(array.clone())
    }

    fn output(&mut self, handle: &Handle) -> Option<Self::Buf> {
        if !self.machine.capabilities().get || handle.slots().is_some() {
            return None;
        }
        // Along a handle of this generation: before the first dispatch others may still have rows under way to the arena.
        self.desk.check_handle(handle).ok()?;
        let block = self.desk.arena.take(&self.desk.layout.row().results(), handle.rows())?;
        Some(HostRows::Leased(Lease::new(&self.desk.arena, block, self.machine.window())))
    }

    fn store(&mut self, buf: &mut Self::Buf, first: u32, bytes: &[u8]) -> Result<(), Error> {
        buf.store(first, bytes)
    }

    async fn dispatch_with(
        &mut self,
        x: &Self::Buf,
        routing: &endpoint::RoutingOf<Self>,
        options: &Dispatch,
    ) -> Result<Received<Self>, Error> {
        self.dispatch_routing(x, routing, options).await
    }

    async fn redispatch_with(
        &mut self,
        x: &Self::Buf,
        handle: &Handle,
        outbox: OutboxUse,
    ) -> Result<Received<Self>, Error> {
        self.dispatch_cached(x, handle, outbox).await
    }

    async fn combine(
        &mut self,
        y: &Self::Buf,
        handle: &Handle,
        options: Combine<'_, Self>,
    ) -> Result<Combined<Self>, Error> {
        self.combine_rows(y, handle, options).await
    }

    async fn recover(&mut self, mask: &RankSet) -> Result<(), Error> {
        self.recover_without(mask).await
    }

    fn stats(&self) -> Stats {
        Stats { ways: self.ways(), ..self.stats.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::loopback::LoopbackMachine;
    use crate::settings::{Placement, Settings};
    use crate::shape::Shape;
    use crate::topology::Topology;

    /// Before anything moves: otherwise the first call would fail inside, and blame a peer.
    #[test]
    fn rows_cannot_be_pulled_from_a_machine_that_does_not_get() {
        let topology = Topology::new(1, 2).unwrap();
        let shape = Shape::builder().experts(2).topk(1).hidden(16).build().unwrap();
        let machine = |placement| {
            let settings = Settings::builder(&shape, &topology).placement(placement).build().unwrap();
            LoopbackMachine::with(&shape, &topology, &settings)
        };
        assert!(Engine::new(machine(Placement::Pulled)).is_ok());
        assert!(Engine::new(machine(Placement::Ring).without_get()).is_ok());
        let refused = Engine::new(machine(Placement::Pulled).without_get()).map(drop).unwrap_err();
        assert!(matches!(refused, Error::Unsupported { .. }) && refused.to_string().contains("pulled placement"));
    }
}
