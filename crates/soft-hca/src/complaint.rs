//! What a card has to say of its driver.

/// The rule that was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Rule {
    /// A command's length, opcode, or the value of a field.
    Command,
    /// A command in a state that does not allow it.
    State,
    /// An object that does not exist, or is another card's or context's.
    Unknown,
    /// A pointer that is no object's, or no longer.
    Pointer,
    /// Something was given back that is still in use.
    Destroy,
    /// A registration of memory that a card refuses.
    Memory,
    /// Memory that must hold certain values when an object is made: completions ffh, records zero.
    Filled,
    /// The doorbell register: half a bell, no queue pair's, or another's.
    Bell,
    /// The doorbell record: its other half, or more than 16 bits.
    Record,
    /// A producer index that is neither ahead nor behind by the queue's depth or less.
    Index,
    /// More elements than the queue has room for: a slot was used again before its completion.
    Slot,
    /// An element whose index, queue pair, size, opcode or flags are wrong.
    Element,
    /// An element that changed between its bell and its completion.
    Changed,
    /// Keys, bounds and access, at either end.
    Access,
    /// Two ends of a connection that do not agree.
    Connection,
    /// A completion queue that ran over.
    Overrun,
}

/// One thing that a driver of this card did wrong, or had happen to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// The rule.
    pub rule: Rule,
    /// Which object, what was seen, what is allowed.
    pub text: String,
}

impl std::fmt::Display for Complaint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.text)
    }
}
