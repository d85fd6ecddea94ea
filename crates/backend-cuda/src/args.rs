//! What the kernels take, as the header `ep_args.h` says it to them: their parameters, and numbers that host and kernels must agree on.
//!
//! What every device has in common (`EpRank`, `EpLocal`, `EpReport` ...) is [`ep_core::device`]'s.

mod checks;
mod hca;
mod low_latency;
mod moves;
mod pulled;
mod throughput;

pub(crate) use checks::{Ceiling, Consumer, Event, Meet, Posts, Probe, Test};
#[cfg_attr(not(feature = "workshop"), allow(unreachable_pub))] // What the workshop publishes.
pub use checks::{Plant, RingStep};
pub(crate) use hca::{HCA_BATCH, HCA_JOBS, Hca, HcaJob, HcaQueue, HcaRegion, HcaState};
pub(crate) use low_latency::{LowCombine, LowDispatch};
pub(crate) use moves::{MOST_MOVES, MOVE_THREADS, MOVE_UNIT, Moves};
pub(crate) use pulled::{CombinePulled, DispatchPulled};
pub(crate) use throughput::{
    Blank, Combine, CombineOffered, CombineRing, Counts, Dispatch, DispatchRing, Fold, Members, Offer, Positions,
    Slots, Spread, SumShape, Unpack,
};

use ep_core::Rank;
use ep_core::c_struct;
use ep_core::declare::{CEnum, CStruct};
use ep_core::device::probe::{Ended, Step, StepSaw, Verb};

