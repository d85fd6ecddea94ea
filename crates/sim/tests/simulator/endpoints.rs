//! What users may do to an endpoint beside calling it well: drop its futures, mix up handles, write too early.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use crate::common::{A, C, DEADLINE};
use ep_core::engine::low_latency::LowRouting;
use ep_core::engine::{Combine, Dispatch, Engine, Routing};
use ep_core::{Endpoint, Error, Fault, LowLatency, Placement, RankSet, Settings, Shape, Topology};
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
pub(crate) async fn drop_after<T>(polls: u32, work: impl Future<Output = T>) -> Option<T> {
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

/// Rows of an earlier generation may be under way to memory of the arena until everybody has stopped its lanes. A rank knows that
/// of all others once it has their counts, so memory is handed out along handles of this generation alone.
#[test]
fn no_memory_of_the_arena_is_handed_out_before_all_have_recovered() {
    let run = cluster(RANKS, Placement::Direct).build(shape()).unwrap().run(async |mut ep| {
        let (x, routing) = batch(&mut ep, 1, TOKENS);
        let old = ep.dispatch(&x, &routing).await.unwrap().handle;
        let before = ep.output(&old).is_some();
        ep.recover(&RankSet::new()).await.unwrap();
        let stale = ep.output(&old).is_some();
        let new = ep.dispatch(&x, &routing).await.unwrap().handle;
        [before, stale, ep.output(&new).is_some()]
    });
    let given = run.unwrap_or_else(|violation| panic!("{violation}")).finished();
    assert_eq!(given, [[true, false, true]; RANKS as usize]);
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

/// As above in low latency: halves and handles say how much is read and written.
#[test]
fn low_latency_of_another_endpoint_is_refused() {
    let low = |ranks: u32| {
        let (topology, shape) = (Topology::new(1, ranks).unwrap(), shape());
        let settings = Settings::builder(&shape, &topology).low_latency(true).deadline(DEADLINE).build().unwrap();
        Cluster::builder(topology).settings(settings).deadlines(true).build(shape).unwrap()
    };
    let routing = || LowRouting::new((0..2 * i64::from(TOKENS)).map(|at| at % 6).collect(), None);
    let mint = |ranks| {
        let run = low(ranks).run(async |mut ep| {
            let x = ep.rows(&vec![1; (TOKENS * 64) as usize], TOKENS).unwrap();
            let got = ep.low_latency_dispatch(&x, &routing()).await.unwrap();
            let weights = vec![1.0; 2 * TOKENS as usize];
            let combine = ep.send_combine(&got.x, &got.handle, Some(&weights)).await.unwrap();
            (ep.send_dispatch(&x, &routing()).await.unwrap(), combine, got.handle)
        });
        run.unwrap().finished()
    };
    let strange: Vec<_> = mint(2).into_iter().chain(mint(RANKS)).collect();
    let run = low(RANKS).run(async |mut ep| {
        let x = ep.rows(&vec![1; (TOKENS * 64) as usize], TOKENS).unwrap();
        let y = ep.rows(&vec![0; (6 * TOKENS * 64) as usize], 6 * TOKENS).unwrap();
        let weights = vec![1.0; 2 * TOKENS as usize];
        // With an operation of the same number in flight.
        let sent = ep.send_dispatch(&x, &routing()).await.unwrap();
        let mut said = Vec::new();
        for (dispatch, combine, handle) in &strange {
            said.push(ep.receive_dispatch(dispatch).await.unwrap_err().to_string());
            said.push(ep.receive_combine(combine).await.unwrap_err().to_string());
            said.push(ep.send_combine(&y, handle, Some(&weights)).await.unwrap_err().to_string());
            said.push(ep.check_low_handle(handle).unwrap_err().to_string());
        }
        ep.receive_dispatch(&sent).await.unwrap();
        ep.low_latency_dispatch(&x, &routing()).await.unwrap();
        said
    });
    for said in run.unwrap_or_else(|violation| panic!("{violation}")).finished().into_iter().flatten() {
        assert!(said.ends_with(" is of another endpoint, allowed: one of this endpoint"), "{said}");
    }
    // What others left behind is nobody's to skip.
    drop(strange);
}

/// Calls of low latency where the communicator has no room for it are refused, masks too.
#[test]
fn low_latency_without_room_is_refused() {
    let run = cluster(RANKS, Placement::Ring).build(shape()).unwrap().run(async |mut ep| {
        let (x, _) = batch(&mut ep, 1, 1);
        let routing = LowRouting::new(vec![0, 1], None);
        let other = ep_core::Rank((ep.rank().0 + 1) % RANKS);
        [
            ep.send_dispatch(&x, &routing).await.unwrap_err(),
            ep.low_latency_dispatch(&x, &routing).await.unwrap_err(),
            ep.check_at_once().unwrap_err(),
            ep.mask_rank(other).await.unwrap_err(),
        ]
    });
    for error in run.unwrap_or_else(|violation| panic!("{violation}")).finished().into_iter().flatten() {
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
}

/// Worst cases that no memory has are refused before anything moves: the others' calls go on.
#[test]
fn a_worst_case_beyond_all_memory_is_refused() {
    let topology = Topology::new(1, 64).unwrap();
    let shape = Shape::builder().experts(64).topk(1).hidden(1 << 16).max_tokens(1 << 26).build().unwrap();
    let settings = Settings::builder(&shape, &topology).channels(1).slots(2).placement(Placement::Ring);
    let run = Cluster::builder(topology).settings(settings.build().unwrap()).build(shape).unwrap();
    let run = run.run(async |mut ep| {
        let x = ep.rows(&[], 0).unwrap();
        let routing = Routing::TopK { topk_idx: Vec::new(), topk_weights: None };
        let options = Dispatch { worst_rows: u32::MAX, ..Dispatch::default() };
        let refused = ep.dispatch_with(&x, &routing, &options).await.unwrap_err().to_string();
        ep.dispatch(&x, &routing).await.unwrap();
        refused
    });
    for said in run.unwrap_or_else(|violation| panic!("{violation}")).finished() {
        assert_eq!(said, "bytes of memory that a call needs is 562949953290240, allowed: what the system gives");
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
