//! Queues between ranks: the context that kernels are given, as a vendor's library would give it.

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{Machine, TwinError};

/// A queue pair of the twin's network, as its host learns of it. Addresses are the device's.
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

impl Machine {
    /// Makes memory of a rank known to its card, as a source of its own queues or as a target of others': the key that elements name.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn key(&mut self, rank: u32, at: u64, bytes: u64, is_target: bool) -> Result<u32, TwinError> {
        self.rank(rank)?;
        // SAFETY: the machine is alive, and has the rank.
        Ok(unsafe { (self.library.functions().key)(self.machine, rank, at, bytes, is_target.into()) })
    }

    /// A queue of `depth` elements from a rank to another. `polls`: kernels take completions themselves; else the card's firmware does.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have, and for a depth that is no power of 2 from 4 to 32768.
    pub fn queue(&mut self, from: u32, to: u32, depth: u32, polls: bool) -> Result<QueueView, TwinError> {
        self.rank(from)?;
        self.rank(to)?;
        if !depth.is_power_of_two() || !(4..=32768).contains(&depth) {
            return Err(TwinError::Invalid(format!("depth is {depth}, allowed: a power of 2 from 4 to 32768")));
        }
        let mut view = QueueView::default();
        // SAFETY: the machine is alive and has both ranks; it writes one struct of this layout.
        unsafe { (self.library.functions().queue)(self.machine, from, to, depth, polls.into(), &raw mut view) };
        Ok(view)
    }

    /// Pieces of messages that have been sent between ranks.
    pub fn sent(&self) -> u64 {
        // SAFETY: the machine is alive.
        unsafe { (self.library.functions().sent)(self.machine) }
    }
}
