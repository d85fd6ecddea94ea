//! How much memory this machine has left, and the refusal of what takes more.
//!
//! What something takes is an [`Estimate`] of [`ep_core::memory`], which knows no machine. This crate holds an
//! estimate against the machine before anything is taken: a kernel that is out of memory ends programs without a
//! word.
//!
//! ```
//! use ep_core::memory::{Estimate, Size};
//! use ep_core::{Layout, Settings, Shape, Topology};
//!
//! let topology = Topology::new(1, 4)?;
//! let shape = Shape::builder().experts(8).topk(2).hidden(64).max_tokens(16).build()?;
//! let layout = Layout::new(&shape, &topology, &Settings::auto(&shape, &topology))?;
//!
//! // The windows of four ranks, and what else the program takes.
//! let estimate = Estimate::of_windows(&layout, 4).with("batches", 1 << 20);
//! ep_memory::admit(&estimate, "4 ranks", "fewer tokens or ranks")?;
//!
//! // What no machine has is refused, with parts, limit and remedy.
//! let endless = Estimate::default().with("rows", u64::MAX);
//! if let Some(left) = ep_memory::left()? {
//!     let refusal = ep_memory::admit(&endless, "a run", "fewer tokens").unwrap_err().to_string();
//!     assert!(refusal.starts_with("memory of a run is about 16.0 EiB (rows 16.0 EiB), allowed: at"), "{refusal}");
//!     println!("{} are left", Size(left));
//! }
//! # Ok::<(), ep_core::Error>(())
//! ```
//!
//! # What is counted
//!
//! - What the system counts as available is left, within the limits of a control group and of the process (`ulimit -v`). Pages
//!   of files that the group has read count as left: the kernel gives them back when somebody needs them.
//! - Where the system is wrong, [`VARIABLE`] in the environment says how many bytes there are.
//! - Where the system does not tell, [`left`] is none, and [`admit`] refuses nothing.
//! - Memory of GPUs is not looked at: the builders of `ep-cuda` do that.
//!
//! Nothing is reserved: two programs that ask at the same time are both told of the same memory.
//!
//! # Where to go next
//!
//! [`ep_core::memory`] has what ranks take. The builders of simulated and of CPU ranks call [`admit`] by themselves,
//! and `moexpress plan` prints the estimate of a layer.
#![forbid(unsafe_code)]

use ep_core::Error;
use ep_core::memory::Estimate;
use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};
use sysinfo::{CGroupLimits, MemoryRefreshKind, System};

/// The variable of the environment that says how much memory there is, in bytes.
pub const VARIABLE: &str = "MOEXPRESS_MEMORY";

/// Bytes that are left, or none where the system does not tell.
///
/// # Errors
/// [`Error::Invalid`] where [`VARIABLE`] is no number.
pub fn left() -> Result<Option<u64>, Error> {
    match std::env::var(VARIABLE) {
        Ok(text) => given(&text).map(Some),
        Err(std::env::VarError::NotPresent) => Ok(measured()),
        Err(error) => Err(Error::invalid(VARIABLE, error, "a number of bytes")),
    }
}

/// Refuses what takes more than is left. `remedy` says what makes it smaller.
///
/// # Errors
/// [`Error::Invalid`] with the estimate, what is left, and the remedy; that of [`left`].
pub fn admit(estimate: &Estimate, of: impl std::fmt::Display, remedy: &str) -> Result<(), Error> {
    left()?.map_or(Ok(()), |left| estimate.within(("this machine", left), of, remedy))
}

fn given(text: &str) -> Result<u64, Error> {
    text.trim().parse().map_err(|_| Error::invalid(VARIABLE, format_args!("{text:?}"), "a number of bytes"))
}

/// What the system and the control group have left.
fn measured() -> Option<u64> {
    let mut system = System::new().ok()?;
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    let whole = Some(system.available_memory()).filter(|bytes| *bytes > 0);
    whole.into_iter().chain(system.cgroup_limits().as_ref().map(left_of)).chain(addresses()).min()
}

/// What this process may still have of addresses, where they are limited (`ulimit -v`): an allocation beyond that ends the program.
fn addresses() -> Option<u64> {
    let limit = getrlimit(Resource::As).current?;
    // Pages, of which the first number is all that it has.
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").ok()?.split(' ').next()?.parse().ok()?;
    Some(limit.saturating_sub(pages * page_size() as u64))
}

/// What a control group has left. Its `free_memory` counts the pages of files that it has read or written as used, though it gives them
/// back as soon as somebody needs them: what no file has is used. (So are windows of other processes, which nobody tells apart here.)
fn left_of(group: &CGroupLimits) -> u64 {
    group.total_memory.saturating_sub(group.rss)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory_and_no_machine_has_all() {
        let left = measured().expect("the system tells");
        assert!((1 << 20..1 << 50).contains(&left), "{left}");
        let all = Estimate::default().with("everything", u64::MAX);
        let refusal = all.within(("this machine", left), "a test", "less").unwrap_err().to_string();
        assert!(refusal.contains("everything") && refusal.ends_with("less"), "{refusal}");
    }

    #[test]
    fn a_group_full_of_files_has_room_and_a_full_one_has_none() {
        let group = |rss| CGroupLimits { total_memory: 8 << 30, free_memory: 0, free_swap: 0, rss };
        assert_eq!(left_of(&group(1 << 30)), 7 << 30);
        assert_eq!(left_of(&group(9 << 30)), 0);
    }

    #[test]
    fn memory_is_given_in_bytes() {
        assert_eq!(given(" 4096 ").unwrap(), 4096);
        let refusal = given("4 GiB").unwrap_err().to_string();
        assert_eq!(refusal, "MOEXPRESS_MEMORY is \"4 GiB\", allowed: a number of bytes");
    }
}
