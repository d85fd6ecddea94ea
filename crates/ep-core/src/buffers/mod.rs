//! Rows in a CPU's memory: [`HostRows`], owned or leased from the window's [`Arena`], what they lie in, and how large they are.

mod apart;
mod arena;
mod pieces;
mod pool;
mod rows;
mod spans;

pub use apart::Scales;
pub use arena::{Arena, Held, Lease};
pub use pieces::{Age, Ages, Piece};
pub use pool::Buffer;
pub(crate) use pool::Pool;
pub use rows::HostRows;

/// What a check must know of rows in some machine's memory.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// How many.
    pub rows: u32,
    /// Bytes of each.
    pub row_bytes: usize,
    /// Whether codes and scales lie apart: FP8 rows of a dispatch.
    pub are_apart: bool,
}
