//! The arena of a window: blocks granted to peers, or filled by the experts for peers to pull; and leases of them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::pieces::{Ages, Piece, Pieces};
use super::spans::outside;
use crate::error::Fault;
use crate::layout::{Block, Layout, OPEN_ROOM, RowFormat, SLOT_ALIGN};
use crate::machine::Window;
use crate::port::{Offset, Span};

/// Free and taken ranges of an arena: first fit, neighbours merged, but not those of two pieces.
#[derive(Debug)]
struct Free {
    ranges: Vec<Span>,
    /// Recoveries so far.
    epoch: u64,
    /// Epochs that ended with the loss of a rank.
    lossy: Vec<u64>,
    /// Blocks of this epoch's failed operation: peers may still touch them until everybody has recovered.
    stuck: Vec<Block>,
    /// What peers were told of in operations of this epoch that may have failed, whoever has it now.
    suspects: Vec<Span>,
    /// What ranks that were lost may touch. Never handed out again.
    barred: Vec<Span>,
    /// Where memory comes and goes.
    pieces: Pieces,
}

impl Free {
    fn take(&mut self, len: u64) -> Option<Offset> {
        if !self.suspects.is_empty() {
            return None;
        }
        let at = self.ranges.iter().position(|range| range.len >= len)?;
        let range = &mut self.ranges[at];
        let taken = range.offset;
        *range = taken.plus(len).span(range.len - len);
        if range.len == 0 {
            self.ranges.remove(at);
        }
        Some(taken)
    }

    /// Takes back all of `span` but what is barred.
    fn give(&mut self, span: Span) {
        if span.len == 0 {
            return;
        }
        self.pieces.touch(span);
        match self.barred.is_empty() {
            true => self.insert(span),
            false => outside(span, &self.barred).into_iter().for_each(|part| self.insert(part)),
        }
    }

    /// Keeps `span` from being handed out, now and when whoever has some of it gives that back.
    fn bar(&mut self, span: Span) {
        let new = outside(span, &self.barred);
        self.ranges = self.ranges.iter().flat_map(|&range| outside(range, &new)).collect();
        self.barred.extend(new);
    }

    /// Whether a peer that was told of `span` in an operation that may have failed may touch it.
    fn is_doubtful(&self, span: Span) -> bool {
        let meets = |other: &Span| span.offset.0 < other.end() && other.offset.0 < span.end();
        self.suspects.iter().chain(&self.barred).any(meets)
    }

    fn insert(&mut self, span: Span) {
        let at = self.ranges.partition_point(|range| range.offset < span.offset);
        self.ranges.insert(at, span);
        let [begins, ends] = [span.offset.0, span.end()].map(|edge| self.pieces.has_edge(edge));
        if at + 1 < self.ranges.len() && !ends && self.ranges[at].end() == self.ranges[at + 1].offset.0 {
            self.ranges[at].len += self.ranges.remove(at + 1).len;
        }
        if at > 0 && !begins && self.ranges[at - 1].end() == self.ranges[at].offset.0 {
            self.ranges[at - 1].len += self.ranges.remove(at).len;
        }
    }
}

/// Hands out blocks of an arena. Clones hand out the same memory.
///
/// What a failed operation granted or offered is *held*, not given back: peers may still touch it until all have recovered,
/// and for ever if a rank was lost.
#[derive(Clone, Debug)]
pub struct Arena {
    free: Arc<Mutex<Free>>,
}

impl Arena {
    /// The arena of a window: [`Layout::arena`](crate::Layout::arena).
    pub fn new(span: Span) -> Self {
        let start = span.offset.0.next_multiple_of(SLOT_ALIGN);
        let len = span.end().saturating_sub(start) / SLOT_ALIGN * SLOT_ALIGN;
        let ranges = if len > 0 { vec![Offset(start).span(len)] } else { Vec::new() };
        let free = Free {
            ranges,
            epoch: 0,
            lossy: Vec::new(),
            stuck: Vec::new(),
            suspects: Vec::new(),
            barred: Vec::new(),
            pieces: Pieces::default(),
        };
        Self { free: Arc::new(Mutex::new(free)) }
    }

    /// The same of which only what lies before `end` has memory; the rest [comes](Self::came) and [goes](Self::withdraw) piece by piece. `ages`: of the
    /// endpoint whose calls give blocks back.
    pub fn growing(span: Span, end: Offset, ages: &Arc<Ages>) -> Self {
        let this = Self::new(span.offset.span(end.0.clamp(span.offset.0, span.end()) - span.offset.0));
        this.free().pieces = Pieces::new(ages);
        this
    }

