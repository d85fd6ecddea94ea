//! Completions: 64 bytes, of which the last word makes them valid.

use super::At;
use super::layout::{UNIT, cqe as at, syndrome};
use super::retire::reread;
use crate::complaint::Rule;
use crate::devx::qp::QpState;
use crate::devx::tables;
use crate::fabric::State;
use crate::objects::{CardState, Cq, Qp};

/// Where the last word lies: counter, signature, opcode and owner.
const LAST: usize = at::COUNTER;

/// A completion that is due.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cqe {
    /// The element's first unit.
    pub(crate) index: u64,
    units: u64,
    opcode: u8,
    bytes: u32,
    syndrome: Option<u8>,
}

/// A completion of which all but the last word is written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Writing {
    pub(crate) qpn: u32,
    slot: usize,
    last: [u8; 4],
    upto: u64,
}

impl Cqe {
    pub(crate) fn done(index: u64, units: u64, opcode: u8, bytes: u32) -> Self {
        Self { index, units, opcode, bytes, syndrome: None }
    }

    pub(crate) fn error(index: u64, units: u64, opcode: u8, syndrome: u8) -> Self {
        Self { index, units, opcode, bytes: 0, syndrome: Some(syndrome) }
    }

    /// Its bytes. What a card leaves undefined is `noise`.
    fn image(&self, qpn: u32, user: u32, owner: u8, noise: u8) -> [u8; UNIT] {
        let mut image = [noise; UNIT];
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(at::USER, &user.to_be_bytes());
        put(at::IMMEDIATE, &[0; 4]);
        let opcode = match self.syndrome {
            None => {
                put(at::LEN, &self.bytes.to_be_bytes());
                at::REQUEST
            }
            Some(syndrome) => {
                // The vendor's own code says nothing to a driver.
                put(at::VENDOR, &[0x68]);
                put(at::SYNDROME, &[syndrome]);
                at::REQUEST_ERROR
            }
        };
        put(at::OPCODE_QPN, &(u32::from(self.opcode) << 24 | qpn).to_be_bytes());
        put(at::COUNTER, &(self.index as u16).to_be_bytes());
        put(at::SIGNATURE, &[0]);
        put(at::OPCODE_OWNER, &[opcode << 4 | owner]);
        image
    }
}

/// Whether a completion of this queue pair can be written.
pub(crate) fn can_report(card: &CardState, qp: &Qp) -> bool {
    card.cqs.get(&qp.cq).is_some_and(|cq| !cq.broken && (cq.writing.is_some() || !qp.completions.is_empty()))
}

/// Writes the last word of the completion that was begun, or begins the next.
pub(crate) fn report(state: &mut State, at: At) -> bool {
    let card = &mut state.cards[at.0];
    let Some(cq) = card.qps.get(&at.1).map(|qp| qp.cq) else { return false };
    match card.cqs.get_mut(&cq).and_then(|cq| cq.writing.take()) {
        Some(writing) => finish(card, cq, writing),
        None => begin(state, at, cq),
    }
}

fn finish(card: &mut CardState, number: u32, writing: Writing) -> bool {
    let Some(cq) = card.cqs.get_mut(&number) else { return false };
    cq.entries.write(writing.slot * UNIT + LAST, &writing.last);
    cq.written += 1;
    card.counts.completions += 1;
    if let Some(qp) = card.qps.get_mut(&writing.qpn) {
        qp.reported = qp.reported.max(writing.upto);
        while qp.unreported.front().is_some_and(|element| element.index < writing.upto) {
            qp.unreported.pop_front();
        }
    }
    true
}

fn begin(state: &mut State, at: At, number: u32) -> bool {
    let (merge, again) = (state.mood.merge, state.mood.reread);
    let noise = state.rng.next() as u8;
    let collapsed = state.cards[at.0].cqs[&number].collapsed;
    let merges = collapsed && state.rng.chance(merge);
    let rereads = state.rng.chance(again);
    let Some(qp) = state.cards[at.0].qps.get_mut(&at.1) else { return false };
    let Some(mut due) = qp.completions.pop_front() else { return false };
    while merges && !qp.completions.is_empty() {
        due = qp.completions.pop_front().unwrap_or(due);
    }
    if rereads && due.syndrome.is_none() && !reread(state, at, due.index) {
        due = broken(state, at, due);
    }
    let card = &mut state.cards[at.0];
    if !room(card, number) {
        return overrun(card, at.1, number);
    }
    let (Some(cq), Some(qp)) = (card.cqs.get_mut(&number), card.qps.get(&at.1)) else { return false };
    let slot = if cq.collapsed { 0 } else { (cq.written % (1 << cq.log_size)) as usize };
    let owner = (cq.written >> cq.log_size & 1) as u8;
    let user = qp.get(&tables::qp::USER_INDEX) as u32;
    let image = due.image(at.1, user, owner, noise);
    let body = &image[..LAST];
    // The parts of the body become visible in some order: none of it counts before the last word.
    cq.entries.write(slot * UNIT + 32, &body[32..]);
    cq.entries.write(slot * UNIT, &body[..32]);
    let last = image[LAST..].try_into().expect("four bytes");
    cq.writing = Some(Writing { qpn: at.1, slot, last, upto: due.index + due.units });
    true
}

/// An element had changed when it was needed again: the queue pair breaks there.
fn broken(state: &mut State, at: At, due: Cqe) -> Cqe {
    if let Some(qp) = state.cards[at.0].qps.get_mut(&at.1) {
        qp.state = QpState::Error;
        qp.syndrome = Some(syndrome::LOCAL_OPERATION);
        qp.flight.clear();
        qp.completions.clear();
    }
    Cqe { syndrome: Some(syndrome::LOCAL_OPERATION), ..due }
}

/// Whether the consumer has left room for one more.
fn room(card: &CardState, number: u32) -> bool {
    let Some(Cq { record, written, log_size, overrun_ignore, .. }) = card.cqs.get(&number) else { return false };
    let consumed = u64::from(record.be32(0) & 0xff_ffff);
    let pending = written.wrapping_sub(consumed) & 0xff_ffff;
    *overrun_ignore || pending < 1 << log_size
}

/// The queue ran over: it reports nothing any more, and its queue pairs are broken.
fn overrun(card: &mut CardState, qpn: u32, number: u32) -> bool {
    if let Some(cq) = card.cqs.get_mut(&number) {
        cq.broken = true;
    }
    for qp in card.qps.values_mut().filter(|qp| qp.cq == number) {
        qp.state = QpState::Error;
        qp.flight.clear();
    }
    card.complain(Rule::Overrun, format!("completion queue {number:#x} ran over at queue pair {qpn:#x}"));
    true
}
