//! Launches of a dispatch and a combine by way of outboxes; and what whoever may still be pulling is told.

use ep_core::Rank;
use ep_core::device::{BlockRole, Task, block_roles};
use ep_core::layout::KernelRings;
use ep_core::port::Duty;
use ep_core::settings::{OutboxSteps, least_window};

use super::{Call, RankDevice};
use crate::args::{
    self, BARRIER, ITEM_BYTES, LAID_LOG, OUTBOX_END_BYTES, PULLED_FROM_BYTES, PULLED_LOG, PULLED_WARPS,
    RING_SOURCE_BYTES, SumShape,
};
use crate::driver::{Launch, Mode};
use crate::error::CudaError;

/// Bytes of a part of a row at most: many are on their way at once, whatever the hidden size.
const PART: u64 = 8 << 10;
/// Warps of a dispatch block that write heads.
const WRITERS: u32 = 3;
/// Stages of a warp that moves rows.
const STAGES: u32 = 4;
/// Warps of a combine block that lay rows.
const COPIERS: u32 = 2;
/// Stages of a warp that sums.
const SUM_STAGES: u32 = 3;

/// Rings whose tails and credit are told in the call's steps.
fn stepped(rings: KernelRings, steps: &OutboxSteps) -> KernelRings {
    KernelRings { chunk: steps.chunk, credit: steps.credit, ..rings }
}

/// What the warps of a block do.
type Roles = [BlockRole; PULLED_WARPS as usize];

/// Warps that have a task: the others are not launched.
fn warps_of(roles: &Roles) -> u32 {
    roles.iter().filter(|role| role.task != Task::None as u32).count() as u32
}

/// How the blocks of a dispatch are made, and what they have in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct DispatchBlock {
    copiers: u32,
    pullers: u32,
    room: u32,
    piece: u32,
    pieces: u32,
    shared_memory: u32,
}

impl DispatchBlock {
    /// For rows of `codes` and `scales` bytes, in `memory` bytes of shared memory.
    fn new(codes: u64, scales: u64, ranks: u32, memory: u32) -> Self {
        let pieces = codes.div_ceil(PART).max(1);
        let piece = codes.div_ceil(pieces).next_multiple_of(16).max(16);
        let room = (piece + scales.next_multiple_of(16)).next_multiple_of(128) as u32;
        let state = |flows: u32| {
            let counts = 4 * (PULLED_WARPS + 2 + flows * (3 * ranks + PULLED_LOG));
            (flows * (STAGES * (ITEM_BYTES + BARRIER) + ITEM_BYTES)
                + ranks * (2 * OUTBOX_END_BYTES + PULLED_FROM_BYTES)
                + counts)
                .next_multiple_of(128)
        };
        // One in three lays, two pull: a row is laid once for several that pull it. Beside them are writers, teller and creditor.
        let fits = |flows: &u32| state(*flows) + flows * STAGES * room + 256 <= memory;
        let flows = (2..=PULLED_WARPS - WRITERS - 2).rev().find(fits).unwrap_or(2);
        let copiers = (flows / 3).max(1);
        let shared_memory = state(flows) + flows * STAGES * room;
        Self { copiers, pullers: flows - copiers, room, piece: piece as u32, pieces: pieces as u32, shared_memory }
    }

    fn roles(&self) -> Roles {
        block_roles(&[
            (Duty::Sender, Task::Rows, self.copiers),
            (Duty::Sender, Task::Headers, WRITERS),
            (Duty::Receiver, Task::Rows, self.pullers),
            (Duty::Sender, Task::Tail, 1),
            (Duty::Receiver, Task::Credit, 1),
        ])
    }
}

impl RankDevice {
    /// Tells `peer` of this node that this rank goes on without it, before anything is written in the next generation: what it still pulls here may not
    /// be what was offered.
    pub(crate) fn give_up(&self, peer: Rank) -> Result<(), CudaError> {
        let shape = Launch { blocks: 1, threads: 32, shared_memory: 0, mode: Mode::Plain };
        // SAFETY: nothing is named.
        unsafe { self.launch(self.kernels.give_up, shape, Call::none(), &args::OfPeer::from(peer)) }
    }

