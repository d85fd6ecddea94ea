//! One rank's lanes: its adapter, its window, and the queue pairs to every far peer.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ep_core::layout::Queues;
use ep_core::port::{LaneId, Scope};
use ep_core::topology::Reach;
use ep_core::transport::{DeviceLanes, DevicePlace, WindowMemory};
use ep_core::{Fault, LaneCause, Layout, Rank};
use ep_rdma::{Connection, End, Header, Part, Region, Share, Way, cells_of, random_psn};

use crate::card::{Capabilities, Chosen, Domain, Place, Queue, Register, Storage, choose};
use crate::error::Error;
use crate::lane::{Lane, Progress};
use crate::library::Library;
use crate::offer::Offer;
use crate::settings::Settings;
use crate::state::QueueState;
use ep_core::transport::{Home, PostingDevice, PostingMemory};

/// The lanes of one rank that its device drives.
///
/// When it is dropped, the device's way to the doorbell ends first, then the queue pairs, their completion queues and the page that they name, then
/// the adapter lets go of all memory, and last the memory ends.
#[derive(Debug)]
pub struct IbgdaLanes<D: PostingDevice> {
    lanes: Vec<Lane>,
    register: Register<D>,
    window: Region,
    cells: Region,
    /// What keeps the window, which the adapter has let go of by then.
    _keeper: Option<Arc<dyn Any + Send + Sync>>,
    storage: Storage<D::Memory>,
    /// The lanes' states, then for each peer the values that cells there have.
    states: D::Memory,
    domain: Domain,
    chosen: Chosen,
    device: D,
    me: Rank,
    layout: Layout,
    window_at: u64,
    settings: Settings,
    description: String,
}

/// Memory of the device that was refused, as this crate tells it.
fn refused(what: &'static str) -> impl Fn(ep_core::Error) -> Error {
    move |error| Error::Device { what, why: error.to_string() }
}

impl<D: PostingDevice> IbgdaLanes<D> {
    /// Opens the adapter of a rank, registers its window, makes its lanes' memory. Connects nothing.
    pub(crate) fn open(
        library: &Library,
        device: &D,
        settings: &Settings,
        start: DevicePlace<'_>,
    ) -> Result<Self, Error> {
        let DevicePlace { me, layout, window } = start;
        let WindowMemory::Device { address: window_at, keeper, dmabuf, .. } = window else {
            let (what, why) = ("a window for IBGDA", "it is a file in memory, expected memory of the device".into());
            return Err(Error::Device { what, why });
        };
        let chosen = choose(library, &settings.devices, layout.topology().local_of(me))?;
        let capabilities = Capabilities::of(&chosen.context)?;
        let name = chosen.context.name();
        capabilities.check(name, chosen.port.ethernet)?;
        check_settings(settings, &capabilities, &chosen)?;

        let ids = start
            .peers(settings.far_lanes)
            .flat_map(|(peer, kinds)| kinds.into_iter().map(move |kind| LaneId { peer, kind }));
        let ids: Vec<LaneId> = ids.collect();
        let count = ids.len().max(1) as u64;
        let domain = Domain::new(&chosen.context)?;
        let storage = Storage::new(&domain, device, Place::bytes(count, settings.log_depth))?;
        let (state_bytes, last_bytes) = (size_of::<QueueState>() as u64, 2 * layout.cells_of(me, 0).len);
        let states = count * state_bytes + u64::from(layout.topology().ranks()) * last_bytes;
        let states =
            device.memory(states as usize, Home::Device).map_err(refused("taking memory for states of lanes"))?;
        let register = Register::new(&chosen.context, device)?;

        let relaxed = settings.relaxed && capabilities.relaxed_ordering;
        let ways = dmabuf.map(Way::Dmabuf).into_iter().chain([Way::Address]);
        let (window, cells, shown) = show_window(&domain, window_at, layout, relaxed, ways)?;
        let lane = |(number, id): (usize, LaneId)| {
            let place = Place::of(number as u64, count, settings.log_depth);
            let state_at = states.address() + number as u64 * state_bytes;
            let completions_at = storage.address() + place.completions;
            let (closed, told) = (Some(LaneCause::Flushed), AtomicBool::new(false));
            Lane { id, place, state_at, completions_at, queue: None, psn: 0, closed, told }
        };
        let lanes: Vec<Lane> = ids.into_iter().enumerate().map(lane).collect();
        let description = format!("{}; {shown}; {}", chosen.reason, storage.description);
        tracing::info!(rank = me.0, "{description}");
        let (device, layout, settings) = (device.clone(), layout.clone(), settings.clone());
        Ok(Self {
            lanes,
            register,
            window,
            cells,
            _keeper: keeper.map(Arc::clone),
            storage,
            states,
            domain,
            chosen,
            device,
            me,
            layout,
            window_at,
            settings,
            description,
        })
    }

