//! One lane: a queue pair, the requests that are gathered for it, and what is under way.
//!
//! Requests are gathered and posted together, with one doorbell, and only the last of those is signalled. Completions of a
//! queue pair come in order, so one tells of all before it. A lane never posts more than its queue holds: who asks for more
//! is told to come again.

use std::fmt;

use ep_core::LaneCause;
use ep_core::port::LaneId;
use ep_rdma::sys::{self, Remote, SendRequest, Sge, Zeroed as _};

use crate::account::Account;
use crate::settings::Signal;
use crate::verbs::{Queue, QueuePair, Region};

/// Requests posted with one doorbell, at most.
const BATCH: usize = 16;
/// Bytes of a staged word or record.
pub(crate) const SLOT: u64 = 32;

/// Marks completions of receives in their identifiers.
const RECEIVE: u64 = 1 << 23;
/// Marks the last request of a batch.
const LAST: u64 = 1;

/// Memory that requests name: an address and the key for it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    pub(crate) address: u64,
    pub(crate) key: u32,
    /// No core reads it: it is memory of a device.
    pub(crate) apart: bool,
}

/// What each lane has of the scratch region: slots for what it sends (as deep as its queue), one for what atomics return, and
/// those for what it receives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    /// Where it begins in the region.
    pub(crate) offset: u64,
    pub(crate) sends: u32,
    pub(crate) receives: u32,
}

impl Scratch {
    pub(crate) fn bytes(sends: u32, receives: u32) -> u64 {
        u64::from(sends + 1 + receives) * SLOT
    }

    fn send(&self, turn: u64) -> u64 {
        self.offset + turn % u64::from(self.sends) * SLOT
    }

    fn returned(&self) -> u64 {
        self.offset + u64::from(self.sends) * SLOT
    }

    fn receive(&self, slot: u32) -> u64 {
        self.offset + u64::from(self.sends + 1 + slot) * SLOT
    }
}

/// A value that the receiver is to raise a cell to, as it travels with [`Signal::Counting`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Record {
    /// Counted from 1.
    number: u64,
    /// Writes of the lane before it.
    after: u64,
    at: u64,
    bits: u64,
}

/// What a completion is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Identifier {
    pub(crate) lane: usize,
    /// Of which connection: queue pairs that ended may have left some behind.
    pub(crate) connection: u32,
    event: Event,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Sent { last: bool },
    Received { slot: u32 },
}

impl Identifier {
    pub(crate) const fn of(bits: u64) -> Self {
        let (lane, connection) = ((bits >> 44) as usize, (bits >> 24) as u32 & 0xf_ffff);
        let event = match bits & RECEIVE {
            0 => Event::Sent { last: bits & LAST != 0 },
            _ => Event::Received { slot: (bits & (RECEIVE - 1)) as u32 },
        };
        Self { lane, connection, event }
    }

    const fn bits(self) -> u64 {
        let event = match self.event {
            Event::Sent { last } => last as u64,
            Event::Received { slot } => RECEIVE | slot as u64,
        };
        (self.lane as u64) << 44 | ((self.connection & 0xf_ffff) as u64) << 24 | event
    }
}

/// Whether a request carries its bytes itself, `most` at most: a core copies them, so they do not lie in a device.
const fn travels_inside(opcode: u32, source: Place, bytes: u32, most: u32) -> bool {
    bytes <= most && opcode != sys::WR_FETCH_ADD && !source.apart
}

/// Requests side by side.
struct Requests(Box<[SendRequest]>);

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} requests", self.0.len())
    }
}

