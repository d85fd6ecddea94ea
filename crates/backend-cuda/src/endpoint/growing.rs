//! An arena that grows: when to ask for more of it.

#[cfg(feature = "workshop")]
use std::sync::{Arc, atomic::AtomicU64};
use std::time::{Duration, Instant};

use ep_core::Error;
#[cfg(feature = "workshop")]
use ep_core::Rank;
use ep_core::layout::RowFormat;
use ep_core::port::Offset;

use super::{CudaEndpoint, GRACE, poll};
use crate::driver::{Moment, Pause};
use crate::node::{Growth, Keeper};

/// Batches and their results for which a piece has room at least: those ahead, and one that is held meanwhile.
const COMING: u64 = 5;
/// Those for which there is to be room ahead of the next one, where results were kept and memory is there for them, and where not.
const AHEAD: [u64; 2] = [4, 1];
/// How long a call waits for memory that is under way, and then no further one: the thread of a peer may be stopped.
const PATIENCE: Duration = Duration::from_millis(200);

impl CudaEndpoint {
    /// Lets the arena grow from here on. Before the first call.
    pub(crate) fn grow(&mut self, growth: Growth, within: Duration) -> Result<(), Error> {
        self.desk.let_grow(Offset(growth.from()), &self.ages);
        let arena = (self.desk.arena(), &self.ages);
        self.keeper = Some(Keeper::start(growth, arena, &self.device, within)?);
        Ok(())
    }

    /// A call begins, which will have [`heard`](Self::has_heard) from its first kernels.
    pub(super) fn begins(&self) -> u64 {
        self.ages.begin()
    }

    /// The host has heard from the first kernels of a call.
    pub(super) fn has_heard(&self, call: u64) {
        self.ages.settle(call);
    }

    /// Makes calls from now on wait for what `stream` holds now: a stream of this GPU, by the driver's handle; 0 is the default stream. Results that are
    /// given back may be read there until the next call follows it, and when this endpoint is dropped.
    ///
    /// # Errors
    /// Where the driver refuses.
    ///
    /// # Safety
    /// `stream` lives.
    pub unsafe fn follow(&mut self, stream: usize) -> Result<(), Error> {
        let own = &self.device.stream;
        let Some(keeper) = &self.keeper else {
            // SAFETY: as the caller promises.
            return Ok(unsafe { own.follow(stream) }?);
        };
        self.mark = self.ages.mark();
        self.device.node.readers().follow(own.device(), stream);
        // SAFETY: as the caller promises.
        unsafe { own.follow(stream) }?;
        if !keeper.has_mark() && self.desk.arena().is_waiting() {
            self.note(self.mark)?;
        }
        Ok(())
    }

    /// Lets memory of an arena that grows go, some seconds later: what nobody has by now, and is not needed for batches like the last one. Otherwise it goes
    /// when later calls have told that what had read it has ended; with results that are [read beside](Self::read_beside) the stream of this endpoint,
    /// by what it has [followed](Self::follow) last.
    ///
    /// # Errors
    /// Where the driver refuses.
    pub fn trim(&mut self) -> Result<(), Error> {
        self.note(if self.read_beside { self.mark } else { self.ages.mark() })
    }

    /// A mark is reached when what is enqueued so far has ended.
    fn note(&self, mark: u64) -> Result<(), Error> {
        let (own, Some(keeper)) = (&self.device.stream, &self.keeper) else { return Ok(()) };
        // SAFETY: the stream lives. While it is captured, nothing is known.
        if let Some(moment) = unsafe { Moment::behind(own.device(), own.raw() as usize) }? {
            keeper.note(mark, moment);
        }
        Ok(())
    }

    /// `stream` lives as long as the process: a stream of this GPU, by the driver's handle; 0, the default stream, is one. When this endpoint is gone, and results
    /// of it that outlive it, the memory of an arena that grows goes as soon as all streams that calls have [followed](Self::follow) have done what they
    /// hold then; never, where one of them may have ended.
    ///
    /// # Safety
    /// It does.
    pub unsafe fn lasts(&mut self, stream: usize) {
        self.device.node.readers().lasts(self.device.stream.device(), stream);
    }

