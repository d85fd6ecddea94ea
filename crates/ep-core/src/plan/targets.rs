//! The ranks that one token goes to, as bits: a set that drops repetitions and gives its ranks in order.

use crate::topology::{Rank, RankSet};

/// Collects the ranks of one token after the other.
pub(super) trait Targets {
    /// Adds a rank.
    fn insert(&mut self, rank: u32);

    /// Empties the set; tells `add` its bits in ascending order, as 64 ranks from a first one.
    fn drain(&mut self, add: impl FnMut(u32, u64));
}

/// Up to 64 ranks: the set is one number, which stays in a register.
#[derive(Default)]
pub(super) struct Narrow(u64);

impl Targets for Narrow {
    fn insert(&mut self, rank: u32) {
        self.0 |= 1 << rank;
    }

    fn drain(&mut self, mut add: impl FnMut(u32, u64)) {
        add(0, std::mem::take(&mut self.0));
    }
}

/// Any number of ranks. A token has at most 32 of them, so a second layer tells which words have bits.
pub(super) struct Wide {
    words: Vec<u64>,
    used: Vec<u64>,
}

impl Wide {
    pub(super) fn new(ranks: u32) -> Self {
        let words = ranks.div_ceil(64) as usize;
        Self { words: vec![0; words], used: vec![0; words.div_ceil(64)] }
    }
}

impl Targets for Wide {
    fn insert(&mut self, rank: u32) {
        let word = (rank / 64) as usize;
        self.words[word] |= 1 << (rank % 64);
        self.used[word / 64] |= 1 << (word % 64);
    }

    fn drain(&mut self, mut add: impl FnMut(u32, u64)) {
        for (used, first) in self.used.iter_mut().zip((0..).step_by(64)) {
            for word in bits(std::mem::take(used)).map(|bit| first + bit) {
                add(word * 64, std::mem::take(&mut self.words[word as usize]));
            }
        }
    }
}

/// The bits of `word` that are set, ascending.
pub(super) fn bits(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros())?;
        word &= word - 1;
        Some(bit)
    })
}

/// Which of `ranks` ranks are left when those of `mask` are out, as words of 64 ranks.
pub(super) fn unmasked(ranks: u32, mask: &RankSet) -> Vec<u64> {
    let mut words = vec![0; ranks.div_ceil(64) as usize];
    for rank in (0..ranks).filter(|&rank| !mask.contains(Rank(rank))) {
        words[(rank / 64) as usize] |= 1 << (rank % 64);
    }
    words
}

/// Up to 64 bytes as bits: 1 where a byte is not 0.
pub(super) fn nonzero(bytes: &[u8]) -> u64 {
    const LOW: u64 = 0x0101_0101_0101_0101;
    let eight = |bytes: &[u8]| {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        let word = u64::from_le_bytes(padded);
        // The top bit of each byte that is not 0, moved to its bottom; then byte i's bit to bit 56 + i.
        let ones = (((word & (0x7f * LOW)) + 0x7f * LOW) | word) >> 7 & LOW;
        ones.wrapping_mul(0x0102_0408_1020_4080) >> 56
    };
    bytes.chunks(8).zip((0..).step_by(8)).fold(0, |word, (bytes, at)| word | eight(bytes) << at)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drained(set: &mut impl Targets) -> Vec<u32> {
        let mut ranks = Vec::new();
        set.drain(|first, word| ranks.extend(bits(word).map(|bit| first + bit)));
        ranks
    }

    proptest! {
        #[test]
        fn sets_give_their_ranks_once_and_in_order(
            ranks in proptest::collection::vec(0u32..16_384, 0..33), few in proptest::collection::vec(0u32..64, 0..33),
        ) {
            for (mut given, wide) in [(ranks, Wide::new(16_384)), (few.clone(), Wide::new(64))] {
                let mut wide = wide;
                given.iter().for_each(|&rank| wide.insert(rank));
                given.sort_unstable();
                given.dedup();
                prop_assert_eq!(drained(&mut wide), given);
                prop_assert!(drained(&mut wide).is_empty());
            }
            let mut narrow = Narrow::default();
            few.iter().for_each(|&rank| narrow.insert(rank));
            let expected = (0..64).filter(|rank| few.contains(rank)).collect::<Vec<_>>();
            prop_assert_eq!(drained(&mut narrow), expected);
            prop_assert!(drained(&mut narrow).is_empty());
        }

        #[test]
        fn bytes_that_are_not_zero_become_bits(
            bytes in proptest::collection::vec(prop_oneof![Just(0u8), any::<u8>(), Just(128u8)], 0..65),
        ) {
            let expected = bytes.iter().zip(0..).fold(0u64, |word, (&byte, at)| word | u64::from(byte != 0) << at);
            prop_assert_eq!(nonzero(&bytes), expected);
        }
    }
}
