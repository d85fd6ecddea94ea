//! What kernels take that only tests and measurements use.

use ep_core::{c_enum, c_struct};

c_struct! {
    /// What an end of a ring has done.
    pub(crate) struct Event = "EpEvent" {
        /// EP_EVENT_...
        pub(crate) kind: u32,
        /// The rank at the other end.
        pub(crate) peer: u32,
        /// Of the ring.
        pub(crate) track: u32,
        /// Of the launch.
        pub(crate) block: u32,
        /// Slots, ever.
        pub(crate) count: u64,
        /// The operation.
        pub(crate) op: u64,
    }
}

c_struct! {
    /// What kernels built for tests do beside their work, of one rank; in its device memory.
    pub(crate) struct Test = "EpTest" {
        /// Seed of delays; 0 for none.
        pub(crate) seed: u64,
        /// Mapped u32: 1 when the rank has crashed.
        pub(crate) host: u64,
        /// EpEvent [room]; 0 for none.
        pub(crate) events: u64,
        /// Nanoseconds that publishes to late_to come later.
        pub(crate) late: u64,
        /// Events that there is room for.
        pub(crate) room: u32,
        /// Events, also those that had no room.
        pub(crate) count: u32,
        /// Nanoseconds of the longest delay.
        pub(crate) longest: u32,
        /// Nanoseconds that every verb takes longer.
        pub(crate) slow: u32,
        /// EP_PLANT_...; 0 for none.
        pub(crate) plant: u32,
        /// Whether what was read is overwritten.
        pub(crate) poison: u32,
        /// Whether the rank is to crash, after so many verbs.
        pub(crate) crashes: u32,
        /// Those that are left.
        pub(crate) verbs: i32,
        /// Whether it has.
        pub(crate) crashed: u32,
        /// A rank; EP_FULL for none.
        pub(crate) late_to: u32,
        /// Index of the lane; EP_FULL for all.
        pub(crate) late_lane: u32,
        /// Publishes to late_to that are in time.
        pub(crate) unharmed: i32,
        /// Whether the later ones never come.
        pub(crate) lost: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_probe_kernel.
    pub(crate) struct Probe = "EpProbeArgs" {
        /// EpStep [steps of all scripts].
        pub(crate) steps: u64,
        /// Out: EpSaw, likewise.
        pub(crate) saw: u64,
        /// u32 [scripts + 1]: the first step of each script.
        pub(crate) first_of: u64,
        /// u64 [scripts]: nanoseconds.
        pub(crate) allowed: u64,
    }
}

c_struct! {
    /// Parameters of ep_posts_kernel.
    pub(crate) struct Posts = "EpPostsArgs" {
        /// The state of the lane.
        pub(crate) lane: u64,
        /// Where the first put's source lies in the own window.
        pub(crate) from: u64,
        /// Where it goes in the peer's.
        pub(crate) to: u64,
        /// Of each put; and from one place to the next.
        pub(crate) bytes: u64,
        /// Places that puts take in turn.
        pub(crate) places: u64,
        /// Puts.
        pub(crate) puts: u64,
        /// A publish comes behind each so many of them.
        pub(crate) every: u64,
        /// Offset of the cell that is published.
        pub(crate) cell: u64,
        /// What it is before.
        pub(crate) published: u64,
        /// Not 0: each put is waited for.
        pub(crate) waits: u64,
        /// Nanoseconds that all of it may take.
        pub(crate) allowed: u64,
        /// Out: EP_FAR_..., and the nanoseconds that it took; u64 each.
        pub(crate) out: u64,
    }
}

c_struct! {
    /// Parameters of ep_consumer_kernel.
    pub(crate) struct Consumer = "EpConsumerArgs" {
        /// The EpEarly of the dispatch.
        pub(crate) early: u64,
        /// i32 [local experts], of the dispatch.
        pub(crate) expert_counts: u64,
        /// Rows of the dispatch, [local experts, wide].
        pub(crate) x: u64,
        /// Bytes from one to the next.
        pub(crate) x_stride: u64,
        /// Out: results, likewise.
        pub(crate) y: u64,
        /// Bytes from one to the next.
        pub(crate) y_stride: u64,
        /// u32 [local experts, blocks], counters in place of the EpEarly's; 0 for none.
        pub(crate) signals: u64,
        /// Out, added to: u32 [2]: blocks whose rows do not come, and that were waited for in vain.
        pub(crate) out: u64,
        /// Nanoseconds that a wait may take.
        pub(crate) allowed: u64,
        /// Nanoseconds before the results of each block.
        pub(crate) pause: u64,
        /// Local experts.
        pub(crate) experts: u32,
        /// Blocks of rows of each.
        pub(crate) blocks: u32,
        /// Rows of a block.
        pub(crate) rows: u32,
        /// Rows of an expert that there is room for.
        pub(crate) wide: u32,
        /// Units of 16 bytes of a row.
        pub(crate) columns: u32,
        /// Zero.
        pub(crate) reserved: u32,
    }
}

c_struct! {
    /// Parameters of ep_ceiling_kernel.
    pub(crate) struct Ceiling = "EpCeilingArgs" {
        /// Bytes to store.
        pub(crate) source: u64,
        /// Place in the windows.
        pub(crate) base: u64,
        /// To each peer; a multiple of 16.
        pub(crate) bytes: u64,
    }
}

c_struct! {
    /// Parameters of ep_meet_kernel.
    pub(crate) struct Meet = "EpMeetArgs" {
        /// Rises from meeting to meeting.
        pub(crate) number: u64,
        /// Nanoseconds that all wait then.
        pub(crate) pause: u64,
    }
}

c_enum! {
    /// A protocol error, made on purpose.
    pub enum Plant = "EP_PLANT" {
        /// A ring's tail is published before the row is put.
        TailBeforeData = 1,
        /// Credit is returned for a row that is still to be read.
        CreditEarly = 2,
        /// Rows are put one slot further than they belong.
        WrongSlot = 3,
        /// Counts are put into the bank of the next operation.
        WrongBank = 4,
        /// Counts say one row more.
        CountOffByOne = 5,
        /// Rows in rings name a position that is one too high.
        PositionOffByOne = 6,
        /// Rows are placed one position too low.
        PlacedOffByOne = 7,
        /// Rows are said to be placed before they are.
        PlacedEarly = 8,
        /// Who has offered rows does not wait until they were pulled.
        NotWaitingForPulls = 9,
        /// Sums are rounded after each row.
        RoundedTooEarly = 10,
        /// Ends of rings wait without publishing what is pending.
        ImpoliteWaiting = 11,
        /// Low latency: a row is announced before it is put.
        LowRaisedEarly = 12,
        /// Low latency: rows are put into the bank of the next operation.
        LowWrongBank = 13,
        /// Low latency: the arrival says one row more.
        LowCountOffByOne = 14,
        /// Rows are offered before they were copied into the window.
        OfferedEarly = 15,
        /// A row that several ranks read is overwritten when the first of them has read it.
        FirstReader = 16,
        /// Between nodes: staging memory is written again before its put has read it.
        StagingNotFlushed = 17,
        /// Between nodes: rows go back through another rank than they came through.
        WrongGate = 18,
        /// Between nodes: a row names the ranks of another node than it goes to.
        MaskOfAnotherNode = 19,
        /// Between nodes: the own node's sum is not rounded.
        PartialNotRounded = 20,
        /// Low latency between nodes: an arrival comes before its rows.
        LowFarArrivalFirst = 21,
        /// Low latency between nodes: staging memory is written again before its puts have read it.
        LowFarStagingEarly = 22,
        /// Low latency between nodes: a rank says that it has received what it has not read.
        LowFarReceivedEarly = 23,
        /// Low latency between nodes: a rank that is masked is not told.
        LowFarMaskUntold = 24,
        /// Between nodes: a forwarder places rows one position too high.
        ForwardedOffByOne = 25,
        /// Between nodes: a forwarder says that rows are placed before they are.
        ForwardedEarly = 26,
        /// Low latency: a unit of a dispatch is stored in two parts, first the one with the tag.
        LowUnitsTorn = 27,
        /// Rows by expert: a row is stored one slot too low.
        SlotOffByOne = 28,
        /// Rows by expert: slots are given before the choices of the blocks before are counted.
        ShareEarly = 29,
        /// Rows by expert: what stands between two experts is left as it was.
        PaddingLeft = 30,
        /// Rows by expert: the results of a row's choices are added from the last to the first.
        FoldDescending = 31,
        /// Rows by expert: the sum of a row's choices is rounded after each of them.
        FoldRoundedTooEarly = 32,
        /// Counts say one choice less of each expert that has any.
        ChoiceUntold = 33,
        /// Rows by expert: a row carries a choice of an expert that its rank does not have.
        ForeignChoice = 34,
        /// Low latency: the same of a unit of a combine.
        LowResultsTorn = 35,
        /// Low latency: consumers are told of rows before these are stored.
        LowCountedEarly = 36,
        /// Low latency: a combine reads results without waiting until they are ready.
        LowResultsUnawaited = 37,
        /// Outboxes: heads are written by whole batches only, however large the readers' pieces are.
        WholeHeads = 38,
        /// Outboxes: a combine counts on senders that fill all slots before they wait for its credit.
        AllSlotsFilled = 39,
        /// Between nodes: a token's slots are given back, and its sum is published, before all warps of the team are done with it.
        ClosedEarly = 40,
        /// Rows by expert: what lies behind the slots of all experts is left as it was.
        RoomLeft = 41,
        /// Rows by expert: slots of rows that did not come are left as they were.
        SpareSlotsLeft = 42,
        /// Rows by expert: rows of all lots are copied when those of the first have come.
        LotEarly = 43,
        /// Rows by expert: a row's sum is said to be there before it is, where a combine runs beside.
        FoldToldEarly = 44,
        /// Low latency: a block leaves the shares of blocks that have not begun.
        LowSharesLeft = 45,
        /// Low latency: a block that is not the last says that a combine was received.
        LowToldEarly = 46,
        /// What was enqueued before the host knew the counts goes ahead however many rows come.
        AheadWithoutRoom = 47,
    }
}

c_enum! {
    /// What an end of a ring did.
    pub enum RingStep = "EP_EVENT" {
        /// Began an operation as the filling end.
        Fills = 0,
        /// Filled a slot.
        Filled = 1,
        /// Publishes this tail.
        Published = 2,
        /// Saw this head.
        SawHead = 3,
        /// Began an operation as the emptying end.
        Empties = 4,
        /// Saw this tail.
        SawTail = 5,
        /// Read a slot.
        Read = 6,
        /// Publishes this head.
        Credited = 7,
    }
}
