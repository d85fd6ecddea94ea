//! A kernel that moves what a network made of software carries into a window.

use std::sync::Arc;

use crate::args::{MOST_MOVES, MOVE_THREADS, MOVE_UNIT, Moves};
use crate::build::Source;
use crate::driver::{Device, DeviceMemory, Kernel, Launch, Mode, Stream};
use crate::error::CudaError;
use crate::kernels;

/// Bytes to be copied between addresses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) bytes: u64,
}

/// A word that is to be stored, and before it its address.
type Cell = (u64, u64);

impl Move {
    /// Whether the kernel can: it has no half units.
    pub(super) const fn is_whole(&self) -> bool {
        (self.from | self.to | self.bytes).is_multiple_of(MOVE_UNIT)
    }
}

/// Launches the kernel, on one stream.
#[derive(Debug)]
pub(super) struct Mover {
    kernel: Kernel,
    blocks: u32,
    /// u32: blocks of a launch that have copied all.
    done: DeviceMemory,
}

impl Mover {
    /// One of so many blocks.
    pub(super) fn new(device: &Arc<Device>, stream: &Arc<Stream>, blocks: u32) -> Result<Self, CudaError> {
        let kernel = kernels::alone(device, Source::Move)?;
        let done = DeviceMemory::zeroed(stream, size_of::<u32>())?;
        stream.synchronize()?;
        Ok(Self { kernel, blocks, done })
    }

    /// Enqueues what was asked for: moves, in no order; then cells, each a word and its address, in theirs; then the mark.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// As [`Stream::copy_rows`] of the moves, and [`Stream::store_all`] of cells and mark. It is always the same stream.
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        moves: &[Move],
        cells: &[Cell],
        mark: Cell,
    ) -> Result<(), CudaError> {
        for args in launches(moves, cells, mark, self.done.address()) {
            // What is stored alone needs no more than a block.
            let blocks = if args.moves == 0 { 1 } else { self.blocks };
            let shape = Launch { blocks, threads: MOVE_THREADS, shared_memory: 0, mode: Mode::Dependent };
            // SAFETY: the kernel's one parameter, declared from that struct; the caller vouches for the addresses, and `done` is used by blocks that have
            // waited for the launch before, and given back in the order of the stream.
            unsafe { self.kernel.launch_alone(stream.device(), stream.raw() as usize, shape, &args) }?;
        }
        Ok(())
    }
}

/// What the launches are given that carry this out, one after the other.
fn launches(mut moves: &[Move], mut cells: &[Cell], mark: Cell, done: u64) -> Vec<Moves> {
    let mut all = Vec::new();
    loop {
        let mut args = Moves { done, ..Moves::default() };
        let (now, later) = moves.split_at(moves.len().min(MOST_MOVES));
        for (at, one) in now.iter().enumerate() {
            (args.from[at], args.to[at], args.bytes[at]) = (one.from, one.to, one.bytes);
        }
        (args.moves, moves) = (now.len() as u32, later);
        if moves.is_empty() {
            let (now, later) = cells.split_at(cells.len().min(MOST_MOVES));
            for (at, &(address, bits)) in now.iter().enumerate() {
                (args.at[at], args.bits[at]) = (address, bits);
            }
            (args.cells, cells) = (now.len() as u32, later);
        }
        let is_last = moves.is_empty() && cells.is_empty();
        if is_last {
            (args.mark_at, args.mark) = mark;
        }
        all.push(args);
        if is_last {
            return all;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However many there are: each once, cells behind all moves and in their order, and the mark with the last of them.
    #[test]
    fn launches_carry_out_all_that_was_asked_for_and_cells_behind_all_moves() {
        for (moves, cells) in [(0, 0), (1, 0), (0, 1), (32, 32), (33, 1), (64, 33), (100, 70)] {
            let asked: Vec<_> = (0..moves).map(|n| Move { from: 16 * n, to: 1 << 20, bytes: 32 + n }).collect();
            let stored: Vec<Cell> = (0..cells).map(|n| (8 * n, 100 + n)).collect();
            let all = launches(&asked, &stored, (4096, 9), 77);
            let moved = all.iter().flat_map(|one| (0..one.moves as usize).map(move |at| (one.from[at], one.bytes[at])));
            assert!(moved.eq(asked.iter().map(|one| (one.from, one.bytes))), "{moves} moves");
            let raised = all.iter().flat_map(|one| (0..one.cells as usize).map(move |at| (one.at[at], one.bits[at])));
            assert!(raised.eq(stored.iter().copied()), "{cells} cells");
            let first_cells = all.iter().position(|one| one.cells > 0).unwrap_or(all.len());
            assert!(all.iter().skip(first_cells + 1).all(|one| one.moves == 0), "a cell before a move");
            let marks: Vec<_> = all.iter().map(|one| (one.mark_at, one.mark)).collect();
            assert!(marks.iter().rev().skip(1).all(|&mark| mark == (0, 0)) && marks.last() == Some(&(4096, 9)));
            assert!(all.iter().all(|one| one.done == 77));
        }
    }

    #[test]
    fn what_has_half_units_is_left_to_the_driver() {
        let whole = |from, to, bytes| Move { from, to, bytes }.is_whole();
        assert!(whole(32, 1 << 20, 48));
        assert!(!whole(8, 16, 16) && !whole(16, 24, 16) && !whole(16, 16, 40));
    }
}