/// One lane.
#[derive(Debug)]
pub(crate) struct Lane<Q = QueuePair> {
    pub(crate) id: LaneId,
    /// Its index among the rank's lanes.
    index: usize,
    connection: u32,
    signal: Signal,
    pub(crate) pair: Option<Q>,
    pub(crate) broken: Option<LaneCause>,
    /// The peer's window.
    pub(crate) target: Place,
    /// The key for the cells in it.
    pub(crate) cells_key: u32,
    scratch: Scratch,
    requests: Requests,
    entries: Box<[Sge]>,
    account: Account,
    /// Requests ever, for the slots of what they send.
    turn: u64,
    /// What each of the peer's cells was last raised to.
    raised: Vec<(u64, u64)>,
    /// Writes and records sent, for the receiver's count.
    writes: u64,
    records: u64,
    /// Writes that have come, records applied, and those that wait for writes or for earlier records.
    arrived: u64,
    applied: u64,
    waiting: Vec<Record>,
}

// SAFETY: the pointers in its requests lead into its own boxes, and are set again before each use.
unsafe impl<Q: Send> Send for Lane<Q> {}

impl<Q: Queue> Lane<Q> {
    pub(crate) fn new(id: LaneId, index: usize, signal: Signal, scratch: Scratch) -> Self {
        Self {
            id,
            index,
            connection: 0,
            signal,
            pair: None,
            broken: Some(LaneCause::Flushed),
            target: Place::default(),
            cells_key: 0,
            scratch,
            requests: Requests(vec![SendRequest::zeroed(); BATCH].into()),
            entries: vec![Sge::default(); BATCH].into(),
            account: Account::new(scratch.sends),
            turn: 0,
            raised: Vec::new(),
            writes: 0,
            records: 0,
            arrived: 0,
            applied: 0,
            waiting: Vec::new(),
        }
    }

    /// Begins anew, on a queue pair that is initialised: posts its receives.
    pub(crate) fn begin(&mut self, pair: Q, connection: u32, scratch: &Region) {
        self.close(LaneCause::Flushed);
        self.forget(connection);
        self.pair = Some(pair);
        for slot in 0..self.scratch.receives {
            self.post_receive(slot, scratch);
        }
    }

    /// Both ends count from zero on a connection, and their cells begin there.
    fn forget(&mut self, connection: u32) {
        (self.broken, self.connection) = (None, connection);
        (self.writes, self.records, self.arrived, self.applied) = (0, 0, 0, 0);
        self.raised.clear();
        self.waiting.clear();
    }

    /// Ends the queue pair. From here on nothing of it is under way.
    pub(crate) fn close(&mut self, cause: LaneCause) {
        self.broken.get_or_insert(cause);
        self.pair = None;
        self.account.clear();
    }

    pub(crate) const fn index(&self) -> usize {
        self.index
    }

    pub(crate) const fn is_idle(&self) -> bool {
        self.account.is_idle()
    }

    pub(crate) const fn has_gathered(&self) -> bool {
        self.account.gathered() > 0
    }

    /// The last ticket that it gave.
    pub(crate) const fn issued(&self) -> u64 {
        self.account.issued()
    }

    /// Whether the lane takes `more` requests now.
    pub(crate) const fn has_room(&self, more: u32) -> bool {
        self.account.has_room(more)
    }

    /// The most requests that it ever takes.
    pub(crate) const fn depth(&self) -> u32 {
        self.scratch.sends
    }

    pub(crate) const fn is_settled(&self, ticket: u64) -> bool {
        self.account.is_settled(ticket)
    }

    /// Gathers a request, for which there is room.
    fn gather(&mut self, opcode: u32, source: Place, bytes: u32, remote: Remote) {
        if self.account.gathered() == BATCH {
            self.post();
        }
        let Some(pair) = &self.pair else { return };
        let inline = if travels_inside(opcode, source, bytes, pair.inline()) { sys::SEND_INLINE } else { 0 };
        let at = self.account.gathered();
        self.entries[at] = Sge { addr: source.address, length: bytes, lkey: source.key };
        self.requests.0[at] = sys::request(opcode, inline, remote);
        self.account.gather();
        self.turn += 1;
    }

