//! The way between servers: keys of memory, and queues that cores post to.
//!
//! A vendor's library gives them as a context in device memory. No public call of ACL makes such queues on a 910B: HCCL's context and shmem's
//! are two routes, of which neither is read yet. So the vendor's table has no network, and the twin's has one.

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

/// Functions by which a host connects its devices with those of other servers. Devices are named by their ordinals.
#[derive(Clone, Copy, Debug)]
pub struct Network {
    /// Elements of a queue.
    pub depth: u32,
    /// Makes memory of a device known to its card, as a source or as a target: the key that elements name it by.
    pub key: fn(device: u32, at: u64, bytes: u64, is_target: bool) -> Result<u32, Code>,
    /// A new queue from a device to another.
    pub queue: fn(from: u32, to: u32) -> Result<QueueView, Code>,
    /// Ends all queues of a device: nothing that was posted arrives any more.
    pub close: fn(device: u32) -> Result<(), Code>,
}
