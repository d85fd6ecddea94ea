//! The messages.

use std::fmt;

use ep_core::RankSet;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use super::ranks;
use crate::identity::Identity;
use crate::program::Program;
use crate::verdict::Verdict;

/// The first bytes of every connection.
pub(crate) const MAGIC: [u8; 8] = *b"moexpres";

/// Version of these messages. [`Opening::Hello`] and [`Answer::Challenge`] never change, so that versions can be named.
pub(crate) const VERSION: u16 = 2;

/// From a process that has proved nothing yet.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Opening {
    Hello { magic: [u8; 8], version: u16, nonce: [u8; 32] },
    Proof { proof: [u8; 32] },
}

/// The meeting place's side of that.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Challenge {
        version: u16,
        nonce: [u8; 32],
    },
    Proof {
        proof: [u8; 32],
    },
    WrongSecret,
    /// There is no room for the connection now.
    Full {
        why: String,
    },
}

/// What all ranks do together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Collective {
    Barrier,
    AllGather,
    Broadcast { root: u32 },
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Barrier => f.write_str("barrier"),
            Self::AllGather => f.write_str("all-gather"),
            Self::Broadcast { root } => write!(f, "broadcast from rank {root}"),
        }
    }
}

/// From a member. Times are nanoseconds from now, since clocks differ.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    Join {
        rank: u32,
        world: u32,
        program: Program,
        identity: Identity,
        within: u64,
    },
    Meet {
        collective: Collective,
        bytes: ByteBuf,
        within: u64,
    },
    Agree {
        call: u32,
        #[serde(with = "ranks")]
        mask: RankSet,
        generation: u16,
        op: u64,
        within: u64,
    },
    /// The caller of an agreement no longer waits for it.
    Leave {
        call: u32,
    },
}

/// From the meeting place to a member.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    Joined,
    NotJoined(Verdict),
    /// Contributions by rank; none of a rank that an agreement went on without.
    Met(Vec<Option<ByteBuf>>),
    NotMet(Verdict),
    Agreed {
        call: u32,
        #[serde(with = "ranks")]
        mask: RankSet,
        generation: u16,
        op: u64,
    },
    NotAgreed {
        call: u32,
        why: Discord,
    },
    /// The connection of a rank closed.
    Lost {
        rank: u32,
    },
}

/// Why there is no agreement.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Discord {
    /// A participant gave up on the caller.
    Excluded,
    /// The deadline passed without this rank.
    Missing { rank: u32 },
    /// Everybody else came, and this rank never will.
    Gone { rank: u32 },
    /// Generations are numbered in 16 bits, and this was the last.
    NoMoreGenerations,
}
