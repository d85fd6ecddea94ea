//! Lanes that lose a row, or break while rows are sent: what the engines' calls end with.

use crate::common::{A, B, C, DEADLINE};
use ep_core::engine::low_latency::LowRouting;
use ep_core::engine::{Engine, Routing};
use ep_core::machine::{Decorated, FaultPlan, LaneClass, Machine as _, Trigger, Trouble, VerbKind};
use ep_core::port::{LaneId, LaneKind};
use ep_core::{Endpoint, Error, Failure, Fault, LaneCause, LowLatency, Rank, Settings, Shape, Topology};
use ep_sim::{Cluster, Machine};

const TOKENS: u32 = 4;
const SEEDS: u64 = 20;

/// A rank whose verbs go wrong as its plan says.
type Faulty = Engine<Decorated<Machine, FaultPlan>>;

/// Dispatches tokens that go to all ranks, in low latency or not.
async fn dispatch(ep: &mut Faulty, low: bool) -> Result<(), Error> {
    let ranks = ep.topology().ranks();
    let x = ep.rows(&vec![1; TOKENS as usize * 64], TOKENS)?;
    let topk_idx = (0..TOKENS).flat_map(|_| 0..i64::from(ranks)).collect();
    if low {
        return ep.low_latency_dispatch(&x, &LowRouting::new(topk_idx, None)).await.map(drop);
    }
    ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await.map(drop)
}

/// What `play` fails with on each rank, where the `nth` put of a row from one rank to another goes wrong.
fn run(
    (ranks, seed): (u32, u64),
    (from, to, class): (Rank, Rank, LaneClass),
    (nth, trouble): (u64, Trouble),
    play: impl AsyncFn(&mut Faulty) -> Result<(), Error>,
) -> Vec<Option<Failure>> {
    let topology = Topology::new(1, ranks).unwrap();
    let shape = Shape::builder().experts(ranks).topk(ranks).hidden(32).max_tokens(TOKENS).build().unwrap();
    let settings = Settings::builder(&shape, &topology).low_latency(true).deadline(DEADLINE).build().unwrap();
    let cluster = Cluster::builder(topology).settings(settings).deadlines(true).seed(seed).build(shape).unwrap();
    let run = cluster.run_machines(async |machine: Machine| {
        let rows = Trigger::kind(VerbKind::Put).on_lane(class).with_peer(to);
        let plan = FaultPlan::new();
        let plan = if machine.rank() == from { plan.with(rows, nth, trouble) } else { plan };
        let mut ep = Engine::new(Decorated::new(machine, plan)).unwrap();
        play(&mut ep).await.err().map(|error| *error.failure().expect("a failure"))
    });
    run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}")).finished()
}

/// Where a row did not arrive lies one of the bank's last use, in this generation or in the one before: it is told from the one that is due.
#[test]
fn a_row_of_before_is_not_taken_for_one_that_was_lost() {
    let tokens = u64::from(TOKENS);
    let cases = [
        (false, 2 * tokens + 1, ("operation of a low-latency row", 3, 1)),
        (true, tokens + 1, ("generation of a low-latency row", 2, 1)),
    ];
    for (seed, (rejoins, lost, due)) in (0..SEEDS).flat_map(|seed| cases.map(|case| (seed, case))) {
        let told = run((2, seed), (A, B, LaneClass::LowRows), (lost, Trouble::Lose), async |ep| {
            dispatch(ep, true).await.unwrap();
            if rejoins {
                ep.rejoin().await.unwrap();
            } else {
                dispatch(ep, true).await.unwrap();
            }
            dispatch(ep, true).await
        });
        let fault = told[B.index()].map(|failure| failure.fault);
        let (field, mine, theirs) = due;
        assert_eq!(fault, Some(Fault::Mismatch { field, mine, theirs, peer: A }), "seed {seed}");
        assert_eq!(told[A.index()], None, "seed {seed}: its rows came");
    }
}

fn broken(peer: Rank, kind: LaneKind) -> Fault {
    Fault::LaneBroken { lane: LaneId { peer, kind }, cause: LaneCause::NoAnswer }
}

/// Who could not send to a rank that it has not masked has not done what was asked, though all that it was to receive has come.
#[test]
fn a_lane_that_breaks_while_rows_are_sent_fails_the_call() {
    for seed in 0..SEEDS {
        let fault = broken(C, LaneKind::LowRows);
        let way = (B, C, LaneClass::LowRows);
        let told = run((3, seed), way, (1, Trouble::Fail(fault)), async |ep| dispatch(ep, true).await);
        assert_eq!(told[B.index()].map(|failure| failure.fault), Some(fault), "seed {seed}");
        assert_eq!(told[A.index()], None, "seed {seed}: it has nothing to do with that lane");
        assert!(told[C.index()].is_some(), "seed {seed}: it waits for rows");
    }
}

/// A rank that finds a broken lane long before the deadline tells the others, and they say from whom they have that.
#[test]
fn who_hears_a_verdict_before_its_time_is_up_says_from_whom() {
    for seed in 0..SEEDS {
        let (way, fault) = ((B, C, LaneClass::Data), broken(C, LaneKind::Data(0)));
        let told = run((3, seed), way, (1, Trouble::Fail(fault)), async |ep| {
            // Who was done when the lane broke hears of it in the next call.
            loop {
                dispatch(ep, false).await?;
            }
        });
        // Whoever takes a verdict over spreads it, too.
        for (me, told) in (0..).map(Rank).zip(told) {
            let Failure { culprit, reporter, .. } = told.expect("it failed");
            assert_eq!((culprit, reporter == me), (C, me == B), "seed {seed}: rank {me} was told by rank {reporter}");
        }
    }
}
