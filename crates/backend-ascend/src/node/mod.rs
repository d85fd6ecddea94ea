//! The windows of all ranks, each on a device of this process or of another one, and the queues between servers.

pub(crate) mod met;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ep_bootstrap::Member;
use ep_core::layout::KernelWindow;
use ep_core::memory::Estimate;
use ep_core::port::Offset;
use ep_core::{Layout, Rank, RankSet};

use crate::args::Queue;
use crate::driver::{Admitted, AscendError, Detail, Device, Exported, Imported, Memory, Route, Routes, Table, done};

/// The window of a rank.
#[derive(Debug)]
enum Window {
    /// Of this process.
    Here(Memory),
    /// Of another process of this server.
    There(Imported),
    /// Of a process of another server: only cards reach it.
    Far(Admitted),
}

impl Window {
    const fn address(&self) -> u64 {
        match self {
            Self::Here(memory) => memory.address(),
            Self::There(memory) => memory.address(),
            Self::Far(memory) => memory.remote().address,
        }
    }
}

/// The windows of all ranks. They stay until the last rank has gone: who is slower may still write to a window.
#[derive(Debug)]
pub(crate) struct Node {
    windows: Vec<Window>,
    /// `[ranks]`: the ordinals of their devices, by which the network finds them.
    devices: Vec<u32>,
    /// Whether there are several servers.
    is_far: bool,
    /// Ranks of which it is known that they do nothing any more.
    gone: Vec<AtomicBool>,
    /// Where the ranks are processes: how they tell each other, and how long that may take.
    met: Option<(Arc<Member>, Duration)>,
    /// By which processes of this server import this one's window.
    exported: Option<Exported>,
}

impl Node {
    /// A window on each of `devices`. Those of a server reach each other, and over several servers all windows are known to the cards.
    pub(crate) fn new(devices: &[Arc<Device>], layout: &Layout) -> Result<Arc<Self>, AscendError> {
        for server in devices.chunks(layout.topology().ranks_per_node() as usize) {
            server.iter().try_for_each(|from| server.iter().try_for_each(|to| from.reach(to)))?;
        }
        let is_far = layout.topology().nodes() > 1;
        let windows = devices.iter().map(|device| {
            let window = window(device, layout)?;
            if is_far {
                register(&window)?;
            }
            Ok(Window::Here(window))
        });
        let windows = windows.collect::<Result<_, AscendError>>()?;
        Ok(Arc::new(Self {
            windows,
            devices: devices.iter().map(|device| device.ordinal()).collect(),
            is_far,
            met: None,
            exported: None,
            gone: devices.iter().map(|_| AtomicBool::new(false)).collect(),
        }))
    }

    /// The window of a rank of this process.
    fn here(&self, rank: Rank) -> Result<&Memory, AscendError> {
        match &self.windows[rank.index()] {
            Window::Here(memory) => Ok(memory),
            Window::There(_) | Window::Far(_) => Err(AscendError::OtherProcess { rank: rank.0 }),
        }
    }

    /// Where kernels see the window of `rank`.
    pub(crate) fn address(&self, rank: Rank) -> u64 {
        self.windows[rank.index()].address()
    }

    /// A word of the window of `rank`. Nothing of that rank runs.
    pub(crate) fn word(&self, rank: Rank, at: Offset) -> Result<u64, AscendError> {
        Ok(self.here(rank)?.values::<u64>(at.0 as usize, 1)?[0])
    }

    /// Where kernels see the staging memory of low latency of `rank`, behind its window and words; 0 where there is none.
    pub(crate) fn staging(&self, rank: Rank, layout: &Layout) -> Result<u64, AscendError> {
        if !self.is_far || staging(layout) == 0 {
            return Ok(0);
        }
        let window = self.here(rank)?;
        Ok(window.address() + layout.window_bytes() + words(layout, window.device().network()?.depth))
    }

    /// New queues from a rank to others, with the words that it publishes from behind the window.
    pub(crate) fn queues(&self, from: Rank, peers: &[Rank], layout: &Layout) -> Result<Vec<Queue>, AscendError> {
        if peers.is_empty() {
            return Ok(Vec::new());
        }
        let window = self.here(from)?;
        let (network, device) = (window.device().network()?, window.device());
        let to: Vec<u32> = peers.iter().map(|peer| peer.0).collect();
        let context = done("new queues", (network.connect)(device.ordinal(), &self.devices, from.0, &to))?;
        // SAFETY: the network, and the context that it gives, name structs in the memory of this device.
        let reader = |at, into: &mut [u8]| unsafe { Memory::read_from(device, at, into) };
        let routes = Routes::read(&reader, context, from.0, self.devices.len() as u32)?;
        let words = window.address() + layout.window_bytes();
        let queue = |peer: &Rank| {
            let Route { view, source, target } = routes.to(peer.0)?;
            // Windows are alike on all ranks.
            let bytes = window.bytes() as u64;
            covers("bytes of LOCAL_OUTPUT", &source, window.address(), bytes)?;
            covers("bytes of REMOTE_INPUT", &target, self.address(*peer), bytes)?;
            Ok(Queue {
                number: view.number,
                depth: view.depth,
                level: view.level,
                completion_depth: view.completion_depth,
                source_key: source.key,
                target_key: target.key,
                head: view.posted,
                taken: 0,
                elements: view.elements,
                doorbell: view.doorbell,
                tail: view.tail,
                completions: view.completions,
                completions_taken: view.completions_taken,
                words: words + u64::from(peer.0 * network.depth) * 8,
            })
        };
        peers.iter().map(queue).collect()
    }

