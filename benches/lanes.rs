//! Lanes of the host backend, one after the other, beside `rtrb` and copies: bytes a second, by criterion. `near.rs` takes the same rings
//! in turn, which tells more on a machine that others use, too.
//!
//! *near*: messages from thread to thread through a ring of 256, in batches of 64; a message is copied into the ring and out
//! of it. *far*: a dispatch and a combine of two nodes of one rank over RoCE, where there is a device (`EP_FAR_DEVICES` names one or
//! two: by default it is chosen), and the same rows through two rings of `rtrb`.

use std::hint::black_box;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use ep_host::block_on;
use moexpress_benches::calls::ROW_BYTES;
use moexpress_benches::rings::{BATCH, End, SLOTS, both, drain, fill, machines, messages, per_slot};

/// Messages of an iteration.
const COUNT: usize = 4 * BATCH;

/// The time that two threads take between the two meetings of `work`. Nobody leaves before the other has come to the second: a
/// peer that is gone is a fault.
fn between_meetings(work: impl Fn(usize, &dyn Fn()) + Sync) -> Duration {
    let (there, moments) = (Barrier::new(2), Mutex::new(Vec::new()));
    both(|thread| {
        work(thread, &|| {
            there.wait();
            moments.lock().expect("no thread has panicked").push(Instant::now());
        });
    });
    let moments = moments.into_inner().expect("no thread has panicked");
    moments.iter().max().zip(moments.iter().min()).map_or(Duration::ZERO, |(last, first)| *last - *first)
}

/// `times` times the messages through our ring.
fn ours(times: u64, bytes: usize) -> Duration {
    let slot = per_slot(bytes);
    let machines = machines((SLOTS / slot) as u32, (BATCH / slot) as u32, slot * bytes).map(Mutex::new);
    between_meetings(|thread, meet| {
        let machine = machines[thread].lock().expect("locked once").take().expect("taken once");
        let ready = messages(BATCH, bytes);
        let mut end = End::new(&machine, slot, bytes, false);
        meet();
        (0..times).for_each(|_| block_on(end.run(COUNT, slot, bytes, &ready)));
        meet();
    })
}

/// The same through `rtrb`.
fn rtrb<const BYTES: usize>(times: u64) -> Duration {
    let (producer, consumer) = rtrb::RingBuffer::<[u8; BYTES]>::new(SLOTS);
    let (producer, consumer) = (Mutex::new(producer), Mutex::new(consumer));
    between_meetings(|thread, meet| {
        let ready = messages(BATCH, BYTES);
        if thread == 0 {
            let mut producer = producer.lock().expect("locked once");
            meet();
            (0..times).for_each(|_| fill(&mut producer, COUNT, &ready));
            meet();
        } else {
            let mut consumer = consumer.lock().expect("locked once");
            meet();
            (0..times).for_each(|_| drain(&mut consumer, COUNT));
            meet();
        }
    })
}

/// The same messages copied once, by each of the two threads.
fn memcpy(times: u64, bytes: usize) -> Duration {
    between_meetings(|_, meet| {
        let ready = messages(BATCH, bytes);
        let mut memory = vec![0; SLOTS * bytes];
        meet();
        for number in 0..times as usize * COUNT {
            let into = &mut memory[number % SLOTS * bytes..][..bytes];
            into.copy_from_slice(black_box(&ready[number % BATCH * bytes..][..bytes]));
        }
        black_box(&mut memory);
        meet();
    })
}

fn messages_of<const BYTES: usize>(group: &mut BenchmarkGroup<'_, WallTime>) {
    group.throughput(Throughput::Bytes((COUNT * BYTES) as u64));
    group.bench_function(format!("{BYTES}/lane"), |b| b.iter_custom(|times| ours(times, BYTES)));
    group.bench_function(format!("{BYTES}/rtrb"), |b| b.iter_custom(rtrb::<BYTES>));
    group.bench_function(format!("{BYTES}/memcpy"), |b| b.iter_custom(|times| memcpy(times, BYTES)));
}

fn near(c: &mut Criterion) {
    let mut group = c.benchmark_group("near");
    group.sample_size(20);
    messages_of::<64>(&mut group);
    messages_of::<1024>(&mut group);
    messages_of::<ROW_BYTES>(&mut group);
    group.finish();
}

#[cfg(target_os = "linux")]
mod far {
    use std::sync::Barrier;
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    use criterion::{Criterion, Throughput};
    use ep_core::{Error, Topology};
    use ep_host::Cluster;
    use ep_roce::{Roce, Settings};
    use moexpress_benches::calls::{Calls, Part, ROW_BYTES, shape};

    const TOKENS: u32 = 64;

    /// The variable that names devices, as `--far-devices` of the command does.
    const DEVICES: &str = "EP_FAR_DEVICES";

    fn transport() -> Result<Roce, Error> {
        let settings = Settings::new();
        Ok(Roce::new(match std::env::var(DEVICES) {
            Ok(named) => settings.devices(named.parse()?),
            Err(_) => settings,
        }))
    }

    /// `times` times a dispatch and a combine.
    fn rounds(times: u64) -> Result<Duration, Error> {
        let topology = Topology::new(2, 1)?;
        let cluster = Cluster::builder(topology).far(transport()?).build(shape(TOKENS))?;
        let (there, began) = (Barrier::new(2), Mutex::new(None));
        cluster.run(async |ep| {
            let topk_idx = moexpress_benches::routing(&shape(TOKENS), TOKENS, 0);
            let mut calls = Calls::new(ep, Part::Round, topk_idx).await;
            there.wait();
            began.lock().expect("no rank has panicked").get_or_insert_with(Instant::now);
            for _ in 0..times {
                calls.call().await;
            }
        })?;
        let began = began.lock().expect("no rank has panicked").take();
        Ok(began.map_or(Duration::ZERO, |began| began.elapsed()))
    }

    pub(super) fn far(c: &mut Criterion) {
        if let Err(error) = rounds(0) {
            println!("far lanes are left out: {error}");
            return;
        }
        let mut group = c.benchmark_group("far");
        group.sample_size(10);
        // To the other node and back: every token has an expert on either.
        let rows = u64::from(TOKENS) * 2;
        group.throughput(Throughput::Bytes(2 * rows * ROW_BYTES as u64));
        group.bench_function("round/roce", |b| b.iter_custom(|times| rounds(times).expect("as before")));
        group.bench_function("round/rtrb", |b| {
            b.iter_custom(|times| super::rtrb::<ROW_BYTES>(times * (2 * rows).div_ceil(super::COUNT as u64)));
        });
        group.finish();
    }
}

#[cfg(not(target_os = "linux"))]
mod far {
    pub(super) fn far(_: &mut criterion::Criterion) {
        println!("far lanes are left out: RoCE needs Linux");
    }
}

criterion_group!(benches, near, far::far);
criterion_main!(benches);
