//! Kernels that move what the loop carries: what becomes of moves whose launch is refused, and what is not left to them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ep_conformance::Setup;
use ep_conformance::drive::{Round, round};
use ep_conformance::workload::Workload;
use ep_core::layout::Queues;
use ep_core::port::{LaneId, LaneKind, Offset, Scope, Span, Ticket};
use ep_core::reference::World;
use ep_core::transport::{DevicePlace, Lanes, Place, Transport, WindowCopies, WindowMemory};
use ep_core::{Endpoint as _, Error, Fault, Layout, Nanos, Rank, RankSet, Settings, Shape, Topology};
use ep_cuda::Builder;
use ep_loop::{Loop, LoopLanes};
use libtest_mimic::Trial;

use crate::common;

/// Multiprocessors of a GPU of the twin.
const MULTIPROCESSORS: u32 = 32;

/// The loop. Keeps the windows that it is given, and counts puts of rows from them.
#[derive(Clone, Debug)]
struct Watched {
    network: Loop,
    windows: Arc<Mutex<Vec<Arc<dyn WindowCopies>>>>,
    /// Bytes of a window: what is put from behind that are records of rows that are staged.
    bytes: u64,
    puts: Arc<AtomicU64>,
    /// Whether it takes windows of GPUs.
    reaches: bool,
}

impl Watched {
    fn new(setup: &Setup) -> Result<Self, Error> {
        let layout = Layout::new(&setup.shape, &setup.topology, &setup.settings)?.with_kernels()?;
        let (windows, puts) = (Arc::default(), Arc::default());
        Ok(Self { network: Loop::new(), windows, bytes: layout.window_bytes(), puts, reaches: true })
    }
}

impl Transport for Watched {
    type Lanes = WatchedLanes;

    fn far_lanes(&self) -> Queues {
        self.network.far_lanes()
    }

    fn open(&self, place: Place<'_>) -> Result<WatchedLanes, Error> {
        Ok(WatchedLanes { lanes: self.network.open(place)?, bytes: self.bytes, puts: Arc::clone(&self.puts) })
    }

    fn open_for_device(&self, place: DevicePlace<'_>) -> Result<WatchedLanes, Error> {
        if !self.reaches {
            return self.open(place.on_host("a card that reaches no GPU")?);
        }
        if let WindowMemory::Device { copies: Some(copies), .. } = place.window {
            self.windows.lock().expect("no panic").push(Arc::clone(copies));
        }
        let lanes = self.network.open_for_device(place)?;
        Ok(WatchedLanes { lanes, bytes: self.bytes, puts: Arc::clone(&self.puts) })
    }
}

#[derive(Debug)]
struct WatchedLanes {
    lanes: LoopLanes,
    bytes: u64,
    puts: Arc<AtomicU64>,
}

impl Lanes for WatchedLanes {
    fn offer(&mut self) -> Result<Vec<u8>, Error> {
        self.lanes.offer()
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        self.lanes.connect(offers)
    }

    fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Option<Ticket>, Fault> {
        let ticket = self.lanes.put(lane, from, to)?;
        let of_rows = matches!(lane.kind, LaneKind::Data(_)) && from.offset.0 < self.bytes;
        self.puts.fetch_add(u64::from(of_rows && ticket.is_some()), Ordering::Relaxed);
        Ok(ticket)
    }

    fn raise(&mut self, lane: LaneId, at: Offset, bits: u64) -> Result<bool, Fault> {
        self.lanes.raise(lane, at, bits)
    }

    fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<bool, Fault> {
        self.lanes.flush(lane, upto)
    }

    fn progress(&mut self) {
        self.lanes.progress();
    }

    fn landed(&self, peer: Rank) -> Option<u64> {
        self.lanes.landed(peer)
    }

    fn probe(&mut self, peer: Rank) {
        self.lanes.probe(peer);
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        self.lanes.broken(peer)
    }

    fn drain(&mut self, scope: Scope) -> bool {
        self.lanes.drain(scope)
    }

    fn cut(&mut self, scope: Scope) {
        self.lanes.cut(scope);
    }

    fn is_copied(&self) -> bool {
        self.lanes.is_copied()
    }
}

