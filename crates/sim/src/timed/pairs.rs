//! What exists between pairs of ranks: lanes and cells.

use ep_core::Rank;
use rustc_hash::FxHashMap;

/// Which of a pair's.
#[derive(Clone, Copy, Debug)]
pub(super) enum Key {
    /// One of the few that low latency has between all pairs.
    Every(usize),
    /// By a number that no other of the first rank's has.
    Some(u64),
}

/// Things of pairs of ranks, by numbers.
///
/// In low latency all ranks exchange with all: those things lie in rows, for each first rank one, by the second, so that
/// they are found without a look elsewhere, and who goes through its peers finds one beside the other. The others are few:
/// they are made, one after the other, when they are first asked for.
#[derive(Debug)]
pub(super) struct Pairs<T, const N: usize> {
    /// `[first][second][N]`, a first rank's when one of them is first asked for.
    every: Vec<Vec<[T; N]>>,
    ranks: usize,
    numbers: FxHashMap<(Rank, u64), u32>,
    some: Vec<T>,
}

/// In the number of one that lies in a row: the second rank above which of the pair's it is, the first above that.
const WHICH: u32 = 2;
const SECOND: u32 = 14;
/// In the number of every other.
const SOME: u32 = 1 << 31;

const _: () = assert!(ep_core::topology::MAX_RANKS <= 1 << SECOND && 2 * SECOND + WHICH < 31);

impl<T: Default, const N: usize> Pairs<T, N> {
    /// Things of `firsts` first ranks, at most twice [`ep_core::topology::MAX_RANKS`], and `ranks` second ones.
    pub(super) fn new(firsts: u32, ranks: u32) -> Self {
        Self {
            every: (0..firsts).map(|_| Vec::new()).collect(),
            ranks: ranks as usize,
            numbers: FxHashMap::default(),
            some: Vec::new(),
        }
    }

    /// The number of a thing, if it was made.
    pub(super) fn find(&self, first: Rank, second: Rank, key: Key) -> Option<u32> {
        match key {
            Key::Every(at) => (!self.every[first.index()].is_empty()).then_some(in_row(first, second, at)),
            Key::Some(key) => self.numbers.get(&(first, key)).copied(),
        }
    }

    /// The number of a thing, which is made if need be.
    pub(super) fn number(&mut self, first: Rank, second: Rank, key: Key) -> u32 {
        match key {
            Key::Every(at) => {
                let row = &mut self.every[first.index()];
                if row.is_empty() {
                    row.resize_with(self.ranks, || std::array::from_fn(|_| T::default()));
                }
                in_row(first, second, at)
            }
            Key::Some(key) => *self.numbers.entry((first, key)).or_insert_with(|| {
                self.some.push(T::default());
                SOME | (self.some.len() - 1) as u32
            }),
        }
    }

    pub(super) fn get(&self, number: u32) -> &T {
        if number & SOME != 0 {
            return &self.some[(number ^ SOME) as usize];
        }
        let (first, second, at) = places(number);
        &self.every[first][second][at]
    }

    pub(super) fn get_mut(&mut self, number: u32) -> &mut T {
        if number & SOME != 0 {
            return &mut self.some[(number ^ SOME) as usize];
        }
        let (first, second, at) = places(number);
        &mut self.every[first][second][at]
    }
}

const fn in_row(first: Rank, second: Rank, at: usize) -> u32 {
    first.0 << (SECOND + WHICH) | second.0 << WHICH | at as u32
}

const fn places(number: u32) -> (usize, usize, usize) {
    let second = number >> WHICH & ((1 << SECOND) - 1);
    ((number >> (SECOND + WHICH)) as usize, second as usize, (number & ((1 << WHICH) - 1)) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_number() {
        let last = Rank((1 << SECOND) - 1);
        let mut pairs: Pairs<u32, 3> = Pairs::new(2 << SECOND, 1 << SECOND);
        let keys = [Key::Every(0), Key::Every(2), Key::Some(7), Key::Some(8)];
        let firsts = [Rank(0), Rank((2 << SECOND) - 1)];
        let all = || firsts.into_iter().flat_map(|first| keys.map(|key| (first, last, key)));
        assert!(all().all(|(first, second, key)| pairs.find(first, second, key).is_none()));
        for (at, (first, second, key)) in (1..).zip(all()) {
            let number = pairs.number(first, second, key);
            assert_eq!(std::mem::replace(pairs.get_mut(number), at), 0);
        }
        for (at, (first, second, key)) in (1..).zip(all()) {
            let number = pairs.find(first, second, key).unwrap();
            assert_eq!((number, *pairs.get(number)), (pairs.number(first, second, key), at));
        }
    }
}
