//! A machine of the twin: memory, launches, turns.

use std::ffi::c_void;
use std::fmt;
use std::ops::Range;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::TwinError;
use super::library::Library;
use crate::roles::MOST_CORES;

/// Who may reach memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// Cores of the rank that has it.
    Own = 0,
    /// Cores of all ranks of its group: a window.
    Group = 1,
    /// Cores of the rank that has it, for reading.
    ReadOnly = 2,
}

/// All ranks of a job on one scheduler.
pub struct Machine {
    pub(super) library: Library,
    pub(super) machine: *mut c_void,
    ranks: u32,
    group: u32,
}

// SAFETY: the machine's memory is its own, and its fibers have stacks of their own. What it keeps of a thread, the core that runs there, is set at
// every turn. So any thread may use it, one at a time.
unsafe impl Send for Machine {}

impl Machine {
    /// A machine of so many ranks, in groups of `group` that reach each other's windows.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for no ranks or no group.
    pub fn new(library: &Library, seed: u64, ranks: u32, group: u32) -> Result<Self, TwinError> {
        if ranks == 0 || group == 0 {
            return Err(TwinError::Invalid(format!("ranks is {ranks} and group {group}, allowed: 1 or more of both")));
        }
        // SAFETY: the function takes any numbers that are not 0, and gives a machine of its own.
        let machine = unsafe { (library.functions().new)(seed, ranks, group) };
        Ok(Self { library: library.clone(), machine, ranks, group })
    }

    pub(super) fn rank(&self, rank: u32) -> Result<(), TwinError> {
        if rank < self.ranks {
            return Ok(());
        }
        Err(TwinError::Invalid(format!("rank is {rank}, allowed: below {}", self.ranks)))
    }

    /// Memory of a rank, of drawn bytes; its device address, a multiple of 64.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have, or more than 2^40 bytes.
    pub fn alloc(&mut self, rank: u32, bytes: u64, reach: Reach) -> Result<u64, TwinError> {
        self.rank(rank)?;
        if bytes > 1 << 40 {
            return Err(TwinError::Invalid(format!("bytes is {bytes}, allowed: up to 2^40")));
        }
        // SAFETY: the machine is alive, and has the rank.
        Ok(unsafe { (self.library.functions().alloc)(self.machine, rank, bytes, reach as u32) })
    }

    /// Memory of a rank that holds an array.
    ///
    /// # Errors
    /// As [`Machine::alloc`].
    pub fn place<T: IntoBytes + Immutable>(&mut self, rank: u32, array: &[T], reach: Reach) -> Result<u64, TwinError> {
        let at = self.alloc(rank, size_of_val(array) as u64, reach)?;
        self.write(at, array)?;
        Ok(at)
    }

    /// Writes an array to device memory, between runs.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] where the memory is nobody's.
    pub fn write<T: IntoBytes + Immutable>(&mut self, at: u64, array: &[T]) -> Result<(), TwinError> {
        let bytes = array.as_bytes();
        // SAFETY: the machine is alive; it reads as many bytes as the array has, and writes to memory of its own only.
        let bad = unsafe { (self.library.functions().write)(self.machine, at, bytes.as_ptr(), bytes.len() as u64) };
        memory(at, bytes.len(), bad)
    }

    /// An array of `count` from device memory, between runs.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] where the memory is nobody's.
    pub fn read<T: FromBytes + IntoBytes + Clone>(&self, at: u64, count: usize) -> Result<Vec<T>, TwinError> {
        let mut array = vec![T::new_zeroed(); count];
        self.read_into(at, array.as_mut_bytes())?;
        Ok(array)
    }

    /// Bytes of device memory, between runs.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] where the memory is nobody's.
    pub fn read_into(&self, at: u64, bytes: &mut [u8]) -> Result<(), TwinError> {
        // SAFETY: the machine is alive; it reads memory of its own only, and writes as many bytes as there are.
        let bad = unsafe { (self.library.functions().read)(self.machine, at, bytes.as_mut_ptr(), bytes.len() as u64) };
        memory(at, bytes.len(), bad)
    }

    /// Where bytes of device memory lie on the host. None where the memory is nobody's.
    pub(super) fn lies_at(&self, at: u64, bytes: u64) -> Option<*mut u8> {
        // SAFETY: the machine is alive.
        let found = unsafe { (self.library.functions().lies_at)(self.machine, at, bytes) };
        (!found.is_null()).then_some(found)
    }

