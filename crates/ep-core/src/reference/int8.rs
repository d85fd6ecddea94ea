//! INT8 rows by definition: the integer that is nearest to each quotient.
//!
//! Written in f64 and independently of [`crate::quant`]; see [`super::coded`] for why that gives what f32 arithmetic does.

/// The codes of a row, and its scale.
pub(super) fn quantize(row: &[f32]) -> (Vec<u8>, [u8; 4]) {
    if !row.iter().all(|x| x.is_finite()) {
        return (vec![0; row.len()], f32::NAN.to_le_bytes());
    }
    let amax = row.iter().map(|x| f64::from(x.abs())).fold(f64::from(1e-4f32), f64::max);
    let multiplier = f64::from((127.0 / amax) as f32);
    let scale = (1.0 / multiplier) as f32;
    let code = |x: &f32| f64::from((f64::from(*x) * multiplier) as f32).round_ties_even() as i8 as u8;
    (row.iter().map(code).collect(), scale.to_le_bytes())
}

/// What a code stands for, before its scale.
pub(super) fn value(code: u8) -> f64 {
    f64::from(code as i8)
}
