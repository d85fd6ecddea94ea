//! What each rank of one partition has.

use std::ops::{Index, IndexMut, Range};

use ep_core::Rank;

/// One thing for each of some ranks that follow one another, found by rank.
#[derive(Debug)]
pub(super) struct Locals<T> {
    first: u32,
    items: Vec<T>,
}

impl<T> Locals<T> {
    /// What `each` makes for each rank.
    pub(super) fn new(ranks: Range<u32>, each: impl FnMut(Rank) -> T) -> Self {
        Self { first: ranks.start, items: ranks.map(Rank).map(each).collect() }
    }

    /// Whether the rank is one of them.
    pub(super) const fn has(&self, rank: Rank) -> bool {
        rank.0.wrapping_sub(self.first) < self.items.len() as u32
    }

    /// Where a rank comes among them.
    pub(super) const fn place(&self, rank: Rank) -> usize {
        (rank.0 - self.first) as usize
    }

    /// The rank that comes at `place`.
    pub(super) const fn rank(&self, place: usize) -> Rank {
        Rank(self.first + place as u32)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.items.iter()
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.items
    }
}

impl<T> Index<Rank> for Locals<T> {
    type Output = T;

    fn index(&self, rank: Rank) -> &T {
        &self.items[self.place(rank)]
    }
}

impl<T> IndexMut<Rank> for Locals<T> {
    fn index_mut(&mut self, rank: Rank) -> &mut T {
        let place = self.place(rank);
        &mut self.items[place]
    }
}
