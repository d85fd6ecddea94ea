//! How queue pairs reach each other.

use ep_core::Error;

use crate::offer::{End, Header};
use crate::port::{Gid, Port};
use crate::sys::{self, Zeroed as _};

/// What all packets of a job have, and how long an adapter waits for answers to them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wire {
    /// The service level; on Ethernet with VLAN the priority (PCP).
    pub service_level: u8,
    /// On RoCEv2 the IP header's byte with DSCP (upper 6 bits) and ECN.
    pub traffic_class: u8,
    /// A request is repeated after 4.096 us x 2^N without an answer.
    pub ack_timeout: u8,
    /// How often.
    pub retries: u8,
}

impl Default for Wire {
    /// Service level and traffic class 0. An ack timeout of 14 with six retries: a dead peer is noticed after 0.5 s to 2 s.
    fn default() -> Self {
        Self { service_level: 0, traffic_class: 0, ack_timeout: 14, retries: 6 }
    }
}

/// A value from `least` to `most`.
///
/// # Errors
/// [`Error::Invalid`] for others, with the limits.
pub fn within(what: &str, value: u32, least: u32, most: u32) -> Result<u32, Error> {
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    Err(Error::invalid(what, value, format_args!("{least} to {most}")))
}

/// A packet sequence number that no packet still on its way to an earlier queue pair is likely to have.
pub fn random_psn() -> u32 {
    // Where there is no randomness, time will do.
    getrandom::u32()
        .unwrap_or_else(|_| std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |since| since.subsec_nanos()))
        & 0xff_ffff
}

/// How a queue pair reaches the other end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Connection {
    /// The peer's queue pair.
    pub number: u32,
    /// The address of the peer's port.
    pub gid: [u8; 16],
    /// The peer's port in an InfiniBand subnet.
    pub lid: u16,
    /// The packet sequence number that the peer begins with.
    pub their_psn: u32,
    /// The one that this end begins with.
    pub our_psn: u32,
    /// The smaller one of both ends.
    pub mtu: u32,
    /// What its packets have.
    pub wire: Wire,
}

impl Connection {
    /// From an end of this rank's, whose packets begin with `our_psn` and carry at most `mtu`, to `end` of the rank that told `header`.
    pub fn new(header: &Header, end: &End, our_psn: u32, mtu: u32, wire: Wire) -> Self {
        Self {
            number: end.number(),
            gid: header.gid,
            lid: u16::from_le_bytes(header.lid),
            their_psn: end.psn(),
            our_psn,
            mtu: header.mtu().min(mtu),
            wire,
        }
    }

    /// The other end's address, as verbs are told it, for packets from `port` with its address `gid` that pass up to `hops` routers.
    pub fn address(&self, port: &Port, gid: &Gid, hops: u8) -> sys::AddressHandle {
        let mut to = sys::AddressHandle::zeroed();
        (to.port_num, to.sl, to.dlid) = (port.number, self.wire.service_level, self.lid);
        // Ethernet has no other addresses; on InfiniBand the local one serves within a subnet.
        to.is_global = port.ethernet.into();
        if port.ethernet {
            to.grh.dgid = sys::gid(self.gid);
            to.grh.sgid_index = gid.index;
            to.grh.hop_limit = hops;
            to.grh.traffic_class = self.wire.traffic_class;
        }
        to
    }
}
