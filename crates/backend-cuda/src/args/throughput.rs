//! Parameters of the kernels of throughput mode.

use ep_core::c_struct;
use ep_core::device::BlockRole;
use ep_core::layout::KernelRings;

use super::{COMBINE_WARPS, DISPATCH_WARPS};

c_struct! {
    /// Parameters of ep_positions_kernel.
    pub(crate) struct Positions = "EpPositionsArgs" {
        /// i64 [tokens, topk], or 0.
        pub(crate) topk_idx: u64,
        /// U8 [tokens, ranks] where there is no topk_idx.
        pub(crate) in_rank: u64,
        /// Out: i32 [tokens, ranks], -1 where a token does not go.
        pub(crate) position: u64,
        /// Out: u32 [ranks].
        pub(crate) rows: u64,
        /// In and out: u32 [experts], added to; zero before.
        pub(crate) choices: u64,
        /// Scratch: u32 [EP_POSITION_BLOCKS, ranks].
        pub(crate) partial: u64,
        /// Scratch: u64 [EP_POSITION_BLOCKS]; zero before and after.
        pub(crate) flags: u64,
        /// Tokens of the batch.
        pub(crate) tokens: u32,
        /// Not 0: a token may name an expert more than once.
        pub(crate) repeats: u32,
    }
}

c_struct! {
    /// Parameters of ep_members_kernel.
    pub(crate) struct Members = "EpMembersArgs" {
        /// i64 [tokens, topk], -1 for a dropped choice.
        pub(crate) topk_idx: u64,
        /// Out: u32 [ranks + experts]: tokens for each rank, choices of each expert; zero before.
        pub(crate) numbers: u64,
        /// Out: u8 [tokens, ranks].
        pub(crate) in_rank: u64,
        /// Tokens of the batch.
        pub(crate) tokens: u32,
        /// Choices of a token.
        pub(crate) topk: u32,
        /// Ranks.
        pub(crate) ranks: u32,
        /// A multiple of ranks.
        pub(crate) experts: u32,
    }
}

