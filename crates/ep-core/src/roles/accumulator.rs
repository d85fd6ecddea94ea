//! One token's sum on its way: f32, in canonical order, rounded once.

use std::mem;

use super::intake::HeaderBytes;
use crate::{bf16, vectors};

/// Sums bf16 rows and the weights that came with them.
pub(crate) struct Accumulator {
    sum: Vec<f32>,
    weights: Vec<f32>,
    /// The sum is 0, whatever lies there: the first row is written, not added.
    cleared: bool,
    /// A row that is yet to be added. The last one is added while the sum is rounded: one pass less over it.
    held: Vec<u8>,
    holds: bool,
}

impl Accumulator {
    pub(crate) fn new(hidden: u32, topk: u32) -> Self {
        let (hidden, topk) = (hidden as usize, topk as usize);
        Self {
            sum: vec![0.0; hidden],
            weights: vec![0.0; topk],
            cleared: true,
            held: vec![0; hidden * size_of::<u16>()],
            holds: false,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.cleared = true;
        self.holds = false;
        self.weights.fill(0.0);
    }

    /// Starts the sum from a row. Not the same as adding it to 0: -0 stays -0.
    pub(crate) fn start(&mut self, row: &[u8]) {
        (self.cleared, self.holds) = (false, false);
        each(&mut self.sum, row, |_, value| value);
    }

    /// Adds a row.
    pub(crate) fn add(&mut self, row: &[u8]) {
        self.settle();
        if mem::replace(&mut self.cleared, false) {
            each(&mut self.sum, row, |_, value| 0.0 + value);
        } else {
            each(&mut self.sum, row, |sum, value| sum + value);
        }
    }

    /// Adds a row, which it takes: another, of as many bytes and with anything in it, is left in its place.
    pub(crate) fn take(&mut self, row: &mut Vec<u8>) {
        self.settle();
        debug_assert_eq!(row.len(), self.held.len());
        mem::swap(row, &mut self.held);
        self.holds = true;
    }

    /// Adds the row that is held.
    fn settle(&mut self) {
        if mem::replace(&mut self.holds, false) {
            let held = mem::take(&mut self.held);
            self.add(&held);
            self.held = held;
        }
    }

    /// Makes zeroes of a sum that was cleared.
    fn materialize(&mut self) {
        self.settle();
        if mem::replace(&mut self.cleared, false) {
            self.sum.fill(0.0);
        }
    }

    /// Adds a row times `weight`, each product and sum rounded once (fused).
    pub(crate) fn add_scaled(&mut self, weight: f32, row: &[u8]) {
        self.materialize();
        each(&mut self.sum, row, |sum, value| weight.mul_add(value, sum));
    }

    /// Adds the weights that a header carries.
    pub(crate) fn add_weights(&mut self, header: &HeaderBytes) {
        for (at, sum) in self.weights.iter_mut().enumerate() {
            *sum += header.choice(at).weight;
        }
    }

    /// Adds weights that were summed elsewhere on this rank.
    pub(crate) fn add_own(&mut self, weights: &[f32]) {
        for (sum, weight) in self.weights.iter_mut().zip(weights) {
            *sum += weight;
        }
    }

    /// The planted fault [`crate::plant::Plant::PartialNotRounded`].
    pub(crate) fn add_unrounded(&mut self, other: &mut Self) {
        self.materialize();
        other.materialize();
        for (sum, value) in self.sum.iter_mut().zip(&other.sum) {
            *sum += value;
        }
        self.add_own(other.weights());
    }

    pub(crate) fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Rounds the sum into `row`.
    pub(crate) fn finish(&self, row: &mut [u8]) {
        match (self.cleared, self.holds) {
            (true, false) => row.fill(0),
            (true, true) => finish(row, values(&self.held).map(|value| 0.0 + value)),
            (false, false) => finish(row, self.sum.iter().copied()),
            (false, true) => finish(row, self.sum.iter().zip(values(&self.held)).map(|(sum, value)| sum + value)),
        }
    }

    /// Puts what rounding the sum leaves into `row`, rounded in its turn.
    pub(crate) fn finish_remainder(&mut self, row: &mut [u8]) {
        self.materialize();
        finish(row, self.sum.iter().map(|&sum| sum - bf16::widen(bf16::round(sum))));
    }
}

/// Puts `next` of each sum and element of a row in the sum's place.
fn each(sums: &mut [f32], row: &[u8], next: impl Fn(f32, f32) -> f32) {
    vectors::for_each(sums.iter_mut().zip(values(row)), |(sum, value)| *sum = next(*sum, value));
}

/// Rounds sums into a row.
fn finish(row: &mut [u8], sums: impl Iterator<Item = f32>) {
    let (elements, _) = row.as_chunks_mut();
    vectors::for_each(elements.iter_mut().zip(sums), |(bytes, sum)| *bytes = bf16::round(sum).to_le_bytes());
}

/// The elements of a bf16 row.
#[inline(always)]
fn values(row: &[u8]) -> impl Iterator<Item = f32> {
    let (elements, _) = row.as_chunks();
    elements.iter().map(|&bytes| bf16::widen(u16::from_le_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cleared_sum_is_zero() {
        let mut sum = Accumulator::new(3, 0);
        let (row, zeroes, mut out) = ([0x80, 0x3f].repeat(3), [0; 6], [9; 6]);
        sum.add(&row);
        sum.clear();
        sum.finish(&mut out);
        assert_eq!(out, zeroes);
        // -0 added to 0 is 0.
        sum.add(&[0x00, 0x80].repeat(3));
        sum.finish(&mut out);
        assert_eq!(out, zeroes);
        sum.clear();
        sum.add_scaled(1.0, &row);
        sum.finish(&mut out);
        assert_eq!(out[..], row);
    }

    /// Rows of one value each, none exact in bf16 with another, in all ways to hand them over.
    #[test]
    fn rows_that_are_taken_are_summed_in_their_order() {
        const HIDDEN: usize = 37;
        let row = |value: f32| bf16::round(value).to_le_bytes().repeat(HIDDEN);
        let rows: Vec<f32> = [1.0e30, 1.0, -1.0e30, 0.75, -0.0].to_vec();
        for ways in 0..1 << rows.len() {
            let mut sum = Accumulator::new(HIDDEN as u32, 0);
            let mut expected = 0.0;
            for count in 0..=rows.len() {
                if let Some(last) = count.checked_sub(1) {
                    expected += bf16::widen(bf16::round(rows[last]));
                    let mut bytes = row(rows[last]);
                    if ways >> last & 1 == 1 {
                        sum.take(&mut bytes)
                    } else {
                        sum.add(&bytes)
                    }
                    assert_eq!(bytes.len(), 2 * HIDDEN);
                }
                let mut out = vec![9; 2 * HIDDEN];
                sum.finish(&mut out);
                assert_eq!(out, row(expected), "{count} rows, {ways:b}");
            }
            sum.clear();
            let mut out = vec![9; 2 * HIDDEN];
            sum.finish(&mut out);
            assert_eq!(out, row(0.0), "cleared, {ways:b}");
            // A row that is held when a sum starts from another belongs to the sum before.
            sum.take(&mut row(7.0));
            sum.start(&row(-0.0));
            sum.finish(&mut out);
            assert_eq!(out, row(-0.0), "started, {ways:b}");
        }
    }
}
