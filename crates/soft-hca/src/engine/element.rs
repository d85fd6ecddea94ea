//! Work queue elements, decoded.

use super::layout::{SEGMENT, UNIT, atomic, control, data, inline, opcode, remote, syndrome};
use crate::complaint::Rule;

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
        let (first, second) = (be32(unit, control::MODIFIER_INDEX_OPCODE), be32(unit, control::QPN_SEGMENTS));
        Self {
            opcode: first as u8,
            modifier: (first >> 24) as u8,
            index: (first >> 8) as u16,
            qpn: second >> 8,
            segments: (second & 0x3f) as usize,
            flags: unit[control::FLAGS],
        }
    }

    /// Units that the element takes, at least 1.
    pub(crate) fn units(&self) -> u64 {
        (self.segments * SEGMENT).div_ceil(UNIT).max(1) as u64
    }

    /// Compares with what the queue's place says, before the rest is looked at.
    pub(crate) fn check(&self, unit: &[u8], index: u16, qpn: u32, longest: usize) -> Result<(), Wrong> {
        if self.index != index {
            return wrong(format!("index is {:#x}, must be {index:#x}: stale bytes, or another's", self.index));
        }
        if self.qpn != qpn {
            return wrong(format!("queue pair is {:#x}, must be {qpn:#x}", self.qpn));
        }
        if unit[7] & 0xc0 != 0 || self.segments == 0 || self.segments * SEGMENT > longest {
            return wrong(format!("{} segments of 16 bytes, 1 to {}", unit[7], longest / SEGMENT));
        }
        if self.modifier != 0 {
            return wrong(format!("opcode modifier is {:#x}, must be 0", self.modifier));
        }
        let known = control::COMPLETION | control::FENCES | control::SOLICITED;
        let fenced = self.flags & control::FENCES <= control::FENCE;
        if self.flags & !known != 0 || !fenced || ![0, control::CQ_UPDATE].contains(&(self.flags & control::COMPLETION))
        {
            return wrong(format!("flags are {:#04x}: unknown bits", self.flags));
        }
        let unused = &unit[control::SIGNATURE..control::FLAGS];
        if unused != [0; 3] {
            return wrong(format!("bytes 8 to 10 of the control segment are {unused:02x?}, must be 0"));
        }
        Ok(())
    }

    /// Decodes the whole element.
    pub(crate) fn decode(&self, bytes: &[u8]) -> Result<Element, Wrong> {
        match (self.opcode, self.segments) {
            (opcode::NOP, _) => Ok(Element::Nop),
            (opcode::WRITE, 2..) => write(bytes),
            (opcode::FETCH_ADD, 4) => fetch_add(bytes),
            (opcode::WRITE | opcode::FETCH_ADD, segments) => {
                wrong(format!("{segments} segments in an element of opcode {:#x}", self.opcode))
            }
            (opcode, _) => wrong(format!("opcode {opcode:#x} is not known")),
        }
    }
}

fn target(bytes: &[u8]) -> Result<Remote, Wrong> {
    let segment = &bytes[SEGMENT..];
    match be32(segment, remote::RESERVED) {
        0 => Ok(Remote { addr: be64(segment, remote::ADDR), key: be32(segment, remote::KEY) }),
        rest => wrong(format!("the last word of the remote address segment is {rest:#x}, must be 0")),
    }
}

fn local(segment: &[u8]) -> Local {
    // Zero stands for the largest length.
    let len = match be32(segment, data::LEN) {
        0 => 1 << 31,
        len => len as usize,
    };
    Local { len, key: be32(segment, data::KEY), addr: be64(segment, data::ADDR) }
}

fn write(bytes: &[u8]) -> Result<Element, Wrong> {
    let to = target(bytes)?;
    let rest = &bytes[2 * SEGMENT..];
    if rest.is_empty() || be32(rest, 0) & inline::BIT == 0 {
        return Ok(Element::Write { to, from: rest.chunks_exact(SEGMENT).map(local).collect() });
    }
    let len = (be32(rest, 0) & !inline::BIT) as usize;
    let room = rest.len() - inline::BYTES;
    if len > room || (inline::BYTES + len).next_multiple_of(SEGMENT) != rest.len() {
        return wrong(format!("{len} bytes inline, and room for {} to {room}", room.saturating_sub(SEGMENT - 1)));
    }
    Ok(Element::WriteInline { to, bytes: rest[inline::BYTES..][..len].to_vec() })
}

fn fetch_add(bytes: &[u8]) -> Result<Element, Wrong> {
    let to = target(bytes)?;
    let back = local(&bytes[3 * SEGMENT..]);
    if back.len != 8 {
        return wrong(format!("the old value's segment has {} bytes, must have 8", back.len));
    }
    Ok(Element::FetchAdd { to, add: be64(&bytes[2 * SEGMENT..], atomic::ADD), back })
}
