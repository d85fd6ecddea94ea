//! One rank's lanes: its device, its window, and the queue pairs to every far peer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ep_core::layout::Queues;
use ep_core::port::{LaneId, LaneKind, Offset, Scope, Span, Ticket};
use ep_core::transport::{DevicePlace, Lanes, Place as Start, WindowCopies, WindowMemory};
use ep_core::{Fault, LaneCause, Layout, Rank, topology::Reach};
use ep_rdma::sys::{self, Zeroed as _};
use ep_rdma::{Connection, Domain, End, Header, Share, cells_of, random_psn};

use crate::device::{Chosen, choose};
use crate::error::Error;
use crate::lane::{Identifier, Lane, Place, SLOT, Scratch};
use crate::memory::Memory;
use crate::offer::{Offer, Raising};
use crate::settings::{Settings, Signal, automatic};
use crate::verbs::{Atomics, Completions, Depths, QueuePair, Region};

/// Completions taken at a time.
const TAKEN: usize = 32;
/// Atomics of a queue pair under way at a time, at most.
const ATOMICS: i32 = 16;
/// Lanes that identifiers of requests have room for.
const MOST_LANES: usize = 1 << 20;

/// The lanes of one rank over RoCE or InfiniBand.
#[derive(Debug)]
pub struct RoceLanes {
    // Queue pairs end first, then the memory that they name, then the queue that tells of them, then the device.
    lanes: Vec<Lane>,
    scratch: Region,
    window: Region,
    /// The cells of the window once more, without relaxed ordering: a write or an atomic into relaxed memory may become visible
    /// before the rows that it announces (rule F3).
    cells: Region,
    cells_at: Span,
    /// Where the window lies in memory of a device: how the host writes it.
    copies: Option<Arc<dyn WindowCopies>>,
    completions: Completions,
    domain: Domain,
    chosen: Chosen,
    me: Rank,
    layout: Layout,
    settings: Settings,
    signal: Signal,
    description: String,
    atomics_in: u8,
    atomics_out: u8,
    /// `[ranks]`: the kinds of the lanes there, and which they are.
    table: Vec<Vec<(LaneKind, usize)>>,
    /// Connections so far.
    connection: u32,
    psns: Vec<u32>,
}

/// How one rank's cells are raised, and why so.
fn choose_signal(
    settings: &Settings,
    atomics: bool,
    on_device: bool,
    device: &str,
) -> Result<(Signal, &'static str), Error> {
    let refuse = |limit: &str| {
        let (value, device, limit) =
            (settings.signal.map_or_else(String::new, |signal| signal.to_string()), device, limit);
        Err(ep_rdma::Error::Setting { what: "signal", value, device: device.to_owned(), limit: limit.to_owned() }
            .into())
    };
    match settings.signal {
        // The receiver's core raises the cells there.
        Some(Signal::Counting) if on_device => {
            refuse("ordered-write or fetch-add, as the window lies in memory of a GPU")
        }
        None if on_device && !atomics && settings.relaxed => {
            refuse("memory without relaxed ordering: it has no atomics")
        }
        None => Ok(automatic(atomics, settings.relaxed)),
        Some(Signal::FetchAdd) if !atomics => refuse("ordered-write or counting, as it has no atomics"),
        Some(Signal::OrderedWrite) if settings.relaxed => {
            refuse("fetch-add or counting, as the window is to have relaxed ordering")
        }
        Some(signal) => Ok((signal, "asked for")),
    }
}

