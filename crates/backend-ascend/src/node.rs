//! The windows of all ranks, each on a device of this process, and the queues between servers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ep_core::layout::KernelWindow;
use ep_core::port::Offset;
use ep_core::{Layout, Rank, RankSet};

use crate::args::Queue;
use crate::driver::{AscendError, Code, Device, Memory, Network, name_of};

/// The windows of all ranks. They stay until the last rank has gone: who is slower may still write to a window.
#[derive(Debug)]
pub(crate) struct Node {
    windows: Vec<Memory>,
    /// Over several servers `[ranks]`: the key of each window as a source, and as a target.
    keys: Vec<(u32, u32)>,
    /// Ranks of which it is known that they do nothing any more.
    gone: Vec<AtomicBool>,
}

impl Node {
    /// A window on each of `devices`. Those of a server reach each other, and over several servers all windows are known to the cards.
    pub(crate) fn new(devices: &[Arc<Device>], layout: &Layout) -> Result<Arc<Self>, AscendError> {
        for server in devices.chunks(layout.topology().ranks_per_node() as usize) {
            server.iter().try_for_each(|from| server.iter().try_for_each(|to| from.reach(to)))?;
        }
        let windows = devices.iter().map(|device| window(device, layout)).collect::<Result<_, _>>()?;
        let windows: Vec<Memory> = windows;
        let keys = match layout.topology().nodes() {
            1 => Vec::new(),
            _ => windows.iter().map(keys).collect::<Result<_, _>>()?,
        };
        Ok(Arc::new(Self { windows, keys, gone: devices.iter().map(|_| AtomicBool::new(false)).collect() }))
    }

    /// Where kernels see the window of `rank`.
    pub(crate) fn address(&self, rank: Rank) -> u64 {
        self.windows[rank.index()].address()
    }

    /// A word of the window of `rank`. Nothing of that rank runs.
    pub(crate) fn word(&self, rank: Rank, at: Offset) -> Result<u64, AscendError> {
        Ok(self.windows[rank.index()].values::<u64>(at.0 as usize, 1)?[0])
    }

    /// Where kernels see the staging memory of low latency of `rank`, behind its window and words; 0 where there is none.
    pub(crate) fn staging(&self, rank: Rank, layout: &Layout) -> Result<u64, AscendError> {
        if self.keys.is_empty() {
            return Ok(0);
        }
        let window = &self.windows[rank.index()];
        Ok(window.address() + layout.window_bytes() + words(layout, network(window)?.depth))
    }

    /// A new queue from a rank to another, with the words that it publishes from behind the window.
    pub(crate) fn queue(&self, from: Rank, to: Rank, layout: &Layout) -> Result<Queue, AscendError> {
        let window = &self.windows[from.index()];
        let network = network(window)?;
        let peer = self.windows[to.index()].device().ordinal();
        let view = check("a queue", (network.queue)(window.device().ordinal(), peer))?;
        Ok(Queue {
            number: view.number,
            depth: view.depth,
            level: view.level,
            completion_depth: view.completion_depth,
            source_key: self.keys[from.index()].0,
            target_key: self.keys[to.index()].1,
            head: view.posted,
            taken: 0,
            elements: view.elements,
            doorbell: view.doorbell,
            tail: view.tail,
            completions: view.completions,
            completions_taken: view.completions_taken,
            words: window.address() + layout.window_bytes() + u64::from(to.0 * network.depth) * 8,
        })
    }

    /// Ends all queues of a rank: nothing that it has posted arrives any more.
    pub(crate) fn close(&self, rank: Rank) -> Result<(), AscendError> {
        let window = &self.windows[rank.index()];
        if self.keys.is_empty() {
            return Ok(());
        }
        check("the end of queues", (network(window)?.close)(window.device().ordinal()))
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

/// The way from a window's device to other servers.
fn network(window: &Memory) -> Result<Network, AscendError> {
    let table = window.device().table();
    table.network.ok_or(AscendError::NoNetwork { table: table.name })
}

/// What a function of the network gives.
fn check<T>(call: &'static str, result: Result<T, Code>) -> Result<T, AscendError> {
    result.map_err(|code| AscendError::Call { call, cause: name_of(code), code })
}

/// The keys of a window and of the words behind it, as a source and as a target.
fn keys(window: &Memory) -> Result<(u32, u32), AscendError> {
    let network = network(window)?;
    let key = |is_target| {
        let bytes = window.bytes() as u64;
        check("a key", (network.key)(window.device().ordinal(), window.address(), bytes, is_target))
    };
    Ok((key(false)?, key(true)?))
}

/// Bytes of the words that queues publish from, one queue for each rank.
fn words(layout: &Layout, depth: u32) -> u64 {
    u64::from(layout.topology().ranks()) * u64::from(depth) * 8
}

/// Bytes of the staging memory of low latency: for each rank of another server as much as a rank's part of a bank.
fn staging(layout: &Layout) -> u64 {
    let topology = layout.topology();
    let far = u64::from(topology.ranks() - topology.ranks_per_node());
    far * layout.low_part(1, Rank(0)).len
}

/// A window, and over several servers the words that queues publish from and the staging memory of low latency. Its cells begin as 0; all else is what the device happens to hold.
fn window(device: &Arc<Device>, layout: &Layout) -> Result<Memory, AscendError> {
    let network = device.table().network.filter(|_| layout.topology().nodes() > 1);
    let behind = network.map_or(0, |network| words(layout, network.depth).saturating_add(staging(layout)));
    let bytes = usize::try_from(layout.window_bytes().saturating_add(behind)).unwrap_or(usize::MAX);
    let window = Memory::of_peers(device, bytes)?;
    let (from, to) = cells(&KernelWindow::from(layout));
    window.fill_part(from as usize, (to - from) as usize, 0)?;
    Ok(window)
}

/// Where the cells begin and end: the counts messages lie behind them.
const fn cells(w: &KernelWindow) -> (u64, u64) {
    (w.cells, w.counts)
}
