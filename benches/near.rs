//! Near lanes of the host backend between two threads: a ring beside `rtrb`, and whole calls beside `memcpy`.
//!
//! *Ring*: messages of 64 to 14336 bytes through 256 slots, published and returned in batches of 64; `rtrb` moves the same messages
//! in chunks of 64. A message of ours is copied three times (into staging memory, into the ring, out of it), `rtrb`'s twice.
//!
//! *Calls*: dispatch and combine of two ranks, hidden 7168. Their throughput is in bytes copied, as the counting decorator counts
//! them; that of `memcpy` is of two threads that copy rows at the same time. So the ratio of two lines is the share of `memcpy`
//! that remains when the copies are paid.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ep_core::engine::{Combine, Engine, Routing};
use ep_core::machine::{Decorated, Machine};
use ep_core::port::{Counts, LaneClass};
use ep_core::{Endpoint as _, Placement, Settings, Shape, Topology};
use ep_host::Cluster;
use moexpress_benches::ring::{MESSAGES, messages};

const RANKS: u32 = 2;
const SLOTS: u32 = 256;
const BATCH: u32 = 64;

const TOKENS: u32 = 512;
const HIDDEN: u32 = 7168;
const ROW_BYTES: usize = HIDDEN as usize * 2;

fn topology() -> Topology {
    Topology::new(1, RANKS).expect("a valid topology")
}

/// Both ends of a fresh ring, from the moment that both are there.
fn ring(count: u64, bytes: usize) -> Duration {
    let shape = Shape::builder().experts(2).topk(1).hidden(bytes as u32 / 2).build().expect("a valid shape");
    let builder = Settings::builder(&shape, &topology()).channels(1).slots(SLOTS).chunk(BATCH).credit(BATCH);
    let cluster = Cluster::builder(topology()).settings(builder.build().expect("valid settings"));
    let there = Barrier::new(RANKS as usize);
    let times = cluster.build(shape).expect("a cluster").run_machines(async |machine| {
        // Pages are taken when they are first used.
        moexpress_benches::ring::touch(&machine);
        there.wait();
        let began = Instant::now();
        moexpress_benches::ring::play(&machine, count, bytes).await.expect("a ring");
        let took = began.elapsed();
        // A rank that leaves is gone for the other.
        there.wait();
        took
    });
    times.expect("ranks that end").into_iter().max().unwrap_or_default()
}

/// The same messages through `rtrb`.
fn rtrb<const BYTES: usize>(count: u64) -> Duration {
    let (mut producer, mut consumer) = rtrb::RingBuffer::<[u8; BYTES]>::new(SLOTS as usize);
    let there = Barrier::new(2);
    let (count, batch) = (count as usize, BATCH as usize);
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let messages: Vec<[u8; BYTES]> =
                messages(BYTES).into_iter().map(|message| message.try_into().expect("so long")).collect();
            there.wait();
            let began = Instant::now();
            let mut sent = 0usize;
            while sent < count {
                let Ok(chunk) = producer.write_chunk_uninit(batch.min(count - sent)) else {
                    std::hint::spin_loop();
                    continue;
                };
                sent += chunk.fill_from_iter((sent..).map(|number| messages[number % MESSAGES]));
            }
            began.elapsed()
        });
        there.wait();
        let began = Instant::now();
        let mut message = [0u8; BYTES];
        let mut got = 0usize;
        while got < count {
            let Ok(chunk) = consumer.read_chunk(batch.min(count - got)) else {
                std::hint::spin_loop();
                continue;
            };
            let (first, second) = chunk.as_slices();
            for from in first.iter().chain(second) {
                message = *from;
                assert_eq!(usize::from(message[0]), got % MESSAGES, "message {got} is another");
                got += 1;
            }
            chunk.commit_all();
        }
        black_box(&message);
        began.elapsed().max(sender.join().expect("a sender"))
    })
}

fn rings(c: &mut Criterion) {
    let mut group = c.benchmark_group("near/ring");
    group.throughput(Throughput::Elements(1));
    // A ring is fresh once: many messages, so that its beginning does not count.
    let scaled = |times: u64, run: &dyn Fn(u64) -> Duration| {
        let count = times.max(20_000);
        run(count).mul_f64(times as f64 / count as f64)
    };
    group.bench_function("64 bytes", |b| b.iter_custom(|times| scaled(times, &|count| ring(count, 64))));
    group.bench_function("64 bytes, rtrb", |b| b.iter_custom(|times| scaled(times, &rtrb::<64>)));
    group.bench_function("256 bytes", |b| b.iter_custom(|times| scaled(times, &|count| ring(count, 256))));
    group.bench_function("256 bytes, rtrb", |b| b.iter_custom(|times| scaled(times, &rtrb::<256>)));
    group.bench_function("1024 bytes", |b| b.iter_custom(|times| scaled(times, &|count| ring(count, 1024))));
    group.bench_function("1024 bytes, rtrb", |b| b.iter_custom(|times| scaled(times, &rtrb::<1024>)));
    group.bench_function("14336 bytes", |b| b.iter_custom(|times| scaled(times, &|count| ring(count, ROW_BYTES))));
    group.bench_function("14336 bytes, rtrb", |b| b.iter_custom(|times| scaled(times, &rtrb::<ROW_BYTES>)));
    group.finish();
}

