//! Cells, made when they are first published or waited on, and who waits for them.

use ep_core::port::{Cell, Counter};
use ep_core::topology::MAX_RANKS;
use ep_core::{Layout, Rank};

use super::pairs::{Key, Pairs};

/// A port's wait: the port, and which of its needs.
pub(super) type Waiter = (u32, u32);

/// One cell.
#[derive(Debug, Default)]
pub(super) struct CellState {
    /// What its reader sees.
    pub(super) bits: u64,
    pub(super) waiters: Waiters,
}

/// Who waits for a cell, in the order in which they came. Mostly it is one: nobody has to look elsewhere for it.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// With 1 added to the port: 0 is nobody.
    first: Waiter,
    more: Option<Box<More>>,
}

#[derive(Debug)]
struct More(Vec<Waiter>);

impl Waiters {
    pub(super) fn add(&mut self, (port, need): Waiter) {
        match &mut self.more {
            _ if self.first.0 == 0 => self.first = (port + 1, need),
            Some(more) => more.0.push((port, need)),
            none => *none = Some(Box::new(More(vec![(port, need)]))),
        }
    }

    pub(super) fn forget(&mut self, (port, need): Waiter) {
        let more = self.more.as_mut().map(|more| &mut more.0);
        if self.first == (port + 1, need) {
            let next = more.filter(|more| !more.is_empty()).map(|more| more.remove(0));
            self.first = next.map_or((0, 0), |(port, need)| (port + 1, need));
        } else if let Some(more) = more {
            more.retain(|&other| other != (port, need));
        }
    }

    /// The one that came after `at` others.
    pub(super) fn get(&self, at: usize) -> Option<Waiter> {
        match at.checked_sub(1) {
            None => self.first.0.checked_sub(1).map(|port| (port, self.first.1)),
            Some(at) => self.more.as_ref()?.0.get(at).copied(),
        }
    }
}

/// What the writer of a cell needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    /// The number of the cell.
    pub(super) cell: u32,
    published: u32,
}

/// All cells.
#[derive(Debug)]
pub(super) struct Cells {
    ranks: u32,
    /// By reader, in each bank, and writer.
    cells: Pairs<CellState, 3>,
    /// What was last published, arrived or not: by writer, in each bank, and reader, so that who publishes to all finds one
    /// beside the other.
    published: Pairs<u64, 3>,
}

impl Cells {
    pub(super) fn new(ranks: u32) -> Self {
        Self { ranks, cells: Pairs::new(2 * ranks, ranks), published: Pairs::new(2 * ranks, ranks) }
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

    /// What the writer of a cell of `reader` needs: the number of the cell, and that of what was last published.
    pub(super) fn target(&mut self, layout: &Layout, reader: Rank, cell: Cell, generation: u16) -> Target {
        let (first, key) = self.place(layout, cell.writer, cell, generation);
        let key = match key {
            // Readers of a writer's cell are told apart by more than its place.
            Key::Some(at) => Key::Some(at * u64::from(MAX_RANKS) + u64::from(reader.0)),
            every => every,
        };
        let published = self.published.number(first, reader, key);
        Target { cell: self.number(layout, reader, cell, generation), published }
    }

    /// Where a cell is found from the one or the other side.
    fn place(&self, layout: &Layout, side: Rank, cell: Cell, generation: u16) -> (Rank, Key) {
        let key = match cell.counter {
            Counter::Even => Key::Every(0),
            Counter::Odd => Key::Every(1),
            Counter::Received => Key::Every(2),
            _ => Key::Some(layout.cell(cell, generation).0),
        };
        (Rank(u32::from(generation % 2) * self.ranks + side.0), key)
    }

    /// What was last published, arrived or not.
    pub(super) fn published_mut(&mut self, target: Target) -> &mut u64 {
        self.published.get_mut(target.published)
    }

    pub(super) fn cell(&self, number: u32) -> &CellState {
        self.cells.get(number)
    }

    pub(super) fn cell_mut(&mut self, number: u32) -> &mut CellState {
        self.cells.get_mut(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_stay_in_the_order_in_which_they_came() {
        let mut waiters = Waiters::default();
        let all = |waiters: &Waiters| (0..).map_while(|at| waiters.get(at)).map(|(port, _)| port).collect::<Vec<_>>();
        assert_eq!(all(&waiters), []);
        (0..=4).for_each(|port| waiters.add((port, 0)));
        waiters.forget((1, 1));
        assert_eq!(all(&waiters), [0, 1, 2, 3, 4]);
        waiters.forget((0, 0));
        waiters.forget((1, 0));
        waiters.forget((3, 0));
        waiters.add((5, 0));
        assert_eq!(all(&waiters), [2, 4, 5]);
        [2, 4, 5].iter().for_each(|&port| waiters.forget((port, 0)));
        assert_eq!(all(&waiters), []);
    }
}
