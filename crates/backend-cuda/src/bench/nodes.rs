//! Times of calls over several nodes, beside what their network could carry.

use ep_core::settings::SettingsBuilder;
use ep_core::{Error, Layout, Nanos, OutboxUse, Placement, Settings, Topology};

use super::whole::{self, Calls, WholeTimes};
use super::{Plan, route};
use crate::rank::layout_of;
use crate::{Builder, Cluster, memory};

/// How a communicator over several nodes is set up.
#[derive(Clone, Copy, Debug)]
pub struct NodesCut {
    /// Nodes, each with the same number of the plan's ranks.
    pub nodes: u32,
    /// Whether calls of low latency are measured, by source. Rows land in its slots then, and `placement`, `channels` and `slots` are of no account.
    pub low_latency: bool,
    /// Multiprocessors of a rank; of low latency all but what others need, where this is 0.
    pub blocks: u32,
    /// Where rows land.
    pub placement: Placement,
    /// Rings of each pair of ranks, and their rows; none: what a communicator takes by itself.
    pub channels: Option<u32>,
    /// Rows of a ring.
    pub slots: Option<u32>,
}

/// Medians of the slowest rank, in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct NodesTimes {
    /// Bytes of a rank's window.
    pub window: u64,
    /// Cached dispatch.
    pub dispatch: f64,
    /// Combine of what came.
    pub combine: f64,
    /// Bytes of rows that cross the network, in or out of the rank that has most of them: in a dispatch, and in a combine.
    pub far_bytes: [u64; 2],
    /// Values that came back wrong.
    pub wrong: u64,
}

impl NodesCut {
    fn topology(&self, plan: &Plan) -> Result<Topology, Error> {
        if !plan.ranks.is_multiple_of(self.nodes) {
            return Err(Error::invalid("ranks", plan.ranks, format_args!("a multiple of the nodes, {}", self.nodes)));
        }
        Topology::new(self.nodes, plan.ranks / self.nodes)
    }

    /// The settings of its communicator.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes.
    pub fn settings(&self, plan: &Plan) -> Result<Settings, Error> {
        let (shape, topology) = (plan.shape()?, self.topology(plan)?);
        let builder = Cluster::settings(&shape, &topology, Some(self.blocks.max(1)));
        let builder = builder.placement(self.placement).deadline(Nanos::from_secs(10));
        let mut builder = builder.low_latency(self.low_latency).low_latency_per_choice(false);
        for (number, set) in [
            (self.channels, SettingsBuilder::channels as fn(SettingsBuilder, u32) -> SettingsBuilder),
            (self.slots, SettingsBuilder::slots),
        ] {
            builder = number.into_iter().fold(builder, set);
        }
        builder.build()
    }

    fn layout(&self, plan: &Plan) -> Result<Layout, Error> {
        layout_of(&plan.shape()?, &self.topology(plan)?, &self.settings(plan)?)
    }

    /// Refuses what the GPUs have no room for, before anything is taken.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes and memory; what is missing.
    pub fn admit(&self, plan: &Plan) -> Result<(), Error> {
        memory::admit(&super::devices(plan.ranks)?, &memory::of_window(&self.layout(plan)?))
    }
}

/// Measures on ranks that are threads of this process; `over` gives their cluster the network between their nodes.
///
/// # Errors
/// What is missing, or what a kernel reported.
pub fn run_nodes(
    plan: &Plan,
    cut: &NodesCut,
    over: impl FnOnce(Builder) -> Result<Builder, Error>,
) -> Result<NodesTimes, Error> {
    let topology = cut.topology(plan)?;
    let builder = Cluster::builder(topology).settings(cut.settings(plan)?).multiprocessors(cut.blocks.max(1));
    let limited = cut.low_latency && cut.blocks > 0;
    let cluster = over(if limited { builder.low_latency_multiprocessors(cut.blocks) } else { builder })?;
    let calls = if cut.low_latency { Calls::LowLatency } else { Calls::Throughput(OutboxUse::USUAL) };
    let WholeTimes { window, dispatch, combine, wrong } = whole::measure(plan, cluster.build(plan.shape()?)?, calls)?;
    let shape = plan.shape()?;
    let rows = far_rows(plan, cut.nodes, cut.low_latency);
    let far_bytes = [shape.row_bytes(), shape.result_bytes()].map(|row| rows * row);
    Ok(NodesTimes { window, dispatch, combine, far_bytes, wrong })
}

/// Rows that leave for other nodes, or come from there, at the rank with most of them: a token's crosses once to each node; in low latency, which is a
/// full mesh, to each rank.
fn far_rows(plan: &Plan, nodes: u32, mesh: bool) -> u64 {
    let (ranks, width) = (plan.ranks, plan.ranks / nodes);
    let (mut out, mut into) = (vec![0; ranks as usize], vec![0; ranks as usize]);
    for rank in 0..ranks {
        for choices in route(plan, rank).chunks(plan.topk as usize) {
            if mesh {
                for other in plan.groups(choices, 1).into_iter().filter(|&other| other / width != rank / width) {
                    out[rank as usize] += 1;
                    into[other as usize] += 1;
                }
                continue;
            }
            for node in plan.groups(choices, width).into_iter().filter(|&node| node != rank / width) {
                out[rank as usize] += 1;
                into[(node * width + rank % width) as usize] += 1;
            }
        }
    }
    out.into_iter().chain(into).max().unwrap_or(0)
}
