//! Low latency: which rows each expert gets, and what comes back.

use super::{Batch, Routing, World, round, widen};
use crate::topology::Rank;

/// The rows that one expert must have received: ordered by source rank, then by token.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ExpertRows {
    /// `[rows]`: rank each row came from.
    pub source_rank: Vec<i32>,
    /// `[rows]`: token in that rank's batch.
    pub source_token: Vec<i32>,
    /// `[rows]`: which of the token's choices this expert is.
    pub choice: Vec<u32>,
}

/// Where the weights of a low-latency layer are applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weighing {
    /// By the token's rank, one row a choice: `acc = fma(weight, y, acc)`, choices ascending, rounded once.
    AtSource,
    /// By each rank of the token, so, over its own experts, rounded; the token's rank adds these, ranks ascending, and
    /// rounds.
    AtExperts,
}

/// What every expert must receive: `[ranks][local experts]`, no rows on masked ranks.
///
/// # Panics
/// When there is not one batch for each rank, or a batch's routing is a membership.
pub fn low_latency_dispatch(world: &World, batches: &[Batch<'_>]) -> Vec<Vec<ExpertRows>> {
    assert_eq!(batches.len(), world.topology.ranks() as usize, "one batch for each rank");
    let mut experts = vec![vec![ExpertRows::default(); world.local_experts as usize]; batches.len()];
    for (source, batch) in world.topology.all().zip(batches) {
        if !world.takes_part(source) {
            continue;
        }
        for (token, chosen) in choices(world, batch).enumerate() {
            for (choice, &(expert, _)) in chosen.iter().enumerate() {
                let Some((rank, local)) = home(world, expert) else { continue };
                let rows = &mut experts[rank.index()][local];
                rows.source_rank.push(source.0 as i32);
                rows.source_token.push(token as i32);
                rows.choice.push(choice as u32);
            }
        }
    }
    experts
}

/// What every rank must get back: `[ranks]`, each `[tokens, hidden]` bits of bf16, empty for masked ranks.
///
/// `y(rank, expert, row)` is the result of a rank's local expert for a row of [`low_latency_dispatch`], `[hidden]` bits of
/// bf16.
///
/// # Panics
/// As [`low_latency_dispatch`], and when a result is not `hidden` long.
pub fn low_latency_combine<'a>(
    world: &World,
    batches: &[Batch<'_>],
    weighing: Weighing,
    y: impl Fn(Rank, usize, usize) -> &'a [u16],
) -> Vec<Vec<u16>> {
    let received = low_latency_dispatch(world, batches);
    let hidden = world.shape.hidden() as usize;
    let sum_of = |source: Rank, token: usize, chosen: &[(i64, f32)]| {
        let mut total = vec![0f32; hidden];
        let mut partials: Vec<(Rank, Vec<f32>)> = Vec::new();
        for (choice, &(expert, weight)) in chosen.iter().enumerate() {
            let Some((rank, local)) = home(world, expert) else { continue };
            let rows = &received[rank.index()][local];
            let wanted = (source.0 as i32, token as i32, choice as u32);
            let row = (0..rows.choice.len())
                .find(|&row| (rows.source_rank[row], rows.source_token[row], rows.choice[row]) == wanted)
                .expect("every kept choice was received");
            let result = y(rank, local, row);
            assert_eq!(result.len(), hidden, "a result has the hidden size");
            let acc = match weighing {
                Weighing::AtSource => &mut total,
                Weighing::AtExperts => match partials.iter().position(|(of, _)| *of == rank) {
                    Some(at) => &mut partials[at].1,
                    None => {
                        partials.push((rank, vec![0f32; hidden]));
                        &mut partials.last_mut().expect("just pushed").1
                    }
                },
            };
            for (acc, &value) in acc.iter_mut().zip(result) {
                *acc = f32::mul_add(weight, widen(value), *acc);
            }
        }
        partials.sort_by_key(|(rank, _)| rank.0);
        for (_, partial) in partials {
            for (total, value) in total.iter_mut().zip(partial) {
                *total += widen(round(value));
            }
        }
        total.into_iter().map(round).collect::<Vec<u16>>()
    };
    let back = |(source, batch): (Rank, &Batch<'_>)| match world.takes_part(source) {
        true => choices(world, batch).enumerate().flat_map(|(token, chosen)| sum_of(source, token, &chosen)).collect(),
        false => Vec::new(),
    };
    world.topology.all().zip(batches).map(back).collect()
}

/// Each token's choices: expert over all ranks and weight.
fn choices<'a>(world: &World, batch: &Batch<'a>) -> impl Iterator<Item = Vec<(i64, f32)>> + 'a {
    let topk = world.shape.topk() as usize;
    let Routing::TopK { topk_idx, topk_weights } = batch.routing else { panic!("low latency routes by choices") };
    let tokens = topk_idx.len() / topk;
    (0..tokens).map(move |token| {
        let weight = |at: usize| topk_weights.map_or(1.0, |weights| weights[at]);
        (token * topk..(token + 1) * topk).map(|at| (topk_idx[at], weight(at))).collect()
    })
}

