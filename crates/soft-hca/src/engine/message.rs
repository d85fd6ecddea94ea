//! A message under way: an element that was read, and what of it has arrived.

use super::At;
use super::element::Element;
use super::layout::control;

/// A part of a message's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) from: usize,
    pub(crate) len: usize,
}

/// What an element came to.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) index: u64,
    /// How many elements of 64 bytes it takes.
    pub(crate) units: u64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) opcode: u8,
    /// A completion is asked for.
    pub(crate) signalled: bool,
    /// What it does; None where it was found wrong.
    pub(crate) element: Option<Element>,
    /// The payload, where it was read early.
    pub(crate) payload: Option<Vec<u8>>,
    /// The peer's queue pair has taken it: it can no longer fail at the peer's keys.
    pub(crate) accepted: bool,
    /// Which queue pair that is, in which of its epochs.
    pub(crate) taker: Option<(At, u64)>,
    /// Whether the memory that it writes to is relaxed.
    pub(crate) relaxed: bool,
    /// What has not arrived.
    pub(crate) pieces: Vec<Piece>,
    /// The old value that a fetch-add has still to bring back.
    pub(crate) returning: Option<u64>,
    /// Why it failed.
    pub(crate) fault: Option<u8>,
}

impl Message {
    /// Nothing of it is to arrive any more, at either end.
    pub(crate) fn is_done(&self) -> bool {
        self.accepted && self.pieces.is_empty() && self.returning.is_none()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.fault.is_some() || self.is_done()
    }

    pub(crate) fn is_arriving(&self) -> bool {
        self.accepted && self.fault.is_none() && !self.is_done()
    }

    pub(crate) fn is_fetch_add(&self) -> bool {
        matches!(self.element, Some(Element::FetchAdd { .. }))
    }

    pub(crate) fn is_fenced(&self) -> bool {
        self.bytes.get(control::FLAGS).is_some_and(|flags| flags & control::FENCES != 0)
    }

    /// Whether pieces of this may arrive while an earlier message is not done. Only relaxed memory lets them.
    pub(crate) fn may_pass(&self, earlier: &Message, fetch_add_passes: bool) -> bool {
        match (self.is_fetch_add(), earlier.is_fetch_add()) {
            (false, false) => self.relaxed,
            (true, false) => fetch_add_passes && self.relaxed && earlier.relaxed,
            (_, true) => false,
        }
    }
}
