//! What a rank tells the others so that they can connect to it.

use ep_core::{Error, Rank};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

type U32 = zerocopy::little_endian::U32;
type U64 = zerocopy::little_endian::U64;

/// One rank's end in a network of this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Offer {
    /// Which network, by chance: no other one has the same number. 0: one between processes.
    pub(crate) network: U64,
    /// Which end in it; between processes, what tells its gate from others.
    pub(crate) end: U64,
    /// Of its window.
    pub(crate) bytes: U64,
    /// 1: that lies in memory of a device.
    pub(crate) device: U32,
    /// Which of its connections.
    pub(crate) connection: U32,
    /// Between processes: the rank's, and its descriptor of the gate. The name of the window follows.
    pub(crate) process: U32,
    pub(crate) gate: U32,
}

impl Offer {
    /// As `rank` told it, and what its window is called; refused where it is for another network or another layout than `mine`.
    pub(crate) fn fitting(self, rank: Rank, told: &[u8]) -> Result<(Self, &[u8]), Error> {
        let refuse =
            |why: &dyn std::fmt::Display| Err(Error::unsupported(format_args!("rank {rank} over the loop"), why));
        let Ok((theirs, name)) = Self::read_from_prefix(told) else {
            return refuse(&format_args!("its offer has {} bytes, expected {}", told.len(), size_of::<Self>()));
        };
        if theirs.network != self.network {
            return refuse(
                &"it joins threads of one process, which have clones of one Loop, or processes of one host, all of which say so \
                  (Loop::between_processes); for others use RoCE",
            );
        }
        if theirs.bytes != self.bytes {
            return refuse(&format_args!("its window has {} bytes, this one {}", theirs.bytes, self.bytes));
        }
        if theirs.device != self.device {
            let name = |offer: &Self| if offer.device == 0 { "the host" } else { "a device" };
            return refuse(&format_args!(
                "its window lies in memory of {}, this one of {}",
                name(&theirs),
                name(&self)
            ));
        }
        Ok((theirs, name))
    }
}
