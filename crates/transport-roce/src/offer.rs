//! What a rank tells the others so that they can connect to it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What this transport tells besides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Raising {
    /// How its cells are raised.
    pub(crate) signal: u8,
    /// Atomics that its adapter serves at a time, for one queue pair.
    pub(crate) atomics: u8,
}

/// An offer of one rank. As bytes it is what [`ep_core::transport::Lanes::offer`] returns.
pub type Offer = ep_rdma::Offer<3, Raising>;
