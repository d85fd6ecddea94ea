//! Which access is ordered after which, by vector clocks.
//!
//! *Actors* do things: the main line of each rank, and each role of each rank while its port is open. Opening a port
//! forks from the main line, dropping it joins into it. What a lane does on its own is done by two more components:
//!
//! - *arrival*: the writes of puts to their destination. A publish carries the lane's arrivals so far to whoever sees
//!   it (F3);
//! - *settlement*: the reads of puts from their source (F5), and both ends of gets. Only a flush of the poster learns
//!   of it, and passes it on with what it publishes afterwards (F9).
//!
//! **Units** (F11) announce nothing but themselves. Who polls them and finds that they have come may have read exactly these bytes, and
//! learns what their poster, and whoever it knows of, had *read* before (F9): its *credits*, which allow to overwrite, and
//! nothing else.
//!
//! A put or get touches both its ranges when it is *posted*, in the lane's name, and must be ordered after what was
//! done there before. So what is found does not depend on when effects are delivered.

mod clock;
mod shadow;

use std::collections::BTreeMap;
use std::rc::Rc;

use ep_core::port::{Role, Span, Tag};
use ep_core::{Rank, RankSet};
use rustc_hash::FxHashMap;

use self::clock::{Clock, join, known, learn};
use self::shadow::{Knowledge, Mark, Posted, Shadow};
use crate::violation::{Access, AccessKind};

/// Two accesses that nothing orders, and the window they are in.
#[derive(Debug)]
pub(crate) struct Conflict {
    pub(crate) window: Rank,
    pub(crate) earlier: Access,
    pub(crate) later: Access,
}

#[derive(Debug)]
struct Actor {
    rank: Rank,
    role: Option<Role>,
    component: u32,
    clock: Clock,
    /// What it knows to have been read, beside all that it knows of.
    credits: Clock,
}

impl Actor {
    fn knows(&self) -> Knowledge<'_> {
        Knowledge { clock: &self.clock, credits: &self.credits }
    }

    /// The event that it is at.
    fn event(&self) -> u32 {
        known(&self.clock, self.component)
    }

    /// Begins the next event: what it does from here on is not covered by what it passed on before.
    fn tick(&mut self) {
        let next = self.event() + 1;
        learn(&mut self.clock, self.component, next);
    }
}

/// The components of a lane, made when it first transfers, and who posted last.
#[derive(Clone, Copy, Debug, Default)]
struct LaneTrack {
    arrival: Option<u32>,
    settlement: Option<u32>,
    /// Actor and its event.
    poster: Option<(u32, u32)>,
}

/// What a publish carries to whoever sees it.
#[derive(Debug, Default)]
pub(crate) struct Carried {
    clock: Clock,
    credits: Clock,
    /// The publisher's component and its event, in which it passed on nothing else.
    publisher: (u32, u32),
    /// The lane's arrivals and the last ticket of them.
    arrival: Option<(u32, u32)>,
}

impl Carried {
    /// Whether there is nothing to learn: who knows the publisher's event has all of its clock, but for the arrivals.
    fn known_to(&self, clock: &[u32]) -> bool {
        let knows = |(component, at)| known(clock, component) >= at;
        knows(self.publisher) && self.arrival.is_none_or(knows)
    }
}

/// One end of a put or get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) window: Rank,
    pub(crate) span: Span,
}

/// Clocks of all actors and the history of all windows.
#[derive(Debug)]
pub(crate) struct Tracker {
    components: u32,
    /// The main lines by rank, then roles.
    actors: Vec<Actor>,
    roles: BTreeMap<(Rank, Role), u32>,
    lanes: Vec<LaneTrack>,
    shadows: Vec<Shadow>,
    /// What the last publish of each cell carried.
    cells: FxHashMap<(Rank, u64), Carried>,
    /// Clocks to use again.
    spare: Vec<Carried>,
    /// Ranks that others have given up: what they still pull concerns nobody.
    given_up: RankSet,
}

impl Tracker {
    pub(crate) fn new(ranks: u32) -> Self {
        let mut tracker = Self {
            components: 0,
            actors: Vec::new(),
            roles: BTreeMap::new(),
            lanes: Vec::new(),
            shadows: (0..ranks).map(|_| Shadow::default()).collect(),
            cells: FxHashMap::default(),
            spare: Vec::new(),
            given_up: RankSet::new(),
        };
        for rank in 0..ranks {
            tracker.add_actor(Rank(rank), None);
        }
        tracker
    }

    /// The actor of a rank's main line.
    pub(crate) fn main(rank: Rank) -> u32 {
        rank.0
    }

    /// A port was opened: returns its actor.
    pub(crate) fn open(&mut self, rank: Rank, role: Role) -> u32 {
        let actor = match self.roles.get(&(rank, role)) {
            Some(&actor) => actor,
            None => {
                let actor = self.add_actor(rank, Some(role));
                self.roles.insert((rank, role), actor);
                actor
            }
        };
        self.pass(Self::main(rank), actor);
        actor
    }

