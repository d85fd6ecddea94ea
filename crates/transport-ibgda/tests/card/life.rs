//! The host side from open to drop: what the card is told, in which order, and what is left of it afterwards.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use ep_core::port::{Cell, Counter, LaneKind, Offset, Scope};
use ep_core::transport::{DeviceLanes, DevicePlace, DeviceTransport, Home, PostingDevice, PostingMemory, WindowMemory};
use ep_core::{Error, Layout, Rank};
use ep_ibgda::{HostDevice, Ibgda, Lent, Settings};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use soft_hca::{Fabric, Link, Model, Mood};

use crate::rank::{Member, Verbs, connect, connected, layout, library};

const SOON: Duration = Duration::from_secs(20);

/// A row over every lane to every peer, and what announces it.
pub(crate) fn talk(verbs: &Verbs, layout: &Layout, members: &[Member], value: u64) {
    let far = LaneKind::Data(layout.far_track(0));
    let at = Offset(layout.window_bytes() - 4096);
    let to = |from: u32| at.plus(64 * u64::from(from));
    let cell = |writer: u32| layout.cell(Cell::new(Rank(writer), far, Counter::Tail), 1);
    let ranks = 0..members.len() as u32;
    let pairs: Vec<_> =
        ranks.clone().flat_map(|a| ranks.clone().map(move |b| (a, b))).filter(|(a, b)| a != b).collect();
    for &(from, peer) in &pairs {
        let own = &members[from as usize];
        let source = at.plus(2048).span(40);
        own.write(source.offset, &[from as u8 + 1; 40]);
        let state = own.state(peer, far);
        let (status, ticket) = verbs.put(state, source, to(from), SOON);
        assert_eq!(status as u32, 0, "put");
        assert_eq!(verbs.publish(state, cell(from), value, SOON) as u32, 0, "publish");
        assert_eq!(verbs.flush(state, ticket, SOON) as u32, 0, "flush");
    }
    for (from, peer) in pairs {
        let there = &members[peer as usize];
        let began = std::time::Instant::now();
        while there.cell(cell(from)) != value {
            assert!(began.elapsed() < SOON, "the cell of {from} at {peer} is {}", there.cell(cell(from)));
            std::thread::yield_now();
        }
        assert_eq!(there.read(to(from).span(40)), [from as u8 + 1; 40], "from {from} to {peer}");
    }
}

/// Nothing is under way before long.
pub(crate) fn drained(members: &mut [Member]) {
    let began = std::time::Instant::now();
    while !members.iter_mut().all(|member| member.lanes.drain(Scope::All)) {
        assert!(began.elapsed() < SOON, "something is under way");
        std::thread::yield_now();
    }
}

#[test]
fn lanes_are_made_connected_renewed_and_ended_without_a_complaint() {
    let Some(verbs) = Verbs::new(&Settings::new(), None) else { return };
    for (link, seed) in [(Link::Ethernet, 1), (Link::InfiniBand, 2)] {
        let fabric = Fabric::builder(3, link).seed(seed).mood(Mood::hostile()).running();
        let layout = layout(3);
        let mut members = connected(&fabric, &layout, &Settings::new().relaxed_ordering(true)).unwrap();
        talk(&verbs, &layout, &members, 7);
        drained(&mut members);
        // Cells count from zero again, whatever they had.
        connect(&mut members, &[]).unwrap();
        talk(&verbs, &layout, &members, 5);
        drained(&mut members);
        // One that takes no part any more is left alone.
        connect(&mut members, &[2]).unwrap();
        assert!(members[0].lanes.broken(Rank(2)).is_some() && members[0].lanes.broken(Rank(1)).is_none());
        talk(&verbs, &layout, &members[..2], 9);
        drop(members);
        assert_eq!(fabric.complaints(), [], "{link:?}");
        assert_eq!([0, 1, 2].map(|card| fabric.card(card).objects()), [0; 3], "{link:?}");
    }
}

/// A device whose memory has descriptors, as a GPU's has.
#[derive(Clone, Copy, Debug)]
struct WithFiles;

#[derive(Debug)]
struct FileMemory {
    base: NonNull<u8>,
    bytes: usize,
    file: OwnedFd,
    lent: Option<Lent>,
}

// SAFETY: a mapping of the process, used by address.
unsafe impl Send for FileMemory {}
// SAFETY: as above.
unsafe impl Sync for FileMemory {}

