//! Work queue elements, decoded.

use crate::complaint::Rule;

/// Bytes of a unit of the queue.
pub(crate) const UNIT: usize = 64;
/// Syndromes of completions.
pub(crate) mod syndrome {
    pub(crate) const LOCAL_LENGTH: u8 = 0x01;
    pub(crate) const LOCAL_OPERATION: u8 = 0x02;
    pub(crate) const LOCAL_PROTECTION: u8 = 0x04;
    pub(crate) const FLUSH: u8 = 0x05;
    pub(crate) const REMOTE_INVALID: u8 = 0x12;
    pub(crate) const REMOTE_ACCESS: u8 = 0x13;
    pub(crate) const RETRIES: u8 = 0x15;
}

/// A place at the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) addr: u64,
    pub(crate) key: u32,
}

/// A range of own memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Local {
    pub(crate) key: u32,
    pub(crate) addr: u64,
    pub(crate) len: usize,
}

/// What an element asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Element {
    Nop,
    Write { to: Remote, from: Vec<Local> },
    WriteInline { to: Remote, bytes: Vec<u8> },
    FetchAdd { to: Remote, add: u64, back: Local },
}

impl Element {
    /// Bytes that travel to the peer.
    pub(crate) fn len(&self) -> usize {
        match self {
            Element::Nop => 0,
            Element::Write { from, .. } => from.iter().map(|part| part.len).sum(),
            Element::WriteInline { bytes, .. } => bytes.len(),
            Element::FetchAdd { .. } => 8,
        }
    }

    pub(crate) fn remote(&self) -> Option<Remote> {
        match self {
            Element::Nop => None,
            Element::Write { to, .. } | Element::WriteInline { to, .. } | Element::FetchAdd { to, .. } => Some(*to),
        }
    }
}

/// The first segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Control {
    pub(crate) opcode: u8,
    modifier: u8,
    pub(crate) index: u16,
    pub(crate) qpn: u32,
    /// Segments of 16 bytes, this one included.
    pub(crate) segments: usize,
    pub(crate) flags: u8,
}

pub(crate) const CQ_UPDATE: u8 = 2 << 2;
const NOP: u8 = 0x00;
const WRITE: u8 = 0x08;
const FETCH_ADD: u8 = 0x12;
const INLINE: u32 = 1 << 31;

/// An element that is wrong: the rule, the syndrome that it ends with, and why.
#[derive(Debug)]
pub(crate) struct Wrong {
    pub(crate) rule: Rule,
    pub(crate) syndrome: u8,
    pub(crate) text: String,
}

fn wrong<T>(text: String) -> Result<T, Wrong> {
    Err(Wrong { rule: Rule::Element, syndrome: syndrome::LOCAL_OPERATION, text })
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Control {
    pub(crate) fn of(unit: &[u8]) -> Self {
        let (first, second) = (be32(unit, 0), be32(unit, 4));
        Self {
            opcode: first as u8,
            modifier: (first >> 24) as u8,
            index: (first >> 8) as u16,
            qpn: second >> 8,
            segments: (second & 0x3f) as usize,
            flags: unit[11],
        }
    }

    /// Units that the element takes, at least 1.
    pub(crate) fn units(&self) -> u64 {
        (self.segments * 16).div_ceil(UNIT).max(1) as u64
    }

    /// Compares with what the queue's place says, before the rest is looked at.
    pub(crate) fn check(&self, unit: &[u8], index: u16, qpn: u32, longest: usize) -> Result<(), Wrong> {
        if self.index != index {
            return wrong(format!("index is {:#x}, must be {index:#x}: stale bytes, or another's", self.index));
        }
        if self.qpn != qpn {
            return wrong(format!("queue pair is {:#x}, must be {qpn:#x}", self.qpn));
        }
        if unit[7] & 0xc0 != 0 || self.segments == 0 || self.segments * 16 > longest {
            return wrong(format!("{} segments of 16 bytes, 1 to {}", unit[7], longest / 16));
        }
        if self.modifier != 0 {
            return wrong(format!("opcode modifier is {:#x}, must be 0", self.modifier));
        }
        if self.flags & 0x11 != 0 || self.flags & 0x0c == 0x04 || self.flags >> 5 > 4 {
            return wrong(format!("flags are {:#04x}: unknown bits", self.flags));
        }
        if unit[8..11] != [0; 3] {
            return wrong(format!("bytes 8 to 10 of the control segment are {:02x?}, must be 0", &unit[8..11]));
        }
        Ok(())
    }

    /// Decodes the whole element.
    pub(crate) fn decode(&self, bytes: &[u8]) -> Result<Element, Wrong> {
        match (self.opcode, self.segments) {
            (NOP, _) => Ok(Element::Nop),
            (WRITE, 2..) => write(bytes),
            (FETCH_ADD, 4) => fetch_add(bytes),
            (WRITE | FETCH_ADD, segments) => {
                wrong(format!("{segments} segments in an element of opcode {:#x}", self.opcode))
            }
            (opcode, _) => wrong(format!("opcode {opcode:#x} is not known")),
        }
    }
}

fn remote(bytes: &[u8]) -> Result<Remote, Wrong> {
    match be32(bytes, 28) {
        0 => Ok(Remote { addr: be64(bytes, 16), key: be32(bytes, 24) }),
        rest => wrong(format!("the last word of the remote address segment is {rest:#x}, must be 0")),
    }
}

fn local(segment: &[u8]) -> Local {
    // Zero stands for the largest length.
    let len = match be32(segment, 0) {
        0 => 1 << 31,
        len => len as usize,
    };
    Local { len, key: be32(segment, 4), addr: be64(segment, 8) }
}

fn write(bytes: &[u8]) -> Result<Element, Wrong> {
    let to = remote(bytes)?;
    let rest = &bytes[32..];
    if rest.is_empty() || be32(rest, 0) & INLINE == 0 {
        return Ok(Element::Write { to, from: rest.chunks_exact(16).map(local).collect() });
    }
    let len = (be32(rest, 0) & !INLINE) as usize;
    let room = rest.len() - 4;
    if len > room || (4 + len).div_ceil(16) * 16 != rest.len() {
        return wrong(format!("{len} bytes inline, and room for {} to {room}", room.saturating_sub(15)));
    }
    Ok(Element::WriteInline { to, bytes: rest[4..4 + len].to_vec() })
}

fn fetch_add(bytes: &[u8]) -> Result<Element, Wrong> {
    let to = remote(bytes)?;
    let back = local(&bytes[48..]);
    if back.len != 8 {
        return wrong(format!("the old value's segment has {} bytes, must have 8", back.len));
    }
    Ok(Element::FetchAdd { to, add: be64(bytes, 32), back })
}
