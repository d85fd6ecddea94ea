//! The way between servers: memory that cards know, and queues that cores post to.
//!
//! A library gives both as a context in device memory, HCCL's ([`super::context`]): no public call of ACL makes such queues on a 910B. The twin
//! writes such contexts. What HCCL itself gives has its window in memory of its own, and the vendor's table has no network yet.

use std::sync::Arc;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{AscendError, Code, Device, name_of};

/// A queue pair to a device of another server. Addresses are the device's.
#[derive(Clone, Copy, Default, Debug, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub struct QueueView {
    /// Its number, which doorbells name.
    pub number: u32,
    /// Elements, a power of 2.
    pub depth: u32,
    /// Service level, which doorbells name.
    pub level: u32,
    /// Places for completions; 0 where the card's firmware polls.
    pub completion_depth: u32,
    /// The elements, 64 bytes each.
    pub elements: u64,
    /// The doorbell, 8 bytes.
    pub doorbell: u64,
    /// u32: elements done, ever.
    pub tail: u64,
    /// The completions, 32 bytes each, or 0.
    pub completions: u64,
    /// u32: completions taken, ever, as the kernel says; or 0.
    pub completions_taken: u64,
    /// Elements posted before the kernel begins: counts wrap.
    pub posted: u32,
    /// Zero.
    pub reserved: u32,
}

/// Bytes by which a card describes memory that it knows.
pub const DESCRIBED: usize = 64;

/// What cards of other processes' devices need to know of memory: bytes for the control plane.
pub type Described = [u8; DESCRIBED];

/// Memory of another process's device, as the card of a device of this one knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Remote {
    /// The ordinal by which [`Connect`] finds it.
    pub device: u32,
    /// Where elements find it.
    pub address: u64,
    /// How much it is.
    pub bytes: u64,
}

/// Makes queues from a device to the ranks `peers`, of those on `devices`, of which it is that of rank `me`; gives a context's address.
pub type Connect = fn(device: u32, devices: &[u32], me: u32, peers: &[u32]) -> Result<u64, Code>;

/// Functions by which a host connects its devices with those of other servers. Devices are named by their ordinals.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    /// Elements of a queue.
    pub depth: u32,
    /// Makes memory of a device known to its card, and to those of its peers in this process, as a source and as a target.
    pub register: fn(device: u32, at: u64, bytes: u64) -> Result<(), Code>,
    /// Describes that memory for other processes.
    pub describe: fn(device: u32) -> Result<Described, Code>,
    /// Makes memory that a card of another process has described known to that of a device, as a target.
    pub admit: fn(device: u32, described: &Described) -> Result<Remote, Code>,
    /// Lets a card forget what it has admitted. No queue reaches it any more.
    pub dismiss: fn(device: u32, remote: &Remote) -> Result<(), Code>,
    /// New queues from a device to some ranks: the device address of a context that has them.
    pub connect: Connect,
    /// Ends all queues of a device, and their contexts: nothing that was posted arrives any more.
    pub close: fn(device: u32) -> Result<(), Code>,
}

/// What a function of the network gives.
pub(crate) fn done<T>(call: &'static str, result: Result<T, Code>) -> Result<T, AscendError> {
    result.map_err(|code| AscendError::Call { call, cause: name_of(code), code })
}

impl Device {
    /// The way to other servers.
    pub(crate) fn network(&self) -> Result<Network, AscendError> {
        let table = self.table();
        table.network.ok_or(AscendError::NoNetwork { table: table.name })
    }
}

/// Memory of a process of another server, which the card of a device knows. Forgotten when it is dropped.
#[derive(Debug)]
pub(crate) struct Admitted {
    device: Arc<Device>,
    remote: Remote,
}

impl Admitted {
    /// What a card of another process has described.
    pub(crate) fn new(device: &Arc<Device>, described: &Described) -> Result<Self, AscendError> {
        let remote = done("memory of another server", (device.network()?.admit)(device.ordinal(), described))?;
        Ok(Self { device: Arc::clone(device), remote })
    }

    /// Where and of whom it is.
    pub(crate) const fn remote(&self) -> &Remote {
        &self.remote
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        // What a card says that does not forget nobody can do anything about.
        let _ = self.device.network().map(|network| (network.dismiss)(self.device.ordinal(), &self.remote));
    }
}
