//! One token's sum on its way: f32, in canonical order, rounded once.

use super::intake::HeaderBytes;

/// Sums bf16 rows and the weights that came with them.
pub(crate) struct Accumulator {
    sum: Vec<f32>,
    weights: Vec<f32>,
    /// The sum is 0, whatever lies there: the first row is written, not added.
    cleared: bool,
}

impl Accumulator {
    pub(crate) fn new(hidden: u32, topk: u32) -> Self {
        Self { sum: vec![0.0; hidden as usize], weights: vec![0.0; topk as usize], cleared: true }
    }

    pub(crate) fn clear(&mut self) {
        self.cleared = true;
        self.weights.fill(0.0);
    }

    /// Starts the sum from a row. Not the same as adding it to 0: -0 stays -0.
    pub(crate) fn start(&mut self, row: &[u8]) {
        self.cleared = false;
        for (sum, value) in self.sum.iter_mut().zip(values(row)) {
            *sum = value;
        }
    }

    /// Adds a row.
    pub(crate) fn add(&mut self, row: &[u8]) {
        if std::mem::replace(&mut self.cleared, false) {
            for (sum, value) in self.sum.iter_mut().zip(values(row)) {
                *sum = 0.0 + value;
            }
            return;
        }
        for (sum, value) in self.sum.iter_mut().zip(values(row)) {
            *sum += value;
        }
    }

    /// Makes zeroes of a sum that was cleared.
    fn settle(&mut self) {
        if std::mem::replace(&mut self.cleared, false) {
            self.sum.fill(0.0);
        }
    }

    /// Adds a row times `weight`, each product and sum rounded once (fused).
    pub(crate) fn add_scaled(&mut self, weight: f32, row: &[u8]) {
        self.settle();
        for (sum, value) in self.sum.iter_mut().zip(values(row)) {
            *sum = weight.mul_add(value, *sum);
        }
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
    #[cfg(feature = "plant")]
    pub(crate) fn add_unrounded(&mut self, other: &Self) {
        self.settle();
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
        if self.cleared {
            return row.fill(0);
        }
        let (elements, _) = row.as_chunks_mut();
        for (bytes, &sum) in elements.iter_mut().zip(&self.sum) {
            *bytes = rounded(sum).to_le_bytes();
        }
    }
}

/// The elements of a bf16 row.
fn values(row: &[u8]) -> impl Iterator<Item = f32> {
    let (elements, _) = row.as_chunks();
    elements.iter().map(|&bytes| f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16))
}

/// The bits of the nearest bf16, ties to even; of a NaN its first bits, quiet. As [`half::bf16`] rounds, without a branch: a
/// compiler makes code of it that does several at a time.
const fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    // All ones for a NaN, which gets its quiet bit and is not rounded: it might end as a zero.
    let nan = if value.is_nan() { u32::MAX } else { 0 };
    let half = (0x7FFF + ((bits >> 16) & 1)) & !nan;
    (((bits | (0x0040_0000 & nan)) + half) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn sums_are_rounded_as_bf16_is() {
        // All upper halves, with lower halves around the ties.
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits(u32::from(upper) << 16 | lower);
                assert_eq!(rounded(value), bf16::from_f32(value).to_bits(), "{:08x}", value.to_bits());
            }
        }
    }

    #[test]
    fn elements_are_read_as_bf16_are() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for (bits, value) in (0..=u16::MAX).zip(values(&all)) {
            assert_eq!(value.to_bits(), u32::from(bits) << 16);
        }
    }

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
}
