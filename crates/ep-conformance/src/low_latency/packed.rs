//! Rounds of low latency whose rows are packed. What they bring is what a dispatch by expert of throughput mode brings on one node, counts on the
//! device, and their oracle that one's.

use ep_core::engine::low_latency::{LowOrder, LowReceived, LowRouting};
use ep_core::reference::{self, Routing, Weighing, World};
use ep_core::{Error, LowLatency, Rank};

use super::by_source::Given;
use super::scenario::Scenario;
use super::turns;
use crate::arrival::{Arrival, travelling};
use crate::backend::{Backend, Setup};
use crate::by_expert::{self, Expected, How, Seen, dispatched};
use crate::verify::{Compared, Mismatch, Observed, Place, bytes_of};
use crate::workload::Batch;

/// What a round asks for.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// The first row of each expert stands at a multiple of it.
    pub alignment: u32,
    /// Padding is to be zeros.
    pub zero_spare: bool,
    /// Results come back choice by choice, with the batch's weights.
    pub by_choice: bool,
    /// What a rank gives of its batch.
    pub given: Given,
}

impl Asked {
    /// The same of throughput mode.
    fn how(self, setup: &Setup) -> How {
        let worst_rows = setup.topology.ranks() * setup.shape.max_tokens();
        How { alignment: self.alignment, worst_rows, zero_spare: self.zero_spare, ..How::default() }
    }

    const fn order(self) -> LowOrder {
        LowOrder::Packed { alignment: self.alignment, zero_spare: self.zero_spare }
    }
}

/// Copies what a dispatch gave to the host. What is told of received rows beyond those that came is checked here, or undefined.
fn seen<E: LowLatency>(ep: &E, got: &LowReceived<E>) -> Result<Seen, Error> {
    let missing = || Error::invalid("packed rows", "nowhere told", "told by a dispatch whose rows are packed");
    let (told, packed) = got.by_source.as_ref().zip(got.packed.as_ref()).ok_or_else(missing)?;
    let (ranks, experts) = (ep.topology().ranks() as usize, ep.values(&got.expert_counts)?.len());
    let unsigned = |numbers: Vec<i32>| numbers.into_iter().map(|number| number as u32).collect::<Vec<_>>();
    let (first, counts) = (unsigned(ep.values(&packed.first)?), unsigned(ep.values(&got.expert_counts)?));
    let rows = ep.values(&told.first_of)?[ranks] as usize;
    let only = |mut numbers: Vec<i32>| {
        let all = numbers.len();
        numbers.truncate(rows);
        numbers.resize(all, -1);
        numbers
    };
    let segments = ep.values(&got.segments)?;
    let offset = |at: usize| {
        let (source, expert) = (at / experts, at % experts);
        (first[expert] + (segments[expert * ranks + source] >> 32) as u32) as i32
    };
    let (slots, topk_weights) = (ep.values(&packed.slots)?, ep.values(&told.topk_weights)?);
    let weights = ep.values(&packed.weights)?;
    let mut expected = vec![0.0f32; weights.len()];
    for (slot, &weight) in slots.iter().zip(&topk_weights) {
        if let Ok(slot) = usize::try_from(*slot) {
            *expected.get_mut(slot).ok_or(Error::invalid("slot of a choice", slot, "one of the room"))? = weight;
        }
    }
    if let Some(slot) = (0..weights.len()).find(|&slot| weights[slot].to_bits() != expected[slot].to_bits()) {
        let what = format_args!("weight of slot {slot}");
        return Err(Error::invalid(what, weights[slot], format_args!("{}", expected[slot])));
    }
    Ok(Seen {
        observed: Observed {
            recv_x: ep.bytes(&got.x)?,
            source_rank: only(ep.values(&told.source_rank)?),
            source_token: only(ep.values(&got.source_token)?),
            topk_idx: ep.values(&told.topk_idx)?,
            topk_weights,
            expert_counts: first.windows(2).map(|bounds| bounds[1] - bounds[0]).collect(),
            ..Observed::default()
        },
        rows: rows as u32,
        stays: true,
        offsets: (0..ranks * experts).map(offset).collect(),
        first,
        counts,
        slots,
        weights: None,
    })
}

