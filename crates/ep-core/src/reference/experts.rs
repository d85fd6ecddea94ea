//! Experts that are easy to check: each multiplies by a factor of its own, so that a row at the wrong expert shows.

use super::coded::dequantize;
use super::{CodedReceived, Received, World, round, widen};
use crate::topology::Rank;

/// What `expert` (over all ranks) multiplies by: `1 + (expert mod 7) / 8`.
pub fn expert_factor(expert: u32) -> f32 {
    1.0 + (expert % 7) as f32 / 8.0
}

/// The results of the experts of `rank` for the rows it received: `[rows, hidden]`, bits of bf16.
///
/// Per row, over its local experts in topk order: `acc += (weight * factor) * f32(x)` in f32 from 0, each operation
/// rounded by itself (no fused multiply-add), rounded to bf16 at the end.
///
/// # Panics
/// When `got` has no choices or a slice of another length than its shape says.
pub fn apply_experts(world: &World, rank: Rank, got: &Received) -> Vec<u16> {
    let x = got.x.iter().copied().map(widen);
    apply(world, rank, got, x)
}

/// [`apply_experts`] for coded rows: `f32(x)` is `f32(code) * scale`, rounded to f32 and no further.
///
/// # Panics
/// As [`apply_experts`], and when the shape's rows have no codes.
pub fn apply_experts_coded(world: &World, rank: Rank, got: &CodedReceived) -> Vec<u16> {
    apply(world, rank, &got.rows, dequantize(world, &got.x).into_iter())
}

/// Applies the experts of `rank` to the elements `x`, `[rows, hidden]`.
fn apply(world: &World, rank: Rank, got: &Received, mut x: impl ExactSizeIterator<Item = f32>) -> Vec<u16> {
    let hidden = world.shape.hidden() as usize;
    let topk = world.shape.topk() as usize;
    let mut y = Vec::with_capacity(x.len());
    let (mut acc, mut row) = (vec![0f32; hidden], vec![0f32; hidden]);
    for choices in (0..x.len() / hidden).map(|row| row * topk..(row + 1) * topk) {
        row.iter_mut().zip(&mut x).for_each(|(element, x)| *element = x);
        acc.fill(0.0);
        for choice in choices {
            let Ok(local) = u32::try_from(got.topk_idx[choice]) else { continue };
            let scale = got.topk_weights[choice] * expert_factor(rank.0 * world.local_experts + local);
            for (acc, x) in acc.iter_mut().zip(&row) {
                *acc += scale * x;
            }
        }
        y.extend(acc.iter().copied().map(round));
    }
    y
}

#[cfg(test)]
mod tests {
    use super::super::CodedRows;
    use super::*;
    use crate::quant::Scaling;
    use crate::shape::{Element, Shape};
    use crate::topology::{RankSet, Topology};

    #[test]
    fn neighbouring_experts_have_different_factors() {
        assert_eq!((expert_factor(0), expert_factor(6), expert_factor(7)), (1.0, 1.75, 1.0));
    }

    #[test]
    fn a_row_is_the_weighted_sum_of_its_local_experts() {
        let shape = Shape::builder().experts(8).topk(3).hidden(2).max_tokens(1).build().unwrap();
        let world = World::new(shape, Topology::new(1, 2).unwrap(), RankSet::new()).unwrap();
        let got = Received {
            x: vec![round(2.0), round(-4.0)],
            source_rank: vec![0],
            source_token: vec![0],
            topk_idx: vec![1, -1, 3],
            topk_weights: vec![0.5, 0.0, 2.0],
            expert_counts: vec![0, 1, 0, 1],
        };
        // Experts 5 and 7: 0.5 * 1.625 + 2 * 1 = 2.8125.
        assert_eq!(apply_experts(&world, Rank(1), &got), [round(5.625), round(-11.25)]);
    }

    #[test]
    fn experts_work_on_codes_times_scales() {
        let shape = Shape::builder().experts(8).topk(1).hidden(130).max_tokens(1).element(Element::Fp8(Scaling::Exact));
        let world = World::new(shape.build().unwrap(), Topology::new(1, 2).unwrap(), RankSet::new()).unwrap();
        let scales = [0.5f32, 3.0].into_iter().flat_map(f32::to_le_bytes).collect();
        // 1.5 in every place: 0.75 in the first group, 4.5 in the second; expert 4 makes 1.5 of 1.
        let got = CodedReceived {
            x: CodedRows { codes: vec![0x3c; 130], scales },
            rows: Received { topk_idx: vec![0], topk_weights: vec![2.0], ..Received::default() },
        };
        let y = apply_experts_coded(&world, Rank(1), &got);
        assert_eq!((y[0], y[127], y[128], y[129]), (round(2.25), round(2.25), round(13.5), round(13.5)));
    }
}
