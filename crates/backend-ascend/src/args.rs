//! What the kernels take, as the header `ep_args.h` says it to them.
//!
//! What every device has in common (`EpRank`, `EpLocal`, `EpReport` ...) is [`ep_core::device`]'s. Addresses are the device's.

mod plant;

use ep_core::declare::{CEnum, CStruct};
use ep_core::device::RankView;
use ep_core::device::probe::{Ended, Step, StepSaw, Verb};
use ep_core::layout::KernelRings;
use ep_core::{c_enum, c_struct};

use crate::probe::MOST_STEPS;
use crate::{MOST_NEAR, MOST_RANKS, Roles};
pub use plant::Plant;

c_struct! {
    /// What all kernels are given.
    pub struct Launch = "EpLaunch" {
        /// The rank.
        pub r: RankView,
        /// How the rings are cut.
        pub rings: KernelRings,
        /// Which core does what.
        pub roles: Roles,
        /// Nanoseconds of a tick of the system counter: 20.
        pub nanos_per_tick: u32,
        /// In builds for tests a fault, EP_PLANT_...; else 0.
        pub plant: u32,
        /// Not 0 where another launch of the same operation follows: the end of this one is not the operation's.
        pub follows: u32,
        /// EpLine [cores], zero at first and in each generation.
        pub lines: u64,
        /// Over several servers u64: what cores hand to coordinators ([`mail_words`]), zero at first and in each generation.
        pub mail: u64,
        /// EpQueue [ranks]: the queue to each rank of another server that this one posts to, in both modes: one a rank.
        pub queues: u64,
    }
}

c_struct! {
    /// A queue to a rank of another server, from the context that a vendor's library gives. Counts are kept in it from launch to launch.
    pub struct Queue = "EpQueue" {
        /// Its number, which doorbells name.
        pub number: u32,
        /// Elements, a power of 2.
        pub depth: u32,
        /// Service level, which doorbells name.
        pub level: u32,
        /// Places for completions, where kernels take them.
        pub completion_depth: u32,
        /// Key of the memory that is sent from: the own window, and the words.
        pub source_key: u32,
        /// Key of the peer's window.
        pub target_key: u32,
        /// Elements posted, ever.
        pub head: u32,
        /// Completions taken, ever.
        pub taken: u32,
        /// The elements, 64 bytes each.
        pub elements: u64,
        /// The doorbell, 8 bytes.
        pub doorbell: u64,
        /// u32: elements done, ever.
        pub tail: u64,
        /// The completions, 32 bytes each; 0 where the card's firmware takes them.
        pub completions: u64,
        /// u32: completions taken, as the card reads it; or 0.
        pub completions_taken: u64,
        /// u64 [depth]: sources of values that are published.
        pub words: u64,
    }
}

/// Words of [`Launch::mail`], over so many servers and channels.
pub const fn mail_words(nodes: u32, channels: u32) -> usize {
    // EP_MAIL_RING for each ring, EP_MAIL_NODE twice for each server, and the end.
    nodes as usize * channels as usize * 7 + 2 * nodes as usize * 4 + 1
}

/// Words of [`Low::mail`], of so many ranks.
pub const fn low_mail_words(ranks: usize) -> usize {
    // A word for each share, three for each rank, and three of the rank's own.
    (4 + 3) * ranks + 3
}

c_struct! {
    /// What a core waits for, or refuses.
    pub struct Detail = "EpDetail" {
        /// From whom.
        pub peer: u32,
        /// What for: EP_PHASE_...
        pub phase: u32,
        /// Index of the lane.
        pub lane: u32,
        /// Of what is refused the field that differed, EP_FIELD_...
        pub field: u32,
        /// The value seen.
        pub seen: u64,
        /// The value awaited.
        pub awaited: u64,
    }
}

c_struct! {
    /// What a core tells its rank's control core, in a line of its own.
    pub struct Line = "EpLine" {
        /// The last launch whose part this core has done: twice the operation, and 1 for its last launch.
        pub ended: u64,
        /// The wait that lasts long (ep_wait_key); 0 for none.
        pub wait: u64,
        /// The launch that wait and status belong to.
        pub mark: u64,
        /// EP_STATUS_...; 0 for none.
        pub status: u32,
        /// Zero.
        pub reserved: u32,
        /// Of the wait or status; written before them.
        pub detail: Detail,
    }
}

