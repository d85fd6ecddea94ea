//! A rank of several nodes whose host stands still while its kernels go on, as one has whose process is stopped: nothing that they post leaves any
//! more, so the rank waits as long as the others do, for ranks that wait for it. All name it, and so does itself.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_conformance::Setup;
use ep_conformance::drive::{Round, round};
use ep_conformance::harness::share;
use ep_conformance::low_latency::{self, Weighing};
use ep_conformance::workload::{Batch, Workload};
use ep_core::layout::Queues;
use ep_core::port::{LaneId, Offset, Scope, Span, Ticket};
use ep_core::reference::World;
use ep_core::transport::{DevicePlace, Lanes, Place, Transport};
use ep_core::{Endpoint as _, Error, Fault, LaneCause, Nanos, Rank, RankSet, Settings, Shape, Topology};
use ep_cuda::CudaEndpoint;
use ep_loop::{Loop, LoopLanes};
use libtest_mimic::Trial;

use crate::common;

const DEADLINE: Nanos = Nanos::from_secs(16);
/// A machine that stands still for so long while ranks wait makes all of their waits end at once, before any has heard what the others wait for.
const STANDSTILL: Duration = Duration::from_secs(1);
/// So often a stall is tried on a machine that stands still.
const TRIES: u32 = 4;
/// Nothing takes longer, however busy the machine is.
const LONG: Duration = Duration::from_secs(60);

/// The loop, of which one rank's thread stands still for a time.
#[derive(Clone, Debug)]
struct Stalls {
    network: Loop,
    victim: Rank,
    still: Arc<AtomicBool>,
}

impl Transport for Stalls {
    type Lanes = StallingLanes;

    fn far_lanes(&self) -> Queues {
        self.network.far_lanes()
    }

    fn open(&self, place: Place<'_>) -> Result<StallingLanes, Error> {
        let still = (place.me == self.victim).then(|| Arc::clone(&self.still));
        Ok(StallingLanes { lanes: self.network.open(place)?, still })
    }

    fn open_for_device(&self, place: DevicePlace<'_>) -> Result<StallingLanes, Error> {
        let still = (place.me == self.victim).then(|| Arc::clone(&self.still));
        Ok(StallingLanes { lanes: self.network.open_for_device(place)?, still })
    }
}

#[derive(Debug)]
struct StallingLanes {
    lanes: LoopLanes,
    still: Option<Arc<AtomicBool>>,
}

impl Lanes for StallingLanes {
    fn offer(&mut self) -> Result<Vec<u8>, Error> {
        self.lanes.offer()
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        self.lanes.connect(offers)
    }

    fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Option<Ticket>, Fault> {
        self.lanes.put(lane, from, to)
    }

    fn raise(&mut self, lane: LaneId, at: Offset, bits: u64) -> Result<bool, Fault> {
        self.lanes.raise(lane, at, bits)
    }

    fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<bool, Fault> {
        self.lanes.flush(lane, upto)
    }

    /// Where the proxy's thread begins a turn.
    fn progress(&mut self) {
        let began = Instant::now();
        while self.still.as_ref().is_some_and(|still| still.load(Ordering::Relaxed)) && began.elapsed() < LONG {
            thread::sleep(Duration::from_millis(1));
        }
        self.lanes.progress();
    }

    fn landed(&self, peer: Rank) -> Option<u64> {
        self.lanes.landed(peer)
    }

    fn probe(&mut self, peer: Rank) {
        self.lanes.probe(peer);
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        self.lanes.broken(peer)
    }

    fn drain(&mut self, scope: Scope) -> bool {
        self.lanes.drain(scope)
    }

    fn cut(&mut self, scope: Scope) {
        self.lanes.cut(scope);
    }

    fn is_copied(&self) -> bool {
        self.lanes.is_copied()
    }
}

/// Two nodes of two ranks.
fn setup(low_latency: bool) -> Result<(Setup, Vec<Batch>), Error> {
    let topology = Topology::new(2, 2)?;
    let shape = Shape::builder().experts(8).topk(4).hidden(32).max_tokens(16).build()?;
    let settings = Settings::builder(&shape, &topology).slots(2).low_latency(low_latency).deadline(DEADLINE).build()?;
    let batches = Workload::new(shape, vec![9; 4]).seed(5).batches()?;
    Ok((Setup::new(shape, topology, 5)?.settings(settings), batches))
}

