//! One rank's lanes: its end of the network, and the ends of its peers.

use std::process;
use std::sync::{Arc, PoisonError, RwLock};

use ep_core::layout::Layout;
use ep_core::port::{LaneId, LaneKind, Offset, Scope, Span, Ticket};
use ep_core::transport::{DevicePlace, Lanes, Place, WindowMemory};
use ep_core::{Error, Fault, LaneCause, Rank};
use zerocopy::IntoBytes;

use crate::carrier::Carrier;
use crate::end::{End, Link};
use crate::gate::{Gate, Page};
use crate::lane::{Lane, Verb};
use crate::network::{Network, Settings};
use crate::offer::Offer;
use crate::pace::Pace;
use crate::window::{self, File, Window};

/// The lanes of one rank over a network made of software.
#[derive(Debug)]
pub struct LoopLanes {
    pub(crate) own: Arc<End>,
    number: u64,
    network: Arc<Network>,
    pace: Pace,
    /// Where cells lie.
    cells: Vec<Span>,
    places: Places,
    ranks: u32,
    connection: u32,
    /// As connected, in the order of the links; none: it takes no part.
    peers: Vec<Option<Arc<End>>>,
    /// Where nobody else carries what this rank posts: it is a process, and no proxy makes progress for it.
    carrier: Option<Carrier>,
}

impl LoopLanes {
    pub(crate) fn open(settings: Settings, network: Arc<Network>, place: DevicePlace<'_>) -> Result<Self, Error> {
        let DevicePlace { me, layout, window } = place;
        let window = match window {
            WindowMemory::Device { copies: Some(copies), .. } => Window::Device(Arc::clone(copies)),
            _ => Window::Host(mapped(place.on_host("the loop")?, settings.processes)?),
        };
        let links = place.peers(settings.far_lanes()).map(|(to, kinds)| {
            let lane = |kind| Lane::new(LaneId { peer: to, kind }, settings.depth);
            Link::new(to, kinds.into_iter().map(lane).collect())
        });
        let links: Vec<_> = links.collect();
        let places = Places::of(&links, layout);
        let peers = links.iter().map(|_| None).collect();
        let ranks = layout.topology().ranks();
        let (gate, token) = gate(&settings, ranks)?;
        let own = Arc::new(End::new(me, window, gate, links));
        let number = token.unwrap_or_else(|| network.add(&own));
        let alone = settings.processes && matches!(own.window, Window::Host(_));
        let carrier = alone.then(|| Carrier::start(Arc::clone(&own), Arc::clone(&network))).transpose();
        let carrier = carrier
            .map_err(|error| Error::broken("a thread of the loop", error, "raise the limit of threads (ulimit -u)"))?;
        let (pace, cells) = (settings.pace, cells_of(layout));
        Ok(Self { own, number, network, pace, cells, places, ranks, connection: 0, peers, carrier })
    }

    pub(crate) fn my_offer(&self) -> Offer {
        let (network, process, gate) = match &self.own.gate {
            Gate::Threads(_) => (self.network.id, 0, 0),
            Gate::Processes(page) => (0, process::id(), page.file()),
        };
        Offer {
            network: network.into(),
            end: self.number.into(),
            bytes: self.own.window.bytes().into(),
            device: u32::from(matches!(self.own.window, Window::Device(_))).into(),
            connection: self.connection.into(),
            process: process.into(),
            gate: gate.into(),
        }
    }

    /// The end of a rank of another process, whose window is called `name`.
    fn reach(&self, rank: Rank, offer: &Offer, name: &[u8]) -> Result<End, Error> {
        let (process, gate) = (offer.process.get(), offer.gate.get());
        let page = Page::open(process, gate, self.ranks, offer.end.get()).map_err(|error| {
            let what = format_args!("rank {rank} over the loop: process {process}, {error}");
            Error::unsupported(what, window::ONE_HOST)
        })?;
        Ok(End::new(rank, self.own.window.open(process, name)?, Gate::Processes(page), Vec::new()))
    }

    /// Does something with a lane that is not broken.
    fn on<T>(&self, verb: &'static str, id: LaneId, act: impl FnOnce(&Link, &mut Lane, &End) -> T) -> Result<T, Fault> {
        let refused = || Fault::NotOffered { verb, lane: id };
        let (at, lane) = self.places.of_lane(id).ok_or_else(refused)?;
        let link = &self.own.links[at];
        let mut state = link.lock();
        let lane = state.lanes.get_mut(lane).filter(|lane| lane.id == id).ok_or_else(refused)?;
        lane.fault().map_or(Ok(()), Err)?;
        let peer = self.peers[at].as_ref().ok_or(Fault::LaneBroken { lane: id, cause: LaneCause::Flushed })?;
        Ok(act(link, lane, peer))
    }

