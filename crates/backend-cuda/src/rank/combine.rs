//! Launches of a combine.

use ep_core::Error;
use ep_core::device::{Task, block_roles};
use ep_core::layout::{Kind, NO_BASE};
use ep_core::port::Duty;

use super::desk::Desk;
use super::teams::Teams;
use super::{Call, RankDevice};
use crate::args::{
    self, CHUNK_STATE_BYTES, COMBINE_BULK_WARPS, COMBINE_WARPS, COUNTED, RING_WARPS, SOURCE_BYTES, SumShape,
};
use crate::driver::{Launch, Mode};
use crate::error::CudaError;

/// Bytes that a warp has in flight of each rank's row where rows go through registers, of up to four ranks, or of more: `ep_part`.
const PARTS: [u32; 2] = [1024, 512];
/// Bytes of rows that all warps have in flight together then, at most. Half of it fills the links of an H200; what is asked for beyond that
/// queues there, and before copiers: with 5.5 MB a combine of rows that lie anywhere takes a fifth longer.
const FLIGHT: u32 = 2 << 20;
/// The same of rows that the bulk copy engine brings.
const BULK_FLIGHT: u32 = 9 << 18;
/// Stages of each warp that sums these.
const SUM_STAGES: u32 = 2;
/// Warps that pull by the copy engine, at least, where shared memory has room, and at most.
const PULLING: [u32; 2] = [6, 17];
/// Warps of a block that copy rows into the window, where they are not there: by registers, and by the bulk copy engine at most. More copy
/// sooner and pull later: on the whole slower.
const COPIERS: u32 = 2;
const BULK_COPIERS: u32 = 4;
/// Chunks of rows that each of them has in shared memory.
const STAGES: u32 = 4;
/// Bytes of a chunk at most, and at least before fewer warps pull: of smaller ones too little is under way.
const CHUNK: u32 = 8 << 10;
const LEAST_CHUNK: u32 = 6912;
/// Parts that the reducer of rings has on their way beside them.
const ONE_DEPTH: u32 = 2;
/// Bytes of one that goes through registers.
const LOADED_CHUNK: u32 = 16 << 10;

/// How a block is made, and what it has in shared memory.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Shape {
    pulling: u32,
    sums: SumShape,
    copiers: u32,
    chunk: u32,
    shared_memory: u32,
}

impl Shape {
    /// One of `blocks`, for results of `bytes` bytes, whose reducer of rings has a `desk` of so many bytes; with copiers where it `copies`. `memory`: of a block, where there is a bulk copy engine.
    fn of_bulk(blocks: u32, bytes: u32, (ranks, desk): (u32, u32), copies: bool, memory: u32) -> Self {
        let sums = SumShape::new(bytes, ranks, SUM_STAGES);
        let copiers = |pulling: u32| if copies { BULK_COPIERS.min(COMBINE_BULK_WARPS - pulling) } else { 0 };
        // Beside what kernels keep by themselves.
        let room = memory.saturating_sub(256);
        let before = |pulling: u32| {
            let pull = (pulling * sums.bytes()).next_multiple_of(128);
            state(ranks, pulling, desk) + pull + copy_state(copiers(pulling))
        };
        let wished = (BULK_FLIGHT / (blocks * SUM_STAGES * ranks * sums.part)).clamp(PULLING[0], PULLING[1]);
        let fits = |pulling: u32, chunk: u32| before(pulling) + copiers(pulling) * STAGES * chunk <= room;
        // Where shared memory is small, chunks are smaller before warps are few.
        let most = |least: u32| (1..=wished).rev().find(|&pulling| fits(pulling, least));
        let pulling = [LEAST_CHUNK, 2048, 128].into_iter().find_map(most).unwrap_or(1);
        let chunk = chunk(copiers(pulling), room.saturating_sub(before(pulling)));
        let shared_memory = before(pulling) + copiers(pulling) * STAGES * chunk;
        Self { pulling, sums, copiers: copiers(pulling), chunk, shared_memory }
    }

    /// The same with a warp that tells of rows of so many bytes, which others make.
    fn telling(self, row: u32) -> Self {
        Self { pulling: self.pulling.min(COMBINE_WARPS - 1), copiers: 1, chunk: row, ..self }
    }

