//! Lanes and what is in flight on them. Those that share a queue are one here, that of the queue.

use std::collections::VecDeque;

use ep_core::port::{Cell, LaneKind, Role, Span, Tag, UNIT_BYTES, UNIT_DATA};
use ep_core::{Layout, Nanos, Rank};

use crate::explore::race::Carried;

/// A due time that never comes: a transfer that was lost but not forgotten.
pub(crate) const NEVER: Nanos = Nanos(u64::MAX);

const NONE: u32 = u32::MAX;

/// Pieces that a lane has room for from its first transfer on; torn puts would otherwise make it grow step by step.
const ROOM: usize = 16;

/// A piece of a put or get that has not been copied yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    /// The verb it belongs to; pieces of one transfer share it.
    pub(crate) ticket: u64,
    /// Whether it copies from the peer's window to the own one.
    pub(crate) get: bool,
    /// Of units: it arrives in whole ones, each with this tag. Lengths are of data.
    pub(crate) tag: Option<Tag>,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) len: u64,
    pub(crate) due: Nanos,
}

impl Transfer {
    /// A put that is due at once.
    pub(crate) const fn put(from: Span, to: Span) -> Self {
        let (at, to) = (from.offset.0, to.offset.0);
        Self { ticket: 0, get: false, tag: None, from: at, to, len: from.len, due: Nanos(0) }
    }

    /// The piece `start..end` of it; of units, a multiple of [`UNIT_DATA`] starts it.
    fn piece(self, start: u64, end: u64) -> Self {
        let into = if self.tag.is_some() { start / UNIT_DATA * UNIT_BYTES } else { start };
        Self { from: self.from + start, to: self.to + into, len: end - start, ..self }
    }
}

/// A cell that has not been raised yet.
#[derive(Debug)]
pub(crate) struct Publish {
    pub(crate) cell: Cell,
    /// Where the cell lies.
    pub(crate) at: u64,
    pub(crate) generation: u16,
    pub(crate) bits: u64,
    /// The last ticket before it.
    pub(crate) after: u64,
    /// Pieces of puts before it that are still in flight (F3).
    pub(crate) blockers: u32,
    pub(crate) due: Nanos,
    /// What its reader learns of; nothing without race tracking.
    pub(crate) carried: Carried,
}

/// One lane.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) from: Rank,
    pub(crate) to: Rank,
    pub(crate) kind: LaneKind,
    /// The last ticket given out.
    pub(crate) issued: u64,
    pub(crate) transfers: Vec<Transfer>,
    pub(crate) publishes: VecDeque<Publish>,
    /// Whether an effect on it may be due later than now.
    pub(crate) late: bool,
    /// Its poster is suspended: nothing on it lands.
    pub(crate) frozen: bool,
    /// The port that flushes it.
    pub(crate) flusher: Option<u32>,
    /// Where lanes share it: who posts to it.
    pub(crate) poster: Option<Role>,
    active_at: u32,
}

impl Lane {
    fn new(from: Rank, to: Rank, kind: LaneKind) -> Self {
        Self {
            from,
            to,
            kind,
            issued: 0,
            transfers: Vec::new(),
            publishes: VecDeque::new(),
            late: false,
            frozen: false,
            flusher: None,
            poster: None,
            active_at: NONE,
        }
    }

    /// Adds a transfer and returns its ticket, which replaces the one that it has.
    pub(crate) fn post(&mut self, transfer: Transfer) -> u64 {
        self.issued += 1;
        if self.transfers.capacity() == 0 {
            self.transfers.reserve(ROOM);
        }
        self.transfers.push(Transfer { ticket: self.issued, ..transfer });
        self.issued
    }

    /// Puts a piece of a transfer that was taken out of flight back, as one more.
    pub(crate) fn keep(&mut self, piece: Transfer) {
        for publish in self.publishes.iter_mut().filter(|publish| publish.after >= piece.ticket) {
            publish.blockers += 1;
        }
        self.transfers.push(piece);
    }

    /// Pieces of puts in flight.
    pub(crate) fn puts(&self) -> u32 {
        self.transfers.iter().filter(|transfer| !transfer.get).count() as u32
    }

    /// The first ticket up to `upto` that is still in flight.
    pub(crate) fn unsettled(&self, upto: u64) -> Option<u64> {
        self.transfers.iter().map(|transfer| transfer.ticket).filter(|&ticket| ticket <= upto).min()
    }

    /// Whether the oldest publish may be delivered at `now`.
    pub(crate) fn publishable(&self, now: Nanos) -> bool {
        self.publishes.front().is_some_and(|publish| publish.blockers == 0 && publish.due <= now)
    }