c_struct! {
    /// Parameters of ep_positions_kernel.
    pub struct Positions = "EpPositionsArgs" {
        /// Rank; its other parts are nobody's here.
        pub launch: Launch,
        /// i64 [tokens, topk].
        pub topk_idx: u64,
        /// u32 [cores, ranks + experts + 1]: what cores tell each other.
        pub told: u64,
        /// u64 [cores]: the last launch in which a core has told that.
        pub ready: u64,
        /// Number of this launch, larger than those before; never 0.
        pub ticket: u64,
        /// Out: i32 [tokens, ranks]: positions, -1 where a token does not go.
        pub position: u64,
        /// Out: u32: rows to each rank [ranks], then choices of each expert [experts].
        pub numbers: u64,
        /// Tokens of the batch.
        pub tokens: u32,
        /// Not 0 where a token may name an expert more than once.
        pub repeats: u32,
    }
}

c_struct! {
    /// Parameters of ep_counts_kernel.
    pub struct Counts = "EpCountsArgs" {
        /// Rank and roles.
        pub launch: Launch,
        /// u32: rows to each rank [ranks], then choices of each expert [experts].
        pub numbers: u64,
        /// Out: u32 [ranks, ranks]: rows from source to destination; of masked ranks 0.
        pub matrix: u64,
        /// Out: u32 [ranks]: tokens of each rank's batch.
        pub tokens_of: u64,
        /// Out: u32 [local experts]: choices received of each, at most 2^32 - 1.
        pub arrived: u64,
        /// Tokens of the batch.
        pub tokens: u32,
        /// Rows that there is room for, or 0 where there is for any number.
        pub bound: u32,
    }
}

