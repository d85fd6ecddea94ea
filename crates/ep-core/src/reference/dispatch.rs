//! Who receives which rows.

use super::World;
use super::coded::{CodedRows, scales_bytes};
use crate::topology::Rank;

/// What one rank brings to a dispatch.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// `[tokens, hidden]`: rows as bits of bf16.
    pub x: &'a [u16],
    /// Where they go.
    pub routing: Routing<'a>,
}

/// What one rank brings to a dispatch of coded rows.
#[derive(Clone, Copy, Debug)]
pub struct CodedBatch<'a> {
    /// `[tokens, hidden]` codes, `[tokens, scales]` scales.
    pub x: &'a CodedRows,
    /// Where they go.
    pub routing: Routing<'a>,
}

/// Where the tokens of a batch go.
#[derive(Clone, Copy, Debug)]
pub enum Routing<'a> {
    /// The router's choices.
    TopK {
        /// `[tokens, topk]`: expert over all ranks, or -1 for a dropped choice.
        topk_idx: &'a [i64],
        /// `[tokens, topk]`: weights; 1 where absent.
        topk_weights: Option<&'a [f32]>,
    },
    /// Membership computed elsewhere.
    Membership {
        /// `[tokens, ranks]`: not 0 where the token goes to the rank.
        in_rank: &'a [u8],
        /// `[experts]`: tokens of this batch for each expert.
        tokens_per_expert: &'a [u32],
    },
}

/// What one rank must have received: rows ordered by source rank, then by token.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Received {
    /// `[rows, hidden]`: bits of bf16.
    pub x: Vec<u16>,
    /// `[rows]`: rank the row came from.
    pub source_rank: Vec<i32>,
    /// `[rows]`: token in that rank's batch.
    pub source_token: Vec<i32>,
    /// `[rows, topk]`: expert index on this rank, or -1. Empty for membership.
    pub topk_idx: Vec<i64>,
    /// `[rows, topk]`: weights, 0 where `topk_idx` is -1. Empty for membership.
    pub topk_weights: Vec<f32>,
    /// `[local experts]`: choices received for each local expert, not aligned.
    pub expert_counts: Vec<u32>,
}

impl Received {
    /// Rows received.
    pub fn rows(&self) -> usize {
        self.source_token.len()
    }
}

/// What one rank must have received of coded rows.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct CodedReceived {
    /// `[rows, hidden]` codes, `[rows, scales]` scales: the bytes that were sent.
    pub x: CodedRows,
    /// Everything else about the rows; its own `x` is empty. It is what [`combine`](super::combine) takes.
    pub rows: Received,
}