    /// Posts what is gathered.
    pub(crate) fn post(&mut self) {
        let Some(pair) = self.pair.as_ref().filter(|_| self.account.gathered() > 0) else { return };
        let identifier =
            |last| Identifier { lane: self.index, connection: self.connection, event: Event::Sent { last } }.bits();
        let (requests, entries) = (self.requests.0.as_mut_ptr(), self.entries.as_mut_ptr());
        for at in 0..self.account.gathered() {
            let last = at + 1 == self.account.gathered();
            // SAFETY: `at` and, before the last, the one after it are below the boxes' length.
            let (request, next, entry) = unsafe { (&mut *requests.add(at), requests.add(at + 1), entries.add(at)) };
            request.next = if last { std::ptr::null_mut() } else { next };
            request.sg_list = entry;
            request.wr_id = identifier(last);
            request.send_flags |= if last { sys::SEND_SIGNALED } else { 0 };
        }
        // SAFETY: chain and entries lie in boxes of this lane; they name the window or the scratch region, which stay
        // registered as long as lanes have queue pairs.
        let outcome = unsafe { pair.post_send(requests) };
        match outcome {
            Ok(()) => self.account.post(),
            // There was room, by count: whatever it is, it is no full queue.
            Err((_, code)) => self.close(LaneCause::Refused(code)),
        }
    }

    /// Writes `bytes` bytes at `source` to `to` in the peer's window, in requests of at most `longest` bytes, for which there
    /// is room; its ticket.
    pub(crate) fn put(&mut self, source: Place, bytes: u64, to: u64, longest: u64) -> u64 {
        let opcode = if self.signal == Signal::Counting { sys::WR_RDMA_WRITE_WITH_IMM } else { sys::WR_RDMA_WRITE };
        let mut done = 0;
        while done < bytes {
            let part = (bytes - done).min(longest);
            let place = Place { address: source.address + done, ..source };
            let Place { address, key, .. } = self.target;
            let remote = Remote { addr: address + to + done, add_or_key: key.into(), ..Remote::default() };
            self.gather(opcode, place, part as u32, remote);
            self.writes += 1;
            done += part;
        }
        self.account.issue()
    }

    /// Sends a write of no bytes, which its peer's adapter acknowledges and nobody else notices.
    pub(crate) fn probe(&mut self) {
        let Place { address, key, .. } = self.target;
        let remote = Remote { addr: address, add_or_key: key.into(), ..Remote::default() };
        self.gather(sys::WR_RDMA_WRITE, Place::default(), 0, remote);
        self.post();
    }

    /// Raises the peer's cell at `at` to `bits`, for which there is room.
    pub(crate) fn raise(&mut self, at: u64, bits: u64, scratch: &Region) {
        let (target, key) = (self.target, self.cells_key);
        let to = |add_or_key| Remote { addr: target.address + at, add_or_key, ..Remote::default() };
        match self.signal {
            Signal::OrderedWrite => {
                let source = self.stage(&[bits], scratch);
                self.gather(sys::WR_RDMA_WRITE, source, 8, to(key.into()));
            }
            Signal::FetchAdd => {
                let before = self.remember(at, bits);
                // Publishing a value twice is harmless.
                if before < bits {
                    let returned = Place {
                        address: scratch.memory().address() + self.scratch.returned(),
                        key: scratch.local_key(),
                        apart: false,
                    };
                    let remote = Remote { key_of_atomic: key, ..to(bits - before) };
                    self.gather(sys::WR_FETCH_ADD, returned, 8, remote);
                }
            }
            Signal::Counting => {
                self.records += 1;
                let source = self.stage(&[self.records, self.writes, at, bits], scratch);
                self.gather(sys::WR_SEND, source, SLOT as u32, Remote::default());
            }
        }
    }

    /// Notes that a cell is raised, and returns what it was before: all are zero when a connection begins.
    fn remember(&mut self, at: u64, bits: u64) -> u64 {
        match self.raised.iter_mut().find(|(cell, _)| *cell == at) {
            Some((_, last)) => {
                debug_assert!(*last <= bits, "the cell at {at} of {} would fall", self.id);
                std::mem::replace(last, bits.max(*last))
            }
            None => {
                self.raised.push((at, bits));
                0
            }
        }
    }

