//! What ranks take of the memory of their GPUs, told before any of it is taken.
//!
//! Counted are windows, and what measurements keep beside them. The state of a rank and its kernels are small. Rows of a user come later,
//! with each call.

use std::sync::Arc;

use ep_core::memory::Estimate;
use ep_core::{Error, Layout};

use crate::driver::Device;

/// What makes windows smaller.
const REMEDY: &str = "a smaller arena, fewer tokens, shorter rows, or more GPUs for as many ranks";

/// Refuses ranks that take more than their GPUs have left: `devices` has that of each rank, `each` is what one rank takes.
pub(crate) fn admit(devices: &[Arc<Device>], each: &Estimate) -> Result<(), Error> {
    let first_of = |at: usize| devices.iter().position(|other| other.ordinal() == devices[at].ordinal()) == Some(at);
    for device in (0..devices.len()).filter(|&at| first_of(at)).map(|at| &devices[at]) {
        let sharing = devices.iter().filter(|other| other.ordinal() == device.ordinal()).count();
        fits(each, sharing as u64, device.ordinal(), device.left()?)?;
    }
    Ok(())
}

/// What is left to the driver: one part of so many of what a GPU has left. Its pools take more than they are asked for.
const DRIVERS_SHARE: u64 = 16;

/// Refuses `ranks` ranks on a GPU that has `left` bytes left.
fn fits(each: &Estimate, ranks: u64, gpu: usize, left: u64) -> Result<(), Error> {
    let left = left - left / DRIVERS_SHARE;
    let ranks_there = if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") };
    each.clone().times(ranks).within((format_args!("GPU {gpu}"), left), ranks_there, REMEDY)
}

/// The window of one rank.
pub(crate) fn of_window(layout: &Layout) -> Estimate {
    Estimate::of_windows(layout, 1)
}

/// What a window that grows has at first, so many bytes of its arena.
pub(crate) fn of_growing(layout: &Layout, at_first: u64) -> Estimate {
    let others = layout.window_bytes() - layout.arena().len;
    Estimate::default().with("windows", others.saturating_add(at_first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_a_gpu_take_more_of_it() {
        let each = Estimate::default().with("windows", 30 << 30).with("batches", 2 << 30);
        assert_eq!(fits(&each, 2, 3, 69 << 30), Ok(()));
        assert_eq!(
            fits(&each, 2, 3, 68 << 30).unwrap_err().to_string(),
            "memory of 2 ranks is about 64.0 GiB (windows 60.0 GiB, batches 4.0 GiB), allowed: at most 63.8 GiB, \
             what GPU 3 has left; a smaller arena, fewer tokens, shorter rows, or more GPUs for as many ranks"
        );
        assert!(fits(&each, 1, 0, 1 << 30).unwrap_err().to_string().starts_with("memory of 1 rank is about 32.0 GiB"));
    }
}
