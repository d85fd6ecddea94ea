//! Launches for rows by expert: behind a dispatch, and before a combine.

use std::sync::{Arc, OnceLock};

use super::aside::multiprocessors_beside;
use super::{Call, RankDevice};
use crate::args::{self, SLOTS_WARPS};
use crate::driver::{DeviceMemory, Launch, Mode, Scratch, Stream};
use crate::error::CudaError;

/// Words that blocks tell each other, at most: with more experts fewer blocks share the work.
const MOST_WORDS: u32 = 1 << 20;

/// Rows for which there is a block, as long as there may be more: one for each of its warps. A block has to hear of all before it, so small batches have few.
const ROWS_OF_BLOCK: u32 = SLOTS_WARPS;

/// What blocks that order rows by expert tell each other.
#[derive(Debug)]
pub(super) struct Shares {
    /// u64 `[blocks, local experts]`, zero at first.
    told: DeviceMemory,
    blocks: u32,
    /// Tables of blocks that have no room for them in shared memory: taken by the first call that needs them, and kept, as a graph uses them, too.
    tables: OnceLock<Scratch>,
}

/// Bytes of a block's tables.
const fn table_bytes(local_experts: u32) -> usize {
    4 * (2 + SLOTS_WARPS) as usize * local_experts as usize
}

impl Shares {
    pub(super) fn new(stream: &Stream, local_experts: u32) -> Result<Self, CudaError> {
        let blocks = multiprocessors_beside(stream.device()).min(MOST_WORDS / local_experts).max(1);
        let told = DeviceMemory::zeroed(stream, 8 * blocks as usize * local_experts as usize)?;
        Ok(Self { told, blocks, tables: OnceLock::new() })
    }

    /// Kernels that nobody can wait for may use it.
    pub(super) fn lose(&mut self) {
        self.told.lose();
    }

    /// Whether blocks need their tables outside of shared memory.
    pub(super) fn needs_tables(&self, stream: &Stream, local_experts: u32) -> bool {
        table_bytes(local_experts) > stream.device().shared_memory() as usize
    }

    /// Where the tables of all blocks lie, of `needed` bytes each.
    fn tables(&self, stream: &Arc<Stream>, needed: usize) -> Result<u64, CudaError> {
        if let Some(tables) = self.tables.get() {
            return Ok(tables.address());
        }
        let tables = Scratch::of(stream, self.blocks as usize, needed)?;
        Ok(self.tables.get_or_init(|| tables).address())
    }
}

impl RankDevice {
    /// Finds where the choices of rows that came stand by expert; `args` without what this fills in: memory for the work.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn slots(&self, call: Call, args: &args::Slots) -> Result<(), CudaError> {
        let blocks = args.rows.div_ceil(ROWS_OF_BLOCK).clamp(1, self.shares.blocks);
        let local_experts = self.view.w.local_experts;
        let needed = table_bytes(local_experts);
        let (tables, shared_memory) = match self.shares.needs_tables(&self.stream, local_experts) {
            true => (self.shares.tables(&self.stream, needed)?, 0),
            false => (0, needed as u32),
        };
        let args = args::Slots { told: self.shares.told.address(), tables, ..*args };
        let shape = Launch { blocks, threads: 32 * SLOTS_WARPS, shared_memory, mode: Mode::Plain };
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.slots, shape, call, &args) }
    }

    /// Copies rows that came to their slots.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn spread(&self, call: Call, args: &args::Spread) -> Result<(), CudaError> {
        let rows = if args.zeros > 0 { args.rows.max(args.room) } else { args.rows };
        let shape = if args.end_lot < args.lots { self.beside(rows) } else { self.local(rows) };
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.spread, shape, call, args) }
    }

    /// Sums the results of each received row's choices. Aside it counts them, for a combine that [waits for them](super::combine::Offered::Folded).
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn fold(&self, call: Call, args: &args::Fold) -> Result<(), CudaError> {
        let (shape, copied) =
            if call.is_aside { (self.beside(args.rows), self.copied.address()) } else { (self.local(args.rows), 0) };
        let args = args::Fold { copied, ..*args };
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.fold, shape, call, &args) }
    }
}
