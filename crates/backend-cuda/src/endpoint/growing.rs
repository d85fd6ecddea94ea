//! An arena that grows: when to ask for more of it.

#[cfg(feature = "workshop")]
use std::sync::{Arc, atomic::AtomicU64};
use std::time::{Duration, Instant};

use ep_core::Error;
#[cfg(feature = "workshop")]
use ep_core::Rank;
use ep_core::layout::RowFormat;
use ep_core::port::Offset;

use super::{CudaEndpoint, poll};
use crate::driver::{Moment, Pause};
use crate::node::{Growth, Keeper};

/// Batches and their results for which a piece has room at least: those ahead, and one that is held meanwhile.
const COMING: u64 = 5;
/// Those for which there is to be room ahead of the next one, where results were kept and memory is there for them, and where not.
const AHEAD: [u64; 2] = [4, 1];
/// How long a call waits for memory that is under way, and then no further one: the thread of a peer may be stopped.
const PATIENCE: Duration = Duration::from_millis(200);
/// How long an endpoint that ends waits for what may read its results.
const READERS_PATIENCE: Duration = Duration::from_secs(5);

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

    /// Makes later calls wait for what `stream` holds now: a stream of this GPU, by the driver's handle; 0 is the default stream. Results that are given
    /// back may still be read on it until the next call follows it.
    ///
    /// # Errors
    /// Where the driver refuses.
    ///
    /// # Safety
    /// `stream` lives.
    pub unsafe fn follow(&mut self, stream: usize) -> Result<(), Error> {
        let own = &self.device.stream;
        self.device.node.readers().follow(own.device(), stream);
        self.mark = self.ages.mark();
        // SAFETY: as the caller promises.
        unsafe { own.follow(stream) }?;
        let Some(keeper) = &self.keeper else { return Ok(()) };
        if !keeper.has_mark() && self.desk.arena().is_waiting() {
            self.note(self.mark)?;
        }
        Ok(())
    }

    /// Lets memory of an arena that grows go which no result uses and the next batches do not need. It goes some three seconds later, once all work
    /// that was enqueued before this call has ended. Without this call it goes after later calls. With [`Self::read_beside`] only results count that
    /// were given back before the last [`Self::follow`].
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

    /// Says that `stream` is never destroyed: a stream of this GPU, by the driver's handle; 0, the default stream, is one. When this endpoint is gone, and results
    /// that outlive it, the window's memory goes as soon as all streams that calls have [followed](Self::follow) have done what they hold then. It
    /// never goes where one of them may have ended.
    ///
    /// # Safety
    /// It is a stream of this GPU, and never destroyed.
    pub unsafe fn lasts(&mut self, stream: usize) {
        // SAFETY: as the caller promises.
        unsafe { self.device.node.readers().lasts(self.device.stream.device(), stream) };
    }

    /// Before this endpoint is dropped: waits for what may read results of it that were given back, five seconds at most, so that the window's memory goes
    /// with it. What takes longer, the memory goes behind. `stream`: one that may read them, too.
    ///
    /// # Errors
    /// Where the driver refuses, or has failed.
    ///
    /// # Safety
    /// `stream` lives.
    pub unsafe fn ends_behind(&mut self, stream: usize) -> Result<(), Error> {
        let readers = self.device.node.readers();
        readers.follow(self.device.stream.device(), stream);
        // SAFETY: as the caller promises.
        let Some(mut moments) = unsafe { readers.moments(Some(stream)) }? else { return Ok(()) };
        let (began, mut pause) = (Instant::now(), Pause::default());
        while began.elapsed() < READERS_PATIENCE {
            moments = Moment::to_come(moments)?;
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
