//! One rank as its kernels see it, and what they keep between launches.

use crate::layout::KernelWindow;
use crate::topology::Rank;
use crate::{c_enum, c_struct};

c_enum! {
    /// Meetings of a launch's blocks: indices of EpLocal.arrived.
    pub enum Meeting = "EP_MEETING" {
        /// Rows have been moved.
        Moved = 0,
        /// Rows have been read.
        Read = 1,
        /// Rows have been placed, before those that go through rings.
        Placed = 2,
    }
}

c_struct! {
    /// What the kernels of throughput mode keep between launches, in the rank's own device memory; zero at first. Behind it lie
    /// u32 `gone[ranks]`: not 0 for ranks of which the host knows that they do nothing any more.
    pub struct Local = "EpLocal" {
        /// Operations completed: the running one is ops_done + 1.
        pub ops_done: u64,
        /// Not 0: this rank has failed, and every kernel ends at once.
        pub failed: u32,
        /// Alarms published.
        pub serial: u32,
        /// Blocks that have come to a meeting (EP_MEETING_...); 0 again when all have.
        pub arrived: [u32; 4],
        /// 1 + the first token whose choices are wrong; 0 for none.
        pub bad_token: u32,
        /// Not 0 when a kernel that places or pulls left rows to the ring kernel behind it.
        pub rings: u32,
        /// Generation of the communicator: graphs of an earlier one must not run.
        pub generation: u32,
        /// Not 0 while a thread publishes an alarm: cells must not fall.
        pub speaking: u32,
        /// Of the waits that last long the one nearest to the cause (ep_wait_key); 0 for none.
        pub foremost: u64,
        /// The last wait that the other ranks were told of.
        pub told: u64,
        /// When, in nanoseconds of the device's clock.
        pub told_at: u64,
        /// Not 0: the counts of the operation have come, and what was enqueued behind them before the host knew them has room for its rows.
        pub ahead: u32,
        /// Zero.
        pub reserved: u32,
    }
}

impl Local {
    /// Bytes of it and of what lies behind it, of so many ranks.
    pub const fn bytes(ranks: usize) -> usize {
        size_of::<Self>() + 4 * ranks
    }

    /// Offset of the word that says that `rank` is gone.
    pub const fn gone(rank: Rank) -> usize {
        size_of::<Self>() + 4 * rank.index()
    }
}

c_struct! {
    /// What the kernels of low latency keep between launches, in the rank's own device memory; zero at first, and in each generation.
    /// Behind it lie u32 `skipped[ranks]`, not 0 where a block of this launch has not put its rows for a rank; for each bank u32 `late[ranks]`,
    /// not 0 where a rank is still to be sent rows; u32 `gone[ranks]` as behind EpLocal; and u32 `taken[blocks]`, not 0 where a block of
    /// this launch has taken that share of what is sent.
    pub struct Low = "EpLow" {
        /// Operations that were sent.
        pub sent: u64,
        /// Operations that were received.
        pub received: u64,
        /// Not 0: this launch has failed.
        pub failed: u32,
        /// Not 0: an earlier launch has failed, and the host has not heard of it yet.
        pub broken: u32,
        /// Blocks that have come to the end of the launch, and EP_LOW_TROUBLE.
        pub arrived: u32,
        /// Values of Waiting that were published.
        pub serial: u32,
        /// 1 + the rank that this one has said it waits for; 0 for none.
        pub voice: u32,
        /// Not 0: something was said and not taken back.
        pub said: u32,
        /// For each bank: whether there are ranks that were not sent all, because their banks were not free in time.
        pub late: [u32; 2],
        /// Generation of the communicator: graphs of an earlier one must not run.
        pub generation: u32,
        /// Not 0 while a thread says whom this rank waits for, where there are several nodes: their lanes have one poster.
        pub speaking: u32,
        /// What this launch has found out of whoever posts for this rank between nodes: EP_FAR_STALLED, EP_FAR_GONE, or 0.
        pub poster: u32,
        /// Zero.
        pub reserved: u32,
        /// Operations of earlier generations, at least: tags of units run on from there.
        pub serials: u64,
        /// The last of them that this rank sent, as tags count.
        pub last: u64,
    }
}

impl Low {
    /// Bytes of it and of what lies behind it, of so many ranks and of launches with at most so many blocks.
    pub const fn bytes(ranks: usize, blocks: usize) -> usize {
        size_of::<Self>() + 4 * (4 * ranks + blocks)
    }

    /// Offset of the words `late[ranks]`, of so many ranks, for the bank of `op`.
    pub const fn late(ranks: u32, op: u64) -> usize {
        size_of::<Self>() + 4 * (1 + (op % 2) as usize) * ranks as usize
    }

