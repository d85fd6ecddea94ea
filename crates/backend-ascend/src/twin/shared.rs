//! Windows that processes share: each has a machine of its own, with the ranks of all, and runs the launches of its own rank.

use super::{Machine, TwinError};

impl Machine {
    /// A window of a rank that other processes may map, and the descriptor that they do it by. None where the system gives no memory.
    pub(super) fn alloc_shared(&mut self, rank: u32, bytes: u64) -> Result<Option<(u64, i32)>, TwinError> {
        self.rank(rank)?;
        let mut descriptor = -1;
        // SAFETY: the machine is alive and has the rank; the descriptor is written to.
        let at = unsafe { (self.library.functions().alloc_shared)(self.machine, rank, bytes, &raw mut descriptor) };
        Ok((at != 0).then_some((at, descriptor)))
    }

    /// Says which processes may map a window; whether there is such a window, and room for them.
    pub(super) fn allow(&mut self, at: u64, processes: &[i32]) -> bool {
        let (first, count) = (processes.as_ptr(), processes.len() as u64);
        // SAFETY: the machine is alive; it reads so many numbers.
        unsafe { (self.library.functions().allow)(self.machine, at, first, count) == 0 }
    }

    /// Maps the window of a rank of another process. None where it is not there, has another size, or is not for this process.
    pub(super) fn map(
        &mut self,
        rank: u32,
        bytes: u64,
        process: i32,
        descriptor: i32,
    ) -> Result<Option<u64>, TwinError> {
        self.rank(rank)?;
        // SAFETY: the machine is alive and has the rank. What it maps it checks for its size, and it keeps the mapping.
        let at = unsafe { (self.library.functions().map)(self.machine, rank, bytes, process, descriptor) };
        Ok((at != 0).then_some(at))
    }
}