/// So many nodes of one rank, whose rings have room for all rows.
fn setup(nodes: u32) -> Result<Setup, Error> {
    let topology = Topology::new(nodes, 1)?;
    let shape = Shape::builder().experts(2 * nodes).topk(2).hidden(32).max_tokens(64).build()?;
    let settings =
        Settings::builder(&shape, &topology).channels(1).slots(128).deadline(Nanos::from_secs(30)).build()?;
    Ok(Setup::new(shape, topology, 1)?.settings(settings))
}

fn builder(setup: &Setup) -> Result<Builder, Error> {
    common::builder(setup, None, None)
}

/// Two ranks copy to a third one's window by the same way. A launch that is to carry out the copies of both is refused, for the one that asked for it: the other's cell is not
/// raised by a later launch, either.
fn a_refused_launch_breaks_its_way() -> Result<(), Error> {
    let setup = setup(3)?;
    let network = Watched::new(&setup)?;
    let cluster = builder(&setup)?.far(network.clone()).far_movers(1).build(setup.shape)?;
    let windows = network.windows.lock().expect("no panic").clone();
    let [first, second, sink] = windows.try_into().expect("three ranks");
    let layout = Layout::new(&setup.shape, &setup.topology, &setup.settings)?;
    let arena = layout.regions().into_iter().find(|region| region.name == "arena").expect("an arena").span.offset;
    let copy = |source: &Arc<dyn WindowCopies>, at: u64| sink.pull(0, &**source, arena.span(64), arena.plus(64 * at));
    copy(&first, 1)?;
    let mark = sink.mark(0)?;
    while sink.reached(0) < mark {
        std::thread::yield_now();
    }
    copy(&first, 1)?;
    copy(&second, 2)?;
    ep_cuda_twin::refuse_launches(1).expect("the twin");
    assert!(sink.mark(0).is_err(), "a launch that is refused");
    sink.raise(0, arena, 1)?;
    let said = sink.mark(0).expect_err("the row before the cell was lost").to_string();
    assert!(said.contains("a way of copies failed"), "{said}");
    drop(cluster);
    Ok(())
}

/// Puts of rows in a dispatch and a combine of two nodes.
fn puts(setup: &Setup, far: impl FnOnce(Builder, Watched) -> Builder) -> Result<u64, Error> {
    let network = Watched::new(setup)?;
    let cluster = far(builder(setup)?, network.clone()).build(setup.shape)?;
    let batches = Workload::new(setup.shape, vec![63; 2]).seed(3).batches()?;
    let world = World::new(setup.shape, setup.topology, RankSet::new())?;
    let done = common::run_on(cluster, setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        round(&mut ep, &world, batch, &Round::default()).await.map(drop)
    });
    done.expect("they run").into_iter().flatten().collect::<Result<Vec<()>, Error>>()?;
    Ok(network.puts.load(Ordering::Relaxed))
}

/// A mover makes many puts cheap, so the first one of a ring is short. Staged rows the driver copies whether there is to be a mover or not: they have as few puts, and no
/// multiprocessor is kept for it.
fn staged_rows_have_no_mover() -> Result<(), Error> {
    let setup = setup(2)?;
    let moved = puts(&setup, |builder, network| builder.far(network).far_movers(1))?;
    let copied = puts(&setup, |builder, network| builder.far(network).far_movers(0))?;
    assert!(moved > copied, "{moved} puts, and {copied}");
    let staged = puts(&setup, |builder, network| builder.far_staged(network).far_movers(0))?;
    let all = |builder: Builder, network| builder.far_staged(network).far_movers(1).multiprocessors(MULTIPROCESSORS);
    let asked = puts(&setup, all)?;
    // Staged as the network reaches no GPU.
    let unasked = |builder: Builder, network| builder.far(Watched { reaches: false, ..network }).far_movers(1);
    let unasked = puts(&setup, unasked)?;
    assert_eq!((staged, asked, unasked), (copied, copied, copied));
    Ok(())
}

pub(crate) fn trials(absent: Option<&'static str>) -> Vec<Trial> {
    let trial = |name: &str, case: fn() -> Result<(), Error>| {
        Trial::test(name, move || case().map_err(|error| error.to_string().into())).with_ignored_flag(absent.is_some())
    };
    vec![
        trial("movers::a_launch_that_is_refused_breaks_its_way_for_all", a_refused_launch_breaks_its_way),
        trial("movers::staged_rows_have_none", staged_rows_have_no_mover),
    ]
}