    /// A piece has memory from now on. It lies in the arena of the window, and had none.
    pub fn came(&self, piece: Span) {
        let mut free = self.free();
        free.pieces.came(piece);
        // Ranks that were lost may touch what lay there before.
        outside(piece, &free.barred).into_iter().for_each(|part| free.insert(part));
    }

    /// Pieces that nobody has or may touch, nor what was enqueued when they were given back.
    pub fn spare(&self) -> Vec<Piece> {
        let free = self.free();
        // What was told in an operation that may have failed may have been given back since.
        if free.suspects.is_empty() { free.pieces.spare(&free.ranges) } else { Vec::new() }
    }

    /// Whether there is a piece that nobody has or may touch, but perhaps what was enqueued when it was given back.
    pub fn is_waiting(&self) -> bool {
        let free = self.free();
        free.suspects.is_empty() && free.pieces.is_waiting(&free.ranges)
    }

    /// Whether the arena has a free range of `bytes` bytes only because of `piece`.
    pub fn needs(&self, piece: &Piece, bytes: u64) -> bool {
        let free = self.free();
        let rest = free.ranges.iter().flat_map(|&range| outside(range, &[piece.span]));
        let is_there = free.ranges.iter().any(|range| range.len >= bytes);
        is_there && rest.map(|part| part.len).max().unwrap_or(0) < bytes
    }

    /// Takes away a piece that was [spare](Self::spare), unless somebody has had some of it since: then false, and nothing has changed.
    pub fn withdraw(&self, piece: &Piece) -> bool {
        let mut free = self.free();
        let is_spare = free.suspects.is_empty() && free.pieces.spare(&free.ranges).contains(piece);
        if is_spare {
            free.pieces.went(piece);
            free.ranges = free.ranges.iter().flat_map(|&range| outside(range, &[piece.span])).collect();
        }
        is_spare
    }

    /// A block of `rows` rows, or none when there is no room. A block of no rows needs no room.
    pub fn take(&self, format: &RowFormat, rows: u32) -> Option<Block> {
        let len = format.block_bytes(u64::from(rows));
        let base = if len == 0 { Offset(0) } else { self.free().take(len)? };
        Some(format.block(base, rows))
    }

    /// Whether so many bytes can be had in one piece.
    pub fn has_room(&self, bytes: u64) -> bool {
        let free = self.free();
        bytes == 0 || (free.suspects.is_empty() && free.ranges.iter().any(|range| range.len >= bytes))
    }

    /// What a rank says of its room in the counts of a dispatch that makes room for `worst_rows`, or 0 for those that come.
    pub fn said_room(&self, layout: &Layout, worst_rows: u32) -> u32 {
        if layout.settings().outboxes().is_none() {
            return OPEN_ROOM;
        }
        match (self.room(layout.row()), worst_rows) {
            (room, 0) => room,
            (room, worst) if room < worst => 0,
            (_, worst) => worst,
        }
    }

    /// Rows for which there is room in one piece, and for as many results behind them.
    fn room(&self, format: &RowFormat) -> u32 {
        let longest = self.free().ranges.iter().map(|range| range.len).max().unwrap_or(0);
        let needed = |rows: u32| format.block_bytes(rows.into()) + format.results().block_bytes(rows.into());
        let (mut room, mut beyond) = (0, OPEN_ROOM);
        while room + 1 < beyond {
            let rows = room + (beyond - room) / 2;
            if needed(rows) <= longest {
                room = rows;
            } else {
                beyond = rows;
            }
        }
        room
    }

    /// Of a block that [was taken](Self::take) the first `rows` rows. What is behind them is available again.
    #[must_use]
    pub fn cut(&self, block: &Block, rows: u32) -> Block {
        let (cut, rest) = block.cut(rows);
        self.free().give(rest);
        cut
    }

    /// Makes a block's memory available again.
    pub fn give(&self, block: &Block) {
        self.free().give(block.span());
    }

    /// Keeps a block of a failed operation until the next recovery.
    pub fn hold(&self, block: Block) {
        self.free().stuck.push(block);
    }

    /// Peers were told of a block in an operation that may have failed, and that the caller has not waited for: the block may have been
    /// given back since, and be another's by now. Nothing is handed out until all have recovered, and of this block nothing ever where
    /// a rank was lost.
    pub fn suspect(&self, block: &Block) {
        let (mut free, span) = (self.free(), block.span());
        if span.len > 0 && !free.suspects.contains(&span) {
            free.suspects.push(span);
        }
    }

    /// Everybody has stopped what it did before, except ranks newly `lost`: what these were granted or offered is never
    /// handed out again.
    pub fn recovered(&self, lost: bool) {
        let mut free = self.free();
        let (stuck, suspects) = (std::mem::take(&mut free.stuck), std::mem::take(&mut free.suspects));
        if lost {
            let epoch = free.epoch;
            free.lossy.push(epoch);
            suspects.into_iter().for_each(|span| free.bar(span));
        } else {
            stuck.iter().for_each(|block| free.give(block.span()));
        }
        free.epoch += 1;
    }

