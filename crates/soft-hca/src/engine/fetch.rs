//! Reading elements from the queue.

use super::At;
use super::element::{Control, Element, Wrong};
use super::layout::{UNIT, control as flags, syndrome};
use super::message::Message;
use super::network::gather;
use crate::abi;
use crate::complaint::Rule;
use crate::devx::tables;
use crate::fabric::State;
use crate::memory::Memory;
use crate::objects::{CardState, Qp};

/// Units of a queue from an index on, which may wrap.
pub(crate) fn units(queue: &Memory, depth: u64, index: u64, count: u64) -> Vec<u8> {
    (index..index + count).flat_map(|index| queue.bytes((index % depth) as usize * UNIT, UNIT)).collect()
}

/// Reads the next element, and finds out whether this card can carry it out.
pub(crate) fn fetch(state: &mut State, at: At) -> bool {
    let early = state.rng.chance(state.mood.gather);
    let card = &mut state.cards[at.0];
    let Some(mut qp) = card.qps.remove(&at.1) else { return false };
    let mut message = read(card, &qp, at.1);
    if let Some((after, syndrome)) = qp.planted {
        qp.planted = (after > 0).then_some((after.saturating_sub(1), syndrome));
        if after == 0 {
            message.fault = Some(syndrome);
        }
    }
    qp.fetched += message.units;
    qp.elements += 1;
    // A fence keeps the payload from being read before earlier atomics have brought their values back.
    let waits = message.is_fenced() && qp.flight.iter().any(Message::is_fetch_add);
    if early && !waits && message.fault.is_none() {
        message.payload = gather(card, qp.pd, &message, 0, message.element.as_ref().map_or(0, Element::len)).ok();
    }
    qp.flight.push_back(message);
    card.qps.insert(at.1, qp);
    true
}

/// The message of the next element; with a fault where it is wrong.
fn read(card: &mut CardState, qp: &Qp, number: u32) -> Message {
    let index = qp.fetched;
    let first = units(&qp.queue, qp.depth, index, 1);
    let control = Control::of(&first);
    let left = qp.produced - index;
    let mut message = Message {
        index,
        units: control.units().min(left),
        bytes: first.clone(),
        opcode: control.opcode,
        signalled: control.flags & flags::COMPLETION == flags::CQ_UPDATE,
        element: None,
        payload: None,
        accepted: false,
        taker: None,
        relaxed: false,
        pieces: Vec::new(),
        returning: None,
        fault: None,
    };
    let longest = usize::from(card.model.max_element);
    let decoded = control.check(&first, index as u16, number, longest).and_then(|()| {
        if control.units() > left {
            let text = format!("it takes {} units, and the producer index leaves {left}", control.units());
            return Err(Wrong { rule: Rule::Element, syndrome: syndrome::LOCAL_OPERATION, text });
        }
        message.bytes = units(&qp.queue, qp.depth, index, control.units());
        let element = control.decode(&message.bytes[..control.segments * 16])?;
        locally(card, qp, &element)?;
        Ok(element)
    });
    match decoded {
        Ok(element) => message.element = Some(element),
        Err(Wrong { rule, syndrome, text }) => {
            card.complain(rule, format!("queue pair {number:#x}, element {index}: {text}"));
            message.fault = Some(syndrome);
        }
    }
    message
}

/// What this end checks: lengths, and the keys of own memory.
fn locally(card: &CardState, qp: &Qp, element: &Element) -> Result<(), Wrong> {
    let (len, log) = (element.len(), qp.get(&tables::qp::LOG_MSG_MAX));
    let refused = |syndrome, text| Err(Wrong { rule: Rule::Access, syndrome, text });
    let parts: &[_] = match element {
        Element::Write { from, .. } => from,
        Element::FetchAdd { back, .. } => std::slice::from_ref(back),
        Element::Nop | Element::WriteInline { .. } => &[],
    };
    for part in parts {
        let writes = matches!(element, Element::FetchAdd { .. });
        let Some(mr) = card.mrs.values().find(|mr| mr.lkey == part.key && mr.pd == qp.pd) else {
            return refused(
                syndrome::LOCAL_PROTECTION,
                format!("no memory of its domain has the local key {:#x}", part.key),
            );
        };
        if mr.range(part.addr, part.len).is_none() {
            let text = format!(
                "{:#x} bytes at {:#x}, and the region has {:#x} at {:#x}",
                part.len,
                part.addr,
                mr.memory.len(),
                mr.iova
            );
            return refused(syndrome::LOCAL_PROTECTION, text);
        }
        if writes && mr.access & abi::LOCAL_WRITE == 0 {
            return refused(syndrome::LOCAL_PROTECTION, "the old value's region is not writable".into());
        }
    }
    if len as u64 > 1 << log {
        return refused(syndrome::LOCAL_LENGTH, format!("{len:#x} bytes, at most 2^{log}"));
    }
    Ok(())
}
