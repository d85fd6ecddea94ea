//! Cells, made when they are first published or waited on, and who waits for them.

use ep_core::Rank;
use rustc_hash::FxHashMap;

/// A port's wait: the port, and which of its needs.
pub(super) type Waiter = (u32, u32);

/// One cell.
#[derive(Debug, Default)]
pub(super) struct CellState {
    /// What its reader sees.
    pub(super) bits: u64,
    /// What was last published, arrived or not.
    pub(super) published: u64,
    pub(super) waiters: Vec<Waiter>,
}

/// All cells.
#[derive(Debug, Default)]
pub(super) struct Cells {
    numbers: FxHashMap<(Rank, u64), u32>,
    cells: Vec<CellState>,
}

impl Cells {
    /// The bits of the cell at `at` of a rank's window.
    pub(super) fn bits(&self, rank: Rank, at: u64) -> u64 {
        self.numbers.get(&(rank, at)).map_or(0, |&number| self.cells[number as usize].bits)
    }

    /// The number of the cell at `at` of a rank's window.
    pub(super) fn number(&mut self, rank: Rank, at: u64) -> u32 {
        *self.numbers.entry((rank, at)).or_insert_with(|| {
            self.cells.push(CellState::default());
            (self.cells.len() - 1) as u32
        })
    }

    pub(super) fn cell(&self, number: u32) -> &CellState {
        &self.cells[number as usize]
    }

    pub(super) fn cell_mut(&mut self, number: u32) -> &mut CellState {
        &mut self.cells[number as usize]
    }
}
