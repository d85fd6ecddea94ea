//! Two ranks of two nodes, each a device of CPU threads with a proxy, and a network between them.

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use ep_core::device::FarStatus;
use ep_core::layout::Queues;
use ep_core::port::{Cell, Counter, LaneId, LaneKind, Offset, Span};
use ep_core::transport::{
    DeviceLanes, DevicePlace, DeviceTransport, Lanes, Mirror, Transport, WindowCopies, WindowMemory,
};
use ep_core::{Error, Layout, Rank, Settings, Shape, Topology};
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::Plant;
use super::device::{Device, Poster};
use crate::proxy::{HostMemory, Proxy, ProxyLanes, Reached};

pub(super) const A: Rank = Rank(0);
pub(super) const B: Rank = Rank(1);
/// How long a verb or wait of a test may take where all goes well.
pub(super) const LONG: Duration = Duration::from_secs(30);

/// A window, as its device sees it.
#[derive(Debug)]
pub(super) struct Window {
    file: OwnedFd,
    base: NonNull<u8>,
    bytes: u64,
    own: Weak<Self>,
    /// What was asked for of the device's memory, and not done yet.
    asked: Mutex<AskedSoFar>,
}

/// Memory of the host beside a window, and what was asked for between them.
#[derive(Debug)]
struct Beside {
    window: Arc<Window>,
    memory: Arc<Window>,
    asked: Mutex<Vec<Between>>,
}

#[derive(Debug)]
enum Between {
    Fetch(Span),
    Store(Span),
    Raise { at: Offset, bits: u64 },
}

/// It takes its time, as the windows do.
impl Mirror for Beside {
    fn file(&self) -> BorrowedFd<'_> {
        self.memory.file.as_fd()
    }

    fn fetch(&self, span: Span) -> Result<(), Error> {
        self.asked.lock().expect("no panic").push(Between::Fetch(span));
        Ok(())
    }

    fn store(&self, span: Span) -> Result<(), Error> {
        self.asked.lock().expect("no panic").push(Between::Store(span));
        Ok(())
    }

    fn raise(&self, at: Offset, bits: u64) -> Result<(), Error> {
        self.asked.lock().expect("no panic").push(Between::Raise { at, bits });
        Ok(())
    }

    fn finish(&self) -> Result<(), Error> {
        thread::yield_now();
        for asked in self.asked.lock().expect("no panic").drain(..) {
            match asked {
                Between::Fetch(span) => self.memory.write(span.offset, &self.window.read(span)),
                Between::Store(span) => self.window.write(span.offset, &self.memory.read(span)),
                Between::Raise { at, bits } => self.window.word(at).store(bits, Ordering::Release),
            }
        }
        Ok(())
    }

    fn word(&self, at: Offset) -> Result<u64, Error> {
        Ok(self.memory.cell(at))
    }

    fn set_word(&self, at: Offset, bits: u64) -> Result<(), Error> {
        self.memory.word(at).store(bits, Ordering::Release);
        Ok(())
    }
}

/// What a host asks of the memory of a device.
#[derive(Debug)]
enum Asked {
    Copy { source: Arc<Window>, from: Span, to: Offset },
    Raise { at: Offset, bits: u64 },
    Mark(u64),
}

#[derive(Debug, Default)]
struct AskedSoFar {
    queue: VecDeque<Asked>,
    /// The last mark asked for, and the last reached.
    marks: u64,
    reached: u64,
    /// How often somebody has looked.
    looks: u64,
}

/// A window in memory of a device that takes its time: nothing is done before it must be.
impl WindowCopies for Window {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn pull(&self, _: usize, source: &dyn WindowCopies, from: Span, to: Offset) -> Result<(), Error> {
        let source = (source as &dyn Any).downcast_ref::<Self>().and_then(|window| window.own.upgrade());
        let source = source.ok_or_else(|| Error::invalid("a window", "another one", "one of this kind"))?;
        self.asked.lock().expect("no panic").queue.push_back(Asked::Copy { source, from, to });
        Ok(())
    }

    fn raise(&self, _: usize, at: Offset, bits: u64) -> Result<(), Error> {
        self.asked.lock().expect("no panic").queue.push_back(Asked::Raise { at, bits });
        Ok(())
    }