c_struct! {
    /// Parameters of kernels that are about one other rank.
    pub(crate) struct OfPeer = "EpOfPeerArgs" {
        /// That rank.
        pub(crate) peer: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

impl From<Rank> for OfPeer {
    fn from(peer: Rank) -> Self {
        Self { peer: peer.0, reserved: 0 }
    }
}

/// Warps of a block of the dispatch kernel at most.
pub(crate) const DISPATCH_WARPS: u32 = 16;
/// Warps of a block of the combine kernel at most: each has 96 registers, which the reducer of rings needs.
pub(crate) const COMBINE_WARPS: u32 = 20;
/// The same where they pull by the bulk copy engine.
pub(crate) const COMBINE_BULK_WARPS: u32 = 20;
/// Warps of a block of the kernels of rings.
pub(crate) const RING_WARPS: u32 = 8;
/// Warps of a block of the kernels of rings between nodes at most: their roles are played by teams of them. Each has 168 registers: the posts of a
/// gatherer need so many.
pub(crate) const TEAMS_WARPS: u32 = 12;
/// Warps of a block of the kernels of outboxes at most.
pub(crate) const PULLED_WARPS: u32 = 16;
/// Bytes of an `EpBatch`: rows of a part of a token.
pub(crate) const BATCH_BYTES: u32 = 16;
/// Bytes of a stage's barrier.
pub(crate) const BARRIER: u32 = 8;
/// Bytes of an `EpItem`: a part of a row on its way.
pub(crate) const ITEM_BYTES: u32 = 64;
/// Bytes of an `EpOutboxEnd`: an end of the rings with a rank.
pub(crate) const OUTBOX_END_BYTES: u32 = 32;
/// Bytes of an `EpRingSource`: where a rank's results lie in its outbox.
pub(crate) const RING_SOURCE_BYTES: u32 = 32;
/// Bytes of an `EpPulledFrom`.
pub(crate) const PULLED_FROM_BYTES: u32 = 24;
/// Pieces that a puller may be loading.
pub(crate) const PULLED_LOG: u32 = 64;
/// Rows whose stores a copier of results still has to see done, at most.
pub(crate) const LAID_LOG: u32 = 64;
/// Threads of a block of low latency.
pub(crate) const LOW_THREADS: u32 = 512;
/// A launch of low latency sends.
pub(crate) const LOW_SEND: u32 = 1;
/// A launch of low latency receives.
pub(crate) const LOW_RECEIVE: u32 = 2;
/// Blocks of the kernel that finds positions, at most.
pub(crate) const POSITION_BLOCKS: u32 = 64;
/// Tokens that a block of that kernel serves at a time.
pub(crate) const POSITION_THREADS: u32 = 512;
/// Threads of the kernel that exchanges counts.
pub(crate) const COUNTS_THREADS: u32 = 512;
/// Threads of a block of the kernel that finds which ranks and experts a batch goes to.
pub(crate) const MEMBERS_THREADS: u32 = 512;
/// Warps of a block of the kernel that finds where rows by expert stand, at most.
pub(crate) const SLOTS_WARPS: u32 = 16;
/// Bytes of an `EpPlace`: where rows go at a rank.
pub(crate) const PLACE_BYTES: u32 = 24;
/// Bytes of an `EpSource`: where a rank's offered rows lie.
pub(crate) const SOURCE_BYTES: u32 = 32;
/// Bytes of an `EpRoute`: what a reducer of rings knows of a rank.
pub(crate) const ROUTE_BYTES: u32 = 56;
/// Bytes of an `EpFound`: a row of a token that it sums.
pub(crate) const FOUND_BYTES: u32 = 64;
/// Bytes of an `EpTokenRows`.
pub(crate) const TOKEN_ROWS_BYTES: u32 = 16;
/// Tokens whose rows such a warp has found and not given back.
pub(crate) const TOKENS_AHEAD: u32 = 2;
/// Bytes that an `EpLead` has room in.
pub(crate) const LEAD_BYTES: u32 = 208;
/// Tokens whose positions it has at hand.
pub(crate) const TOKENS_HELD: u32 = 8;
/// The same of a team of warps: one for each lane.
pub(crate) const TEAM_HELD: u32 = 32;
/// Units of 16 bytes of a row that a lane of it sums at a time.
pub(crate) const COLUMNS: u32 = 4;
/// Parts of rows that it has on their way, where there is room for so many.
pub(crate) const FETCHES: u32 = 8;
/// Bytes of an `EpExit`: where a forwarder's rows leave for a rank of its node.
pub(crate) const EXIT_BYTES: u32 = 72;
/// Pieces of rows that a warp of a team has room for: one is stored while the others come.
pub(crate) const CARRY_STAGES: u32 = 4;
/// Bytes that a leader has room in for what it says to its team.
pub(crate) const BATON_BYTES: u32 = 48;
/// Bytes that a copier keeps of each chunk: an `EpChunk` and a barrier.
pub(crate) const CHUNK_STATE_BYTES: u32 = 24;
/// Chunks that a copier counts together.
pub(crate) const COUNTED: u32 = 4;

const NUMBERS: [(&str, u32); 39] = [
    ("HCA_BATCH", HCA_BATCH),
    ("HCA_JOBS", HCA_JOBS),
    ("DISPATCH_WARPS", DISPATCH_WARPS),
    ("MOVE_THREADS", MOVE_THREADS),
    ("COMBINE_WARPS", COMBINE_WARPS),
    ("COMBINE_BULK_WARPS", COMBINE_BULK_WARPS),
    ("RING_WARPS", RING_WARPS),
    ("TEAMS_WARPS", TEAMS_WARPS),
    ("CARRY_STAGES", CARRY_STAGES),
    ("PULLED_WARPS", PULLED_WARPS),
    ("BATCH_BYTES", BATCH_BYTES),
    ("ITEM_BYTES", ITEM_BYTES),
    ("OUTBOX_END_BYTES", OUTBOX_END_BYTES),
    ("RING_SOURCE_BYTES", RING_SOURCE_BYTES),
    ("PULLED_FROM_BYTES", PULLED_FROM_BYTES),
    ("PULLED_LOG", PULLED_LOG),
    ("LAID_LOG", LAID_LOG),
    ("LOW_THREADS", LOW_THREADS),
    ("LOW_SEND", LOW_SEND),
    ("LOW_RECEIVE", LOW_RECEIVE),
    ("POSITION_BLOCKS", POSITION_BLOCKS),
    ("POSITION_THREADS", POSITION_THREADS),
    ("COUNTS_THREADS", COUNTS_THREADS),
    ("MEMBERS_THREADS", MEMBERS_THREADS),
    ("SLOTS_WARPS", SLOTS_WARPS),
    ("PLACE_BYTES", PLACE_BYTES),
    ("SOURCE_BYTES", SOURCE_BYTES),
    ("ROUTE_BYTES", ROUTE_BYTES),
    ("FOUND_BYTES", FOUND_BYTES),
    ("TOKEN_ROWS_BYTES", TOKEN_ROWS_BYTES),
    ("TOKENS_AHEAD", TOKENS_AHEAD),
    ("TEAM_HELD", TEAM_HELD),
    ("LEAD_BYTES", LEAD_BYTES),
    ("TOKENS_HELD", TOKENS_HELD),
    ("COLUMNS", COLUMNS),
    ("EXIT_BYTES", EXIT_BYTES),
    ("BATON_BYTES", BATON_BYTES),
    ("CHUNK_STATE_BYTES", CHUNK_STATE_BYTES),
    ("COUNTED", COUNTED),
];

const OPENS: &str = "/*
 * ep_args.h: what the kernels take: their parameters, and numbers that host and kernels must agree on.
 *
 * Written by ep_cuda::args.
 */
#ifndef EP_ARGS_H
#define EP_ARGS_H
#include \"ep_protocol.h\"
";

/// The header `ep_args.h`.
pub(crate) fn header() -> String {
    let mut text = String::from(OPENS);
    text.extend(NUMBERS.map(|(name, value)| format!("#define EP_{name} {value}u\n")));
    let parts = [
        Plant::declaration(),
        RingStep::declaration(),
        Verb::declaration(),
        Ended::declaration(),
        Positions::declaration(),
        Members::declaration(),
        Counts::declaration(),
        DispatchRing::declaration(),
        Dispatch::declaration(),
        Unpack::declaration(),
        Blank::declaration(),
        Slots::declaration(),
        Spread::declaration(),
        Fold::declaration(),
        Offer::declaration(),
        Combine::declaration(),
        CombineRing::declaration(),
        SumShape::declaration(),
        CombineOffered::declaration(),
        DispatchPulled::declaration(),
        CombinePulled::declaration(),
        LowDispatch::declaration(),
        LowCombine::declaration(),
        OfPeer::declaration(),
        Event::declaration(),
        Test::declaration(),
        Step::declaration(),
        StepSaw::declaration(),
        Probe::declaration(),
        Posts::declaration(),
        Consumer::declaration(),
        HcaQueue::declaration(),
        HcaRegion::declaration(),
        HcaJob::declaration(),
        HcaState::declaration(),
        Hca::declaration(),
        Moves::declaration(),
        Ceiling::declaration(),
        Meet::declaration(),
    ];
    text.extend(parts);
    text + "\n#endif\n"
}