    /// Which adapter, port and address this rank uses, how the adapter was shown its memory, and why so.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// New queues for all lanes, and what others need to know.
    fn renew(&mut self) -> Result<Offer, Error> {
        for lane in &mut self.lanes {
            lane.close(&self.device, LaneCause::Flushed);
        }
        self.zero_far_cells()?;
        let mut ends = Vec::with_capacity(self.lanes.len());
        for lane in &mut self.lanes {
            Self::empty(&self.device, &self.storage, &self.settings, lane.place)?;
            let queue = Queue::new(&self.domain, &self.register, &self.storage, lane.place, self.settings.log_depth)?;
            queue.init(&self.chosen.port)?;
            lane.psn = random_psn();
            ends.push(End::new(lane.id.peer, lane.id.kind, queue.number(), lane.psn));
            lane.queue = Some(queue);
        }
        let port = &self.chosen.port;
        let header = Header::new(port, port.mtu, &self.chosen.gid).with_window(
            self.window_at,
            self.layout.window_bytes(),
            self.window.remote_key(),
            self.cells.remote_key(),
        );
        Ok(Offer { header, own: (), ends })
    }

    /// Elements of no kind, completions that are not there, records of nothing.
    fn empty(device: &D, storage: &Storage<D::Memory>, settings: &Settings, place: Place) -> Result<(), Error> {
        let bytes = (crate::card::PLACE << settings.log_depth) as usize;
        let record = [0; crate::card::PLACE as usize];
        let write = |at: u64, bytes: &[u8]| device.write(storage.address() + at, bytes);
        write(place.elements, &vec![0; bytes])
            .and_then(|()| write(place.completions, &vec![0xff; bytes]))
            .and_then(|()| write(place.record(), &record))
            .map_err(refused("emptying a queue"))
    }

    /// Cells that far ranks write, of both generations' banks: fetch-adds count from zero. Nothing arrives now.
    fn zero_far_cells(&self) -> Result<(), Error> {
        let topology = self.layout.topology();
        for writer in topology.all().filter(|&rank| topology.reach(self.me, rank) == Reach::Far) {
            for span in [0, 1].map(|generation| self.layout.cells_of(writer, generation)) {
                let zero = vec![0; span.len as usize];
                self.device.write(self.window_at + span.offset.0, &zero).map_err(refused("zeroing cells"))?;
            }
        }
        Ok(())
    }

    fn join(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        for rank in self.layout.topology().all() {
            if self.lanes.iter().all(|lane| lane.id.peer != rank) {
                continue;
            }
            match offers.get(rank.index()).and_then(Option::as_ref) {
                Some(offer) => self.join_one(rank, &Offer::from_bytes(rank, offer)?)?,
                None => {
                    let device = &self.device;
                    let of_rank = self.lanes.iter_mut().filter(|lane| lane.id.peer == rank);
                    of_rank.for_each(|lane| lane.close(device, LaneCause::Flushed));
                }
            }
        }
        Ok(())
    }

    /// Connects all lanes to one rank.
    fn join_one(&mut self, rank: Rank, offer: &Offer) -> Result<(), Error> {
        let header = &offer.header;
        header.check(rank, &self.chosen.port, self.layout.window_bytes())?;
        let Settings { wire, log_depth, .. } = self.settings;
        let cells = [0, 1].map(|generation| self.layout.cells_of(self.me, generation));
        let last_at = self.last_at(rank, cells[0].len);
        self.device.write(last_at, &vec![0; 2 * cells[0].len as usize]).map_err(refused("zeroing values of cells"))?;
        for lane in self.lanes.iter_mut().filter(|lane| lane.id.peer == rank) {
            let end = offer.end(rank, self.me, lane.id.kind)?;
            let path = Connection::new(header, end, lane.psn, self.chosen.port.mtu, wire);
            let Some(queue) = &lane.queue else { continue };
            queue.connect(&self.chosen.port, &self.chosen.gid, &path)?;
            let at = |part: u64| self.storage.address() + part;
            let state = QueueState {
                elements: at(lane.place.elements),
                completions: at(lane.place.completions),
                record: at(lane.place.sent()),
                read: at(lane.place.read()),
                bell: self.register.bell(),
                last: last_at,
                from: self.window_at,
                to: header.window(),
                bytes: self.layout.window_bytes(),
                cells: cells.map(|span| span.offset.0),
                cell_bytes: cells[0].len,
                returned: at(lane.place.returned()),
                own_key: self.window.local_key(),
                rows_key: header.rows_key.get(),
                cells_key: header.cells_key.get(),
                returned_key: self.storage.key(),
                number: queue.number(),
                log_slots: log_depth,
                ..QueueState::default()
            };
            lane.begin(&self.device, &state)?;
        }
        Ok(())
    }

    /// Where the values of the cells at a rank lie for the device.
    fn last_at(&self, rank: Rank, cell_bytes: u64) -> u64 {
        let states = self.lanes.len().max(1) * size_of::<QueueState>();
        self.states.address() + states as u64 + u64::from(rank.0) * 2 * cell_bytes
    }

    fn of(&self, scope: Scope) -> impl Iterator<Item = &Lane> {
        self.lanes.iter().filter(move |lane| scope.covers(lane.id))
    }
}

