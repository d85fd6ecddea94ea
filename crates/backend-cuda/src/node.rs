//! The windows of all ranks of a node, as one rank's GPU reaches them.

mod copies;
mod ending;
mod growing;
mod hosts;
mod keeper;
#[cfg(target_os = "linux")]
mod mirror;
mod mover;
mod readers;
mod said;

use std::sync::Arc;
#[cfg(feature = "workshop")]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ep_bootstrap::{Member, Parts};
use ep_core::topology::Reach;
use ep_core::{Error, Layout, Rank, RankSet};

use crate::driver::{Device, DeviceMemory, Imported, MemoryHandle, Stream, Stretch};
use crate::error::CudaError;
use ending::Users;

pub(crate) use copies::{Copies, Moving};
pub(crate) use growing::{Brought, Growth};
pub(crate) use hosts::number_here;
pub(crate) use keeper::Keeper;
pub(crate) use readers::Readers;

/// What windows are filled with where they are poisoned: cells of no generation, operations of no row.
const POISON: u8 = 0xee;

/// How long ranks wait for each other at least when they meet: a process may have to open its GPU and compile kernels first.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The window of one rank.
#[derive(Debug)]
enum Window {
    /// Of this process.
    Here(DeviceMemory),
    /// Of another one.
    There(Imported),
    /// Of this process or of another one, where memory comes and goes.
    Growing(Arc<Stretch>),
}

/// The windows that this process reaches, zeroed at first.
#[derive(Debug)]
pub(crate) struct Node {
    /// `[ranks]`: none for ranks of other nodes, where ranks are processes.
    windows: Vec<Option<Window>>,
    /// Ranks that are threads, and of which it is known that they do nothing any more.
    gone: Vec<AtomicBool>,
    /// Where the ranks are processes: how they tell each other, and how long that may take.
    met: Option<(Arc<Member>, Duration)>,
    /// Whether a rank was given up.
    is_lossy: AtomicBool,
    /// Whether kernels of a rank of this process may still run: nobody could wait for them.
    may_run: AtomicBool,
    /// Whether work of others that was enqueued may still read results that lie in a window of this process.
    may_be_read: AtomicBool,
    /// What reads them.
    readers: Arc<Readers>,
    /// Whether this rank has come to where all part, and whether the kernels of all ranks have ended, here and elsewhere.
    has_come: AtomicBool,
    has_parted: AtomicBool,
}

impl Node {
    /// Of ranks that are threads of this process: one on each of `devices`, which all reach each other.
    pub(crate) fn here(devices: &[Arc<Device>], layout: &Layout, poison: bool) -> Result<Arc<Self>, CudaError> {
        for from in devices {
            for to in devices {
                from.reach(to)?;
            }
        }
        let windows = devices.iter().map(|device| Ok(Some(Window::Here(window(device, layout, poison)?))));
        Ok(Arc::new(Self::of(windows.collect::<Result<_, CudaError>>()?, devices.len(), None)))
    }

    fn of(windows: Vec<Option<Window>>, threads: usize, met: Option<(Arc<Member>, Duration)>) -> Self {
        let gone = (0..threads).map(|_| AtomicBool::new(false)).collect();
        let [is_lossy, may_run, may_be_read, has_come, has_parted] = [(); 5].map(|()| AtomicBool::new(false));
        Self { windows, gone, met, is_lossy, may_run, may_be_read, readers: Arc::default(), has_come, has_parted }
    }

    /// Of ranks that are processes: this one's window on `device`, the others' of its node by the handles that all have told. Beside it, whether they could be
    /// opened: those that could not lie nowhere.
    pub(crate) fn met(
        device: &Arc<Device>,
        own: DeviceMemory,
        layout: &Layout,
        member: &Arc<Member>,
        within: Duration,
        handles: &Parts,
    ) -> (Arc<Self>, Result<(), Error>) {
        let (mut own, mut reached) = (Some(own), Ok(()));
        let window = |(rank, told): (Rank, &Option<Vec<u8>>)| match layout.topology().reach(member.rank(), rank) {
            Reach::Own => own.take().map(Window::Here),
            Reach::Near if reached.is_ok() => {
                let opened = theirs(device, rank, told.as_deref());
                opened.map(Window::There).map_err(|error| reached = Err(error)).ok()
            }
            Reach::Near | Reach::Far => None,
        };
        let windows = layout.topology().all().zip(handles).map(window).collect();
        (Arc::new(Self::of(windows, 0, Some((Arc::clone(member), within)))), reached)
    }

    /// Where kernels see the window of `rank`; nowhere, 0, where it is a process of another node.
    pub(crate) fn address(&self, rank: Rank) -> u64 {
        match &self.windows[rank.index()] {
            Some(Window::Here(memory)) => memory.address(),
            Some(Window::There(memory)) => memory.address(),
            Some(Window::Growing(memory)) => memory.address(),
            None => 0,
        }
    }