    /// Gives a verb its time on the way and a place in the lane, which has room.
    fn accept(&self, link: &Link, lane: &mut Lane, peer: &End, verb: Verb) {
        let bytes = verb.bytes();
        let left = {
            let mut free = self.own.out_free.lock().unwrap_or_else(PoisonError::into_inner);
            *free = self.pace.leaves(self.network.now(), *free, bytes);
            *free
        };
        let arrived = {
            let mut free = peer.in_free.lock().unwrap_or_else(PoisonError::into_inner);
            *free = self.pace.arrives(left, *free, bytes);
            *free
        };
        lane.accept(verb, arrived.saturating_add(self.network.delay(self.own.me, peer.me)));
        link.set_busy();
    }

    /// Ends the connection: when it returns, nothing is in the air that came or went by it.
    fn close(&self) {
        self.own.gate.set_up(None);
        self.own.window.finish();
        for (link, peer) in self.own.links.iter().zip(&self.peers) {
            if let Some(peer) = peer {
                link.change().land_all(&self.own, peer);
            }
        }
    }

    fn set_peers(&mut self, peers: Vec<Option<Arc<End>>>) {
        if let Some(carrier) = &self.carrier {
            carrier.connect(peers.clone());
        }
        self.peers = peers;
    }

    /// Carries what is due to a rank, where nobody else does, and leaves the rest to the carrier.
    fn hand_over(&self, to: Rank) {
        let Some(carrier) = &self.carrier else { return };
        let Some((link, Some(peer))) = self.link(to) else { return };
        if link.carry(&self.network, &self.own, peer, true) {
            carrier.call();
        }
    }

    /// The link to a rank, and its other end, which is none before they have met.
    fn link(&self, to: Rank) -> Option<(&Link, Option<&Arc<End>>)> {
        self.places.link(to).map(|at| (&self.own.links[at], self.peers.get(at).and_then(Option::as_ref)))
    }

    /// Accepts a verb, unless the lane is full.
    fn try_accept(&self, link: &Link, lane: &mut Lane, peer: &End, verb: Verb) -> bool {
        let room = lane.has_room();
        if room {
            self.accept(link, lane, peer, verb);
        }
        room
    }
}

/// Which link leads to a rank, and which of its lanes is which: asked for at every verb.
#[derive(Debug)]
struct Places {
    /// Of each rank; none: no lane leads there.
    links: Vec<Option<usize>>,
    /// `[links, kinds]`, by [`LaneKind::index`]; those that share the queue of another have none.
    lanes: Vec<Option<usize>>,
    kinds: usize,
}

impl Places {
    fn of(links: &[Link], layout: &Layout) -> Self {
        let kinds = LaneKind::count(layout.tracks());
        let mut places = Self {
            links: vec![None; layout.topology().ranks() as usize],
            lanes: vec![None; links.len() * kinds],
            kinds,
        };
        for (at, link) in links.iter().enumerate() {
            places.links[link.to.index()] = Some(at);
            for (number, lane) in link.lock().lanes.iter().enumerate() {
                places.lanes[at * kinds + lane.id.kind.index()] = Some(number);
            }
        }
        places
    }

    fn link(&self, peer: Rank) -> Option<usize> {
        self.links.get(peer.index()).copied().flatten()
    }

    /// The link of a lane, and its number there. Of kinds that have a numbering of their own it may be another lane.
    fn of_lane(&self, id: LaneId) -> Option<(usize, usize)> {
        let (at, kind) = (self.link(id.peer)?, id.kind.index());
        let lane = (kind < self.kinds).then(|| self.lanes[at * self.kinds + kind])?;
        lane.map(|lane| (at, lane))
    }
}

/// The gate of a rank; between processes with what tells it from others.
fn gate(settings: &Settings, ranks: u32) -> Result<(Gate, Option<u64>), Error> {
    if !settings.processes {
        return Ok((Gate::Threads(RwLock::new(None)), None));
    }
    let failed = |error: &dyn std::fmt::Display| {
        Error::broken("the loop's memory between processes", error, "let the system have more memory, and descriptors")
    };
    let token = getrandom::u64().map_err(|error| failed(&error))?;
    let page = Page::new(ranks, token).map_err(|error| failed(&error))?;
    Ok((Gate::Processes(page), Some(token)))
}

/// A window in memory of the host.
fn mapped(place: Place<'_>, shared: bool) -> Result<File, Error> {
    let Place { me, layout, window } = place;
    File::own(window, layout.window_bytes(), shared).map_err(|error| {
        let what = format_args!("the mapping of rank {me}'s window for the loop");
        Error::broken(what, error, "raise the limit of the address space (ulimit -v), or take a smaller arena")
    })
}

/// Where cells lie: those of lanes, and those that announce rows of kernels.
fn cells_of(layout: &Layout) -> Vec<Span> {
    let cells = layout.regions().into_iter().filter(|region| region.name.ends_with("cells"));
    cells.map(|region| region.span).collect()
}