/// The rank and local index of an expert, if it takes part.
fn home(world: &World, expert: i64) -> Option<(Rank, usize)> {
    let expert = u32::try_from(expert).ok()?;
    let rank = Rank(expert / world.local_experts);
    world.takes_part(rank).then_some((rank, (expert % world.local_experts) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;
    use crate::topology::{RankSet, Topology};

    /// Two ranks with two experts each, top-3, hidden 1.
    fn world() -> World {
        let shape = Shape::builder().experts(4).topk(3).hidden(1).max_tokens(8).build().unwrap();
        World::new(shape, Topology::new(1, 2).unwrap(), RankSet::new()).unwrap()
    }

    const RANK0: Batch<'static> = Batch {
        x: &[10, 11],
        routing: Routing::TopK { topk_idx: &[3, 0, 2, 0, -1, 1], topk_weights: Some(&[0.5, 2.0, 0.25, 1.0, 9.0, 1.0]) },
    };
    const RANK1: Batch<'static> =
        Batch { x: &[20], routing: Routing::TopK { topk_idx: &[0, 2, -1], topk_weights: Some(&[1.0, 1.0, 9.0]) } };

    #[test]
    fn experts_get_a_row_for_each_choice_in_order_of_source_and_token() {
        let got = low_latency_dispatch(&world(), &[RANK0, RANK1]);
        let rows = |source: &[i32], token: &[i32], choice: &[u32]| ExpertRows {
            source_rank: source.to_vec(),
            source_token: token.to_vec(),
            choice: choice.to_vec(),
        };
        assert_eq!(got[0], [rows(&[0, 0, 1], &[0, 1, 0], &[1, 0, 0]), rows(&[0], &[1], &[2])]);
        assert_eq!(got[1], [rows(&[0, 1], &[0, 0], &[2, 1]), rows(&[0], &[0], &[0])]);
    }

    #[test]
    fn results_are_weighed_where_the_form_says() {
        // Expert e returns the same for all rows. Token 0 of rank 0: 3, 0 and 2 with weights 0.5, 2 and 0.25.
        let values: Vec<[u16; 1]> = [1.0, 2.0, 4.0 + 1.0 / 64.0, 8.0].iter().map(|&value| [round(value)]).collect();
        let y = |rank: Rank, local: usize, _: usize| &values[rank.index() * 2 + local][..];
        let sum = |weighing| low_latency_combine(&world(), &[RANK0, RANK1], weighing, y);
        let by_source = sum(Weighing::AtSource);
        assert_eq!(by_source[0], [round(0.5 * 8.0 + 2.0 + 0.25 * widen(values[2][0])), round(3.0)]);
        let by_experts = sum(Weighing::AtExperts);
        let partial = round(0.5 * 8.0 + 0.25 * widen(values[2][0]));
        assert_eq!(by_experts[0], [round(2.0 + widen(partial)), round(3.0)]);
        assert_eq!(by_experts[1], [round(1.0 + widen(values[2][0]))]);
    }

    #[test]
    fn products_are_not_rounded_before_they_are_added() {
        // The product has more bits than f32 keeps, beside a sum that cancels its head.
        let shape = Shape::builder().experts(2).topk(2).hidden(1).max_tokens(1).build().unwrap();
        let world = World::new(shape, Topology::new(1, 1).unwrap(), RankSet::new()).unwrap();
        let weight = 1.0 + f32::EPSILON;
        let batch =
            Batch { x: &[0], routing: Routing::TopK { topk_idx: &[0, 1], topk_weights: Some(&[-1.0, weight]) } };
        let value = [round(1.0 + 1.0 / 128.0)];
        let got = low_latency_combine(&world, &[batch], Weighing::AtSource, |_, _, _| &value);
        let exact = f64::from(weight) * f64::from(widen(value[0])) - f64::from(widen(value[0]));
        assert_eq!(got[0], [round(exact as f32)]);
    }
}
