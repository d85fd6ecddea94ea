//! Cells, made when they are first published or waited on, and who waits for them.

use std::ops::Range;

use ep_core::port::{Cell, Counter, LaneKind};
use ep_core::topology::MAX_RANKS;
use ep_core::{Layout, Rank};

use super::pairs::{Key, Pairs};

/// A port's wait: the port, and which of its needs.
pub(super) type Waiter = (u32, u32);

/// One cell. Small, since a large cluster has millions of them, of which few are waited for at a time.
#[derive(Debug, Default)]
struct CellState {
    /// What its reader sees.
    bits: u64,
    /// The number of the list of those who wait for it, counted from 1; 0 when nobody does.
    waiters: u32,
}

/// Lists of who waits for a cell, in the order in which they came.
#[derive(Debug, Default)]
struct Waiters {
    lists: Vec<Vec<Waiter>>,
    free: Vec<u32>,
}

impl Waiters {
    /// The list with a number that cells have.
    fn list(&mut self, number: u32) -> Option<&mut Vec<Waiter>> {
        self.lists.get_mut(number.checked_sub(1)? as usize)
    }

    /// Adds to the list of a cell, which is given one if it has none.
    fn add(&mut self, number: &mut u32, waiter: Waiter) {
        if *number == 0 {
            *number = self.free.pop().unwrap_or_else(|| {
                self.lists.push(Vec::new());
                self.lists.len() as u32
            });
        }
        self.list(*number).into_iter().for_each(|list| list.push(waiter));
    }

    /// Takes one out of the list of a cell, which has none any more when it was the last.
    fn forget(&mut self, number: &mut u32, waiter: Waiter) {
        let Some(list) = self.list(*number) else { return };
        list.retain(|&other| other != waiter);
        if list.is_empty() {
            self.free.push(std::mem::take(number));
        }
    }
}

/// The cells of one partition: those that its ranks read, and what they published to any.
#[derive(Debug)]
pub(super) struct Cells {
    first: u32,
    locals: u32,
    /// By reader, in each bank, and writer.
    cells: Pairs<CellState, 3>,
    /// What was last published, arrived or not: by writer, in each bank, and reader, so that who publishes to all finds one
    /// beside the other.
    published: Pairs<u64, 3>,
    waiters: Waiters,
}

impl Cells {
    /// Those of some of `ranks` ranks.
    pub(super) fn new(of: &Range<u32>, ranks: u32) -> Self {
        let locals = of.end - of.start;
        let (cells, published) = (Pairs::new(2 * locals, ranks), Pairs::new(2 * locals, ranks));
        Self { first: of.start, locals, cells, published, waiters: Waiters::default() }
    }

    /// The number of a cell of `reader`, if it was made.
    pub(super) fn find(&self, layout: &Layout, reader: Rank, cell: Cell, generation: u16) -> Option<u32> {
        let (first, key) = self.place(layout, reader, cell, generation);
        self.cells.find(first, cell.writer, key)
    }

    /// The number of a cell of `reader`.
    pub(super) fn number(&mut self, layout: &Layout, reader: Rank, cell: Cell, generation: u16) -> u32 {
        let (first, key) = self.place(layout, reader, cell, generation);
        self.cells.number(first, cell.writer, key)
    }

    /// The number of what a writer last published to a cell of `reader`.
    pub(super) fn published_number(&mut self, layout: &Layout, reader: Rank, cell: Cell, generation: u16) -> u32 {
        let (first, key) = self.place(layout, cell.writer, cell, generation);
        let key = match key {
            // Readers of a writer's cell are told apart by more than its place.
            Key::Some(at) => Key::Some(at * u64::from(MAX_RANKS) + u64::from(reader.0)),
            every => every,
        };
        self.published.number(first, reader, key)
    }

    /// Where a cell is found from the one or the other side.
    fn place(&self, layout: &Layout, side: Rank, cell: Cell, generation: u16) -> (Rank, Key) {
        let key = match (cell.lane, cell.counter) {
            (LaneKind::LowRows, Counter::Even) => Key::Every(0),
            (LaneKind::LowRows, Counter::Odd) => Key::Every(1),
            (_, Counter::Received) => Key::Every(2),
            _ => Key::Some(layout.cell(cell, generation).0),
        };
        (Rank(u32::from(generation % 2) * self.locals + side.0 - self.first), key)
    }

    /// What was last published, arrived or not.
    pub(super) fn published_mut(&mut self, number: u32) -> &mut u64 {
        self.published.get_mut(number)
    }

    /// What the reader of a cell sees.
    pub(super) fn bits(&self, number: u32) -> u64 {
        self.cells.get(number).bits
    }

    /// Raises a cell to at least `bits`; returns what its reader sees now.
    pub(super) fn raise(&mut self, number: u32, bits: u64) -> u64 {
        let cell = self.cells.get_mut(number);
        cell.bits = cell.bits.max(bits);
        cell.bits
    }

    /// Notes that somebody waits for a cell.
    pub(super) fn await_by(&mut self, number: u32, waiter: Waiter) {
        self.waiters.add(&mut self.cells.get_mut(number).waiters, waiter);
    }

    /// Notes that somebody waits for a cell no longer.
    pub(super) fn forget(&mut self, number: u32, waiter: Waiter) {
        self.waiters.forget(&mut self.cells.get_mut(number).waiters, waiter);
    }

    /// Who waits for a cell and came after `at` others.
    pub(super) fn waiter(&self, number: u32, at: usize) -> Option<Waiter> {
        let list = self.cells.get(number).waiters.checked_sub(1)?;
        self.waiters.lists[list as usize].get(at).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_stay_in_the_order_in_which_they_came() {
        let mut cells = Cells::new(&(0..2), 2);
        let numbers = [Rank(0), Rank(1)].map(|reader| cells.cells.number(reader, Rank(1), Key::Every(0)));
        let all = |cells: &Cells, at: usize| {
            (0..).map_while(|next| cells.waiter(numbers[at], next)).map(|(port, _)| port).collect::<Vec<_>>()
        };
        assert_eq!(all(&cells, 0), []);
        (0..=4).for_each(|port| cells.await_by(numbers[0], (port, 0)));
        cells.await_by(numbers[1], (9, 0));
        cells.forget(numbers[0], (1, 1));
        assert_eq!(all(&cells, 0), [0, 1, 2, 3, 4]);
        [0, 1, 3].iter().for_each(|&port| cells.forget(numbers[0], (port, 0)));
        cells.await_by(numbers[0], (5, 0));
        assert_eq!(all(&cells, 0), [2, 4, 5]);
        [2, 4, 5].iter().for_each(|&port| cells.forget(numbers[0], (port, 0)));
        cells.await_by(numbers[1], (7, 0));
        assert_eq!((all(&cells, 0), all(&cells, 1)), (vec![], vec![9, 7]));
        cells.await_by(numbers[0], (8, 0));
        assert_eq!((all(&cells, 0), cells.waiters.lists.len()), (vec![8], 2), "lists are used again");
    }
}
