//! Scales: from a group's largest element, and as they are stored.

use super::e4m3;
use crate::error::Error;

/// The least `amax` that a scale is made for: groups of zeros have a scale too.
pub const MIN_AMAX: f32 = 1e-4;

/// The f32 nearest to 1/448.
const MAX_INVERSE: f32 = 1.0 / e4m3::MAX;
/// Mantissa bits of an f32.
const MANTISSA_BITS: u32 = f32::MANTISSA_DIGITS - 1;

/// How a group's scale is chosen and stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Scaling {
    /// `amax / 448`, stored as f32.
    #[default]
    Exact,
    /// The next power of two, stored as f32: products with it are exact.
    PowerOfTwo,
    /// The next power of two, stored as its exponent: one byte, biased by 127.
    Ue8m0,
}

/// The two factors of a group.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scale {
    /// What elements are multiplied by before they are rounded to codes.
    pub multiplier: f32,
    /// What codes are multiplied by to get elements back.
    pub scale: f32,
}

impl Scaling {
    /// Every scaling.
    pub const ALL: [Self; 3] = [Self::Exact, Self::PowerOfTwo, Self::Ue8m0];

    /// Bytes of one stored scale.
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::Exact | Self::PowerOfTwo => 4,
            Self::Ue8m0 => 1,
        }
    }

    /// The factors of a group whose largest magnitude is `amax`; see the [module](super) for each operation.
    #[inline]
    pub const fn scale(self, amax: f32) -> Scale {
        let amax = amax.max(MIN_AMAX);
        let least = amax * MAX_INVERSE;
        match self {
            Self::Exact => Scale { multiplier: e4m3::MAX / amax, scale: least },
            Self::PowerOfTwo | Self::Ue8m0 => {
                let exponent = next_exponent(least);
                // 254 - exponent is the field of the reciprocal; an infinite scale (255) has the reciprocal 0.
                let reciprocal = 254u32.saturating_sub(exponent);
                Scale { multiplier: of_exponent(reciprocal), scale: of_exponent(exponent) }
            }
        }
    }

    /// Writes a group's scale to its [`Self::scale_bytes`] bytes.
    #[inline]
    pub(super) fn store(self, scale: f32, into: &mut [u8]) {
        match self {
            Self::Exact | Self::PowerOfTwo => into.copy_from_slice(&scale.to_le_bytes()),
            Self::Ue8m0 => into.copy_from_slice(&[(scale.to_bits() >> MANTISSA_BITS) as u8]),
        }
    }

    /// Reads what [`Self::store`] wrote, or what a peer did. UE8M0 bytes 0 and 255 mean 0 and infinity, as they do to
    /// kernels that shift them into an exponent field; [`super::quantize`] writes 0 never and 255 for infinities only.
    #[inline]
    pub(super) fn load(self, from: &[u8]) -> f32 {
        match *from {
            [exponent] => of_exponent(exponent.into()),
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
            _ => f32::NAN,
        }
    }
}

/// The exponent field of the least power of two that is not below `positive`, a normal number or infinity.
const fn next_exponent(positive: f32) -> u32 {
    let bits = positive.to_bits();
    (bits >> MANTISSA_BITS) + (bits & ((1 << MANTISSA_BITS) - 1) != 0) as u32
}

/// The power of two with this exponent field.
const fn of_exponent(field: u32) -> f32 {
    f32::from_bits(field << MANTISSA_BITS)
}

/// Packs UE8M0 scales as DeepEP hands them out: four in an `i32`, the first in its lowest byte; `[ceil(groups / 4)]`,
/// zeros behind the last. In memory, on little-endian machines, packs and bytes are the same.
///
/// # Errors
/// [`Error::Invalid`] when `packs` has another length.
pub fn pack_ue8m0(scales: &[u8], packs: &mut [i32]) -> Result<(), Error> {
    check_packs(scales.len(), packs.len())?;
    for (pack, scales) in packs.iter_mut().zip(scales.chunks(4)) {
        let mut bytes = [0; 4];
        bytes[..scales.len()].copy_from_slice(scales);
        *pack = i32::from_le_bytes(bytes);
    }
    Ok(())
}

/// Takes packs of UE8M0 scales apart: the reverse of [`pack_ue8m0`].
///
/// # Errors
/// [`Error::Invalid`] when `packs` has not the length for `scales`.
pub fn unpack_ue8m0(packs: &[i32], scales: &mut [u8]) -> Result<(), Error> {
    check_packs(scales.len(), packs.len())?;
    for (pack, scales) in packs.iter().zip(scales.chunks_mut(4)) {
        scales.copy_from_slice(&pack.to_le_bytes()[..scales.len()]);
    }
    Ok(())
}

fn check_packs(scales: usize, packs: usize) -> Result<(), Error> {
    let needed = scales.div_ceil(4);
    if packs != needed {
        return Err(Error::invalid("packs", packs, format_args!("{needed} for {scales} scales")));
    }
    Ok(())
}
