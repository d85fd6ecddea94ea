//! Doorbells: eight bytes in a register, and a record in memory that says the same.

use super::At;
use super::layout::record;
use crate::complaint::Rule;
use crate::fabric::State;
use crate::objects::{Bell, CardState, Qp};

/// Where the register lies in its page.
pub(crate) const REGISTER: usize = 0x800;

/// Takes what has been written to doorbell registers. True: something has.
pub(crate) fn look(state: &mut State) -> bool {
    let mut rung = false;
    for card in state.cards.iter_mut().filter(|card| !card.dead) {
        rung |= look_at(card);
    }
    rung
}

/// The same of one card.
pub(crate) fn look_at(card: &mut CardState) -> bool {
    let mut rung = false;
    let pages: Vec<u32> = card.uars.keys().copied().collect();
    for page in pages {
        let bell = card.uars[&page].page.take(REGISTER);
        if bell != [0; 8] {
            rung = true;
            card.counts.bells += 1;
            sort(card, page, bell);
        }
    }
    rung
}

/// Finds the queue pair of a bell.
fn sort(card: &mut CardState, page: u32, bell: [u8; 8]) {
    let word = |at: usize| u32::from_be_bytes(bell[at..at + 4].try_into().expect("four bytes"));
    let (first, second) = (word(0), word(4));
    let number = second >> 8;
    if first & 0xff00_00ff != 0 || second & 0xff != 0 {
        card.complain(
            Rule::Bell,
            format!("page {page:#x}: {first:#010x} {second:#010x} is not index << 8, queue pair << 8, big-endian"),
        );
        return;
    }
    match card.qps.get_mut(&number) {
        Some(qp) if qp.uar == page => {
            qp.bells.push_back(Bell::Index((first >> 8) as u16));
        }
        Some(qp) => {
            let own = qp.uar;
            card.complain(Rule::Bell, format!("queue pair {number:#x} is rung on page {page:#x}, its own is {own:#x}"));
        }
        None => card.complain(
            Rule::Bell,
            format!("page {page:#x}: no queue pair {number:#x}: half a bell, or the wrong number"),
        ),
    }
    // A register is one place here. Bells of several queue pairs that share the page may have overwritten one another,
    // as they would not on a real card. One that cannot send was not rung: its record may be of before it was reset.
    let others = card.qps.iter_mut().filter(|(other, qp)| qp.uar == page && **other != number);
    others.filter(|(_, qp)| qp.hears()).for_each(|(_, qp)| qp.bells.push_back(Bell::Perhaps));
}

/// Bells that may wait to be heard, and so how many depths of a queue the oldest can be behind.
const WAITING: usize = 4;
const STALE: u64 = WAITING as u64 + 1;

/// Takes a bell's producer index, or the record's instead.
pub(crate) fn hear(state: &mut State, at: At) -> bool {
    let by_record = state.rng.chance(state.mood.record);
    let prompt = state.mood.prompt;
    let again = state.rng.chance(state.mood.again);
    let Some(qp) = state.cards[at.0].qps.get_mut(&at.1) else { return false };
    // Bells that were put off arrive in any order, and some once more.
    let pick = if prompt || qp.bells.len() > WAITING { 0 } else { state.rng.below(qp.bells.len()) };
    let bell = if again && qp.bells.len() < WAITING { qp.bells.get(pick).copied() } else { qp.bells.remove(pick) };
    let Some(bell) = bell else { return false };
    match bell {
        Bell::Index(index) if !by_record => advance(&mut state.cards[at.0], at.1, index, "bell"),
        _ => read_record(state, at),
    }
    true
}

/// What a card does without a bell: it looks at the record, or forgets its producer index and takes the record's. What was
/// read stays read. True: the index is another.
pub(crate) fn unbidden(state: &mut State, at: At) -> bool {
    let recovers = state.rng.chance(state.mood.recover);
    if !recovers && !state.rng.chance(state.mood.early) {
        return false;
    }
    let Some(qp) = state.cards[at.0].qps.get_mut(&at.1) else { return false };
    let before = qp.produced;
    if recovers {
        qp.bells.clear();
        qp.produced = qp.fetched;
    }
    read_record(state, at);
    state.cards[at.0].qps[&at.1].produced != before
}

/// The producer index of a record, if it is one.
fn read_record(state: &mut State, at: At) {
    let card = &mut state.cards[at.0];
    let Some(qp) = card.qps.get(&at.1) else { return };
    let (receive, send) = (qp.record.be32(record::RECEIVE), qp.record.be32(record::SEND));
    if receive != 0 {
        card.complain(
            Rule::Record,
            format!("queue pair {:#x}: the receive half is {receive:#x}, and there is no receive queue", at.1),
        );
    }
    if send > 0xffff {
        card.complain(
            Rule::Record,
            format!("queue pair {:#x}: the send half is {send:#010x}, 16 bits big-endian are allowed", at.1),
        );
        return;
    }
    advance(card, at.1, send as u16, "record");
}

/// Moves the producer index forward to one of 16 bits. One that is behind is stale, and ignored.
fn advance(card: &mut CardState, number: u32, index: u16, whose: &str) {
    let Some(qp) = card.qps.get_mut(&number) else { return };
    if !qp.hears() {
        let text =
            format!("queue pair {number:#x}: a {whose} of index {index:#x}, and the queue pair is {:?}", qp.state);
        // A record that is zero says nothing.
        if index != 0 {
            card.complain(Rule::State, text);
        }
        return;
    }
    let ahead = u64::from(index.wrapping_sub(qp.produced as u16));
    let behind = u64::from((qp.produced as u16).wrapping_sub(index));
    if ahead > qp.depth {
        // Bells that are heard late tell of what is long known, but of nothing before the first element.
        if behind > qp.produced || behind > STALE * qp.depth {
            let text = format!(
                "queue pair {number:#x}: a {whose} of index {index:#x}, {ahead} ahead of {:#x} in a queue of {}",
                qp.produced, qp.depth
            );
            card.complain(Rule::Index, text);
        }
        return;
    }
    qp.produced += ahead;
    overrun(card, number);
}

/// Complains of more elements than there is room for beside those of which no completion tells.
fn overrun(card: &mut CardState, number: u32) {
    let Some(Qp { produced, reported, depth, .. }) = card.qps.get(&number) else { return };
    if produced - reported > *depth {
        let text = format!(
            "queue pair {number:#x}: elements up to {produced} in a queue of {depth}, and completions tell of {reported} only"
        );
        card.complain(Rule::Slot, text);
    }
}