    fn mark(&self, _: usize) -> Result<u64, Error> {
        let mut asked = self.asked.lock().expect("no panic");
        asked.marks += 1;
        let mark = asked.marks;
        asked.queue.push_back(Asked::Mark(mark));
        Ok(mark)
    }

    fn reached(&self, _: usize) -> u64 {
        // Now and then something of what was asked for is done.
        let mut asked = self.asked.lock().expect("no panic");
        asked.looks += 1;
        if asked.looks.is_multiple_of(3)
            && let Some(next) = asked.queue.pop_front()
        {
            self.carry_out(&mut asked, next);
        }
        asked.reached
    }

    fn finish(&self) -> Result<(), Error> {
        thread::yield_now();
        let mut asked = self.asked.lock().expect("no panic");
        while let Some(next) = asked.queue.pop_front() {
            self.carry_out(&mut asked, next);
        }
        Ok(())
    }

    fn mirror(&self, bytes: u64) -> Result<Arc<dyn Mirror>, Error> {
        let window = self.own.upgrade().expect("it lives");
        Ok(Arc::new(Beside { window, memory: Window::new(bytes), asked: Mutex::default() }))
    }
}

// SAFETY: an address range of the process. Tests touch bytes as the protocol orders them, and cells as atomics.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    fn carry_out(&self, so_far: &mut AskedSoFar, asked: Asked) {
        match asked {
            Asked::Copy { source, from, to } => self.write(to, &source.read(from)),
            Asked::Raise { at, bits } => self.word(at).store(bits, Ordering::Release),
            Asked::Mark(mark) => so_far.reached = mark,
        }
    }

    fn new(bytes: u64) -> Arc<Self> {
        let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
        ftruncate(&file, bytes).expect("memory");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("sealed");
        let (protection, len) = (ProtFlags::READ | ProtFlags::WRITE, bytes as usize);
        // SAFETY: the system chooses a free range; the file is sealed against shrinking.
        let base = unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &file, 0) }.expect("mapped");
        let base = NonNull::new(base.cast()).expect("not null");
        Arc::new_cyclic(|own| Self { file, base, bytes, own: Weak::clone(own), asked: Mutex::default() })
    }

    fn at(&self, span: Span) -> *mut u8 {
        span.within(self.bytes).expect("inside");
        // SAFETY: inside the mapping.
        unsafe { self.base.as_ptr().add(span.offset.0 as usize) }
    }

    pub(super) fn write(&self, at: Offset, bytes: &[u8]) {
        // SAFETY: the range is inside; whoever reads it is ordered by the protocol that is under test.
        unsafe { std::ptr::copy(bytes.as_ptr(), self.at(at.span(bytes.len() as u64)), bytes.len()) };
    }

    pub(super) fn read(&self, span: Span) -> Vec<u8> {
        let mut bytes = vec![0; span.len as usize];
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy(self.at(span), bytes.as_mut_ptr(), bytes.len()) };
        bytes
    }

    fn word(&self, at: Offset) -> &AtomicU64 {
        // SAFETY: eight aligned bytes inside, which are touched by atomics only.
        unsafe { AtomicU64::from_ptr(self.at(at.span(8)).cast()) }
    }

    pub(super) fn cell(&self, at: Offset) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    /// Waits until a cell is at least so much; false when the time is up.
    fn wait(&self, at: Offset, at_least: u64, allowed: Duration) -> bool {
        let began = Instant::now();
        while self.cell(at) < at_least {
            if began.elapsed() > allowed {
                return false;
            }
            thread::yield_now();
        }
        true
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes as usize) };
    }
}

/// One of two ranks of two nodes.
pub(super) struct End<L: Lanes + 'static, M: Reached + 'static = HostMemory> {
    pub(super) me: Rank,
    /// Before the window: the proxy writes it.
    pub(super) lanes: ProxyLanes<L, M>,
    pub(super) window: Arc<Window>,
    pub(super) layout: Layout,
}

/// Where windows lie, as transports are told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Home {
    Host,
    Device,
}

