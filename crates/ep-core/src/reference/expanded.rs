//! Rows by expert: each received row once for each of its choices on the rank, and the way back.

use super::experts::expert_factor;
use super::{Received, World, round, widen};
use crate::topology::Rank;

/// A row by expert: which choice of which received row it is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pick {
    /// The received row.
    pub row: usize,
    /// The choice of it, 0 to topk - 1.
    pub choice: usize,
}

/// How one rank's received rows must stand by expert.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Expanded {
    /// `[rows by expert]`: what each is for; none for padding, whose bytes are zeros.
    pub picks: Vec<Option<Pick>>,
    /// `[local experts + 1]`: the first row of each expert; last, all rows.
    pub first: Vec<u32>,
    /// `[rows, topk]`: the row by expert of each choice, or -1.
    pub slots: Vec<i32>,
    /// `[ranks, local experts]`: the first row by expert of each source at each expert.
    pub offsets: Vec<i32>,
}

/// How the rows that a rank received must stand by expert, with the first of each expert at a multiple of `alignment`.
///
/// Expert by expert: all received rows in their order, of each all choices in theirs, those of the expert taken.
///
/// # Panics
/// When a slice of `got` has another length than its shape says.
pub fn expand(world: &World, got: &Received, alignment: usize) -> Expanded {
    let topk = world.shape.topk() as usize;
    let (experts, ranks) = (world.local_experts as usize, world.topology.ranks() as usize);
    let mut expanded = Expanded {
        slots: vec![-1; got.topk_idx.len()],
        offsets: vec![0; ranks * experts],
        first: vec![0],
        picks: Vec::new(),
    };
    for expert in 0..experts {
        for source in 0..ranks {
            expanded.offsets[source * experts + expert] = expanded.picks.len() as i32;
            for row in (0..got.rows()).filter(|&row| got.source_rank[row] as usize == source) {
                for choice in (0..topk).filter(|choice| got.topk_idx[row * topk + choice] == expert as i64) {
                    expanded.slots[row * topk + choice] = expanded.picks.len() as i32;
                    expanded.picks.push(Some(Pick { row, choice }));
                }
            }
        }
        while !expanded.picks.len().is_multiple_of(alignment) {
            expanded.picks.push(None);
        }
        expanded.first.push(expanded.picks.len() as u32);
    }
    expanded
}

/// Rows by expert that a rank makes room for where it does not know how many of at most `worst_rows` rows come, each with at most as many choices
/// as there are experts at the rank.
pub fn room_of_expanded(world: &World, worst_rows: usize, alignment: usize) -> usize {
    let (topk, experts) = (world.shape.topk() as usize, world.local_experts as usize);
    (worst_rows * topk.min(experts) + (alignment - 1) * experts).div_ceil(alignment) * alignment
}

/// What the results of some choices are, times the row: whatever their weights and experts. Of every fourth token the second and the third choice
/// cancel each other, after they have swallowed what was added before them: so the order shows in which choices are added.
pub fn choice_scale(token: i32, choice: usize) -> Option<f32> {
    const LARGE: f32 = (1u32 << 28) as f32;
    match choice {
        1 if token % 4 == 0 => Some(LARGE),
        2 if token % 4 == 0 => Some(-LARGE),
        _ => None,
    }
}

/// What the experts of `rank` make of their rows: `[rows by expert, hidden]`, bits of bf16.
///
/// `(weight * factor) * f32(x)`, or [`choice_scale`] times that; each product rounded to f32, rounded to bf16 at the end. Padding becomes NaN, which
/// nobody may look at. `x` is `[rows, hidden]`: the elements of the received rows.
///
/// # Panics
/// As [`expand`].
pub fn apply_experts_expanded(world: &World, rank: Rank, got: &Received, x: &[f32], expanded: &Expanded) -> Vec<u16> {
    let (hidden, topk) = (world.shape.hidden() as usize, world.shape.topk() as usize);
    let mut y = Vec::with_capacity(expanded.picks.len() * hidden);
    for pick in &expanded.picks {
        let Some(Pick { row, choice }) = *pick else {
            y.extend(vec![0x7fc0; hidden]);
            continue;
        };
        let local = got.topk_idx[row * topk + choice] as u32;
        let weighted = got.topk_weights[row * topk + choice] * expert_factor(rank.0 * world.local_experts + local);
        let scale = choice_scale(got.source_token[row], choice).unwrap_or(weighted);
        y.extend(x[row * hidden..(row + 1) * hidden].iter().map(|x| round(scale * x)));
    }
    y
}

