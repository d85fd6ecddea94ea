//! A [`Keeper`]: a thread that gives a rank's arena memory as it is needed, and takes away what is not.
//!
//! ```text
//!  owner                                                           each of the others of its node
//!  makes a piece, maps it          -- Back, a descriptor ------->  maps it where it sees the owner's window
//!  hands out blocks of it          <- Backed, or Refused --------
//!    ...
//!  withdraws what nobody has       -- Bare --------------------->  unmaps it
//! ```
//!
//! Nothing depends on it: a call waits a little for memory that is under way, and goes another way where that does not come. Ranks that are threads have one mapping of a window, for all of
//! their GPUs, and tell each other nothing.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ep_bootstrap::{DOOR_MESSAGE, Door, DoorAddress, Member, Visit};
use ep_core::engine::{Arena, Piece};
use ep_core::port::Offset;
use ep_core::{Rank, RankSet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::growing::Growth;
use super::said::Said;
use crate::driver::{Device, LINGER, PIECE, Pages, Stretch};
use crate::error::CudaError;

/// Time between two looks at what is spare.
const LOOK: Duration = Duration::from_millis(250);
/// Time between two attempts to tell somebody who takes in nothing.
const PAUSE: Duration = Duration::from_millis(1);
/// How long it is before memory that was not to be had is asked for again.
const AGAIN: Duration = Duration::from_secs(1);
/// What is left of a GPU's free memory: one part of so many of all that it has.
const SHARE: u64 = 16;
/// Messages that are taken in at a time: whoever sends more holds up nothing.
const AT_A_TIME: usize = 64;

/// The windows that a keeper keeps: its rank's, and those of the others.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) me: Rank,
    pub(super) own: Arc<Stretch>,
    /// What the own window has from the beginning to the end.
    pub(super) fixed: Vec<Fixed>,
    /// Where pieces come and go: the bytes between.
    pub(super) between: Range<u64>,
    /// GPUs that the own window is mapped for.
    pub(super) reach: Vec<Arc<Device>>,
    /// The other ranks of the node where they are processes, as this one sees their windows, and where their keepers hear.
    pub(super) theirs: Vec<(Rank, Arc<Stretch>, DoorAddress)>,
}

/// A piece of a window that never goes.
#[derive(Debug)]
pub(super) struct Fixed {
    pub(super) at: u64,
    pub(super) len: u64,
    /// What the others map it by, where they are processes.
    pub(super) descriptor: Option<Arc<OwnedFd>>,
}

/// What its rank and its thread have in common.
#[derive(Debug)]
struct Shared {
    door: Door,
    /// Bytes that are asked for, as a whole piece, and of which a part is of use.
    asked: AtomicU64,
    least: AtomicU64,
    /// Bytes of the arena in one piece that are to stay, for the next batches, whether somebody has had them or not.
    ahead: AtomicU64,
    /// Whether what was asked for last is not to be had.
    is_refused: AtomicBool,
    /// Whether the last piece was smaller than what was asked for.
    is_short: AtomicBool,
    /// Bytes of pieces that came and have not gone.
    backed: AtomicU64,
    stops: AtomicBool,
    /// Pieces of others that were mapped here, or why one was not.
    met: Mutex<Result<usize, String>>,
    has_met: Condvar,
    /// Ranks that were given up: nobody waits for them.
    lost: Mutex<RankSet>,
}

