//! Parameters of the kernels of low latency.

use ep_core::c_struct;
use ep_core::device::LowRoles;

c_struct! {
    /// Parameters of ep_low_latency::dispatch.
    pub(crate) struct LowDispatch = "EpLowDispatchArgs" {
        /// bf16 [tokens, hidden], rows x_stride bytes apart; where scales are given, codes.
        pub(crate) x: u64,
        /// Bytes from one row of x to the next.
        pub(crate) x_stride: u64,
        /// Scales of rows that are given as they travel, words of 4 bytes; 0: rows are bf16.
        pub(crate) x_scales: u64,
        /// Bytes from one row's scales to the next's.
        pub(crate) x_scales_row: u64,
        /// Bytes from one word to the next.
        pub(crate) x_scales_word: u64,
        /// i64 [tokens, topk]: experts over all ranks, or -1.
        pub(crate) topk_idx: u64,
        /// f32 [tokens, topk], or 0: weights of 1.
        pub(crate) topk_weights: u64,
        /// Out, of the sender: u32 [2, ranks]: rows to each rank, choices of its experts; 0 for masked ranks.
        pub(crate) routed: u64,
        /// Out: [local experts, ranks * max_tokens] rows, or by source [ranks * max_tokens], or packed [room], out_stride bytes apart: as they
        /// travelled, or codes alone.
        pub(crate) out: u64,
        /// Bytes from one row of out to the next.
        pub(crate) out_stride: u64,
        /// Out: i32 [local experts].
        pub(crate) expert_counts: u64,
        /// Out: i64 [local experts, ranks]: first << 32 | rows.
        pub(crate) segments: u64,
        /// Out: i32 [local experts, ranks * max_tokens], or by source and packed [ranks * max_tokens].
        pub(crate) source_token: u64,
        /// Out, where rows lie by source, or packed: i32 [ranks + 1], rows before those of each rank, and all; else 0.
        pub(crate) first_of: u64,
        /// Out, with it: i64 [ranks * max_tokens, topk], own expert of each choice, or -1.
        pub(crate) out_idx: u64,
        /// Out, with it: out_idx once more, for whoever gives that away; or 0.
        pub(crate) out_idx_too: u64,
        /// Out, with it: f32 [ranks * max_tokens, topk], weight of each choice; 0 where it is none.
        pub(crate) out_weights: u64,
        /// Out, with it: i32 [ranks * max_tokens].
        pub(crate) source_rank: u64,
        /// Out, where rows are packed: u32 [local experts + 1]: the first slot of each expert; last, behind all of their slots.
        pub(crate) first_slots: u64,
        /// Out, with it: i32 [ranks * max_tokens, topk]: slot of each choice, or -1.
        pub(crate) slots: u64,
        /// Out, with it: f32 [room]: weight of the choice that stands there; 0 of padding.
        pub(crate) slot_weights: u64,
        /// Out: what the combine needs, see ep_low_record.
        pub(crate) records: u64,
        /// u64 [4 * ranks + local experts + 1], added to: rows of dispatches sent, received; of combines; of experts;
        /// operations.
        pub(crate) counters: u64,
        /// Out: scales of their own, or 0 where they follow the codes in out; words of 4 bytes: an f32, or 4 UE8M0.
        pub(crate) scales: u64,
        /// Bytes from one expert's scales to the next's.
        pub(crate) scales_expert: u64,
        /// Bytes from one row's scales to the next's.
        pub(crate) scales_row: u64,
        /// Bytes from one word to the next.
        pub(crate) scales_word: u64,
        /// Out, of the sender: i64 [tokens, topk], topk_idx as it was; or 0.
        pub(crate) kept_idx: u64,
        /// i32 [local experts], to which expert_counts are added; or 0.
        pub(crate) stats: u64,
        /// Where the own window begins: what is looked at first need not wait for the list of all windows.
        pub(crate) window: u64,
        /// The EpEarly by which consumers learn of rows as they come; 0 for none.
        pub(crate) early: u64,
        /// Rows of a block there.
        pub(crate) early_rows: u32,
        /// Blocks of an expert there.
        pub(crate) early_blocks: u32,
        /// Tokens of the batch.
        pub(crate) tokens: u32,
        /// Which halves the launch does: EP_LOW_SEND, EP_LOW_RECEIVE.
        pub(crate) phases: u32,
        /// Operations that were sent and not received when it was enqueued.
        pub(crate) in_flight: u32,
        /// Not 0: a token may name an expert more than once. The expert gets its row once.
        pub(crate) repeats: u32,
        /// The first slot of each expert is a multiple of it, where rows are packed; else 0.
        pub(crate) alignment: u32,
        /// Rows of out that may come, by source, or packed: with padding.
        pub(crate) room: u32,
        /// Not 0: slots that are no choice's become zeros.
        pub(crate) zeros: u32,
        /// Zero.
        pub(crate) reserved: u32,
        /// Who does what is done once.
        pub(crate) roles: LowRoles,
    }
}

c_struct! {
    /// Parameters of ep_low_latency::combine.
    pub(crate) struct LowCombine = "EpLowCombineArgs" {
        /// bf16 [local experts, ranks * max_tokens, hidden], or by source [ranks * max_tokens, hidden], or packed [room, hidden], rows y_stride bytes
        /// apart.
        pub(crate) y: u64,
        /// Bytes from one row of y to the next.
        pub(crate) y_stride: u64,
        /// Of the dispatch, see ep_low_record.
        pub(crate) records: u64,
        /// i64 [tokens, topk], as dispatched.
        pub(crate) topk_idx: u64,
        /// f32 [tokens, topk], per choice.
        pub(crate) topk_weights: u64,
        /// u32 [2, ranks], of the dispatch: rows to each rank, choices of its experts.
        pub(crate) routed: u64,
        /// Out: bf16 [tokens, hidden], rows out_stride bytes apart.
        pub(crate) out: u64,
        /// Bytes from one row of out to the next.
        pub(crate) out_stride: u64,
        /// As of EpLowDispatchArgs.
        pub(crate) counters: u64,
        /// As of EpLowDispatchArgs.
        pub(crate) window: u64,
        /// Counters by which results are said to be ready, [local experts, ready_blocks]; 0: all are.
        pub(crate) ready: u64,
        /// Address of EpEarly.epoch: the counters are that one's; 0: they are u32.
        pub(crate) ready_epoch: u64,
        /// What the counter of a block has reached when its results are ready.
        pub(crate) ready_due: u32,
        /// Rows of a block.
        pub(crate) ready_rows: u32,
        /// Counters of an expert.
        pub(crate) ready_blocks: u32,
        /// Zero.
        pub(crate) reserved: u32,
        /// Tokens of the batch.
        pub(crate) tokens: u32,
        /// EP_LOW_PER_CHOICE or EP_LOW_PER_RANK.
        pub(crate) kind: u32,
        /// Which halves the launch does: EP_LOW_SEND, EP_LOW_RECEIVE.
        pub(crate) phases: u32,
        /// Operations that were sent and not received when it was enqueued.
        pub(crate) in_flight: u32,
        /// As of the dispatch. A result counts as often as its expert was named.
        pub(crate) repeats: u32,
        /// The most tokens of a batch whose results travel as units.
        pub(crate) unit_tokens: u32,
        /// Who does what is done once.
        pub(crate) roles: LowRoles,
    }
}
