//! A driver's half of a queue pair, written from the byte layouts alone: elements, record, bell, completions.

use std::sync::atomic::{Ordering, fence};

use soft_hca::Fabric;

use super::side::{CQ_RECORD, ENTRIES, Queue, RECORD};

/// What a driver may get wrong, one at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// The bell is rung before the element is written.
    BellBeforeElement,
    /// The record is updated before the element is written.
    RecordBeforeElement,
    /// An element is announced while one before it is not yet written.
    ReadyOutOfOrder,
    RecordHalf,
    RecordUnmasked,
    RecordLittleEndian,
    RecordNever,
    /// Only after the one bell.
    RecordAfterBell,
    BellLittleEndian,
    /// As two stores, of which the card sees one.
    BellTorn,
    BellNever,
    IndexOneMore,
    IndexOneLess,
    IndexModuloDepth,
    NoSlotCheck,
    /// A row's source is written again before its completion.
    SourceReused,
    ErrorIgnored,
    Unguarded16Bits,
}

/// What a completion said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Broken {
    pub(crate) syndrome: u8,
}

pub(crate) struct Poster {
    pub(crate) mutation: Option<Mutation>,
    /// The bell is rung before the record, and once more after it.
    pub(crate) double_bell: bool,
    /// The next free unit, ever.
    pub(crate) next: u64,
    /// Units of which completions told, ever.
    pub(crate) done: u64,
    /// Units that were signalled, oldest first: index and end.
    signalled: std::collections::VecDeque<(u64, u64)>,
    consumed: u64,
    held: Option<(usize, Vec<u8>)>,
    /// The index that a record has yet to tell.
    late: Option<u64>,
}

pub(crate) const SIGNAL: u8 = 8;

impl Poster {
    pub(crate) fn new(mutation: Option<Mutation>) -> Self {
        let signalled = std::collections::VecDeque::new();
        Self { mutation, double_bell: false, next: 0, done: 0, signalled, consumed: 0, held: None, late: None }
    }

    fn has(&self, mutation: Mutation) -> bool {
        self.mutation == Some(mutation)
    }

    /// Units that may be written now.
    pub(crate) fn room(&self, queue: &Queue) -> u64 {
        if self.has(Mutation::NoSlotCheck) { queue.depth } else { queue.depth - (self.next - self.done) }
    }

    /// Writes an element: opcode, flags, then the segments behind the control segment.
    pub(crate) fn element(&mut self, queue: &Queue, opcode: u8, flags: u8, segments: &[u8]) {
        let count = 1 + segments.len() / 16;
        let index = if self.has(Mutation::IndexModuloDepth) { self.next % queue.depth } else { self.next };
        let mut bytes = Vec::with_capacity(count * 16);
        bytes.extend(((index as u16 as u32) << 8 | u32::from(opcode)).to_be_bytes());
        bytes.extend((queue.number << 8 | count as u32).to_be_bytes());
        bytes.extend([0, 0, 0, flags, 0, 0, 0, 0]);
        bytes.extend(segments);
        let units = bytes.len().div_ceil(64) as u64;
        for (step, unit) in bytes.chunks(64).enumerate() {
            let at = queue.elements() + ((self.next + step as u64) % queue.depth) as usize * 64;
            let last = self.has(Mutation::BellBeforeElement);
            let first = matches!(self.mutation, Some(Mutation::RecordBeforeElement | Mutation::ReadyOutOfOrder));
            if last {
                self.release(queue);
            }
            if last || first && self.held.is_none() {
                self.held = Some((at, unit.to_vec()));
            } else {
                queue.arena.write(at, unit);
            }
        }
        if flags & SIGNAL != 0 {
            self.signalled.push_back((self.next, self.next + units));
        }
        self.next += units;
    }

    pub(crate) fn write(&mut self, queue: &Queue, flags: u8, to: (u64, u32), parts: &[(u64, u32, usize)]) {
        let mut segments = remote(to);
        for &(addr, key, len) in parts {
            segments.extend((len as u32).to_be_bytes());
            segments.extend(key.to_be_bytes());
            segments.extend(addr.to_be_bytes());
        }
        self.element(queue, 0x08, flags, &segments);
    }

    pub(crate) fn write_inline(&mut self, queue: &Queue, flags: u8, to: (u64, u32), bytes: &[u8]) {
        let mut segments = remote(to);
        segments.extend((bytes.len() as u32 | 1 << 31).to_be_bytes());
        segments.extend(bytes);
        segments.resize(segments.len().next_multiple_of(16), 0);
        self.element(queue, 0x08, flags, &segments);
    }

    pub(crate) fn fetch_add(&mut self, queue: &Queue, flags: u8, to: (u64, u32), add: u64, back: (u64, u32)) {
        let mut segments = remote(to);
        segments.extend(add.to_be_bytes());
        segments.extend([0; 8]);
        segments.extend(8_u32.to_be_bytes());
        segments.extend(back.1.to_be_bytes());
        segments.extend(back.0.to_be_bytes());
        self.element(queue, 0x12, flags, &segments);
    }

    /// What was put off is done after all: an element, or the record behind its bell.
    pub(crate) fn release(&mut self, queue: &Queue) {
        if let Some((at, bytes)) = self.held.take() {
            queue.arena.write(at, &bytes);
        }
        if let Some(index) = self.late.take() {
            self.record(queue, index);
            if self.double_bell {
                self.bell(queue, index);
            }
        }
    }