impl RoceLanes {
    /// Opens the device of a rank, registers its window, connects nothing.
    pub(crate) fn open(settings: &Settings, start: DevicePlace<'_>) -> Result<Self, Error> {
        let DevicePlace { me, layout, window } = start;
        let (memory, copies) = memory_of(window, layout.window_bytes() as usize)?;
        let (topology, local) = (layout.topology(), layout.topology().local_of(me));
        let chosen = choose(&settings.devices.of(topology.node_of(me).0, local), local)?;
        let attributes = chosen.context.attributes()?;
        let device = chosen.context.name();
        let (signal, why) =
            choose_signal(settings, attributes.atomic_cap != sys::ATOMIC_NONE, copies.is_some(), device)?;

        let receives = if signal == Signal::Counting { settings.receives } else { 0 };
        let each = Scratch::bytes(settings.depth, receives);
        let mut table = vec![Vec::new(); topology.ranks() as usize];
        let mut lanes = Vec::new();
        for (peer, kinds) in start.peers(settings.far_lanes) {
            for kind in kinds {
                let offset = lanes.len() as u64 * each;
                table[peer.index()].push((kind, lanes.len()));
                let scratch = Scratch { offset, sends: settings.depth, receives };
                lanes.push(Lane::new(LaneId { peer, kind }, lanes.len(), signal, scratch));
            }
        }
        let entries = lanes.len() as u64 * u64::from(settings.depth + receives) + 1;
        limit("queue depth", settings.depth.max(receives).into(), attributes.max_qp_wr, device)?;
        limit("queue depth x lanes", entries, attributes.max_cqe, device)?;
        limit("lanes", lanes.len() as u64, MOST_LANES as i32, device)?;

        let domain = Domain::new(&chosen.context)?;
        let completions = Completions::new(&chosen.context, entries as u32)?;
        let mapped = Arc::new(memory);
        let cells_at = cells_of(layout);
        let part = cells_at.offset.0 as usize..cells_at.end() as usize;
        let atomic = signal == Signal::FetchAdd;
        let cells = Region::of_part(&domain, Arc::clone(&mapped), part, Share::Cells.access(atomic, settings.relaxed))?;
        let window = Region::new(&domain, mapped, Share::Rows.access(atomic, settings.relaxed))?;
        let description = format!("{}; signal {signal}: {why}; window in {}", chosen.reason, window.way());
        tracing::info!(rank = me.0, "{description}");
        let bytes = (lanes.len() as u64 * each).max(SLOT);
        let staged = Memory::anonymous(bytes as usize).map_err(map_failed("memory for short messages"))?;
        let scratch = Region::new(&domain, Arc::new(staged), sys::ACCESS_LOCAL_WRITE)?;
        let at_a_time = |most: i32| most.clamp(1, ATOMICS) as u8;
        Ok(Self {
            psns: vec![0; lanes.len()],
            lanes,
            scratch,
            window,
            cells,
            cells_at,
            copies,
            completions,
            domain,
            atomics_in: at_a_time(attributes.max_qp_rd_atom),
            atomics_out: at_a_time(attributes.max_qp_init_rd_atom),
            chosen,
            me,
            layout: layout.clone(),
            settings: settings.clone(),
            signal,
            description,
            table,
            connection: 0,
        })
    }

    /// Which device, port and address this rank uses, how its cells are raised, and why so.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// How its cells are raised.
    pub const fn signal(&self) -> Signal {
        self.signal
    }

    /// The largest packets that it sends and takes.
    fn mtu(&self) -> u32 {
        let most = self.chosen.port.mtu;
        self.settings.mtu.map_or(most, |asked| asked.min(most))
    }

    /// New queue pairs for all lanes, and what others need to know.
    fn renew(&mut self) -> Result<Offer, ep_core::Error> {
        let me = self.me;
        self.lanes.iter_mut().for_each(|lane| lane.close(LaneCause::Flushed));
        // What the ended queue pairs have left there would take room.
        self.poll();
        if self.connection > 0 {
            self.zero_far_cells()?;
        }
        self.connection += 1;
        let port = &self.chosen.port;
        let memory = self.window.memory();
        let (window, bytes) = (memory.address(), memory.bytes() as u64);
        let (rows_key, cells_key) = (self.window.remote_key(), self.cells.remote_key());
        let header = Header::new(port, self.mtu(), &self.chosen.gid).with_window(window, bytes, rows_key, cells_key);
        let own = Raising { signal: self.signal as u8, atomics: self.atomics_in };
        let Settings { depth, inline, .. } = self.settings;
        let receive = if self.signal == Signal::Counting { self.settings.receives } else { 0 };
        let mut ends = Vec::with_capacity(self.lanes.len());
        for (lane, psn) in self.lanes.iter_mut().zip(&mut self.psns) {
            let failed = |error: ep_rdma::Error| Error::from(error).on(me);
            let depths = Depths { send: depth, receive, inline };
            let context = &self.chosen.context;
            let pair = QueuePair::new(context, &self.domain, &self.completions, depths).map_err(failed)?;
            let access = Share::Cells.access(self.signal == Signal::FetchAdd, false);
            pair.init(port, access).map_err(failed)?;
            *psn = random_psn();
            ends.push(End::new(lane.id.peer, lane.id.kind, pair.number(), *psn));
            lane.begin(pair, self.connection, &self.scratch);
        }
        Ok(Offer { header, own, ends })
    }