    /// Offset of the word that says that `rank`, of so many ranks, is gone.
    pub const fn gone(ranks: u32, rank: Rank) -> usize {
        size_of::<Self>() + 4 * (3 * ranks as usize + rank.index())
    }

    /// Offset of the word that says that a share is taken, of so many ranks.
    pub const fn taken(ranks: u32, share: u32) -> usize {
        size_of::<Self>() + 4 * (4 * ranks as usize + share as usize)
    }
}

c_struct! {
    /// By what consumers learn of the rows of a low-latency dispatch as they come, and combine of results as they are ready: in device memory,
    /// zero at first. Behind it lie three arrays of u64 counters, `[local experts, blocks]` each: `arrived`, `expected`, `ready`. A counter holds the
    /// number of a batch in its high half and a count in its low half. So it never falls, and nothing is cleared: a batch that is sent moves
    /// `arrived` and `ready` to its number. Rows of a block are there once its `expected` is of the batch and its `arrived` has reached that.
    pub struct Early = "EpEarly" {
        /// The number of the last batch that was sent, in the high half.
        pub epoch: u64,
        /// The same of a batch whose rows do not come, as its launch has failed; 0 for none.
        pub stopped: u64,
    }
}

/// One batch more, as an `EpEarly` and its counters have it.
pub const EPOCH: u64 = 1 << 32;

impl Early {
    /// Bytes of it and of what lies behind it, of so many counters in each array.
    pub const fn bytes(counters: usize) -> usize {
        Self::ready(counters, counters)
    }

    /// Offset of counter `at` of `arrived`: the rows of that block that are there, in a unit of the launch's.
    pub const fn arrived(at: usize) -> usize {
        size_of::<Self>() + 8 * at
    }

    /// Offset of counter `at` of `expected`, of so many in an array: how many will come, in the same unit.
    pub const fn expected(counters: usize, at: usize) -> usize {
        Self::arrived(counters + at)
    }

    /// Offset of counter `at` of `ready`: what the caller's kernels have added for results of that block.
    pub const fn ready(counters: usize, at: usize) -> usize {
        Self::arrived(2 * counters + at)
    }
}

c_struct! {
    /// What the kernels of low latency know of a rank of another node, in the rank's own device memory; zero at first, and in each generation.
    pub struct LowFar = "EpLowFar" {
        /// The last operation of which everything was posted to it.
        pub posted: u64,
        /// Of the last put from what is staged for it.
        pub ticket: u64,
        /// Rows of this launch that are staged for it, and EP_LOW_TOLD less their number once that is known.
        pub counted: u32,
        /// Rows of a dispatch to it.
        pub rows: u32,
        /// Not 0 while a thread posts to the lane of its rows.
        pub posting: u32,
        /// Not 0: puts may still read what is staged for it.
        pub busy: u32,
        /// What became of the posts of this launch: EP_FAR_...
        pub status: u32,
        /// Zero.
        pub reserved: u32,
    }
}

c_struct! {
    /// The beginning of a handle's numbers; u32 `matrix[ranks, ranks]` follows: rows from source to destination.
    pub struct PlanHead = "EpPlan" {
        /// The dispatch that made it.
        pub op: u64,
    }
}

c_struct! {
    /// One rank as its kernels see it. Addresses are the device's.
    pub struct RankView = "EpRank" {
        /// How the window is cut.
        pub w: KernelWindow,
        /// Address of an array `[ranks]`: where the windows lie, the own included; 0 for masked ranks, 1 for those of other nodes.
        pub windows: u64,
        /// Address of the EpLocal, in launches of low latency of the EpLow.
        pub local: u64,
        /// Address of the EpReport.
        pub report: u64,
        /// Address of an array `[2, ranks, tracks]`: slots sent to, and taken from, each ring, ever. In launches of low latency over several nodes of
        /// an EpLowFar `[ranks]`.
        pub cursors: u64,
        /// The first operation of this generation.
        pub first_op: u64,
        /// Hash of shape and settings of the call (ep_settings).
        pub settings: u64,
        /// Nanoseconds that the waits of a kernel may take.
        pub allowed: u64,
        /// Address of the EpPlan of the operation; 0 where it has none.
        pub plan: u64,
        /// Address of what is counted (ep_count_op); 0 where nothing is.
        pub tally: u64,
        /// This rank.
        pub me: u32,
        /// Generation of the communicator.
        pub generation: u32,
        /// Kind of the operation, EP_KIND_...
        pub kind: u32,
        /// Not 0 where the operation goes along the plan of an earlier one.
        pub replays: u32,
        /// Address of the EpTest in builds for tests; 0 in others.
        pub test: u64,
        /// Address of an array `[ranks, lanes]`: the EpFar.state of each lane to a rank of another node; 0 for other lanes.
        pub far: u64,
    }
}
