//! Stages of a warp that sums rows which the bulk copy engine brings: the same for all kernels that do.

use crate::args::{BARRIER, BATCH_BYTES, SumShape};

/// Bytes of a part of a row at most.
const PART: u32 = 2048;
/// Bytes of a stage, if no part has less than a unit.
const STAGE: u32 = 8 << 10;
/// Bytes of a unit, which parts consist of.
const UNIT: u32 = 16;

impl SumShape {
    /// For results of `bytes` bytes, of which a token may have one from each of `ranks` ranks: by a membership it may go to all of them.
    pub(super) fn new(bytes: u32, ranks: u32, stages: u32) -> Self {
        let longest = PART.min(STAGE / ranks).max(UNIT);
        let part = bytes.div_ceil(bytes.div_ceil(longest).max(1)).next_multiple_of(UNIT).max(UNIT);
        Self { stages, rows: ranks, part }
    }

    /// Bytes of shared memory that a warp needs for them.
    pub(super) const fn bytes(&self) -> u32 {
        self.stages * (BATCH_BYTES + BARRIER + self.rows * self.part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_of_one_length_and_fit_into_a_stage() {
        for (bytes, ranks) in [(16, 1), (272, 8), (14336, 2), (14336, 3), (14336, 8), (14336, 72), (131_072, 8)] {
            let shape = SumShape::new(bytes, ranks, 2);
            assert!(shape.part.is_multiple_of(UNIT) && shape.part * bytes.div_ceil(shape.part) >= bytes, "{shape:?}");
            assert!(shape.part <= PART.min((STAGE / ranks).next_multiple_of(UNIT)), "{shape:?}");
        }
        assert_eq!(SumShape::new(14336, 2, 2).part, 2048);
    }
}
