//! An arena that grows: when to ask for more of it.

use std::time::Duration;

use ep_core::Error;
use ep_core::port::Offset;

use super::CudaEndpoint;
use crate::node::{Growth, Keeper};

/// Batches and their results for which there is to be room ahead of the next one, and that a piece has room for at least.
const AHEAD: u32 = 2;
const COMING: u64 = 4;

impl CudaEndpoint {
    /// Lets the arena grow from here on. Before the first call.
    pub(crate) fn grow(&mut self, growth: Growth, within: Duration) -> Result<(), Error> {
        self.desk.let_grow(Offset(growth.from()), self.device.stream.device().ages());
        self.keeper = Some(Keeper::start(growth, self.desk.arena(), within)?);
        Ok(())
    }

    /// Asks for more where the next batches, as large as one of so many rows, would have no room.
    pub(super) fn look_ahead(&self, rows: u32) {
        let Some(keeper) = &self.keeper else { return };
        let row = self.layout().row();
        if self.desk.arena().room(row) < rows.saturating_mul(AHEAD) {
            let each = row.block_bytes(rows.into()).saturating_add(row.results().block_bytes(rows.into()));
            keeper.ask(each.saturating_mul(COMING).max(keeper.backed() / 2), each);
        }
    }

    /// Bytes that the arena has now; of one that does not grow all of it.
    pub fn arena_bytes(&self) -> u64 {
        let arena = self.layout().arena();
        let Some(keeper) = &self.keeper else { return arena.len };
        keeper.from().min(arena.end()) - arena.offset.0 + keeper.backed()
    }
}
