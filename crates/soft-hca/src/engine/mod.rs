//! What cards do by themselves: look for bells, read elements, carry them out, report.
//!
//! One step is one thing that a card may do now. Which one is drawn; a prompt card takes the furthest along.

pub(crate) mod bell;
pub(crate) mod cqe;
pub(crate) mod element;
pub(crate) mod fetch;
pub(crate) mod layout;
pub(crate) mod message;
pub(crate) mod network;
mod retire;

use crate::devx::qp::QpState;
use crate::fabric::State;
use message::Message;

/// A queue pair: its card, its number.
pub(crate) type At = (usize, u32);

/// What can be done for a queue pair, the furthest along first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Report,
    Retire,
    Flush,
    Deliver,
    Accept,
    Fetch,
    Bell,
}

/// Does one thing. False: there is nothing to do, or all of it was put off.
pub(crate) fn step(state: &mut State) -> bool {
    let rung = bell::look(state);
    list(state);
    let count = state.roster.1.len();
    if count == 0 {
        return rung;
    }
    let first = state.rng.below(count);
    let served = (0..count).any(|place| {
        let at = state.roster.1[(first + place) % count];
        serve(state, at)
    });
    served || rung
}

/// Lists queue pairs anew where they are others.
fn list(state: &mut State) {
    let changes = state.cards.iter().map(|card| card.changes).sum();
    if state.roster.0 == changes {
        return;
    }
    let living = state.cards.iter().enumerate().filter(|(_, card)| !card.dead);
    let all = living.flat_map(|(card, held)| held.qps.keys().map(move |&number| (card, number))).collect();
    state.roster = (changes, all);
}

/// Does one thing for a queue pair, or puts it off.
fn serve(state: &mut State, at: At) -> bool {
    if state.cards[at.0].qps[&at.1].state == QpState::ReadyToSend && bell::unbidden(state, at) {
        return true;
    }
    let actions = possible(state, at);
    if actions.is_empty() {
        return false;
    }
    if state.rng.chance(state.mood.late) {
        return false;
    }
    let first = if state.mood.prompt { 0 } else { state.rng.below(actions.len()) };
    (0..actions.len()).any(|place| act(state, at, actions[(first + place) % actions.len()]))
}

/// What can be done for a queue pair now.
fn possible(state: &State, at: At) -> Vec<Action> {
    let card = &state.cards[at.0];
    let qp = &card.qps[&at.1];
    let sends = qp.state == QpState::ReadyToSend;
    let flight = &qp.flight;
    let faulty = flight.iter().any(|message| message.fault.is_some());
    let can = [
        (cqe::can_report(card, qp), Action::Report),
        (flight.front().is_some_and(Message::is_over), Action::Retire),
        (qp.state == QpState::Error && qp.retired < qp.produced, Action::Flush),
        (sends && flight.iter().any(Message::is_arriving), Action::Deliver),
        (sends && flight.iter().any(|message| !message.accepted && message.fault.is_none()), Action::Accept),
        (sends && qp.fetched < qp.produced && flight.len() < state.mood.flight && !faulty, Action::Fetch),
        (!qp.bells.is_empty(), Action::Bell),
    ];
    can.into_iter().filter_map(|(can, action)| can.then_some(action)).collect()
}

fn act(state: &mut State, at: At, action: Action) -> bool {
    match action {
        Action::Report => cqe::report(state, at),
        Action::Retire => retire::retire(state, at),
        Action::Flush => retire::flush(state, at),
        Action::Deliver => network::deliver(state, at),
        Action::Accept => network::accept(state, at),
        Action::Fetch => fetch::fetch(state, at),
        Action::Bell => bell::hear(state, at),
    }
}