/// Registers the window twice: rows, and cells in the order in which they come, with keys of their own.
fn show_window<'a>(
    domain: &Domain,
    base: u64,
    layout: &Layout,
    relaxed: bool,
    ways: impl Iterator<Item = Way<'a>>,
) -> Result<(Region, Region, String), Error> {
    let all = Part { base, offset: 0, bytes: layout.window_bytes() };
    let cells = cells_of(layout);
    let cells = Part { base, offset: cells.offset.0, bytes: cells.len };
    let mut why = Vec::new();
    for way in ways {
        // SAFETY: that the window is memory of the device, its maker answers for (`WindowMemory::Device`). It stays as long as the regions: the lanes hold its keeper
        // behind them, and where there is none the maker answers for that, too. No core touches it here.
        let show = |part, share: Share| unsafe { Region::new(domain.verbs(), part, way, share.access(true, relaxed)) };
        let both = show(all, Share::Rows).and_then(|rows| Ok((rows, show(cells, Share::Cells)?)));
        let how = match way {
            Way::Dmabuf(_) => "dmabuf",
            Way::Address => "its address",
        };
        match both {
            Ok((rows, cells)) => {
                let refused = why.iter().map(|why| format!(" ({why})")).collect::<String>();
                let order = if relaxed { "relaxed" } else { "strict" };
                return Ok((rows, cells, format!("window by {how}, rows {order}{refused}")));
            }
            Err(error) => why.push(format!("{how}: {error}")),
        }
    }
    let device = domain.context().name().to_owned();
    Err(Error::Memory { what: "the window", device, why: why.join("; ") })
}

/// Refuses what the adapter does not allow.
fn check_settings(settings: &Settings, capabilities: &Capabilities, chosen: &Chosen) -> Result<(), ep_rdma::Error> {
    let most = capabilities.log_max_elements.min(capabilities.log_max_completions);
    let device = || chosen.context.name().to_owned();
    if u64::from(settings.log_depth) > most {
        let (what, value) = ("the power of two of a queue's elements", settings.log_depth.to_string());
        return Err(ep_rdma::Error::Setting { what, value, device: device(), limit: format!("at most {most}") });
    }
    if chosen.port.ethernet && settings.wire.service_level > 7 {
        let (what, value) = ("service level", settings.wire.service_level.to_string());
        return Err(ep_rdma::Error::Setting { what, value, device: device(), limit: "0 to 7 on Ethernet".into() });
    }
    Ok(())
}

impl<D: PostingDevice> DeviceLanes for IbgdaLanes<D> {
    fn offer(&mut self) -> Result<Vec<u8>, ep_core::Error> {
        let me = self.me;
        self.renew().map(|offer| offer.to_bytes()).map_err(|error| error.on(me))
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), ep_core::Error> {
        let me = self.me;
        self.join(offers).map_err(|error| error.on(me))
    }

    fn state(&self, lane: LaneId) -> Option<u64> {
        let queue = self.settings.far_lanes.queue(&self.layout, self.me, lane);
        self.lanes.iter().find(|lane| lane.id == queue).map(|lane| lane.state_at)
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        self.of(Scope::Peer(peer)).find_map(|lane| match lane.progress(&self.device) {
            Progress::Broken(fault) => Some(fault),
            Progress::Idle | Progress::UnderWay => None,
        })
    }

    fn drain(&mut self, scope: Scope) -> bool {
        self.of(scope).all(|lane| match lane.progress(&self.device) {
            Progress::Idle | Progress::Broken(_) => true,
            Progress::UnderWay => lane.has_failed(),
        })
    }

    fn cut(&mut self, scope: Scope) {
        let device = &self.device;
        for lane in self.lanes.iter_mut().filter(|lane| scope.covers(lane.id)) {
            if lane.progress(device) == Progress::UnderWay {
                lane.close(device, LaneCause::Cut);
            }
        }
    }
}

impl<D: PostingDevice> Drop for IbgdaLanes<D> {
    fn drop(&mut self) {
        self.register.unmap();
        self.lanes.iter_mut().for_each(|lane| lane.close(&self.device, LaneCause::Cut));
    }
}

/// The transport: [`ep_core::transport::DeviceTransport`] over mlx5 adapters that the device `D` drives.
#[derive(Clone, Debug)]
pub struct Ibgda<D> {
    library: Library,
    device: D,
    settings: Settings,
}

impl<D: PostingDevice> Ibgda<D> {
    /// With these functions ([`Library::open`]), for this device, with these settings. Opens nothing yet.
    pub const fn new(library: Library, device: D, settings: Settings) -> Self {
        Self { library, device, settings }
    }
}

impl<D: PostingDevice> ep_core::transport::DeviceTransport for Ibgda<D> {
    type Lanes = IbgdaLanes<D>;

    fn far_lanes(&self) -> Queues {
        self.settings.far_lanes
    }

    fn source(&self) -> ep_core::transport::DeviceSource {
        crate::state::source(&self.settings)
    }

    fn open(&self, place: DevicePlace<'_>) -> Result<Self::Lanes, ep_core::Error> {
        IbgdaLanes::open(&self.library, &self.device, &self.settings, place).map_err(|error| error.on(place.me))
    }
}
