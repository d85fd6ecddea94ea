//! Time.

use std::fmt;
use std::ops::{Add, Sub};

/// A time or a duration in nanoseconds, on the clock of one rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Nanos(pub u64);

impl Nanos {
    /// `seconds` as nanoseconds.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds.saturating_mul(1_000_000_000))
    }

    /// `millis` milliseconds as nanoseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }
}

impl Add for Nanos {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self(self.0.saturating_add(more.0))
    }
}

impl Sub for Nanos {
    type Output = Self;

    fn sub(self, less: Self) -> Self {
        Self(self.0.saturating_sub(less.0))
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0;
        match ns {
            0..1_000 => write!(f, "{ns} ns"),
            1_000..1_000_000 => write!(f, "{:.1} us", ns as f64 / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} ms", ns as f64 / 1e6),
            _ => write!(f, "{:.2} s", ns as f64 / 1e9),
        }
    }
}