async fn one(ep: &mut CudaEndpoint, world: &World, batch: &Batch, low: bool) -> Result<(), Error> {
    if low {
        return low_latency::round(ep, world, batch, Weighing::AtSource).await.map(drop);
    }
    round(ep, world, batch, &Round { return_weights: true, ..Round::default() }).await.map(drop)
}

/// Stalls `victim` behind a round, and asks whom all ranks blame for what fails then.
fn stall(victim: Rank, low: bool) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let (setup, batches) = setup(low).map_err(text)?;
    let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
    let still = Arc::new(AtomicBool::new(false));
    let network = Stalls { network: Loop::new(), victim, still: Arc::clone(&still) };
    let builder = common::builder(&setup, None, None).map_err(text)?.far(network);
    let cluster = builder.build(setup.shape).map_err(text)?;
    let (ready, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let wait_for = |count: &AtomicUsize, at_least| {
        let began = Instant::now();
        while count.load(Ordering::Relaxed) < at_least && began.elapsed() < LONG {
            thread::sleep(Duration::from_millis(1));
        }
    };
    let blamed = common::run_on(cluster, &setup, async |mut ep| {
        let me = ep.rank();
        let batch = &batches[me.index()];
        let first = one(&mut ep, &world, batch, low).await;
        ready.fetch_add(1, Ordering::Relaxed);
        wait_for(&ready, batches.len());
        still.store(true, Ordering::Relaxed);
        let (began, mut error) = (Instant::now(), first.err());
        while error.is_none() && began.elapsed() < LONG {
            error = one(&mut ep, &world, batch, low).await.err();
        }
        // The victim's host may say nothing before it goes on. Nobody leaves before.
        failed.fetch_add(usize::from(me != victim), Ordering::Relaxed);
        wait_for(&failed, batches.len() - 1);
        still.store(false, Ordering::Relaxed);
        error
    })?;
    for (rank, error) in setup.topology.all().zip(blamed) {
        let error = error.flatten().ok_or(format!("nothing failed on rank {rank}"))?;
        let Error::Failed(failure) = error else { return Err(format!("rank {rank} failed otherwise: {error}")) };
        let stands_still = matches!(failure.fault, Fault::LaneBroken { cause: LaneCause::PosterStalled, .. });
        // In throughput mode it may hear of itself from another rank first.
        let knows = if rank == victim { stands_still || !low } else { !stands_still };
        if failure.culprit != victim || !knows {
            return Err(format!("rank {victim} stood still, and rank {rank} says: {failure}"));
        }
    }
    Ok(())
}

/// Does `work` and says how long this machine kept a thread waiting meanwhile, at most.
fn watched<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let longest = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !done.load(Ordering::Relaxed) {
                let began = Instant::now();
                thread::sleep(Duration::from_millis(10));
                longest = longest.max(began.elapsed());
            }
            longest
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        (result, longest.join().expect("a thread that sleeps"))
    })
}

/// Stalls `victim`. Where the wrong rank is blamed on a machine that stood still itself, that shows nothing: once more.
fn stall_on_a_machine_that_runs(victim: Rank, low: bool) -> Result<(), String> {
    for _ in 1..TRIES {
        match watched(|| stall(victim, low)) {
            (Err(problem), stood_still) if stood_still > STANDSTILL => {
                eprintln!("once more, as the machine stood still for {stood_still:.1?}: {problem}");
            }
            (result, stood_still) => {
                return result.map_err(|problem| format!("{problem}; no thread waited longer than {stood_still:.1?}"));
            }
        }
    }
    stall(victim, low)
}

/// All of it. `absent`: why nothing runs here.
pub fn trials(absent: Option<&'static str>) -> Vec<Trial> {
    let all = [
        ("stalled::a_rank_whose_posts_nobody_takes_is_named_in_throughput_mode", [Rank(0), Rank(3)], false),
        ("stalled::a_rank_whose_posts_nobody_takes_is_named_in_low_latency", [Rank(1), Rank(2)], true),
    ];
    let trial = |(name, victims, low): (&'static str, [Rank; 2], bool)| match absent {
        Some(reason) => Trial::test(name, move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(name, move || {
            Ok(victims
                .into_iter()
                .take(share(2, 1))
                .try_for_each(|victim| stall_on_a_machine_that_runs(victim, low))?)
        }),
    };
    all.map(trial).into()
}
