//! Regions of what is announced piece by piece, or row by row.
//!
//! Within a node a cell costs nothing, so kernels say of each piece of offered rows, and of each row of low latency, when it is there. A
//! layout has room for that where it was made with [`Layout::with_kernels`]; for the rows alone, where its settings say
//! [`low_latency_announced`](crate::Settings::low_latency_announced): roles do the same then.

use super::cut::Cut;
use super::{CELL_BYTES, Layout, RowFormat, SLOT_ALIGN, round_up};
use crate::error::Error;
use crate::shape::Shape;
use crate::terms::{Offset, Span};
use crate::topology::{Rank, Topology};

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
    /// Those that roles use; the others would begin at the end of the window.
    pub(super) const fn of_roles(low_cells: Offset, low_heads: Offset, end: u64) -> Self {
        Self { pieces: Offset(end), low_cells, low_heads, low_far: Offset(end) }
    }

    /// Takes the cells of low-latency rows, if there are to be any.
    pub(super) fn cut_cells(cut: &mut Cut, shape: &Shape, topology: &Topology, on: bool) -> Offset {
        let writers = 4 * u64::from(topology.ranks()) * u64::from(on);
        cut.take(writers.checked_mul(cells_of_writer(shape) * CELL_BYTES))
    }

    /// Takes the headers that travel ahead of them.
    pub(super) fn cut_heads(cut: &mut Cut, topology: &Topology, row: &RowFormat, tokens: u32, on: bool) -> Offset {
        let sources = 2 * u64::from(topology.ranks()) * u64::from(on);
        cut.take(sources.checked_mul(u64::from(tokens) * row.header_bytes()))
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
        let (shape, topology) = (self.shape(), self.topology());
        let (ranks, low) = (u64::from(topology.ranks()), self.settings().low_latency());
        let beyond = ranks - u64::from(topology.ranks_per_node());
        let mut cut = Cut::from(self.window_bytes());
        let pieces = cut.take((2 * ranks).checked_mul(u64::from(PIECES) * CELL_BYTES));
        let has = self.settings().low_latency_announced();
        let low_cells = Announced::cut_cells(&mut cut, shape, topology, low && !has);
        let low_heads = Announced::cut_heads(&mut cut, topology, self.row(), shape.max_tokens(), low && !has);
        let low_far = cut.take((beyond * u64::from(low)).checked_mul(self.low_far_bytes()));
        let Announced { low_cells, low_heads, .. } =
            if has { self.announced } else { Announced::of_roles(low_cells, low_heads, 0) };
        self.announced = Announced { pieces, low_cells, low_heads, low_far };
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
    fn more_rows_than_can_be_numbered_are_refused() {
        let topology = Topology::new(1, 2).unwrap();
        let made = |max_tokens| {
            let shape = Shape::builder().experts(2).topk(1).hidden(16).max_tokens(max_tokens).build().unwrap();
            let settings = Settings::builder(&shape, &topology).low_latency(true);
            let told = settings.low_latency_announced(true).build().err();
            let cut = Layout::new(&shape, &topology, &settings.build().unwrap().with_announced_rows()).err();
            [told, cut].map(|error| error.map(|error| error.to_string()))
        };
        let limit = "max tokens is 65537, allowed: at most 65536 where rows are announced".to_owned();
        assert_eq!(made(65536), [None, None]);
        assert_eq!(made(65537), [Some(limit.clone()), Some(limit)]);
    }

    /// Roles have the same places, between their other regions; and kernels whose settings say so have them once.
    #[test]
    fn cells_and_headers_of_rows_fill_their_regions() {
        let topology = Topology::new(2, 2).unwrap();
        let shape = Shape::builder().experts(4).topk(1).hidden(16).max_tokens(21).build().unwrap();
        let settings = Settings::builder(&shape, &topology).low_latency(true).low_latency_announced(true);
        let roles = Layout::new(&shape, &topology, &settings.build().unwrap()).unwrap();
        let kernels = roles.clone().with_kernels().unwrap();
        for layout in [&roles, &kernels] {
            let region = |name| {
                let mut all = layout.regions().into_iter().filter(move |region| region.name == name);
                let span = all.next().unwrap().span;
                assert!(all.next().is_none(), "{name}");
                span
            };
            let (cells, heads) = (region("low cells"), region("low heads"));
            assert_eq!(layout.low_cell(0, 0, Rank(0), 0), cells.offset);
            assert_eq!(round_up(layout.low_cell(1, 1, Rank(3), 20).0 + CELL_BYTES, SLOT_ALIGN), cells.end());
            assert_eq!(layout.low_head(0, Rank(0), 0).offset, heads.offset);
            assert_eq!(round_up(layout.low_head(1, Rank(3), 20).end(), SLOT_ALIGN), heads.end());
            assert!(layout.zeroed().offset <= cells.offset && cells.end() <= layout.zeroed().end());
        }
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
