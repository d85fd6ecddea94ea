//! The arguments of what runs in virtual time.

use std::num::NonZeroUsize;

use clap::{Args, ValueEnum};
use ep_conformance::workload::RoutingKind;
use ep_sim::Model;

use super::{HtmlArgs, LayerArgs, SEED, TopologyArgs, number};

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct ThreadsArgs {
    /// Threads on which nodes are simulated in virtual time: it comes out the same on any number [default: one a core]
    #[arg(long, value_name = "N", value_parser = number::<NonZeroUsize>("a whole number, 1 or more"))]
    threads: Option<NonZeroUsize>,
}

impl ThreadsArgs {
    /// Whether a number was given.
    pub(crate) const fn given(self) -> bool {
        self.threads.is_some()
    }

    pub(crate) fn get(self) -> NonZeroUsize {
        self.threads.or_else(|| std::thread::available_parallelism().ok()).unwrap_or(NonZeroUsize::MIN)
    }
}

/// Machines whose rates and latencies the timed scheduler knows.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ModelName {
    /// H800s, NVLink of 160 GB/s, one 400 Gb/s network card a GPU
    H800Cx7,
    /// H200s, NVLink of 354 GB/s; between nodes as above
    H200Node,
    /// H200s over the loop at 50 GB/s a rank, as measured with --far-movers
    H200Loop,
    /// Ascend 910B: HCCS of 128 GB/s, one 200 Gb/s RoCE port an NPU. Assumed for the most part
    AscendA2,
}

impl ModelName {
    pub(crate) const fn model(self) -> Model {
        match self {
            Self::H800Cx7 => Model::h800_cx7(),
            Self::H200Node => Model::h200_node(),
            Self::H200Loop => Model::h200_loop(),
            Self::AscendA2 => Model::ascend_a2(),
        }
    }
}

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    pub(crate) topology: TopologyArgs,
    /// Tokens of each rank
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) tokens: u32,
    #[command(flatten)]
    pub(crate) layer: LayerArgs,
    /// How tokens choose experts: uniform, grouped:G:L, skewed:A or single
    #[arg(long, value_name = "KIND", default_value = "uniform")]
    pub(crate) routing: RoutingKind,
    /// What the choices are drawn from
    #[arg(long, default_value_t = 0, value_parser = number::<u64>(SEED))]
    pub(crate) seed: u64,
    /// The machine
    #[arg(long, value_enum, default_value_t = ModelName::H800Cx7)]
    pub(crate) model: ModelName,
    /// Events that all timed runs together may take; 1 to 2 million a second. Events, not seconds, so that the proposal
    /// is the same everywhere
    #[arg(long, value_name = "EVENTS", default_value_t = 20_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) budget: u64,
    /// Proposes no settings whose window is larger [default: any]
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_window: Option<u64>,
    #[command(flatten)]
    pub(crate) threads: ThreadsArgs,
    #[command(flatten)]
    pub(crate) html: HtmlArgs,
    /// Prints one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Whose published figures there are.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Published {
    /// DeepEP V1, low latency and normal, on H800s with 400 Gb/s network cards
    Deepep,
}

/// Parts of the published figures.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// 128 tokens a rank, microseconds
    LowLatency,
    /// 4096 tokens a rank, GB/s
    Normal,
}

#[derive(Args, Debug)]
#[command(allow_negative_numbers = true)]
pub(crate) struct CompareArgs {
    /// Whose figures
    #[arg(value_enum)]
    pub(crate) published: Published,
    /// One part of them [default: all]
    #[arg(long, value_enum, value_name = "PART")]
    pub(crate) only: Option<Part>,
    /// Leaves out rows with more ranks than this
    #[arg(long, value_name = "RANKS", default_value_t = 256, value_parser = clap::value_parser!(u32).range(8..))]
    pub(crate) up_to: u32,
    #[command(flatten)]
    pub(crate) threads: ThreadsArgs,
    #[command(flatten)]
    pub(crate) html: HtmlArgs,
    /// Prints one JSON object instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}
