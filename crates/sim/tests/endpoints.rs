//! What users may do to an endpoint beside calling it well: drop its futures, mix up handles, write too early.

mod common;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use common::{A, C, DEADLINE};
use ep_core::engine::{Combine, Engine, Routing};
use ep_core::{Endpoint, Error, Fault, Placement, RankSet, Settings, Shape, Topology};
use ep_sim::{Builder, Cluster, Incident, Machine};

const RANKS: u32 = 3;
const TOKENS: u32 = 12;

fn shape() -> Shape {
    Shape::builder().experts(6).topk(2).hidden(32).max_tokens(TOKENS).build().unwrap()
}

fn cluster(ranks: u32, placement: Placement) -> Builder {
    let topology = Topology::new(1, ranks).unwrap();
    let shape = if ranks == 4 { four() } else { shape() };
    let settings = Settings::builder(&shape, &topology).slots(3).placement(placement).deadline(DEADLINE);
    Cluster::builder(topology).settings(settings.build().unwrap()).deadlines(true)
}

/// A batch of `tokens` tokens whose rows hold `fill`, each for two experts.
fn batch(ep: &mut Engine<Machine>, fill: u8, tokens: u32) -> (Buf, Choices) {
    let x = ep.rows(&vec![fill; (tokens * 64) as usize], tokens).unwrap();
    let topk_idx = (0..i64::from(tokens)).flat_map(|token| [token % 6, (token + 3) % 6]).collect();
    (x, Routing::TopK { topk_idx, topk_weights: None })
}

type Buf = <Engine<Machine> as Endpoint>::Buf;
type Choices = ep_core::engine::endpoint::RoutingOf<Engine<Machine>>;

/// Polls `work` at most `polls` times and drops it; its result, if it ended before.
async fn drop_after<T>(polls: u32, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    let mut left = polls;
    poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        work.as_mut().poll(context).map(Some)
    })
    .await
}

/// A dropped dispatch is not as if it had never been called: the endpoint is poisoned until it recovers, its peers name
/// it, and what it had in flight disturbs nothing afterwards.
#[test]
fn a_dropped_operation_poisons_until_recovery() {
    for (seed, placement) in (0..60).flat_map(|seed| [(seed, Placement::Ring), (seed, Placement::Direct)]) {
        let run = cluster(RANKS, placement).seed(seed).build(shape()).unwrap().run(async |mut ep| {
            let (x, routing) = batch(&mut ep, 1, TOKENS);
            let polls = if ep.rank() == A { 1 + seed as u32 * 5 } else { u32::MAX };
            let dispatches = async {
                loop {
                    if let Err(error) = ep.dispatch(&x, &routing).await {
                        return error;
                    }
                }
            };
            let ended = drop_after(polls, dispatches).await;
            assert_eq!(ended.is_none(), ep.rank() == A);
            let error = match ended {
                Some(error) => error,
                None => ep.dispatch(&x, &routing).await.unwrap_err(),
            };
            let poisoned = matches!(error, Error::Poisoned { .. });
            assert_eq!(poisoned, ep.rank() == A, "{error}");
            ep.recover(&RankSet::new()).await.unwrap();
            let (x, routing) = batch(&mut ep, 2, TOKENS);
            let got = ep.dispatch(&x, &routing).await.unwrap();
            assert!(ep.bytes(&got.x).unwrap().iter().all(|&byte| byte == 2));
            error.failure().unwrap().culprit
        });
        let blamed = run.unwrap_or_else(|violation| panic!("seed {seed}, {placement:?}: {violation}")).finished();
        assert_eq!(blamed, [A; RANKS as usize], "seed {seed}, {placement:?}");
    }
}