impl Lanes for LoopLanes {
    fn offer(&mut self) -> Result<Vec<u8>, Error> {
        self.close();
        for link in &self.own.links {
            let mut state = link.change();
            state.connection = None;
            state.lanes.iter_mut().for_each(|lane| lane.renew(Some(LaneCause::Flushed)));
        }
        self.set_peers(self.own.links.iter().map(|_| None).collect());
        self.connection += 1;
        let name = match &self.own.gate {
            Gate::Processes(_) => self.own.window.name()?,
            Gate::Threads(_) => Vec::new(),
        };
        Ok([self.my_offer().as_bytes(), &name].concat())
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        let mine = self.my_offer();
        let mut peers = Vec::with_capacity(self.own.links.len());
        for link in &self.own.links {
            let Some(told) = offers.get(link.to.index()).and_then(Option::as_deref) else {
                peers.push(None);
                continue;
            };
            let (theirs, name) = mine.fitting(link.to, told)?;
            let end = match &self.own.gate {
                Gate::Threads(_) => self.network.end(theirs.end.get()),
                Gate::Processes(_) => Some(Arc::new(self.reach(link.to, &theirs, name)?)),
            };
            if end.is_some() {
                let mut state = link.change();
                state.connection = Some(theirs.connection.get());
                state.lanes.iter_mut().for_each(|lane| lane.renew(None));
            }
            peers.push(end);
        }
        self.set_peers(peers);
        self.own.gate.set_up(Some(self.connection));
        Ok(())
    }

    fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Option<Ticket>, Fault> {
        if from.len > 0 {
            let bytes = self.own.window.bytes();
            from.within(bytes)?;
            to.span(from.len).within(bytes)?;
        }
        self.on("put", lane, |link, lane, peer| {
            let accepted = from.len == 0 || self.try_accept(link, lane, peer, Verb::Put { from, to });
            accepted.then(|| Ticket(lane.issued()))
        })
    }

    fn raise(&mut self, lane: LaneId, at: Offset, bits: u64) -> Result<bool, Fault> {
        at.span(8).within(self.own.window.bytes())?;
        let is_cell = |cells: &Span| cells.offset.0 <= at.0 && at.0 + 8 <= cells.end();
        if !at.0.is_multiple_of(8) || !self.cells.iter().any(is_cell) {
            return Err(Fault::NotOffered { verb: "publish to no cell", lane });
        }
        let raised =
            self.on("publish", lane, |link, lane, peer| self.try_accept(link, lane, peer, Verb::Raise { at, bits }));
        self.hand_over(lane.peer);
        raised
    }

    fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<bool, Fault> {
        self.on("flush", lane, |_, lane, _| lane.is_settled(upto.0))
    }

    fn landed(&self, peer: Rank) -> Option<u64> {
        self.places.link(peer).map(|at| self.own.links[at].landed())
    }

    fn progress(&mut self) {
        for (link, peer) in self.own.links.iter().zip(&self.peers) {
            let Some(peer) = peer else { continue };
            link.carry(&self.network, &self.own, peer, true);
            if let Some(back) = peer.link(self.own.me).filter(|_| !self.own.window.has_proxy()) {
                back.carry(&self.network, peer, &self.own, false);
            }
        }
    }

    fn probe(&mut self, peer: Rank) {
        let Some((link, Some(end))) = self.link(peer) else { return };
        let mut state = link.lock();
        // What is under way tells by itself.
        let idle = state.lanes.iter().all(|lane| lane.is_idle() && lane.broken.is_none());
        if let Some(lane) = state.lanes.first_mut().filter(|_| idle) {
            self.accept(link, lane, end, Verb::Probe);
        }
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        self.link(peer)?.0.lock().lanes.iter().find_map(Lane::fault)
    }

    fn drain(&mut self, scope: Scope) -> bool {
        self.progress();
        let idle = |lane: &Lane| !scope.covers(lane.id) || lane.is_idle();
        self.own.links.iter().all(|link| link.lock().lanes.iter().all(idle))
    }

    fn cut(&mut self, scope: Scope) {
        let held = |lane: &&mut Lane| scope.covers(lane.id) && !lane.is_idle();
        for link in &self.own.links {
            link.change().lanes.iter_mut().filter(held).for_each(|lane| lane.fail(LaneCause::Cut));
        }
    }

    fn is_copied(&self) -> bool {
        matches!(self.own.window, Window::Device(_))
    }
}

impl Drop for LoopLanes {
    fn drop(&mut self) {
        // Whoever posts here finds no answer; nothing that was posted here is carried on.
        self.close();
        self.own
            .links
            .iter()
            .for_each(|link| link.change().lanes.iter_mut().for_each(|lane| lane.fail(LaneCause::Cut)));
        self.network.remove(self.number);
    }
}
