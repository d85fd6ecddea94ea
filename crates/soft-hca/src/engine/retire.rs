//! The end of messages: in order, with a completion or without.

use super::At;
use super::cqe::Cqe;
use super::element::{Control, Element};
use super::fetch::units;
use super::layout::{UNIT, syndrome};
use crate::complaint::Rule;
use crate::devx::qp::QpState;
use crate::fabric::State;
use crate::objects::Unreported;

/// The oldest message is over.
pub(crate) fn retire(state: &mut State, at: At) -> bool {
    let card = &mut state.cards[at.0];
    let Some(qp) = card.qps.get_mut(&at.1) else { return false };
    let Some(message) = qp.flight.pop_front() else { return false };
    if let Some(syndrome) = message.fault {
        qp.retired = message.index + message.units;
        qp.completions.push_back(Cqe::error(message.index, message.units, message.opcode, syndrome));
        qp.syndrome = Some(syndrome);
        qp.state = QpState::Error;
        qp.flight.clear();
        return true;
    }
    qp.retired = message.index + message.units;
    card.counts.elements += 1;
    match message.element {
        Some(Element::Write { .. } | Element::WriteInline { .. }) => card.counts.writes += 1,
        Some(Element::FetchAdd { .. }) => card.counts.fetch_adds += 1,
        _ => {}
    }
    if message.signalled {
        let bytes = message.element.as_ref().map_or(0, Element::len) as u32;
        qp.completions.push_back(Cqe::done(message.index, message.units, message.opcode, bytes));
    }
    qp.unreported.push_back(Unreported { index: message.index, bytes: message.bytes });
    true
}

/// One more element of a broken queue pair is flushed.
pub(crate) fn flush(state: &mut State, at: At) -> bool {
    let card = &mut state.cards[at.0];
    let Some(qp) = card.qps.get_mut(&at.1) else { return false };
    let control = Control::of(&units(&qp.queue, qp.depth, qp.retired, 1));
    let units = control.units().min(qp.produced - qp.retired);
    qp.completions.push_back(Cqe::error(qp.retired, units, control.opcode, syndrome::FLUSH));
    qp.retired += units;
    qp.fetched = qp.fetched.max(qp.retired);
    true
}

/// Reads elements up to an index again, as a card must that has to send them once more. False: one has changed.
pub(crate) fn reread(state: &mut State, at: At, upto: u64) -> bool {
    let card = &mut state.cards[at.0];
    let Some(qp) = card.qps.get_mut(&at.1) else { return true };
    let changed = qp.unreported.iter().find(|element| {
        let count = (element.bytes.len() / UNIT) as u64;
        element.index <= upto && units(&qp.queue, qp.depth, element.index, count) != element.bytes
    });
    let Some(index) = changed.map(|element| element.index) else { return true };
    let text = format!("queue pair {:#x}, element {index}: it changed before its completion was written", at.1);
    card.complain(Rule::Changed, text);
    false
}
