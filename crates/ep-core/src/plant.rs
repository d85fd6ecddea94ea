//! Planted faults: protocol errors on purpose, to prove that the checks catch them.
//!
//! Roles ask `plants(Plant::...)` at the line where the error would be made. Only with the feature `plant` can that be true;
//! without it the compiler removes the question and what would follow.

/// One protocol error.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Plant {
    /// A sender publishes its tail before it puts the row.
    TailBeforeData,
    /// A receiver returns credit for a row that it has not read yet.
    CreditOneRowEarly,
    /// A sender whose rows several ranks pull looks at the head of the first of them only.
    FirstReaderOnly,
    /// It is done before they have taken everything.
    OutboxLeftFull,
    /// Rings are cut where a peer's outbox was without waiting for its `done`.
    RingsOverOutboxes,
    /// A sender writes one more than the right position into a row's header.
    PositionOffByOne,
    /// A sender reuses staging memory without flushing.
    SkippedFlush,
    /// A rank takes memory that peers were told to read for its own again without waiting for their `done`.
    BankReusedWithoutDone,
    /// Roles wait without publishing pending tails and credit.
    ImpoliteWaiting,
    /// A receiver publishes credit that lowers its cell.
    CellLowered,
    /// Received rows in the arena become grantable while their lease is still held.
    LeaseFreedEarly,
    /// A forwarder lets a row pass the one before it.
    ForwardedOutOfOrder,
    /// The own node's part of a sum is added without being rounded to bf16.
    PartialNotRounded,
    /// A row travels twice to a node.
    SentTwiceToNode,
    /// A row on its way to a node names the next rank as its source.
    FarRowOfAnotherSource,
    /// A row on its way to a node is of the operation after this one.
    FarRowOfAnotherOp,
    /// A sender promises a node more rows for a rank than it has told everybody.
    ShareTooLong,
    /// A low-latency sender fills the bank of the next operation.
    OpInWrongBank,
    /// A low-latency sender announces the operation after the next.
    ArrivalOfAnotherOp,
    /// A low-latency sender announces an operation of the other kind.
    ArrivalOfAnotherKind,
    /// A low-latency sender that announces each row says that it is there before it puts it.
    RowRaisedEarly,
    /// It says how many rows come before it puts their headers.
    HeadersLate,
    /// A low-latency receiver takes a row that was said to come for one that is there.
    RowNotAwaited,
    /// Rows of low latency that are announced have one cell for both banks.
    OneRowCell,
    /// A low-latency receiver takes the tag of the operation before in the same bank for that of this one.
    TagOfBefore,
    /// Results of low latency travel in the form that those for the own batch have.
    FormOfTheOwnBatch,
    /// A rank returns results as units to batches of one token more than the limit.
    UnitLimitOffByOne,
    /// The head of a low-latency dispatch says one token more than the batch has.
    TokensOffByOne,
    /// A low-latency rank writes what has come as units into the slots of the rank that it comes from.
    UnitsLaidOutInSlots,
    /// Memory for units is cleared in the first operations of a generation, too.
    ClearedBeforeAnyPublish,
    /// A low-latency reducer takes the tag of the operation before the last in the same bank for that of this one.
    TagOfLastUse,
    /// Tags of low latency start again in each generation.
    TagsStartAgain,
    /// A low-latency receiver takes the first unit of a row for all of them.
    FirstUnitOnly,
    /// A rank that skips a low-latency operation says that it has received it before everything has come.
    SkippedWithoutWaiting,
    /// A low-latency operation that was dropped counts as received, and nobody is told.
    DroppedWithoutSkipping,
    /// Both halves of a low-latency operation are sent before they are refused.
    SentBeforeRefused,
    /// A coordinator gives staging memory back before its queue has read it.
    StagingFreedEarly,
    /// A sender posts by itself where its queue's one poster is a coordinator.
    SecondPoster,
    /// A role that empties a ring returns its credit by itself where its queue's one poster is a coordinator.
    SecondPosterOfCredit,
    /// The control role posts by itself where its queue's one poster is a coordinator.
    SecondPosterOfControl,
    /// A coordinator sends counts that the control role has not handed over.
    CountsUnasked,
    /// What a rank waits for in one mode is not heard by those who wait in the other.
    DeafToTheOtherMode,
    /// What stands between the rows of two experts is left as it was.
    PaddingLeft,
    /// What lies behind the slots of all experts is left as it was.
    RoomLeft,
    /// The results of a row's choices are added from the last to the first.
    ChoicesDescending,
    /// A row by expert stands where the next one should.
    SlotOffByOne,
}

/// The fault that tests planted, if any. Without the feature `plant` there is none, and it takes no room.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Planted(#[cfg(feature = "plant")] Option<Plant>);

/// Operations of low latency that tests have it were before the first one: so they see what comes after billions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Before(#[cfg(feature = "plant")] pub(crate) u64);

impl Before {
    /// How many.
    #[cfg(feature = "plant")]
    pub(crate) const fn operations(self) -> u64 {
        self.0
    }

    /// None.
    #[cfg(not(feature = "plant"))]
    #[inline]
    pub(crate) const fn operations(self) -> u64 {
        0
    }
}

impl Planted {
    /// This fault alone.
    #[cfg(feature = "plant")]
    pub(crate) const fn new(plant: Plant) -> Self {
        Self(Some(plant))
    }

    /// Whether it is `plant`.
    #[cfg(feature = "plant")]
    pub(crate) fn is(self, plant: Plant) -> bool {
        self.0 == Some(plant)
    }

    /// Never.
    #[cfg(not(feature = "plant"))]
    #[inline]
    pub(crate) const fn is(self, _plant: Plant) -> bool {
        false
    }
}