    /// The port of `actor` was dropped.
    pub(crate) fn close(&mut self, actor: u32) {
        self.pass(actor, Self::main(self.actors[actor as usize].rank));
    }

    /// The actor itself touched bytes of its window.
    pub(crate) fn access(&mut self, actor: u32, kind: AccessKind, span: Span) -> Result<(), Conflict> {
        let Actor { rank, component, .. } = self.actors[actor as usize];
        let at = self.actors[actor as usize].event();
        self.touch(rank, Mark { component, at, actor, kind, span })
    }

    /// The actor posted a put.
    pub(crate) fn put(&mut self, actor: u32, lane: u32, ticket: u64, source: End, target: End) -> Result<(), Conflict> {
        let (arrival, settlement) = (self.arrival(lane), self.settlement(lane));
        let at = ticket as u32;
        let (read, write) = (AccessKind::PutSource, AccessKind::PutDestination);
        self.touch(source.window, Mark { component: settlement, at, actor, kind: read, span: source.span })?;
        self.touch(target.window, Mark { component: arrival, at, actor, kind: write, span: target.span })
    }

    /// The actor posted a get.
    pub(crate) fn get(&mut self, actor: u32, lane: u32, ticket: u64, source: End, target: End) -> Result<(), Conflict> {
        let component = self.settlement(lane);
        let at = ticket as u32;
        let (read, write) = (AccessKind::GetSource, AccessKind::GetDestination);
        if !self.given_up.contains(self.actors[actor as usize].rank) {
            self.touch(source.window, Mark { component, at, actor, kind: read, span: source.span })?;
        }
        self.touch(target.window, Mark { component, at, actor, kind: write, span: target.span })
    }

    /// The actor posted a put of units.
    pub(crate) fn put_units(
        &mut self,
        actor: u32,
        (lane, ticket): (u32, u64),
        (source, target): (End, End),
        tag: Tag,
    ) -> Result<(), Conflict> {
        let (arrival, settlement) = (self.arrival(lane), self.settlement(lane));
        let at = ticket as u32;
        let kind = AccessKind::PutSource;
        self.touch(source.window, Mark { component: settlement, at, actor, kind, span: source.span })?;
        let poster = &self.actors[actor as usize];
        let mut credits = poster.clock.clone();
        join(&mut credits, &poster.credits);
        let posted = Rc::new(Posted { tag, poster: (poster.component, poster.event()), credits });
        let kind = AccessKind::UnitsDestination;
        let mark = Mark { component: arrival, at, actor, kind, span: target.span };
        let touched = self.shadows[target.window.index()].put_units(&mark, &posted, poster.knows());
        // What it reads from here on, the units say nothing of.
        self.actors[actor as usize].tick();
        touched.map_err(|earlier| self.conflict(target.window, &earlier, &mark))
    }

    /// The actor polled for units of `tag` in its window: all of them, or not all, had come.
    pub(crate) fn poll_units(&mut self, actor: u32, span: Span, tag: Tag, come: bool) -> Result<(), Conflict> {
        let Actor { rank, component, .. } = self.actors[actor as usize];
        let at = self.actors[actor as usize].event();
        let mark = Mark { component, at, actor, kind: AccessKind::Poll, span };
        let mut heard = Vec::new();
        let knows = self.actors[actor as usize].knows();
        let touched = self.shadows[rank.index()].poll(&mark, come.then_some(tag), knows, &mut heard);
        touched.map_err(|earlier| self.conflict(rank, &earlier, &mark))?;
        let Actor { clock, credits, .. } = &mut self.actors[actor as usize];
        for posted in heard {
            let (component, at) = posted.poster;
            if known(clock, component).max(known(credits, component)) < at {
                join(credits, &posted.credits);
            }
        }
        Ok(())
    }

    /// `members` go on without `rank`, whose lanes these are: what it has pulled, or is pulling, need not have ended.
    pub(crate) fn gave_up(&mut self, rank: Rank, lanes: impl Iterator<Item = u32>, members: &[Rank]) {
        self.given_up.insert(rank);
        for lane in lanes {
            let Some(settlement) = self.track(lane).settlement else { continue };
            for &member in members {
                learn(&mut self.actors[Self::main(member) as usize].clock, settlement, u32::MAX);
            }
        }
    }

    /// The actor posts on a lane: returns the actor that posted before and is not ordered before this one (F4).
    pub(crate) fn posts(&mut self, actor: u32, lane: u32) -> Option<(Rank, Option<Role>)> {
        let now = (actor, self.actors[actor as usize].event());
        let (before, event) = self.track(lane).poster.replace(now)?;
        let Actor { rank, role, component, .. } = self.actors[before as usize];
        (known(&self.actors[actor as usize].clock, component) < event).then_some((rank, role))
    }

