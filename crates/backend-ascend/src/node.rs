//! The windows of all ranks of a server, each on a device of this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ep_core::layout::KernelWindow;
use ep_core::{Layout, Rank, RankSet};

use crate::driver::{AscendError, Device, Memory};

/// The windows of all ranks. They stay until the last rank has gone: who is slower may still write to a window.
#[derive(Debug)]
pub(crate) struct Node {
    windows: Vec<Memory>,
    /// Ranks of which it is known that they do nothing any more.
    gone: Vec<AtomicBool>,
}

impl Node {
    /// A window on each of `devices`, which all reach each other.
    pub(crate) fn new(devices: &[Arc<Device>], layout: &Layout) -> Result<Arc<Self>, AscendError> {
        for from in devices {
            devices.iter().try_for_each(|to| from.reach(to))?;
        }
        let windows = devices.iter().map(|device| window(device, layout)).collect::<Result<_, _>>()?;
        Ok(Arc::new(Self { windows, gone: devices.iter().map(|_| AtomicBool::new(false)).collect() }))
    }

    /// Where kernels see the window of `rank`.
    pub(crate) fn address(&self, rank: Rank) -> u64 {
        self.windows[rank.index()].address()
    }

    /// `rank` does nothing any more. What it published before has landed.
    pub(crate) fn strike(&self, rank: Rank) {
        self.gone[rank.index()].store(true, Ordering::Release);
    }

    /// The ranks that were struck.
    pub(crate) fn gone(&self) -> RankSet {
        self.ranks().filter(|rank| self.gone[rank.index()].load(Ordering::Acquire)).collect()
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..self.windows.len() as u32).map(Rank)
    }
}

/// A window. Its cells begin as 0; all else is what the device happens to hold.
fn window(device: &Arc<Device>, layout: &Layout) -> Result<Memory, AscendError> {
    let bytes = usize::try_from(layout.window_bytes()).unwrap_or(usize::MAX);
    let window = Memory::of_peers(device, bytes)?;
    let (from, to) = cells(&KernelWindow::from(layout));
    window.fill_part(from as usize, (to - from) as usize, 0)?;
    Ok(window)
}

/// Where the cells begin and end: the counts messages lie behind them.
const fn cells(w: &KernelWindow) -> (u64, u64) {
    (w.cells, w.counts)
}
