//! Windows that processes share: each has a machine of its own, with the devices of all ranks, and runs the launches of its own rank.

use super::{Machine, TwinError};

/// A window of another process: its rank, its size, and by which descriptor of which process it is mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Theirs {
    pub(super) rank: u32,
    pub(super) bytes: u64,
    pub(super) process: i32,
    pub(super) descriptor: i32,
}

impl Machine {
    /// From now on time is the system's, and others see what a core does in its order.
    pub(super) fn share(&mut self) {
        // SAFETY: the machine is alive.
        unsafe { (self.library.functions().share)(self.machine) }
    }

    /// A window of a rank that other processes may map, and the descriptor that they do it by. None where the system gives no memory.
    pub(super) fn alloc_shared(&mut self, rank: u32, bytes: u64) -> Result<Option<(u64, i32)>, TwinError> {
        self.rank(rank)?;
        let mut descriptor = -1;
        // SAFETY: the machine is alive and has the rank; the descriptor is written to.
        let at = unsafe { (self.library.functions().alloc_shared)(self.machine, rank, bytes, &raw mut descriptor) };
        Ok((at != 0).then_some((at, descriptor)))
    }

    /// Says the devices of which processes may map a window; whether there is such a window, and room for them.
    pub(super) fn allow(&mut self, at: u64, processes: &[i32]) -> bool {
        let (first, count) = (processes.as_ptr(), processes.len() as u64);
        // SAFETY: the machine is alive; it reads so many numbers.
        unsafe { (self.library.functions().allow)(self.machine, at, first, count) == 0 }
    }

    /// Maps the window of a rank of another process. None where it is not there, has another size, or, unless a card maps it, is not for this
    /// process.
    pub(super) fn map(&mut self, theirs: Theirs, by_card: bool) -> Result<Option<u64>, TwinError> {
        let Theirs { rank, bytes, process, descriptor } = theirs;
        self.rank(rank)?;
        let map = self.library.functions().map;
        // SAFETY: the machine is alive and has the rank. What it maps it checks for its size, and it keeps the mapping.
        let at = unsafe { map(self.machine, rank, bytes, process, descriptor, by_card.into()) };
        Ok((at != 0).then_some(at))
    }
}
