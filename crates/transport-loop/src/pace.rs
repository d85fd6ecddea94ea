//! How long a network takes: arithmetic only. Times are nanoseconds of the network's clock.

use std::num::NonZeroU64;

/// Rate and latency of every card.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Pace {
    /// How long a byte occupies a way, in 2^-32 nanoseconds, so that no verb divides. 0: as fast as cores copy.
    per_byte: u64,
    pub(crate) latency: u64,
}

impl Pace {
    /// The rate from now on.
    pub(crate) fn set_rate(&mut self, bytes_per_second: NonZeroU64) {
        self.per_byte = (1_000_000_000_u64 << 32) / bytes_per_second;
    }

    /// How long so many bytes occupy a way.
    pub(crate) fn takes(self, bytes: u64) -> u64 {
        let nanos = (u128::from(bytes) * u128::from(self.per_byte)).div_ceil(1 << 32);
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }

    /// When the last of `bytes` bytes has left a card whose way out is free at `free`.
    pub(crate) fn leaves(self, now: u64, free: u64, bytes: u64) -> u64 {
        now.max(free).saturating_add(self.takes(bytes))
    }

    /// When what left at `left` has arrived at a card whose way in is free at `free`.
    pub(crate) fn arrives(self, left: u64, free: u64, bytes: u64) -> u64 {
        left.saturating_add(self.latency).max(free.saturating_add(self.takes(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_the_time_that_the_rate_gives_them() {
        let pace = |rate| {
            let mut pace = Pace::default();
            pace.set_rate(NonZeroU64::new(rate).unwrap());
            pace
        };
        assert_eq!(pace(50_000_000_000).takes(14336), 287, "286.72 ns, rounded up");
        assert_eq!(pace(50_000_000_000).takes(50), 1, "a whole one");
        assert_eq!(
            pace(3_000_000_000).takes(1 << 30),
            357_913_942,
            "357,913,941.3: below 4 GiB less than a nanosecond is lost"
        );
        assert_eq!(pace(1).takes(3), 3_000_000_000);
        assert_eq!(pace(1).takes(u64::MAX), u64::MAX, "never");
        assert_eq!(Pace::default().takes(u64::MAX), 0, "no rate was set");
    }

    #[test]
    fn the_slower_of_the_two_cards_decides_and_a_free_one_adds_the_latency_alone() {
        let mut pace = Pace { latency: 50, ..Pace::default() };
        pace.set_rate(NonZeroU64::new(1_000_000_000).unwrap());
        let left = pace.leaves(1000, 0, 100);
        assert_eq!(left, 1100);
        assert_eq!(pace.leaves(1000, 1070, 100), 1170, "the way out is taken until 1070");
        assert_eq!(pace.arrives(left, 0, 100), 1150);
        assert_eq!(pace.arrives(left, 1149, 100), 1249, "the way in is taken until 1149");
    }
}
