//! Where one rank's window is reached, and the lanes that lead from it.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ep_core::{LaneCause, Rank};

use crate::gate::{Gate, Pass};
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
    /// Rises where something has landed, or may have changed otherwise than by a verb: until then no lane is further than it was.
    landed: AtomicU64,
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
    /// Kept for their room: the lanes of which something is due, and the last mark that each way has reached.
    due: Vec<usize>,
    reached: Vec<u64>,
}

/// A link's lanes, for whoever changes them otherwise than by a verb.
#[derive(Debug)]
pub(crate) struct Changed<'a> {
    state: MutexGuard<'a, State>,
    landed: &'a AtomicU64,
}

impl Deref for Changed<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Changed<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Changed<'_> {
    fn drop(&mut self) {
        self.landed.fetch_add(1, Ordering::Release);
    }
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
            landed: AtomicU64::new(0),
            state: Mutex::new(State {
                connection: None,
                lanes,
                inside: false,
                aloft: Vec::new(),
                due: Vec::new(),
                reached: Vec::new(),
            }),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same for whoever lets them fail, renews them, or lets all land.
    pub(crate) fn change(&self) -> Changed<'_> {
        Changed { state: self.lock(), landed: &self.landed }
    }

    /// A number that is another one when something has landed since, or has failed.
    pub(crate) fn landed(&self) -> u64 {
        self.landed.load(Ordering::Acquire)
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
        if state.carry(network, source, sink) {
            self.landed.fetch_add(1, Ordering::Release);
        }
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
    /// Whether something has landed, or has failed.
    fn carry(&mut self, network: &Network, source: &End, sink: &End) -> bool {
        let landed = self.land(source, sink);
        let now = network.now();
        self.due.clear();
        self.due.extend((0..).zip(&self.lanes).filter(|(_, lane)| lane.is_due(now)).map(|(at, _)| at));
        if self.due.is_empty() {
            return landed;
        }
        if network.has_lost(source.me, sink.me) {
            let before = now.saturating_sub(network.answer_timeout());
            self.due.iter().for_each(|&at| self.lanes[at].give_up(before));
            return true;
        }
        let pass = sink.gate.enter(source.me, self.connection);
        self.inside = true;
        self.aloft.resize_with(sink.window.ways(), VecDeque::new);
        let mut well = true;
        if let Some(pass) = &pass {
            for way in 0..sink.window.ways() {
                well &= self.deliver(way, source, sink, now, pass);
            }
        }
        if !pass.is_some_and(|pass| pass.is_valid()) {
            self.lanes.iter_mut().filter(|lane| !lane.is_idle()).for_each(|lane| lane.fail(LaneCause::NoAnswer));
            well = false;
        }
        // Where the peer's window is one of the host, what was just delivered has landed.
        self.land(source, sink) || landed || !well
    }

    /// Hands on what is due by one way. Whether no lane has failed.
    fn deliver(&mut self, way: usize, source: &End, sink: &End, now: u64, pass: &Pass<'_>) -> bool {
        let Self { lanes, due, aloft, .. } = self;
        let before = aloft[way].iter().map(|&(_, verbs)| verbs).sum();
        let mut room = MOST_ALOFT.saturating_sub(before);
        let (mut verbs, mut well) = (0, true);
        let mine = || due.iter().copied().filter(|&at| way_of(at, sink) == way);
        for at in mine() {
            let some = lanes[at].deliver((way, room), &source.window, &sink.window, now, pass);
            (room, verbs) = (room - some, verbs + some);
            well &= lanes[at].broken.is_none();
        }
        if verbs > 0 {
            // One for all of them: asking a driver takes as long as a copy.
            let mark = sink.window.mark(way);
            mine().for_each(|at| lanes[at].depart(mark));
            aloft[way].extend(mark.map(|mark| (mark, verbs)));
            well &= mark.is_some();
        }
        well
    }

    /// Looks how far the peer's window is: when nothing is in the air any more, its gate may close. Whether something has landed.
    fn land(&mut self, source: &End, sink: &End) -> bool {
        if !self.inside {
            return false;
        }
        self.reached.clear();
        self.reached.extend((0..sink.window.ways()).map(|way| sink.window.reached(way)));
        for (aloft, reached) in self.aloft.iter_mut().zip(&self.reached) {
            while aloft.pop_front_if(|(mark, _)| *mark <= *reached).is_some() {}
        }
        let mut landed = false;
        for (at, lane) in self.lanes.iter_mut().enumerate().filter(|(_, lane)| lane.is_in_the_air()) {
            landed |= lane.land(self.reached[way_of(at, sink)]);
        }
        self.leave(source, sink);
        landed
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
            self.lanes.iter_mut().for_each(|lane| _ = lane.land(u64::MAX));
            self.aloft.clear();
            self.leave(source, sink);
        }
    }
}