c_struct! {
    /// Parameters of ep_dispatch.
    pub struct Dispatch = "EpDispatchArgs" {
        /// Rank, rings and roles.
        pub launch: Launch,
        /// Rows as they travel, x_stride bytes apart.
        pub x: u64,
        /// Bytes from one row of x to the next.
        pub x_stride: u64,
        /// i32 [tokens, ranks]: positions, -1 where a token does not go.
        pub position: u64,
        /// i64 [tokens, topk], or 0: rows carry no choices.
        pub topk_idx: u64,
        /// f32 [tokens, topk], or 0: weights of 1.
        pub topk_weights: u64,
        /// u32 [ranks + 1]: first row of each source.
        pub first_of: u64,
        /// Out: rows as they travel, side by side.
        pub out: u64,
        /// Out: i64 [rows, topk]; 0 for none.
        pub out_idx: u64,
        /// Out: f32 [rows, topk]; where out_idx is not 0.
        pub out_weights: u64,
        /// Out: i32 [rows]; 0 for none.
        pub out_token: u64,
        /// Out: i32 [rows]; where out_token is not 0.
        pub out_rank: u64,
        /// Over several servers u64 [nodes]: addresses of i32 [tokens of this rank's rail peer there, ranks of a server], -1 at first. Out: where
        /// the rows went that this rank has passed on. 0 where that is known.
        pub fanout: u64,
        /// Tokens of the batch.
        pub tokens: u32,
        /// Zero.
        pub reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_combine.
    pub struct Combine = "EpCombineArgs" {
        /// Rank, rings and roles.
        pub launch: Launch,
        /// bf16 rows of the experts' results, y_stride bytes apart.
        pub y: u64,
        /// Bytes from one row of y to the next.
        pub y_stride: u64,
        /// i32 [tokens, ranks] of the dispatch.
        pub position: u64,
        /// u32 [ranks, ranks]: rows from source to destination of the dispatch.
        pub matrix: u64,
        /// u32 [ranks + 1]: first row of each source.
        pub first_of: u64,
        /// i32 [rows]: token of each received row.
        pub source_token: u64,
        /// u32 [ranks]: tokens of each rank's batch.
        pub tokens_of: u64,
        /// f32 [rows, topk] of the received rows, or 0.
        pub own_weights: u64,
        /// bf16 rows, bias_stride bytes apart, or 0; the first is given where the second is.
        pub bias: [u64; 2],
        /// Bytes from one row of bias to the next.
        pub bias_stride: u64,
        /// Out: bf16 [tokens] rows, out_stride bytes apart.
        pub out: u64,
        /// Bytes from one row of out to the next.
        pub out_stride: u64,
        /// Out: f32 [tokens, topk], or 0.
        pub weights: u64,
        /// Over several servers, as of the dispatch.
        pub fanout: u64,
        /// Tokens of the batch.
        pub tokens: u32,
        /// Zero.
        pub reserved: u32,
    }
}

c_enum! {
    /// How a core's part of ep_spread_kernel ended.
    pub enum SpreadEnd = "EP_SPREAD" {
        /// All its rows stand.
        Well = 1,
        /// A core before it did not tell in time.
        Late = 2,
        /// The rows have other choices than the ranks told each other.
        OtherChoices = 3,
    }
}

c_struct! {
    /// Parameters of ep_spread_kernel.
    pub struct Spread = "EpSpreadArgs" {
        /// Rank; its other parts are nobody's here.
        pub launch: Launch,
        /// The received rows as they travel, side by side.
        pub x: u64,
        /// i64 [rows, topk]: local experts, or -1; 0 where the slots are known.
        pub topk_idx: u64,
        /// u32 [ranks + 1]: first row of each source.
        pub first_of: u64,
        /// u32 [local experts + 1]: first slot of each expert; last, all slots.
        pub first: u64,
        /// u32 [local experts]: choices of each expert.
        pub counts: u64,
        /// i32 [rows, topk]: slot of each choice, or -1. Out, where they are not known.
        pub slots: u64,
        /// Out, where slots are not known: i32 [ranks, local experts]: first slot of each source at each expert.
        pub offsets: u64,
        /// Out: rows by expert as they travel, side by side.
        pub out: u64,
        /// u32 [cores, local experts]: what cores tell each other.
        pub told: u64,
        /// u64 [cores]: the last launch in which a core has told that.
        pub ready: u64,
        /// Out: u64 [cores]: the launch << 8 | EP_SPREAD_...
        pub ended: u64,
        /// Number of this launch, larger than those before; never 0.
        pub ticket: u64,
        /// Received rows.
        pub rows: u32,
        /// Not 0 where the slots are known.
        pub known: u32,
    }
}

c_struct! {
    /// Parameters of ep_fold_kernel.
    pub struct Fold = "EpFoldArgs" {
        /// Rank; its other parts are nobody's here.
        pub launch: Launch,
        /// bf16 results of the rows by expert, y_stride bytes apart.
        pub y: u64,
        /// Bytes from one row of y to the next.
        pub y_stride: u64,
        /// i32 [rows, topk]: slot of each choice, or -1.
        pub slots: u64,
        /// Out: bf16 [rows] rows, out_stride bytes apart.
        pub out: u64,
        /// Bytes from one row of out to the next.
        pub out_stride: u64,
        /// Received rows.
        pub rows: u32,
        /// Zero.
        pub reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_quantize_kernel.
    pub struct Quantize = "EpQuantizeArgs" {
        /// Rank; its other parts are nobody's here.
        pub launch: Launch,
        /// bf16 rows, x_stride bytes apart.
        pub x: u64,
        /// Bytes from one row of x to the next.
        pub x_stride: u64,
        /// Out: INT8 rows as they travel, out_stride bytes apart.
        pub out: u64,
        /// Bytes from one row of out to the next.
        pub out_stride: u64,
        /// Rows.
        pub rows: u32,
        /// Zero.
        pub reserved: u32,
    }
}

c_enum! {
    /// What became of a rank in a sending half of low latency.
    pub enum LowState = "EP_LOW" {
        /// All was put and announced.
        Sent = 1,
        /// Its bank was not free in time.
        Late = 2,
        /// It goes on without this rank.
        Masked = 3,
        /// It does nothing any more.
        Gone = 4,
    }
}

c_struct! {
    /// What the receiver of a low-latency dispatch keeps of a row, before the row's picks: one for each of its choices.
    pub struct LowRow = "EpLowRow" {
        /// Token at its source.
        pub token: u32,
        /// Zero.
        pub reserved: u32,
    }
}

c_struct! {
    /// What it keeps of a choice.
    pub struct LowPick = "EpLowPick" {
        /// Row in [local experts, ranks * max_tokens]; -1 where the expert is another rank's.
        pub place: i32,
        /// Its weight.
        pub weight: f32,
    }
}

c_struct! {
    /// Parameters of the kernels of low latency: what a half does not use is 0. EpLaunch.r has windows, an EpLocal and a report of low latency's own.
    pub struct Low = "EpLowArgs" {
        /// Rank and roles.
        pub launch: Launch,
        /// The operation, counted from 1 in each generation.
        pub op: u64,
        /// Number of this launch, larger than those before; never 0.
        pub ticket: u64,
        /// Rows, x_stride bytes apart: bf16 [tokens, hidden] of a dispatch, [local experts, ranks * max_tokens, hidden] of a combine.
        pub x: u64,
        /// Bytes from one row of x to the next.
        pub x_stride: u64,
        /// i64 [tokens, topk]: experts over all ranks, or -1.
        pub topk_idx: u64,
        /// f32 [tokens, topk], or 0: weights of 1. Of a combine's receiving half: weights of the choices.
        pub topk_weights: u64,
        /// i32 [tokens, ranks]: positions, -1 where a token does not go.
        pub position: u64,
        /// u32 [2, ranks]: rows to each rank, and choices of its experts, each expert once a token. Out, of a dispatch's sending half.
        pub counted: u64,
        /// Out, of a sending half: u32 [ranks], EP_LOW_...; 0 for ranks that nothing was to be sent to.
        pub state: u64,
        /// Out: of a dispatch [local experts, ranks * max_tokens] rows as they travelled, of a combine bf16 [tokens, hidden]. 0: the operation is skipped.
        pub out: u64,
        /// Bytes from one row of a combine's results to the next.
        pub out_stride: u64,
        /// Out: i32 [local experts].
        pub expert_counts: u64,
        /// Out: i64 [local experts, ranks]: first << 32 | rows.
        pub segments: u64,
        /// Out: i32 [local experts, ranks * max_tokens].
        pub source_token: u64,
        /// u32 [2, ranks]: rows, and choices of this rank's experts, of each source; then [ranks, max_tokens] EpLowRow with EpLowPick [topk]. Out, of a
        /// dispatch's receiving half.
        pub records: u64,
        /// u64 [4 * ranks]: what cores tell each other, and in which launch.
        pub words: u64,
        /// u32 [4 * ranks, local experts]: rows of each share.
        pub counts: u64,
        /// Over several servers: memory that the card knows, for what goes to each of their ranks as much as a rank's part of a bank.
        pub staging: u64,
        /// Over several servers u64 [4 * ranks, max_tokens * columns]: offsets in a window of what each share has staged.
        pub posts: u64,
        /// Over several servers u64 ([`low_mail_words`]): what cores hand to those that post, zero at first and in each generation.
        pub mail: u64,
        /// Out: u64: the last launch that went well.
        pub done: u64,
        /// What the operation is: EP_LOW_DISPATCH, ...
        pub kind: u32,
        /// Tokens of the batch.
        pub tokens: u32,
        /// The ranks that something is to be sent to, as bits.
        pub to: u32,
        /// Not 0 in a receiving half.
        pub receives: u32,
        /// Not 0: a wait that lasts until the deadline is a failure. 0 where a rank that is late is left to the receiving half.
        pub judges: u32,
        /// Zero.
        pub reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_low_tell_kernel.
    pub struct LowTell = "EpLowTellArgs" {
        /// Rank and roles; as in throughput mode.
        pub launch: Launch,
        /// The ranks that low latency goes on without, as bits.
        pub masked: u32,
        /// 1 + the rank that this one blames; 0 for none.
        pub culprit: u32,
        /// Not 0: the launch lasts until all queues have done what was posted to them.
        pub drains: u32,
        /// Zero.
        pub reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_probe_kernel.
    pub struct Probe = "EpProbeArgs" {
        /// Rank and roles.
        pub launch: Launch,
        /// EpStep [steps of all scripts].
        pub steps: u64,
        /// Out: EpSaw, likewise.
        pub saw: u64,
        /// u32 [scripts + 1]: the first step of each script.
        pub first_of: u64,
        /// u64 [scripts]: nanoseconds.
        pub allowed: u64,
    }
}

const OPENS: &str = "/*
 * ep_args.h: what the kernels take: their parameters, and numbers that host and kernels must agree on.
 *
 * Written by ep_ascend::args.
 */
#ifndef EP_ARGS_H
#define EP_ARGS_H
#include \"ep_protocol.h\"
";

/// The header `ep_args.h`.
pub(crate) fn header() -> String {
    let parts = [
        format!("#define EP_NEAR {MOST_NEAR}u\n#define EP_RANKS {MOST_RANKS}u\n#define EP_PROBE_STEPS {MOST_STEPS}u\n"),
        Plant::declaration(),
        Roles::declaration(),
        Launch::declaration(),
        Queue::declaration(),
        Detail::declaration(),
        Line::declaration(),
        Positions::declaration(),
        Counts::declaration(),
        Dispatch::declaration(),
        Combine::declaration(),
        SpreadEnd::declaration(),
        Spread::declaration(),
        Fold::declaration(),
        Quantize::declaration(),
        LowState::declaration(),
        LowRow::declaration(),
        LowPick::declaration(),
        Low::declaration(),
        LowTell::declaration(),
        Verb::declaration(),
        Ended::declaration(),
        Step::declaration(),
        StepSaw::declaration(),
        Probe::declaration(),
    ];
    [OPENS, &parts.concat(), "\n#endif\n"].concat()
}