    /// Cells that far ranks write, of both generations' banks: fetch-adds count from zero. Nothing arrives now.
    fn zero_far_cells(&self) -> Result<(), ep_core::Error> {
        let topology = self.layout.topology();
        let far = topology.all().filter(|&rank| topology.reach(self.me, rank) == Reach::Far);
        let spans = far.flat_map(|writer| [0, 1].map(|generation| self.layout.cells_of(writer, generation)));
        for at in spans.flat_map(|span| (span.offset.0..span.end()).step_by(8)) {
            match &self.copies {
                Some(copies) => copies.raise(0, Offset(at), 0)?,
                None => {
                    if let Some(word) = self.window.memory().word(at) {
                        word.store(0, Ordering::Release);
                    }
                }
            }
        }
        self.copies.as_ref().map_or(Ok(()), |copies| copies.finish())
    }

    fn join(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        for rank in self.layout.topology().all() {
            if self.table[rank.index()].is_empty() {
                continue;
            }
            match offers.get(rank.index()).and_then(Option::as_ref) {
                Some(offer) => self.join_one(rank, &Offer::from_bytes(rank, offer)?)?,
                None => self.of(Scope::Peer(rank)).for_each(|lane| lane.close(LaneCause::Flushed)),
            }
        }
        Ok(())
    }

    /// Connects all lanes to one rank.
    fn join_one(&mut self, rank: Rank, offer: &Offer) -> Result<(), Error> {
        let (header, Raising { signal, atomics }) = (&offer.header, offer.own);
        if signal != self.signal as u8 {
            let why =
                format!("it raises cells otherwise than this rank, by {}: set the same on all ranks", self.signal);
            return Err(ep_rdma::Error::Peer { rank, why }.into());
        }
        header.check(rank, &self.chosen.port, self.window.memory().bytes() as u64)?;
        let atomics = Atomics { out: self.atomics_out.min(atomics), served: self.atomics_in };
        let mtu = self.mtu();
        for &(kind, index) in &self.table[rank.index()] {
            let end = offer.end(rank, self.me, kind)?;
            let path = Connection::new(header, end, self.psns[index], mtu, self.settings.wire);
            let lane = &mut self.lanes[index];
            lane.target = Place { address: header.window(), key: header.rows_key.get(), apart: false };
            lane.cells_key = header.cells_key.get();
            if let Some(pair) = &lane.pair {
                pair.connect(&self.chosen.port, &self.chosen.gid, &path, atomics)?;
            }
        }
        Ok(())
    }

    fn of(&mut self, scope: Scope) -> impl Iterator<Item = &mut Lane> {
        self.lanes.iter_mut().filter(move |lane| scope.covers(lane.id))
    }

    /// The lane for a verb, unless it is broken.
    fn lane(&mut self, verb: &'static str, id: LaneId) -> Result<&mut Lane, Fault> {
        let found = self.table.get(id.peer.index()).and_then(|kinds| kinds.iter().find(|(kind, _)| *kind == id.kind));
        let &(_, index) = found.ok_or(Fault::NotOffered { verb, lane: id })?;
        let lane = &mut self.lanes[index];
        fault(lane).map_or(Ok(lane), Err)
    }

