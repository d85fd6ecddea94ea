//! The parameters of the kernels, as the structs of the same names in `kernels/` have them. The compilation of a kernel fails
//! where the sizes differ.

use ep_core::layout::{KernelRings, KernelWindow};
use zerocopy::{Immutable, IntoBytes};

/// Bytes of `EpLocal`.
pub(crate) const LOCAL_BYTES: usize = 64;
/// Bytes of `EpLow`.
pub(crate) const LOW_BYTES: usize = 64;
/// Bytes of `EpReport`.
pub(crate) const REPORT_BYTES: usize = 56;

/// `EpRank`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct RankView {
    pub(crate) window: KernelWindow,
    pub(crate) windows: u64,
    pub(crate) local: u64,
    pub(crate) report: u64,
    pub(crate) cursors: u64,
    pub(crate) first_op: u64,
    pub(crate) settings: u64,
    pub(crate) allowed: u64,
    pub(crate) plan: u64,
    pub(crate) tally: u64,
    pub(crate) me: u32,
    pub(crate) generation: u32,
    pub(crate) kind: u32,
    pub(crate) replays: u32,
    pub(crate) test: u64,
}

/// `EpTest`.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Test {
    pub(crate) seed: u64,
    pub(crate) host: u64,
    pub(crate) events: u64,
    pub(crate) late: u64,
    pub(crate) room: u32,
    pub(crate) count: u32,
    pub(crate) longest: u32,
    pub(crate) slow: u32,
    pub(crate) plant: u32,
    pub(crate) poison: u32,
    pub(crate) crashes: u32,
    pub(crate) verbs: u32,
    pub(crate) crashed: u32,
    pub(crate) late_to: u32,
    pub(crate) late_lane: u32,
    pub(crate) unharmed: u32,
    pub(crate) lost: u32,
    pub(crate) reserved: u32,
}

/// `EpLayoutArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Layout {
    pub(crate) topk_idx: u64,
    pub(crate) in_rank: u64,
    pub(crate) position: u64,
    pub(crate) rows: u64,
    pub(crate) choices: u64,
    pub(crate) partial: u64,
    pub(crate) flags: u64,
    pub(crate) tokens: u32,
    pub(crate) topk: u32,
}

/// `EpMembersArgs`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Members {
    pub(crate) topk_idx: u64,
    pub(crate) numbers: u64,
    pub(crate) in_rank: u64,
    pub(crate) tokens: u32,
    pub(crate) topk: u32,
    pub(crate) ranks: u32,
    pub(crate) experts: u32,
}

/// `EpCountsArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Counts {
    pub(crate) rows: u64,
    pub(crate) choices: u64,
    pub(crate) matrix: u64,
    pub(crate) first_at: u64,
    pub(crate) first_of: u64,
    pub(crate) tokens_of: u64,
    pub(crate) chosen: u64,
    pub(crate) arrived: u64,
    pub(crate) host: u64,
    pub(crate) ticket: u64,
    pub(crate) received: u64,
    pub(crate) of_expert: u64,
    pub(crate) tokens: u32,
    pub(crate) alignment: u32,
    pub(crate) bound: u32,
    pub(crate) refuses: u32,
}

/// `EpDispatchArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Dispatch {
    /// What it begins with.
    pub(crate) ring: DispatchRing,
    pub(crate) first_at: u64,
    pub(crate) base: u64,
    pub(crate) base_rows: u32,
    pub(crate) movers: u32,
    pub(crate) stages: u32,
    pub(crate) piece: u32,
    pub(crate) pieces: u32,
    pub(crate) headers: u32,
    pub(crate) plays: u32,
    pub(crate) bulk_scales: u32,
}

/// `EpUnpackArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Unpack {
    pub(crate) base: u64,
    pub(crate) first_of: u64,
    pub(crate) topk_idx: u64,
    pub(crate) topk_weights: u64,
    pub(crate) source_token: u64,
    pub(crate) source_rank: u64,
    pub(crate) op: u64,
    pub(crate) rows: u32,
    pub(crate) reserved: u32,
}

