//! The way between servers: memory that cards know, and queues that cores post to.
//!
//! A library gives both as a context in device memory, HCCL's ([`super::context`]): no public call of ACL makes such queues on a 910B. The twin
//! writes such contexts. What HCCL itself gives has its window in memory of its own, and the vendor's table has no network yet.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::Code;

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

/// Makes queues from a device to the ranks `peers`, of those on `devices`, of which it is that of rank `me`; gives a context's address.
pub type Connect = fn(device: u32, devices: &[u32], me: u32, peers: &[u32]) -> Result<u64, Code>;

/// Functions by which a host connects its devices with those of other servers. Devices are named by their ordinals.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    /// Elements of a queue.
    pub depth: u32,
    /// Makes memory of a device known to its card, and to those of its peers, as a source and as a target.
    pub register: fn(device: u32, at: u64, bytes: u64) -> Result<(), Code>,
    /// New queues from a device to some ranks: the device address of a context that has them.
    pub connect: Connect,
    /// Ends all queues of a device, and their contexts: nothing that was posted arrives any more.
    pub close: fn(device: u32) -> Result<(), Code>,
}
