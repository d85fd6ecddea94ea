//! What can go wrong, as values: bad input, a fault of one verb, the failure of a whole operation.

use std::fmt;

pub use crate::terms::Phase;
use crate::terms::{LaneId, Nanos, Offset, Rank, Span};

/// Why a call was refused or did not finish.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum Error {
    /// A size, setting or input outside its limits. Nothing moved.
    #[error("{what} is {value}, allowed: {limit}")]
    Invalid {
        /// What was given.
        what: String,
        /// The value that was given.
        value: String,
        /// What would have been accepted.
        limit: String,
    },
    /// Something this machine or version cannot do.
    #[error("{what} is not supported: {needs}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What it would take, or what to use instead.
        needs: String,
    },
    /// Something beneath the protocol failed: a driver, the system, an adapter, the code of a rank.
    #[error("{what} failed: {cause}; {remedy}")]
    Broken {
        /// What was done.
        what: String,
        /// What the other side said.
        cause: String,
        /// What to do.
        remedy: String,
    },
    /// The operation failed; the communicator is poisoned until `recover`.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// An earlier operation failed and nobody has called `recover` since. Nothing moved.
    #[error("the communicator is poisoned since operation {} failed ({by}); call recover", by.op)]
    Poisoned {
        /// The failure that poisoned it.
        by: Failure,
    },
    /// Two low-latency operations were sent and not received: a third would overwrite what they brought. Nothing moved.
    #[error("low-latency operation {op} was not sent: operations {} and {} have not been received", op - 2, op - 1)]
    TooManyInFlight {
        /// The operation that was refused; its number is still free.
        op: u64,
    },
    /// The survivors agreed on a communicator without this rank.
    #[error("rank {rank} was masked out by the other ranks")]
    Excluded {
        /// This rank.
        rank: Rank,
    },
}

impl Error {
    /// An [`Error::Invalid`] from anything that displays.
    pub fn invalid(what: impl fmt::Display, value: impl fmt::Display, limit: impl fmt::Display) -> Self {
        Self::Invalid { what: what.to_string(), value: value.to_string(), limit: limit.to_string() }
    }

    /// An [`Error::Unsupported`] from anything that displays.
    pub fn unsupported(what: impl fmt::Display, needs: impl fmt::Display) -> Self {
        Self::Unsupported { what: what.to_string(), needs: needs.to_string() }
    }

    /// An [`Error::Broken`] from anything that displays.
    pub fn broken(what: impl fmt::Display, cause: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self::Broken { what: what.to_string(), cause: cause.to_string(), remedy: remedy.to_string() }
    }

    /// The failure behind this error, when an operation failed.
    pub const fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Failed(by) | Self::Poisoned { by } => Some(by),
            _ => None,
        }
    }
}

/// An operation that failed: which, by whose fault, and who found out first.
///
/// Every rank that fails for the same reason names the same `culprit`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("operation {op} failed: {fault} (culprit rank {culprit}, reported by rank {reporter})")]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Failure {
    /// Number of the operation, the same on all ranks.
    pub op: u64,
    /// The rank that the others could not go on without.
    pub culprit: Rank,
    /// The rank whose verdict this is.
    pub reporter: Rank,
    /// What this rank saw.
    pub fault: Fault,
}

/// A name that the program knows. (Spelt out, the derived code would borrow it from what was sent.)
type Name = &'static str;

/// Why a lane between nodes broke: what a network adapter reports of a request, in the terms of RDMA.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum LaneCause {
    /// The peer answered nothing, however often the request was repeated.
    #[error("the peer does not answer (retries used up): its process, its machine or the way there is gone")]
    NoAnswer,
    /// The peer's adapter kept saying that it was not ready.
    #[error("the peer takes nothing in (its receive queue stayed empty)")]
    NotReady,
    /// The peer's adapter refused the access: a wrong key, range or permission.
    #[error("the peer's adapter refuses the access (wrong key, range or permission)")]
    RemoteAccess,
    /// The peer's adapter refused the request as it was made.
    #[error("the peer's adapter refuses the request (invalid there)")]
    RemoteRequest,
    /// The peer's adapter could not carry the request out.
    #[error("the peer's adapter failed to carry the request out")]
    RemoteOperation,
    /// The own adapter refused the source.
    #[error("the own adapter refuses the source (wrong key, range or permission)")]
    LocalAccess,
    /// The own adapter refused the request as it was made.
    #[error("the own adapter refuses the request (invalid here)")]
    LocalRequest,
    /// The lane had been broken before: by an earlier request, or by the peer.
    #[error("it had been broken before this request")]
    Flushed,
    /// This rank broke it, because what it held did not arrive in time.
    #[error("cut by this rank, because what it held did not arrive in time")]
    Cut,
    /// The thread that posts for the rank's device has ended.
    #[error("the proxy that posts for the device has ended")]
    NoPoster,
    /// The thread that posts for the rank's device stands still.
    #[error("the proxy that posts for the device takes nothing: it, or its process, stands still")]
    PosterStalled,
    /// The system refused to take a request.
    #[error("the system takes no request (error {0})")]
    Refused(i32),
    /// Anything else that an adapter reports.
    #[error("the adapter reports status {0}")]
    Other(u32),
}

