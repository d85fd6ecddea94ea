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
//! Nothing depends on it: a call waits a little for memory that is under way, and goes another way where that does not come.
//! Ranks that are threads have one mapping of a window, for all of their GPUs, and tell each other nothing.

mod work;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ep_bootstrap::{Door, DoorAddress, Member};
use ep_core::engine::{Ages, Arena};
use ep_core::{Rank, RankSet};

use super::growing::Growth;
use crate::driver::{Device, Moment, Stretch};
use crate::error::CudaError;
use crate::rank::RankDevice;
use work::Work;

/// Time between two looks at what is spare, and at who is gone.
const LOOK: Duration = Duration::from_millis(250);

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
    /// Whether somebody has waited for it in vain: then nobody does.
    is_overdue: AtomicBool,
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
    /// Those of them whose windows nothing of this rank touches any more.
    left: Mutex<RankSet>,
    /// Marks of the arena's ages, and what comes behind all that each is to come behind.
    marks: Mutex<Vec<(u64, Moment)>>,
}

/// Keeps an arena. Its thread ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Keeper {
    shared: Arc<Shared>,
    /// Where pieces begin.
    from: u64,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Of what grows of the window of `rank`, whose arena is `arena`. Returns when those of the others have what they have from the beginning.
    ///
    /// # Errors
    /// Where the system has no thread, or [`Self::met`] fails.
    pub(crate) fn start(
        growth: Growth,
        (arena, ages): (&Arena, &Arc<Ages>),
        rank: &Arc<RankDevice>,
        within: Duration,
    ) -> Result<Self, CudaError> {
        let (from, Growth { door, kept, awaited, member }) = (growth.from(), growth);
        let shared = Arc::new(Shared {
            door,
            asked: AtomicU64::new(0),
            least: AtomicU64::new(0),
            ahead: AtomicU64::new(0),
            is_refused: AtomicBool::new(false),
            is_overdue: AtomicBool::new(false),
            is_short: AtomicBool::new(false),
            backed: AtomicU64::new(0),
            stops: AtomicBool::new(false),
            met: Mutex::new(Ok(0)),
            has_met: Condvar::new(),
            lost: Mutex::default(),
            left: Mutex::default(),
            marks: Mutex::default(),
        });
        let work = Work::new(Arc::clone(&shared), kept, (arena.clone(), Arc::clone(ages)), Arc::clone(rank));
        let thread = thread::Builder::new().name("moexpress arena".to_owned()).spawn(|| work.go_on());
        let thread = thread.map_err(|error| CudaError::NoGrowth { problem: format!("a thread: {error}") })?;
        let this = Self { shared, from, thread: Some(thread) };
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
        // Whoever has waited in vain waited for what was under way before.
        self.shared.is_overdue.store(false, Ordering::Relaxed);
        self.shared.asked.store(bytes.max(least).max(1), Ordering::Release);
        self.wake();
    }

    /// Whether what was asked for is under way, and worth a wait.
    pub(crate) fn is_coming(&self) -> bool {
        self.shared.asked.load(Ordering::Acquire) != 0 && !self.is_refused() && !self.is_overdue()
    }

    /// Somebody has waited for what is under way for long enough: a peer may not answer.
    pub(crate) fn give_up_waiting(&self) {
        self.shared.is_overdue.store(true, Ordering::Relaxed);
    }

    /// Whether nobody is to wait for what is under way.
    pub(crate) fn is_overdue(&self) -> bool {
        self.shared.is_overdue.load(Ordering::Relaxed)
    }

    /// Whether there is little left to be had: the last piece was smaller than what was asked for.
    pub(crate) fn is_short(&self) -> bool {
        self.shared.is_short.load(Ordering::Relaxed)
    }

    /// Whether what was asked for last is not to be had. It may be asked for again a second later.
    pub(crate) fn is_refused(&self) -> bool {
        self.shared.is_refused.load(Ordering::Acquire)
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

    /// Whether one mark is not reached: another one would tell little.
    pub(crate) fn has_mark(&self) -> bool {
        !locked(&self.shared.marks).is_empty()
    }

    /// That mark is reached when the moment has come, unless something has failed by then.
    pub(crate) fn note(&self, mark: u64, moment: Moment) {
        locked(&self.shared.marks).push((mark, moment));
    }

    /// Unmaps the windows of these, which it was [without](Self::without) before: a mapping would keep their memory.
    ///
    /// # Safety
    /// Nothing of this rank touches these windows any more.
    pub(crate) unsafe fn leave(&self, lost: &RankSet) {
        locked(&self.shared.left).extend(lost);
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
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of an arena's memory had ended by a panic: the arena did not grow any more");
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
