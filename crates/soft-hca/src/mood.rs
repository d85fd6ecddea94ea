//! The orders that cards choose: how likely each liberty is that a real card has.

/// Chances are percents, drawn from the fabric's seed at every occasion.
#[derive(Debug, Clone)]
pub struct Mood {
    /// Actions are done in the order of their queue, as soon as they can be. False: whatever can be done next is drawn.
    pub prompt: bool,
    /// A bell's producer index is read from the record and not from the bell.
    pub record: u8,
    /// A bell is heard once more.
    pub again: u8,
    /// The record is looked at before a bell has come.
    pub early: u8,
    /// The card begins anew from the record, as after an internal error.
    pub recover: u8,
    /// A message is torn into pieces that arrive in any order.
    pub tear: u8,
    /// The payload is read when the element is, not when it leaves.
    pub gather: u8,
    /// Whatever was drawn is put off.
    pub late: u8,
    /// A completion that another follows is never written (collapsed queues).
    pub merge: u8,
    /// Elements are read again before their completion is written, as when an acknowledgement is lost.
    pub reread: u8,
    /// A fetch-add into relaxed memory may pass earlier writes into relaxed memory.
    pub fetch_add_passes: bool,
    /// How many messages of a queue pair may be under way.
    pub flight: usize,
}

impl Mood {
    /// Nothing out of order: what a test of a driver begins with.
    pub fn mild() -> Self {
        Self {
            prompt: true,
            record: 0,
            again: 0,
            early: 0,
            recover: 0,
            tear: 0,
            gather: 0,
            late: 0,
            merge: 0,
            reread: 0,
            fetch_add_passes: false,
            flight: 16,
        }
    }

    /// Every liberty, often.
    pub fn hostile() -> Self {
        Self {
            prompt: false,
            record: 50,
            again: 20,
            early: 5,
            recover: 2,
            tear: 60,
            gather: 50,
            late: 30,
            merge: 40,
            reread: 50,
            fetch_add_passes: true,
            flight: 16,
        }
    }
}
