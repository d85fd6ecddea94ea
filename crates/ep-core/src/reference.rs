//! The scalar oracle: what dispatch and combine must produce for a whole communicator.
//!
//! Plain loops over the batches of all ranks, written independently of [`crate::plan`] and [`crate::layout`] and using
//! neither, so that a mistake there is no mistake here. Slow, and meant to be read.
//!
//! The arithmetic is canonical; comparison is bit for bit, except that any NaN equals any NaN ([`same_bf16`],
//! [`same_f32`]):
//!
//! ```text
//! combine, one node       acc = bias;  acc += f32(row), ranks ascending;                        x = bf16(acc)
//! combine, several nodes  acc = bias;  acc += f32(bf16(partial)), nodes ascending;              x = bf16(acc)
//!                         partial = 0; partial += f32(row), the node's ranks ascending, the own node too
//! bias                    f32(bias0) + f32(bias1); with one bias f32 of that; 0 without
//! weights                 acc = 0; acc += weight, ranks ascending
//! experts                 acc = 0; acc += (weight * factor) * f32(x), local experts in topk order;   y = bf16(acc)
//! rows by expert          acc = 0; acc += f32(y of the choice), choices ascending;                   row = bf16(acc)
//! ```
//!
//! Low latency ([`low_latency_combine`]) has weights at combine, or weighs where the experts are ([`Weighing`]), and there
//! `fma(weight, y, acc)`.
//!
//! All the rest in f32, one rounding an operation, no fused multiply-add; bf16 rounds to nearest, ties to even.
//!
//! Rows that travel as codes, FP8 or INT8 ([`dispatch_coded`]), arrive as the bytes that were sent; experts take
//! `f32(code) * scale` for `f32(x)` ([`apply_experts_coded`]); what they return is bf16 and combines as above.
//! [`quantize`] and [`dequantize`] say what codes and scales must be; the formulas stand in [`crate::quant`].

mod coded;
mod combine;
mod dispatch;
mod e4m3;
mod expanded;
mod experts;
mod int8;
mod low_latency;

pub use coded::{CodedRows, dequantize, quantize};
pub use combine::{Combined, Returned, combine};
pub use dispatch::{Batch, CodedBatch, CodedReceived, Received, Routing, dispatch, dispatch_coded};
pub use e4m3::{e4m3_nearest, e4m3_value};
pub use expanded::{
    Expanded, Pick, apply_experts_expanded, choice_scale, expand, reduce_expanded, remainders_of_expanded,
    room_of_expanded,
};
pub use experts::{apply_experts, apply_experts_coded, expert_factor};
pub use low_latency::{ExpertRows, Weighing, low_latency_combine, low_latency_dispatch};

use crate::error::Error;
use crate::shape::Shape;
use crate::topology::{Rank, RankSet, Topology};

/// The communicator that the oracle speaks of. Ranks of the mask take no part: they send nothing and get nothing.
#[derive(Clone, Debug)]
pub struct World {
    shape: Shape,
    topology: Topology,
    mask: RankSet,
    local_experts: u32,
}

impl World {
    /// A communicator of `topology` without the ranks of `mask`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the ranks do not divide the experts.
    pub fn new(shape: Shape, topology: Topology, mask: RankSet) -> Result<Self, Error> {
        let local_experts = shape.local_experts(topology.ranks())?;
        Ok(Self { shape, topology, mask, local_experts })
    }

    /// Sizes of the layer.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// All ranks, masked ones included.
    pub const fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The ranks that take no part.
    pub const fn mask(&self) -> &RankSet {
        &self.mask
    }

    /// Experts of each rank.
    pub const fn local_experts(&self) -> u32 {
        self.local_experts
    }

    /// Whether `rank` takes part.
    pub fn takes_part(&self, rank: Rank) -> bool {
        !self.mask.contains(rank)
    }

    /// Index of `expert` (over all ranks, or -1) among the experts of `rank`, if it lives there.
    fn local_expert(&self, rank: Rank, expert: i64) -> Option<i64> {
        let first = i64::from(rank.0) * i64::from(self.local_experts);
        let local = expert - first;
        (expert >= 0 && local >= 0 && local < i64::from(self.local_experts)).then_some(local)
    }
}

/// Whether two bf16 numbers are the same bits, or both NaN.
pub fn same_bf16(a: u16, b: u16) -> bool {
    a == b || (half::bf16::from_bits(a).is_nan() && half::bf16::from_bits(b).is_nan())
}

/// Whether two f32 numbers are the same bits, or both NaN.
pub fn same_f32(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn widen(bits: u16) -> f32 {
    half::bf16::from_bits(bits).to_f32()
}

fn round(value: f32) -> u16 {
    half::bf16::from_f32(value).to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nan_payloads_may_differ() {
        assert!(same_bf16(0x7fc0, 0xffc1) && !same_bf16(0x7f80, 0xff80));
        assert!(!same_bf16(0x0000, 0x8000), "zeros of different signs are different results");
        assert!(same_f32(f32::NAN, -f32::NAN) && !same_f32(0.0, -0.0));
    }

    #[test]
    fn rounding_is_to_nearest_and_ties_go_to_even() {
        assert_eq!(round(1.0 + 1.0 / 256.0), round(1.0), "a tie below an odd number goes down");
        assert_eq!(round(1.0 + 3.0 / 256.0), 0x3f82, "a tie above an odd number goes up");
        assert_eq!(round(f32::from_bits(0x3f80_8001)), 0x3f81);
    }
}
