//! Ranks of this host, or of several with a transport between them: threads of one process, or processes.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use ep_bootstrap::{LocalMeeting, Member, Parts, Peers, joined};
use ep_core::engine::Engine;
use ep_core::memory::Estimate;
use ep_core::transport::{Lanes, NoLanes, NoTransport, Place, Transport};
use ep_core::{Error, Layout, Rank, Settings, Shape, Topology};

use crate::far::Far;
use crate::handoff::Handoff;
use crate::machine::Machine;
use crate::meeting::{self, Table};
use crate::node::{self, Node};
use crate::pace::{self, block_on};
use crate::seat::Seat;

/// What makes windows smaller.
const REMEDY: &str = "fewer ranks, channels or slots, a smaller arena, or for low latency fewer max tokens";

/// How long ranks that are processes wait for each other at least when they meet.
const PATIENCE: Duration = Duration::from_secs(60);

/// Collects what a [`Cluster`] needs to know. Its ranks reach other nodes by the transport `T`.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder<T = NoTransport> {
    topology: Topology,
    settings: Option<Settings>,
    transport: T,
}

impl<T: Transport> Builder<T> {
    /// How the windows are cut. Automatic: [`Settings::auto`].
    pub fn settings(self, settings: Settings) -> Self {
        Self { settings: Some(settings), ..self }
    }

    /// How ranks reach those of other nodes. Needed for topologies of several nodes, and opened for those only.
    pub fn far<U: Transport>(self, transport: U) -> Builder<U> {
        Builder { topology: self.topology, settings: self.settings, transport }
    }

    /// Takes the windows of ranks that are threads of this process, of all nodes. Memory is used where it is written.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes, and for windows that all of this machine's memory could not hold; [`Error::Unsupported`] for several nodes without a transport, where the transport cannot be
    /// opened, and where the system has no memory.
    pub fn build(self, shape: Shape) -> Result<Cluster<T::Lanes>, Error> {
        let ranks = self.topology.ranks();
        let layout = self.layout(&shape)?;
        admit(&layout, ranks)?;
        pace::expect(ranks);
        let windows: Vec<OwnedFd> = self.topology.all().map(|_| node::create(&layout)).collect::<Result<_, _>>()?;
        let opened = self.topology.all().zip(&windows).map(|(me, window)| self.open(me, &layout, window));
        let mut lanes: Vec<Option<T::Lanes>> = opened.collect::<Result<_, _>>()?;
        let offers = lanes.iter_mut().map(|lanes| lanes.as_mut().map(Lanes::offer).transpose());
        let offers: Parts = offers.collect::<Result<_, _>>()?;
        lanes.iter_mut().flatten().try_for_each(|lanes| lanes.connect(&offers))?;
        let node = Node::here(&layout, &windows)?;
        let peers = Peers::Threads(Arc::new(LocalMeeting::new(ranks)));
        let table = Arc::new(Table::new(ranks));
        let origin = Instant::now();
        let machine = |(me, lanes): (Rank, Option<T::Lanes>)| {
            let far = lanes.map(|lanes| Far::new(lanes, self.transport.far_lanes()));
            let seat = Seat::new(me, layout.clone(), Arc::clone(&node), peers.clone(), far, origin);
            Machine::new(seat, Some(Arc::clone(&table)))
        };
        Ok(Cluster { machines: self.topology.all().zip(lanes).map(machine).collect() })
    }

    /// One rank of ranks that are processes, all of which call this with the same shape, settings and transport: that of
    /// `member`. The ranks of a node are on one host. Returns when all ranks have met; may take the settings' deadline, and a
    /// minute at least: operations may be allowed less than a process takes to start.
    ///
    /// The rank leaves when `member` is dropped or the process ends; while other ranks still work, keep `member`.
    ///
    /// # Errors
    /// Those of [`build`](Self::build); [`Error::Unsupported`] with the rank that did not come, runs on another host than its
    /// node, or has other settings.
    pub fn join(self, shape: Shape, member: &Arc<Member>) -> Result<Engine<Machine<T::Lanes>>, Error> {
        Engine::new(self.join_machine(shape, member)?)
    }

