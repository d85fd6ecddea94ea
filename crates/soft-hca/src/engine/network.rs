//! Between two cards: which queue pair takes a message, and the pieces in which it arrives.

use super::At;
use super::element::{Element, Remote};
use super::layout::syndrome;
use super::message::{Message, Piece};
use crate::Link;
use crate::abi;
use crate::complaint::Rule;
use crate::devx::qp::QpState;
use crate::devx::tables::qp::*;
use crate::fabric::State;
use crate::face::End;
use crate::memory::Memory;
use crate::objects::{CardState, Mr, Qp, Sight};

/// Why a peer does not answer: nothing to blame the driver for, or a connection that does not agree.
pub(crate) type Silence = Option<String>;

/// The queue pair that takes what this one sends, on a card that carries messages out itself.
fn peer(state: &State, at: At) -> Result<At, Silence> {
    end(state, at).map(|(card, end)| (card, end.number))
}

/// The card to which a queue pair sends, and the end there that takes it.
pub(crate) fn end(state: &State, at: At) -> Result<(usize, End<'_>), Silence> {
    let (own, qp) = (&state.cards[at.0], &state.cards[at.0].qps[&at.1]);
    if qp.cut {
        return Err(None);
    }
    let Some(to) = addressed(state, at) else { return Err(Some("no card has the address".into())) };
    let (card, number) = (&state.cards[to], qp.get(&REMOTE_QPN) as u32);
    if card.dead {
        return Err(None);
    }
    let mac = card.mac().iter().fold(0, |mac, &byte| mac << 8 | u64::from(byte));
    if own.model.link == Link::Ethernet && mac != qp.get(&RMAC) {
        return Err(Some(format!("rmac is {:#x}, the card of that GID has {mac:#x}", qp.get(&RMAC))));
    }
    let end = card.end(number)?;
    agree(own, at, qp, end)?;
    Ok((to, end))
}

/// The card that has the address to which a queue pair sends.
fn addressed(state: &State, at: At) -> Option<usize> {
    let (own, qp) = (&state.cards[at.0], &state.cards[at.0].qps[&at.1]);
    state.cards.iter().position(|card| match own.model.link {
        Link::InfiniBand => u64::from(card.lid()) == qp.get(&RLID),
        Link::Ethernet => card.gids().iter().any(|gid| u128::from_be_bytes(*gid) == RGID.get(&qp.image)),
    })
}

/// Whether nobody can say if the card answers to which a queue pair sends: its process does not show it now.
pub(crate) fn is_hidden(state: &State, at: At) -> bool {
    addressed(state, at).is_some_and(|to| matches!(state.cards[to].sight, Sight::Hidden))
}

/// What both ends must have been told alike.
fn agree(own: &CardState, at: At, qp: &Qp, remote: End<'_>) -> Result<(), Silence> {
    let back = remote.get(&REMOTE_QPN) as u32;
    if back != at.1 {
        return Err(Some(format!("the peer's remote_qpn is {back:#x}")));
    }
    let returns = match own.model.link {
        Link::InfiniBand => remote.get(&RLID) == u64::from(own.lid()),
        Link::Ethernet => own
            .gids()
            .get(qp.get(&SRC_ADDR_INDEX) as usize)
            .is_some_and(|gid| u128::from_be_bytes(*gid) == remote.wide(&RGID)),
    };
    if !returns {
        return Err(Some("the peer's address of this card is another".into()));
    }
    for (field, mine, theirs) in
        [("mtu", qp.get(&MTU), remote.get(&MTU)), ("packet number", qp.get(&NEXT_SEND_PSN), remote.get(&NEXT_RCV_PSN))]
    {
        if mine != theirs {
            return Err(Some(format!("{field} is {mine:#x} here and {theirs:#x} at the peer")));
        }
    }
    Ok(())
}

/// The peer takes the oldest message that it has not taken, or does not answer.
pub(crate) fn accept(state: &mut State, at: At) -> bool {
    let flight = &state.cards[at.0].qps[&at.1].flight;
    let Some(place) = flight.iter().position(|message| !message.accepted) else { return false };
    // Behind one that failed the peer takes nothing.
    let peer = match &flight[place] {
        Message { fault: Some(_), .. } | Message { element: None, .. } => return false,
        Message { element: Some(Element::Nop), .. } => None,
        _ => match peer(state, at) {
            Ok(peer) => Some(peer),
            Err(why) => return silent(state, at, place, why),
        },
    };
    let verdict = peer.map_or(Ok(false), |peer| admit(state, at, peer, place));
    let tear = state.mood.tear;
    let torn = state.rng.chance(tear);
    let mut rng = state.rng.clone();
    let taker = peer.map(|peer| (peer, state.cards[peer.0].qps[&peer.1].epoch));
    let card = &mut state.cards[at.0];
    let Some(qp) = card.qps.get_mut(&at.1) else { return false };
    qp.silent_since = None;
    qp.answered |= peer.is_some();
    let message = &mut qp.flight[place];
    match verdict {
        Ok(relaxed) => {
            message.accepted = true;
            message.taker = taker;
            message.relaxed = relaxed;
            message.pieces = message.element.as_ref().map_or(Vec::new(), |element| cut(element, torn, &mut rng));
        }
        Err((syndrome, text)) => {
            message.fault = Some(syndrome);
            let text = format!("queue pair {:#x}, element {}: {text}", at.1, message.index);
            card.complain(Rule::Access, text);
            if let Some(remote) = peer.and_then(|peer| state.cards[peer.0].qps.get_mut(&peer.1)) {
                remote.state = QpState::Error;
                remote.flight.clear();
            }
        }
    }
    state.rng = rng;
    true
}

