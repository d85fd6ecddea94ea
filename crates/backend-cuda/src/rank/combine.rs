//! Launches of a combine.

use ep_core::device::{Task, block_roles};
use ep_core::layout::{Kind, NO_BASE};
use ep_core::port::Duty;

use super::{Call, RankDevice};
use crate::args::{self, CHUNK_STATE_BYTES, COMBINE_WARPS, COUNTED, RING_WARPS, ROUTE_BYTES, SOURCE_BYTES};
use crate::driver::Launch;
use crate::error::CudaError;

/// Bytes that a warp has in flight of each rank's row, where it sums rows of up to four ranks, or of more: `EP_PART`.
const PARTS: [u32; 2] = [1024, 512];
/// Bytes of rows that all warps have in flight together, at most. Half of it fills the links of an H200; what is asked for beyond that
/// queues there, and before copiers: with 5.5 MB a combine of rows that lie anywhere takes a fifth longer.
const FLIGHT: u32 = 2 << 20;
/// Warps of a block that copy rows into the window, where they are not there. More copy sooner and pull later: on the whole slower.
const COPIERS: u32 = 2;
/// Chunks of rows that each of them has in shared memory.
const STAGES: u32 = 4;
/// Bytes of a chunk at most.
const CHUNK: u32 = 16 << 10;

impl RankDevice {
    /// Pulls and sums; rows that were not offered come through rings. Where the own rows are not in the offered block yet, it `copies` them
    /// there, all but those of the own rank; `args` without what only this needs.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn combine(&self, call: Call, args: &args::CombineRing, copies: bool) -> Result<(), CudaError> {
        if let Some(offer_none) = self.kernels.offer_none {
            let shape = Launch { blocks: 1, threads: 32, shared_memory: 0, cooperative: false };
            // SAFETY: as the caller promises, for both.
            return unsafe {
                self.launch(offer_none, shape, call, args)?;
                self.combine_ring(call, args)
            };
        }
        // A rank alone has no peers that pull.
        let copiers = if copies && self.ranks() > 1 { COPIERS } else { 0 };
        let pulling = self.pulling_warps(self.blocks).min(COMBINE_WARPS - copiers);
        let state = (self.ranks() * (SOURCE_BYTES + ROUTE_BYTES + 4 * pulling)).next_multiple_of(128);
        let mut shape =
            Launch { blocks: self.blocks, threads: 32 * (pulling + copiers), shared_memory: state, cooperative: true };
        // Pullers first: they meet by themselves, as the block's first threads. One of the copiers tells which rows are there.
        let block = block_roles(&[
            (Duty::Reducer, Task::Rows, pulling),
            (Duty::Returner, Task::Tail, copiers.min(1)),
            (Duty::Returner, Task::Rows, copiers.saturating_sub(1)),
        ]);
        let (roles, role_count) = (self.roles.reducers(), args.rings.channels);
        let mut own = args::CombineOffered { ring: args::CombineRing { roles, role_count, ..*args }, block };
        if copiers > 0 {
            let own = &mut own.ring;
            let state = state + (copiers * (STAGES * CHUNK_STATE_BYTES + 4 * COUNTED)).next_multiple_of(128);
            // Beside what kernels keep by themselves.
            let room = self.stream.device().shared_memory().saturating_sub(state + 256);
            let chunk = (room / (copiers * STAGES) / 128 * 128).clamp(128, CHUNK);
            (own.combine.copiers, own.combine.stages, own.combine.chunk) = (copiers, STAGES, chunk);
            own.combine.copied = self.copied.address();
            shape.shared_memory = state + copiers * STAGES * chunk;
        }
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.combine(self.ranks()), shape, call, &own) }?;
        // The kernel says the same: it gives no rows back, and each of its blocks reduces one channel at most.
        let leaves = args.combine.base == NO_BASE || args.rings.channels > self.blocks;
        // SAFETY: as the caller promises.
        if leaves { unsafe { self.combine_ring(call, args) } } else { Ok(()) }
    }

    /// Warps of each of `blocks` blocks that pull.
    pub(super) fn pulling_warps(&self, blocks: u32) -> u32 {
        let part = PARTS[usize::from(self.ranks() > 4)];
        // Of a token there are no more rows than it has choices, and no more are pulled at once than the widest kernel takes.
        let rows = self.ranks().min(self.view.w.topk).min(8);
        (FLIGHT / (blocks * part * rows)).max(1)
    }

    /// What a combine has left to rings.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    unsafe fn combine_ring(&self, call: Call, args: &args::CombineRing) -> Result<(), CudaError> {
        let (roles, role_count) = self.roles.of(Kind::Combine, args.rings.channels);
        let shared_memory = self.ranks() * (SOURCE_BYTES + RING_WARPS * ROUTE_BYTES);
        let args = &args::CombineRing { roles, role_count, ..*args };
        // SAFETY: as the caller promises; the roles are this value's.
        unsafe { self.launch(self.kernels.combine_ring, self.for_roles(role_count, shared_memory), call, args) }
    }
}
