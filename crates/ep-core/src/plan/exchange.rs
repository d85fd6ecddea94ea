//! The counts of all ranks, and the prefix sums that give every row its place.

use crate::error::Error;
use crate::layout::OPEN_ROOM;
use crate::topology::Rank;

/// What all ranks send each other in one dispatch: `rows[source][destination]`, and choices per expert.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Exchange {
    ranks: u32,
    /// `[ranks + 1, ranks]`: rows that destination (column) gets from ranks `0..source` (row). What a source sends is the
    /// difference of two of them.
    first: Vec<u32>,
    /// `[ranks]`: tokens of each rank's batch.
    tokens: Vec<u32>,
    /// `[local experts]`: choices that the own rank receives for each of its experts.
    expert_counts: Vec<u32>,
}

impl Exchange {
    /// Collects the counts of `ranks` ranks.
    ///
    /// `rows` is `[ranks, ranks]`, `tokens` is `[ranks]`, `expert_counts` is `[local experts]` summed over all sources.
    ///
    /// # Errors
    /// [`Error::Invalid`] when a destination would get 2^31 rows or more.
    ///
    /// # Panics
    /// When a slice has another length: a programming error of the caller.
    pub fn new(mut rows: Vec<u32>, tokens: Vec<u32>, expert_counts: Vec<u32>) -> Result<Self, Error> {
        let ranks = tokens.len();
        assert_eq!(rows.len(), ranks * ranks, "rows must be [ranks, ranks]");
        let mut sums = vec![0u32; ranks];
        for row in rows.chunks_exact_mut(ranks.max(1)) {
            for (destination, (sum, rows)) in sums.iter_mut().zip(row).enumerate() {
                let before = *sum;
                *sum = sum.checked_add(*rows).filter(|&sum| sum < 1 << 31).ok_or_else(|| {
                    Error::invalid(format_args!("rows to rank {destination}"), "2147483648 or more", "less than 2^31")
                })?;
                *rows = before;
            }
        }
        rows.reserve_exact(ranks);
        rows.extend_from_slice(&sums);
        Ok(Self { ranks: ranks as u32, first: rows, tokens, expert_counts })
    }

    /// Rows from `source` to `destination`.
    pub fn rows(&self, source: Rank, destination: Rank) -> u32 {
        let at = self.at(source, destination);
        self.first[at + self.ranks as usize] - self.first[at]
    }

    /// Index, among the rows that `destination` receives, of the first from `source`.
    pub fn first_row(&self, source: Rank, destination: Rank) -> u32 {
        self.first[self.at(source, destination)]
    }

    /// Rows that `destination` receives in all.
    pub fn received(&self, destination: Rank) -> u32 {
        self.first[self.at(Rank(self.ranks), destination)]
    }

    /// Tokens of the batch of `rank`.
    pub fn tokens(&self, rank: Rank) -> u32 {
        self.tokens[rank.index()]
    }

    /// `[local experts]`: choices that the own rank receives for each of its experts.
    pub fn expert_counts(&self) -> &[u32] {
        &self.expert_counts
    }

    /// Whether the batch goes through outboxes, where `rooms` is `[ranks]`: the rows for which each has room in its arena. It does
    /// when one of them receives more; not while one says [`OPEN_ROOM`].
    pub fn overflows(&self, rooms: &[u32]) -> bool {
        let ranks = (0..self.ranks).map(Rank);
        !rooms.contains(&OPEN_ROOM) && ranks.zip(rooms).any(|(rank, &room)| self.received(rank) > room)
    }

    fn at(&self, source: Rank, destination: Rank) -> usize {
        source.index() * self.ranks as usize + destination.index()
    }
}

/// `counts` rounded up to multiples of `alignment`, which is at least 1; to the last multiple below 2^32 at most.
pub fn align_counts(counts: &[u32], alignment: u32) -> Vec<u32> {
    let most = u32::MAX / alignment * alignment;
    counts.iter().map(|&count| count.checked_next_multiple_of(alignment).unwrap_or(most)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_rounded_up_and_never_wrap() {
        assert_eq!(align_counts(&[0, 1, 8, 9], 8), [0, 8, 8, 16]);
        assert_eq!(align_counts(&[u32::MAX, u32::MAX - 20], 16), [u32::MAX - 15; 2]);
        assert_eq!(align_counts(&[7, 0], u32::MAX), [u32::MAX, 0]);
    }

    #[test]
    fn one_rank_without_room_takes_all_through_outboxes_and_one_that_says_nothing_none() {
        let exchange = Exchange::new(vec![1, 2, 3, 4], vec![3, 7], vec![5, 6]).unwrap();
        assert_eq!(exchange.expert_counts(), [5, 6]);
        let rooms = [([4, 6], false), ([3, 6], true), ([4, 5], true), ([0, 0], true), ([OPEN_ROOM, 0], false)];
        assert_eq!(rooms.map(|(rooms, _)| exchange.overflows(&rooms)), rooms.map(|(_, through)| through));
    }
}