impl Drop for FileMemory {
    fn drop(&mut self) {
        self.lent = None;
        // SAFETY: mapped with this length, and given up by all.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

// The mapping lives until the value is dropped, and the descriptor is of the same pages.
impl PostingMemory for FileMemory {
    fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn dmabuf(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}

// Memory of the process, as `HostDevice` has it.
impl PostingDevice for WithFiles {
    type Memory = FileMemory;

    fn identity(&self) -> u64 {
        1
    }

    fn memory(&self, bytes: usize, _: Home) -> Result<FileMemory, Error> {
        let bytes = bytes.next_multiple_of(4096);
        let file = memfd_create("queues", MemfdFlags::CLOEXEC).expect("a file in memory");
        ftruncate(&file, bytes as u64).expect("its size");
        // SAFETY: the system chooses a free range.
        let base = unsafe {
            mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        };
        let base: NonNull<u8> = NonNull::new(base.expect("a mapping").cast()).expect("an address");
        // SAFETY: mapped until the memory is dropped, and used by devices alone.
        let lent = Some(unsafe { HostDevice::lend(base.as_ptr() as u64, bytes as u64) });
        Ok(FileMemory { base, bytes, file, lent })
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error> {
        HostDevice.read(address, into)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        HostDevice.write(address, bytes)
    }

    fn map_register(&self, page: NonNull<u8>, bytes: usize) -> Result<u64, Error> {
        HostDevice.map_register(page, bytes)
    }

    fn unmap_register(&self, page: NonNull<u8>) {
        HostDevice.unmap_register(page);
    }
}

#[test]
fn memory_is_shown_by_descriptor_else_by_address_else_it_is_the_hosts() {
    let layout = layout(2);
    let described = |plan: &dyn Fn(&Fabric)| {
        let fabric = Fabric::builder(2, Link::Ethernet).running();
        plan(&fabric);
        let window = WithFiles.memory(layout.window_bytes() as usize, Home::Device).unwrap();
        let memory =
            WindowMemory::Device { address: window.address(), keeper: None, dmabuf: window.dmabuf(), copies: None };
        let settings = Settings::new().devices([fabric.card(0).name()]);
        let place = DevicePlace { me: Rank(0), layout: &layout, window: memory };
        let mut lanes = Ibgda::new(library(), WithFiles, settings).open(place).unwrap();
        lanes.offer().unwrap();
        let said = lanes.description().to_owned();
        drop(lanes);
        assert_eq!(fabric.card(0).objects(), 0);
        said
    };
    let best = described(&|_| {});
    assert!(best.contains("window by dmabuf, rows strict; queues in device memory by dmabuf"), "{best}");
    let second = described(&|fabric| fabric.card(0).fail("mlx5dv_devx_umem_reg_ex", 0, 95));
    assert!(
        second.contains("queues in device memory by peer memory; device memory by dmabuf: mlx5dv_devx_umem_reg_ex"),
        "{second}"
    );
    let last = described(&|fabric| {
        fabric.card(0).fail("mlx5dv_devx_umem_reg_ex", 0, 95);
        fabric.card(0).fail("mlx5dv_devx_umem_reg", 0, 14);
        fabric.card(0).fail("ibv_reg_dmabuf_mr", 0, 95);
    });
    assert!(last.contains("window by its address") && last.contains("queues in host memory"), "{last}");
    assert!(last.contains("nvidia-peermem is not loaded"), "{last}");
}

#[test]
fn a_survey_opens_each_adapter_and_gives_it_back() {
    let lesser = Model { atomics: false, ..Model::new(Link::Ethernet) };
    let fabrics =
        [Model::new(Link::InfiniBand), lesser].map(|model| Fabric::builder(1, model.link).model(model).stepped());
    let found = ep_ibgda::survey(&library()).expect("adapters");
    let names: Vec<String> = fabrics.iter().map(|fabric| fabric.card(0).name()).collect();
    // Those of other tests may be there, too.
    assert!(found.iter().flatten().any(|adapter| adapter.name == names[0] && adapter.relaxed_ordering), "{found:?}");
    let refused = found.iter().filter_map(|found| found.as_ref().err()).map(ToString::to_string);
    assert!(
        refused.into_iter().any(|why| why.contains(&names[1]) && why.contains("fetch-add of 8 bytes")),
        "{found:?}"
    );
    assert!(fabrics.iter().all(|fabric| fabric.card(0).objects() == 0 && fabric.complaints().is_empty()));
}

#[test]
fn what_a_card_lacks_is_named() {
    let refused = |change: &dyn Fn(&mut Model)| {
        let mut model = Model::new(Link::Ethernet);
        change(&mut model);
        let fabric = Fabric::builder(2, Link::Ethernet).model(model).running();
        let layout = layout(2);
        let error = Member::open(&fabric, &layout, 0, &Settings::new().log_depth(8).unwrap()).unwrap_err();
        assert_eq!((fabric.card(0).objects(), fabric.complaints()), (0, Vec::new()), "{error}");
        error.to_string()
    };
    let expect = |words: &str, change: &dyn Fn(&mut Model)| {
        let said = refused(change);
        assert!(said.contains(words), "{said}");
    };
    expect("takes no DEVX commands", &|model| model.devx = false);
    expect("fetch-add of 8 bytes", &|model| model.atomics = false);
    expect("completion version 0, needed: 1", &|model| model.cqe_version = 0);
    expect("elements of bytes 32, needed: 64", &|model| model.max_element = 32);
    expect("elements is 8, allowed on", &|model| model.log_max_qp_size = 7);
    expect("elements is 8, allowed on", &|model| model.log_max_cq_size = 7);
    expect("is not active", &|model| model.up = false);
    expect("no mlx5 adapter", &|model| model.mlx5 = false);
}

/// The window stays as long as the adapter knows it, whatever its backend does.
#[test]
fn lanes_hold_what_keeps_their_window() {
    let fabric = Fabric::builder(1, Link::Ethernet).stepped();
    let layout = layout(2);
    let window = HostDevice.memory(layout.window_bytes() as usize, Home::Device).unwrap();
    let address = window.address();
    let keeper: Arc<dyn Any + Send + Sync> = Arc::new(window);
    let kept = Arc::downgrade(&keeper);
    let memory = WindowMemory::Device { address, keeper: Some(&keeper), dmabuf: None, copies: None };
    let place = DevicePlace { me: Rank(0), layout: &layout, window: memory };
    let settings = Settings::new().devices([fabric.card(0).name()]);
    let lanes = Ibgda::new(library(), HostDevice, settings).open(place).unwrap();
    drop(keeper);
    assert!(kept.upgrade().is_some(), "the adapter knows the window");
    drop(lanes);
    assert!(kept.upgrade().is_none());
    assert_eq!((fabric.card(0).objects(), fabric.complaints()), (0, Vec::new()));
}

/// A rank takes no other adapter in place of its own, which others have as well.
#[test]
fn an_adapter_that_was_asked_for_and_is_down_is_named_to_the_rank_whose_it_is() {
    let down = Model { up: false, ..Model::new(Link::Ethernet) };
    let down = Fabric::builder(1, Link::Ethernet).model(down).stepped();
    let up = Fabric::builder(1, Link::Ethernet).stepped();
    let names = [down.card(0).name(), up.card(0).name()];
    let layout = layout(2);
    let open = |names: Vec<String>| {
        let window = HostDevice.memory(layout.window_bytes() as usize, Home::Device).unwrap();
        let memory = WindowMemory::Device { address: window.address(), keeper: None, dmabuf: None, copies: None };
        let place = DevicePlace { me: Rank(0), layout: &layout, window: memory };
        let lanes = Ibgda::new(library(), HostDevice, Settings::new().devices(names)).open(place);
        lanes.map(|lanes| lanes.description().to_owned()).map_err(|error| error.to_string())
    };
    let [first, second] = names.clone();
    let said = open(vec![first.clone(), second.clone()]).unwrap_err();
    assert!(said.contains(&first) && said.contains("is not active"), "{said}");
    let taken = open(vec![second.clone(), first]).unwrap();
    assert!(taken.contains(&second) && taken.contains("among 2 asked for"), "{taken}");
}

/// Every call that may fail, failed once at each place where it is made: an error that names it, nothing left, no complaint.
#[test]
fn whatever_fails_is_named_and_leaves_nothing_behind() {
    let functions = [
        "mlx5dv_open_device",
        "ibv_query_port",
        "ibv_alloc_pd",
        "ibv_reg_mr",
        "mlx5dv_devx_query_eqn",
        "mlx5dv_devx_alloc_uar",
        "mlx5dv_devx_umem_reg",
        "ibv_create_ah",
    ];
    let opcodes = [0x100, 0x400, 0x500, 0x502, 0x503, 0x504];
    let layout = layout(2);
    let try_with = |plan: &dyn Fn(&Fabric)| {
        let fabric = Fabric::builder(2, Link::Ethernet).running();
        plan(&fabric);
        let outcome = connected(&fabric, &layout, &Settings::new()).map(drop).map_err(|error| error.to_string());
        let left = [0, 1].map(|card| fabric.card(card).objects());
        assert_eq!((left, fabric.complaints()), ([0; 2], Vec::new()), "{outcome:?}");
        outcome
    };
    for function in functions {
        // A page of another kind, or memory shown in another way, serves as well: these fail every time.
        let again =
            if matches!(function, "ibv_reg_mr" | "mlx5dv_devx_alloc_uar" | "mlx5dv_devx_umem_reg") { 4 } else { 1 };
        let said =
            try_with(&|fabric| (0..again).for_each(|_| fabric.card(0).fail(function, 0, 12))).expect_err(function);
        assert!(said.contains(function) || function == "mlx5dv_open_device", "{said}");
    }
    for opcode in opcodes {
        let failed =
            (0..8).filter(|&after| try_with(&|fabric| fabric.card(0).refuse(opcode, after, 3, 1)).is_err()).count();
        assert!(failed > 0, "{opcode:#x}");
        let said = try_with(&|fabric| fabric.card(0).refuse(opcode, 0, 3, 0xab12_cd34)).unwrap_err();
        assert!(said.contains("status 0x3, syndrome 0xab12cd34"), "{said}");
    }
}