/// Why one verb did not do what it was asked to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
// Verbs return it in memory. Behind a tag of a byte it would be copied in pieces that overlap, which a core can read back only
// once they have left its store buffer: behind all that goes to another core's cache.
#[repr(u64)]
pub enum Fault {
    /// The deadline passed.
    #[error("waited {waited} for {phase} from rank {peer} on {lane}: saw {seen}, awaited {awaited}")]
    Timeout {
        /// What was awaited.
        phase: Phase,
        /// The rank that did not deliver.
        peer: Rank,
        /// The lane it would have come by, named from the waiting side.
        lane: LaneId,
        /// The counter's value at the end.
        seen: u64,
        /// The value that would have ended the wait.
        awaited: u64,
        /// How long the wait lasted.
        waited: Nanos,
    },
    /// The backend knows that the peer is gone.
    #[error("rank {peer} is gone, while waiting for {phase} from it")]
    PeerGone {
        /// The rank that is gone.
        peer: Rank,
        /// What was awaited or attempted.
        phase: Phase,
    },
    /// A lane to the peer broke, and with it the peer is out of reach: what a network said about a request.
    #[error("{lane} broke: {cause}")]
    LaneBroken {
        /// The lane, named from this side.
        lane: LaneId,
        /// What the network said.
        cause: LaneCause,
    },
    /// A verb named bytes outside the window; nothing was touched (rule F8).
    #[error("bytes {start}..{end} lie outside the window of {window} bytes")]
    OutOfRange {
        /// First byte named.
        start: u64,
        /// One past the last byte named.
        end: u64,
        /// Size of the window.
        window: u64,
    },
    /// A verb that this lane or machine does not offer.
    #[error("{verb} is not possible on {lane}")]
    NotOffered {
        /// The verb.
        #[cfg_attr(feature = "serde", serde(deserialize_with = "name"))]
        verb: Name,
        /// The lane.
        lane: LaneId,
    },
    /// Two ranks do not run the same operation with the same settings.
    #[error("{field} is {mine} here and {theirs} on rank {peer}")]
    Mismatch {
        /// What differs.
        #[cfg_attr(feature = "serde", serde(deserialize_with = "name"))]
        field: Name,
        /// The value here.
        mine: u64,
        /// The value there.
        theirs: u64,
        /// The other rank.
        peer: Rank,
    },
    /// Rows were offered to peers by a combine that failed: some rank may still read them.
    #[error("peers may still read these rows, until all that were offered them have recovered")]
    StillOffered,
    /// The system did not give memory for what came.
    #[error("the system did not give {bytes} bytes of memory for what came")]
    NoMemory {
        /// Bytes that were asked for.
        bytes: u64,
    },
    /// The future of the operation was dropped before it had ended.
    #[error("the call was dropped before it had ended")]
    Abandoned,
    /// A peer goes on in low latency without this rank.
    #[error("rank {peer} has masked this rank: rejoin, or mask it too")]
    MaskedBy {
        /// The rank that did.
        peer: Rank,
    },
    /// A peer reported the failure.
    #[error("rank {reporter} gave up on rank {culprit}")]
    Aborted {
        /// Who reported.
        reporter: Rank,
        /// Whom it blamed.
        culprit: Rank,
    },
}

impl Fault {
    /// The fault of a range outside a window of `window` bytes.
    pub const fn out_of_range(span: Span, window: u64) -> Self {
        let Span { offset: Offset(start), len } = span;
        Self::OutOfRange { start, end: start.saturating_add(len), window }
    }

    /// The peer, where the fault says that it is gone or out of reach, as no time can mend.
    pub const fn gone(&self) -> Option<Rank> {
        match *self {
            Self::PeerGone { peer, .. } => Some(peer),
            // Of these the peer knows nothing.
            Self::LaneBroken { cause: LaneCause::NoPoster | LaneCause::PosterStalled, .. } => None,
            Self::LaneBroken { lane, .. } => Some(lane.peer),
            _ => None,
        }
    }

    /// The peer that the fault points at, if it points at one.
    pub const fn peer(&self) -> Option<Rank> {
        match *self {
            Self::Timeout { peer, .. }
            | Self::PeerGone { peer, .. }
            | Self::Mismatch { peer, .. }
            | Self::MaskedBy { peer } => Some(peer),
            Self::Aborted { culprit, .. } => Some(culprit),
            Self::NotOffered { lane, .. } | Self::LaneBroken { lane, .. } => Some(lane.peer),
            Self::OutOfRange { .. } | Self::NoMemory { .. } | Self::Abandoned | Self::StillOffered => None,
        }
    }
}

/// A name that a fault gives. Faults borrow theirs from the program, so one that was sent is kept for as long as that runs: once.
#[cfg(feature = "serde")]
fn name<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<&'static str, D::Error> {
    use std::collections::BTreeSet;
    use std::sync::{Mutex, PoisonError};

    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let name: String = serde::Deserialize::deserialize(deserializer)?;
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name.as_str()) {
        return Ok(known);
    }
    let kept: &'static str = name.leak();
    names.insert(kept);
    Ok(kept)
}