    /// As [`join`](Self::join), without an engine.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_machine(self, shape: Shape, member: &Arc<Member>) -> Result<Machine<T::Lanes>, Error> {
        let ranks = self.topology.ranks();
        if member.world() != ranks {
            let limit = format_args!("{}, the processes", member.world());
            return Err(Error::invalid("ranks of the topology", ranks, limit));
        }
        // What is wrong with sizes all ranks find alike; of what one has not the others hear.
        let layout = self.layout(&shape)?;
        let within = Duration::from_nanos(layout.settings().deadline().0).max(PATIENCE);
        let part = self.part(member.rank(), &layout);
        let ((handoff, window, mut lanes), told) =
            member.try_all_gather(part, |(handoff, ..)| handoff.told(), within, meeting::not_met)?;
        let node = Node::met(&layout, window, member, (&handoff, &told), within);
        let offering = node.and_then(|node| Ok((node, lanes.as_mut().map(Lanes::offer).transpose()?)));
        let ((node, _), offers) = member.try_all_gather(
            offering,
            |(_, offer)| offer.clone().unwrap_or_default(),
            within,
            meeting::not_met,
        )?;
        // Nobody begins before all reach all.
        if let Some(lanes) = &mut lanes {
            member.try_all_gather(lanes.connect(&offers), |()| Vec::new(), within, meeting::not_met)?;
        }
        let far = lanes.map(|lanes| Far::new(lanes, self.transport.far_lanes()));
        let peers = Peers::Processes(Arc::clone(member));
        Ok(Machine::new(Seat::new(member.rank(), layout, node, peers, far, Instant::now()), None))
    }

    /// About what all ranks take before their first call, whether this host has as much or not. Where each is a process,
    /// every node's host has its ranks' share.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes.
    pub fn footprint(&self, shape: &Shape) -> Result<Estimate, Error> {
        Ok(Estimate::of_windows(&self.layout(shape)?, self.topology.ranks()))
    }

    fn layout(&self, shape: &Shape) -> Result<Layout, Error> {
        let settings = self.settings.unwrap_or_else(|| Settings::auto(shape, &self.topology));
        Layout::new(shape, &self.topology, &settings)
    }

    /// The window of a rank that is a process, where others ask for it, and its lanes to other nodes, if there are any.
    fn part(&self, me: Rank, layout: &Layout) -> Result<(Handoff, OwnedFd, Option<T::Lanes>), Error> {
        admit(layout, self.topology.ranks_per_node())?;
        let window = node::create(layout)?;
        let lanes = self.open(me, layout, &window)?;
        Ok((Handoff::open(node::hash(layout))?, window, lanes))
    }

    /// The lanes of a rank to other nodes, if there are any.
    fn open(&self, me: Rank, layout: &Layout, window: &OwnedFd) -> Result<Option<T::Lanes>, Error> {
        let several = self.topology.nodes() > 1;
        several.then(|| self.transport.open(Place { me, layout, window: window.as_fd() })).transpose()
    }
}

/// Refuses windows of `here` ranks that exceed this host.
fn admit(layout: &Layout, here: u32) -> Result<(), Error> {
    let of = if here == 1 { "the rank of this host".to_owned() } else { format!("the {here} ranks of this host") };
    ep_memory::admit(&Estimate::of_windows(layout, here), of, REMEDY)
}

/// Ranks of this host as threads of one process.
#[derive(Debug)]
pub struct Cluster<L: Lanes = NoLanes> {
    machines: Vec<Machine<L>>,
}

impl Cluster {
    /// Starts a cluster of `topology`. One of several nodes needs a transport between them: [`Builder::far`].
    pub const fn builder(topology: Topology) -> Builder {
        Builder { topology, settings: None, transport: NoTransport }
    }
}

impl<L: Lanes> Cluster<L> {
    /// The machines, one a rank, for threads of the caller's own: each belongs on one thread from then on.
    pub fn into_machines(self) -> Vec<Machine<L>> {
        self.machines
    }

    /// Runs `user` on an endpoint of every rank, each on a thread, and gives what each returned. A rank whose thread panics is
    /// gone for the others, whose calls end with [`ep_core::Fault::PeerGone`].
    ///
    /// # Errors
    /// [`Error::Broken`] with the ranks whose threads panicked, or with the rank whose thread could not be started: then no
    /// rank has begun.
    pub fn run<T, F>(self, user: F) -> Result<Vec<T>, Error>
    where
        T: Send,
        F: AsyncFn(Engine<Machine<L>>) -> T + Sync,
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
        F: AsyncFn(Machine<L>) -> T + Sync,
    {
        on_threads(self.machines, |_| thread::Builder::new(), |machine| block_on(user(machine)))
    }
}

/// Does `work` for every rank, each on a thread that `thread` describes. No rank begins before all threads have started:
/// ranks wait for each other, and one without a thread would never come.
fn on_threads<I: Send, T: Send>(
    ranks: Vec<I>,
    thread: impl Fn(Rank) -> thread::Builder,
    work: impl Fn(I) -> T + Sync,
) -> Result<Vec<T>, Error> {
    let (world, work) = (ranks.len(), &work);
    let all_started = &OnceLock::<bool>::new();
    let values: Vec<Option<T>> = thread::scope(|scope| {
        let start = |(rank, own): (Rank, I)| {
            let begin = move || all_started.wait().then(|| work(own));
            thread(rank).spawn_scoped(scope, begin).map_err(|error| {
                let what = format_args!("the start of a thread for rank {rank}, one of {world} ranks,");
                Error::broken(what, error, "raise the limit of threads (ulimit -u), or take fewer ranks")
            })
        };
        let threads: Result<Vec<_>, Error> = (0..).map(Rank).zip(ranks).map(start).collect();
        // It is set here alone. Where a thread is missing it lets go those that have started.
        let _ = all_started.set(threads.is_ok());
        joined(threads?.into_iter().map(thread::ScopedJoinHandle::join))
    })?;
    Ok(values.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_thread_cannot_be_started_no_rank_begins_and_none_is_waited_for() {
        // No address space holds such a stack.
        let stack = |rank: Rank| if rank == Rank(2) { 1 << 60 } else { 1 << 20 };
        let all = std::sync::Barrier::new(4);
        let work = |()| all.wait().is_leader();
        let ran = on_threads(vec![(); 4], |rank| thread::Builder::new().stack_size(stack(rank)), work);
        let said = ran.unwrap_err().to_string();
        assert!(said.starts_with("the start of a thread for rank 2, one of 4 ranks, failed: "), "{said}");
        assert!(said.ends_with("raise the limit of threads (ulimit -u), or take fewer ranks"), "{said}");
        let ran = on_threads(vec![(); 4], |_| thread::Builder::new(), work);
        assert_eq!(ran.unwrap().into_iter().filter(|&leader| leader).count(), 1);
    }
}
