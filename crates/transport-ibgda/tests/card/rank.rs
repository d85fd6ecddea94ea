//! Ranks of one process on cards made of software, and the verbs that their "kernels" post by.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;
use std::time::Duration;

use ep_core::device::FarStatus;
use ep_core::port::{LaneId, LaneKind, Offset, Span};
use ep_core::transport::{DeviceLanes, DevicePlace, DeviceTransport, Home, PostingDevice, PostingMemory, WindowMemory};
use ep_core::{Layout, Placement, Rank, Shape, Topology};
use ep_ibgda::{HostDevice, HostMemory, Ibgda, IbgdaLanes, Library, Settings};
use soft_hca::Fabric;

use crate::common::{Mutation, compile};

type Put = unsafe extern "C" fn(u64, u64, u64, u64, u64, *mut u64) -> u32;
type Publish = unsafe extern "C" fn(u64, u64, u64, u64) -> u32;
type Flush = unsafe extern "C" fn(u64, u64, u64) -> u32;
type Step = unsafe extern "C" fn(*mut c_void);
type Meanwhile = unsafe extern "C" fn(Option<Step>, *mut c_void);
type Poll = unsafe extern "C" fn(u64) -> u32;

/// The verbs' text, compiled and loaded.
#[derive(Debug)]
pub(crate) struct Verbs {
    put: Put,
    publish: Publish,
    flush: Flush,
    poll: Poll,
    meanwhile: Meanwhile,
    _library: libloading::Library,
    _folder: tempfile::TempDir,
}

/// Steps of the cards between two accesses of a verb.
const STEPS: u32 = 8;

/// A number of [`FarStatus`].
fn status(number: u32) -> FarStatus {
    use FarStatus::{Broken, Gone, Ok, Refused, Stalled, Timeout};
    let all = [Ok, Broken, Timeout, Stalled, Gone, Refused];
    all.into_iter().find(|&status| status as u32 == number).unwrap_or_else(|| panic!("a status of {number}"))
}

impl Verbs {
    /// The text as it is, or with one change. None where there is no compiler.
    pub(crate) fn new(settings: &Settings, mutation: Option<Mutation<'_>>) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let options = ["-shared", "-fPIC", "-DLATE_STORES", "-o", "verbs.so"];
        compile(folder.path(), settings, mutation, ("verbs.cpp", include_str!("verbs.cpp")), &options)?;
        // SAFETY: just compiled, of functions with these signatures and without initialisers that matter.
        let library = unsafe { libloading::Library::new(folder.path().join("verbs.so")) }.expect("the library loads");
        // SAFETY: as above.
        let (put, publish, flush, poll, meanwhile) = unsafe {
            (
                *library.get::<Put>("test_put").expect("put"),
                *library.get::<Publish>("test_publish").expect("publish"),
                *library.get::<Flush>("test_flush").expect("flush"),
                *library.get::<Poll>("test_poll").expect("poll"),
                *library.get::<Meanwhile>("test_meanwhile").expect("meanwhile"),
            )
        };
        Some(Self { put, publish, flush, poll, meanwhile, _library: library, _folder: folder })
    }

    pub(crate) fn put(&self, state: u64, from: Span, to: Offset, allowed: Duration) -> (FarStatus, u64) {
        let (mut ticket, allowed) = (0, allowed.as_nanos() as u64);
        // SAFETY: a lane's state, which lives as long as its lanes; one thread posts.
        let number = unsafe { (self.put)(state, from.offset.0, to.0, from.len, allowed, &mut ticket) };
        (status(number), ticket)
    }

    pub(crate) fn publish(&self, state: u64, cell: Offset, bits: u64, allowed: Duration) -> FarStatus {
        // SAFETY: as above.
        status(unsafe { (self.publish)(state, cell.0, bits, allowed.as_nanos() as u64) })
    }

    pub(crate) fn flush(&self, state: u64, ticket: u64, allowed: Duration) -> FarStatus {
        // SAFETY: as above.
        status(unsafe { (self.flush)(state, ticket, allowed.as_nanos() as u64) })
    }

    pub(crate) fn poll(&self, state: u64) -> FarStatus {
        // SAFETY: as above.
        status(unsafe { (self.poll)(state) })
    }
}

/// From here on the calling thread's verbs let the cards of a fabric go on between their accesses, for as long as the value lives.
#[derive(Debug)]
pub(crate) struct Meantime<'a> {
    verbs: &'a Verbs,
    _fabric: PhantomData<&'a Fabric>,
}

