//! What the commands take of this machine's memory, told before any of it is taken.
//!
//! All ranks of a run lie in this machine, and so does what the oracle makes of their batches: several copies of every row. Processes of a
//! launcher each make the batches of all, and may lie on several machines: those of one are counted, and all that is moved. The sums below follow what is held at the same time; `tests/cli/memory.rs` holds them against what is taken.

use ep_core::layout::RowFormat;
use ep_core::memory::{Estimate, rows_received};
use ep_core::{Error, Layout, Settings, Shape, Topology};

use crate::args::{Backend, ModelName};
use crate::backend::{Timing, simulator, timed};

/// What makes a run smaller, and one that has no payload already.
const REMEDY: &str = "fewer --tokens, ranks or --hidden; of large layers times only: --schedule timed --elide-payload";
const REMEDY_ELIDED: &str = "fewer --tokens or ranks";
/// Pages that a row without payload touches, and their size.
const BARE_ROW: u64 = 3 * 256;
/// Bytes of a choice: expert and weight.
const CHOICE: u64 = 8 + 4;

/// A run as far as its memory depends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs<'a> {
    pub(crate) backend: Backend,
    /// The layer that was asked for.
    pub(crate) shape: &'a Shape,
    /// The layer that ranks see.
    pub(crate) seen: &'a Shape,
    pub(crate) topology: &'a Topology,
    pub(crate) settings: &'a Settings,
    pub(crate) timing: Option<Timing>,
    /// Of all ranks.
    pub(crate) tokens: u64,
    /// Processes of this machine, each of which makes the batches of all ranks.
    pub(crate) processes: u32,
}

impl Needs<'_> {
    /// What the run takes at its height.
    pub(crate) fn estimate(&self) -> Result<Estimate, Error> {
        let layout = Layout::new(self.seen, self.topology, self.settings)?;
        let sizes = Sizes::of(self.seen, self.topology, self.tokens);
        let elided = self.timing.is_some_and(|timing| timing.elide_payload);
        let (moving, comparing) = match self.settings.low_latency() {
            true => (sizes.moving_low(self.topology), sizes.comparing_low()),
            false => (sizes.moving(), sizes.comparing()),
        };
        let (windows, cluster) = match self.backend {
            Backend::Sim => {
                let simulator =
                    simulator(self.shape, self.topology, self.settings, self.timing)?.footprint(self.shape)?;
                (if elided { sizes.moved().saturating_mul(BARE_ROW) } else { sizes.windows(&layout) }, simulator)
            }
            Backend::Host => (sizes.windows(&layout), Estimate::default()),
            // They lie on the GPUs.
            Backend::Cuda => (0, Estimate::default()),
            // So they do on NPUs; a twin has them here.
            Backend::Ascend => (sizes.windows(&layout), Estimate::default()),
        };
        let batches = sizes.batches().saturating_mul(self.processes.into());
        let whole = Estimate::default()
            .with("batches", batches)
            .with("windows", windows)
            .with("rows of the ranks", moving)
            .with("the simulator", cluster.bytes());
        let after = Estimate::default().with("batches", batches).with("rows and what the oracle expects", comparing);
        Ok(if whole.bytes() >= after.bytes() { whole } else { after })
    }

    /// Refuses a run that takes more than there is, before anything is taken.
    pub(crate) fn admit(&self) -> Result<Estimate, Error> {
        let estimate = self.estimate()?;
        let remedy = if self.timing.is_some_and(|timing| timing.elide_payload) { REMEDY_ELIDED } else { REMEDY };
        ep_memory::admit(&estimate, format_args!("a run of {} ranks", self.topology.ranks()), remedy)?;
        Ok(estimate)
    }
}

/// Refuses timed runs of `tune` that take more than there is.
pub(crate) fn admit_tuning(shape: &Shape, topology: &Topology, tokens: u64, model: ModelName) -> Result<(), Error> {
    let settings = Settings::auto(shape, topology);
    let builder = timed::cluster(shape, topology, &settings, model.model())?;
    let simulator = builder.clone().footprint(shape)?.bytes();
    let sizes = Sizes::of(builder.layout(shape)?.shape(), topology, tokens);
    let estimate = Estimate::default()
        .with("batches", sizes.batches())
        .with("windows", sizes.moved().saturating_mul(BARE_ROW))
        .with("rows of the ranks", sizes.moving())
        .with("the simulator", simulator);
    ep_memory::admit(&estimate, format_args!("timed runs of {} ranks", topology.ranks()), "fewer --tokens or ranks")
}

/// Refuses a measurement of CPU ranks that takes more than there is.
#[cfg(all(feature = "host", target_os = "linux"))]
pub(crate) fn admit_bench(shape: &Shape, topology: &Topology, settings: &Settings, tokens: u64) -> Result<(), Error> {
    let sizes = Sizes::of(shape, topology, tokens);
    let layout = Layout::new(shape, topology, settings)?;
    let low = settings.low_latency();
    let moving = if low {
        sizes.moving_low(topology).saturating_mul(2)
    } else {
        sizes.moving().saturating_add(sizes.rows.saturating_mul(sizes.result))
    };
    let estimate = Estimate::default()
        .with("batches", sizes.batches())
        .with("windows", sizes.windows(&layout))
        .with("rows of the ranks", moving)
        .with("threads that copy", if low { 0 } else { sizes.tokens.saturating_mul(2 * sizes.row) });
    ep_memory::admit(&estimate, format_args!("{} ranks", topology.ranks()), "fewer tokens, --ranks or --hidden")
}