    /// Enqueues a launch on a rank's stream: so many blocks, each on a core of its own, with the address of parameters.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank, a number of blocks or a kernel that the machine does not have.
    pub fn launch(&mut self, rank: u32, kernel: &str, blocks: u32, args: u64) -> Result<(), TwinError> {
        self.rank(rank)?;
        if blocks == 0 || blocks > MOST_CORES {
            return Err(TwinError::Invalid(format!("blocks is {blocks}, allowed: 1 to {MOST_CORES}")));
        }
        let kernel = self.library.kernel(kernel)?;
        // SAFETY: the machine is alive and has the rank; the kernel is the library's, which the machine keeps loaded. What is wrong with the
        // address of its parameters the twin finds when the kernel reads them.
        unsafe { (self.library.functions().launch)(self.machine, rank, kernel, blocks, args) };
        Ok(())
    }

    /// Runs until all launches have ended.
    ///
    /// # Errors
    /// [`TwinError::Fault`] where a rule was broken, [`TwinError::Watchdog`] after so many turns of the scheduler.
    pub fn run(&mut self, turns: u64) -> Result<(), TwinError> {
        // SAFETY: the machine is alive. Kernels run on stacks of their own, and reach memory through the twin, which checks.
        match unsafe { (self.library.functions().run)(self.machine, turns) } {
            0 => Ok(()),
            // SAFETY: the machine is this library's, and alive.
            1 => Err(TwinError::Fault(unsafe { self.library.fault(self.machine) })),
            _ => Err(TwinError::Watchdog(turns)),
        }
    }

    /// Runs until so many launches of a rank have ended since the machine was made; whether they have, after so many turns at most. Where ranks are
    /// processes, the rank's card has sent all that was posted, too.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have, [`TwinError::Fault`] where a rule was broken.
    pub fn run_until(&mut self, turns: u64, rank: u32, launches: u64) -> Result<bool, TwinError> {
        self.rank(rank)?;
        // SAFETY: as in `run`; the machine has the rank.
        match unsafe { (self.library.functions().run_until)(self.machine, turns, rank, launches) } {
            // SAFETY: the machine is this library's, and alive.
            1 => Err(TwinError::Fault(unsafe { self.library.fault(self.machine) })),
            3 => Ok(false),
            _ => Ok(self.launches_ended(rank)? >= launches),
        }
    }