/// Keeps an arena. Its thread ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Keeper {
    shared: Arc<Shared>,
    /// Bytes of the own window that have memory.
    #[cfg_attr(not(feature = "workshop"), allow(dead_code))] // Tests look at it.
    mapped: Arc<AtomicU64>,
    /// Where pieces begin.
    from: u64,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Of what grows of a window, whose arena is `arena`. Returns when those of the others have what they have from the beginning.
    ///
    /// # Errors
    /// Where the system has no thread, or [`Self::met`] fails.
    pub(crate) fn start(growth: Growth, arena: &Arena, within: Duration) -> Result<Self, CudaError> {
        let (from, Growth { door, kept, awaited, member }) = (growth.from(), growth);
        let shared = Arc::new(Shared {
            door,
            asked: AtomicU64::new(0),
            least: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            is_refused: AtomicBool::new(false),
            is_short: AtomicBool::new(false),
            backed: AtomicU64::new(0),
            stops: AtomicBool::new(false),
            met: Mutex::new(Ok(0)),
            has_met: Condvar::new(),
            lost: Mutex::default(),
        });
        let mapped = Arc::clone(kept.own.mapped());
        let work = Work {
            shared: Arc::clone(&shared),
            arena: arena.clone(),
            unsent: Vec::new(),
            number: 0,
            coming: None,
            spare: BTreeMap::new(),
            again: None,
            kept,
        };
        let thread = thread::Builder::new().name("moexpress arena".to_owned()).spawn(|| work.go_on());
        let thread = thread.map_err(|error| CudaError::NoGrowth { problem: format!("a thread: {error}") })?;
        let this = Self { shared, mapped, from, thread: Some(thread) };
        this.met(awaited, &member, within)?;
        Ok(this)
    }

    /// Waits until so many pieces of others are mapped here.
    ///
    /// # Errors
    /// How many are, or what could not be mapped.
    fn met(&self, pieces: usize, member: &Option<Arc<Member>>, within: Duration) -> Result<(), CudaError> {
        let (mut met, deadline) = (locked(&self.shared.met), Instant::now() + within);
        loop {
            let lost = member.as_ref().map(|member| member.lost()).unwrap_or_default();
            let problem = match &*met {
                Ok(met) if *met >= pieces => return Ok(()),
                Ok(_) if !lost.is_empty() => format!("ranks {lost:?} have ended"),
                Ok(met) => format!("{met} of {pieces} pieces of other ranks' windows have come"),
                Err(problem) => problem.clone(),
            };
            if met.is_err() || !lost.is_empty() || Instant::now() >= deadline {
                return Err(CudaError::NoGrowth { problem });
            }
            (met, _) = self.shared.has_met.wait_timeout(met, LOOK).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// So many bytes in one piece stay from now on, once they are there, if nobody has them.
    pub(crate) fn look_ahead(&self, bytes: u64) {
        self.shared.ahead.store(bytes, Ordering::Relaxed);
    }

    /// Asks for `bytes` more, or for `least` where there is not as much. Asked while others are under way, it changes nothing.
    pub(crate) fn ask(&self, bytes: u64, least: u64) {
        if self.shared.asked.load(Ordering::Relaxed) != 0 {
            return;
        }
        self.shared.least.store(least, Ordering::Relaxed);
        self.shared.asked.store(bytes.max(least).max(1), Ordering::Release);
        self.wake();
    }

    /// Whether what was asked for is under way.
    pub(crate) fn is_coming(&self) -> bool {
        self.shared.asked.load(Ordering::Acquire) != 0 && !self.is_refused()
    }

    /// Whether there is little left to be had: the last piece was smaller than what was asked for.
    pub(crate) fn is_short(&self) -> bool {
        self.shared.is_short.load(Ordering::Relaxed)
    }

    /// Whether what was asked for last is not to be had. It may be asked for again a second later.
    pub(crate) fn is_refused(&self) -> bool {
        self.shared.is_refused.load(Ordering::Acquire)
    }

    /// Bytes of the own window that have memory, now and later.
    #[cfg(feature = "workshop")]
    pub(crate) const fn mapped(&self) -> &Arc<AtomicU64> {
        &self.mapped
    }

    /// The first byte of the window that had no memory at first.
    pub(crate) const fn from(&self) -> u64 {
        self.from
    }

    /// Bytes of pieces that came and have not gone.
    pub(crate) fn backed(&self) -> u64 {
        self.shared.backed.load(Ordering::Relaxed)
    }

    /// Waits for none of these any more.
    pub(crate) fn without(&self, lost: &RankSet) {
        locked(&self.shared.lost).extend(lost);
        self.wake();
    }

    fn wake(&self) {
        // Where there is no room for it, the thread looks by itself before long.
        let _ = self.shared.door.send(&self.shared.door.address(), &[], None);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A piece that the others are to map.
struct Coming {
    number: u64,
    at: u64,
    bytes: u64,
    awaited: Vec<Rank>,
}

/// What the thread does.
struct Work {
    shared: Arc<Shared>,
    kept: Kept,
    arena: Arena,
    unsent: Vec<(Rank, Said, Option<Arc<OwnedFd>>)>,
    /// Of the last piece that the others were told of.
    number: u64,
    coming: Option<Coming>,
    /// Since when pieces are spare, and their age, by where they lie.
    spare: BTreeMap<u64, (u64, Instant)>,
    /// When memory that was not to be had is asked for again.
    again: Option<Instant>,
}

impl Work {
    fn go_on(mut self) {
        for Fixed { at, len, descriptor } in std::mem::take(&mut self.kept.fixed) {
            self.number += 1;
            self.tell_all(Said::Back { at, bytes: len, number: self.number }, descriptor.as_ref());
        }
        let mut look_at = Instant::now() + LOOK;
        loop {
            self.send();
            let wait = if self.unsent.is_empty() { LOOK } else { PAUSE };
            let wait = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
            let _ = poll(&mut [PollFd::new(&self.shared.door, PollFlags::IN)], Some(&wait));
            self.hear();
            if self.shared.stops.load(Ordering::Acquire) {
                return;
            }
            self.finish();
            self.grow();
            if Instant::now() >= look_at {
                look_at = Instant::now() + LOOK;
                self.shrink();
            }
        }
    }

    /// Takes in what has come.
    fn hear(&mut self) {
        let mut message = [0; DOOR_MESSAGE];
        for _ in 0..AT_A_TIME {
            match self.shared.door.receive(&mut message) {
                Ok(None) => return,
                Ok(Some(Visit::Stranger)) => {}
                Ok(Some(Visit::Message(bytes, descriptor))) => {
                    if let Some((from, said)) = Said::from_bytes(&message[..bytes]) {
                        self.answer(from, said, descriptor);
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "a keeper of memory hears nothing");
                    return;
                }
            }
        }
    }

    fn answer(&mut self, from: Rank, said: Said, descriptor: Option<OwnedFd>) {
        match said {
            Said::Back { at, bytes, number } => {
                let mapped = self.map(from, at, bytes, descriptor);
                let answer = if mapped.is_ok() { Said::Backed { number } } else { Said::Refused { number } };
                if let Err(error) = &mapped {
                    tracing::warn!(%error, rank = from.0, bytes, "memory of another rank cannot be mapped");
                }
                let mut met = locked(&self.shared.met);
                match (&mut *met, mapped) {
                    (Ok(met), Ok(())) => *met += 1,
                    (Ok(_), Err(error)) => *met = Err(format!("the window of rank {from}: {error}")),
                    (Err(_), _) => {}
                }
                drop(met);
                self.shared.has_met.notify_all();
                self.unsent.push((from, answer, None));
            }
            Said::Backed { number } => {
                if let Some(coming) = self.coming.as_mut().filter(|coming| coming.number == number) {
                    coming.awaited.retain(|rank| *rank != from);
                }
            }
            Said::Refused { number } => {
                if let Some(Coming { at, .. }) = self.coming.take_if(|coming| coming.number == number) {
                    self.tell_all(Said::Bare { at }, None);
                    self.bare(at);
                    self.put_off();
                }
            }
            Said::Bare { at } => {
                if let Some((_, theirs, _)) = self.kept.theirs.iter().find(|(rank, ..)| *rank == from) {
                    // SAFETY: its owner says so when nobody has been told of it whose kernels have not ended.
                    let bared = unsafe { theirs.bare(at) };
                    bared.unwrap_or_else(|error| tracing::warn!(%error, "memory of another rank stays mapped"));
                }
            }
        }
    }

    fn map(&self, from: Rank, at: u64, bytes: u64, descriptor: Option<OwnedFd>) -> Result<(), CudaError> {
        let problem = |problem: &str| CudaError::Meeting { problem: problem.to_owned() };
        let theirs = self.kept.theirs.iter().find(|(rank, ..)| *rank == from);
        let (_, theirs, _) = theirs.ok_or_else(|| problem("no rank of this node"))?;
        let lost = "its descriptor was lost: this process may not have more; allow more by `ulimit -n`";
        let descriptor = descriptor.ok_or_else(|| problem(lost))?;
        let pages = Pages::given(theirs.device(), descriptor.as_fd(), bytes)?;
        theirs.back(at, pages, &[theirs.device()])
    }

    /// Hands out a piece that all have mapped.
    fn finish(&mut self) {
        let lost = locked(&self.shared.lost).clone();
        let done = self.coming.take_if(|coming| coming.awaited.iter().all(|rank| lost.contains(*rank)));
        if let Some(Coming { at, bytes, .. }) = done {
            self.shared.backed.fetch_add(bytes, Ordering::Relaxed);
            self.arena.came(Offset(at).span(bytes));
            self.shared.asked.store(0, Ordering::Release);
            tracing::debug!(rank = self.kept.me.0, bytes, "an arena has grown");
        }
    }

    /// Makes what is asked for.
    fn grow(&mut self) {
        let asked = self.shared.asked.load(Ordering::Acquire);
        if asked == 0 || self.coming.is_some() {
            return;
        }
        if let Some(again) = self.again {
            if Instant::now() >= again {
                self.again = None;
                self.shared.is_refused.store(false, Ordering::Release);
                self.shared.asked.store(0, Ordering::Release);
            }
            return;
        }
        match self.made(asked) {
            Ok(coming) => {
                self.coming = Some(coming);
                self.finish();
            }
            Err(error) => {
                tracing::debug!(%error, rank = self.kept.me.0, asked, "an arena does not grow");
                self.put_off();
            }
        }
    }

    fn put_off(&mut self) {
        self.shared.is_refused.store(true, Ordering::Release);
        self.again = Some(Instant::now() + AGAIN);
    }

    /// A piece of so many bytes, or of the least that is of use.
    fn made(&mut self, asked: u64) -> Result<Coming, CudaError> {
        let (own, between) = (&self.kept.own, &self.kept.between);
        // Others of this process may take some of the same GPU.
        let device = Arc::clone(own.device());
        let _alone = locked(&device.takes);
        let (free, all) = device.memory()?;
        let allowed = free.saturating_sub(all / SHARE) / PIECE * PIECE;
        let least = self.shared.least.load(Ordering::Relaxed).next_multiple_of(PIECE);
        // Half of what may be taken is left for others than the batch at hand.
        let bytes = asked.next_multiple_of(PIECE).min((allowed / 2 / PIECE * PIECE).max(least)).min(allowed);
        let (at, bytes) = own.gap(between.start, between.end, bytes);
        if bytes < least || bytes == 0 {
            let room = between.end - between.start;
            let code = format!("{least} bytes at least, of {allowed} that may be taken and addresses for {room}");
            return Err(CudaError::Driver { call: "an arena's next piece", code });
        }
        self.shared.is_short.store(bytes < asked.next_multiple_of(PIECE), Ordering::Relaxed);
        let pages = Pages::new(&device, bytes)?;
        let descriptor = if self.kept.theirs.is_empty() { None } else { Some(Arc::new(pages.descriptor()?)) };
        let reach: Vec<&Device> = self.kept.reach.iter().map(|device| &**device).collect();
        own.back(at, pages, &reach)?;
        let awaited = self.kept.theirs.iter().map(|(rank, ..)| *rank).collect();
        self.number += 1;
        let number = self.number;
        self.tell_all(Said::Back { at, bytes, number }, descriptor.as_ref());
        Ok(Coming { number, at, bytes, awaited })
    }

    /// Takes away what has been spare for long.
    fn shrink(&mut self) {
        let (now, spare) = (Instant::now(), self.arena.spare());
        self.spare.retain(|at, _| spare.iter().any(|piece| piece.span.offset.0 == *at));
        for piece in spare {
            let Piece { span, given } = piece;
            let since = self.spare.entry(span.offset.0).or_insert((given, now));
            // What is needed at any look is so for as long again.
            if since.0 != given || self.arena.needs(&piece, self.shared.ahead.load(Ordering::Relaxed)) {
                *since = (given, now);
            }
            let is_over = now.duration_since(since.1) >= LINGER;
            if is_over && self.arena.withdraw(&piece) {
                self.shared.is_short.store(false, Ordering::Relaxed);
                self.spare.remove(&span.offset.0);
                self.shared.backed.fetch_sub(span.len, Ordering::Relaxed);
                self.tell_all(Said::Bare { at: span.offset.0 }, None);
                self.bare(span.offset.0);
                tracing::debug!(rank = self.kept.me.0, bytes = span.len, "an arena has shrunk");
            }
        }
    }

    fn bare(&self, at: u64) {
        // SAFETY: no block of it was handed out yet, or none is and what was enqueued while one was has ended (`Arena::withdraw`).
        let bared = unsafe { self.kept.own.bare(at) };
        bared.unwrap_or_else(|error| tracing::warn!(%error, "memory of an arena stays"));
    }

    fn tell_all(&mut self, said: Said, descriptor: Option<&Arc<OwnedFd>>) {
        let others = self.kept.theirs.iter().map(|(rank, ..)| (*rank, said, descriptor.cloned()));
        self.unsent.extend(others);
    }

    /// Sends what can be sent, to each in order.
    fn send(&mut self) {
        let (shared, kept) = (&self.shared, &self.kept);
        let lost = locked(&shared.lost).clone();
        let (mut full, mut unreachable) = (RankSet::new(), None);
        self.unsent.retain(|(to, said, descriptor)| {
            let Some((.., door)) = kept.theirs.iter().find(|(rank, ..)| rank == to) else { return false };
            if lost.contains(*to) || full.contains(*to) {
                return !lost.contains(*to);
            }
            let descriptor = descriptor.as_ref().map(|descriptor| descriptor.as_fd());
            match shared.door.send(door, &said.to_bytes(kept.me), descriptor) {
                Ok(true) => false,
                Ok(false) => {
                    full.insert(*to);
                    true
                }
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => {
                    unreachable = Some(*to);
                    false
                }
                Err(error) => {
                    tracing::debug!(%error, rank = to.0, "a rank is not told of memory now");
                    full.insert(*to);
                    true
                }
            }
        });
        if let Some(rank) = unreachable {
            // Of matter before the first call alone: who goes later is heard of in other ways.
            let problem =
                format!("rank {rank} is told nothing: it has ended, or its process has another network namespace");
            let mut met = locked(&shared.met);
            *met = met.clone().and(Err(problem));
            shared.has_met.notify_all();
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