/// What every rank must receive: `[ranks]`, empty for masked ranks.
///
/// # Panics
/// When there is not one batch for each rank, or a slice of a batch has another length than its shape says: the oracle
/// is asked about input that was checked before.
pub fn dispatch(world: &World, batches: &[Batch<'_>]) -> Vec<Received> {
    let hidden = world.shape.hidden() as usize;
    let outlines: Vec<_> =
        batches.iter().map(|batch| Outline { tokens: whole_rows(batch.x, hidden), routing: batch.routing }).collect();
    let receive = |rank| {
        let mut x = Vec::new();
        let got = receive(world, &outlines, rank, |source, token| x.extend(row(batches[source].x, hidden, token)));
        Received { x, ..got }
    };
    world.topology.all().map(receive).collect()
}

/// What every rank must receive of coded rows, which arrive as the bytes that were sent: `[ranks]`, empty for masked ranks.
///
/// # Panics
/// As [`dispatch`], and when the shape's rows have no codes.
pub fn dispatch_coded(world: &World, batches: &[CodedBatch<'_>]) -> Vec<CodedReceived> {
    let hidden = world.shape.hidden() as usize;
    let scales = scales_bytes(world);
    let tokens = |x: &CodedRows| {
        let tokens = whole_rows(&x.codes, hidden);
        assert_eq!(tokens, whole_rows(&x.scales, scales), "each row has codes and scales");
        tokens
    };
    let outlines: Vec<_> =
        batches.iter().map(|batch| Outline { tokens: tokens(batch.x), routing: batch.routing }).collect();
    let receive = |rank| {
        let mut x = CodedRows::default();
        let rows = receive(world, &outlines, rank, |source, token| {
            x.codes.extend(row(&batches[source].x.codes, hidden, token));
            x.scales.extend(row(&batches[source].x.scales, scales, token));
        });
        CodedReceived { x, rows }
    };
    world.topology.all().map(receive).collect()
}

/// A batch without its rows.
struct Outline<'a> {
    tokens: usize,
    routing: Routing<'a>,
}

fn whole_rows<T>(x: &[T], row: usize) -> usize {
    assert!(x.len().is_multiple_of(row), "rows are [tokens, {row}]");
    x.len() / row
}

fn row<T>(x: &[T], row: usize, token: usize) -> &[T] {
    &x[token * row..(token + 1) * row]
}

/// What `rank` receives, but for the rows themselves: `keep` is told the source and token of each, in order.
fn receive(world: &World, batches: &[Outline<'_>], rank: Rank, mut keep: impl FnMut(usize, usize)) -> Received {
    assert_eq!(batches.len(), world.topology.ranks() as usize, "one batch for each rank");
    if !world.takes_part(rank) {
        return Received::default();
    }
    let mut received = Received { expert_counts: vec![0; world.local_experts as usize], ..Received::default() };
    for (source, batch) in world.topology.all().zip(batches) {
        if !world.takes_part(source) {
            continue;
        }
        if let Routing::Membership { tokens_per_expert, .. } = batch.routing {
            count_membership(world, tokens_per_expert, rank, &mut received.expert_counts);
        }
        for token in 0..batch.tokens {
            let goes = match batch.routing {
                Routing::TopK { topk_idx, topk_weights } => {
                    take_choices(world, (topk_idx, topk_weights), token, rank, &mut received)
                }
                Routing::Membership { in_rank, .. } => in_rank[token * batches.len() + rank.index()] != 0,
            };
            if goes {
                keep(source.index(), token);
                received.source_rank.push(source.0 as i32);
                received.source_token.push(token as i32);
            }
        }
    }
    received
}

/// Appends the choices of a token as `rank` sees them, if any of them lives there.
fn take_choices(
    world: &World,
    (topk_idx, topk_weights): (&[i64], Option<&[f32]>),
    token: usize,
    rank: Rank,
    received: &mut Received,
) -> bool {
    let topk = world.shape.topk() as usize;
    let choices = token * topk..(token + 1) * topk;
    if !topk_idx[choices.clone()].iter().any(|&expert| world.local_expert(rank, expert).is_some()) {
        return false;
    }
    for choice in choices {
        match world.local_expert(rank, topk_idx[choice]) {
            Some(local) => {
                received.topk_idx.push(local);
                received.topk_weights.push(topk_weights.map_or(1.0, |weights| weights[choice]));
                received.expert_counts[local as usize] += 1;
            }
            None => {
                received.topk_idx.push(-1);
                received.topk_weights.push(0.0);
            }
        }
    }
    true
}

fn count_membership(world: &World, tokens_per_expert: &[u32], rank: Rank, counts: &mut [u32]) {
    let first = (rank.0 * world.local_experts) as usize;
    for (count, tokens) in counts.iter_mut().zip(&tokens_per_expert[first..]) {
        *count += tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::Scaling;
    use crate::shape::{Element, Shape};
    use crate::topology::{RankSet, Topology};

    /// Two ranks with two experts each, top-2, hidden 1.
    fn world(mask: &[u32]) -> World {
        let shape = Shape::builder().experts(4).topk(2).hidden(1).max_tokens(8).build().unwrap();
        let mask = mask.iter().map(|&rank| Rank(rank)).collect::<RankSet>();
        World::new(shape, Topology::new(1, 2).unwrap(), mask).unwrap()
    }

    const RANK0: Batch<'static> = Batch {
        x: &[10, 11, 12],
        routing: Routing::TopK {
            topk_idx: &[0, 1, 3, 0, -1, -1],
            topk_weights: Some(&[0.25, 0.75, 0.5, 0.125, 9.0, 9.0]),
        },
    };
    const RANK1: Batch<'static> =
        Batch { x: &[20, 21], routing: Routing::TopK { topk_idx: &[-1, 2, 1, 3], topk_weights: None } };

    #[test]
    fn rows_arrive_once_a_rank_in_order_of_source_and_token() {
        let got = dispatch(&world(&[]), &[RANK0, RANK1]);
        assert_eq!(got[0].x, [10, 11, 21]);
        assert_eq!((&got[0].source_rank[..], &got[0].source_token[..]), (&[0, 0, 1][..], &[0, 1, 1][..]));
        assert_eq!(got[1].x, [11, 20, 21]);
        assert_eq!((&got[1].source_rank[..], &got[1].source_token[..]), (&[0, 1, 1][..], &[1, 0, 1][..]));
    }

    #[test]
    fn choices_are_local_and_strangers_weigh_nothing() {
        let got = dispatch(&world(&[]), &[RANK0, RANK1]);
        assert_eq!(got[0].topk_idx, [0, 1, -1, 0, 1, -1]);
        assert_eq!(got[0].topk_weights, [0.25, 0.75, 0.0, 0.125, 1.0, 0.0]);
        assert_eq!(got[1].topk_idx, [1, -1, -1, 0, -1, 1]);
        assert_eq!(got[1].topk_weights, [0.5, 0.0, 0.0, 1.0, 0.0, 1.0]);
        assert_eq!((&got[0].expert_counts[..], &got[1].expert_counts[..]), (&[2, 2][..], &[1, 2][..]));
    }

    #[test]
    fn masked_ranks_neither_send_nor_receive() {
        let got = dispatch(&world(&[1]), &[RANK0, RANK1]);
        assert_eq!((&got[0].x[..], &got[0].source_rank[..]), (&[10, 11][..], &[0, 0][..]));
        assert_eq!(got[1], Received::default());
    }

    #[test]
    fn coded_rows_go_where_bf16_rows_would_with_their_scales_beside_them() {
        let shape = Shape::builder().experts(4).topk(2).hidden(129).max_tokens(8).element(Element::Fp8(Scaling::Ue8m0));
        let world = World::new(shape.build().unwrap(), Topology::new(1, 2).unwrap(), RankSet::new()).unwrap();
        let rows = |first: u8, rows: u8| CodedRows {
            codes: (first..first + rows).flat_map(|row| [row; 129]).collect(),
            scales: (first..first + rows).flat_map(|row| [row, row + 100]).collect(),
        };
        let (zero, one) = (rows(10, 3), rows(20, 2));
        let batches = [(&zero, RANK0), (&one, RANK1)].map(|(x, like)| CodedBatch { x, routing: like.routing });
        let got = dispatch_coded(&world, &batches);
        for (got, like) in got.iter().zip(dispatch(&self::world(&[]), &[RANK0, RANK1])) {
            assert_eq!(got.x.codes, like.x.iter().flat_map(|&row| [row as u8; 129]).collect::<Vec<_>>());
            assert_eq!(got.x.scales, like.x.iter().flat_map(|&row| [row as u8, row as u8 + 100]).collect::<Vec<_>>());
            assert_eq!(got.rows, Received { x: Vec::new(), ..like });
        }
    }

    #[test]
    fn membership_carries_rows_and_counts_but_no_choices() {
        let member =
            |x, in_rank, counts| Batch { x, routing: Routing::Membership { in_rank, tokens_per_expert: counts } };
        let got = dispatch(
            &world(&[]),
            &[member(&[5, 6], &[0, 1, 1, 1], &[1, 0, 2, 0]), member(&[7], &[1, 0], &[0, 1, 0, 0])],
        );
        assert_eq!((&got[0].x[..], &got[1].x[..]), (&[6, 7][..], &[5, 6][..]));
        assert_eq!((&got[0].expert_counts[..], &got[1].expert_counts[..]), (&[1, 1][..], &[2, 0][..]));
        assert!(got.iter().all(|rank| rank.topk_idx.is_empty() && rank.topk_weights.is_empty()));
    }
}
