//! Ranks of this host: threads of one process, or processes.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ep_bootstrap::{LocalMeeting, Member, Peers};
use ep_core::engine::Engine;
use ep_core::{Error, Layout, Rank, Settings, Shape, Topology};

use crate::machine::Machine;
use crate::node::Node;
use crate::pace::{self, block_on};
use crate::seat::Seat;

/// How long ranks that are processes wait for each other at least when they meet.
const PATIENCE: Duration = Duration::from_secs(60);

/// Collects what a [`Cluster`] needs to know.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    topology: Topology,
    settings: Option<Settings>,
}

impl Builder {
    /// How the windows are cut. Automatic: [`Settings::auto`].
    pub const fn settings(mut self, settings: Settings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// Takes the windows of ranks that are threads of this process. Memory is used where it is written.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes; [`Error::Unsupported`] for several nodes, and where the system has no memory.
    pub fn build(self, shape: Shape) -> Result<Cluster, Error> {
        let layout = self.layout(&shape)?;
        let ranks = self.topology.ranks();
        pace::expect(ranks);
        let node = Node::here(&layout)?;
        let peers = Peers::Threads(Arc::new(LocalMeeting::new(ranks)));
        let origin = Instant::now();
        let seat = |me| Seat::new(me, layout.clone(), Arc::clone(&node), peers.clone(), origin);
        Ok(Cluster { machines: self.topology.all().map(|me| Machine::new(seat(me))).collect() })
    }

    /// One rank of ranks that are processes of this host, all of which call this with the same shape and settings: that of
    /// `member`. Returns when all ranks have met; may take the settings' deadline, and a minute at least:
    /// operations may be allowed less than a process takes to start.
    ///
    /// The rank leaves when `member` is dropped or the process ends; while other ranks still work, keep `member`.
    ///
    /// # Errors
    /// Those of [`build`](Self::build); [`Error::Unsupported`] with the rank that did not come, runs on another host, or has
    /// other settings.
    pub fn join(self, shape: Shape, member: &Arc<Member>) -> Result<Engine<Machine>, Error> {
        Engine::new(self.join_machine(shape, member)?)
    }

    /// As [`join`](Self::join), without an engine.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_machine(self, shape: Shape, member: &Arc<Member>) -> Result<Machine, Error> {
        let ranks = self.topology.ranks();
        if member.world() != ranks {
            let limit = format_args!("{}, the processes", member.world());
            return Err(Error::invalid("ranks of the topology", ranks, limit));
        }
        let layout = self.layout(&shape)?;
        pace::expect(ranks);
        let within = Duration::from_nanos(layout.settings().deadline().0).max(PATIENCE);
        let node = Node::met(&layout, member, within)?;
        let peers = Peers::Processes(Arc::clone(member));
        Ok(Machine::new(Seat::new(member.rank(), layout, node, peers, Instant::now())))
    }

    fn layout(&self, shape: &Shape) -> Result<Layout, Error> {
        if self.topology.nodes() != 1 {
            let needs = "a transport between nodes, which the host backend does not have yet; use one node";
            return Err(Error::unsupported(format_args!("{} nodes", self.topology.nodes()), needs));
        }
        let settings = self.settings.unwrap_or_else(|| Settings::auto(shape, &self.topology));
        Layout::new(shape, &self.topology, &settings)
    }
}

/// Ranks of this host as threads of one process.
#[derive(Debug)]
pub struct Cluster {
    machines: Vec<Machine>,
}

impl Cluster {
    /// Starts a cluster of `topology`, which has one node.
    pub const fn builder(topology: Topology) -> Builder {
        Builder { topology, settings: None }
    }

    /// The machines, one a rank, for threads of the caller's own: each belongs on one thread from then on.
    pub fn into_machines(self) -> Vec<Machine> {
        self.machines
    }

    /// Runs `user` on an endpoint of every rank, each on a thread, and gives what each returned. A rank whose thread panics is
    /// gone for the others, whose calls end with [`ep_core::Fault::PeerGone`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the ranks whose threads panicked.
    pub fn run<T, F>(self, user: F) -> Result<Vec<T>, Error>
    where
        T: Send,
        F: AsyncFn(Engine<Machine>) -> T + Sync,
    {
        self.run_machines(async |machine| match Engine::new(machine) {
            Ok(engine) => Ok(user(engine).await),
            Err(error) => Err(error),
        })?
        .into_iter()
        .collect()
    }

    /// As [`run`](Self::run), on machines.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_machines<T, F>(self, user: F) -> Result<Vec<T>, Error>
    where
        T: Send,
        F: AsyncFn(Machine) -> T + Sync,
    {
        let user = &user;
        thread::scope(|scope| {
            let threads: Vec<_> =
                self.machines.into_iter().map(|machine| scope.spawn(move || block_on(user(machine)))).collect();
            let ended: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
            let panicked: Vec<Rank> =
                (0..).map(Rank).zip(&ended).filter(|(_, ended)| ended.is_err()).map(|(rank, _)| rank).collect();
            let values: Vec<T> = ended.into_iter().flatten().collect();
            if panicked.is_empty() {
                return Ok(values);
            }
            let names: Vec<String> = panicked.iter().map(ToString::to_string).collect();
            Err(Error::unsupported(format_args!("a panic in the thread of rank {}", names.join(", ")), "none"))
        })
    }
}