/// What is timed.
#[derive(Clone, Copy)]
enum Part {
    Dispatch,
    /// Combine, out of ordinary memory or out of the window.
    Combine {
        pull: bool,
    },
}

fn shape() -> Shape {
    Shape::builder().experts(64).topk(8).hidden(HIDDEN).max_tokens(TOKENS).build().expect("a valid shape")
}

/// What one rank does: `times` times the part.
async fn play<M: Machine>(
    mut ep: Engine<M>,
    part: Part,
    times: u64,
    there: &Barrier,
    counts: &Counts,
) -> (Duration, u64) {
    let x = ep.rows(&vec![1; TOKENS as usize * ROW_BYTES], TOKENS).expect("rows");
    let topk_idx = moexpress_benches::routing(&shape(), TOKENS, 0);
    let routing = Routing::TopK { topk_idx, topk_weights: None };
    let handle = ep.dispatch(&x, &routing).await.expect("a dispatch").handle;
    let rows = vec![1; handle.rows() as usize * ROW_BYTES];
    let y = match part {
        Part::Combine { pull: true } => {
            let mut y = ep.output(&handle).expect("room in the arena");
            ep.store(&mut y, 0, &rows).expect("as many rows");
            y
        }
        _ => ep.rows(&rows, handle.rows()).expect("rows"),
    };
    drop(ep.dispatch(&x, &routing).await.expect("a dispatch"));
    drop(ep.combine(&y, &handle, Combine::default()).await.expect("a combine"));
    there.wait();
    let before = copied(counts);
    there.wait();
    let began = Instant::now();
    for _ in 0..times {
        match part {
            Part::Dispatch => drop(black_box(ep.dispatch(&x, &routing).await.expect("a dispatch"))),
            Part::Combine { .. } => {
                drop(black_box(ep.combine(&y, &handle, Combine::default()).await.expect("a combine")));
            }
        }
    }
    let took = began.elapsed();
    there.wait();
    (took, copied(counts) - before)
}

/// Bytes copied by all verbs so far.
fn copied(counts: &Counts) -> u64 {
    let lanes: u64 = LaneClass::ALL.iter().map(|&class| counts.lanes(class)).map(|c| c.put_bytes + c.got_bytes).sum();
    counts.read_bytes() + counts.written_bytes() + lanes
}

/// The time of `times` calls, and the bytes that they copied.
fn call(placement: Placement, part: Part, times: u64) -> (Duration, u64) {
    let settings = Settings::builder(&shape(), &topology()).placement(placement).arena_bytes(64 << 20).build();
    let cluster = Cluster::builder(topology()).settings(settings.expect("valid settings")).build(shape());
    let (there, counts) = (Barrier::new(RANKS as usize), Counts::new());
    let ran = cluster.expect("a cluster").run_machines(async |machine| {
        let machine = Decorated::new(machine, counts.clone());
        play(Engine::new(machine).expect("an engine"), part, times, &there, &counts).await
    });
    let ran = ran.expect("ranks that end");
    (ran.iter().map(|(took, _)| *took).max().unwrap_or_default(), ran[0].1)
}

/// Two threads copy `bytes` bytes in rows, each its half.
fn memcpy(bytes: u64, times: u64) -> Duration {
    let rows = bytes as usize / 2 / ROW_BYTES;
    let there = Barrier::new(2);
    let copy = || {
        // As much memory as a call goes over: the rows of a batch, again and again.
        let source = vec![1u8; TOKENS as usize * ROW_BYTES];
        let mut target = vec![0u8; source.len()];
        there.wait();
        let began = Instant::now();
        for _ in 0..times {
            let pairs = target.chunks_exact_mut(ROW_BYTES).zip(source.chunks_exact(ROW_BYTES));
            let mut left = rows;
            for (into, from) in pairs {
                into.copy_from_slice(black_box(from));
                left -= 1;
                if left == 0 {
                    break;
                }
            }
            assert_eq!(left, 0, "fewer rows than a batch");
            black_box(&mut target);
        }
        began.elapsed()
    };
    thread::scope(|scope| {
        let other = scope.spawn(copy);
        copy().max(other.join().expect("a copying thread"))
    })
}

fn calls(c: &mut Criterion) {
    let mut group = c.benchmark_group("near/call");
    group.sample_size(20);
    for (name, placement, part) in [
        ("dispatch, rings", Placement::Ring, Part::Dispatch),
        ("dispatch, placed", Placement::Direct, Part::Dispatch),
        ("combine, rings", Placement::Ring, Part::Combine { pull: false }),
        ("combine, pulled", Placement::Direct, Part::Combine { pull: true }),
    ] {
        let (_, bytes) = call(placement, part, 1);
        group.throughput(Throughput::Bytes(bytes));
        group.bench_function(name, |b| b.iter_custom(|times| call(placement, part, times).0));
    }
    let bytes = u64::from(RANKS) * u64::from(TOKENS) * ROW_BYTES as u64;
    group.throughput(Throughput::Bytes(bytes));
    group.bench_function("memcpy", |b| b.iter_custom(|times| memcpy(bytes, times)));
    group.finish();
}

criterion_group!(benches, rings, calls);
criterion_main!(benches);