impl<L: Lanes + 'static, M: Reached + 'static> End<L, M> {
    /// With FIFOs of `2^log_slots` commands in memory that `take` gives.
    pub(super) fn new<T: Transport<Lanes = L>>(
        me: Rank,
        transport: T,
        log_slots: u32,
        home: Home,
        take: impl Fn(usize) -> Result<M, Error>,
    ) -> Self {
        let topology = Topology::new(2, 1).expect("two nodes");
        let shape = Shape::builder().experts(2).topk(1).hidden(64).max_tokens(4).build().expect("a shape");
        let settings = Settings::builder(&shape, &topology).channels(1).arena_bytes(1 << 20).build().expect("settings");
        let layout = Layout::new(&shape, &topology, &settings).expect("a layout");
        let window = Window::new(layout.window_bytes());
        let proxy = Proxy::new(transport, take).log_slots(log_slots).expect("within limits");
        let copies = Arc::clone(&window) as Arc<dyn WindowCopies>;
        let memory = match home {
            Home::Host => WindowMemory::File(window.file.as_fd()),
            Home::Device => WindowMemory::Device { address: 4096, keeper: None, dmabuf: None, copies: Some(&copies) },
        };
        let lanes = proxy.open(DevicePlace { me, layout: &layout, window: memory }).expect("opened");
        Self { me, lanes, window, layout }
    }

    /// The queue of rows from A to B.
    pub(super) fn rows(&self) -> LaneId {
        LaneId { peer: B, kind: LaneKind::Data(self.layout.far_track(0)) }
    }

    /// The posting thread: of rows at A, of credit at B. One thread uses it.
    pub(super) fn poster<'a>(&self, device: &'a Device) -> Poster<'a> {
        let credit = LaneId { peer: A, kind: LaneKind::Credit(self.layout.far_track(0)) };
        let lane = if self.me == A { self.rows() } else { credit };
        // SAFETY: a test keeps the end for as long as it posts, and uses the poster in one thread.
        unsafe { device.poster(self.lanes.state(lane).expect("a queue for each role")) }
    }

    /// Who looks after whoever posts for this rank.
    pub(super) fn lookout<'a>(&self, device: &'a Device) -> Poster<'a> {
        let watch = LaneId { peer: if self.me == A { B } else { A }, kind: LaneKind::Watch };
        // SAFETY: a test keeps the end for as long as it looks.
        unsafe { device.poster(self.lanes.state(watch).expect("a queue for each role")) }
    }

    /// The cells of tails at B, and of heads at A.
    pub(super) fn cells(&self) -> [Offset; 2] {
        let track = self.layout.far_track(0);
        [(A, LaneKind::Data(track), Counter::Tail), (B, LaneKind::Credit(track), Counter::Head)]
            .map(|(writer, lane, counter)| self.layout.cell(Cell { writer, lane, counter }, 0))
    }

    pub(super) fn arena(&self) -> Offset {
        self.layout.regions().into_iter().find(|region| region.name == "arena").expect("an arena").span.offset
    }
}

/// The two ranks, in one process.
pub(super) struct Pair<T: Transport<Lanes: 'static>, M: Reached + 'static = HostMemory> {
    pub(super) ends: [End<T::Lanes, M>; 2],
}

impl<T: Transport<Lanes: 'static> + Clone> Pair<T> {
    pub(super) fn new(transport: T, log_slots: u32) -> Self {
        Self::with(transport, log_slots, Home::Host, HostMemory::new)
    }
}

impl<T: Transport<Lanes: 'static> + Clone, M: Reached + 'static> Pair<T, M> {
    pub(super) fn with(transport: T, log_slots: u32, home: Home, take: impl Fn(usize) -> Result<M, Error>) -> Self {
        let mut pair = Self { ends: [A, B].map(|me| End::new(me, transport.clone(), log_slots, home, &take)) };
        pair.meet();
        pair
    }
}

impl<T: Transport<Lanes: 'static>, M: Reached + 'static> Pair<T, M> {
    pub(super) fn meet(&mut self) {
        let offers: Vec<_> = self.ends.iter_mut().map(|end| Some(end.lanes.offer().expect("an offer"))).collect();
        self.ends.iter_mut().for_each(|end| end.lanes.connect(&offers).expect("connected"));
    }

    pub(super) fn plant(&self, plant: Plant) {
        self.ends[0].lanes.shared.between_turns().lanes.iter_mut().for_each(|lane| lane.plant = plant);
    }

