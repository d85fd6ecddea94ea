//! Queues between ranks: the context that kernels are given, as a vendor's library would give it.

use super::{Machine, TwinError};
pub use crate::driver::QueueView;

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

    /// Ends all queues of a rank: nothing that was posted arrives any more.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn close_queues(&mut self, rank: u32) -> Result<(), TwinError> {
        self.rank(rank)?;
        // SAFETY: the machine is alive, and has the rank.
        unsafe { (self.library.functions().close_queues)(self.machine, rank) };
        Ok(())
    }

    /// Pieces of messages that have been sent between ranks.
    pub fn sent(&self) -> u64 {
        // SAFETY: the machine is alive.
        unsafe { (self.library.functions().sent)(self.machine) }
    }
}
