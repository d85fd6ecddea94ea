//! Ranks that are threads end, by a panic or of their own accord: the others are told at once, by name, and go on without.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use ep_conformance::drive::{Round, round};
use ep_conformance::verify;
use ep_conformance::workload::{Batch, Workload};
use ep_core::engine::Engine;
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Fault, Nanos, Rank, RankSet, Settings, Shape, Topology};
use ep_host::{Cluster, Machine};

const RANKS: u32 = 4;
const VICTIM: Rank = Rank(2);
const HOW: Round = Round::PULLING;

fn shape() -> Shape {
    Shape::builder().experts(2 * RANKS).topk(3).hidden(64).max_tokens(20).build().unwrap()
}

fn topology() -> Topology {
    Topology::new(1, RANKS).unwrap()
}

/// The layer without the ranks of `mask`, and its batches.
fn layer(mask: &RankSet) -> (World, Vec<Batch>) {
    let tokens = (0..RANKS).map(|rank| if mask.contains(Rank(rank)) { 0 } else { 20 });
    let batches = Workload::new(shape(), tokens.collect()).seed(3).batches().unwrap();
    (World::new(shape(), topology(), mask.clone()).unwrap(), batches)
}

fn cluster() -> Cluster {
    let settings = Settings::builder(&shape(), &topology()).slots(2).deadline(Nanos::from_secs(60)).build().unwrap();
    Cluster::builder(topology()).settings(settings).build(shape()).unwrap()
}

/// Works until something fails, then goes on without the culprit: what failed, how long that took, and a round afterwards.
async fn persist(ep: &mut Engine<Machine>, rounds: u32) -> Result<verify::Observed, Error> {
    let (world, batches) = layer(&RankSet::new());
    let me = ep.rank().index();
    for _ in 0..rounds {
        round(ep, &world, &batches[me], &HOW).await?;
    }
    let began = Instant::now();
    let failure = round(ep, &world, &batches[me], &HOW).await.unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(10), "at once, not at the deadline");
    let failure = *failure.failure().unwrap();
    assert_eq!(failure.culprit, VICTIM, "{failure}");
    assert!(matches!(failure.fault, Fault::PeerGone { .. } | Fault::Aborted { .. }), "{failure}");
    let mask: RankSet = [VICTIM].into_iter().collect();
    ep.recover(&mask).await?;
    let (world, batches) = layer(&mask);
    round(ep, &world, &batches[me], &HOW).await.map(|(observed, _)| observed)
}

fn check(observed: Vec<verify::Observed>) {
    let (world, batches) = layer(&[VICTIM].into_iter().collect());
    assert!(verify::run(&world, &batches, &observed).unwrap().rows > 0);
}

#[test]
fn a_panicking_rank_is_named_at_once_and_the_others_recover() {
    let observed = Mutex::new(vec![verify::Observed::default(); RANKS as usize]);
    let ended = cluster().run(async |mut ep| {
        if ep.rank() == VICTIM {
            let (world, batches) = layer(&RankSet::new());
            round(&mut ep, &world, &batches[VICTIM.index()], &HOW).await.unwrap();
            panic!("on purpose");
        }
        let after = persist(&mut ep, 1).await.unwrap();
        observed.lock().unwrap()[ep.rank().index()] = after;
    });
    let error = ended.unwrap_err().to_string();
    assert!(error.starts_with("the code of rank 2 failed: its thread panicked"), "{error}");
    check(observed.into_inner().unwrap());
}

#[test]
fn a_rank_that_returns_early_is_named_at_once_and_the_others_recover() {
    let ended = cluster().run(async |mut ep| match ep.rank() {
        VICTIM => Ok(verify::Observed::default()),
        _ => persist(&mut ep, 0).await,
    });
    check(ended.unwrap().into_iter().collect::<Result<_, _>>().unwrap());
}

/// Recovery with a rank that is gone and that nobody gave up on cannot succeed: it is named at once.
#[test]
fn recovery_without_masking_who_is_gone_names_it() {
    let ended = cluster().run(async |mut ep| match ep.rank() {
        VICTIM => None,
        _ => ep.recover(&RankSet::new()).await.err(),
    });
    for (rank, error) in ended.unwrap().into_iter().enumerate() {
        let fault = error.map(|error| error.failure().unwrap().fault);
        let gone = Fault::PeerGone { peer: VICTIM, phase: ep_core::Phase::Recovery };
        assert_eq!(fault, (rank != VICTIM.index()).then_some(gone), "rank {rank}");
    }
}

#[test]
fn what_the_backend_cannot_do_is_refused() {
    let two_nodes = Topology::new(2, 2).unwrap();
    let error = Cluster::builder(two_nodes).build(shape()).unwrap_err().to_string();
    assert!(error.starts_with("2 nodes is not supported: a transport between nodes, and none was given"), "{error}");
}
