//! A transport for tests: lanes between nodes as they may be at their worst, over shared memory of one process.
//!
//! A lane holds few verbs, in order, and does them late: each only when some rank makes progress, and then by chance. So a
//! put reads its source as late as a flush permits, lanes are often full, and a publish comes long after it was accepted.
//! Connections end and break as those of a network do.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ep_core::layout::Queues;
use ep_core::port::{LaneId, Offset, Scope, Span, Ticket};
use ep_core::transport::{Lanes, Place, Transport};
use ep_core::{Error, Fault, LaneCause, Rank};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Verbs that a lane holds.
const DEPTH: usize = 5;

/// The network of one cluster.
#[derive(Clone, Debug)]
pub(crate) struct Double {
    pub(crate) far_lanes: Queues,
    pub(crate) seed: u64,
    /// A rank that nothing reaches, as whoever probes it finds out.
    pub(crate) out_of_reach: Option<Rank>,
    /// Whether connecting takes long.
    pub(crate) slow: Arc<AtomicBool>,
    ends: Arc<Mutex<Vec<Option<Arc<End>>>>>,
}

/// Where one rank's window is reached.
#[derive(Debug)]
struct End {
    memory: Memory,
    /// Which of its connections is up; none: nothing arrives. Held while anything does.
    up: Mutex<Option<u32>>,
    /// The lanes that lead from here.
    lanes: Mutex<Vec<Lane>>,
}

#[derive(Debug)]
struct Memory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address range of the process, used through raw pointers and atomics only.
unsafe impl Send for Memory {}
// SAFETY: as above; the protocol orders the copies, as on every transport.
unsafe impl Sync for Memory {}

impl Memory {
    fn of(file: BorrowedFd<'_>, bytes: u64) -> Self {
        let bytes = usize::try_from(bytes).expect("the window fits");
        // SAFETY: the system chooses a free range; the file is sealed against shrinking.
        let base =
            unsafe { mmap(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) };
        Self { base: NonNull::new(base.expect("a window can be mapped").cast()).expect("not null"), bytes }
    }

    fn at(&self, span: Span) -> *mut u8 {
        assert!(span.within(self.bytes as u64).is_ok(), "{span:?} of {}", self.bytes);
        // SAFETY: inside the mapping.
        unsafe { self.base.as_ptr().add(span.offset.0 as usize) }
    }

