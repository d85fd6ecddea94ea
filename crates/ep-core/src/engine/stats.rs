//! Who sent how much to whom, and who kept whom waiting.

use crate::layout::Layout;
use crate::port::Nanos;
use crate::settings::OutboxSteps;

/// Traffic with one peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PeerStats {
    /// Rows sent to it, dispatch and combine.
    pub rows_sent: u64,
    /// Rows received from it, dispatch and combine.
    pub rows_received: u64,
    /// Bytes of the rows sent, as they travel: headers and padding included.
    pub bytes_sent: u64,
    /// Bytes of the rows received, likewise.
    pub bytes_received: u64,
    /// Time this rank's roles waited for something of this peer; roles that wait at the same time all count.
    pub waited: Nanos,
}

impl PeerStats {
    /// Counts rows of `bytes` bytes each.
    pub fn count(&mut self, sent: u64, received: u64, bytes: u64) {
        self.rows_sent += sent;
        self.rows_received += received;
        self.bytes_sent += sent * bytes;
        self.bytes_received += received * bytes;
    }
}

/// What a rank did since its communicator was made.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Stats {
    /// `[ranks]`: traffic with each rank; the own rank's entry counts local copies.
    pub peers: Vec<PeerStats>,
    /// `[local experts]`: choices received for each local expert.
    pub expert_rows: Vec<u64>,
    /// Operations that completed.
    pub operations: u64,
    /// Rows of throughput mode by the way they took.
    pub ways: Ways,
}

impl Stats {
    /// Of a rank that did nothing yet.
    pub fn new(layout: &Layout) -> Self {
        Self {
            peers: vec![PeerStats::default(); layout.topology().ranks() as usize],
            expert_rows: vec![0; layout.local_experts() as usize],
            ..Self::default()
        }
    }
}

/// Rows of throughput mode by the way they took: at this rank's end of it, rows that stay on a rank included. Where only the
/// machine knows how many rows came ([`super::Dispatch::device_counts`]), the bound counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Ways {
    /// Rows of dispatches that were placed in this rank's arena.
    pub placed: u64,
    /// Rows of dispatches that came through rings.
    pub ringed: u64,
    /// Results of combines that were pulled from this rank's arena.
    pub pulled: u64,
    /// Results of combines that were returned through rings.
    pub returned: u64,
    /// Of the last call whose rows went through outboxes: rows that this rank handed over at a time; 0 before the first.
    pub outbox_piece: u32,
    /// Of the same: rows of this rank that lay in one of its outboxes at a time, at most.
    pub outbox_slots: u32,
}

impl Ways {
    /// Counts the rows of a dispatch.
    pub fn dispatched(&mut self, rows: u32, placed: bool) {
        *(if placed { &mut self.placed } else { &mut self.ringed }) += u64::from(rows);
    }

    /// Takes note of what a call uses of its outboxes.
    pub const fn in_outboxes(&mut self, steps: &OutboxSteps) {
        (self.outbox_piece, self.outbox_slots) = (steps.piece, steps.window);
    }

    /// Counts the results of a combine.
    pub fn combined(&mut self, rows: u32, pulled: bool) {
        *(if pulled { &mut self.pulled } else { &mut self.returned }) += u64::from(rows);
    }
}
