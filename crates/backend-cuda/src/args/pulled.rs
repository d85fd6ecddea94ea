//! Parameters of the kernels whose rows lie in outboxes.

use ep_core::c_struct;
use ep_core::device::BlockRole;

use super::{CombineRing, DispatchRing, PULLED_WARPS, SumShape};

c_struct! {
    /// Parameters of ep_dispatch_pulled_kernel.
    pub(crate) struct DispatchPulled = "EpDispatchPulledArgs" {
        /// What is sent, and where what comes goes; without roles.
        pub(crate) ring: DispatchRing,
        /// u32 [ranks]: tokens of each rank's batch.
        pub(crate) tokens_of: u64,
        /// u32 [ranks], zero before and after: rows that came from each rank.
        pub(crate) arrived: u64,
        /// Warps of a block that lay payloads, 1 or more.
        pub(crate) copiers: u32,
        /// Warps that write heads, 1 or more.
        pub(crate) writers: u32,
        /// Warps that pull, 1 or more.
        pub(crate) pullers: u32,
        /// Of each copier and puller, in shared memory: 3 or more.
        pub(crate) stages: u32,
        /// Bytes of a stage, a multiple of 128.
        pub(crate) room: u32,
        /// Bytes of codes in a part of a row, a multiple of 16.
        pub(crate) piece: u32,
        /// Parts of a row.
        pub(crate) pieces: u32,
        /// Slots that a warp takes at once, at most 32 and at most those of the outbox.
        pub(crate) piece_slots: u32,
        /// Whether a row's scales are loaded at once: they lie side by side, in units of 16 bytes.
        pub(crate) bulk_scales: u32,
        /// Slots that this rank fills at a time, at least any rank's `piece_slots`, and at most those of the outbox.
        pub(crate) window: u32,
        /// What the warps of a block do.
        pub(crate) block: [BlockRole; PULLED_WARPS as usize],
    }
}

c_struct! {
    /// Parameters of ep_combine_pulled_kernel.
    pub(crate) struct CombinePulled = "EpCombinePulledArgs" {
        /// What is returned and summed; without roles, block and copiers.
        pub(crate) ring: CombineRing,
        /// Warps of a block that pull and sum, 1 or more.
        pub(crate) pullers: u32,
        /// What each of them has in shared memory.
        pub(crate) sums: SumShape,
        /// Warps that lay rows, 1 or more.
        pub(crate) copiers: u32,
        /// Of each copier, in shared memory: 3 or more.
        pub(crate) stages: u32,
        /// Bytes of a stage, a multiple of 128.
        pub(crate) piece_room: u32,
        /// Bytes of a part of a row, as it is laid: a multiple of 16.
        pub(crate) piece: u32,
        /// Parts of a row, as it is laid.
        pub(crate) pieces: u32,
        /// Whether a row's weights are loaded at once: in units of 16 bytes.
        pub(crate) bulk_weights: u32,
        /// Slots that this rank fills at a time for a reader, at most those of an outbox.
        pub(crate) window: u32,
        /// The fewest that any rank fills at a time: whoever has more rows for this one waits for its credit.
        pub(crate) least_window: u32,
        /// What the warps of a block do.
        pub(crate) block: [BlockRole; PULLED_WARPS as usize],
    }
}