    /// Makes what was written known to the card: record, then bell.
    pub(crate) fn ring(&mut self, queue: &Queue) {
        fence(Ordering::Release);
        let index = match self.mutation {
            Some(Mutation::IndexOneMore) => self.next + 1,
            Some(Mutation::IndexOneLess) => self.next - 1,
            _ => self.next,
        };
        if self.double_bell || self.has(Mutation::RecordAfterBell) {
            self.late = Some(index);
        } else {
            self.record(queue, index);
        }
        if !self.has(Mutation::BellNever) {
            self.bell(queue, index);
        }
    }

    pub(crate) fn record(&self, queue: &Queue, index: u64) {
        let masked = index as u32 & 0xffff;
        let (half, value) = match self.mutation {
            Some(Mutation::RecordNever) => return,
            Some(Mutation::RecordHalf) => (0, masked.to_be()),
            Some(Mutation::RecordUnmasked) => (4, (index as u32).to_be()),
            Some(Mutation::RecordLittleEndian) => (4, masked),
            _ => (4, masked.to_be()),
        };
        queue.arena.word(RECORD + half).store(value, Ordering::Release);
        fence(Ordering::Release);
    }

    pub(crate) fn bell(&self, queue: &Queue, index: u64) {
        let (first, second) = ((index as u16 as u32) << 8, queue.number << 8);
        let mut bytes = [first.to_be_bytes(), second.to_be_bytes()].concat();
        if self.has(Mutation::BellLittleEndian) {
            bytes = [first.to_le_bytes(), second.to_le_bytes()].concat();
        }
        if self.has(Mutation::BellTorn) {
            bytes[4..].fill(0);
        }
        let value = u64::from_ne_bytes(bytes.try_into().unwrap());
        // SAFETY: the page is this context's until it is freed.
        let register = unsafe { std::sync::atomic::AtomicU64::from_ptr((*queue.uar).reg_addr.cast()) };
        register.store(value, Ordering::Release);
    }

    /// Looks at the completion queue.
    pub(crate) fn poll(&mut self, queue: &Queue) -> Result<(), Broken> {
        if queue.collapsed { self.poll_collapsed(queue) } else { self.poll_ring(queue) }
    }

    fn poll_collapsed(&mut self, queue: &Queue) -> Result<(), Broken> {
        let last = u32::from_be(queue.arena.word(ENTRIES + 60).load(Ordering::Acquire));
        let (counter, opcode) = ((last >> 16) as u16, last as u8 >> 4);
        if opcode == 15 {
            return Ok(());
        }
        if opcode == 13 && !self.has(Mutation::ErrorIgnored) {
            return Err(Broken { syndrome: queue.arena.read(ENTRIES + 55, 1)[0] });
        }
        // Guarded: the counter is that of an element under way, or of an older one.
        while let Some(&(index, end)) = self.signalled.front() {
            let ahead = counter.wrapping_sub(index as u16);
            if u64::from(ahead) >= self.next - index {
                break;
            }
            self.signalled.pop_front();
            self.done = end;
        }
        Ok(())
    }

    fn poll_ring(&mut self, queue: &Queue) -> Result<(), Broken> {
        loop {
            let at = ENTRIES + (self.consumed % (1 << queue.log_cq)) as usize * 64;
            let last = u32::from_be(queue.arena.word(at + 60).load(Ordering::Acquire));
            let (opcode, owner) = (last as u8 >> 4, u64::from(last & 1));
            if opcode == 15 || owner != self.consumed >> queue.log_cq & 1 {
                return Ok(());
            }
            if opcode == 13 && !self.has(Mutation::ErrorIgnored) {
                return Err(Broken { syndrome: queue.arena.read(at + 55, 1)[0] });
            }
            let (index, end) = self.signalled.pop_front().expect("a completion of what was signalled");
            assert_eq!((last >> 16) as u16, index as u16, "counters come in order");
            self.done = end;
            self.consumed += 1;
            queue.arena.word(CQ_RECORD).store((self.consumed as u32 & 0xff_ffff).to_be(), Ordering::Release);
        }
    }

    /// Whether the element at `index` is known to be done.
    pub(crate) fn is_done(&self, queue: &Queue, index: u64) -> bool {
        if self.has(Mutation::Unguarded16Bits) {
            let last = u32::from_be(queue.arena.word(ENTRIES + 60).load(Ordering::Acquire));
            return ((last >> 16) as u16).wrapping_sub(index as u16) as i16 >= 0;
        }
        index < self.done
    }

    /// Steps the cards until all that was signalled is done. False: it never is.
    pub(crate) fn drain(&mut self, fabric: &Fabric, queue: &Queue) -> Result<bool, Broken> {
        for _ in 0..200_000 {
            self.poll(queue)?;
            if self.signalled.is_empty() {
                return Ok(true);
            }
            fabric.step();
        }
        Ok(false)
    }
}

fn remote((addr, key): (u64, u32)) -> Vec<u8> {
    let mut segment = addr.to_be_bytes().to_vec();
    segment.extend(key.to_be_bytes());
    segment.extend([0; 4]);
    segment
}