    fn cell(&self, at: Offset) -> &AtomicU64 {
        let place = self.at(at.span(8));
        assert!(place.cast::<u64>().is_aligned());
        // SAFETY: eight aligned bytes of the mapping, touched by atomics only.
        unsafe { AtomicU64::from_ptr(place.cast()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `of` with this length.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl End {
    fn lanes(&self) -> MutexGuard<'_, Vec<Lane>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets each lane go a step further, or not.
    fn step(&self, lanes: &mut [Lane], chance: &mut u64) {
        for lane in lanes {
            // xorshift
            *chance ^= *chance << 13;
            *chance ^= *chance >> 7;
            *chance ^= *chance << 17;
            if chance.is_multiple_of(3) {
                lane.step(&self.memory);
            }
        }
    }

    fn up(&self) -> MutexGuard<'_, Option<u32>> {
        self.up.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Double {
    pub(crate) fn new(far_lanes: Queues, seed: u64) -> Self {
        Self { far_lanes, seed, out_of_reach: None, slow: Arc::default(), ends: Arc::default() }
    }

    fn ends(&self) -> MutexGuard<'_, Vec<Option<Arc<End>>>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for Double {
    type Lanes = DoubleLanes;

    fn far_lanes(&self) -> Queues {
        self.far_lanes
    }

    fn open(&self, place: Place<'_>) -> Result<DoubleLanes, Error> {
        let memory = Memory::of(place.window, place.layout.window_bytes());
        let lane = |peer| move |kind| Lane::new(LaneId { peer, kind });
        let lanes = place.peers(self.far_lanes).flat_map(|(peer, kinds)| kinds.into_iter().map(lane(peer))).collect();
        let own = Arc::new(End { memory, up: Mutex::new(None), lanes: Mutex::new(lanes) });
        let mut ends = self.ends();
        ends.resize(place.layout.topology().ranks() as usize, None);
        ends[place.me.index()] = Some(Arc::clone(&own));
        let chance = (self.seed << 16 | u64::from(place.me.0)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        drop(ends);
        Ok(DoubleLanes { me: place.me, own, network: self.clone(), connection: 0, chance })
    }
}

#[derive(Debug)]
struct Lane {
    id: LaneId,
    peer: Option<(Arc<End>, u32)>,
    held: VecDeque<Held>,
    issued: u64,
    broken: Option<LaneCause>,
}

#[derive(Debug)]
enum Held {
    Put { ticket: u64, from: Span, to: Offset },
    Raise { at: Offset, bits: u64 },
}

impl Lane {
    fn new(id: LaneId) -> Self {
        Self { id, peer: None, held: VecDeque::new(), issued: 0, broken: None }
    }

    fn fault(&self) -> Option<Fault> {
        self.broken.map(|cause| Fault::LaneBroken { lane: self.id, cause })
    }

    fn fail(&mut self, cause: LaneCause) {
        self.broken.get_or_insert(cause);
        self.held.clear();
    }

    /// Does the oldest verb.
    fn step(&mut self, own: &Memory) {
        let Some(verb) = self.held.pop_front() else { return };
        let Some((peer, connection)) = self.peer.clone() else { return self.fail(LaneCause::Flushed) };
        let up = peer.up();
        if *up != Some(connection) {
            drop(up);
            return self.fail(LaneCause::NoAnswer);
        }
        match verb {
            Held::Put { from, to, .. } => {
                let (source, sink) = (own.at(from), peer.memory.at(to.span(from.len)));
                // SAFETY: both ranges lie in live mappings; the protocol excludes other accesses meanwhile.
                unsafe { ptr::copy(source, sink, from.len as usize) };
            }
            Held::Raise { at, bits } => {
                let before = peer.memory.cell(at).swap(bits, Ordering::AcqRel);
                assert!(before <= bits, "{}: a cell fell from {before:#x} to {bits:#x}", self.id);
            }
        }
    }
}

/// One rank's lanes.
#[derive(Debug)]
pub(crate) struct DoubleLanes {
    me: Rank,
    own: Arc<End>,
    network: Double,
    connection: u32,
    chance: u64,
}

impl DoubleLanes {
    /// Does something with a lane of this rank that has not broken.
    fn on<T>(&self, verb: &'static str, id: LaneId, act: impl FnOnce(&mut Lane) -> T) -> Result<T, Fault> {
        let mut lanes = self.own.lanes();
        let lane = lanes.iter_mut().find(|known| known.id == id).ok_or(Fault::NotOffered { verb, lane: id })?;
        lane.fault().map_or(Ok(()), Err)?;
        Ok(act(lane))
    }
}

fn is_of(scope: Scope) -> impl Fn(&&mut Lane) -> bool {
    move |lane| scope.covers(lane.id)
}

impl Lanes for DoubleLanes {
    fn offer(&mut self) -> Result<Vec<u8>, Error> {
        *self.own.up() = None;
        self.own.lanes().iter_mut().for_each(|lane| lane.held.clear());
        self.connection += 1;
        Ok(self.connection.to_le_bytes().to_vec())
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        if self.network.slow.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(2500));
        }
        let ends = self.network.ends().clone();
        for lane in self.own.lanes().iter_mut() {
            let peer = lane.id.peer.index();
            let connection =
                offers[peer].as_deref().map(|offer| u32::from_le_bytes(offer.try_into().expect("4 bytes")));
            lane.peer = ends[peer].clone().zip(connection);
            lane.broken = lane.peer.is_none().then_some(LaneCause::Flushed);
        }
        *self.own.up() = Some(self.connection);
        Ok(())
    }

    fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Option<Ticket>, Fault> {
        self.on("put", lane, |lane| {
            if lane.held.len() == DEPTH && from.len > 0 {
                return None;
            }
            if from.len > 0 {
                lane.issued += 1;
                lane.held.push_back(Held::Put { ticket: lane.issued, from, to });
            }
            Some(Ticket(lane.issued))
        })
    }

    fn raise(&mut self, lane: LaneId, at: Offset, bits: u64) -> Result<bool, Fault> {
        self.on("publish", lane, |lane| {
            let room = lane.held.len() < DEPTH;
            if room {
                lane.held.push_back(Held::Raise { at, bits });
            }
            room
        })
    }

    fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<bool, Fault> {
        let open = |held: &Held| matches!(held, Held::Put { ticket, .. } if *ticket <= upto.0);
        self.on("flush", lane, |lane| !lane.held.iter().any(open))
    }

    /// A network goes on though the rank that posted does nothing: whoever waits lets all lanes go on that nobody uses now.
    fn progress(&mut self) {
        let ends = self.network.ends().clone();
        for end in ends.into_iter().flatten() {
            if let Ok(mut lanes) = end.lanes.try_lock() {
                end.step(&mut lanes, &mut self.chance);
            }
        }
    }

    fn probe(&mut self, peer: Rank) {
        if self.network.out_of_reach == Some(peer) {
            self.own
                .lanes()
                .iter_mut()
                .filter(is_of(Scope::Peer(peer)))
                .for_each(|lane| lane.fail(LaneCause::NoAnswer));
        }
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        self.own.lanes().iter().filter(|lane| lane.id.peer == peer).find_map(Lane::fault)
    }

    fn drain(&mut self, scope: Scope) -> bool {
        self.progress();
        self.own.lanes().iter_mut().filter(is_of(scope)).all(|lane| lane.held.is_empty())
    }

    fn cut(&mut self, scope: Scope) {
        let mut lanes = self.own.lanes();
        lanes
            .iter_mut()
            .filter(is_of(scope))
            .filter(|lane| !lane.held.is_empty())
            .for_each(|lane| lane.fail(LaneCause::Cut));
    }
}

impl Drop for DoubleLanes {
    fn drop(&mut self) {
        *self.own.up() = None;
        // Lanes hold their peers' ends, and those theirs.
        self.own.lanes().clear();
        self.network.ends()[self.me.index()] = None;
    }
}