    /// Before this endpoint is dropped: waits a few seconds for what may read results of it that were given back, so that all memory of an arena that grows goes with it.
    /// What takes longer, it goes behind. `stream`: one that may read them, too.
    ///
    /// # Errors
    /// Where the driver refuses.
    ///
    /// # Safety
    /// `stream` lives.
    pub unsafe fn ends_behind(&mut self, stream: usize) -> Result<(), Error> {
        let readers = self.device.node.readers();
        readers.follow(self.device.stream.device(), stream);
        // SAFETY: as the caller promises.
        let Some(mut moments) = unsafe { readers.moments(Some(stream)) }? else { return Ok(()) };
        let (began, mut pause) = (Instant::now(), Pause::default());
        while began.elapsed() < GRACE {
            moments.retain(|moment| !moment.has_come().unwrap_or(false));
            if moments.is_empty() {
                self.read_beside = false;
                break;
            }
            pause.pass();
        }
        Ok(())
    }

    /// Asks for more where the next batches, as large as one of so many rows, would have no room.
    pub(super) fn look_ahead(&mut self, rows: u32) {
        let Some(keeper) = &self.keeper else { return };
        let (row, ahead) = (self.layout().row(), AHEAD[usize::from(keeper.backed() == 0 || keeper.is_short())]);
        let bytes = |rows: u64| row.block_bytes(rows).saturating_add(row.results().block_bytes(rows));
        let (each, wanted) = (bytes(rows.into()), bytes(u64::from(rows) * ahead));
        self.last_bytes = each;
        keeper.look_ahead(wanted);
        if !self.desk.arena().has_room(wanted) {
            keeper.ask(each.saturating_mul(COMING).max(keeper.backed()), each);
        }
    }

    /// Waits for memory that is under way, where a batch like the last one has no room otherwise.
    pub(super) async fn what_comes(&self) {
        let Some(keeper) = &self.keeper else { return };
        // As of almost every call.
        if !keeper.is_coming() {
            return;
        }
        let (arena, began, patience) = (self.desk.arena(), Instant::now(), self.patience());
        let has_come = || {
            if began.elapsed() > patience {
                keeper.give_up_waiting();
            }
            arena.has_room(self.last_bytes) || !keeper.is_coming()
        };
        poll::until(|| has_come().then_some(())).await;
    }

    /// How long a call waits for memory: peers may wait for the call.
    fn patience(&self) -> Duration {
        PATIENCE.min(Duration::from_nanos(self.desk.settings().deadline().0) / 4)
    }

    /// Waits for memory where the arena has no room for a block of so many rows and may grow: a way without it is slower by far, or there is none. It is a
    /// matter of some milliseconds, and of this rank and the threads of its peers alone.
    pub(super) async fn make_room(&self, format: &RowFormat, rows: u32) {
        let Some(keeper) = &self.keeper else { return };
        let (arena, least) = (self.desk.arena(), format.block_bytes(rows.into()));
        let (began, patience) = (Instant::now(), self.patience());
        let has_ended = || {
            if began.elapsed() > patience {
                keeper.give_up_waiting();
            }
            if arena.has_room(least) || keeper.is_refused() || keeper.is_overdue() {
                return Some(());
            }
            if !keeper.is_coming() {
                keeper.ask(least.saturating_mul(COMING).max(keeper.backed()), least);
            }
            None
        };
        poll::until(has_ended).await;
    }

    /// Whether the arena has as much as it may, and something of it was asked for in vain: not more than a second ago.
    pub fn is_arena_full(&self) -> bool {
        self.keeper.as_ref().is_none_or(Keeper::is_refused)
    }

    /// Bytes of the window of `rank` that have memory as this process sees it, now and when it has ended, where arenas grow.
    #[cfg(feature = "workshop")]
    pub fn mapped(&self, rank: Rank) -> Option<Arc<AtomicU64>> {
        self.device.node.mapped(rank).map(Arc::clone)
    }

    /// Bytes that the arena has now; of one that does not grow all of it.
    pub fn arena_bytes(&self) -> u64 {
        let arena = self.layout().arena();
        let Some(keeper) = &self.keeper else { return arena.len };
        keeper.from().min(arena.end()) - arena.offset.0 + keeper.backed()
    }
}
