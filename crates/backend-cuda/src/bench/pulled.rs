//! Times of calls whose rows lie in outboxes of a bounded size.

use std::fmt::Write as _;

use ep_core::{Error, Nanos, OutboxUse, Placement, Settings, Topology};

use super::Plan;
use super::whole::{self, Calls, WholeTimes};
use crate::Cluster;

/// How outboxes are cut, what calls use of them, and the multiprocessors that serve them.
#[derive(Clone, Copy, Debug)]
pub struct Outboxes {
    /// Blocks of a kernel, and channels.
    pub blocks: u32,
    /// Slots of a ring to one rank.
    pub slots: u32,
    /// Slots after which tails and heads are told.
    pub step: u32,
    /// What calls say.
    pub used: OutboxUse,
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
    let cluster = Cluster::builder(topology).settings(settings).multiprocessors(cut.blocks).build(shape)?;
    let WholeTimes { window, dispatch, combine, wrong } = whole::measure(plan, cluster, Calls::Throughput(cut.used))?;
    Ok(PulledTimes { window, dispatch, combine, wrong })
}

/// The times as a table.
pub fn pulled_table(plan: &Plan, cuts: &[Outboxes], times: &[PulledTimes]) -> String {
    let mut text = format!("{plan:?}\n SMs slots step | piece of | window MiB | dispatch combine us | wrong\n");
    let said = |number: Option<u32>| number.map_or("-".into(), |number| number.to_string());
    for (cut, PulledTimes { window, dispatch, combine, wrong }) in cuts.iter().zip(times) {
        let Outboxes { blocks, slots, step, used: OutboxUse { piece, slots: held } } = cut;
        let (piece, held) = (said(*piece), said(*held));
        let mib = *window as f64 / f64::from(1 << 20);
        let _ = writeln!(
            text,
            "{blocks:4} {slots:5} {step:4} | {piece:>4} {held:>4} | {mib:10.1} | {dispatch:8.1} {combine:7.1}    | {wrong}"
        );
    }
    text
}
