//! Normal mode: the real engine, with rings as DeepEP V1 configures its own.

use std::num::NonZeroUsize;

use ep_conformance::workload::{Batch, RoutingKind, Workload};
use ep_core::quant::Scaling;
use ep_core::{Element, Error, Settings, Shape, Topology};
use ep_sim::Model;

use super::BEFORE;
use crate::layer::{Layer, Stopped, Times};

pub(crate) const TOKENS: u32 = 4096;
/// Nodes that the experts of a token lie on, at most.
const MOST_NODES: u32 = 4;
/// Of the 24 multiprocessors two serve a channel.
pub(crate) const CHANNELS: u32 = 12;

/// What came of it.
pub(crate) struct Ran {
    pub(crate) times: Times,
    /// Rows that a rank sends over the narrowest link, mean of the ranks: on one node one for each rank, else one for each
    /// node; those to the own rank or node are counted in, as in the published figures.
    pub(crate) rows: f64,
}

/// Bytes of a row there and back, as the published figures count them.
pub(crate) fn row_bytes() -> Result<[u64; 2], Error> {
    let shape = shape()?;
    Ok([shape.row_bytes(), shape.result_bytes()])
}

fn shape() -> Result<Shape, Error> {
    let builder = Shape::builder().experts(super::EXPERTS).topk(super::TOPK).hidden(super::HIDDEN);
    builder.max_tokens(TOKENS).element(Element::Fp8(Scaling::Exact)).build()
}

/// Dispatches and combines a batch.
pub(crate) fn run(topology: Topology, model: Model, threads: NonZeroUsize) -> Result<Ran, Stopped> {
    let shape = shape()?;
    let kind = match topology.nodes() {
        1 => RoutingKind::Uniform,
        nodes => RoutingKind::Grouped { groups: nodes, limit: MOST_NODES.min(nodes) },
    };
    // Only choices are wanted: rows of one element.
    let thin = Shape::builder().experts(shape.experts()).topk(shape.topk()).hidden(1).max_tokens(TOKENS).build()?;
    let batches = Workload::new(thin, vec![TOKENS; topology.ranks() as usize]).kind(kind).batches()?;
    let settings = settings(&shape, &topology)?;
    let layer =
        Layer { shape, topology, settings, model, before: BEFORE, batches: &batches, max_events: u64::MAX, threads };
    Ok(Ran { times: layer.time()?, rows: rows(&topology, &batches) })
}

/// Slots and chunks of DeepEP V1's default dispatch for 24 to 64 ranks: 288 slots near, 128 far in chunks of 8.
fn settings(shape: &Shape, topology: &Topology) -> Result<Settings, Error> {
    let builder = Settings::builder(shape, topology).channels(CHANNELS);
    builder.slots(288).chunk(8).credit(8).far_slots(128).far_chunk(8).far_credit(8).build()
}

fn rows(topology: &Topology, batches: &[Batch]) -> f64 {
    let parts = if topology.nodes() == 1 { topology.ranks() } else { topology.nodes() };
    let experts = i64::from(super::EXPERTS / parts);
    let distinct = |choices: &[i64]| {
        let mut homes: Vec<i64> = choices.iter().map(|expert| expert / experts).collect();
        homes.sort_unstable();
        homes.dedup();
        homes.len() as u64
    };
    let tokens = batches.iter().flat_map(|batch| batch.topk_idx.chunks_exact(super::TOPK as usize));
    tokens.map(distinct).sum::<u64>() as f64 / batches.len() as f64
}