    /// Bytes of the window of `rank` that have memory as this process sees it, where that comes and goes.
    #[cfg(feature = "workshop")]
    pub(crate) fn mapped(&self, rank: Rank) -> Option<&Arc<AtomicU64>> {
        match &self.windows[rank.index()] {
            Some(Window::Growing(memory)) => Some(memory.mapped()),
            _ => None,
        }
    }

    /// What other processes of this host open the window of `rank` by.
    pub(crate) fn handle(&self, rank: Rank) -> Result<MemoryHandle, CudaError> {
        match &self.windows[rank.index()] {
            Some(Window::Here(memory)) => memory.handle(),
            _ => Err(CudaError::Meeting { problem: format!("the window of rank {rank} is of another process") }),
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

    /// Waits for the other ranks, whose kernels may still pull from here; who failed is not waited for for longer than an operation may take. This
    /// rank's kernels have ended. What lies in its window may be read on. `keeps_graphs`: graphs of this rank live, and may run later: then nobody's
    /// window goes to others. Ranks part once, where their endpoints are dropped: as a collective it has its place among the other ones of the meeting. Where
    /// memory comes and goes nobody waits: it lives on where others have it mapped.
    pub(crate) fn part(&self, keeps_graphs: bool) {
        let Some((member, within)) = &self.met else { return };
        if self.windows.iter().flatten().any(|window| matches!(window, Window::Growing(_))) {
            return;
        }
        if self.has_come.swap(true, Ordering::Relaxed) {
            return;
        }
        match member.all_gather(&[keeps_graphs.into()], *within) {
            Ok(all) if all.iter().flatten().all(|keeps| keeps[..] == [0]) => {
                self.has_parted.store(true, Ordering::Relaxed)
            }
            Ok(_) => tracing::debug!("graphs of a closed communicator live: its windows are not used again"),
            Err(error) => tracing::debug!(%error, "left before the other ranks"),
        }
    }

    /// Nobody could wait for the kernels of a rank of this process: its windows are not used again.
    pub(crate) fn let_run(&self) {
        self.may_run.store(true, Ordering::Relaxed);
    }

    /// Results that lie in a window of this process outlive its rank.
    pub(crate) fn outlive(&self) {
        self.may_be_read.store(true, Ordering::Relaxed);
    }

    /// Streams that read results of ranks of this process.
    pub(crate) const fn readers(&self) -> &Arc<Readers> {
        &self.readers
    }

    /// The ranks went on without some.
    pub(crate) fn lose(&self) {
        self.is_lossy.store(true, Ordering::Relaxed);
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..self.windows.len() as u32).map(Rank)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Whoever did not part may live and have this window mapped. (Ranks that are threads share this value, and so keep it.)
        let is_left = self.met.is_some() && (!*self.has_parted.get_mut() || *self.is_lossy.get_mut());
        let may_run = *self.may_run.get_mut();
        let readers = (*self.may_be_read.get_mut()).then_some(&self.readers);
        for window in self.windows.drain(..).flatten() {
            match window {
                Window::Here(memory) => ending::fixed(memory, &Users { is_left: is_left || may_run, readers }),
                // Memory that others have mapped lives on.
                Window::Growing(memory) => ending::growing(memory, &Users { is_left: may_run, readers }),
                Window::There(_) => {}
            }
        }
    }
}

/// A window, filled with a pattern where it is poisoned: cells of no generation.
pub(crate) fn window(device: &Arc<Device>, layout: &Layout, poison: bool) -> Result<DeviceMemory, CudaError> {
    let stream = Stream::new(device, 0)?;
    let window = DeviceMemory::zeroed(&stream, usize::try_from(layout.window_bytes()).unwrap_or(usize::MAX))?;
    if poison {
        window.fill(&stream, POISON)?;
    }
    stream.synchronize()?;
    Ok(window)
}

/// The window that `rank`, a process of this host, names so.
fn theirs(device: &Arc<Device>, rank: Rank, told: Option<&[u8]>) -> Result<Imported, Error> {
    let handle = handle_of(rank, told)?;
    Imported::open(device, handle).map_err(|error| {
        let needs =
            "all GPUs of a node visible to each of its ranks, which run on one host, in one container, as one user";
        Error::unsupported(format_args!("the window of rank {rank} ({error})"), needs)
    })
}

/// What `rank` told.
fn handle_of(rank: Rank, told: Option<&[u8]>) -> Result<MemoryHandle, CudaError> {
    let problem = |problem: String| CudaError::Meeting { problem };
    let told = told.ok_or_else(|| problem(format!("rank {rank} was given up")))?;
    let wrong = |_| problem(format!("rank {rank} told {} bytes, expected {}", told.len(), MemoryHandle::BYTES));
    Ok(MemoryHandle::from_bytes(told.try_into().map_err(wrong)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_tell_is_checked() {
        let told = [3; MemoryHandle::BYTES];
        assert_eq!(handle_of(Rank(1), Some(&told)).unwrap().to_bytes(), told);
        let complaint = |told: Option<&[u8]>| handle_of(Rank(1), told).unwrap_err().to_string();
        assert!(complaint(Some(&told[..71])).contains("71 bytes, expected 72"));
        assert!(complaint(None).contains("rank 1 was given up"));
    }
}