    /// Whether anything may be delivered at `now`.
    pub(crate) fn deliverable(&self, now: Nanos) -> bool {
        if self.frozen {
            return false;
        }
        let transfers = if self.late {
            self.transfers.iter().any(|transfer| transfer.due <= now)
        } else {
            !self.transfers.is_empty()
        };
        transfers || self.publishable(now)
    }

    /// Takes the piece `start..end` of transfer `index` out of flight; what is left of it stays.
    pub(crate) fn take(&mut self, index: usize, start: u64, end: u64) -> Transfer {
        let whole = self.transfers[index];
        let rest = [(0, start), (end, whole.len)].map(|(a, b)| whole.piece(a, b));
        let left = rest.iter().filter(|piece| piece.len > 0).count();
        self.transfers.swap_remove(index);
        self.transfers.extend(rest.into_iter().filter(|piece| piece.len > 0));
        if !whole.get {
            for publish in self.publishes.iter_mut().filter(|publish| publish.after >= whole.ticket) {
                publish.blockers = publish.blockers + left as u32 - 1;
            }
        }
        whole.piece(start, end)
    }

    /// The earliest due time after `now`.
    pub(crate) fn next_due(&self, now: Nanos) -> Option<Nanos> {
        if self.frozen {
            return None;
        }
        let transfers = self.transfers.iter().map(|transfer| transfer.due);
        let publishes = self.publishes.iter().map(|publish| publish.due);
        transfers.chain(publishes).filter(|&due| due > now && due < NEVER).min()
    }
}

/// All lanes, made when they are first posted to.
#[derive(Debug)]
pub(crate) struct Lanes {
    /// `[from][to, kind]`, then mailboxes, then `[to, row]`: number of the lane, or none. Lines are empty until their rank posts.
    table: Vec<Vec<u32>>,
    kinds: usize,
    mailboxes: usize,
    /// Lanes of single rows to each rank.
    row_lanes: usize,
    lanes: Vec<Lane>,
    /// Lanes on which something may be delivered.
    active: Vec<u32>,
}

impl Lanes {
    pub(crate) fn new(layout: &Layout) -> Self {
        Self {
            table: vec![Vec::new(); layout.topology().ranks() as usize],
            kinds: LaneKind::count(layout.tracks()),
            mailboxes: layout.mailboxes(),
            row_lanes: layout.row_lanes(),
            lanes: Vec::new(),
            active: Vec::new(),
        }
    }

    /// The number of a lane that the layout has.
    pub(crate) fn number(&mut self, from: Rank, to: Rank, kind: LaneKind) -> u32 {
        let peers = self.table.len();
        let line = &mut self.table[from.index()];
        if line.is_empty() {
            *line = vec![NONE; (self.kinds + self.row_lanes) * peers + self.mailboxes];
        }
        let first = match kind {
            LaneKind::Mailbox(..) => peers * self.kinds,
            LaneKind::LowRow(_) => peers * self.kinds + self.mailboxes + to.index() * self.row_lanes,
            _ => to.index() * self.kinds,
        };
        let entry = &mut line[first + kind.index()];
        if *entry == NONE {
            *entry = self.lanes.len() as u32;
            self.lanes.push(Lane::new(from, to, kind));
        }
        *entry
    }

    pub(crate) fn lane(&self, number: u32) -> &Lane {
        &self.lanes[number as usize]
    }

    pub(crate) fn lane_mut(&mut self, number: u32) -> &mut Lane {
        &mut self.lanes[number as usize]
    }

    /// The lanes that `from` has posted to.
    pub(crate) fn of(&self, from: Rank) -> impl Iterator<Item = u32> + '_ {
        self.table[from.index()].iter().copied().filter(|&number| number != NONE)
    }

    pub(crate) fn len(&self) -> u32 {
        self.lanes.len() as u32
    }

    pub(crate) fn active(&self) -> &[u32] {
        &self.active
    }

    /// Lists the lane as active, or not, as it is.
    pub(crate) fn update(&mut self, number: u32, now: Nanos) {
        let lane = &mut self.lanes[number as usize];
        match (lane.deliverable(now), lane.active_at) {
            (true, NONE) => {
                lane.active_at = self.active.len() as u32;
                self.active.push(number);
            }
            (false, at) if at != NONE => {
                lane.active_at = NONE;
                self.active.swap_remove(at as usize);
                if let Some(&moved) = self.active.get(at as usize) {
                    self.lanes[moved as usize].active_at = at;
                }
            }
            _ => {}
        }
    }
}