    /// Where the next request finds `words`: in its own slot, which is used again when the queue has gone round.
    fn stage(&self, words: &[u64], scratch: &Region) -> Place {
        let offset = self.scratch.send(self.turn);
        for (word, at) in words.iter().zip((offset..).step_by(8)) {
            if let Some(place) = scratch.memory().word(at) {
                place.store(word.to_le(), std::sync::atomic::Ordering::Relaxed);
            }
        }
        Place { address: scratch.memory().address() + offset, key: scratch.local_key(), apart: false }
    }

    fn post_receive(&mut self, slot: u32, scratch: &Region) {
        let Some(pair) = &self.pair else { return };
        let address = scratch.memory().address() + self.scratch.receive(slot);
        let mut entry = Sge { addr: address, length: SLOT as u32, lkey: scratch.local_key() };
        let mut request = sys::ReceiveRequest::zeroed();
        let event = Event::Received { slot };
        request.wr_id = Identifier { lane: self.index, connection: self.connection, event }.bits();
        (request.sg_list, request.num_sge) = (&mut entry, 1);
        // SAFETY: request and entry live through the call; the slot stays registered as long as lanes have queue pairs.
        if let Err(code) = unsafe { pair.post_receive(&mut request) } {
            self.close(LaneCause::Refused(code));
        }
    }

    /// Takes in what has completed. `raise` raises a cell of the own window.
    pub(crate) fn complete(
        &mut self,
        identifier: Identifier,
        completion: &sys::WorkCompletion,
        scratch: &Region,
        raise: impl FnMut(u64, u64),
    ) {
        if identifier.connection != self.connection & 0xf_ffff || self.pair.is_none() {
            return;
        }
        if let Some((status, vendor)) = sys::failure(completion) {
            let cause = cause(status);
            tracing::warn!(lane = %self.id, %cause, status, vendor, "lane broke");
            // Nothing of it is under way any more, whatever the adapter has still to say.
            self.close(cause);
            return;
        }
        match identifier.event {
            Event::Sent { last: true } => self.account.complete(),
            Event::Sent { last: false } => {}
            Event::Received { slot } => {
                match sys::kind(completion) {
                    sys::WC_RECV_RDMA_WITH_IMM => self.arrived += 1,
                    _ => self.waiting.push(self.record(slot, scratch)),
                }
                self.apply(raise);
                self.post_receive(slot, scratch);
            }
        }
    }

    fn record(&self, slot: u32, scratch: &Region) -> Record {
        let offset = self.scratch.receive(slot);
        let word = |at: u64| {
            let word = scratch.memory().word(offset + 8 * at);
            word.map_or(0, |word| u64::from_le(word.load(std::sync::atomic::Ordering::Acquire)))
        };
        Record { number: word(0), after: word(1), at: word(2), bits: word(3) }
    }

    /// Raises the cells of all records whose turn has come: all earlier ones applied, all writes before them arrived.
    fn apply(&mut self, mut raise: impl FnMut(u64, u64)) {
        let due = |record: &Record, (applied, arrived)| record.number == applied + 1 && record.after <= arrived;
        while let Some(at) = self.waiting.iter().position(|record| due(record, (self.applied, self.arrived))) {
            let record = self.waiting.swap_remove(at);
            raise(record.at, record.bits);
            self.applied += 1;
        }
    }
}

/// What a status of verbs means.
const fn cause(status: u32) -> LaneCause {
    match status {
        1 | 2 | 3 | 6 => LaneCause::LocalRequest,
        4 | 8 => LaneCause::LocalAccess,
        5 => LaneCause::Flushed,
        9 => LaneCause::RemoteRequest,
        10 => LaneCause::RemoteAccess,
        7 | 11 => LaneCause::RemoteOperation,
        12 => LaneCause::NoAnswer,
        13 => LaneCause::NotReady,
        other => LaneCause::Other(other),
    }
}

#[cfg(test)]
mod tests;
