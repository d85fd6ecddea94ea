//! Times of calls whose rows lie in outboxes of a bounded size.

use std::fmt::Write as _;
use std::sync::Barrier;

use ep_core::engine::{Combine, Routing};
use ep_core::{Element, Endpoint as _, Error, Nanos, Placement, Settings, Topology};

use super::{PAUSE, Plan, fill, median, route};
use crate::build::Source;
use crate::{Cluster, CudaEndpoint};

/// How outboxes are cut, and the multiprocessors that serve them.
#[derive(Clone, Copy, Debug)]
pub struct Outboxes {
    /// Blocks of a kernel, and channels.
    pub blocks: u32,
    /// Slots of a ring to one rank.
    pub slots: u32,
    /// Slots after which tails and heads are told.
    pub step: u32,
}

/// Medians of the slowest rank, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct PulledTimes {
    /// Bytes of a rank's window.
    pub window: u64,
    /// Cached dispatch.
    pub dispatch: f64,
    /// Combine of what came.
    pub combine: f64,
    /// Values that came back wrong.
    pub wrong: u64,
}

/// Measures on ranks that are threads of this process.
///
/// # Errors
/// What is missing, or what a kernel reported.
pub fn run_pulled(plan: &Plan, cuts: &[Outboxes]) -> Result<Vec<PulledTimes>, Error> {
    cuts.iter().map(|cut| of_cut(plan, *cut)).collect()
}

fn of_cut(plan: &Plan, cut: Outboxes) -> Result<PulledTimes, Error> {
    let (topology, shape) = (Topology::new(1, plan.ranks)?, plan.shape()?);
    let settings = Settings::builder(&shape, &topology)
        .placement(Placement::Pulled)
        .channels(cut.blocks)
        .slots(cut.slots)
        .chunk(cut.step.min(cut.slots))
        .credit(cut.step.min(cut.slots))
        .deadline(Nanos::from_secs(2))
        .build()?;
    let barrier = &Barrier::new(plan.ranks as usize);
    let cluster = Cluster::builder(topology).settings(settings).multiprocessors(cut.blocks).build(shape)?;
    let times: Vec<_> =
        cluster.run(async |ep| one(plan, ep, barrier).await)?.into_iter().collect::<Result<_, Error>>()?;
    Ok(times.into_iter().fold(PulledTimes::default(), |slowest, times| PulledTimes {
        window: times.window,
        dispatch: slowest.dispatch.max(times.dispatch),
        combine: slowest.combine.max(times.combine),
        wrong: slowest.wrong + times.wrong,
    }))
}

async fn one(plan: &Plan, mut ep: CudaEndpoint, barrier: &Barrier) -> Result<PulledTimes, Error> {
    ep.device().prepare(&[Source::Meet])?;
    let me = ep.rank().0;
    let row_bytes = ep.shape().row_bytes() as usize;
    let sent = match plan.element {
        Element::Bf16 => fill(plan, me, row_bytes),
        _ => vec![0; plan.tokens as usize * row_bytes],
    };
    let x = ep.rows(&sent, plan.tokens)?;
    let chosen = route(plan, me);
    let routing = Routing::TopK { topk_idx: ep.array(&chosen)?, topk_weights: None };
    barrier.wait();
    let handle = ep.dispatch(&x, &routing).await?.handle;
    let result = vec![0; handle.rows() as usize * ep.shape().result_bytes() as usize];
    let zeros = ep.rows(&result, handle.rows())?;
    let (mut dispatches, mut combines, mut wrong) = (Vec::new(), Vec::new(), 0);
    for turn in 0..u64::from(plan.repetitions) + 5 {
        let meet = |ep: &CudaEndpoint, number| {
            ep.stream().synchronize()?;
            barrier.wait();
            ep.device().meet(number, PAUSE)?;
            Ok::<_, Error>(ep.stream().record(true)?)
        };
        let began = meet(&ep, 2 * turn + 1)?;
        let got = ep.redispatch(&x, &handle).await?;
        let ended = ep.stream().record(true)?;
        ep.stream().synchronize()?;
        dispatches.push(ended.since(&began)?);
        let y = if plan.element == Element::Bf16 { &got.x } else { &zeros };
        let began = meet(&ep, 2 * turn + 2)?;
        let sums = ep.combine(y, &handle, Combine::default()).await?;
        let ended = ep.stream().record(true)?;
        ep.stream().synchronize()?;
        combines.push(ended.since(&began)?);
        if plan.element == Element::Bf16 && turn == 0 {
            wrong = differences(plan, &chosen, &sent, &ep.bytes(&sums.x)?);
        }
    }
    let window = ep.layout().window_bytes();
    let [dispatch, combine] = [dispatches, combines].map(|mut times| median(times.split_off(5)));
    Ok(PulledTimes { window, dispatch, combine, wrong })
}

/// Rows that went to k ranks and straight back are k times what they were.
fn differences(plan: &Plan, chosen: &[i64], sent: &[u8], sums: &[u8]) -> u64 {
    let (topk, row, local) = (plan.topk as usize, 2 * plan.hidden as usize, i64::from(plan.experts / plan.ranks));
    let value = |bytes: &[u8]| half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    let mut wrong = 0;
    for ((choices, sent), sums) in chosen.chunks(topk).zip(sent.chunks(row)).zip(sums.chunks(row)) {
        let mut ranks: Vec<i64> = choices.iter().map(|expert| expert / local).collect();
        ranks.sort_unstable();
        ranks.dedup();
        for (x, sum) in sent.chunks(2).zip(sums.chunks(2)) {
            wrong += u64::from(value(sum) != half::bf16::from_f32(value(x) * ranks.len() as f32).to_f32());
        }
    }
    wrong
}

/// The times as a table.
pub fn pulled_table(plan: &Plan, cuts: &[Outboxes], times: &[PulledTimes]) -> String {
    let mut text = format!("{plan:?}\n SMs slots step | window MiB | dispatch combine us | wrong\n");
    for (Outboxes { blocks, slots, step }, PulledTimes { window, dispatch, combine, wrong }) in cuts.iter().zip(times) {
        let mib = *window as f64 / f64::from(1 << 20);
        let _ =
            writeln!(text, "{blocks:4} {slots:5} {step:4} | {mib:10.1} | {dispatch:8.1} {combine:7.1}    | {wrong}");
    }
    text
}