    /// Lays rows in the outbox, and pulls what is for this rank; `ring` without what this fills in: the call's steps.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn dispatch_pulled(
        &self,
        call: Call,
        ring: &args::DispatchRing,
        steps: &OutboxSteps,
        tokens_of: u64,
    ) -> Result<(), CudaError> {
        let w = &self.view.w;
        let memory = self.stream.device().shared_memory();
        let block = DispatchBlock::new(w.scales_offset, w.scales_stride, self.ranks(), memory);
        let scales = [ring.scales, ring.scales_token, w.scales_stride];
        let bulk_scales = ring.scales_word == 4 && scales.iter().all(|value| value.is_multiple_of(16));
        let args = args::DispatchPulled {
            ring: args::DispatchRing { rings: stepped(ring.rings, steps), ..*ring },
            tokens_of,
            arrived: self.arrived.address(),
            copiers: block.copiers,
            writers: WRITERS,
            pullers: block.pullers,
            stages: STAGES,
            room: block.room,
            piece: block.piece,
            pieces: block.pieces,
            piece_slots: steps.piece,
            bulk_scales: bulk_scales.into(),
            window: steps.window,
            block: block.roles(),
        };
        let shape = Launch {
            blocks: self.blocks.min(ring.rings.channels),
            threads: 32 * warps_of(&args.block),
            shared_memory: block.shared_memory,
            mode: Mode::Cooperative,
        };
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.dispatch_pulled, shape, call, &args) }
    }

    /// Lays rows in the outboxes for their ranks, and sums what is for this rank; `ring` without the call's steps.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn combine_pulled(
        &self,
        call: Call,
        ring: &args::CombineRing,
        steps: &OutboxSteps,
    ) -> Result<(), CudaError> {
        let (w, ranks) = (&self.view.w, self.ranks());
        let block = CombineBlock::new(w.result_stride, w.topk, ranks, self.stream.device().shared_memory());
        let weights = u64::from(w.topk) * 4;
        let args = args::CombinePulled {
            window: steps.window,
            least_window: least_window(ring.rings.slots),
            ring: args::CombineRing { rings: stepped(ring.rings, steps), ..*ring },
            pullers: block.pullers,
            sums: block.sums,
            copiers: COPIERS,
            stages: STAGES,
            piece_room: block.room,
            piece: block.piece,
            pieces: block.pieces,
            bulk_weights: (ring.combine.own_weights.is_multiple_of(16) && weights.is_multiple_of(16)).into(),
            block: block.roles(),
        };
        let shape = Launch {
            blocks: self.blocks.min(ring.rings.channels),
            threads: 32 * warps_of(&args.block),
            shared_memory: block.shared_memory,
            mode: Mode::Cooperative,
        };
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.combine_pulled, shape, call, &args) }
    }
}

/// How the blocks of a combine are made, and what they have in shared memory.
#[derive(Clone, Copy, PartialEq, Debug)]
struct CombineBlock {
    pullers: u32,
    sums: SumShape,
    room: u32,
    piece: u32,
    pieces: u32,
    shared_memory: u32,
}

impl CombineBlock {
    /// For results of `bytes` bytes with `topk` weights, in `memory` bytes of shared memory.
    fn new(bytes: u64, topk: u32, ranks: u32, memory: u32) -> Self {
        let pieces = bytes.div_ceil(PART).max(1);
        let piece = bytes.div_ceil(pieces).next_multiple_of(16).max(16);
        let room = (piece + (u64::from(topk) * 4).next_multiple_of(16)).next_multiple_of(128) as u32;
        let sums = SumShape::new(bytes as u32, ranks, SUM_STAGES);
        let laying = COPIERS * (STAGES * (ITEM_BYTES + BARRIER + room) + ITEM_BYTES + 4 * LAID_LOG);
        let per_rank = 2 * OUTBOX_END_BYTES + RING_SOURCE_BYTES + 8 * COPIERS + 4;
        let takes = |pullers: u32| {
            let summing = pullers * (sums.bytes() + 4 + 4 * ranks);
            // Behind the state the stages begin anew at a multiple of 128.
            laying + ranks * per_rank + summing + 128
        };
        let pullers = (1..=PULLED_WARPS - COPIERS - 2).rev().find(|&warps| takes(warps) + 256 <= memory).unwrap_or(1);
        let shared_memory = takes(pullers);
        Self { pullers, sums, room, piece: piece as u32, pieces: pieces as u32, shared_memory }
    }

    fn roles(&self) -> Roles {
        block_roles(&[
            (Duty::Reducer, Task::Rows, self.pullers),
            (Duty::Returner, Task::Rows, COPIERS),
            (Duty::Returner, Task::Tail, 1),
            (Duty::Reducer, Task::Credit, 1),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fits_into_shared_memory_whatever_the_row() {
        for memory in [96 << 10, 163 << 10, 227 << 10] {
            for codes in [16, 272, 4096, 7168, 14336, 16384, 65536, 131_072] {
                for scales in [0, 4, 224, 1024] {
                    let block = DispatchBlock::new(codes, scales, 8, memory);
                    assert!(block.shared_memory + 256 <= memory, "{codes} {scales} {memory}: {block:?}");
                    assert!(block.piece * block.pieces >= codes as u32 && block.copiers >= 1 && block.pullers >= 1);
                    assert_eq!(warps_of(&block.roles()), block.copiers + block.pullers + WRITERS + 2);
                }
            }
        }
        for memory in [96 << 10, 163 << 10, 227 << 10] {
            for (bytes, ranks) in [(16, 2), (272, 8), (14336, 2), (14336, 4), (14336, 8), (14336, 72), (131_072, 8)] {
                let block = CombineBlock::new(bytes, 8, ranks, memory);
                assert!(block.shared_memory + 256 <= memory, "{bytes} {ranks} {memory}: {block:?}");
                assert!(block.sums.part <= 2048 && block.pullers >= 1);
                assert_eq!(warps_of(&block.roles()), block.pullers + COPIERS + 2);
            }
        }
        // Of the shape that is measured: 2 lay, 5 pull.
        let block = DispatchBlock::new(14336, 0, 8, 227 << 10);
        assert_eq!((block.pieces, block.piece, block.copiers + block.pullers), (2, 7168, 7));
    }
}
