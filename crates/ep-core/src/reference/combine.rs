//! What comes back.

use super::{Received, World, round, widen};
use crate::topology::{Node, Rank};

/// What one rank brings to a combine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Returned<'a> {
    /// `[received rows, hidden]`: the experts' results as bits of bf16.
    pub y: &'a [u16],
    /// `[received rows, topk]`: weights that travel back, on every rank or on none.
    pub topk_weights: Option<&'a [f32]>,
    /// Tokens of this rank's own batch.
    pub tokens: usize,
    /// Up to two `[tokens, hidden]` rows, bits of bf16, to start the sums of the own tokens from.
    pub bias: [Option<&'a [u16]>; 2],
}

/// What one rank must get back.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Combined {
    /// `[tokens, hidden]`: bits of bf16.
    pub x: Vec<u16>,
    /// `[tokens, topk]`: sums of the returned weights. Empty when none were returned.
    pub topk_weights: Vec<f32>,
}

/// What every rank must get back from a combine along `received`: `[ranks]`, empty for masked ranks.
///
/// # Panics
/// When there is not one entry for each rank, or a slice has another length than its shape says.
pub fn combine(world: &World, received: &[Received], returned: &[Returned<'_>]) -> Vec<Combined> {
    let ranks = world.topology.ranks() as usize;
    assert_eq!((received.len(), returned.len()), (ranks, ranks), "one entry for each rank");
    let back = rows_of_tokens(received, returned);
    let sum = |rank: Rank| match world.takes_part(rank) {
        true => sum_up(world, returned, &returned[rank.index()], &back[rank.index()]),
        false => Combined::default(),
    };
    world.topology.all().map(sum).collect()
}

/// Rows of one token: the ranks that got it, ascending, and which of their rows it is.
type Rows = Vec<(Rank, usize)>;

/// `[ranks][tokens]`: where every token of every rank went.
fn rows_of_tokens(received: &[Received], returned: &[Returned<'_>]) -> Vec<Vec<Rows>> {
    let mut back: Vec<Vec<Rows>> = returned.iter().map(|own| vec![Rows::new(); own.tokens]).collect();
    for (holder, got) in (0..).map(Rank).zip(received) {
        for (row, (&source, &token)) in got.source_rank.iter().zip(&got.source_token).enumerate() {
            back[source as usize][token as usize].push((holder, row));
        }
    }
    back
}

fn sum_up(world: &World, returned: &[Returned<'_>], own: &Returned<'_>, back: &[Rows]) -> Combined {
    let hidden = world.shape.hidden() as usize;
    let topk = world.shape.topk() as usize;
    let mut combined = Combined::default();
    for (token, rows) in back.iter().enumerate() {
        let mut acc = bias_of(own, token, hidden);
        if world.topology.nodes() == 1 {
            add_rows(&mut acc, returned, rows.iter());
        } else {
            add_partials(world, &mut acc, returned, rows);
        }
        combined.x.extend(acc.into_iter().map(round));
        if own.topk_weights.is_some() {
            let mut sums = vec![0f32; topk];
            for &(holder, row) in rows {
                let weights = returned[holder.index()].topk_weights.expect("weights return on every rank or on none");
                for (sum, weight) in sums.iter_mut().zip(&weights[row * topk..(row + 1) * topk]) {
                    *sum += weight;
                }
            }
            combined.topk_weights.extend(sums);
        }
    }
    combined
}

fn bias_of(own: &Returned<'_>, token: usize, hidden: usize) -> Vec<f32> {
    let row = |bias: &[u16]| bias[token * hidden..(token + 1) * hidden].iter().copied().map(widen).collect::<Vec<_>>();
    match own.bias {
        [None, None] => vec![0.0; hidden],
        [Some(bias), None] | [None, Some(bias)] => row(bias),
        [Some(first), Some(second)] => row(first).into_iter().zip(row(second)).map(|(a, b)| a + b).collect(),
    }
}

fn add_rows<'a>(acc: &mut [f32], returned: &[Returned<'_>], rows: impl Iterator<Item = &'a (Rank, usize)>) {
    for &(holder, row) in rows {
        let y = &returned[holder.index()].y[row * acc.len()..(row + 1) * acc.len()];
        for (acc, &y) in acc.iter_mut().zip(y) {
            *acc += widen(y);
        }
    }
}

/// Adds what each node that got the token sends back: one row, already rounded.
fn add_partials(world: &World, acc: &mut [f32], returned: &[Returned<'_>], rows: &[(Rank, usize)]) {
    for node in (0..world.topology.nodes()).map(Node) {
        let of_node = || rows.iter().filter(|(holder, _)| world.topology.node_of(*holder) == node);
        if of_node().next().is_none() {
            continue;
        }
        let mut partial = vec![0f32; acc.len()];
        add_rows(&mut partial, returned, of_node());
        for (acc, partial) in acc.iter_mut().zip(partial) {
            *acc += widen(round(partial));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;
    use crate::topology::{RankSet, Topology};

    fn bits(values: &[f32]) -> Vec<u16> {
        values.iter().copied().map(round).collect()
    }

    /// `ranks` ranks, each of which got the one token of rank 0 and returns one value for it.
    fn sum(nodes: u32, values: &[f32], bias: [Option<&[u16]>; 2]) -> f32 {
        let ranks = values.len() as u32;
        let shape = Shape::builder().experts(ranks).topk(1).hidden(1).max_tokens(1).build().unwrap();
        let topology = Topology::new(nodes, ranks / nodes).unwrap();
        let world = World::new(shape, topology, RankSet::new()).unwrap();
        let got = Received { source_rank: vec![0], source_token: vec![0], x: vec![0], ..Received::default() };
        let y: Vec<_> = values.iter().map(|&value| bits(&[value])).collect();
        let returned: Vec<_> = (0..)
            .zip(&y)
            .map(|(rank, y)| Returned {
                y,
                tokens: usize::from(rank == 0),
                topk_weights: None,
                bias: if rank == 0 { bias } else { [None; 2] },
            })
            .collect();
        widen(combine(&world, &vec![got; values.len()], &returned)[0].x[0])
    }

    #[test]
    fn one_node_sums_in_f32_and_rounds_once() {
        // 1 + 1/256 + 1/256 fits bf16; rounding after each step would lose both.
        assert_eq!(sum(1, &[1.0, 1.0 / 256.0, 1.0 / 256.0, 0.0], [None; 2]), 1.0 + 1.0 / 128.0);
    }

    #[test]
    fn ranks_are_added_in_ascending_order() {
        let big = 2f32.powi(60);
        assert_eq!(sum(1, &[big, -big, 1.0], [None; 2]), 1.0);
        assert_eq!(sum(1, &[1.0, big, -big], [None; 2]), 0.0);
    }

    #[test]
    fn several_nodes_round_their_partials() {
        let tie = 1.0 / 256.0;
        assert_eq!(sum(2, &[1.0, tie, tie, 0.0], [None; 2]), 1.0, "1 + tie rounds to 1 on its own node already");
        assert_eq!(sum(2, &[1.0, 0.0, tie, tie], [None; 2]), 1.0 + 1.0 / 128.0);
    }

    #[test]
    fn sums_start_from_the_bias() {
        let (one, two) = (bits(&[1.0]), bits(&[2.0]));
        assert_eq!(sum(1, &[4.0], [Some(&one), Some(&two)]), 7.0);
        assert_eq!(sum(1, &[4.0], [Some(&one), None]), 5.0);
        assert_eq!(sum(1, &[4.0], [None, Some(&two)]), 6.0);
        let minus_zero = bits(&[-0.0]);
        assert!(sum(1, &[-0.0], [Some(&minus_zero), None]).is_sign_negative());
        assert!(sum(1, &[-0.0], [None; 2]).is_sign_positive());
    }

    #[test]
    fn tokens_that_went_nowhere_come_back_as_their_bias() {
        let shape = Shape::builder().experts(1).topk(1).hidden(2).max_tokens(1).build().unwrap();
        let world = World::new(shape, Topology::new(1, 1).unwrap(), RankSet::new()).unwrap();
        let bias = bits(&[3.0, -5.0]);
        let own = Returned { tokens: 1, topk_weights: Some(&[]), bias: [None, Some(&bias)], ..Returned::default() };
        let got = combine(&world, &[Received::default()], &[own]);
        assert_eq!(got, [Combined { x: bias.clone(), topk_weights: vec![0.0] }]);
    }

    #[test]
    fn returned_weights_are_summed_per_choice() {
        let shape = Shape::builder().experts(2).topk(2).hidden(1).max_tokens(1).build().unwrap();
        let world = World::new(shape, Topology::new(1, 2).unwrap(), RankSet::new()).unwrap();
        let got = Received { source_rank: vec![1], source_token: vec![0], x: vec![0], ..Received::default() };
        let back = |tokens, weights| Returned { y: &[0], topk_weights: Some(weights), tokens, bias: [None; 2] };
        let combined = combine(&world, &[got.clone(), got], &[back(0, &[0.5, 0.0]), back(1, &[0.25, 2.0])]);
        assert!(combined[0].topk_weights.is_empty());
        assert_eq!(combined[1].topk_weights, [0.75, 2.0]);
    }
}
