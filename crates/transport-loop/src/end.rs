//! Where one rank's window is reached, and the lanes that lead from it.

use std::collections::VecDeque;
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
    /// Whether the peer's gate is held for what is in the air.
    inside: bool,
    /// By each way of the peer's window: marks that are not reached, and the verbs before each.
    aloft: Vec<VecDeque<(u64, usize)>>,
}

/// Verbs in the air by one way, at most: where a driver's queue is full it waits in the middle of a call, and all other calls with it.
const MOST_ALOFT: usize = 64;

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
        Self {
            to,
            busy: AtomicBool::new(false),
            state: Mutex::new(State { connection: None, lanes, inside: false, aloft: Vec::new() }),
        }
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

/// The way of a link's lane. A lane of rows and that of their credit come one after the other.
fn way_of(lane: usize, sink: &End) -> usize {
    lane / 2 % sink.window.ways()
}

impl State {
    fn carry(&mut self, network: &Network, source: &End, sink: &End) {
        self.land(source, sink);
        let now = network.now();
        if !self.lanes.iter().any(|lane| lane.is_due(now)) {
            return;
        }
        let mut due: Vec<Vec<&mut Lane>> = (0..sink.window.ways()).map(|_| Vec::new()).collect();
        for (at, lane) in self.lanes.iter_mut().enumerate().filter(|(_, lane)| lane.is_due(now)) {
            due[way_of(at, sink)].push(lane);
        }
        if network.has_lost(source.me, sink.me) {
            let before = now.saturating_sub(network.answer_timeout());
            due.iter_mut().flatten().for_each(|lane| lane.give_up(before));
            return;
        }
        let pass = sink.gate.enter(source.me, self.connection);
        self.inside = true;
        self.aloft.resize_with(sink.window.ways(), VecDeque::new);
        if let Some(pass) = &pass {
            for (way, (lanes, aloft)) in due.iter_mut().zip(&mut self.aloft).enumerate() {
                let before = aloft.iter().map(|&(_, verbs)| verbs).sum();
                let mut room = MOST_ALOFT.saturating_sub(before);
                let mut verbs = 0;
                for lane in lanes.iter_mut() {
                    let some = lane.deliver((way, room), &source.window, &sink.window, now, pass);
                    (room, verbs) = (room - some, verbs + some);
                }
                if verbs > 0 {
                    // One for all of them: asking a driver takes as long as a copy.
                    let mark = sink.window.mark(way);
                    lanes.iter_mut().for_each(|lane| lane.depart(mark));
                    aloft.extend(mark.map(|mark| (mark, verbs)));
                }
            }
        }
        if !pass.is_some_and(|pass| pass.is_valid()) {
            self.lanes.iter_mut().filter(|lane| !lane.is_idle()).for_each(|lane| lane.fail(LaneCause::NoAnswer));
        }
        self.land(source, sink);
    }

    /// Looks how far the peer's window is: when nothing is in the air any more, its gate may close.
    fn land(&mut self, source: &End, sink: &End) {
        if !self.inside {
            return;
        }
        let reached: Vec<u64> = (0..sink.window.ways()).map(|way| sink.window.reached(way)).collect();
        for (aloft, reached) in self.aloft.iter_mut().zip(&reached) {
            while aloft.pop_front_if(|(mark, _)| *mark <= *reached).is_some() {}
        }
        for (at, lane) in self.lanes.iter_mut().enumerate().filter(|(_, lane)| lane.is_in_the_air()) {
            lane.land(reached[way_of(at, sink)]);
        }
        self.leave(source, sink);
    }

    fn leave(&mut self, source: &End, sink: &End) {
        if self.inside && !self.lanes.iter().any(Lane::is_in_the_air) {
            sink.gate.leave(source.me);
            self.inside = false;
        }
    }

    /// Waits for what is in the air.
    pub(crate) fn land_all(&mut self, source: &End, sink: &End) {
        if self.lanes.iter().any(Lane::is_in_the_air) {
            sink.window.finish();
            self.lanes.iter_mut().for_each(|lane| lane.land(u64::MAX));
            self.aloft.clear();
            self.leave(source, sink);
        }
    }
}
