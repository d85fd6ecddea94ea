//! Combine: the rank whose tokens they are sums what came back.

use super::{Call, Said};
use crate::error::Fault;
use crate::layout::{Layout, LowKind, RESULT_HEADER};
use crate::machine::Machine;
use crate::plan::{Plan, first_mention};
use crate::port::{Duty, Port, Work};
use crate::roles::{Accumulator, Attended};
use crate::room::zeroed;
use crate::topology::Rank;

/// What a rank asked for, and how it weighs it.
pub(crate) struct Asked<'a> {
    pub(crate) plan: &'a Plan,
    /// `[tokens, topk]`: experts over all ranks.
    pub(crate) topk_idx: &'a [i64],
    /// `[tokens, topk]`; unused where each rank has weighed its own.
    pub(crate) topk_weights: &'a [f32],
}

impl Asked<'_> {
    /// The results that `rank` owes: their tokens and columns.
    pub(super) fn due(&self, layout: &Layout, kind: LowKind, rank: Rank) -> impl Iterator<Item = (u32, u32)> {
        let topk = layout.shape().topk() as usize;
        let columns = move |token: u32| {
            let choices = &self.topk_idx[token as usize * topk..(token as usize + 1) * topk];
            let is_of = |at: &usize| {
                let expert = u32::try_from(choices[*at]).ok();
                expert.is_some_and(|expert| layout.rank_of_expert(expert) == rank) && first_mention(choices, *at) == *at
            };
            if kind == LowKind::PerChoice { (0..topk).filter(is_of).count() as u32 } else { 1 }
        };
        self.plan.sent_to(rank).iter().flat_map(move |&token| (0..columns(token)).map(move |column| (token, column)))
    }

    /// Rows of results that `rank`, which has `local` experts, owes.
    pub(crate) fn owed(&self, kind: LowKind, local: u32, rank: Rank) -> u32 {
        match kind {
            LowKind::PerRank | LowKind::Dispatch => self.plan.rows()[rank.index()],
            LowKind::PerChoice => {
                let first = (rank.0 * local) as usize;
                self.plan.experts()[first..first + local as usize].iter().sum()
            }
        }
    }
}

/// A reducer at work.
struct Reducer<'a, 'b, M: Machine> {
    call: &'a Call<'b, M>,
    port: Attended<M::Port>,
    /// Whether what other ranks owe travels as units.
    as_units: bool,
    sum: Accumulator,
    row: Vec<u8>,
}

/// Waits for the results of every rank that got tokens of this one, and sums them: `[tokens, hidden]` bf16. Masked ranks
/// add nothing.
pub(crate) async fn reduce_results<M: Machine>(call: &Call<'_, M>, asked: &Asked<'_>) -> Result<Vec<u8>, Fault> {
    let layout = call.layout;
    let (topk, tokens) = (layout.shape().topk() as usize, asked.plan.tokens() as usize);
    let bytes = layout.row().results().payload_bytes() as usize;
    let mut reducer = Reducer {
        call,
        port: call.port(Duty::Reducer),
        as_units: call.results_as_units(asked.plan.tokens()),
        sum: Accumulator::new(layout.shape().hidden(), 0),
        row: vec![0; bytes],
    };
    for &peer in call.peers {
        arrived(call, &mut reducer.port, asked, peer).await?;
    }
    let here = |rank: Rank| !call.mask.contains(rank);
    let mut x = zeroed(tokens * bytes)?;
    for (token, x) in (0u32..).zip(x.chunks_exact_mut(bytes)) {
        reducer.sum.clear();
        let reached = asked.plan.reached(token);
        if call.kind == LowKind::PerRank {
            for &(rank, _) in reached.iter().filter(|(rank, _)| here(*rank)) {
                reducer.add(rank, token, 0, None).await?;
            }
        } else {
            let choices = token as usize * topk..(token as usize + 1) * topk;
            let (choices, weights) = (&asked.topk_idx[choices.clone()], &asked.topk_weights[choices]);
            for (at, (&expert, &weight)) in choices.iter().zip(weights).enumerate() {
                let Ok(expert) = u32::try_from(expert) else { continue };
                let rank = layout.rank_of_expert(expert);
                // Choices that were dropped when they were sent have no rank among the token's.
                if here(rank) && reached.iter().any(|&(reached, _)| reached == rank) {
                    let column = column(call, choices, first_mention(choices, at));
                    reducer.add(rank, token, column, Some(weight)).await?;
                }
            }
        }
        reducer.sum.finish(x);
    }
    call.received(&mut reducer.port).await?;
    Ok(x)
}

/// The number of choice `at`, which names its expert first, among the choices of that expert's rank.
fn column<M: Machine>(call: &Call<'_, M>, choices: &[i64], at: usize) -> u32 {
    let rank = |at: usize| u32::try_from(choices[at]).ok().map(|expert| call.layout.rank_of_expert(expert));
    (0..at).filter(|&before| rank(before) == rank(at) && first_mention(choices, before) == before).count() as u32
}

/// Waits for the arrival of `peer`, if it owes any results.
pub(super) async fn arrived<M: Machine>(
    call: &Call<'_, M>,
    port: &mut Attended<M::Port>,
    asked: &Asked<'_>,
    peer: Rank,
) -> Result<(), Fault> {
    let owed = asked.owed(call.kind, call.layout.local_experts(), peer);
    if owed == 0 {
        return Ok(());
    }
    let Said { rows, .. } = call.arrival(port, peer, call.results_as_units(asked.plan.tokens())).await?;
    if rows != owed {
        let (mine, theirs) = (owed.into(), rows.into());
        return Err(Fault::Mismatch { field: "results of a rank", mine, theirs, peer });
    }
    Ok(())
}

impl<M: Machine> Reducer<'_, '_, M> {
    /// Adds a result of `rank`: times `weight`, or as it is.
    async fn add(&mut self, rank: Rank, token: u32, column: u32, weight: Option<f32>) -> Result<(), Fault> {
        if self.as_units && rank != self.call.me {
            self.call.take_result(&mut self.port, rank, (token, column), &mut self.row).await?;
        } else {
            self.call.await_row(&mut self.port, rank, token).await?;
            let at = self.call.layout.low_result(self.call.op, rank, token, column).offset;
            let header = self.call.result_header(&self.port, at)?;
            self.call.check(&header, rank, Some(token))?;
            self.port.read(at.plus(RESULT_HEADER), &mut self.row)?;
        }
        self.port.charge(Work::Reduce { bytes: self.row.len() as u64 });
        match weight {
            Some(weight) => self.sum.add_scaled(weight, &self.row),
            None => self.sum.take(&mut self.row),
        }
        Ok(())
    }
}