    /// Ends all queues of a rank: nothing that it has posted arrives any more.
    pub(crate) fn close(&self, rank: Rank) -> Result<(), AscendError> {
        if !self.is_far {
            return Ok(());
        }
        let window = self.here(rank)?;
        done("the end of queues", (window.device().network()?.close)(window.device().ordinal()))
    }

    /// `rank` does nothing any more. What it published before has landed.
    pub(crate) fn strike(&self, rank: Rank) {
        if let Some(gone) = self.gone.get(rank.index()) {
            gone.store(true, Ordering::Release);
        }
    }

    /// The ranks that were struck.
    pub(crate) fn gone(&self) -> RankSet {
        let is_gone = |rank: &Rank| self.gone.get(rank.index()).is_some_and(|gone| gone.load(Ordering::Acquire));
        self.ranks().filter(is_gone).collect()
    }

    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> {
        (0..self.windows.len() as u32).map(Rank)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let Some((member, within)) = &self.met else { return };
        // Nothing of this rank runs, but others may still write to its window: it is theirs until they have closed it, too.
        self.windows.retain(|window| matches!(window, Window::Here(_)));
        // Who failed is not waited for for longer than that.
        if let Err(error) = member.barrier(*within) {
            tracing::debug!(%error, "left before the other ranks");
        }
        self.exported = None;
    }
}

/// Makes a window known to the cards, with what lies behind it.
fn register(window: &Memory) -> Result<(), AscendError> {
    let device = window.device();
    done("a key", (device.network()?.register)(device.ordinal(), window.address(), window.bytes() as u64))
}

/// Whether what elements may name holds a window of so many bytes at an address.
fn covers(what: &'static str, detail: &Detail, address: u64, bytes: u64) -> Result<(), AscendError> {
    let first = address.checked_sub(detail.address);
    if first.is_some_and(|first| first <= detail.bytes && bytes <= detail.bytes - first) {
        return Ok(());
    }
    Err(AscendError::Context { what, seen: detail.bytes, needed: bytes })
}

/// Bytes of the words that queues publish from, one queue for each rank.
fn words(layout: &Layout, depth: u32) -> u64 {
    u64::from(layout.topology().ranks()) * u64::from(depth) * 8
}

/// Bytes of the staging memory of low latency: for each rank of another server as much as a rank's part of a bank. 0 without low latency.
fn staging(layout: &Layout) -> u64 {
    if !layout.settings().low_latency() {
        return 0;
    }
    let topology = layout.topology();
    let far = u64::from(topology.ranks() - topology.ranks_per_node());
    far * layout.low_part(1, Rank(0)).len
}

/// What of a device's memory the window of a rank takes, and over several servers what lies behind it.
pub(crate) fn estimate(layout: &Layout, table: &Table) -> Estimate {
    let network = table.network.filter(|_| layout.topology().nodes() > 1);
    let (words, staging) = network.map_or((0, 0), |network| (words(layout, network.depth), staging(layout)));
    Estimate::of_windows(layout, 1).with("words of queues", words).with("staging memory of low latency", staging)
}

/// A window, and over several servers the words that queues publish from and the staging memory of low latency. Its cells begin as 0; all else is what the device happens to hold.
fn window(device: &Arc<Device>, layout: &Layout) -> Result<Memory, AscendError> {
    let bytes = usize::try_from(estimate(layout, device.table()).bytes()).unwrap_or(usize::MAX);
    let window = Memory::of_peers(device, bytes)?;
    let (from, to) = cells(&KernelWindow::from(layout));
    window.fill_part(from as usize, (to - from) as usize, 0)?;
    Ok(window)
}

/// Where the cells begin and end: the counts messages lie behind them.
const fn cells(w: &KernelWindow) -> (u64, u64) {
    (w.cells, w.counts)
}

#[cfg(test)]
mod tests {
    use ep_core::{Settings, Shape, Topology};

    use super::*;
    use crate::driver::Network;

    const DEPTH: u32 = 8;

    /// What a rank's window takes of a device that has a way to other servers.
    fn parts(nodes: u32, low_latency: bool) -> (u64, Estimate) {
        let shape = Shape::builder().experts(4).topk(2).hidden(64).max_tokens(16).build().unwrap();
        let topology = Topology::new(nodes, 4 / nodes).unwrap();
        let settings = Settings::builder(&shape, &topology).low_latency(low_latency).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        let network = Network {
            depth: DEPTH,
            register: |_, _, _| Ok(()),
            describe: |_| Err(0),
            admit: |_, _| Err(0),
            dismiss: |_, _| Ok(()),
            connect: |_, _, _, _| Ok(0),
            close: |_| Ok(()),
        };
        let table = Table { network: Some(network), ..Table::empty("none", || 0) };
        let part = if low_latency { layout.low_part(1, Rank(0)).len } else { 0 };
        (part, estimate(&layout, &table))
    }

    #[test]
    fn what_lies_behind_a_window_counts() {
        let (part, both) = parts(2, true);
        assert!(part > 0);
        let words = u64::from(4 * DEPTH * 8);
        assert_eq!(both.parts()[1..], [("words of queues", words), ("staging memory of low latency", 2 * part)]);
        assert_eq!(parts(2, false).1.parts()[1..], [("words of queues", words)]);
        assert_eq!(parts(1, true).1.parts().len(), 1);
    }
}