impl<'a> Meantime<'a> {
    pub(crate) fn new(verbs: &'a Verbs, fabric: &'a Fabric) -> Self {
        unsafe extern "C" fn step(fabric: *mut c_void) {
            // SAFETY: what `new` passed, which outlives the value.
            let fabric = unsafe { &*fabric.cast_const().cast::<Fabric>() };
            (0..STEPS).for_each(|_| _ = fabric.step());
        }
        // SAFETY: the fabric outlives the value, which ends this when it is dropped, on the same thread.
        unsafe { (verbs.meanwhile)(Some(step), ptr::from_ref(fabric).cast_mut().cast()) };
        Self { verbs, _fabric: PhantomData }
    }
}

impl Drop for Meantime<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing is called any more.
        unsafe { (self.verbs.meanwhile)(None, ptr::null_mut()) };
    }
}

/// The cards' functions.
pub(crate) fn library() -> Library {
    // SAFETY: they are those of the interface, by the crate's word.
    unsafe { Library::from(soft_hca::symbol) }.expect("it has all functions")
}

/// A window for so many nodes of one rank each.
pub(crate) fn layout(nodes: u32) -> Layout {
    let topology = Topology::new(nodes, 1).expect("a topology");
    let shape = Shape::builder().experts(nodes).topk(1).hidden(256).max_tokens(8).build().expect("a shape");
    let settings = ep_core::Settings::builder(&shape, &topology).channels(2).slots(8).chunk(2).credit(2).far_slots(16);
    let settings = settings.far_chunk(2).far_credit(2).placement(Placement::Ring).low_latency(false);
    Layout::new(&shape, &topology, &settings.build().expect("settings")).expect("a layout")
}

/// A rank, from its window to its lanes.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) lanes: IbgdaLanes<HostDevice>,
    pub(crate) window: HostMemory,
    pub(crate) me: Rank,
}

impl Member {
    /// A rank on a card of its own, not connected.
    pub(crate) fn open(fabric: &Fabric, layout: &Layout, me: u32, settings: &Settings) -> Result<Self, ep_core::Error> {
        let window = HostDevice.memory(layout.window_bytes() as usize, Home::Device)?;
        let settings = settings.clone().devices([fabric.card(me as usize).name()]);
        let place = DevicePlace {
            me: Rank(me),
            layout,
            window: WindowMemory::Device { address: window.address(), keeper: None, dmabuf: None, copies: None },
        };
        let lanes = Ibgda::new(library(), HostDevice, settings).open(place)?;
        Ok(Self { lanes, window, me: Rank(me) })
    }

    pub(crate) fn read(&self, span: Span) -> Vec<u8> {
        let mut bytes = vec![0; span.len as usize];
        HostDevice.read(self.window.address() + span.offset.0, &mut bytes).expect("own memory");
        bytes
    }

    pub(crate) fn write(&self, at: Offset, bytes: &[u8]) {
        HostDevice.write(self.window.address() + at.0, bytes).expect("own memory");
    }

    pub(crate) fn cell(&self, at: Offset) -> u64 {
        u64::from_ne_bytes(self.read(at.span(8)).try_into().expect("eight bytes"))
    }

    pub(crate) fn state(&self, peer: u32, kind: LaneKind) -> u64 {
        self.lanes.state(LaneId { peer: Rank(peer), kind }).expect("such a lane")
    }
}

/// Tells every rank all offers; those of `absent` are not there.
pub(crate) fn connect(members: &mut [Member], absent: &[u32]) -> Result<(), ep_core::Error> {
    let mut offers: Vec<Option<Vec<u8>>> = Vec::new();
    for member in members.iter_mut() {
        let takes_part = !absent.contains(&member.me.0);
        offers.push(if takes_part { Some(member.lanes.offer()?) } else { None });
    }
    for member in members.iter_mut().filter(|member| !absent.contains(&member.me.0)) {
        let me = member.me.index();
        let others = offers.iter().enumerate().map(|(rank, offer)| if rank == me { None } else { offer.clone() });
        member.lanes.connect(&others.collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Ranks on cards, connected.
pub(crate) fn connected(fabric: &Fabric, layout: &Layout, settings: &Settings) -> Result<Vec<Member>, ep_core::Error> {
    let ranks = 0..layout.topology().ranks();
    let mut members = ranks.map(|me| Member::open(fabric, layout, me, settings)).collect::<Result<Vec<_>, _>>()?;
    connect(&mut members, &[])?;
    Ok(members)
}
