//! What the kernels take, as the header `ep_args.h` says it to them.
//!
//! What every device has in common (`EpRank`, `EpLocal`, `EpReport` ...) is [`ep_core::device`]'s. Addresses are the device's.

use ep_core::declare::{CEnum, CStruct};
use ep_core::device::RankView;
use ep_core::layout::KernelRings;
use ep_core::{c_enum, c_struct};

use crate::{MOST_NEAR, MOST_RANKS, Roles};

c_enum! {
    /// A fault, made on purpose in kernels that are built for tests: EpLaunch.plant; 0 for none.
    pub enum Plant = "EP_PLANT" {
        /// A word is copied before the scalar unit has written it.
        WordFlag = 1,
        /// A word is overwritten before its copy has ended.
        WordReused = 2,
        /// A cell is read from the cache, without a clean.
        StaleCell = 3,
        /// A tail is published before its rows have landed.
        TailBeforeRows = 4,
        /// Credit is returned before the row has been read.
        CreditEarly = 5,
        /// A buffer is filled before the copies out of it have ended.
        BufferReused = 6,
        /// A payload is stored before it was loaded.
        FilledFlag = 7,
        /// The scalar unit reads a header before it was loaded, or credit is returned before the slot was read.
        ReadFlag = 8,
        /// A header is stored before the scalar unit has written it.
        HeaderFlag = 9,
        /// An addend is used before it was loaded.
        LoadedFlag = 10,
        /// A vector instruction uses what the one before has not yet written.
        VectorBarrier = 11,
        /// A rounded sum is overwritten before it was stored.
        OutReused = 12,
        /// A rounded sum is stored before it was written.
        SummedFlag = 13,
        /// Rows are put one slot further than they belong.
        WrongSlot = 14,
        /// Rows name a position that is one too high.
        PositionOffByOne = 15,
        /// Slots are filled without credit.
        NoCredit = 16,
        /// Ends of rings wait without publishing what is pending.
        Impolite = 17,
        /// Tails behind the second row are never published.
        TailLost = 18,
        /// No verdict is found when time is up.
        NoDeadline = 19,
        /// No wait is told to the other ranks.
        Silent = 20,
        /// A core's line is copied before the scalar unit has written it.
        LineFlag = 21,
        /// A count is kept by a scalar store that nothing cleans.
        ScalarStore = 22,
        /// A count is kept by a scalar store, in a line that other cores store to.
        SharedLine = 23,
        /// Rows are stored in whole blocks of 32 bytes.
        WholeBlocks = 24,
        /// Rows are put one slot further, also beyond the ring.
        BeyondTheRing = 25,
        /// Received rows are stored one row further.
        BeyondTheRows = 26,
        /// Rows are put to memory that is no window.
        NoWindow = 27,
        /// A flag is set twice.
        FlagTwice = 28,
        /// A flag is left set.
        FlagLeft = 29,
        /// A flag is waited for and not set.
        FlagMissing = 30,
        /// A flag has an id of the framework's.
        FlagId = 31,
        /// A role asks for all of the UB, beside what every core has.
        UbFull = 32,
        /// A buffer of the UB is not aligned.
        UbAlignment = 33,
        /// Sums are rounded after each row.
        RoundedTooEarly = 34,
        /// A sum is rounded by a mode that its type does not have.
        Rounding = 35,
        /// A sum begins with what the buffer holds.
        SumNotCleared = 36,
        /// An addend is loaded before the one before it in the buffer was used.
        InputReused = 37,
        /// Weights of other ranks are not summed.
        WeightsLost = 38,
        /// Choices of later ranks' experts stay in a row.
        ExpertsOfOthers = 39,
        /// The header of a ring is not compared.
        HeaderUnchecked = 40,
        /// Nobody looks at what kind of operation others have begun.
        KindUnheard = 41,
        /// Nobody looks at who is gone.
        GoneUnheard = 42,
        /// Verdicts of other ranks are not heard.
        VerdictUnheard = 43,
        /// Cells are published without the generation.
        NoGeneration = 44,
        /// Cells are published in the place of another writer.
        WrongCell = 45,
        /// Ticks of the system counter are taken for nanoseconds.
        Ticks = 46,
        /// Credit is returned for rows that were never sent.
        HeadBeyond = 47,
        /// A tail claims more rows than the ring holds.
        TailBeyond = 48,
        /// Only the first piece of a long row is received.
        LaterPieces = 49,
        /// A ring's opening names a first position that is one too high.
        WrongShare = 50,
        /// A ring's opening says one row more.
        RowsTooMany = 51,
        /// A ring is filled before the rings of the operation before are empty.
        NotClear = 52,
        /// A peer that is known to be gone is given up without another look.
        GoneAtOnce = 53,
        /// Both launches of an operation have the same mark.
        OneMark = 54,
        /// Counts are announced before they have landed.
        CountsEarly = 55,
        /// Counts are put to the bank of the next operation.
        WrongBank = 56,
        /// The header of a counts message is not compared.
        CountsUnchecked = 57,
        /// Choices are counted of the experts that the next rank has.
        CountsOfOthers = 58,
        /// More rows than there is room for are not refused.
        BoundUnheeded = 59,
        /// Counts of masked ranks are not zero.
        MaskedCounted = 60,
        /// A matrix of counts is stored before it was loaded.
        CountsFlag = 61,
        /// Choices are read before they were loaded.
        ChoicesFlag = 62,
        /// A token may name an expert twice, whatever was said.
        RepeatsTaken = 63,
        /// Choices of masked ranks' experts count.
        MaskedChosen = 64,
        /// Choices of no expert are not told.
        BadTaken = 65,
        /// A core tells what it has counted before that has landed.
        ToldEarly = 66,
        /// A core does not wait for the cores before it.
        ShareUnawaited = 67,
        /// Positions are overwritten before they were stored.
        PositionsReused = 68,
        /// A core says that it has ended a launch of which it did nothing.
        EndedUnbegun = 69,
        /// A piece of a row that becomes INT8 is used before it was loaded.
        PieceFlag = 70,
        /// The next piece is loaded before the vector unit has read the one before.
        PieceReused = 71,
        /// Magnitudes are compared by the scalar unit before the vector unit has written them.
        LargestFlag = 72,
        /// What lies behind a piece is compared, too.
        RestLeft = 73,
        /// Negative elements have no magnitude.
        SignsKept = 74,
        /// Only a row's first piece decides about its scale.
        FirstPiece = 75,
        /// Codes are rounded towards zero.
        TowardsZero = 76,
        /// Codes are stored before they were written.
        CodesFlag = 77,
        /// Codes are overwritten before they were stored.
        CodesReused = 78,
        /// Rows with an infinity or a NaN are coded as others.
        NoNumbers = 79,
        /// Rows of zeros are divided by zero.
        NoLeast = 80,
        /// The owner bit turns with the laps of a queue of twice the depth.
        OtherDepth = 81,
        /// The owner bit never turns.
        OwnerStays = 82,
        /// An element names the key of its source as that of its target.
        KeysSwapped = 83,
        /// An element is stored before the scalar unit has written it.
        ElementFlag = 84,
        /// The doorbell is rung before the element has landed.
        BellEarly = 85,
        /// The doorbell has all bits of the count.
        BellWide = 86,
        /// Values that are published to another server have one word as their source.
        OneWord = 87,
        /// Elements are posted without room.
        QueueFull = 88,
        /// Places of completions are not given back.
        CompletionsKept = 89,
        /// A tail goes to another server before its rows.
        TailFirst = 90,
        /// Staging memory is given back before the card has read it.
        StagingEarly = 91,
        /// Rows are sent to another server of which one core has filled its slots, and another has not.
        GapsSent = 92,
        /// Credit is not returned to another server.
        FarCreditLost = 93,
        /// Slots of a ring to another server are filled without credit.
        FarUnasked = 94,
        /// Staging memory is filled that was not given back.
        StagingUnasked = 95,
        /// A server is told of one row more for each of its ranks.
        ShareTooLong = 96,
        /// A row's mask names all ranks of a server.
        MaskOfAll = 97,
        /// Choices of a row that is passed on are counted over all experts.
        NotLocalized = 98,
        /// A server's own sum is not rounded before it is added.
        PartUnrounded = 99,
        /// A coordinator ends though its queue was too full for all that was staged.
        LeftUnsent = 100,
        /// A rank does not say what its wait comes from, but whom it waits for.
        NotRelayed = 101,
        /// Waits for ranks that wait themselves count like others.
        ExplainedFirst = 102,
        /// A rank that has failed ends before the card has sent its verdict.
        VerdictUnposted = 103,
        /// Rows of low latency are put to banks that are still read.
        LowBankUnasked = 104,
        /// A rank says that it has received before it has read.
        LowReceivedEarly = 105,
        /// Rows are put to the bank of the other parity.
        LowWrongBank = 106,
        /// An arrival is published before its rows are put.
        LowToldEarly = 107,
        /// An arrival is published before the cores have landed that share its rows.
        LowHelpersUnawaited = 108,
        /// A word of another core is read from the cache, without a clean.
        LowStaleWord = 109,
        /// A core tells what it has counted of received rows before that has landed.
        LowCountsEarly = 110,
        /// A core places received rows without those of the shares before.
        LowSharesUnawaited = 111,
        /// Headers bear no generation.
        LowNoGeneration = 112,
        /// A source that has not come is taken for one that sends nothing.
        LowArrivalUnawaited = 113,
        /// An arrival says one row more.
        LowOneMore = 114,
        /// What an arrival brings is not compared.
        LowKindUnchecked = 115,
        /// A rank does not hear that it was masked.
        LowMaskUnheard = 116,
        /// Verdicts of throughput mode are not heard in low latency.
        LowVerdictUnheard = 117,
        /// A rank does not say for whom it waits in low latency.
        LowSilent = 118,
        /// No wait of low latency ends when time is up.
        LowNoDeadline = 119,
        /// Rows of low latency are stored in whole blocks of 32 bytes.
        LowWholeBlocks = 120,
        /// Only the first piece of a long row is sent.
        LowFirstPiece = 121,
        /// What lies between codes and scale is sent as it is.
        LowPadLeft = 122,
        /// The header of a result is stored before the scalar unit has written it.
        LowResultHeaderFlag = 123,
        /// All results of a rank for a token go to one slot.
        LowOneColumn = 124,
        /// A rank sums its experts' results without weights.
        LowWeightsLost = 125,
        /// A weighted addend is loaded before the one before it in the buffer was used.
        LowAddendReused = 126,
        /// A weighted addend is used before it was loaded.
        LowAddendFlag = 127,
        /// A weighted sum uses what the instruction before has not yet written.
        LowStepBarrier = 128,
        /// A weighted sum is stored before it was rounded.
        LowSumFlag = 129,
        /// A step of a weighted sum is rounded twice.
        LowRoundedTwice = 130,
        /// An infinity in a weighted sum becomes no number.
        LowInfinitiesLost = 131,
        /// What a step of a weighted sum lacks is rounded to nearest, and then once more.
        LowNotOdd = 132,
        /// Staging memory of low latency is filled anew before the card has acknowledged what was posted out of it.
        LowFarStagingEarly = 133,
        /// A core tells of one row more than it has staged.
        LowFarOneMore = 134,
        /// An arrival goes to another server before its rows.
        LowFarArrivalFirst = 135,
        /// An arrival goes to another server when the first of its rows' cores has staged its own.
        LowFarHelpersUnawaited = 136,
        /// A message to another server carries a row's header without its payload.
        LowFarCut = 137,
        /// For whom this rank waits is not told to other servers.
        LowFarSilent = 138,
        /// What this rank has received is not told to other servers.
        LowFarUnreceived = 139,
        /// A rank of another server is not told that it is masked.
        LowFarMaskUntold = 140,
    }
}

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
        format!("#define EP_NEAR {MOST_NEAR}u\n#define EP_RANKS {MOST_RANKS}u\n"),
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
        Quantize::declaration(),
        LowState::declaration(),
        LowRow::declaration(),
        LowPick::declaration(),
        Low::declaration(),
        LowTell::declaration(),
    ];
    [OPENS, &parts.concat(), "\n#endif\n"].concat()
}