/// Refuses a measurement of GPUs whose batches, which are made and compared here, exceed this machine.
#[cfg(feature = "cuda")]
pub(crate) fn admit_gpu_bench(plan: &ep_cuda::bench::Plan) -> Result<(), Error> {
    ep_memory::admit(&of_gpu_bench(plan), format_args!("{} ranks", plan.ranks), "fewer tokens, --ranks or --hidden")
}

/// What is sent, and what came back of it; positions and choices.
#[cfg(feature = "cuda")]
fn of_gpu_bench(plan: &ep_cuda::bench::Plan) -> Estimate {
    let tokens = u64::from(plan.ranks) * u64::from(plan.tokens);
    let choices = 4 * u64::from(plan.ranks) + 16 * u64::from(plan.topk);
    Estimate::default()
        .with("batches", tokens.saturating_mul(4 * u64::from(plan.hidden)))
        .with("choices", tokens.saturating_mul(choices))
}

/// How much there is of everything.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    tokens: u64,
    /// Received in a dispatch.
    rows: u64,
    choices: u64,
    topk: u64,
    /// Bytes of a row, of one of results, of one where it lies in a window.
    row: u64,
    result: u64,
    slot: u64,
    low_latency_rows: u64,
}

impl Sizes {
    fn of(shape: &Shape, topology: &Topology, tokens: u64) -> Self {
        let format = RowFormat::new(shape);
        let places = u64::from(shape.experts()) * u64::from(topology.ranks());
        Self {
            tokens,
            rows: rows_received(shape, topology, tokens),
            choices: tokens.saturating_mul(shape.topk().into()),
            topk: shape.topk().into(),
            row: shape.row_bytes(),
            result: shape.result_bytes(),
            slot: format.slot_bytes(),
            low_latency_rows: places.saturating_mul(shape.max_tokens().into()),
        }
    }

    /// As they are made or read: bf16.
    fn batches(&self) -> u64 {
        self.tokens.saturating_mul(self.result + self.topk * CHOICE)
    }

    /// Where rows come from and which experts they are for.
    const fn about(&self) -> u64 {
        self.rows.saturating_mul(8 + self.topk * CHOICE)
    }

    /// Rows of a dispatch and of a combine.
    const fn moved(&self) -> u64 {
        self.rows.saturating_add(self.choices)
    }

    /// What rows write to in windows: rings hold no more than they were cut for.
    fn windows(&self, layout: &Layout) -> u64 {
        let ranks = u64::from(layout.topology().ranks());
        let rows = self.rows.max(if layout.settings().low_latency() { self.choices } else { 0 });
        let part = |name: &str, bytes: u64| match name {
            "cells" | "counts" | "notes" | "notes outbox" => bytes,
            "arena" => bytes.min(rows.saturating_mul(self.row + self.result) / ranks),
            "low rows" | "low results" | "low staging" => bytes.min(rows.saturating_mul(self.slot) / ranks),
            _ => bytes.min(rows.saturating_mul(2 * self.slot) / ranks),
        };
        let regions = layout.regions();
        let each: u64 = regions.iter().map(|region| part(region.name, region.span.len)).fold(0, u64::saturating_add);
        ranks.saturating_mul(each)
    }

    /// Throughput, while results travel: what was sent and seen, the results, and what has come back.
    fn moving(&self) -> u64 {
        let (sent, back) = (self.tokens.saturating_mul(self.row), self.tokens.saturating_mul(2 * self.result));
        let rows = self.rows.saturating_mul(self.row + self.result);
        sent.saturating_add(back).saturating_add(rows).saturating_add(self.about().saturating_mul(2))
    }

    /// Throughput, while the oracle is asked: what was seen and is expected, of dispatch, experts and combine.
    fn comparing(&self) -> u64 {
        let rows = self.rows.saturating_mul(2 * self.row + self.result);
        rows.saturating_add(self.tokens.saturating_mul(2 * self.result + self.row))
            .saturating_add(self.about().saturating_mul(2))
    }

    /// Low latency: results have a place for every token that each expert could get.
    fn moving_low(&self, topology: &Topology) -> u64 {
        let places = self.low_latency_rows.saturating_mul(self.result + self.row / u64::from(topology.ranks()));
        let rows = self.choices.saturating_mul(2 * self.row);
        places.saturating_add(rows).saturating_add(self.tokens.saturating_mul(self.row + 2 * self.result))
    }

    fn comparing_low(&self) -> u64 {
        self.choices
            .saturating_mul(3 * self.row + self.result)
            .saturating_add(self.tokens.saturating_mul(3 * self.result))
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use ep_core::Element;
    use ep_cuda::bench::{Choice, Plan};

    use super::*;

    #[test]
    fn batches_of_gpus_are_made_and_compared_here() {
        let (element, choice) = (Element::Bf16, Choice::Any);
        let (tokens, hidden, topk, experts, repetitions) = (1000, 100, 4, 8, 1);
        let plan = Plan { ranks: 2, tokens, hidden, topk, experts, element, choice, repetitions };
        let of = |plan: &Plan| of_gpu_bench(plan).parts().to_vec();
        assert_eq!(of(&plan), [("batches", 2 * 1000 * 100 * 2 * 2), ("choices", 2 * 1000 * (2 * 4 + 4 * 16))]);
        assert_eq!(of_gpu_bench(&Plan { tokens: u32::MAX, hidden: u32::MAX, ranks: 8, ..plan }).bytes(), u64::MAX);
    }
}
