//! One token's sum on its way: f32, in canonical order, rounded once.

use half::bf16;

use super::intake::HeaderBytes;

/// Sums bf16 rows and the weights that came with them.
pub(crate) struct Accumulator {
    sum: Vec<f32>,
    weights: Vec<f32>,
}

impl Accumulator {
    pub(crate) fn new(hidden: u32, topk: u32) -> Self {
        Self { sum: vec![0.0; hidden as usize], weights: vec![0.0; topk as usize] }
    }

    pub(crate) fn clear(&mut self) {
        self.sum.fill(0.0);
        self.weights.fill(0.0);
    }

    /// Starts the sum from a row. Not the same as adding it to 0: -0 stays -0.
    pub(crate) fn start(&mut self, row: &[u8]) {
        for (sum, value) in self.sum.iter_mut().zip(values(row)) {
            *sum = value;
        }
    }

    /// Adds a row.
    pub(crate) fn add(&mut self, row: &[u8]) {
        for (sum, value) in self.sum.iter_mut().zip(values(row)) {
            *sum += value;
        }
    }

    /// Adds a row times `weight`, each product and sum rounded once (fused).
    pub(crate) fn add_scaled(&mut self, weight: f32, row: &[u8]) {
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
        for (bytes, &sum) in row.chunks_exact_mut(2).zip(&self.sum) {
            bytes.copy_from_slice(&bf16::from_f32(sum).to_le_bytes());
        }
    }
}

/// The elements of a bf16 row.
fn values(row: &[u8]) -> impl Iterator<Item = f32> {
    let (elements, _) = row.as_chunks();
    elements.iter().map(|&bytes| bf16::from_le_bytes(bytes).to_f32())
}