    /// The actor publishes after ticket `issued` of the lane: returns what the cell's reader learns.
    pub(crate) fn publish(&mut self, actor: u32, lane: u32, issued: u64) -> Carried {
        let mut carried = self.spare.pop().unwrap_or_default();
        carried.arrival = self.track(lane).arrival.map(|arrival| (arrival, issued as u32));
        let actor = &mut self.actors[actor as usize];
        carried.publisher = (actor.component, actor.event());
        carried.clock.clear();
        carried.clock.extend_from_slice(&actor.clock);
        carried.credits.clear();
        carried.credits.extend_from_slice(&actor.credits);
        if let Some((arrival, issued)) = carried.arrival {
            learn(&mut carried.clock, arrival, issued);
        }
        actor.tick();
        carried
    }

    /// A publish reached the cell at `at` of `rank`'s window.
    pub(crate) fn landed(&mut self, rank: Rank, at: u64, carried: Carried) {
        self.spare.extend(self.cells.insert((rank, at), carried));
    }

    /// The actor saw the value of the cell at `at` of its window.
    pub(crate) fn saw(&mut self, actor: u32, at: u64) {
        let actor = &mut self.actors[actor as usize];
        if let Some(carried) = self.cells.get(&(actor.rank, at)).filter(|carried| !carried.known_to(&actor.clock)) {
            join(&mut actor.clock, &carried.clock);
            join(&mut actor.credits, &carried.credits);
        }
    }

    /// The actor's flush of a lane up to `ticket` returned.
    pub(crate) fn flushed(&mut self, actor: u32, lane: u32, ticket: u64) {
        if let Some(settlement) = self.track(lane).settlement {
            learn(&mut self.actors[actor as usize].clock, settlement, ticket as u32);
        }
    }

    /// Nothing of a lane of `rank` up to `ticket` is in flight any more, and the rank knows: its main line, and its roles, which run on the
    /// same thread.
    pub(crate) fn settled(&mut self, rank: Rank, lane: u32, ticket: u64) {
        let LaneTrack { arrival, settlement, .. } = *self.track(lane);
        for actor in self.actors.iter_mut().filter(|actor| actor.rank == rank) {
            for component in [arrival, settlement].into_iter().flatten() {
                learn(&mut actor.clock, component, ticket as u32);
            }
        }
    }

    /// The main lines of `ranks` met: each knows what any of them knew.
    pub(crate) fn met(&mut self, ranks: &[Rank]) {
        let (mut all, mut read) = (Clock::new(), Clock::new());
        for &rank in ranks {
            join(&mut all, &self.actors[Self::main(rank) as usize].clock);
            join(&mut read, &self.actors[Self::main(rank) as usize].credits);
        }
        for &rank in ranks {
            let main = &mut self.actors[Self::main(rank) as usize];
            join(&mut main.clock, &all);
            join(&mut main.credits, &read);
            main.tick();
        }
    }

    fn add_actor(&mut self, rank: Rank, role: Option<Role>) -> u32 {
        let component = self.add_component();
        let mut actor = Actor { rank, role, component, clock: Clock::new(), credits: Clock::new() };
        actor.tick();
        self.actors.push(actor);
        (self.actors.len() - 1) as u32
    }

    fn add_component(&mut self) -> u32 {
        self.components += 1;
        self.components - 1
    }

    /// What `from` did so far comes before what `to` does from here on.
    fn pass(&mut self, from: u32, to: u32) {
        let Actor { clock, credits, .. } = &mut self.actors[from as usize];
        let (clock, credits) = (std::mem::take(clock), std::mem::take(credits));
        join(&mut self.actors[to as usize].clock, &clock);
        join(&mut self.actors[to as usize].credits, &credits);
        self.actors[from as usize].clock = clock;
        self.actors[from as usize].credits = credits;
        self.actors[from as usize].tick();
    }

    fn track(&mut self, lane: u32) -> &mut LaneTrack {
        let index = lane as usize;
        if self.lanes.len() <= index {
            self.lanes.resize(index + 1, LaneTrack::default());
        }
        &mut self.lanes[index]
    }

    fn arrival(&mut self, lane: u32) -> u32 {
        if let Some(component) = self.track(lane).arrival {
            return component;
        }
        let component = self.add_component();
        *self.track(lane).arrival.insert(component)
    }

    fn settlement(&mut self, lane: u32) -> u32 {
        if let Some(component) = self.track(lane).settlement {
            return component;
        }
        let component = self.add_component();
        *self.track(lane).settlement.insert(component)
    }

    fn touch(&mut self, window: Rank, mark: Mark) -> Result<(), Conflict> {
        let touched = self.shadows[window.index()].touch(&mark, self.actors[mark.actor as usize].knows());
        touched.map_err(|earlier| self.conflict(window, &earlier, &mark))
    }

    fn conflict(&self, window: Rank, earlier: &Mark, later: &Mark) -> Conflict {
        Conflict { window, earlier: self.named(earlier), later: self.named(later) }
    }

    fn named(&self, mark: &Mark) -> Access {
        let Actor { rank, role, .. } = self.actors[mark.actor as usize];
        Access { rank, role, kind: mark.kind, span: mark.span }
    }
}