/// `EpOfferArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Offer {
    pub(crate) base: u64,
    pub(crate) first_of: u64,
    pub(crate) source_token: u64,
    pub(crate) topk_weights: u64,
    pub(crate) rows: u32,
    pub(crate) reserved: u32,
}

/// `EpCombineArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Combine {
    pub(crate) y: u64,
    pub(crate) y_stride: u64,
    pub(crate) position: u64,
    pub(crate) first_at: u64,
    pub(crate) matrix: u64,
    pub(crate) bias: [u64; 2],
    pub(crate) bias_stride: u64,
    pub(crate) out: u64,
    pub(crate) out_stride: u64,
    pub(crate) weights: u64,
    pub(crate) own_weights: u64,
    pub(crate) base: u64,
    pub(crate) first_of: u64,
    pub(crate) copied: u64,
    pub(crate) base_rows: u32,
    pub(crate) offers_weights: u32,
    pub(crate) tokens: u32,
    pub(crate) copiers: u32,
    pub(crate) stages: u32,
    pub(crate) chunk: u32,
}

/// `EpDispatchRingArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct DispatchRing {
    pub(crate) rings: KernelRings,
    pub(crate) x: u64,
    pub(crate) x_stride: u64,
    pub(crate) scales: u64,
    pub(crate) scales_token: u64,
    pub(crate) scales_word: u64,
    pub(crate) position: u64,
    pub(crate) topk_idx: u64,
    pub(crate) topk_weights: u64,
    pub(crate) first_of: u64,
    pub(crate) out: u64,
    pub(crate) out_scales: u64,
    pub(crate) out_idx: u64,
    pub(crate) out_weights: u64,
    pub(crate) out_token: u64,
    pub(crate) out_rank: u64,
    pub(crate) tokens: u32,
    pub(crate) notes: u32,
}

/// `EpCombineRingArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct CombineRing {
    pub(crate) combine: Combine,
    pub(crate) rings: KernelRings,
    pub(crate) source_token: u64,
    pub(crate) tokens_of: u64,
}

/// `EpLowDispatchArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct LowDispatch {
    pub(crate) x: u64,
    pub(crate) x_stride: u64,
    pub(crate) topk_idx: u64,
    pub(crate) topk_weights: u64,
    pub(crate) routed: u64,
    pub(crate) out: u64,
    pub(crate) out_stride: u64,
    pub(crate) expert_counts: u64,
    pub(crate) segments: u64,
    pub(crate) source_token: u64,
    pub(crate) records: u64,
    pub(crate) counters: u64,
    pub(crate) scales: u64,
    pub(crate) scales_expert: u64,
    pub(crate) scales_row: u64,
    pub(crate) scales_word: u64,
    pub(crate) kept_idx: u64,
    pub(crate) stats: u64,
    pub(crate) tokens: u32,
    pub(crate) phases: u32,
    pub(crate) in_flight: u32,
    pub(crate) reserved: u32,
}

/// `EpLowCombineArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct LowCombine {
    pub(crate) y: u64,
    pub(crate) y_stride: u64,
    pub(crate) records: u64,
    pub(crate) topk_idx: u64,
    pub(crate) topk_weights: u64,
    pub(crate) routed: u64,
    pub(crate) out: u64,
    pub(crate) out_stride: u64,
    pub(crate) counters: u64,
    pub(crate) tokens: u32,
    pub(crate) kind: u32,
    pub(crate) phases: u32,
    pub(crate) in_flight: u32,
}

/// `EpLowMaskArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct LowMask {
    pub(crate) peer: u32,
    pub(crate) reserved: u32,
}

/// `EpProbeArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Probe {
    pub(crate) steps: u64,
    pub(crate) saw: u64,
    pub(crate) first_of: u64,
    pub(crate) allowed: u64,
}

/// `EpCeilingArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Ceiling {
    pub(crate) source: u64,
    pub(crate) base: u64,
    pub(crate) bytes: u64,
}

/// `EpMeetArgs`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Meet {
    pub(crate) number: u64,
    pub(crate) pause: u64,
}
