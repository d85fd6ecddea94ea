//! Regions that kernels alone use: what is announced piece by piece, or row by row.
//!
//! Within a node a cell costs nothing, so kernels say of each piece of offered rows, and of each row of low latency, when it is there. A
//! layout has room for that where it was made with [`Layout::with_kernels`].

use super::cut::Cut;
use super::{CELL_BYTES, Layout, SLOT_ALIGN, round_up};
use crate::error::Error;
use crate::shape::Shape;
use crate::terms::{Offset, Span};
use crate::topology::Rank;

/// Pieces of the rows for each rank, which a combine's owner offers one by one.
pub const PIECES: u32 = 32;

/// Where these regions begin; each without room unless the window has them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announced {
    /// Cells of pieces: 2 generation banks x writers x pieces.
    pub(super) pieces: Offset,
    /// Cells of low-latency rows: 2 generation banks x 2 operation banks x writers x tokens.
    pub(super) low_cells: Offset,
    /// Headers of low-latency rows, which travel ahead of them: 2 operation banks x sources x tokens.
    pub(super) low_heads: Offset,
    /// What low latency stages for ranks of other nodes: for each a part of a bank, and headers.
    pub(super) low_far: Offset,
}

impl Announced {
    pub(super) const fn none(end: u64) -> Self {
        Self { pieces: Offset(end), low_cells: Offset(end), low_heads: Offset(end), low_far: Offset(end) }
    }
}

/// Cells of one writer's low-latency rows in one bank: whole lines, as a line has one writer (F4).
pub(super) fn cells_of_writer(shape: &Shape) -> u64 {
    round_up(u64::from(shape.max_tokens()) * CELL_BYTES, SLOT_ALIGN) / CELL_BYTES
}

impl Layout {
    /// This layout with the regions that kernels use, behind all others.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the window would exceed 2^63 bytes.
    pub fn with_kernels(mut self) -> Result<Self, Error> {
        let (ranks, tokens) = (u64::from(self.topology().ranks()), u64::from(self.shape().max_tokens()));
        let low = u64::from(self.settings().low_latency());
        let beyond = ranks - u64::from(self.topology().ranks_per_node());
        let mut cut = Cut::from(self.window_bytes());
        self.announced = Announced {
            pieces: cut.take((2 * ranks).checked_mul(u64::from(PIECES) * CELL_BYTES)),
            low_cells: cut.take((4 * ranks * low).checked_mul(cells_of_writer(self.shape()) * CELL_BYTES)),
            low_heads: cut.take((2 * ranks * low).checked_mul(tokens * self.row().header_bytes())),
            low_far: cut.take((beyond * low).checked_mul(self.low_far_bytes())),
        };
        self.end_at(&cut)?;
        Ok(self)
    }

    /// The cell that says that a piece of `writer`'s rows for this rank is there, in the bank of `generation`.
    pub fn piece_cell(&self, generation: u16, writer: Rank, piece: u32) -> Offset {
        let line = u64::from(generation % 2) * u64::from(self.topology().ranks()) + u64::from(writer.0);
        self.announced.pieces.plus((line * u64::from(PIECES) + u64::from(piece)) * CELL_BYTES)
    }

    /// The cell of `writer`'s row of `token` in low latency, in the banks of `generation` and `op`: a row of a dispatch, or all that the
    /// writer has for the token in a combine.
    pub fn low_cell(&self, generation: u16, op: u64, writer: Rank, token: u32) -> Offset {
        let bank = u64::from(generation % 2) * 2 + op % 2;
        let first = (bank * u64::from(self.topology().ranks()) + u64::from(writer.0)) * cells_of_writer(self.shape());
        self.announced.low_cells.plus((first + u64::from(token)) * CELL_BYTES)
    }

    /// The header of the low-latency row at `position` among those of `source`.
    pub fn low_head(&self, op: u64, source: Rank, position: u32) -> Span {
        let part = op % 2 * u64::from(self.topology().ranks()) + u64::from(source.0);
        let bytes = self.row().header_bytes();
        let at = part * u64::from(self.shape().max_tokens()) + u64::from(position);
        self.announced.low_heads.plus(at * bytes).span(bytes)
    }

    /// Where rank `me` stages in its own window what it has for `peer`, a rank of another node, in low latency: rows or results as they lie in
    /// [`low_part`](Self::low_part) of that rank's window.
    pub fn low_far(&self, me: Rank, peer: Rank) -> Span {
        let before = if peer < me { peer.0 } else { peer.0 - self.topology().ranks_per_node() };
        let at = u64::from(before) * self.low_far_bytes();
        self.announced.low_far.plus(at).span(self.low_part(0, me).len)
    }

    /// And the headers of these rows, as they lie in its [`low_head`](Self::low_head)s.
    pub fn low_far_heads(&self, me: Rank, peer: Rank) -> Span {
        let bytes = u64::from(self.shape().max_tokens()) * self.row().header_bytes();
        Offset(self.low_far(me, peer).end()).span(bytes)
    }

    /// From one rank's part of the staging memory to the next's.
    pub(super) fn low_far_bytes(&self) -> u64 {
        let heads = u64::from(self.shape().max_tokens()) * self.row().header_bytes();
        self.low_part(0, Rank(0)).len.saturating_add(round_up(heads, SLOT_ALIGN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Settings;
    use crate::topology::Topology;

    #[test]
    fn a_line_of_cells_has_one_writer() {
        let topology = Topology::new(1, 3).unwrap();
        let shape = Shape::builder().experts(3).topk(1).hidden(16).max_tokens(5).build().unwrap();
        let settings = Settings::builder(&shape, &topology).low_latency(true).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        let kernels = layout.clone().with_kernels().unwrap();
        assert!(kernels.window_bytes() > layout.window_bytes());
        let line = |generation, op, writer, token| kernels.low_cell(generation, op, Rank(writer), token).0 / SLOT_ALIGN;
        for (generation, op) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
            for writer in 0..2 {
                assert!(line(generation, op, writer, 4) < line(generation, op, writer + 1, 0));
            }
        }
        let last = kernels.low_head(1, Rank(2), 4);
        assert_eq!(round_up(last.end(), SLOT_ALIGN), kernels.window_bytes());
    }

    #[test]
    fn what_is_staged_for_ranks_of_other_nodes_lies_apart() {
        let topology = Topology::new(3, 2).unwrap();
        let shape = Shape::builder().experts(6).topk(2).hidden(16).max_tokens(5).build().unwrap();
        let cut = |low| {
            let settings = Settings::builder(&shape, &topology).low_latency(low).build().unwrap();
            Layout::new(&shape, &topology, &settings).unwrap().with_kernels().unwrap()
        };
        let layout = cut(true);
        for me in topology.all() {
            let far = topology.all().filter(|&peer| topology.node_of(peer) != topology.node_of(me));
            let staged = far.flat_map(|peer| [layout.low_far(me, peer), layout.low_far_heads(me, peer)]);
            let staged: Vec<_> = staged.collect();
            assert_eq!(staged.len(), 8);
            assert!(staged.is_sorted_by(|one, next| one.end() <= next.offset.0), "{staged:?}");
            assert!(staged[0].offset.0 >= layout.low_head(1, Rank(5), 4).end());
            assert_eq!(round_up(staged[7].end(), SLOT_ALIGN), layout.window_bytes());
            assert_eq!(staged[0].len, layout.low_part(1, me).len);
        }
        assert_eq!(cut(false).announced.low_far.0, cut(false).window_bytes(), "no low latency, no staging memory");
    }
}
