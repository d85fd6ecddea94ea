//! An arena that grows: when to ask for more of it.

#[cfg(feature = "workshop")]
use std::sync::{Arc, atomic::AtomicU64};
use std::time::{Duration, Instant};

use ep_core::Error;
use ep_core::layout::RowFormat;
use ep_core::port::Offset;

use super::{CudaEndpoint, poll};
use crate::node::{Growth, Keeper};

/// Batches and their results for which a piece has room at least: those ahead, and one that is held meanwhile.
const COMING: u64 = 5;
/// Those for which there is to be room ahead of the next one, where results were kept and memory is there for them, and where not.
const AHEAD: [u64; 2] = [4, 1];
/// How long a call waits for memory that is under way: the thread of a peer may be stopped.
const PATIENCE: Duration = Duration::from_millis(200);

impl CudaEndpoint {
    /// Lets the arena grow from here on. Before the first call.
    pub(crate) fn grow(&mut self, growth: Growth, within: Duration) -> Result<(), Error> {
        self.desk.let_grow(Offset(growth.from()), &self.ages);
        self.keeper = Some(Keeper::start(growth, self.desk.arena(), within)?);
        Ok(())
    }

    /// A call begins, which will have [`heard`](Self::has_heard) from its first kernels.
    pub(super) fn begins(&self) -> [u64; 2] {
        [&self.ages, self.device.stream.device().ages()].map(|ages| ages.begin())
    }

    /// The host has heard from the first kernels of a call.
    pub(super) fn has_heard(&self, [own, any]: [u64; 2]) {
        let device = self.device.stream.device();
        self.ages.settle(own);
        device.ages().settle(any);
        device.sweep();
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
        let (arena, began) = (self.desk.arena(), Instant::now());
        let has_come = || arena.has_room(self.last_bytes) || !keeper.is_coming() || began.elapsed() > PATIENCE;
        poll::until(|| has_come().then_some(())).await;
    }

    /// Waits for memory where the arena has no room for a block of so many rows and may grow: a way without it is slower by far, or there is none. It is a
    /// matter of some milliseconds, and of this rank and the threads of its peers alone.
    pub(super) async fn make_room(&self, format: &RowFormat, rows: u32) {
        let Some(keeper) = &self.keeper else { return };
        let (arena, least, began) = (self.desk.arena(), format.block_bytes(rows.into()), Instant::now());
        let has_ended = || {
            if arena.has_room(least) || keeper.is_refused() || began.elapsed() > PATIENCE {
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

    /// Bytes of its window that have memory, now and when it has ended, where the arena grows.
    #[cfg(feature = "workshop")]
    pub fn mapped(&self) -> Option<Arc<AtomicU64>> {
        self.keeper.as_ref().map(|keeper| Arc::clone(keeper.mapped()))
    }

    /// Bytes that the arena has now; of one that does not grow all of it.
    pub fn arena_bytes(&self) -> u64 {
        let arena = self.layout().arena();
        let Some(keeper) = &self.keeper else { return arena.len };
        keeper.from().min(arena.end()) - arena.offset.0 + keeper.backed()
    }
}