/// No answer. After the time that the queue pair was told, the message has failed.
fn silent(state: &mut State, at: At, place: usize, why: Silence) -> bool {
    let now = state.clock;
    let card = &mut state.cards[at.0];
    let Some(qp) = card.qps.get_mut(&at.1) else { return false };
    let first = qp.silent_since.is_none() && !qp.answered;
    let since = *qp.silent_since.get_or_insert(now);
    let timeout = qp.get(&ACK_TIMEOUT);
    // A timeout of 0 waits for ever.
    let limit = (4096_u64 << timeout) * (qp.get(&RETRY_COUNT) + 1);
    let over = timeout > 0 && now.saturating_sub(since) >= limit;
    if over {
        qp.flight[place].fault = Some(syndrome::RETRIES);
    }
    if let (true, Some(why)) = (first, why) {
        card.complain(Rule::Connection, format!("queue pair {:#x} gets no answer: {why}", at.1));
    }
    over
}

/// What the peer checks. Whether the memory is relaxed, or the syndrome that it answers.
fn admit(state: &State, at: At, to: At, place: usize) -> Result<bool, (u8, String)> {
    let (qp, remote) = (&state.cards[at.0].qps[&at.1], &state.cards[to.0].qps[&to.1]);
    let message = &qp.flight[place];
    let Some((element, target)) = message.element.as_ref().and_then(|element| Some((element, element.remote()?)))
    else {
        return Ok(false);
    };
    let (right, access) = match element {
        Element::FetchAdd { .. } => (&RAE, abi::REMOTE_ATOMIC),
        _ => (&RWE, abi::REMOTE_WRITE),
    };
    if message.is_fetch_add() {
        let (asked, given) = (qp.get(&LOG_SRA_MAX), remote.get(&LOG_RRA_MAX));
        if asked > given {
            return Err((syndrome::REMOTE_INVALID, format!("log_sra_max is {asked}, the peer's log_rra_max {given}")));
        }
        if target.addr % 8 != 0 {
            return Err((syndrome::REMOTE_INVALID, format!("a fetch-add at {:#x}, not a multiple of 8", target.addr)));
        }
    }
    if remote.get(right) == 0 {
        return Err((syndrome::REMOTE_INVALID, format!("{} is 0 at the peer", right.name)));
    }
    if element.len() == 0 {
        return Ok(true);
    }
    let Some(mr) = target_mr(&state.cards[to.0], remote.pd, target) else {
        return Err((
            syndrome::REMOTE_ACCESS,
            format!("no memory of the peer's domain has the remote key {:#x}", target.key),
        ));
    };
    let Some(memory) = mr.range(target.addr, element.len()) else {
        let text = format!(
            "{:#x} bytes at {:#x}, and the peer's region has {:#x} at {:#x}",
            element.len(),
            target.addr,
            mr.memory.len(),
            mr.iova
        );
        return Err((syndrome::REMOTE_ACCESS, text));
    };
    // A region need not begin at an address that is as even as its own.
    if message.is_fetch_add() && !memory.base().is_multiple_of(8) {
        let text = format!("a fetch-add at {:#x}, which lies at {:#x}", target.addr, memory.base());
        return Err((syndrome::REMOTE_INVALID, text));
    }
    if mr.access & access == 0 {
        return Err((
            syndrome::REMOTE_ACCESS,
            format!("the peer's region allows {:#x}, {access:#x} is needed", mr.access),
        ));
    }
    Ok(mr.is_relaxed())
}

fn target_mr(card: &CardState, pd: u32, target: Remote) -> Option<&Mr> {
    card.mrs.values().find(|mr| mr.rkey == target.key && mr.pd == pd)
}

/// The pieces of a message: as it is, or torn where the target's words of 8 bytes end.
fn cut(element: &Element, torn: bool, rng: &mut crate::rng::Rng) -> Vec<Piece> {
    let (len, Some(to)) = (element.len(), element.remote()) else { return Vec::new() };
    let mut ends = vec![0, len];
    if torn && !matches!(element, Element::FetchAdd { .. }) && len > 8 {
        for _ in 0..1 + rng.below(6) {
            let at = rng.below(len);
            ends.push(at.saturating_sub((to.addr as usize).wrapping_add(at) % 8));
        }
    }
    ends.sort_unstable();
    ends.dedup();
    ends.windows(2).map(|pair| Piece { from: pair[0], len: pair[1] - pair[0] }).collect()
}

