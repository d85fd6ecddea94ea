//! What a rank is told of how it uses its GPU.

use crate::node::Moving;

/// How a rank uses its GPU.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Options {
    /// Blocks of the kernels that move rows.
    pub(crate) blocks: u32,
    /// Blocks that it may have at most where roles of rings need more of them: multiprocessors that are no other rank's.
    pub(crate) most: u32,
    /// Blocks of the kernels of low latency.
    pub(crate) low_blocks: u32,
    /// The same where a driver copies what goes between nodes.
    pub(crate) low_beside_copies: u32,
    /// Of the stream.
    pub(crate) priority: i32,
    /// How a network made of software moves bytes.
    pub(crate) moving: Moving,
    /// Launches that place the rows of a dispatch by expert, while rows of the one before are copied; none: by the size of the batch.
    pub(crate) launches: Option<u32>,
    /// Whether kernels are compiled for this shape alone.
    pub(crate) specialises: bool,
    /// Whether nobody else of the communicator has a stream on this GPU: one that waits would hold up theirs, as the driver has few queues.
    pub(crate) is_alone: bool,
}

#[cfg(feature = "workshop")]
impl Options {
    /// Of measurements: a block of each kind of kernels, and what is measured says with how many more.
    pub(crate) fn of_bench(low_blocks: u32) -> Self {
        let specialises = crate::build::specialises();
        Self { blocks: 1, most: u32::MAX, low_blocks, low_beside_copies: low_blocks, specialises, ..Self::default() }
    }
}