    /// The posting threads of the queue of rows at A, and of that of credit at B. Each is used by one thread.
    pub(super) fn posters<'a>(&self, device: &'a Device) -> [Poster<'a>; 2] {
        self.ends.each_ref().map(|end| end.poster(device))
    }
}

pub(super) const QUEUES: Queues = Queues::PER_ROLE;

/// Messages of random sizes from A to B through a ring, each in pieces, out of staging memory that is used again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    pub(super) seed: u64,
    pub(super) messages: u64,
    /// Messages that staging memory has room for.
    pub(super) staged: u64,
    /// How long each verb and wait may take.
    pub(super) allowed: Duration,
}

const LONGEST: u64 = 6000;
const SLOTS: u64 = 7;
const SLOT: u64 = LONGEST + 64;
/// Where the ring begins, behind the staging memory; both in the arena.
const RING: u64 = 16 * SLOT;

/// What message `number` is: where in its slot it begins, its bytes, and where its pieces end.
fn message(seed: u64, number: u64) -> (u64, Vec<u8>, Vec<u64>) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed << 32 | number);
    let len = if random.random_ratio(1, 8) { random.random_range(1..=16) } else { random.random_range(1..=LONGEST) };
    let mut bytes = vec![0; len as usize];
    random.fill(&mut bytes[..]);
    let mut ends: Vec<u64> =
        (0..random.random_range(0..6)).map(|_| random.random_range(1..=len)).chain([len]).collect();
    ends.sort_unstable();
    ends.dedup();
    (random.random_range(0..64), bytes, ends)
}

impl Traffic {
    /// What went wrong, at the sender and at the receiver.
    pub(super) fn run<T>(self, pair: &Pair<T>, device: &Device) -> [Result<(), String>; 2]
    where
        T: Transport<Lanes: 'static>,
        Pair<T>: Sync,
    {
        thread::scope(|scope| {
            let sender = scope.spawn(|| self.send(&pair.ends[0], device));
            let receiver = scope.spawn(|| self.receive(&pair.ends[1], device));
            [sender, receiver].map(|thread| thread.join().expect("no panic"))
        })
    }

    /// What A does.
    pub(super) fn send<L: Lanes>(self, end: &End<L>, device: &Device) -> Result<(), String> {
        let (rows, [tail, head], arena) = (end.poster(device), end.cells(), end.arena().0);
        let mut tickets = vec![0; self.staged as usize];
        for number in 0..self.messages {
            let told = |verb: &str, status: FarStatus| match status {
                FarStatus::Ok => Ok(()),
                status => Err(format!("{verb} of message {number}: {}", status.name())),
            };
            if !end.window.wait(head, (number + 1).saturating_sub(SLOTS), self.allowed) {
                return Err(format!("no credit for message {number}"));
            }
            let place = number % self.staged;
            told("flush", rows.flush(tickets[place as usize], self.allowed))?;
            let (skew, bytes, ends) = message(self.seed, number);
            let (from, to) = (arena + place * SLOT + skew, arena + RING + number % SLOTS * SLOT + skew);
            end.window.write(Offset(from), &bytes);
            let mut begin = 0;
            for end in ends {
                match rows.put([from + begin, to + begin, end - begin], self.allowed) {
                    Ok(ticket) => tickets[place as usize] = ticket,
                    Err(status) => told("put", status)?,
                }
                begin = end;
            }
            told("publish", rows.publish(tail.0, number + 1, self.allowed))?;
        }
        Ok(())
    }

    /// What B does.
    pub(super) fn receive<L: Lanes>(self, end: &End<L>, device: &Device) -> Result<(), String> {
        let (credit, [tail, head], arena) = (end.poster(device), end.cells(), end.arena().0);
        for number in 0..self.messages {
            if !end.window.wait(tail, number + 1, self.allowed) {
                return Err(format!("message {number} did not come"));
            }
            let (skew, bytes, _) = message(self.seed, number);
            let at = Offset(arena + RING + number % SLOTS * SLOT + skew);
            if end.window.read(at.span(bytes.len() as u64)) != bytes {
                return Err(format!("message {number} has other bytes"));
            }
            match credit.publish(head.0, number + 1, self.allowed) {
                FarStatus::Ok => (),
                status => return Err(format!("credit for message {number}: {}", status.name())),
            }
        }
        Ok(())
    }
}
