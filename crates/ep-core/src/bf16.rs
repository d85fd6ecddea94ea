//! bf16 to f32 and back, without a branch: compilers make code of it that does several at a time.

/// The value of a bf16 with these bits: exact.
#[inline(always)]
pub(crate) const fn widen(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// The bits of the nearest bf16, ties to even; of a NaN its first bits, quiet. As [`half::bf16`] rounds.
#[inline(always)]
pub(crate) const fn round(value: f32) -> u16 {
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
    fn values_are_rounded_as_half_rounds_them() {
        // All upper halves, with lower halves around the ties.
        for upper in 0..=u16::MAX {
            for lower in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let value = f32::from_bits(u32::from(upper) << 16 | lower);
                assert_eq!(round(value), bf16::from_f32(value).to_bits(), "{:08x}", value.to_bits());
            }
        }
    }

    #[test]
    fn values_are_those_of_half() {
        for bits in 0..=u16::MAX {
            assert_eq!(widen(bits).to_bits(), bf16::from_bits(bits).to_f32().to_bits() & !quiet(bits), "{bits:04x}");
        }
    }

    /// What half makes of a signalling NaN: it sets its quiet bit.
    fn quiet(bits: u16) -> u32 {
        if bits & 0x7fff > 0x7f80 && bits & 0x40 == 0 { 0x40_0000 } else { 0 }
    }
}
