//! Ranks of several nodes, one a node, in one thread.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ep_core::port::{Cell, Counter, LaneId, LaneKind, Offset, Span, Ticket};
use ep_core::transport::{DevicePlace, Lanes, Place, Transport, WindowCopies, WindowMemory};
use ep_core::{Error, Fault, Layout, Rank, Shape, Topology};
use ep_roce::{Roce, RoceLanes, Settings};

/// More than anything takes that works, or that breaks.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// Ranks with lanes to each other.
pub(crate) struct Bench {
    pub(crate) layout: Layout,
    pub(crate) windows: Vec<File>,
    pub(crate) lanes: Vec<RoceLanes>,
    /// Where tests put bytes: [`ROOM`] of them.
    pub(crate) arena: u64,
}

/// Bytes of the arena.
pub(crate) const ROOM: u64 = 1 << 20;

/// The settings for `devices`.
pub(crate) fn settings(devices: &str) -> Settings {
    Settings::new().devices(devices.parse().unwrap())
}

fn layout(ranks: u32, channels: u32) -> Layout {
    let topology = Topology::new(ranks, 1).unwrap();
    let shape = Shape::builder().experts(ranks).topk(1).hidden(16).max_tokens(16).build().unwrap();
    let settings = ep_core::Settings::builder(&shape, &topology).channels(channels).slots(2).arena_bytes(ROOM);
    Layout::new(&shape, &topology, &settings.build().unwrap()).unwrap()
}

impl Bench {
    /// Ranks that are not connected.
    pub(crate) fn open(ranks: u32, channels: u32, settings: &Settings) -> Self {
        let layout = layout(ranks, channels);
        let transport = Roce::new(settings.clone());
        let windows: Vec<File> = (0..ranks).map(|_| window(layout.window_bytes())).collect();
        let open = |(me, window): (Rank, &File)| {
            transport.open(Place { me, layout: &layout, window: window.as_fd() }).unwrap()
        };
        let lanes = (0..).map(Rank).zip(&windows).map(open).collect();
        let arena = layout.arena().offset.0;
        Self { layout, windows, lanes, arena }
    }

    /// Two connected ranks with one channel, whose windows are memory of a device: lanes are told its address, and no file.
    pub(crate) fn on_devices(settings: &Settings) -> Self {
        let mut bench = Self::open(2, 1, settings);
        let open = |(me, window): (Rank, &File)| {
            let copies: Arc<dyn WindowCopies> = Arc::new(Copies(window.try_clone().unwrap()));
            // Soft-RoCE takes no descriptors: it goes by the address then.
            let dmabuf = Some(window.as_fd());
            let window = WindowMemory::Device { address: mapped(window), keeper: None, dmabuf, copies: Some(&copies) };
            Roce::new(settings.clone()).open_for_device(DevicePlace { me, layout: &bench.layout, window })
        };
        let lanes = (0..).map(Rank).zip(&bench.windows).map(|end| open(end).unwrap()).collect();
        bench.lanes = lanes;
        bench.connect();
        bench
    }

    /// Two connected ranks with one channel.
    pub(crate) fn new(settings: &Settings) -> Self {
        let mut bench = Self::open(2, 1, settings);
        bench.connect();
        bench
    }

    pub(crate) fn offers(&mut self) -> Vec<Option<Vec<u8>>> {
        self.lanes.iter_mut().map(|lanes| Some(lanes.offer().unwrap())).collect()
    }

    pub(crate) fn connect(&mut self) {
        let offers = self.offers();
        self.lanes.iter_mut().for_each(|lanes| lanes.connect(&offers).unwrap());
    }

    /// The lane to `peer` that carries rows.
    pub(crate) fn rows(&self, peer: u32) -> LaneId {
        LaneId { peer: Rank(peer), kind: LaneKind::Data(self.layout.far_track(0)) }
    }

    /// The cell of `writer` on the lane `kind`, for tests.
    pub(crate) fn cell(&self, writer: u32, kind: LaneKind) -> Offset {
        self.layout.cell(Cell::new(Rank(writer), kind, Counter::Probe), 1)
    }

    pub(crate) fn write(&self, rank: usize, at: u64, bytes: &[u8]) {
        self.windows[rank].write_all_at(bytes, at).unwrap();
    }