    /// Whether a lane has room for so many requests, after looking at what has completed.
    fn room(&mut self, verb: &'static str, id: LaneId, requests: u32) -> Result<bool, Fault> {
        let lane = self.lane(verb, id)?;
        if lane.has_room(requests) {
            return Ok(true);
        }
        lane.post();
        self.poll();
        self.lane(verb, id).map(|lane| lane.has_room(requests))
    }

    /// Takes in all that has completed.
    fn poll(&mut self) {
        let mut taken = [sys::WorkCompletion::zeroed(); TAKEN];
        loop {
            let count = match self.completions.poll(&mut taken) {
                Ok(count) => count,
                Err(error) => {
                    tracing::error!(rank = self.me.0, %error, "completions cannot be read");
                    self.lanes.iter_mut().for_each(|lane| lane.close(LaneCause::Refused(0)));
                    return;
                }
            };
            let window = self.window.memory();
            for completion in &taken[..count] {
                let identifier = Identifier::of(sys::identifier(completion));
                let Some(lane) = self.lanes.get_mut(identifier.lane) else { continue };
                lane.complete(identifier, completion, &self.scratch, |at, bits| {
                    if let Some(cell) = window.word(at) {
                        // After the writes that were counted: their completions were read before.
                        cell.store(bits, Ordering::Release);
                    }
                });
            }
            if count < TAKEN {
                return;
            }
        }
    }
}

fn fault(lane: &Lane) -> Option<Fault> {
    lane.broken.map(|cause| Fault::LaneBroken { lane: lane.id, cause })
}

fn map_failed(what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |error| Error::Map { what, error }
}

/// The window, and how the host writes it where that is memory of a device.
fn memory_of(window: WindowMemory<'_>, bytes: usize) -> Result<(Memory, Option<Arc<dyn WindowCopies>>), Error> {
    match window {
        WindowMemory::File(file) => Ok((Memory::of(file, bytes).map_err(map_failed("the window"))?, None)),
        WindowMemory::Device { copies: None, .. } => Err(Error::NoCopies),
        WindowMemory::Device { address, keeper, dmabuf, copies: Some(copies) } => {
            let descriptor = dmabuf.map(|file| file.try_clone_to_owned()).transpose();
            let keeper = keeper.map(Arc::clone);
            let memory = descriptor.and_then(|descriptor| Memory::of_device(address, bytes, descriptor, keeper));
            let memory = memory.map_err(map_failed("the window of a device"))?;
            Ok((memory, Some(Arc::clone(copies))))
        }
    }
}

/// Refuses more than a device has.
fn limit(what: &'static str, value: u64, most: i32, device: &str) -> Result<(), Error> {
    if value <= most.max(0) as u64 {
        return Ok(());
    }
    let (value, device, limit) = (value.to_string(), device.to_owned(), format!("at most {most}"));
    Err(ep_rdma::Error::Setting { what, value, device, limit }.into())
}

impl Lanes for RoceLanes {
    fn offer(&mut self) -> Result<Vec<u8>, ep_core::Error> {
        self.renew().map(|offer| offer.to_bytes())
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), ep_core::Error> {
        let me = self.me;
        self.join(offers).map_err(|error| error.on(me))
    }

    fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Option<Ticket>, Fault> {
        if from.len == 0 {
            return self.lane("put", lane).map(|lane| Some(Ticket(lane.issued())));
        }
        let bytes = self.layout.window_bytes();
        from.within(bytes)?;
        to.span(from.len).within(bytes)?;
        let longest = u64::from(self.chosen.port.max_message.max(1)).min(1 << 30);
        let requests = from.len.div_ceil(longest);
        if requests > self.lane("put", lane)?.depth().into() {
            return Err(Fault::NotOffered { verb: "a put of so many bytes", lane });
        }
        if !self.room("put", lane, requests as u32)? {
            return Ok(None);
        }
        let memory = self.window.memory();
        let address = memory.address() + from.offset.0;
        let source = Place { address, key: self.window.local_key(), apart: memory.is_of_device() };
        let lane = self.lane("put", lane)?;
        let ticket = lane.put(source, from.len, to.0, longest);
        fault(lane).map_or(Ok(Some(Ticket(ticket))), Err)
    }

