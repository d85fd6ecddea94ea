//! What the kernel takes that moves the bytes of a network made of software.

use ep_core::c_struct;

/// Threads of its blocks.
pub(crate) const MOVE_THREADS: u32 = 512;
/// Copies of a launch at most, and cells.
pub(crate) const MOST_MOVES: usize = 32;
/// Bytes that a copy begins at a multiple of, at both ends, and consists of.
pub(crate) const MOVE_UNIT: u64 = 16;

c_struct! {
    /// Parameters of ep_move_kernel.
    pub(crate) struct Moves = "EpMovesArgs" {
        /// Where each copy reads.
        pub(crate) from: [u64; MOST_MOVES],
        /// Where it writes.
        pub(crate) to: [u64; MOST_MOVES],
        /// Its size.
        pub(crate) bytes: [u64; MOST_MOVES],
        /// Addresses of cells that are stored behind all copies.
        pub(crate) at: [u64; MOST_MOVES],
        /// Their words.
        pub(crate) bits: [u64; MOST_MOVES],
        /// Address of a word of the host's memory that is stored behind the cells; 0 for none.
        pub(crate) mark_at: u64,
        /// What is stored there.
        pub(crate) mark: u64,
        /// Address of a u32 of this GPU, zero between launches: blocks that have copied all.
        pub(crate) done: u64,
        /// Copies.
        pub(crate) moves: u32,
        /// Cells.
        pub(crate) cells: u32,
    }
}
