//! The far verbs on a GPU: what a kernel posts through FIFOs in pinned memory. Needs a GPU, and so is not run by default:
//! `cargo test --release -p ep-cuda --lib proxy::tests::gpu -- --ignored --nocapture --test-threads 1`.

use std::sync::Arc;

use ep_core::device::FarStatus;
use ep_core::transport::{DeviceLanes as _, Lanes as _};
use ep_loop::Loop;

use super::pair::{Home, LONG, Pair};
use super::*;
use crate::args::Posts;
use crate::build::{self, Cache, Source};
use crate::driver::{Device, Kernel, Launch, Mapped, Mode, Module, Stream};
use crate::proxy::PinnedFifos;

/// A GPU, and what posts on it.
struct Gpu {
    device: Arc<Device>,
    stream: Arc<Stream>,
    posts: Kernel,
    out: Mapped,
}

/// What a launch posts; the rest is the pair's.
#[derive(Clone, Copy)]
struct Work {
    bytes: u64,
    places: u64,
    puts: u64,
    every: u64,
    published: u64,
    waits: bool,
}

impl Gpu {
    fn new() -> Self {
        let device = Device::open(0).expect("a GPU");
        let stream = Stream::new(&device, 0).expect("a stream");
        let target = Source::Posts.variants(&device.arch()).remove(0);
        let code = build::code(&Cache::of_user(), &target).expect("compiled");
        let posts = Module::load(&device, &code).and_then(|module| module.kernel(Source::Posts.kernel(), 0));
        let out = Mapped::zeroed(&device, 16).expect("pinned memory");
        Self { posts: posts.expect("loaded"), device, stream, out }
    }

    fn pair(&self, network: Loop, log_slots: u32) -> Pair<Loop, PinnedFifos> {
        Pair::with(network, log_slots, Home::Host, |bytes| PinnedFifos::new(&self.stream, bytes))
    }

    /// How it ended, and the nanoseconds that it took.
    fn run(&self, pair: &Pair<Loop, PinnedFifos>, work: Work) -> (FarStatus, u64) {
        let arena = pair.ends[0].arena().0;
        let args = Posts {
            lane: pair.ends[0].lanes.state(pair.ends[0].rows()).expect("a queue for each role"),
            from: arena,
            to: arena,
            bytes: work.bytes,
            places: work.places,
            puts: work.puts,
            every: work.every,
            cell: pair.ends[0].cells()[0].0,
            published: work.published,
            waits: work.waits.into(),
            allowed: LONG.as_nanos() as u64,
            out: self.out.address(),
        };
        let shape = Launch { blocks: 1, threads: 32, shared_memory: 0, mode: Mode::Plain };
        // SAFETY: the kernel's one parameter; the lane's memory and `out` live until the stream was waited for. Nobody else posts to the lane.
        unsafe { self.posts.launch_alone(&self.device, self.stream.raw() as usize, shape, &args) }.expect("launched");
        self.stream.synchronize().expect("the kernel ends");
        (FarStatus::of(self.out.long(0) as u32).expect("a status"), self.out.long(8))
    }
}

/// F1, F3: rows that a kernel posts arrive whole, before their tail; FIFOs of one command to more than there are.
#[test]
#[ignore = "needs a GPU"]
fn what_a_kernel_posts_arrives_intact() {
    let gpu = Gpu::new();
    for (seed, network, log_slots) in [(1u8, network(), 0), (2, late(), 2), (3, network(), 9)] {
        let pair = gpu.pair(network, log_slots);
        let (work, arena) =
            (Work { bytes: 272, places: 300, puts: 300, every: 7, published: 0, waits: false }, pair.ends[0].arena());
        let rows: Vec<u8> = (0..work.bytes * work.places).map(|at| (at % 251) as u8 ^ seed).collect();
        pair.ends[0].window.write(arena, &rows);
        assert_eq!(gpu.run(&pair, work).0, FarStatus::Ok);
        let (tail, began) = (pair.ends[0].cells()[0], Instant::now());
        while pair.ends[1].window.cell(tail) < 294 {
            assert!(began.elapsed() < LONG, "the last tail came as {}", pair.ends[1].window.cell(tail));
        }
        let announced = arena.span(294 * work.bytes);
        assert!(pair.ends[1].window.read(announced) == rows[..announced.len as usize], "seed {seed}");
    }
}

/// F6, F8: a put that leaves the window breaks the lane, and the kernel ends at once.
#[test]
#[ignore = "needs a GPU"]
fn a_kernel_hears_that_its_lane_has_broken() {
    let gpu = Gpu::new();
    let pair = gpu.pair(network(), 3);
    let beyond = Work { bytes: 1 << 30, places: 2, puts: 1000, every: 1, published: 0, waits: false };
    let (status, nanoseconds) = gpu.run(&pair, beyond);
    assert_eq!(status, FarStatus::Refused);
    assert!(u128::from(nanoseconds) < LONG.as_nanos() / 2, "not by its deadline");
}

/// What one thread of the host takes from a kernel, and what it adds to a put that the kernel waits for.
#[test]
#[ignore = "needs a GPU, and a host that does nothing else"]
fn speed() {
    let gpu = Gpu::new();
    let pair = gpu.pair(network(), 9);
    let mut published = 0;
    let mut rates = Vec::new();
    for (bytes, every) in [(16, 1_000_000), (16, 8), (16, 1), (7168, 8)] {
        let puts = 400_000;
        let times = (0..5).map(|_| {
            let (status, took) = gpu.run(&pair, Work { bytes, places: 1, puts, every, published, waits: false });
            assert_eq!(status, FarStatus::Ok);
            published += puts;
            took
        });
        let rate = (puts + puts / every) as f64 / times.min().expect("five") as f64 * 1e3;
        println!("{bytes} bytes a put, a publish behind each {every}: {rate:.2} million commands a second");
        rates.push(rate);
    }
    let waited = Work { bytes: 64, places: 1, puts: 20_000, every: 1_000_000, published, waits: true };
    let by_kernel = (0..5).map(|_| gpu.run(&pair, waited).1 / waited.puts).min().expect("five");
    let at = pair.ends[0].arena();
    let rows = pair.ends[0].rows();
    let mut work = pair.ends[0].lanes.shared.between_turns();
    let transport = &mut work.transport;
    let by_host = (0..5).map(|_| {
        let began = Instant::now();
        for _ in 0..waited.puts {
            let ticket = transport.put(rows, at.span(64), at).expect("accepted").expect("room");
            while !transport.flush(rows, ticket).expect("well") {
                transport.progress();
            }
        }
        began.elapsed().as_nanos() as u64 / waited.puts
    });
    let by_host = by_host.min().expect("five");
    println!("a put of 64 bytes that is waited for: {by_kernel} ns by a kernel, {by_host} ns by the host itself");
    assert!(rates[0] >= 1.5, "{rates:?} million commands a second, allowed: at least 1.5");
    assert!(by_kernel <= by_host + 6000, "the proxy adds {} ns, allowed: 6000", by_kernel - by_host);
}
