//! Low latency over lanes that lose a row, or break while rows are sent.

use crate::common::{A, B, C, DEADLINE};
use ep_core::engine::Engine;
use ep_core::engine::low_latency::LowRouting;
use ep_core::machine::{Decorated, FaultPlan, LaneClass, Machine as _, Trigger, Trouble, VerbKind};
use ep_core::port::{LaneId, LaneKind};
use ep_core::{Endpoint, Error, Fault, LaneCause, LowLatency, Rank, Settings, Shape, Topology};
use ep_sim::{Cluster, Machine};

const TOKENS: u32 = 4;
const SEEDS: u64 = 20;

type Ranks = Engine<Decorated<Machine, FaultPlan>>;

/// Dispatches tokens that go to all ranks.
async fn dispatch(ep: &mut Ranks) -> Result<(), Error> {
    let ranks = ep.topology().ranks();
    let x = ep.rows(&vec![1; TOKENS as usize * 64], TOKENS)?;
    let topk_idx = (0..TOKENS).flat_map(|_| 0..i64::from(ranks)).collect();
    ep.low_latency_dispatch(&x, &LowRouting::new(topk_idx, None)).await.map(drop)
}

/// What `ops` dispatches end with on each rank, the last one's fault; something goes wrong with the puts of rows from `from` to `to`.
fn run(ranks: u32, seed: u64, (from, to): (Rank, Rank), nth: u64, trouble: Trouble, ops: u32) -> Vec<Option<Fault>> {
    let topology = Topology::new(1, ranks).unwrap();
    let shape = Shape::builder().experts(ranks).topk(ranks).hidden(32).max_tokens(TOKENS).build().unwrap();
    let settings = Settings::builder(&shape, &topology).low_latency(true).deadline(DEADLINE).build().unwrap();
    let cluster = Cluster::builder(topology).settings(settings).deadlines(true).seed(seed).build(shape).unwrap();
    let run = cluster.run_machines(async |machine: Machine| {
        let rows = Trigger::kind(VerbKind::Put).on_lane(LaneClass::LowRows).with_peer(to);
        let plan = FaultPlan::new();
        let plan = if machine.rank() == from { plan.with(rows, nth, trouble) } else { plan };
        let mut ep = Engine::new(Decorated::new(machine, plan.clone())).unwrap();
        for op in 1..=ops {
            if let Err(error) = dispatch(&mut ep).await {
                assert_eq!(op, ops, "{error}");
                return Some(error.failure().expect("a failure").fault);
            }
        }
        assert_eq!(plan.struck(), u64::from(ep.rank() == from));
        None
    });
    run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}")).finished()
}

/// Where a row did not arrive lies that of the operation before last: it is told from the one that is due.
#[test]
fn a_row_of_before_is_not_taken_for_one_that_was_lost() {
    for seed in 0..SEEDS {
        let lost = 2 * u64::from(TOKENS) + 1;
        let told = run(2, seed, (A, B), lost, Trouble::Lose, 3);
        let Some(Fault::Mismatch { field, mine, theirs, peer }) = told[B.index()] else {
            panic!("seed {seed}: {told:?}")
        };
        assert_eq!((field, mine, theirs, peer), ("operation of a low-latency row", 3, 1, A), "seed {seed}");
        assert_eq!(told[A.index()], None, "seed {seed}: its rows came");
    }
}

/// Who could not send to a rank that it has not masked has not done what was asked, though all that it was to receive has come.
#[test]
fn a_lane_that_breaks_while_rows_are_sent_fails_the_call() {
    for seed in 0..SEEDS {
        let fault = Fault::LaneBroken { lane: LaneId { peer: C, kind: LaneKind::LowRows }, cause: LaneCause::NoAnswer };
        let told = run(3, seed, (B, C), 1, Trouble::Fail(fault), 1);
        assert_eq!(told[B.index()], Some(fault), "seed {seed}");
        assert_eq!(told[A.index()], None, "seed {seed}: it has nothing to do with that lane");
        assert!(told[C.index()].is_some(), "seed {seed}: it waits for rows");
    }
}
