//! The windows of all ranks of a node, as one rank's GPU reaches them.

mod copies;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ep_bootstrap::Member;
use ep_core::{Layout, Rank, RankSet};

use crate::driver::{Device, DeviceMemory, Imported, MemoryHandle, Stream};
use crate::error::CudaError;

pub(crate) use copies::Copies;

/// What windows are filled with where they are poisoned: cells of no generation, operations of no row.
const POISON: u8 = 0xee;

/// How long ranks wait for each other at least when they meet: a process may have to open its GPU and compile kernels first.
const PATIENCE: Duration = Duration::from_secs(60);

/// The window of one rank.
#[derive(Debug)]
enum Window {
    /// Of this process.
    Here(DeviceMemory),
    /// Of another one.
    There(Imported),
}

/// The windows of all ranks, zeroed at first.
#[derive(Debug)]
pub(crate) struct Node {
    windows: Vec<Window>,
    /// Ranks that are threads, and of which it is known that they do nothing any more.
    gone: Vec<AtomicBool>,
    /// Where the ranks are processes: how they tell each other, and how long that may take.
    met: Option<(Arc<Member>, Duration)>,
}

impl Node {
    /// Of ranks that are threads of this process: one on each of `devices`, which all reach each other.
    pub(crate) fn here(devices: &[Arc<Device>], layout: &Layout, poison: bool) -> Result<Arc<Self>, CudaError> {
        for from in devices {
            for to in devices {
                from.reach(to)?;
            }
        }
        let windows = devices.iter().map(|device| Ok(Window::Here(window(device, layout, poison)?)));
        let gone = devices.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(Arc::new(Self { windows: windows.collect::<Result<_, CudaError>>()?, gone, met: None }))
    }

    /// Of ranks that are processes: this one's on `device`, those of the others as they name them.
    pub(crate) fn met(
        device: &Arc<Device>,
        layout: &Layout,
        member: &Arc<Member>,
        within: Duration,
        poison: bool,
    ) -> Result<Arc<Self>, CudaError> {
        let own = window(device, layout, poison)?;
        let hash = layout.hash(&layout.settings().rings());
        let told = [&hash.to_le_bytes()[..], &own.handle()?.to_bytes()].concat();
        let patience = within.max(PATIENCE);
        let all = member.all_gather(&told, patience).map_err(CudaError::meeting)?;
        let mut own = Some(own);
        let windows = (0..).map(Rank).zip(all).map(|(rank, told)| {
            if rank == member.rank() {
                return own.take().map(Window::Here).ok_or(CudaError::Meeting { problem: "a rank came twice".into() });
            }
            Ok(Window::There(Imported::open(device, read(rank, told.as_deref(), hash)?)?))
        });
        let windows = windows.collect::<Result<_, CudaError>>();
        // Nobody begins before all reach all: a rank that cannot is told to the others by its absence here.
        let node = Self { windows: windows?, gone: Vec::new(), met: Some((Arc::clone(member), within)) };
        member.barrier(patience).map_err(CudaError::meeting)?;
        Ok(Arc::new(node))
    }

    /// Where kernels see the window of `rank`.
    pub(crate) fn address(&self, rank: Rank) -> u64 {
        match &self.windows[rank.index()] {
            Window::Here(memory) => memory.address(),
            Window::There(memory) => memory.address(),
        }
    }

    /// `rank`, a thread of this process, does nothing any more. What it published before is seen by whoever learns this.
    pub(crate) fn strike(&self, rank: Rank) {
        if let Some(gone) = self.gone.get(rank.index()) {
            gone.store(true, Ordering::Release);
        }
    }

    /// The ranks that were struck.
    pub(crate) fn gone(&self) -> RankSet {
        let gone = |rank: &Rank| self.gone.get(rank.index()).is_some_and(|gone| gone.load(Ordering::Acquire));
        self.ranks().filter(gone).collect()
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..self.windows.len() as u32).map(Rank)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some((member, within)) = &self.met {
            // Peers may still pull from here; who failed is not waited for for longer than that.
            if let Err(error) = member.barrier(*within) {
                tracing::debug!(%error, "left before the other ranks");
            }
        }
    }
}

/// A window, filled with a pattern where it is poisoned: cells of no generation.
fn window(device: &Arc<Device>, layout: &Layout, poison: bool) -> Result<DeviceMemory, CudaError> {
    let stream = Stream::new(device, 0)?;
    let window = DeviceMemory::zeroed(&stream, usize::try_from(layout.window_bytes()).unwrap_or(usize::MAX))?;
    if poison {
        window.fill(&stream, POISON)?;
    }
    stream.synchronize()?;
    Ok(window)
}

/// What `rank` told: the hash of its layout, which must be `hash`, and its window.
fn read(rank: Rank, told: Option<&[u8]>, hash: u64) -> Result<MemoryHandle, CudaError> {
    let problem = |problem: String| CudaError::Meeting { problem };
    let told = told.ok_or_else(|| problem(format!("rank {rank} was given up")))?;
    let (Some(theirs), Some(handle)) = (told.first_chunk::<8>(), told.get(8..).and_then(|rest| rest.try_into().ok()))
    else {
        return Err(problem(format!("rank {rank} told {} bytes, expected {}", told.len(), 8 + MemoryHandle::BYTES)));
    };
    let theirs = u64::from_le_bytes(*theirs);
    if theirs != hash {
        let what = "shape, topology or settings differ";
        return Err(problem(format!("{what}: the hash of rank {rank} is {theirs:016x}, the own {hash:016x}")));
    }
    Ok(MemoryHandle::from_bytes(handle))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_tell_is_checked() {
        let told = [&7u64.to_le_bytes()[..], &[3; MemoryHandle::BYTES]].concat();
        assert_eq!(read(Rank(1), Some(&told), 7).unwrap().to_bytes(), [3; MemoryHandle::BYTES]);
        let complaint = |told: Option<&[u8]>, hash| read(Rank(1), told, hash).unwrap_err().to_string();
        assert!(complaint(Some(&told), 8).contains("rank 1 is 0000000000000007, the own 0000000000000008"));
        assert!(complaint(Some(&told[..79]), 7).contains("79 bytes, expected 80"));
        assert!(complaint(None, 7).contains("rank 1 was given up"));
    }
}