    /// Whether both hand out the same memory.
    pub(crate) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.free, &other.free)
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A block of the arena in use. When nobody holds it any more, its memory is grantable again, unless a peer may still touch it.
#[derive(Debug)]
pub struct Held {
    arena: Arena,
    block: Block,
    /// 1 + the epoch in which peers were told that they may touch it, until the operation has ended well; 0 for none.
    offered: AtomicU64,
}

impl Held {
    /// Holds `block`, which `arena` gave.
    pub fn new(arena: &Arena, block: Block) -> Self {
        Self { arena: arena.clone(), block, offered: AtomicU64::new(0) }
    }

    /// The block.
    pub const fn block(&self) -> Block {
        self.block
    }

    /// Peers are about to be told that they may touch it.
    pub fn offer(&self) {
        let free = self.arena.free();
        if !self.is_lost(&free) {
            self.offered.store(free.epoch + 1, Ordering::Relaxed);
        }
    }

    /// No peer touches it any more, unless one that was lost may.
    pub fn take_back(&self) {
        if !self.is_lost(&self.arena.free()) {
            self.offered.store(0, Ordering::Relaxed);
        }
    }

    /// Whether a rank that was lost may touch it: for good.
    fn is_lost(&self, free: &Free) -> bool {
        self.offered().is_some_and(|offered| free.lossy.contains(&offered))
    }

    /// The epoch in which it was offered.
    fn offered(&self) -> Option<u64> {
        self.offered.load(Ordering::Relaxed).checked_sub(1)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Under one lock: a recovery of another thread comes before all of this, or after it.
        let mut free = self.arena.free();
        match self.offered() {
            Some(offered) if free.lossy.contains(&offered) => {}
            Some(offered) if offered == free.epoch => free.stuck.push(self.block),
            _ => free.give(self.block.span()),
        }
    }
}

/// Rows in the arena, held by the user. Dropping it makes the memory grantable again.
pub struct Lease<W> {
    held: Arc<Held>,
    window: W,
}

impl<W: Window> Lease<W> {
    /// A lease of `block`, which `arena` gave, in `window`.
    pub fn new(arena: &Arena, block: Block, window: W) -> Self {
        Self { held: Arc::new(Held::new(arena, block)), window }
    }

    /// Its block, if it is of `arena`.
    pub fn block_in(&self, arena: &Arena) -> Option<Block> {
        self.held.arena.same(arena).then_some(self.held.block)
    }

    /// The memory itself, to be held beyond the lease.
    pub fn held(&self) -> &Arc<Held> {
        &self.held
    }

    /// Peers are about to be told that they may read it.
    pub fn offer(&self) {
        self.held.offer();
    }

    /// No peer reads it any more.
    pub fn take_back(&self) {
        self.held.take_back();
    }

    /// Rows it holds.
    pub fn rows(&self) -> u32 {
        self.held.block.rows()
    }

    /// The window that it is part of, and where the rows lie there: for backends whose window may be read in place.
    pub fn place(&self) -> (&W, Block) {
        (&self.window, self.held.block)
    }

    /// Bytes of one row as it travels.
    pub fn row_bytes(&self) -> usize {
        self.held.block.format().payload_bytes() as usize
    }

    /// Copies row `row` out, as it travels.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`].
    pub fn read(&self, row: u32, into: &mut [u8]) -> Result<(), Fault> {
        self.check(row)?;
        self.held.block.gather(row, into, |at, into| self.window.read(at, into))
    }

    /// Copies row `row`, as it travels, in.
    ///
    /// # Errors
    /// [`Fault::OutOfRange`]; [`Fault::StillOffered`] after a failed combine, until all ranks that might read it have
    /// recovered.
    pub fn write(&mut self, row: u32, bytes: &[u8]) -> Result<(), Fault> {
        self.check(row)?;
        let free = self.held.arena.free();
        let is_offered = |offered| offered == free.epoch || free.lossy.contains(&offered);
        if self.held.offered().is_some_and(is_offered) || free.is_doubtful(self.held.block.span()) {
            return Err(Fault::StillOffered);
        }
        drop(free);
        self.held.block.parts(row).try_for_each(|(part, at)| self.window.write(at, &bytes[part]))
    }

    fn check(&self, row: u32) -> Result<(), Fault> {
        let block = &self.held.block;
        if row < block.rows() { Ok(()) } else { Err(Fault::out_of_range(block.codes(row), block.span().end())) }
    }
}

impl<W> fmt::Debug for Lease<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("block", &self.held.block).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
