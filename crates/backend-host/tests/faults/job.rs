//! A job: ranks that are threads, of nodes with RoCE between them, and what they go through.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ep_conformance::drive::{self, Round};
use ep_conformance::low_latency::{self, Seen, Weighing};
use ep_conformance::verify::{self, Observed};
use ep_conformance::workload::{Batch, Workload};
use ep_core::engine::Engine;
use ep_core::reference::World;
use ep_core::transport::{AnyLanes, AnyTransport, Transport};
use ep_core::{Endpoint as _, Error, Failure, LowLatency as _, Nanos, Rank, RankSet, Settings, Shape, Topology};
use ep_host::{Cluster, Machine};

const HOW: Round = Round::PULLING;
const TOKENS: u32 = 40;

/// `EP_TIME_FACTOR`: how much slower this machine is than one with free cores.
pub(crate) fn factor() -> u32 {
    std::env::var("EP_TIME_FACTOR").map_or(1, |factor| factor.parse().expect("EP_TIME_FACTOR is a number"))
}

/// What a round of each mode gave.
pub(crate) type Both = (Observed, Seen);

/// Ranks and what they have in common.
pub(crate) struct Job {
    pub(crate) topology: Topology,
    /// Of one operation.
    pub(crate) deadline: Duration,
}

impl Job {
    pub(crate) fn new(nodes: u32, ranks_per_node: u32, deadline: Duration) -> Self {
        Self { topology: Topology::new(nodes, ranks_per_node).unwrap(), deadline }
    }

    fn shape(&self) -> Shape {
        Shape::builder().experts(2 * self.topology.ranks()).topk(3).hidden(64).max_tokens(TOKENS).build().unwrap()
    }

    /// The layer without the ranks of `mask`, and its batches.
    fn layer(&self, mask: &RankSet) -> (World, Vec<Batch>) {
        let tokens = self.topology.all().map(|rank| if mask.contains(rank) { 0 } else { TOKENS - rank.0 });
        let batches = Workload::new(self.shape(), tokens.collect()).seed(11).batches().unwrap();
        (World::new(self.shape(), self.topology, mask.clone()).unwrap(), batches)
    }

    /// Runs `user` on all ranks. None leaves before all are through: who leaves is gone for the others.
    pub(crate) fn run<R: Send>(
        &self,
        transport: impl Transport<Lanes: 'static> + 'static,
        user: impl AsyncFn(&mut Engine<Machine<AnyLanes>>) -> R + Sync,
    ) -> Vec<R> {
        let shape = self.shape();
        let deadline = Nanos(self.deadline.as_nanos() as u64);
        let settings = Settings::builder(&shape, &self.topology).slots(3).low_latency(true).deadline(deadline);
        let cluster =
            Cluster::builder(self.topology).settings(settings.build().unwrap()).far(AnyTransport::new(transport));
        let at_work = AtomicU32::new(self.topology.ranks());
        let ran = cluster.build(shape).unwrap().run(async |mut ep| {
            let through = Through(&at_work);
            let result = user(&mut ep).await;
            drop(through);
            while at_work.load(Ordering::Relaxed) > 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            result
        });
        ran.unwrap()
    }

    /// A round of throughput mode and one of low latency, without the ranks that were given up.
    pub(crate) async fn both(&self, ep: &mut Engine<Machine<AnyLanes>>) -> Result<Both, Error> {
        let (world, batches) = self.layer(ep.mask());
        let batch = &batches[ep.rank().index()];
        let (observed, _) = drive::round(ep, &world, batch, &HOW).await?;
        Ok((observed, low_latency::round(ep, &world, batch, Weighing::AtExperts).await?))
    }

    /// Compares what all ranks but those of `mask` saw in a round with the oracle.
    pub(crate) fn verify(&self, mask: &RankSet, seen: impl IntoIterator<Item = Both>) {
        let (world, batches) = self.layer(mask);
        let mut seen = seen.into_iter();
        let of = |rank: Rank| if mask.contains(rank) { Both::default() } else { seen.next().expect("of every rank") };
        let (observed, low): (Vec<Observed>, Vec<Seen>) = self.topology.all().map(of).unzip();
        assert!(verify::run(&world, &batches, &observed).unwrap().rows > 0);
        assert!(low_latency::verify::run(&world, &batches, Weighing::AtExperts, &low).unwrap().rows > 0);
    }

    /// Rounds until one fails: how, and after what time.
    pub(crate) async fn until_failure(
        &self,
        ep: &mut Engine<Machine<AnyLanes>>,
        rounds: &Rounds,
    ) -> (Failure, Duration) {
        loop {
            let began = Instant::now();
            match self.both(ep).await {
                Ok(_) => rounds.done(ep.rank()),
                Err(error) => {
                    rounds.fail();
                    return (*error.failure().unwrap_or_else(|| panic!("{error}")), began.elapsed());
                }
            }
        }
    }

    /// Recovers without the ranks of `mask`, and does a round of each mode.
    pub(crate) async fn go_on(
        &self,
        ep: &mut Engine<Machine<AnyLanes>>,
        mask: impl IntoIterator<Item = Rank>,
    ) -> Result<Both, Error> {
        ep.recover(&mask.into_iter().collect()).await?;
        assert_eq!(ep.low_latency_mask(), ep.mask());
        self.both(ep).await
    }
}

/// A rank at work, until this is dropped: a panic, too, ends that.
struct Through<'a>(&'a AtomicU32);

impl Drop for Through<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How many rounds rank 0 has done, for those who disturb them, and after how many all end.
#[derive(Debug)]
pub(crate) struct Rounds {
    done: AtomicU32,
    last: AtomicU32,
    failed: AtomicBool,
}

impl Rounds {
    pub(crate) const fn new() -> Self {
        Self { done: AtomicU32::new(0), last: AtomicU32::new(u32::MAX), failed: AtomicBool::new(false) }
    }

    /// Noted by all ranks; that of rank 0 counts.
    pub(crate) fn done(&self, rank: Rank) {
        if rank == Rank(0) {
            self.done.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A round has failed.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Waits until a round has failed.
    pub(crate) fn until_failed(&self, limit: Duration) {
        let began = Instant::now();
        while !self.failed.load(Ordering::Relaxed) {
            assert!(began.elapsed() < limit, "no rank failed within {limit:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until `more` more rounds are done: false when one failed instead.
    pub(crate) fn pass(&self, more: u32, limit: Duration) -> bool {
        let (from, began) = (self.done.load(Ordering::Relaxed), Instant::now());
        while self.done.load(Ordering::Relaxed) < from + more {
            if self.failed.load(Ordering::Relaxed) || began.elapsed() > limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// Lets all ranks end, after the same round: no rank is more than one ahead of rank 0.
    pub(crate) fn end_soon(&self) {
        self.last.store(self.done.load(Ordering::SeqCst) + 3, Ordering::SeqCst);
    }

    /// Whether round number `round` is to be done.
    pub(crate) fn includes(&self, round: u32) -> bool {
        round <= self.last.load(Ordering::SeqCst)
    }
}