    /// The same where rows go through registers.
    fn of_loads(blocks: u32, topk: u32, (ranks, desk): (u32, u32), copies: bool) -> Self {
        let copiers = if copies { COPIERS } else { 0 };
        // Of a token there are no more rows than it has choices, and no more are pulled at once than the widest kernel takes.
        let rows = ranks.min(topk).min(8);
        let flight = FLIGHT / (blocks * PARTS[usize::from(ranks > 4)] * rows);
        let pulling = flight.clamp(1, COMBINE_WARPS - copiers);
        let shared_memory = state(ranks, pulling, desk) + copy_state(copiers);
        Self { pulling, sums: SumShape::default(), copiers, chunk: LOADED_CHUNK, shared_memory }
    }
}

/// The rows of the offered block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Offered {
    /// They are there, or none is offered.
    Whole,
    /// They lie elsewhere and are copied there, all but those of the own rank.
    Copied,
    /// A launch aside [makes them](RankDevice::fold).
    Folded,
}

/// Bytes of what each block keeps of ranks; `desk` of these are those of the reducer of rings.
fn state(ranks: u32, pulling: u32, desk: u32) -> u32 {
    (ranks * (SOURCE_BYTES + 4 * pulling) + desk).next_multiple_of(128)
}

/// And of copiers, before their stages.
fn copy_state(copiers: u32) -> u32 {
    (copiers * (STAGES * CHUNK_STATE_BYTES + 4 * COUNTED)).next_multiple_of(128)
}

/// Bytes of a chunk, where all copiers' stages have `room`.
fn chunk(copiers: u32, room: u32) -> u32 {
    let most = room.checked_div(copiers * STAGES).unwrap_or(CHUNK);
    (most / 128 * 128).clamp(128, CHUNK)
}

