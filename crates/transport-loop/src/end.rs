//! Where one rank's window is reached, and the lanes that lead from it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ep_core::{LaneCause, Rank};

use crate::gate::Gate;
use crate::lane::Lane;
use crate::network::Network;
use crate::window::Window;

#[derive(Debug)]
pub(crate) struct End {
    pub(crate) me: Rank,
    pub(crate) window: Window,
    /// Which of its connections is up; none: nothing arrives.
    pub(crate) gate: Gate,
    /// When the card's way out, and its way in, are free.
    pub(crate) out_free: Mutex<u64>,
    pub(crate) in_free: Mutex<u64>,
    /// One for each rank that it has lanes to; none of a rank of another process.
    pub(crate) links: Vec<Link>,
}

/// The lanes from one rank to another.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) to: Rank,
    /// Whether something is under way. Only a hint: a rank looks at those of all its peers, again and again.
    busy: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(crate) struct State {
    /// The peer's connection that these lanes belong to.
    pub(crate) connection: Option<u32>,
    pub(crate) lanes: Vec<Lane>,
}

impl End {
    pub(crate) const fn new(me: Rank, window: Window, gate: Gate, links: Vec<Link>) -> Self {
        Self { me, window, gate, out_free: Mutex::new(0), in_free: Mutex::new(0), links }
    }

    pub(crate) fn link(&self, to: Rank) -> Option<&Link> {
        self.links.iter().find(|link| link.to == to)
    }
}

impl Link {
    pub(crate) fn new(to: Rank, lanes: Vec<Lane>) -> Self {
        Self { to, busy: AtomicBool::new(false), state: Mutex::new(State { connection: None, lanes }) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something was accepted.
    pub(crate) fn set_busy(&self) {
        self.busy.store(true, Ordering::Relaxed);
    }

    /// Carries out what is due from `source` to `sink`. `mine`: by the rank that posts here; others leave alone what is in use. Whether something
    /// is under way still.
    pub(crate) fn carry(&self, network: &Network, source: &End, sink: &End, mine: bool) -> bool {
        if !self.busy.load(Ordering::Relaxed) {
            return false;
        }
        let state = if mine { Some(self.lock()) } else { self.state.try_lock().ok() };
        let Some(mut state) = state else { return true };
        state.carry(network, source, sink);
        let busy = state.lanes.iter().any(|lane| !lane.is_idle());
        self.busy.store(busy, Ordering::Relaxed);
        busy
    }
}

impl State {
    fn carry(&mut self, network: &Network, source: &End, sink: &End) {
        let now = network.now();
        if !self.lanes.iter().any(|lane| lane.is_due(now)) {
            return;
        }
        if network.has_lost(source.me, sink.me) {
            let before = now.saturating_sub(network.answer_timeout());
            self.lanes.iter_mut().for_each(|lane| lane.give_up(before));
            return;
        }
        let pass = sink.gate.enter(source.me, self.connection);
        if let Some(pass) = &pass {
            self.lanes.iter_mut().for_each(|lane| lane.deliver(&source.window, &sink.window, now, pass));
        }
        if !pass.is_some_and(|pass| pass.is_valid()) {
            self.lanes.iter_mut().filter(|lane| !lane.is_idle()).for_each(|lane| lane.fail(LaneCause::NoAnswer));
        }
    }
}
