//! The proxy's thread, and what it shares with the control plane.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ep_core::Rank;
use ep_core::device::FarStatus;
use ep_core::transport::Lanes;

use super::lane::Lane;
use super::memory::Reached;

/// Turns in which nothing moved, after which each yields.
const PATIENCE: u32 = 1000;
/// Turns from one look at what the transport knows of broken lanes to the next.
const LOOK: u32 = 256;

#[derive(Debug)]
pub(super) struct Shared<L, M> {
    /// The thread has it for a turn at a time.
    work: Mutex<Work<L>>,
    pub(super) memory: M,
    /// Calls of the control plane that want it: the thread lets them go first.
    wanted: AtomicU32,
    pub(super) stop: AtomicBool,
    /// The thread has ended.
    pub(super) ended: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Work<L> {
    pub(super) transport: L,
    pub(super) lanes: Vec<Lane>,
    /// From a connection to the next offer.
    pub(super) connected: bool,
    pub(super) silence: Silence,
}

/// For how long nothing has been under way to each peer. A rank that only waits sends nothing that could stay without an answer, so it would not find out that a
/// peer is out of reach: where the silence lasts, the transport probes.
///
/// No peer is probed before the device has posted something to it. Until then the peer may not have connected yet, and a healthy one would not answer. An
/// operation opens by posting to each peer that it waits for.
#[derive(Debug)]
pub(super) struct Silence {
    pub(super) longest: Duration,
    /// The peers, ascending, and since when nothing has been under way to each; none: nothing has been posted there.
    since: Vec<(Rank, Option<Instant>)>,
}

impl Silence {
    /// Of the peers of these lanes; `longest`: how long it may last.
    pub(super) fn new(lanes: &[Lane], longest: Duration) -> Self {
        let mut peers: Vec<Rank> = lanes.iter().map(|lane| lane.id.peer).collect();
        peers.sort_unstable();
        peers.dedup();
        Self { longest, since: peers.into_iter().map(|peer| (peer, None)).collect() }
    }

    /// Nothing has been posted to any peer.
    pub(super) fn restart(&mut self) {
        self.since.iter_mut().for_each(|(_, since)| *since = None);
    }

    /// The peers to which nothing has been under way for too long, and of whose lanes none is known to be broken. For them it begins anew. Each lane is
    /// looked at once: there may be thousands.
    fn too_long(&mut self, lanes: &mut [Lane], now: Instant) -> impl Iterator<Item = Rank> {
        for lane in lanes {
            if (lane.was_busy() || lane.fault.is_some())
                && let Ok(at) = self.since.binary_search_by_key(&lane.id.peer, |(peer, _)| *peer)
            {
                self.since[at].1 = Some(now);
            }
        }
        let longest = self.longest;
        self.since.iter_mut().filter_map(move |(peer, since)| {
            let lasts = since.is_some_and(|since| now.duration_since(since) >= longest);
            if lasts {
                *since = Some(now);
            }
            lasts.then_some(*peer)
        })
    }
}

impl<L: Lanes, M: Reached> Shared<L, M> {
    /// `silence`: how long nothing may be under way to a peer before the transport probes.
    pub(super) fn new(transport: L, lanes: Vec<Lane>, memory: M, silence: Duration) -> Self {
        let silence = Silence::new(&lanes, silence);
        Self {
            work: Mutex::new(Work { transport, lanes, connected: false, silence }),
            memory,
            wanted: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Work<L>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the control plane: between two turns of the thread.
    pub(super) fn between_turns(&self) -> MutexGuard<'_, Work<L>> {
        self.wanted.fetch_add(1, Ordering::Relaxed);
        let work = self.lock();
        self.wanted.fetch_sub(1, Ordering::Relaxed);
        work
    }

    /// Until it is told to stop.
    pub(super) fn run(self: Arc<Self>) {
        let _ending = Ending(&*self);
        let (mut idle, mut turns) = (0, 0u32);
        while !self.stop.load(Ordering::Relaxed) {
            turns = turns.wrapping_add(1);
            let look = turns.is_multiple_of(LOOK);
            let moved = {
                let mut work = self.lock();
                if look {
                    work.probe_where_nothing_moves();
                }
                work.turn(&self.memory, look)
            };
            idle = if moved { 0 } else { idle + 1 };
            while self.wanted.load(Ordering::Relaxed) > 0 {
                thread::yield_now();
            }
            if idle > PATIENCE {
                idle = PATIENCE;
                thread::yield_now();
            } else if idle > 0 {
                std::hint::spin_loop();
            }
        }
    }
}

impl<L: Lanes> Work<L> {
    fn probe_where_nothing_moves(&mut self) {
        let Self { transport, lanes, connected, silence } = self;
        if *connected {
            silence.too_long(lanes, Instant::now()).for_each(|peer| transport.probe(peer));
        }
    }

    /// Lets every lane go on; with `look` those that broke without a verb are found, too. Whether anything moved.
    pub(super) fn turn<M: Reached>(&mut self, memory: &M, look: bool) -> bool {
        let Self { transport, lanes, connected, .. } = self;
        if !*connected {
            return false;
        }
        transport.progress();
        let mut moved = false;
        for lane in lanes {
            moved |= lane.turn(memory, transport);
            if look
                && lane.fault.is_none()
                && let Some(fault) = transport.broken(lane.id.peer)
            {
                lane.fail(memory, fault);
            }
        }
        moved
    }
}

/// Tells all lanes that nobody posts any more, however the thread ends.
struct Ending<'a, L: Lanes, M: Reached>(&'a Shared<L, M>);

impl<L: Lanes, M: Reached> Drop for Ending<'_, L, M> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Release);
        self.0.lock().lanes.iter().for_each(|lane| lane.fifo.end(&self.0.memory, FarStatus::Gone));
    }
}
