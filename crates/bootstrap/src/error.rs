//! What can go wrong in a meeting.

use std::fmt;
use std::time::Duration;

use crate::verdict::Verdict;
use crate::wire::Malformed;

/// Why a rank could not join, or a call did not finish.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting or argument outside its limits. Nothing was sent.
    #[error("{what} is {value}, allowed: {limit}")]
    Invalid {
        /// What was given.
        what: String,
        /// The value that was given.
        value: String,
        /// What would have been accepted.
        limit: String,
    },
    /// A meeting in reach of other machines, without a secret to keep them out.
    #[error(
        "{address} can be reached from other machines, so a job secret is needed: set MOEXPRESS_SECRET to the same text \
         for all ranks, or meet on a loopback address"
    )]
    SecretNeeded {
        /// The address of the meeting place.
        address: String,
    },
    /// The system has no random numbers for secrets and nonces.
    #[error("no random numbers from the system: {why}")]
    Random {
        /// What the system said.
        why: String,
    },
    /// Rank 0 could not open the meeting place.
    #[error("cannot open the meeting place at {address}: {why}")]
    Bind {
        /// Where.
        address: String,
        /// What the system said.
        why: String,
    },
    /// No meeting place answered by the deadline.
    #[error(
        "no meeting place at {address} within {waited:.1?} (is rank 0, or who else holds it, running there?): {why}"
    )]
    Unreachable {
        /// Where it should be.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// What the last attempt met.
        why: String,
    },
    /// File descriptors ran out, here or where the meeting place is.
    #[error(
        "no file descriptors are left for connections {}: {why}; ulimit -n says how many a process may have",
        at(place)
    )]
    Descriptors {
        /// The address of the meeting place, when it is its process that has none left.
        place: Option<String>,
        /// What the system said.
        why: String,
    },
    /// The meeting place has another secret, or one side has none.
    #[error(
        "{address} does not accept the job secret of rank {rank}: MOEXPRESS_SECRET must be the same for all ranks, or \
         set for none"
    )]
    WrongSecret {
        /// The address of the meeting place.
        address: String,
        /// This rank.
        rank: u32,
    },
    /// What answered could not prove that it holds the secret.
    #[error("{address} answered, but does not know the job secret of rank {rank}: it is not this job's meeting place")]
    Impostor {
        /// The address.
        address: String,
        /// This rank.
        rank: u32,
    },
    /// The meeting place speaks another version of the protocol.
    #[error("protocol version is {theirs} on rank 0 at {address} and {mine} on rank {rank}")]
    Version {
        /// The address of the meeting place.
        address: String,
        /// Its version.
        theirs: u16,
        /// The version here.
        mine: u16,
        /// This rank.
        rank: u32,
    },
    /// The meeting place refused.
    #[error("{call} failed after {waited:.1?}: {verdict}")]
    Refused {
        /// What was called.
        call: Call,
        /// How long it took.
        waited: Duration,
        /// Why.
        verdict: Verdict,
    },
    /// The meeting place did not answer, although its own deadline had passed. The connection is closed.
    #[error("{call} failed: no answer from the meeting place at {address} within {waited:.1?}")]
    Silent {
        /// What was called.
        call: Call,
        /// The address of the meeting place.
        address: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The connection to the meeting place is gone, most likely because the process that holds it, mostly rank 0's, ended.
    #[error("{call} failed: the connection to the meeting place at {address} is gone: {why}")]
    Gone {
        /// What was called.
        call: Call,
        /// The address of the meeting place.
        address: String,
        /// How the connection ended.
        why: String,
    },
    /// What arrived makes no sense.
    #[error("{address} sent something that is no message: {why}")]
    Malformed {
        /// Who sent it.
        address: String,
        /// What is wrong with it.
        why: Malformed,
    },
}

fn at(place: &Option<String>) -> String {
    place.as_ref().map_or_else(|| "in this process".to_owned(), |address| format!("at the meeting place, {address}"))
}

impl Error {
    /// An [`Error::Invalid`] from anything that displays.
    pub(crate) fn invalid(what: impl fmt::Display, value: impl fmt::Display, limit: impl fmt::Display) -> Self {
        Self::Invalid { what: what.to_string(), value: value.to_string(), limit: limit.to_string() }
    }

    /// Why the meeting place refused, if it did.
    pub const fn verdict(&self) -> Option<&Verdict> {
        match self {
            Self::Refused { verdict, .. } => Some(verdict),
            _ => None,
        }
    }
}

/// What a rank asked of the meeting place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Call {
    /// Joining.
    Join,
    /// [`crate::Member::barrier`].
    Barrier,
    /// [`crate::Member::all_gather`].
    AllGather,
    /// [`crate::Member::broadcast`].
    Broadcast,
    /// Agreement on how to go on after a failure.
    Agree,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Join => "joining",
            Self::Barrier => "barrier",
            Self::AllGather => "all-gather",
            Self::Broadcast => "broadcast",
            Self::Agree => "agreement",
        })
    }
}