/// A handle tells sizes and places of its own communicator and rank: elsewhere they would lead out of bounds.
#[test]
fn a_handle_of_another_endpoint_is_refused() {
    let mint = |ranks| {
        let run = cluster(ranks, Placement::Ring).build(shape()).unwrap().run(async |mut ep| {
            let (x, routing) = batch(&mut ep, 1, TOKENS);
            ep.dispatch(&x, &routing).await.unwrap().handle
        });
        run.unwrap().finished()
    };
    let strange: Vec<_> = mint(2).into_iter().chain(mint(RANKS)).collect();
    let run = cluster(RANKS, Placement::Ring).build(shape()).unwrap().run(async |mut ep| {
        let mut said = Vec::new();
        for handle in &strange {
            let rows = handle.rows().max(handle.tokens());
            let rows = ep.rows(&vec![0; rows as usize * 64], rows).unwrap();
            said.push(ep.combine(&rows, handle, Combine::default()).await.unwrap_err().to_string());
            said.push(ep.redispatch(&rows, handle).await.unwrap_err().to_string());
        }
        said
    });
    for said in run.unwrap_or_else(|violation| panic!("{violation}")).finished().into_iter().flatten() {
        assert_eq!(said, "handle is of another endpoint, allowed: one of this endpoint");
    }
}

/// Ranks that replay different dispatches disagree about places in each other's memory: nobody may write by them.
#[test]
fn ranks_that_replay_different_dispatches_find_out() {
    for (seed, placement) in (0..40).flat_map(|seed| [(seed, Placement::Ring), (seed, Placement::Direct)]) {
        let run = cluster(RANKS, placement).seed(seed).build(shape()).unwrap().run(async |mut ep| {
            let (x, routing) = batch(&mut ep, 1, TOKENS);
            let (_, few) = batch(&mut ep, 1, 2);
            let many = ep.dispatch(&x, &routing).await.unwrap();
            // A faster rank may have found out already.
            let few = match ep.dispatch(&x, &few).await {
                Ok(few) => few,
                Err(error) => return error.failure().unwrap().fault,
            };
            let handle = if ep.rank() == A { &many.handle } else { &few.handle };
            let error = if seed % 2 == 0 {
                ep.redispatch(&x, handle).await.unwrap_err()
            } else {
                ep.combine(&many.x, handle, Combine::default()).await.unwrap_err()
            };
            assert!(ep.bytes(&many.x).unwrap().iter().all(|&byte| byte == 1));
            error.failure().unwrap().fault
        });
        for fault in run.unwrap_or_else(|violation| panic!("seed {seed}, {placement:?}: {violation}")).finished() {
            let found = matches!(fault, Fault::Mismatch { .. });
            assert!(found || matches!(fault, Fault::Aborted { .. }), "seed {seed}, {placement:?}: {fault}");
        }
    }
}

/// After a failed combine a slow peer may still pull; what it gets is what the experts wrote, or it fails too.
#[test]
fn rows_offered_by_a_failed_combine_stay_as_they_are() {
    let mut refused = 0;
    for seed in 0..60 {
        let lost = Incident::LoseLane { from: A, to: C, kind: None, after: 25 + seed % 20 };
        let cluster = cluster(4, Placement::Direct).seed(seed).incident(lost).build(four()).unwrap();
        let run = cluster.run(async |mut ep| {
            let (x, routing) = batch(&mut ep, 1, TOKENS);
            let got = ep.dispatch(&x, &routing).await.ok()?;
            let mut y = ep.output(&got.handle).unwrap();
            ep.store(&mut y, 0, &vec![1; got.rows as usize * 64]).unwrap();
            let combined = ep.combine(&y, &got.handle, Combine::default()).await;
            let refused = ep.store(&mut y, 0, &vec![9; got.rows as usize * 64]).is_err();
            assert_eq!(refused, combined.is_err() && got.rows > 0);
            drop(y);
            // The memory is not handed out either.
            let mut next = ep.output(&got.handle).unwrap();
            ep.store(&mut next, 0, &vec![9; got.rows as usize * 64]).unwrap();
            Some(refused)
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        refused += run.finished().into_iter().flatten().filter(|&refused| refused).count();
    }
    assert!(refused > 0, "no combine failed");
}

fn four() -> Shape {
    Shape::builder().experts(8).topk(2).hidden(32).max_tokens(TOKENS).build().unwrap()
}

#[test]
fn a_window_beyond_the_simulators_limit_is_refused() {
    let topology = Topology::new(1, 3).unwrap();
    let built = |bytes| {
        let settings = Settings::builder(&shape(), &topology).arena_bytes(bytes).build().unwrap();
        Cluster::builder(topology).settings(settings).build(shape())
    };
    assert!(built(1 << 45).is_ok());
    assert!(built(1 << 62).unwrap_err().to_string().ends_with("allowed: at most 70368744177664 in the simulator"));
}