    fn raise(&mut self, lane: LaneId, at: Offset, bits: u64) -> Result<bool, Fault> {
        at.span(8).within(self.layout.window_bytes())?;
        // A misaligned atomic would never complete, and the key for cells is for nothing else.
        if !at.0.is_multiple_of(8) || at.0 < self.cells_at.offset.0 || at.0 + 8 > self.cells_at.end() {
            return Err(Fault::NotOffered { verb: "publish to no cell", lane });
        }
        if !self.room("publish", lane, 1)? {
            return Ok(false);
        }
        let index = self.lane("publish", lane)?.index();
        let lane = &mut self.lanes[index];
        lane.raise(at.0, bits, &self.scratch);
        lane.post();
        fault(lane).map_or(Ok(true), Err)
    }

    fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<bool, Fault> {
        let found = self.lane("flush", lane)?;
        if !found.is_settled(upto.0) {
            found.post();
            self.poll();
        }
        self.lane("flush", lane).map(|lane| lane.is_settled(upto.0))
    }

    fn progress(&mut self) {
        self.lanes.iter_mut().filter(|lane| lane.has_gathered()).for_each(Lane::post);
        self.poll();
    }

    fn probe(&mut self, peer: Rank) {
        // What is under way tells by itself.
        if self.of(Scope::Peer(peer)).all(|lane| lane.is_idle())
            && let Some(lane) = self.of(Scope::Peer(peer)).next()
        {
            lane.probe();
        }
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        let kinds = self.table.get(peer.index())?;
        kinds.iter().find_map(|&(_, index)| fault(&self.lanes[index]))
    }

    fn drain(&mut self, scope: Scope) -> bool {
        self.progress();
        self.of(scope).all(|lane| lane.is_idle())
    }

    fn cut(&mut self, scope: Scope) {
        self.of(scope).filter(|lane| !lane.is_idle()).for_each(|lane| lane.close(LaneCause::Cut));
    }
}

/// The transport: [`ep_core::transport::Transport`] over RoCE or InfiniBand.
#[derive(Clone, Debug, Default)]
pub struct Roce {
    settings: Settings,
}

impl Roce {
    /// With these settings. Opens nothing yet.
    pub const fn new(settings: Settings) -> Self {
        Self { settings }
    }
}

impl ep_core::transport::Transport for Roce {
    type Lanes = RoceLanes;

    fn far_lanes(&self) -> Queues {
        self.settings.far_lanes
    }

    fn open(&self, place: Start<'_>) -> Result<RoceLanes, ep_core::Error> {
        let Start { me, layout, window } = place;
        self.open_for_device(DevicePlace { me, layout, window: WindowMemory::File(window) })
    }

    /// A window in memory of a device is registered by its address, which needs a driver's module between it and the adapter
    /// (`nvidia_peermem`).
    fn open_for_device(&self, place: DevicePlace<'_>) -> Result<RoceLanes, ep_core::Error> {
        RoceLanes::open(&self.settings, place).map_err(|error| error.on(place.me))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_core_would_raise_is_refused_in_memory_of_a_device() {
        let counting = Settings::new().signal(Signal::Counting);
        let said = choose_signal(&counting, true, true, "mlx5_0").unwrap_err().to_string();
        assert!(said.contains("signal is counting") && said.contains("lies in memory of a GPU"), "{said}");
        assert_eq!(choose_signal(&counting, true, false, "mlx5_0").unwrap().0, Signal::Counting);
        let relaxed = Settings { relaxed: true, ..Settings::new() };
        assert!(choose_signal(&relaxed, false, true, "mlx5_0").is_err(), "it would count");
        assert_eq!(choose_signal(&Settings::new(), false, true, "mlx5_0").unwrap().0, Signal::OrderedWrite);
        assert!(Memory::of_device(0x1000, 64, None, None).unwrap().word(0).is_none(), "no core touches it");
    }
}
