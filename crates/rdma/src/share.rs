//! The two regions of a window: its rows, and its cells, which keep their order.

use ep_core::Layout;
use ep_core::port::{Offset, Span};

use crate::sys;

/// What a region of the window is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Share {
    /// All of the window, for writes of rows.
    Rows,
    /// Its cells once more. A write or an atomic into memory with relaxed ordering may become visible before the rows that it announces (rule F3).
    Cells,
}

impl Share {
    /// What others may do there. Only cells are raised by atomics, and only rows may come in any order.
    pub const fn access(self, atomics: bool, relaxed: bool) -> u32 {
        let own = match self {
            Self::Rows if relaxed => sys::ACCESS_RELAXED_ORDERING,
            Self::Cells if atomics => sys::ACCESS_REMOTE_ATOMIC,
            Self::Rows | Self::Cells => 0,
        };
        sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE | own
    }
}

/// Where the cells lie in a window.
pub fn cells_of(layout: &Layout) -> Span {
    let cells = layout.regions().into_iter().find(|region| region.name == "cells");
    cells.map_or(Offset(0).span(0), |region| region.span)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With relaxed ordering a write may pass a write, and an atomic into such memory may pass writes, too.
    #[test]
    fn cells_keep_their_order_whatever_rows_do_and_only_they_take_atomics() {
        for (atomics, relaxed) in [(false, false), (false, true), (true, false), (true, true)] {
            let (rows, cells) = (Share::Rows.access(atomics, relaxed), Share::Cells.access(atomics, relaxed));
            assert_eq!(rows & sys::ACCESS_RELAXED_ORDERING != 0, relaxed);
            assert_eq!(cells & sys::ACCESS_RELAXED_ORDERING, 0);
            assert_eq!(rows & sys::ACCESS_REMOTE_ATOMIC, 0);
            assert_eq!(cells & sys::ACCESS_REMOTE_ATOMIC != 0, atomics);
        }
    }
}
