//! Rows lie in an outbox until the slowest reader has pulled them, though all of a batch have room there at once.
#![allow(unreachable_pub)] // The test targets that hold it are crates of their own.

use ep_conformance::drive::all_of;
use ep_conformance::verify::bytes_of;
use ep_conformance::workload::Batch;
use ep_core::engine::Routing;
use ep_core::incident::Incident;
use ep_core::{Endpoint as _, Error, Nanos, Placement, Rank, Settings, Shape, Topology};
use ep_cuda::checks::Checks;
use ep_cuda::{Cluster, CudaEndpoint};
use libtest_mimic::Trial;

const DEADLINE: Nanos = Nanos::from_secs(30);
/// What each verb of the slow rank takes longer: more than an operation of the other takes.
const SLOWLY: Nanos = Nanos(10_000_000);
/// Channels, each of which the slow rank begins late, and slots of each.
const CHANNELS: u32 = 4;
const SLOTS: u32 = 4;
/// As many as there is room for.
const TOKENS: u32 = CHANNELS * SLOTS;
const TOPK: u32 = 2;
const HIDDEN: u32 = 64;
/// Operations that their sender enqueues at once: it gets nothing itself, so nothing else holds it up.
const TIMES: u16 = 8;

/// Rows that rank 1 brings, all for rank 0, whose elements are of bits `mark`.
fn batch(mark: u16) -> Batch {
    Batch {
        tokens: TOKENS,
        x: vec![mark; (TOKENS * HIDDEN) as usize],
        topk_idx: [0, -1].repeat(TOKENS as usize),
        topk_weights: vec![1.0; (TOKENS * TOPK) as usize],
    }
}

/// What operation `time` brings.
const fn mark(time: u16) -> u16 {
    0x4000 + time
}

async fn rank(mut ep: CudaEndpoint) -> Result<(), Error> {
    let sends = ep.rank() == Rank(1);
    let of = |time| if sends { batch(mark(time)) } else { Batch::default() };
    let mut upload =
        |batch: Batch| Ok::<_, Error>((ep.rows(&bytes_of(&batch.x), batch.tokens)?, ep.array(&batch.topk_idx)?));
    let inputs = (0..=TIMES).map(|time| upload(of(time))).collect::<Result<Vec<_>, _>>()?;
    let (x, choices) = &inputs[0];
    let routing = Routing::TopK { topk_idx: choices.clone(), topk_weights: None };
    let handle = ep.dispatch(x, &routing).await?.handle;
    let mut got = Vec::new();
    for (x, _) in &inputs[1..] {
        got.push(ep.redispatch(x, &handle).await?);
    }
    for (time, got) in (1..).zip(&got) {
        let expected = if sends { Vec::new() } else { bytes_of(&batch(mark(time)).x) };
        if ep.bytes(&got.x)? != expected {
            return Err(Error::broken("rows from an outbox", format_args!("those of operation {time} are others"), ""));
        }
    }
    Ok(())
}

/// The sender's next operation writes where the rows of this one lie.
fn finds_its_rows() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let topology = Topology::new(1, 2).map_err(text)?;
    let shape = Shape::builder().experts(4).topk(TOPK).hidden(HIDDEN).max_tokens(TOKENS).build().map_err(text)?;
    let settings = Settings::builder(&shape, &topology).placement(Placement::Pulled).channels(CHANNELS).slots(SLOTS);
    let settings = settings.deadline(DEADLINE).build().map_err(text)?;
    let slow = Checks { incidents: vec![Incident::Starve { rank: Rank(0) }], slowly: SLOWLY, ..Checks::default() };
    let cluster = Cluster::builder(topology).settings(settings).multiprocessors(2).specialise(false).checks(slow);
    let seen = cluster.build(shape).and_then(|cluster| cluster.run(rank)).map_err(text)?;
    all_of(seen).map(drop)
}

pub fn trial(absent: Option<&'static str>) -> Trial {
    let name = "slow_reader::finds_its_rows_in_an_outbox_that_has_room_for_all";
    Trial::test(name, || finds_its_rows().map_err(Into::into)).with_ignored_flag(absent.is_some())
}