/// Dispatches `batch`, lets the reference experts work, combines, and tells what this rank saw.
///
/// # Errors
/// Those of the endpoint.
pub async fn round<E: LowLatency>(ep: &mut E, world: &World, batch: &Batch, asked: Asked) -> Result<Seen, Error> {
    let bytes = if asked.given.coded { travelling(ep.shape(), &batch.x)? } else { bytes_of(&batch.x) };
    let (x, weights) = (ep.rows(&bytes, batch.tokens)?, ep.array(&batch.topk_weights)?);
    let routing = LowRouting::new(ep.array(&batch.topk_idx)?, asked.given.weights.then(|| weights.clone()));
    let routing = LowRouting { order: asked.order(), coded: asked.given.coded, ..routing };
    let got = ep.low_latency_dispatch(&x, &routing).await?;
    let mut seen = seen(ep, &got)?;
    let y = bytes_of(&seen.experts(world, ep.rank()));
    let rows = y.len() / ep.shape().result_bytes() as usize;
    let y = ep.rows(&y, rows as u32)?;
    let back = ep.low_latency_combine(&y, &got.handle, asked.by_choice.then_some(&weights)).await?;
    seen.observed.combined_x = ep.bytes(&back.x)?;
    Ok(seen)
}

/// Compares a round with the oracle. `seen` and `batches` are `[ranks]`.
fn compare(world: &World, batches: &[Batch], asked: Asked, how: &How, seen: &[Seen]) -> Result<Compared, Mismatch> {
    if !asked.by_choice {
        return by_expert::compare(world, (batches, batches), &vec![how.clone(); seen.len()], false, seen);
    }
    let arrivals = (0..).map(Rank).zip(Arrival::expected(world, batches));
    let expected: Vec<_> = arrivals.map(|(rank, arrival)| Expected::new(world, rank, arrival, how, false)).collect();
    let mut compared = Compared::default();
    for ((rank, expected), seen) in (0..).map(Rank).zip(&expected).zip(seen) {
        compared += dispatched(world, rank, expected, false, seen)?;
    }
    let hidden = world.shape().hidden() as usize;
    let routed: Vec<_> = batches
        .iter()
        .map(|Batch { x, topk_idx, topk_weights, .. }| reference::Batch {
            x,
            routing: Routing::TopK { topk_idx, topk_weights: Some(topk_weights) },
        })
        .collect();
    let back = reference::low_latency_combine(world, &routed, Weighing::AtSource, |rank, expert, row| {
        let expected = &expected[rank.index()];
        let slot = expected.expanded.first[expert] as usize + row;
        &expected.y[slot * hidden..(slot + 1) * hidden]
    });
    for ((rank, expected), seen) in (0..).map(Rank).zip(back).zip(seen) {
        compared.values += Place { rank }.rows(world, "combined_x", &seen.observed.combined_x, &expected)?;
    }
    Ok(compared)
}

/// Runs the turns of a scenario packed, one after the other, and compares everything with the oracle. Weights are given where a turn's are given at
/// dispatch, rows as they travel where another operation would be ahead; results come back choice by choice where a turn's would be combined
/// twice. Every second turn asks for zeros.
///
/// # Errors
/// What the backend or the comparison found.
pub fn check<B: Backend>(scenario: &Scenario, backend: &B, setup: &Setup, alignment: u32) -> Result<Compared, String> {
    let asked = |at: usize| {
        let turn = &scenario.turns[at];
        Asked { alignment, zero_spare: at % 2 == 1, by_choice: turn.twice, given: Given::of(turn) }
    };
    let plays = turns::plays(scenario, setup, asked, |asked| asked.given.weights).map_err(|error| error.to_string())?;
    turns::check(backend, (scenario, setup, &plays), round, |world, batches, asked, seen| {
        compare(world, batches, asked, &asked.how(setup), seen)
    })
}
