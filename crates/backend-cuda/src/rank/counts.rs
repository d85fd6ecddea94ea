//! What opens a fresh dispatch: positions, the exchange of counts, and what the host hears of it.

use super::{Call, DevicePlan, RankDevice};
use crate::args::{self, COUNTS_THREADS, POSITION_BLOCKS, POSITION_THREADS};
use crate::driver::{Launch, Mode};
use crate::error::CudaError;

/// Bytes of the counts in host memory before those of the ranks: ticket and operation.
const COUNTS_HEADER: usize = 16;

/// Bytes of the counts in host memory, of so many ranks and experts of each.
pub(super) const fn counts_bytes(ranks: usize, local_experts: usize) -> usize {
    COUNTS_HEADER + 4 * (2 * ranks + ranks * ranks + local_experts + 1)
}

/// Counts that came to the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct HostCounts {
    /// The dispatch.
    pub(crate) op: u64,
    /// `[ranks]`: tokens of each rank's batch.
    pub(crate) tokens: Vec<u32>,
    /// `[ranks, ranks]`: rows from source to destination.
    pub(crate) rows: Vec<u32>,
    /// `[local experts]`: choices received.
    pub(crate) experts: Vec<u32>,
    /// `[ranks]`: rows for which each has room in its arena, or [`OPEN_ROOM`](ep_core::layout::OPEN_ROOM).
    pub(crate) rooms: Vec<u32>,
    /// Whether what was enqueued behind the exchange goes ahead.
    pub(crate) goes_ahead: bool,
}

/// What an exchange of counts is to do beside telling all ranks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counting {
    /// Tokens of the own batch.
    pub(crate) tokens: u32,
    /// Told to the host with the counts; none where it does not wait for them.
    pub(crate) ticket: Option<u64>,
    /// Where the number of received rows goes, u32; or 0.
    pub(crate) received: u64,
    /// Where the choices of the own experts go, u32 `[local experts]`; or 0.
    pub(crate) of_expert: u64,
    /// What these are rounded up to multiples of.
    pub(crate) alignment: u32,
    /// Rows that there is room for; 0 for any.
    pub(crate) bound: u32,
    /// Tokens of a rank of another node, on this rail, for which there is room to note where they go; 0 for any.
    pub(crate) rail_tokens: u32,
    /// What is said of the room in the own arena.
    pub(crate) room: u32,
    /// Rows for which what is enqueued behind has room, before the host knows how many come; 0 where nothing is.
    pub(crate) ahead: u32,
}

/// Addresses of a batch's routing: choices, or else a membership.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chosen {
    /// i64 `[tokens, topk]`; or 0.
    pub(crate) topk_idx: u64,
    /// u8 `[tokens, ranks]` where there are no choices.
    pub(crate) in_rank: u64,
    /// Whether a token may name an expert more than once.
    pub(crate) repeats: bool,
}

impl RankDevice {
    fn rows(&self) -> u64 {
        self.numbers.address()
    }

    fn choices(&self) -> u64 {
        self.rows() + 4 * u64::from(self.ranks())
    }

    /// Positions and counts of `tokens` tokens.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn plan(
        &self,
        call: Call,
        chosen: Chosen,
        tokens: u32,
        plan: &DevicePlan,
    ) -> Result<(), CudaError> {
        let window = &self.view.w;
        let args = args::Positions {
            topk_idx: chosen.topk_idx,
            in_rank: chosen.in_rank,
            position: plan.position.address(),
            rows: self.rows(),
            choices: self.choices(),
            partial: self.choices() + 4 * u64::from(window.experts),
            flags: self.flags.address(),
            tokens,
            repeats: chosen.repeats.into(),
        };
        let blocks = tokens.div_ceil(POSITION_THREADS).clamp(1, POSITION_BLOCKS);
        let shape = Launch { blocks, threads: POSITION_THREADS, shared_memory: 0, mode: Mode::Plain };
        // SAFETY: of the choices the caller promises it; the rest is this value's, and the plan's.
        unsafe { self.launch(self.kernels.positions, shape, call, &args) }
    }

    /// Replaces the choices of the experts, for memberships.
    pub(crate) fn set_choices(&self, choices: &[u32]) -> Result<(), CudaError> {
        let bytes: Vec<u8> = choices.iter().flat_map(|choice| choice.to_le_bytes()).collect();
        self.numbers.write(&self.stream, (self.choices() - self.numbers.address()) as usize, &bytes)
    }

    /// Exchange of counts.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn exchange(&self, call: Call, plan: &DevicePlan, counting: Counting) -> Result<(), CudaError> {
        let args = args::Counts {
            rows: self.rows(),
            choices: self.choices(),
            matrix: plan.matrix(),
            first_at: plan.first_at(),
            first_of: plan.first_of(),
            tokens_of: plan.tokens_of(),
            chosen: plan.chosen(),
            arrived: plan.arrived(),
            host: counting.ticket.map_or(0, |_| self.counts.address()),
            ticket: counting.ticket.unwrap_or(0),
            received: counting.received,
            of_expert: counting.of_expert,
            tokens: counting.tokens,
            alignment: counting.alignment.max(1),
            bound: counting.bound,
            refuses: counting.ticket.is_some().into(),
            room: counting.room,
            rail_tokens: counting.rail_tokens,
            ahead: counting.ahead,
            reserved: 0,
        };
        let shape = Launch { blocks: 1, threads: COUNTS_THREADS, shared_memory: 0, mode: Mode::Cooperative };
        // SAFETY: as in `plan`.
        unsafe { self.launch(self.kernels.counts, shape, call, &args) }
    }

    /// The counts of the exchange with `ticket`, once they have come.
    pub(crate) fn host_counts(&self, ticket: u64) -> Option<HostCounts> {
        if self.counts.long(0) != ticket {
            return None;
        }
        let (ranks, local) = (self.ranks() as usize, self.view.w.local_experts as usize);
        let numbers = |first: usize, count: usize| -> Vec<u32> {
            (first..first + count).map(|at| self.counts.word(COUNTS_HEADER + 4 * at)).collect()
        };
        Some(HostCounts {
            op: self.counts.long(8),
            tokens: numbers(0, ranks),
            rows: numbers(ranks, ranks * ranks),
            experts: numbers(ranks + ranks * ranks, local),
            rooms: numbers(ranks + ranks * ranks + local, ranks),
            goes_ahead: self.counts.word(COUNTS_HEADER + 4 * (2 * ranks + ranks * ranks + local)) != 0,
        })
    }
}
