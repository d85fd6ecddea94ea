//! Planted faults: protocol errors on purpose, to prove that the checks catch them. Only with the feature `plant`.

/// One protocol error.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Plant {
    /// A sender publishes its tail before it puts the row.
    TailBeforeData,
    /// A receiver returns credit for a row that it has not read yet.
    CreditOneRowEarly,
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
    /// A low-latency sender fills the bank of the next operation.
    OpInWrongBank,
    /// A coordinator gives staging memory back before its lane has read it.
    StagingFreedEarly,
    /// A sender posts by itself where its lane's one poster is a coordinator.
    SecondPoster,
}
