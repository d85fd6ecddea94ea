//! The codes of E4M3 by definition, and the same from tables that the definition fills: rows are long.

use std::sync::LazyLock;

/// The code of NaN, whatever its sign.
const NAN: u8 = 0x7f;
/// The largest magnitude.
const MAX: f64 = 448.0;

/// The value of an E4M3 code; NaN for `0x7f` and `0xff`.
pub fn e4m3_value(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The E4M3 code whose value is nearest to `value`, of two the even one; `0x7f` for NaN, that of 448 beyond 448. It is
/// found by looking at all of them.
pub fn e4m3_nearest(value: f32) -> u8 {
    nearest_of(value, 0..NAN)
}

/// The nearest of some codes of positive values.
fn nearest_of(value: f32, mut codes: impl Iterator<Item = u8>) -> u8 {
    if value.is_nan() {
        return NAN;
    }
    let magnitude = f64::from(value).abs().min(MAX);
    let first = codes.next().unwrap_or(0);
    let distance = |code: u8| (VALUES[usize::from(code)] - magnitude).abs();
    let nearest = codes.fold((first, distance(first)), |(best, least), code| {
        let far = distance(code);
        if far < least || (far == least && code & 1 == 0) { (code, far) } else { (best, least) }
    });
    if value.is_sign_negative() { nearest.0 | 0x80 } else { nearest.0 }
}

/// `[codes]`: the value of each, by definition.
static VALUES: LazyLock<[f64; 256]> = LazyLock::new(|| std::array::from_fn(|code| e4m3_value(code as u8)));

/// [`e4m3_value`] from the table.
pub(super) fn value(code: u8) -> f64 {
    VALUES[usize::from(code)]
}

/// [`e4m3_nearest`], looking only at the two codes beside `value`: those of positive values ascend with them.
pub(super) fn nearest(value: f32) -> u8 {
    let magnitude = f64::from(value).abs();
    let above = VALUES[..usize::from(NAN)].partition_point(|code| *code < magnitude) as u8;
    nearest_of(value, above.saturating_sub(1)..NAN.min(above.saturating_add(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_mean_what_the_format_says() {
        let known = [(0x00, 0.0), (0x01, 1.0 / 512.0), (0x07, 7.0 / 512.0), (0x08, 1.0 / 64.0), (0x38, 1.0)];
        for (code, value) in known.into_iter().chain([(0x7e, 448.0), (0xbc, -1.5), (0x77, 240.0), (0x78, 256.0)]) {
            assert_eq!(e4m3_value(code), value, "{code:#x}");
        }
        assert!(e4m3_value(0x80).is_sign_negative() && e4m3_value(0x7f).is_nan() && e4m3_value(0xff).is_nan());
    }

    #[test]
    fn of_two_equally_near_codes_the_even_one_is_chosen() {
        assert_eq!((e4m3_nearest(1.0625), e4m3_nearest(1.1875)), (0x38, 0x3a));
        assert_eq!((e4m3_nearest(1.0 / 1024.0), e4m3_nearest(-3.0 / 1024.0)), (0x00, 0x82));
    }

    #[test]
    fn looking_at_two_codes_finds_the_nearest_of_all() {
        let codes = (0..NAN).map(|code| e4m3_value(code) as f32);
        let halves = (0..NAN - 1).map(|code| ((e4m3_value(code) + e4m3_value(code + 1)) / 2.0) as f32);
        let edges = codes.chain(halves).flat_map(|x| [x.next_down(), x, x.next_up()]);
        let bf16s = (0..=u16::MAX).map(|bits| half::bf16::from_bits(bits).to_f32());
        for x in edges.chain(bf16s).flat_map(|x| [x, -x]) {
            assert_eq!(nearest(x), e4m3_nearest(x), "{x:e}");
        }
        for code in 0..=u8::MAX {
            assert_eq!(value(code).to_bits(), e4m3_value(code).to_bits(), "{code:#x}");
        }
    }
}