    /// Launches of a rank that have ended since the machine was made.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn launches_ended(&self, rank: u32) -> Result<u64, TwinError> {
        self.rank(rank)?;
        // SAFETY: the machine is alive, and has the rank.
        Ok(unsafe { (self.library.functions().launches_ended)(self.machine, rank) })
    }

    /// Gives memory back, between runs: whoever reaches for it from now on breaks `bounds`.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] where no memory begins at the address.
    pub fn release(&mut self, at: u64) -> Result<(), TwinError> {
        // SAFETY: the machine is alive; it looks the address up, and keeps the memory as long as copies may be under way.
        let bad = unsafe { (self.library.functions().release)(self.machine, at) };
        memory(at, 1, bad)
    }

    /// From now on a device reaches only those peers that it has opened ([`Machine::open`]).
    pub fn isolate(&mut self) {
        // SAFETY: the machine is alive.
        unsafe { (self.library.functions().isolate)(self.machine) }
    }

    /// Lets the device of `from` reach the windows of `to`.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn open(&mut self, from: u32, to: u32) -> Result<(), TwinError> {
        self.rank(from)?;
        self.rank(to)?;
        // SAFETY: the machine is alive, and has both ranks.
        unsafe { (self.library.functions().open)(self.machine, from, to) };
        Ok(())
    }

    /// Lets a rank's cores stop for ever at the copy to global memory after `copies` more. What they have in flight lands or vanishes.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn crash(&mut self, rank: u32, copies: u64) -> Result<(), TwinError> {
        self.rank(rank)?;
        // SAFETY: the machine is alive, and has the rank.
        unsafe { (self.library.functions().crash)(self.machine, rank, copies) };
        Ok(())
    }

    /// Whether a rank's cores have stopped for ever.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn has_crashed(&self, rank: u32) -> Result<bool, TwinError> {
        self.rank(rank)?;
        // SAFETY: the machine is alive, and has the rank.
        Ok(unsafe { (self.library.functions().has_crashed)(self.machine, rank) } != 0)
    }

    /// Suspends a rank's cores at the copy to global memory after `copies` more, until [`Machine::go_on`]. What they have in flight lands, or stays
    /// where it is.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn suspend(&mut self, rank: u32, copies: u64) -> Result<(), TwinError> {
        self.rank(rank)?;
        // SAFETY: the machine is alive, and has the rank.
        unsafe { (self.library.functions().suspend)(self.machine, rank, copies) };
        Ok(())
    }

    /// Whether a rank's cores are suspended.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn is_suspended(&self, rank: u32) -> Result<bool, TwinError> {
        self.rank(rank)?;
        // SAFETY: the machine is alive, and has the rank.
        Ok(unsafe { (self.library.functions().is_suspended)(self.machine, rank) } != 0)
    }

    /// Lets a rank that is suspended go on, after less than `within` ticks more, as the seed draws; 0: at once.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have, or that is not suspended.
    pub fn go_on(&mut self, rank: u32, within: u64) -> Result<(), TwinError> {
        if !self.is_suspended(rank)? {
            return Err(TwinError::Invalid(format!("rank to go on is {rank}, allowed: one that is suspended")));
        }
        // SAFETY: the machine is alive, and has the rank.
        unsafe { (self.library.functions().go_on)(self.machine, rank, within) };
        Ok(())
    }

    /// Lets so many ticks pass, where no core, copy or card can move.
    pub(super) fn pass_idle_time(&mut self, ticks: u64) {
        // SAFETY: the machine is alive.
        unsafe { (self.library.functions().pass_idle_time)(self.machine, ticks) }
    }

    /// Gives a rank's cores few turns.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn starve(&mut self, rank: u32) -> Result<(), TwinError> {
        self.rank(rank)?;
        // SAFETY: the machine is alive, and has the rank.
        unsafe { (self.library.functions().starve)(self.machine, rank) };
        Ok(())
    }

    /// Gives the queues of a rank's card few turns, those that are made from now on: what is posted there stays under way for long.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn starve_card(&mut self, rank: u32) -> Result<(), TwinError> {
        self.rank(rank)?;
        // SAFETY: the machine is alive, and has the rank.
        unsafe { (self.library.functions().starve_card)(self.machine, rank) };
        Ok(())
    }

    /// Lets the copies of rank `from` to some bytes of the windows of `to` vanish, or land only so many ticks after they have ended for the core
    /// that issued them; after so many that pass unharmed.
    ///
    /// # Errors
    /// [`TwinError::Invalid`] for a rank that the machine does not have.
    pub fn block(
        &mut self,
        (from, to): (u32, u32),
        window: Range<u64>,
        after: u64,
        late: Option<u64>,
    ) -> Result<(), TwinError> {
        self.rank(from)?;
        self.rank(to)?;
        let late = late.unwrap_or(u64::MAX);
        // SAFETY: the machine is alive, and has both ranks.
        unsafe { (self.library.functions().block)(self.machine, from, to, window.start, window.end, after, late) };
        Ok(())
    }

    /// Copies that [`Machine::block`] has befallen.
    pub fn befallen(&self) -> u64 {
        // SAFETY: the machine is alive.
        unsafe { (self.library.functions().befallen)(self.machine) }
    }

    /// From now on a turn takes so many ticks where nothing has moved for long: a wait that lasts to its deadline takes few turns then.
    pub fn hurry(&mut self, ticks: u64) {
        // SAFETY: the machine is alive.
        unsafe { (self.library.functions().hurry)(self.machine, ticks) }
    }

    /// The library that it runs kernels of.
    pub const fn library(&self) -> &Library {
        &self.library
    }

    /// Ranks that it has.
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Whether two ranks are of one group.
    pub(super) const fn is_group(&self, one: u32, other: u32) -> bool {
        one / self.group == other / self.group
    }

    /// Ticks of the system counter so far, of 20 ns each: one a turn, but for [`Machine::hurry`].
    pub fn cycles(&self) -> u64 {
        // SAFETY: the machine is alive.
        unsafe { (self.library.functions().cycles)(self.machine) }
    }

    /// A hash of all turns so far: the same for the same seed and the same calls.
    pub fn history(&self) -> u64 {
        // SAFETY: the machine is alive.
        unsafe { (self.library.functions().history)(self.machine) }
    }
}

fn memory(at: u64, bytes: usize, bad: i32) -> Result<(), TwinError> {
    if bad == 0 {
        return Ok(());
    }
    Err(TwinError::Invalid(format!("device memory is {at:#x} and {bytes} bytes, allowed: within what was allocated")))
}

impl Drop for Machine {
    fn drop(&mut self) {
        // SAFETY: the machine is alive, and nobody uses it any more.
        unsafe { (self.library.functions().free)(self.machine) }
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Machine").field("ranks", &self.ranks).field("cycles", &self.cycles()).finish_non_exhaustive()
    }
}