impl RankDevice {
    /// Pulls and sums; rows that were not offered come through rings; `args` without what only this needs.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn combine(
        &self,
        call: Call,
        args: &args::CombineRing,
        offered: Offered,
    ) -> Result<(), CudaError> {
        if let Some(offer_none) = self.kernels.offer_none {
            let shape = Launch { blocks: 1, threads: 32, shared_memory: 0, mode: Mode::Plain };
            // SAFETY: as the caller promises, for both.
            return unsafe {
                self.launch(offer_none, shape, call, args)?;
                self.combine_ring(call, args)
            };
        }
        // A rank alone has no peers that pull.
        let (copies, ranks, w) = (offered == Offered::Copied && self.ranks() > 1, self.ranks(), &self.view.w);
        let desk = Desk::new(ranks, 1, w.topk).bytes(ONE_DEPTH, 1, 1);
        let shape = if self.kernels.copies_in_bulk {
            let memory = self.stream.device().shared_memory();
            Shape::of_bulk(self.blocks, w.result_stride as u32, (ranks, desk), copies, memory)
        } else {
            Shape::of_loads(self.blocks, w.topk, (ranks, desk), copies)
        };
        let shape = if offered == Offered::Folded { shape.telling(w.result_stride as u32) } else { shape };
        // Pullers first: they meet by themselves, as the block's first threads. One of the copiers tells which rows are there.
        let block = block_roles(&[
            (Duty::Reducer, Task::Rows, shape.pulling),
            (Duty::Returner, Task::Tail, shape.copiers.min(1)),
            (Duty::Returner, Task::Rows, shape.copiers.saturating_sub(1)),
        ]);
        let (roles, role_count) = (self.roles.reducers(), args.rings.channels);
        let ring = args::CombineRing { roles, role_count, ..*args };
        let mut own = args::CombineOffered { ring, sums: shape.sums, reserved: 0, block };
        if shape.copiers > 0 {
            let combine = &mut own.ring.combine;
            (combine.copiers, combine.stages, combine.chunk) = (shape.copiers, STAGES, shape.chunk);
            combine.folds = (offered == Offered::Folded).into();
            combine.copied = self.copied.address();
        }
        let shape = Launch {
            blocks: self.blocks,
            threads: 32 * (shape.pulling + shape.copiers),
            shared_memory: shape.shared_memory,
            mode: Mode::Cooperative,
        };
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.combine(self.ranks()), shape, call, &own) }?;
        // The kernel says the same: it gives no rows back, and each of its blocks reduces one channel at most.
        let leaves = args.combine.base == NO_BASE || args.rings.channels > self.blocks;
        // SAFETY: as the caller promises.
        if leaves { unsafe { self.combine_ring(call, args) } } else { Ok(()) }
    }

    /// What blocks play that sum rows of rings, for so many roles; the parts on their way to each warp, and the bytes of a desk.
    fn teams(&self, role_count: u32) -> (Teams, u32, u32) {
        let w = &self.view.w;
        let room = self.stream.device().shared_memory().saturating_sub(self.ranks() * SOURCE_BYTES);
        let desk = Desk::new(self.ranks(), w.nodes, w.topk);
        Teams::new(role_count, self.blocks, w.nodes).fitting(role_count, self.blocks, desk, room)
    }

    /// Refuses a communicator for whose rings a block's shared memory has no room, and one whose rings need more blocks than `blocks`, which run at the same
    /// time: ranks that share a GPU would wait for each other. With fewer channels a call has fewer roles.
    pub(super) fn check_rings(&self, channels: u32, blocks: u32) -> Result<(), Error> {
        let roles = |kind| self.roles.of(kind, channels).1;
        let (teams, _, desk) = self.teams(roles(Kind::Combine));
        let needed = roles(Kind::Combine).div_ceil(teams.roles).max(roles(Kind::Dispatch).div_ceil(RING_WARPS));
        if needed > blocks {
            let limit = format_args!("at most {blocks}, which a rank may have of its GPU: fewer channels");
            return Err(Error::invalid("multiprocessors for the roles of rings", needed, limit));
        }
        let most = self.stream.device().shared_memory();
        let (sums, (_, (_, moves))) =
            (self.ranks() * SOURCE_BYTES + teams.roles * desk, self.carriers(roles(Kind::Dispatch)));
        let needs = [
            ("sums", sums, "fewer choices of a token, ranks or channels, or more multiprocessors"),
            ("moves", moves, "fewer ranks of a node or channels, or more multiprocessors"),
        ];
        match needs.into_iter().find(|&(_, needed, _)| needed > most) {
            Some((does, needed, remedy)) => {
                let what = format!("bytes of a block that {does} rows of rings");
                Err(Error::invalid(what, needed, format_args!("at most {most}: {remedy}")))
            }
            None => Ok(()),
        }
    }

    /// What a combine has left to rings.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    unsafe fn combine_ring(&self, call: Call, args: &args::CombineRing) -> Result<(), CudaError> {
        let (roles, role_count) = self.roles.of(Kind::Combine, args.rings.channels);
        let sources = self.ranks() * SOURCE_BYTES;
        let (teams, depth, desk) = self.teams(role_count);
        let shape = Launch {
            blocks: role_count.div_ceil(teams.roles),
            threads: 32 * teams.roles * teams.warps,
            shared_memory: sources + teams.roles * desk,
            mode: Mode::Cooperative,
        };
        let short_runs = self.short_runs.into();
        let args = &args::CombineRing { roles, role_count, depth, team: teams.warps, short_runs, ..*args };
        // SAFETY: as the caller promises; the roles are this value's.
        unsafe { self.launch(self.kernels.combine_ring, shape, call, args) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fits_into_shared_memory_and_warps_whatever_the_row() {
        let memories = [98 << 10, 163 << 10, 226 << 10];
        for (memory, copies) in memories.into_iter().flat_map(|memory| [(memory, false), (memory, true)]) {
            for (bytes, ranks) in [(16, 1), (272, 8), (14336, 2), (14336, 3), (14336, 8), (14336, 72), (131_072, 8)] {
                for blocks in [1, 8, 24, 48, 132] {
                    let desk = Desk::new(ranks, 1, 8).bytes(ONE_DEPTH, 1, 1);
                    let shape = Shape::of_bulk(blocks, bytes, (ranks, desk), copies, memory);
                    assert!(shape.shared_memory + 256 <= memory, "{bytes} {ranks} {blocks} {memory}: {shape:?}");
                    assert!(shape.pulling + shape.copiers <= COMBINE_BULK_WARPS && (shape.copiers > 1) == copies);
                }
            }
        }
        let desk = Desk::new(2, 1, 8).bytes(ONE_DEPTH, 1, 1);
        let shape = Shape::of_loads(8, 8, (2, desk), true);
        assert_eq!((shape.pulling, shape.copiers), (COMBINE_WARPS - COPIERS, COPIERS));
    }

    /// Of the shape that is measured, two ranks: with few blocks as many warps as fit, with many no more than the links serve.
    #[test]
    fn few_blocks_have_many_warps_that_pull() {
        let desk = Desk::new(2, 1, 8).bytes(ONE_DEPTH, 1, 1);
        let shape = |blocks| Shape::of_bulk(blocks, 14336, (2, desk), true, 226 << 10);
        assert_eq!([8, 16, 24, 48].map(|blocks| shape(blocks).pulling), [17, 17, 12, 6]);
        assert!(Shape::of_bulk(24, 14336, (2, desk), true, 98 << 10).pulling > 4);
        assert_eq!([8, 24].map(|blocks| (shape(blocks).copiers, shape(blocks).chunk)), [(3, 7296), (4, 8064)]);
    }
}
