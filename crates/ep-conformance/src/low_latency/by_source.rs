//! Rounds of low latency whose rows lie by source. What they bring is what a dispatch of throughput mode brings on one node, and their oracle that one's.

use ep_core::engine::low_latency::{LowBySource, LowOrder, LowReceived, LowRouting};
use ep_core::reference::{self, Returned, World};
use ep_core::{Error, LowLatency, Rank};

use super::scenario::{Scenario, Turn};
use super::turns;
use crate::arrival::{Arrival, travelling};
use crate::backend::{Backend, Setup};
use crate::verify::{Compared, Mismatch, Observed, Place, bytes_of, dispatched};
use crate::workload::Batch;

/// Copies what a dispatch gave to the host, without what lies behind the rows that came.
///
/// # Errors
/// Those of reading the endpoint's memory; [`Error::Invalid`] where what lies behind them is not zeros, or names an expert.
fn observed<E: LowLatency>(ep: &E, got: &LowReceived<E>, told: &LowBySource<E>) -> Result<Observed, Error> {
    let (ranks, topk) = (ep.topology().ranks() as usize, ep.shape().topk() as usize);
    let first_of = ep.values(&told.first_of)?;
    let rows = first_of[ranks] as usize;
    let (mut x, row_bytes) = (ep.bytes(&got.x)?, ep.shape().row_bytes() as usize);
    let (mut topk_idx, mut topk_weights) = (ep.values(&told.topk_idx)?, ep.values(&told.topk_weights)?);
    let spare = x.split_off(rows * row_bytes);
    let (no_expert, no_weight) = (topk_idx.split_off(rows * topk), topk_weights.split_off(rows * topk));
    if spare.iter().any(|&byte| byte != 0) {
        return Err(Error::invalid("recv_x behind the rows that came", "other bytes", "zeros"));
    }
    if no_expert.iter().any(|&expert| expert != -1) || no_weight.iter().any(|&weight| weight != 0.0) {
        return Err(Error::invalid("recv_topk_idx behind the rows that came", "an expert, or a weight", "none"));
    }
    let (mut source_rank, mut source_token) = (ep.values(&told.source_rank)?, ep.values(&got.source_token)?);
    source_rank.truncate(rows);
    source_token.truncate(rows);
    for (rank, ends) in first_of.windows(2).enumerate() {
        let of = source_rank.iter().filter(|&&source| source as usize == rank).count();
        if ends[0] + of as i32 != ends[1] {
            let what = format_args!("first row of rank {}", rank + 1);
            return Err(Error::invalid(what, ends[1], format_args!("{}", ends[0] + of as i32)));
        }
    }
    Ok(Observed {
        recv_x: x,
        source_rank,
        source_token,
        topk_idx,
        topk_weights,
        expert_counts: ep.values(&got.expert_counts)?.into_iter().map(|count| count as u32).collect(),
        ..Observed::default()
    })
}

/// What a rank gives of a batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Given {
    /// Weights, at dispatch.
    pub weights: bool,
    /// Rows as they travel.
    pub coded: bool,
}

impl Given {
    /// By a turn of a scenario, of which not all is about rounds by source.
    pub(super) const fn of(turn: &Turn) -> Self {
        Self { weights: turn.at_experts, coded: turn.ahead }
    }
}

/// Dispatches `batch` by source, lets the reference experts work, combines, and tells what this rank saw.
///
/// # Errors
/// Those of the endpoint.
pub async fn round<E: LowLatency>(ep: &mut E, world: &World, batch: &Batch, given: Given) -> Result<Observed, Error> {
    let bytes = if given.coded { travelling(ep.shape(), &batch.x)? } else { bytes_of(&batch.x) };
    let x = ep.rows(&bytes, batch.tokens)?;
    let topk_weights = if given.weights { Some(ep.array(&batch.topk_weights)?) } else { None };
    let topk_idx = ep.array(&batch.topk_idx)?;
    let routing = LowRouting::new(topk_idx, topk_weights);
    let routing = LowRouting { order: LowOrder::BySource, coded: given.coded, ..routing };
    let got = ep.low_latency_dispatch(&x, &routing).await?;
    let missing = || Error::invalid("rows by source", "nowhere told", "told by a dispatch by source");
    let mut observed = observed(ep, &got, got.by_source.as_ref().ok_or_else(missing)?)?;
    let mut y = bytes_of(&Arrival::observed(world.shape(), &observed).experts(world, ep.rank()));
    // What lies behind them nobody may look at: NaNs.
    let room = ep.topology().ranks() * ep.shape().max_tokens();
    y.resize(room as usize * ep.shape().result_bytes() as usize, 0xff);
    let y = ep.rows(&y, room)?;
    let back = ep.low_latency_combine(&y, &got.handle, None).await?;
    observed.combined_x = ep.bytes(&back.x)?;
    Ok(observed)
}

/// Compares a round with the oracle. `observed` and `batches` are `[ranks]`.
fn compare(world: &World, batches: &[Batch], observed: &[Observed]) -> Result<Compared, Mismatch> {
    let arrivals = Arrival::expected(world, batches);
    let mut compared = dispatched(world, &arrivals, observed)?;
    let y: Vec<_> = (0..).map(Rank).zip(&arrivals).map(|(rank, got)| got.experts(world, rank)).collect();
    let received: Vec<_> = arrivals.into_iter().map(|arrival| arrival.received).collect();
    let returned: Vec<_> = y
        .iter()
        .zip(batches)
        .map(|(y, batch)| Returned { y, topk_weights: None, tokens: batch.tokens as usize, bias: [None; 2] })
        .collect();
    for ((rank, expected), observed) in
        (0..).map(Rank).zip(reference::combine(world, &received, &returned)).zip(observed)
    {
        let values = Place { rank }.rows(world, "combined_x", &observed.combined_x, &expected.x)?;
        compared.values += values;
        compared.rows += values / u64::from(world.shape().hidden());
    }
    Ok(compared)
}

/// Runs the turns of a scenario by source, one after the other, and compares everything with the oracle. Weights are given where a turn's are
/// given at dispatch, and rows as they travel where another operation would be ahead.
///
/// # Errors
/// What the backend or the comparison found.
pub fn check<B: Backend>(scenario: &Scenario, backend: &B, setup: &Setup) -> Result<Compared, String> {
    let given = |at: usize| Given::of(&scenario.turns[at]);
    let plays = turns::plays(scenario, setup, given, |given| given.weights).map_err(|error| error.to_string())?;
    turns::check(backend, (scenario, setup, &plays), round, |world, batches, _, seen| compare(world, batches, seen))
}