/// Bytes of a message's payload, from own memory.
pub(crate) fn gather(card: &CardState, pd: u32, message: &Message, from: usize, len: usize) -> Result<Vec<u8>, u8> {
    if let Some(payload) = &message.payload {
        return Ok(payload[from..from + len].to_vec());
    }
    match &message.element {
        Some(Element::WriteInline { bytes, .. }) => Ok(bytes[from..from + len].to_vec()),
        Some(Element::Write { from: parts, .. }) => {
            let (mut bytes, mut start) = (Vec::with_capacity(len), 0);
            for part in parts {
                let (low, high) = (from.max(start), (from + len).min(start + part.len));
                if low < high {
                    let mr = card.mrs.values().find(|mr| mr.lkey == part.key && mr.pd == pd);
                    let memory = mr.and_then(|mr| mr.range(part.addr + (low - start) as u64, high - low));
                    bytes.extend(memory.ok_or(syndrome::LOCAL_PROTECTION)?.bytes(0, high - low));
                }
                start += part.len;
            }
            Ok(bytes)
        }
        _ => Ok(Vec::new()),
    }
}

/// One piece arrives, of a message that earlier ones let pass; or a fetch-add's old value comes back.
pub(crate) fn deliver(state: &mut State, at: At) -> bool {
    let passes = state.mood.fetch_add_passes;
    let flight = &state.cards[at.0].qps[&at.1].flight;
    let can = |place: usize| {
        let message = &flight[place];
        message.is_arriving()
            && flight.iter().take(place).all(|earlier| earlier.is_done() || message.may_pass(earlier, passes))
    };
    let places: Vec<usize> = (0..flight.len()).filter(|&place| can(place)).collect();
    if places.is_empty() {
        return false;
    }
    let prompt = state.mood.prompt;
    let place = places[if prompt { 0 } else { state.rng.below(places.len()) }];
    let outcome = match state.cards[at.0].qps[&at.1].flight[place].returning {
        Some(old) => bring_back(state, at, place, old),
        None => {
            let pieces = state.cards[at.0].qps[&at.1].flight[place].pieces.len();
            let piece = if prompt { 0 } else { state.rng.below(pieces) };
            match taker(state, at, place) {
                Some(to) => arrive(state, at, to, place, piece),
                None => return silent(state, at, place, None),
            }
        }
    };
    if let (Err(syndrome), Some(qp)) = (outcome, state.cards[at.0].qps.get_mut(&at.1)) {
        qp.flight[place].fault = Some(syndrome);
    }
    true
}

/// The queue pair that has taken a message, where it is still there. That it has failed since does not matter.
fn taker(state: &State, at: At, place: usize) -> Option<At> {
    let (to, epoch) = state.cards[at.0].qps[&at.1].flight[place].taker?;
    let card = &state.cards[to.0];
    (!card.dead && card.qps.get(&to.1)?.epoch == epoch).then_some(to)
}

fn arrive(state: &mut State, at: At, to: At, place: usize, piece: usize) -> Result<(), u8> {
    let Piece { from, len } = state.cards[at.0].qps[&at.1].flight[place].pieces[piece];
    let memory = target(state, at, to, place, from, len)?;
    let qp = &state.cards[at.0].qps[&at.1];
    let message = &qp.flight[place];
    let mut old = None;
    match message.element {
        Some(Element::FetchAdd { add, .. }) => old = Some(memory.fetch_add(0, add)),
        _ => memory.write(0, &gather(&state.cards[at.0], qp.pd, message, from, len)?),
    }
    let card = &mut state.cards[at.0];
    card.counts.bytes += if old.is_none() { len as u64 } else { 0 };
    let Some(qp) = card.qps.get_mut(&at.1) else { return Ok(()) };
    qp.silent_since = None;
    let message = &mut qp.flight[place];
    message.pieces.swap_remove(piece);
    message.returning = old;
    Ok(())
}

/// The peer's memory under a piece.
fn target(state: &State, at: At, to: At, place: usize, from: usize, len: usize) -> Result<Memory, u8> {
    let message = &state.cards[at.0].qps[&at.1].flight[place];
    let pd = state.cards[to.0].qps[&to.1].pd;
    let Some(target) = message.element.as_ref().and_then(Element::remote) else { return Err(syndrome::REMOTE_INVALID) };
    target_mr(&state.cards[to.0], pd, target)
        .and_then(|mr| mr.range(target.addr + from as u64, len))
        .ok_or(syndrome::REMOTE_ACCESS)
}

/// The old value of a fetch-add, into own memory.
fn bring_back(state: &mut State, at: At, place: usize, old: u64) -> Result<(), u8> {
    let card = &mut state.cards[at.0];
    let Some(qp) = card.qps.get_mut(&at.1) else { return Ok(()) };
    let pd = qp.pd;
    let message = &mut qp.flight[place];
    message.returning = None;
    let Some(Element::FetchAdd { back, .. }) = message.element else { return Ok(()) };
    let mr = card.mrs.values().find(|mr| mr.lkey == back.key && mr.pd == pd);
    let memory = mr.and_then(|mr| mr.range(back.addr, 8)).ok_or(syndrome::LOCAL_PROTECTION)?;
    memory.write(0, &old.to_ne_bytes());
    Ok(())
}