/// The results of the received rows, `[rows, hidden]`, of those of the rows by expert, `y [rows by expert, hidden]`, bits of bf16:
/// `acc = 0; acc += f32(y), choices ascending; bf16(acc)`. What [`combine`](super::combine) brings back.
///
/// # Panics
/// As [`expand`].
pub fn reduce_expanded(world: &World, expanded: &Expanded, y: &[u16]) -> Vec<u16> {
    reduced(world, expanded, y, round)
}

/// What rounding these sums leaves, rounded in its turn.
///
/// # Panics
/// As [`expand`].
pub fn remainders_of_expanded(world: &World, expanded: &Expanded, y: &[u16]) -> Vec<u16> {
    reduced(world, expanded, y, |sum| round(sum - widen(round(sum))))
}

fn reduced(world: &World, expanded: &Expanded, y: &[u16], finish: impl Fn(f32) -> u16) -> Vec<u16> {
    let (hidden, topk) = (world.shape.hidden() as usize, world.shape.topk() as usize);
    let mut rows = Vec::with_capacity(expanded.slots.len() / topk * hidden);
    for slots in expanded.slots.chunks_exact(topk) {
        for element in 0..hidden {
            let mut acc = 0f32;
            for &slot in slots.iter().filter(|&&slot| slot >= 0) {
                acc += widen(y[slot as usize * hidden + element]);
            }
            rows.push(finish(acc));
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shape;
    use crate::topology::{RankSet, Topology};

    fn world() -> World {
        let shape = Shape::builder().experts(4).topk(3).hidden(1).max_tokens(4).build().unwrap();
        World::new(shape, Topology::new(1, 2).unwrap(), RankSet::new()).unwrap()
    }

    /// Two rows of rank 0 and one of rank 1; expert 1 has a choice of each.
    fn got() -> Received {
        Received {
            source_rank: vec![0, 0, 1],
            source_token: vec![2, 5, 8],
            topk_idx: vec![1, -1, 0, -1, 1, -1, -1, -1, 1],
            topk_weights: vec![0.5, 0.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0, 4.0],
            ..Received::default()
        }
    }

    #[test]
    fn rows_stand_by_expert_source_and_token_with_zeros_up_to_the_next() {
        let pick = |row, choice| Some(Pick { row, choice });
        let expanded = expand(&world(), &got(), 2);
        assert_eq!(expanded.picks, [pick(0, 2), None, pick(0, 0), pick(1, 1), pick(2, 2), None]);
        assert_eq!(expanded.first, [0, 2, 6]);
        assert_eq!(expanded.slots, [2, -1, 0, -1, 3, -1, -1, -1, 4]);
        assert_eq!(expanded.offsets, [0, 2, 1, 4], "rank 1 has no row at expert 0");
    }

    #[test]
    fn experts_weigh_choices_by_themselves() {
        let (world, got) = (world(), got());
        let y = apply_experts_expanded(&world, Rank(1), &got, &[1.0, 1.0, 1.0], &expand(&world, &got, 1));
        let values: Vec<f32> = y.into_iter().map(widen).collect();
        // Of rank 1, expert 0 is the third of all, with a factor of 1.25; expert 1 has one of 1.375.
        // The third choice of token 8 is one of those that cancel.
        assert_eq!(values, [2.5, 0.6875, 1.375, -268435456.0]);
    }

    #[test]
    fn choices_are_added_ascending_and_rounded_once() {
        let (world, got) = (world(), got());
        let expanded = expand(&world, &got, 1);
        let y = [1.0, 1.0 / 256.0, 7.0, -0.0].map(round);
        let rows = reduce_expanded(&world, &expanded, &y);
        assert_eq!(rows, [round(1.0 + 1.0 / 256.0), round(7.0), 0], "-0 added to 0 is 0");
        let all = Received { topk_idx: vec![0, 1, 0], source_rank: vec![0], source_token: vec![0], ..got };
        let expanded = expand(&world, &all, 1);
        let big = 2f32.powi(60);
        assert_eq!(expanded.slots, [0, 2, 1]);
        let sum = |y: [f32; 3]| reduce_expanded(&world, &expanded, &y.map(round))[0];
        assert_eq!((sum([big, 1.0, -big]), sum([1.0, big, -big])), (round(1.0), 0));
    }
}
