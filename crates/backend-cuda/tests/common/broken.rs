//! Lanes of adapters that break while kernels use them: the adapter finds out, all ranks name whom it concerns long before the deadline, and what
//! is left goes on.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ep_conformance::Setup;
use ep_conformance::drive::{Round, round};
use ep_conformance::verify::{self, Observed};
use ep_conformance::workload::{Batch, Workload};
use ep_core::layout::Queues;
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Failure, Fault, LaneCause, Nanos, Rank, RankSet, Settings, Shape, Topology};
use ep_ibgda::{Ibgda, Library};
use libtest_mimic::Trial;

use crate::common::{self, run_on};
use crate::played::settings;
use crate::posted::{Adapters, Cards};

const DEADLINE: Nanos = Nanos::from_secs(60);
/// Waits are suspected after three quarters of the deadline: what is named before was named by an adapter.
const SOON: Duration = Duration::from_secs(40);

/// What a rank saw of a failure: what it was, after how long, and a round after it.
type Seen = (Option<Failure>, Duration, Result<Observed, String>);

/// Two nodes of two ranks.
struct Job {
    setup: Setup,
    batches: Vec<Batch>,
    adapters: Adapters,
}

impl Job {
    fn new(seed: u64, cards: Cards) -> Result<Self, String> {
        let (setup, batches) = Self::setup(seed).map_err(|error| error.to_string())?;
        Ok(Self { adapters: Adapters::new(&setup, cards)?, setup, batches })
    }

    fn setup(seed: u64) -> Result<(Setup, Vec<Batch>), Error> {
        let topology = Topology::new(2, 2)?;
        let shape = Shape::builder().experts(8).topk(4).hidden(32).max_tokens(16).build()?;
        let settings = Settings::builder(&shape, &topology).slots(2).deadline(DEADLINE).build()?;
        let batches = Workload::new(shape, vec![9; 4]).seed(seed).batches()?;
        Ok((Setup::new(shape, topology, seed)?.settings(settings), batches))
    }

    fn world(&self, lost: &RankSet) -> Result<World, String> {
        World::new(self.setup.shape, self.setup.topology, lost.clone()).map_err(|error| error.to_string())
    }

    /// A round that is right, then `harm`, then rounds until one fails; a recovery without `lost`, and a round that is right. Of ranks that are
    /// lost nothing is seen: they do nothing from the harm on.
    fn run(&self, lost: &RankSet, harm: impl Fn(Rank) + Send + Sync) -> Result<Vec<(Rank, Seen)>, String> {
        let (whole, left) = (self.world(&RankSet::new())?, self.world(lost)?);
        let how = Round { return_weights: true, ..Round::default() };
        let cluster = self.adapters.cluster(&self.setup)?;
        // Each rank has a thread. Nobody begins the next round before all harm is done: a rank whose posts had all been taken by a card that dies
        // behind them would hear of it from no adapter, only from the deadline.
        let harmed = AtomicUsize::new(0);
        let outcomes = run_on(cluster, &self.setup, async |mut ep| {
            let me = ep.rank();
            let batch = &self.batches[me.index()];
            let first = round(&mut ep, &whole, batch, &how).await;
            harm(me);
            harmed.fetch_add(1, Ordering::Relaxed);
            let began = Instant::now();
            while harmed.load(Ordering::Relaxed) < self.batches.len() && began.elapsed() < SOON {
                thread::yield_now();
            }
            if lost.contains(me) {
                std::mem::forget(ep);
                return None;
            }
            let (began, mut failed) = (Instant::now(), first.err());
            while failed.is_none() && began.elapsed() < SOON {
                failed = round(&mut ep, &whole, batch, &how).await.err();
            }
            let took = began.elapsed();
            let failed = failed.and_then(|error| error.failure().copied());
            let after = match ep.recover(lost).await {
                Ok(()) => round(&mut ep, &left, batch, &how).await.map(|(observed, _)| observed),
                Err(error) => Err(error),
            };
            Some((failed, took, after.map_err(|error| error.to_string())))
        })?;
        let seen = self.setup.topology.all().zip(outcomes).filter(|(rank, _)| !lost.contains(*rank));
        seen.map(|(rank, seen)| Ok((rank, seen.flatten().ok_or(format!("rank {rank} did not finish"))?))).collect()
    }

    /// All blamed one of `culprits`, in time, and the round after it is right.
    fn check(&self, lost: &RankSet, culprits: &[u32], seen: Vec<(Rank, Seen)>) -> Result<(), String> {
        let mut observed = vec![Observed::default(); 4];
        for (rank, (failed, took, after)) in seen {
            let culprit = failed.map(|failure| failure.culprit);
            if !culprit.is_some_and(|culprit| culprits.contains(&culprit.0)) || took >= SOON {
                return Err(format!("rank {rank} blamed {culprit:?} after {took:?}, expected one of {culprits:?}"));
            }
            observed[rank.index()] = after.map_err(|error| format!("rank {rank} went on with {error}"))?;
        }
        let mut batches = self.batches.clone();
        lost.iter().for_each(|rank| batches[rank.index()] = Batch::default());
        verify::run(&self.world(lost)?, &batches, &observed).map_err(|error| error.to_string())?;
        let complaints = self.adapters.fabric().complaints();
        if complaints.is_empty() { Ok(()) } else { Err(format!("{complaints:?}")) }
    }
}

