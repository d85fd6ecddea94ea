//! What a rank tells the others so that they can connect to it.

/// An offer of one rank: nothing but what all such transports tell.
pub(crate) type Offer = ep_rdma::Offer<0x4942_0002, ()>;