c_struct! {
    /// Parameters of ep_counts_kernel.
    pub(crate) struct Counts = "EpCountsArgs" {
        /// u32 [ranks]: rows to each rank.
        pub(crate) rows: u64,
        /// u32 [experts]: choices of each expert; zero again at the end.
        pub(crate) choices: u64,
        /// Out: u32 [ranks, ranks]: rows from source to destination.
        pub(crate) matrix: u64,
        /// Out: u32 [ranks]: at each destination, the first row from here.
        pub(crate) first_at: u64,
        /// Out: u32 [ranks + 1]: here, the first row of each source; last: rows received.
        pub(crate) first_of: u64,
        /// Out: u32 [ranks]: tokens of each rank's batch.
        pub(crate) tokens_of: u64,
        /// Out: u32 [experts]: choices of each expert.
        pub(crate) chosen: u64,
        /// Out: u32 [local experts]: choices received.
        pub(crate) arrived: u64,
        /// Out, mapped: u64 ticket when done, u64 op, then u32 tokens[ranks], matrix[ranks, ranks], local experts'
        /// choices, rooms[ranks], and whether what is enqueued behind goes ahead; 0 where the host does not wait for them.
        pub(crate) host: u64,
        /// Number of this launch.
        pub(crate) ticket: u64,
        /// Out: u32 [1]: rows received; or 0.
        pub(crate) received: u64,
        /// Out: u32 [local experts]: choices received, rounded up to multiples of alignment; or 0.
        pub(crate) of_expert: u64,
        /// Tokens of the batch.
        pub(crate) tokens: u32,
        /// What counts of experts are rounded up to.
        pub(crate) alignment: u32,
        /// Rows that there is room for; 0 for any.
        pub(crate) bound: u32,
        /// Not 0: bad choices are the call's error, and no failure: nothing that is enqueued behind does anything.
        pub(crate) refuses: u32,
        /// What is said of the room in the own arena.
        pub(crate) room: u32,
        /// Tokens of a rank of another node, on this rail, for which there is room to note where they go; 0 for any.
        pub(crate) rail_tokens: u32,
        /// Rows for which what is enqueued behind has room; 0 where nothing is.
        pub(crate) ahead: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

c_struct! {
    /// What the roles of a dispatch through rings need; parameters of ep_dispatch_ring_kernel.
    pub(crate) struct DispatchRing = "EpDispatchRingArgs" {
        /// How the rings are cut.
        pub(crate) rings: KernelRings,
        /// Rows, or their codes, x_stride bytes apart, in units of 16 bytes.
        pub(crate) x: u64,
        /// Bytes from one row of x to the next.
        pub(crate) x_stride: u64,
        /// Of the first token, in x or in a tensor of their own; unused where rows have none.
        pub(crate) scales: u64,
        /// Bytes from one token's scales to the next's.
        pub(crate) scales_token: u64,
        /// Bytes from one word of 4 bytes to the next: an f32, or 4 UE8M0.
        pub(crate) scales_word: u64,
        /// i32 [tokens, ranks].
        pub(crate) position: u64,
        /// i64 [tokens, topk], or 0: rows carry no choices.
        pub(crate) topk_idx: u64,
        /// f32 [tokens, topk], or 0: weights of 1.
        pub(crate) topk_weights: u64,
        /// u32 [ranks + 1]: first row of each source.
        pub(crate) first_of: u64,
        /// Codes of received rows, scales_offset bytes apart; 0 where rows are placed.
        pub(crate) out: u64,
        /// Their scales, scales_stride bytes apart; unused where rows have none.
        pub(crate) out_scales: u64,
        /// i64 [rows, topk], or 0.
        pub(crate) out_idx: u64,
        /// f32 [rows, topk], or 0.
        pub(crate) out_weights: u64,
        /// i32 [rows], or 0.
        pub(crate) out_token: u64,
        /// i32 [rows], or 0.
        pub(crate) out_rank: u64,
        /// Tokens of the batch.
        pub(crate) tokens: u32,
        /// Whether notes are exchanged: on one node ep_dispatch_kernel has done so, over several this kernel does.
        pub(crate) notes: u32,
        /// EpRole [role_count]: what the warps do.
        pub(crate) roles: u64,
        /// Roles of the call.
        pub(crate) role_count: u32,
        /// Between nodes: rows of the block at base.
        pub(crate) base_rows: u32,
        /// Between nodes: u32 [ranks, ranks]: rows from source to destination.
        pub(crate) matrix: u64,
        /// Between nodes: u32 [ranks]: tokens of each rank's batch.
        pub(crate) tokens_of: u64,
        /// Between nodes: i32 [tokens, ranks of a node], written, for each rank of this rail in other nodes, one after the other: the position of its token's
        /// row at each rank of this node, -1 where none goes.
        pub(crate) fanout: u64,
        /// Between nodes: the block granted to the ranks of this node, or EP_NO_BASE.
        pub(crate) base: u64,
        /// Between nodes: warps of a team, which plays a role.
        pub(crate) team: u32,
        /// Between nodes: bytes of a warp's shared memory for rows on their way, a multiple of 512 for each stage.
        pub(crate) room: u32,
        /// Between nodes, not 0: the first put of a ring is short, and so is the last.
        pub(crate) short_runs: u32,
        /// Not 0: enqueued before the host knew the counts. It does nothing where they do not say so (EpLocal.ahead).
        pub(crate) ahead: u32,
    }
}

c_struct! {
    /// Parameters of ep_dispatch_kernel.
    pub(crate) struct Dispatch = "EpDispatchArgs" {
        /// What its roles of rings need.
        pub(crate) ring: DispatchRing,
        /// u32 [ranks]: at each destination, the first row from here.
        pub(crate) first_at: u64,
        /// The block granted to the peers, or EP_NO_BASE.
        pub(crate) base: u64,
        /// Rows that the block has room for.
        pub(crate) base_rows: u32,
        /// Warps of a block that move payloads.
        pub(crate) movers: u32,
        /// Pieces of each mover in shared memory, 2 or more.
        pub(crate) stages: u32,
        /// Bytes of a piece of a row, a multiple of 16.
        pub(crate) piece: u32,
        /// Pieces of a row.
        pub(crate) pieces: u32,
        /// Whether headers are written.
        pub(crate) headers: u32,
        /// Whether there are warps for all roles of the rings.
        pub(crate) plays: u32,
        /// Whether a row's scales are loaded at once: they lie side by side, in units of 16 bytes.
        pub(crate) bulk_scales: u32,
        /// Lots that the batch is cut into: tokens side by side, each with a Placed cell of its own.
        pub(crate) lots: u32,
        /// The first that this launch moves.
        pub(crate) lot: u32,
        /// Behind the last.
        pub(crate) end_lot: u32,
        /// Zero.
        pub(crate) reserved: u32,
        /// What the warps of a block place.
        pub(crate) block: [BlockRole; DISPATCH_WARPS as usize],
    }
}

c_struct! {
    /// Parameters of ep_unpack_kernel.
    pub(crate) struct Unpack = "EpUnpackArgs" {
        /// The block.
        pub(crate) base: u64,
        /// u32 [ranks + 1]: first row of each source; last: rows received.
        pub(crate) first_of: u64,
        /// Out: i64 [rows, topk], or 0.
        pub(crate) topk_idx: u64,
        /// Out: f32 [rows, topk], or 0.
        pub(crate) topk_weights: u64,
        /// Out: i32 [rows].
        pub(crate) source_token: u64,
        /// Out: i32 [rows].
        pub(crate) source_rank: u64,
        /// There is room for.
        pub(crate) rows: u32,
        /// As of EpDispatchRingArgs.
        pub(crate) ahead: u32,
    }
}

c_struct! {
    /// Parameters of ep_blank_kernel.
    pub(crate) struct Blank = "EpBlankArgs" {
        /// u32 [ranks + 1]: first row of each source; last: rows received.
        pub(crate) first_of: u64,
        /// Out: rows, or their codes.
        pub(crate) x: u64,
        /// Out: scales of rows that have some.
        pub(crate) scales: u64,
        /// There is room for.
        pub(crate) rows: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_slots_kernel.
    pub(crate) struct Slots = "EpSlotsArgs" {
        /// What brings the choices from the headers of placed rows; its base is NO_BASE where they lie there already.
        pub(crate) unpack: Unpack,
        /// i64 [rows, topk]: local expert of each choice, or -1.
        pub(crate) topk_idx: u64,
        /// u32 [ranks + 1]: first row of each source; last: rows received.
        pub(crate) first_of: u64,
        /// u32 [local experts]: choices of each, as the ranks told each other.
        pub(crate) counts: u64,
        /// Out, or 0: u32 [local experts + 1]: first slot of each expert; last, behind all of their slots.
        pub(crate) out_first: u64,
        /// Out, or 0: u32 [local experts]: the counts, for the user.
        pub(crate) out_counts: u64,
        /// Out: i32 [rows, topk]: slot of each choice, or -1.
        pub(crate) slots: u64,
        /// Out: i32 [ranks, local experts]: first slot of each source.
        pub(crate) offsets: u64,
        /// Out, or 0: f32 [room]: zeros, over which rows bring the weights of their choices.
        pub(crate) out_weights: u64,
        /// Scratch: u64 [blocks, local experts]: the lower half of the dispatch's number, and choices of each share.
        pub(crate) told: u64,
        /// Scratch: u32 [blocks, 2 + warps, local experts], or 0: in shared memory.
        pub(crate) tables: u64,
        /// Received, or made room for.
        pub(crate) rows: u32,
        /// The first slot of each expert is a multiple of it.
        pub(crate) alignment: u32,
        /// Rows by expert that there is room for.
        pub(crate) room: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_spread_kernel.
    pub(crate) struct Spread = "EpSpreadArgs" {
        /// Codes of the received rows, scales_offset bytes apart.
        pub(crate) x: u64,
        /// Their scales, scales_stride bytes apart; unused where rows have none.
        pub(crate) scales: u64,
        /// u32 [ranks + 1]: first row of each source; last: rows received.
        pub(crate) first_of: u64,
        /// u32 [local experts]: choices of each, as the ranks told each other.
        pub(crate) counts: u64,
        /// i32 [rows, topk]: slot of each choice, or -1.
        pub(crate) slots: u64,
        /// i32 [ranks, local experts]: first slot of each source.
        pub(crate) offsets: u64,
        /// i32 [rows]: token of each row at its source; unused where all lots are copied.
        pub(crate) source_token: u64,
        /// i32 [rows]: its source; unused likewise.
        pub(crate) source_rank: u64,
        /// u32 [ranks]: tokens of each rank's batch; unused likewise.
        pub(crate) tokens_of: u64,
        /// Out: codes of the rows by expert, scales_offset bytes apart.
        pub(crate) out: u64,
        /// Out: their scales, scales_stride bytes apart; unused where rows have none.
        pub(crate) out_scales: u64,
        /// f32 [rows, topk]: weight of each choice; unused where out_weights is 0.
        pub(crate) weights: u64,
        /// Out, or 0: f32 [room]: those of slots.
        pub(crate) out_weights: u64,
        /// Received, or made room for.
        pub(crate) rows: u32,
        /// Rows by expert that there is room for. Nothing is stored beyond, whatever became of slots that the user holds, too.
        pub(crate) room: u32,
        /// Not 0: slots that are no choice's become zeros.
        pub(crate) zeros: u32,
        /// Lots that a batch is cut into.
        pub(crate) lots: u32,
        /// The first whose rows this launch copies.
        pub(crate) lot: u32,
        /// Behind the last.
        pub(crate) end_lot: u32,
    }
}

c_struct! {
    /// Parameters of ep_fold_kernel.
    pub(crate) struct Fold = "EpFoldArgs" {
        /// Results of the rows by expert; y_stride bytes apart.
        pub(crate) y: u64,
        /// Bytes from one row of y to the next, a multiple of 16.
        pub(crate) y_stride: u64,
        /// i32 [rows, topk]: slot of each choice, or -1.
        pub(crate) slots: u64,
        /// u32 [ranks + 1]: first row of each source; last: rows received.
        pub(crate) first_of: u64,
        /// u32 [ranks, EP_PIECES], zero before: rows of each piece that are summed. Or 0: nobody waits for them.
        pub(crate) copied: u64,
        /// Out: [rows] rows, out_stride bytes apart, of which those received are summed.
        pub(crate) out: u64,
        /// Bytes from one row of out to the next, a multiple of 16.
        pub(crate) out_stride: u64,
        /// Received, or made room for.
        pub(crate) rows: u32,
        /// Rows by expert. Nothing is read beyond.
        pub(crate) room: u32,
        /// Not 0: what rounding the sums leaves, rounded in its turn, instead of these.
        pub(crate) remainder: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_offer_kernel.
    pub(crate) struct Offer = "EpOfferArgs" {
        /// The block of results.
        pub(crate) base: u64,
        /// u32 [ranks + 1]: first row of each source; last: rows in all.
        pub(crate) first_of: u64,
        /// i32 [rows].
        pub(crate) source_token: u64,
        /// f32 [rows, topk].
        pub(crate) topk_weights: u64,
        /// Of the block.
        pub(crate) rows: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

c_struct! {
    /// What both kernels of a combine need.
    pub(crate) struct Combine = "EpCombineArgs" {
        /// Own rows; y_stride bytes apart.
        pub(crate) y: u64,
        /// Bytes from one row of y to the next.
        pub(crate) y_stride: u64,
        /// i32 [tokens, ranks].
        pub(crate) position: u64,
        /// u32 [ranks]: at each rank, the first row from here.
        pub(crate) first_at: u64,
        /// u32 [ranks, ranks]: rows from source to destination of the dispatch.
        pub(crate) matrix: u64,
        /// Rows, bias_stride bytes apart, or 0; the first is given where the second is.
        pub(crate) bias: [u64; 2],
        /// Bytes from one row of bias to the next.
        pub(crate) bias_stride: u64,
        /// [tokens] rows, out_stride bytes apart.
        pub(crate) out: u64,
        /// Bytes from one row of out to the next.
        pub(crate) out_stride: u64,
        /// Out: f32 [tokens, topk], or 0.
        pub(crate) weights: u64,
        /// f32 [rows, topk] of the own rows, or 0.
        pub(crate) own_weights: u64,
        /// The offered block, or EP_NO_BASE.
        pub(crate) base: u64,
        /// u32 [ranks + 1]: first row of each source; last: rows in all.
        pub(crate) first_of: u64,
        /// u32 [ranks, EP_PIECES], zero before and after: chunks of each piece that are in the block.
        pub(crate) copied: u64,
        /// Rows of that block.
        pub(crate) base_rows: u32,
        /// Whether the block has headers.
        pub(crate) offers_weights: u32,
        /// Tokens of the batch.
        pub(crate) tokens: u32,
        /// Warps of a block that copy rows from y to the block; 0: they are there.
        pub(crate) copiers: u32,
        /// Of each copier, in shared memory.
        pub(crate) stages: u32,
        /// Bytes of a stage, a multiple of 16.
        pub(crate) chunk: u32,
        /// Not 0: a launch beside this one makes the rows of the block, and counts them in `copied`; a chunk is a row, and nobody copies.
        pub(crate) folds: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_combine_ring_kernel.
    pub(crate) struct CombineRing = "EpCombineRingArgs" {
        /// What both kernels need.
        pub(crate) combine: Combine,
        /// How the rings are cut.
        pub(crate) rings: KernelRings,
        /// i32 [rows].
        pub(crate) source_token: u64,
        /// u32 [ranks]: tokens of each rank's batch.
        pub(crate) tokens_of: u64,
        /// EpRole [role_count]: what the warps do.
        pub(crate) roles: u64,
        /// Roles of the call.
        pub(crate) role_count: u32,
        /// Parts of rows that each warp has on their way: 2, 4 or 8.
        pub(crate) depth: u32,
        /// Between nodes: as of EpDispatchRingArgs, of the dispatch.
        pub(crate) fanout: u64,
        /// Between nodes: warps that play a role together, 1 or more.
        pub(crate) team: u32,
        /// As of EpDispatchRingArgs.
        pub(crate) short_runs: u32,
    }
}

c_struct! {
    /// Stages of a warp that sums rows which the bulk copy engine brings.
    pub(crate) struct SumShape = "EpSumShape" {
        /// 2 or more.
        pub(crate) stages: u32,
        /// Rows of a token that a stage holds, 1 or more.
        pub(crate) rows: u32,
        /// Bytes of a part of a row, as it is summed: a multiple of 16.
        pub(crate) part: u32,
    }
}

c_struct! {
    /// Parameters of ep_combine_kernel.
    pub(crate) struct CombineOffered = "EpCombineOfferedArgs" {
        /// What is summed; of the roles of the rings those of reducers, one for each block from the first on.
        pub(crate) ring: CombineRing,
        /// What each warp that pulls has in shared memory, where there is a bulk copy engine.
        pub(crate) sums: SumShape,
        /// Zero.
        pub(crate) reserved: u32,
        /// What the warps of a block do.
        pub(crate) block: [BlockRole; COMBINE_WARPS as usize],
    }
}