/// An element of the busiest queue of rank 0, that of its rows to rank 2, ends with an error. Rank 0 says which, unless it has heard of another's first. All
/// connect anew.
fn an_error_completion(cards: Cards, seed: u64, syndrome: u8, expected: LaneCause) -> Result<(), String> {
    let job = Job::new(seed, cards)?;
    let harm = |me: Rank| {
        if me == Rank(0) {
            let card = job.adapters.fabric().card(0);
            let busiest = card.queue_pairs().into_iter().max_by_key(|pair| pair.produced).expect("a queue pair");
            card.break_element(busiest.number, 3, syndrome);
        }
    };
    let lost = RankSet::new();
    let seen = job.run(&lost, harm)?;
    let of = |me: Rank| seen.iter().find(|(rank, _)| *rank == me).and_then(|(_, (failed, ..))| *failed);
    let fault = of(Rank(0)).map(|failure| failure.fault);
    // Rank 2 may have given up its own end of the queue before it heard of that: then the others hear either.
    let gave_up_first = of(Rank(2)).is_some_and(|failure| failure.culprit == Rank(0));
    let culprits: &[u32] = match fault {
        Some(Fault::LaneBroken { lane, cause }) if lane.peer == Rank(2) && cause == expected => {
            if gave_up_first {
                &[0, 2]
            } else {
                &[2]
            }
        }
        // Its end of the queue is silent, and rank 2 has given up first: on a busy processor rank 0 may come to look at its own end late.
        Some(Fault::Aborted { reporter: Rank(2), culprit: Rank(0) }) => &[0],
        _ => return Err(format!("syndrome {syndrome:#x}: rank 0 says {fault:?}, expected {expected:?}")),
    };
    job.check(&lost, culprits, seen).map_err(|error| format!("syndrome {syndrome:#x}: {error}"))
}

/// Nothing comes from node 1 any more, and nothing says so: only its adapters no longer answer.
fn cards_that_died(cards: Cards) -> Result<(), String> {
    let job = Job::new(1, cards)?;
    let lost: RankSet = [Rank(2), Rank(3)].into_iter().collect();
    let harm = |me: Rank| {
        if lost.contains(me) {
            job.adapters.fabric().card(me.index()).kill();
        }
    };
    job.check(&lost, &[2, 3], job.run(&lost, harm)?)
}

/// All packets of the queues between ranks 0 and 2 are lost. All connect anew.
fn lanes_that_were_cut(cards: Cards) -> Result<(), String> {
    let job = Job::new(2, cards)?;
    let harm = |me: Rank| {
        let card = job.adapters.fabric().card(me.index());
        if me == Rank(0) {
            card.queue_pairs().iter().for_each(|pair| card.cut(pair.number, true));
        }
    };
    let lost = RankSet::new();
    job.check(&lost, &[0, 2], job.run(&lost, harm)?)
}

/// What cannot be is refused by name before anything runs.
fn what_is_refused(cards: Cards) -> Result<(), String> {
    let job = Job::new(4, cards)?;
    let said = |settings: ep_ibgda::Settings, source| {
        // SAFETY: the cards' functions are those of the interface.
        let library = unsafe { Library::from(soft_hca::symbol) }.expect("it has all functions");
        let builder = common::builder(&job.setup, None, None).expect("a builder");
        let network = move |_, gpu| Ibgda::new(library.clone(), gpu, settings.clone());
        let built = builder.posted(source, network).build(job.setup.shape);
        built.map(drop).map_err(|error| error.to_string())
    };
    let own = ep_ibgda::source(&settings());
    let named = settings().devices([job.adapters.fabric().card(0).name()]);
    let cases = [
        (said(named.clone().far_lanes(Queues::ONE), own.clone()), "share a queue"),
        (said(named.clone().batch(7).map_err(|error| error.to_string())?, own.clone()), "another text"),
        (said(settings().devices(["mlx5_7"]), own), "there is no mlx5 adapter mlx5_7"),
    ];
    for (said, expected) in cases {
        let said = said.expect_err("it is refused");
        if !said.contains(expected) {
            return Err(format!("{said}, expected: {expected}"));
        }
    }
    Ok(())
}

/// A test and its name.
type Named = (&'static str, fn(Cards) -> Result<(), String>);

/// All of it, called `NAME::...`. `absent`: why nothing runs here.
pub fn trials(name: &'static str, cards: Cards, absent: Option<&'static str>) -> Vec<Trial> {
    let all: [Named; 5] = [
        ("an_error_completion_names_the_peer", |cards| an_error_completion(cards, 3, 0x13, LaneCause::RemoteAccess)),
        // What its own adapter refused rank 2 hears nothing of: it names rank 0, whose end of the queue is silent, where it gives up first.
        ("a_request_that_the_own_adapter_refuses_names_the_lane", |cards| {
            an_error_completion(cards, 5, 0x04, LaneCause::LocalAccess)
        }),
        ("cards_that_died_are_noticed_and_survivors_go_on", cards_that_died),
        ("lanes_that_were_cut_are_noticed_and_all_go_on", lanes_that_were_cut),
        ("what_cannot_be_is_refused_by_name", what_is_refused),
    ];
    let trial = |(test, body): Named| match absent {
        Some(reason) => Trial::test(format!("{name}::{test}"), move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(format!("{name}::{test}"), move || body(cards).map_err(Into::into)),
    };
    all.map(trial).into()
}
