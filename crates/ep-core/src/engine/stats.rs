//! Who sent how much to whom, and who kept whom waiting.

use crate::port::Nanos;

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
}
