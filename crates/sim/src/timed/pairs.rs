//! Numbers for what exists between pairs of ranks.

use rustc_hash::FxHashMap;

use ep_core::Rank;
use ep_core::port::LaneKind;

/// No number.
const NONE: u32 = u32::MAX;

/// The numbers of a pair: of its low-latency lanes, say.
type Row<const N: usize> = [u32; N];

/// From two ranks and a key to a number. Where all ranks exchange with all, as in low latency, there are as many numbers as
/// pairs: those lie in rows by the first rank and the second, so that who goes through its peers finds one beside the
/// other. The few others are hashed.
#[derive(Debug)]
pub(super) struct Pairs<const N: usize> {
    ranks: usize,
    /// For each first rank, made when it has the first number: `[ranks]`.
    rows: Vec<Vec<Row<N>>>,
    others: FxHashMap<(Rank, u64), u32>,
}

/// Where a number is kept.
#[derive(Clone, Copy, Debug)]
pub(super) enum Key {
    /// In the pair's row.
    Row(usize),
    /// By a number of its own, among those of the first rank.
    Other(u64),
}

impl<const N: usize> Pairs<N> {
    /// Numbers of `firsts` first ranks with `ranks` ranks.
    pub(super) fn new(firsts: u32, ranks: u32) -> Self {
        Self { ranks: ranks as usize, rows: vec![Vec::new(); firsts as usize], others: FxHashMap::default() }
    }

    pub(super) fn get(&self, first: Rank, second: Rank, key: Key) -> Option<u32> {
        match key {
            Key::Row(at) => self.rows[first.index()].get(second.index()).map(|row| row[at]).filter(|&it| it != NONE),
            Key::Other(key) => self.others.get(&(first, key)).copied(),
        }
    }

    pub(super) fn set(&mut self, first: Rank, second: Rank, key: Key, number: u32) {
        match key {
            Key::Row(at) => {
                let rows = &mut self.rows[first.index()];
                if rows.is_empty() {
                    rows.resize(self.ranks, [NONE; N]);
                }
                rows[second.index()][at] = number;
            }
            Key::Other(key) => {
                self.others.insert((first, key), number);
            }
        }
    }
}

/// The lanes that low latency has between all pairs of ranks.
pub(super) const fn low_latency(kind: LaneKind) -> Option<usize> {
    match kind {
        LaneKind::LowRows => Some(0),
        LaneKind::LowDone => Some(1),
        _ => None,
    }
}