    pub(crate) fn read(&self, rank: usize, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.windows[rank].read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    pub(crate) fn value(&self, rank: usize, cell: Offset) -> u64 {
        u64::from_le_bytes(self.read(rank, cell.0, 8).try_into().unwrap())
    }

    pub(crate) fn progress(&mut self) {
        self.lanes.iter_mut().for_each(Lanes::progress);
    }

    /// Asks again until there is an answer.
    pub(crate) fn until<T>(&mut self, what: &str, mut ask: impl FnMut(&mut Self) -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(answer) = ask(self) {
                return answer;
            }
            assert!(began.elapsed() < LONG, "waited {LONG:?} for {what}");
            self.progress();
        }
    }

    pub(crate) fn put(&mut self, from: usize, lane: LaneId, source: u64, len: u64, to: u64) -> Ticket {
        let span = Offset(source).span(len);
        self.until("room for a put", |bench| bench.lanes[from].put(lane, span, Offset(to)).unwrap())
    }

    pub(crate) fn raise(&mut self, from: usize, lane: LaneId, cell: Offset, bits: u64) {
        self.until("room for a publish", |bench| bench.lanes[from].raise(lane, cell, bits).unwrap().then_some(()));
    }

    pub(crate) fn flush(&mut self, from: usize, lane: LaneId, upto: Ticket) {
        self.until("a flush", |bench| bench.lanes[from].flush(lane, upto).unwrap().then_some(()));
    }

    pub(crate) fn await_value(&mut self, rank: usize, cell: Offset, value: u64) {
        self.until("a value", |bench| (bench.value(rank, cell) >= value).then_some(()));
    }

    /// Publishes until that fails, and returns how.
    pub(crate) fn breaks(&mut self, from: usize, lane: LaneId, cell: Offset) -> Fault {
        let mut value = 1 << 20;
        self.until("a lane to break", |bench| {
            value += 1;
            bench.lanes[from].raise(lane, cell, value).err()
        })
    }
}

/// The guest's pair of interfaces, disturbed until this is dropped. Elsewhere nothing: adapters are slower than cores.
pub(crate) struct Link;

impl Link {
    /// Whether it can be disturbed.
    pub(crate) fn is_ours() -> bool {
        std::env::var_os("SOFTROCE_DEVICES").is_some()
    }

    pub(crate) fn disturb(how: &str) -> Self {
        Self::tc(&format!("add dev DEV root netem {how}"));
        Self
    }

    fn tc(arguments: &str) {
        for end in ["v0", "v1"].into_iter().filter(|_| Self::is_ours()) {
            let command = format!("qdisc {arguments}").replace("DEV", end);
            let done = Command::new("tc").args(command.split(' ')).status().unwrap();
            assert!(done.success(), "tc {command}");
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        Self::tc("del dev DEV root");
    }
}

/// How the host writes a window that it is not told to read.
#[derive(Debug)]
struct Copies(File);

impl WindowCopies for Copies {
    fn bytes(&self) -> u64 {
        self.0.metadata().unwrap().len()
    }

    fn pull(&self, _: usize, _: &dyn WindowCopies, _: Span, _: Offset) -> Result<(), Error> {
        Err(Error::unsupported("a copy between windows", "an adapter"))
    }

    fn raise(&self, _: usize, at: Offset, bits: u64) -> Result<(), Error> {
        self.0.write_all_at(&bits.to_le_bytes(), at.0).unwrap();
        Ok(())
    }

    fn mark(&self, _: usize) -> Result<u64, Error> {
        Ok(0)
    }

    fn reached(&self, _: usize) -> u64 {
        0
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(())
    }
}

/// Where a window lies for its adapter. It stays mapped.
fn mapped(window: &File) -> u64 {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let bytes = window.metadata().unwrap().len() as usize;
    // SAFETY: the system chooses a free range of addresses.
    let base =
        unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, window, 0) };
    base.unwrap() as u64
}

/// A window as backends make them: a file in memory.
fn window(bytes: u64) -> File {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes).unwrap();
    fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    File::from(file)
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (seed.wrapping_mul(131).wrapping_add(at * 31 + (at >> 8))) as u8).collect()
}
