//! Near lanes of the host backend between two threads, beside what else could carry the same bytes.
//!
//! *Rings*: messages through a ring that holds 256, published and returned in batches of 64, beside `rtrb` in chunks of 64 and beside
//! two threads that do nothing but copy messages. The sender's messages lie ready in its window, as those of `rtrb` lie ready in
//! memory, so that both copy a message twice: into the ring and out of it. *Batches*: a batch is a slot of the ring, or
//! as many slots as it needs, and put and read at once. *Messages*: each has a put and a read of its own. *Staged*: it lies in ordinary memory and is written to the
//! window first, the third copy.
//!
//! *Pulls*: rows that lie in the other's window, each got into the own window and read from there, in both directions at a time: what a
//! combine does that pulls, without its sums.
//!
//! *Calls*: dispatch and combine of two ranks, hidden 7168. Copies are counted by the decorator that counts verbs; own rows that
//! a call copies without a verb are not among them. Beside it both threads copy rows of the same batch to as much memory as they
//! receive: the share is that of the bytes a second. Beside that, each sends the other a batch through `rtrb` and receives one:
//! what it takes to bring so many rows from core to core and back, whoever does it.
//!
//! What is compared is measured in turn, some milliseconds each, by the same two threads: on a machine that others use, too,
//! figures taken a second apart cannot be compared. Medians.
//!
//! `cargo bench -p moexpress-benches --bench near -- [rings | pulls | calls] [samples]`

use std::hint::black_box;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use ep_core::engine::Engine;
use ep_core::machine::{Counts, Decorated, LaneClass, Machine as _, Opening};
use ep_core::port::{Duty, LaneId, LaneKind, Port as _, Role};
use ep_core::{Nanos, Placement, Rank, Settings};
use ep_host::{Cluster, Machine, block_on};
use moexpress_benches::calls::{self, Calls, Part, ROW_BYTES};
use moexpress_benches::rings::{BATCH, End, SLOTS, both, drain, fill, machines, messages, per_slot, topology};

/// Bytes that one sample of a ring carries, about.
const SAMPLE: usize = 8 << 20;

const TOKENS: u32 = 512;

/// Waits of a whole run end after this time.
const PATIENCE: Nanos = Nanos::from_secs(600);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let test = arguments.iter().any(|argument| argument == "--test");
    let samples = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(if test { 1 } else { 41 });
    let asked = |what: &str| {
        let named = |name: &str| arguments.iter().any(|argument| argument == name);
        named(what) || !["rings", "pulls", "calls"].into_iter().any(named)
    };
    if asked("rings") {
        println!("rings: ns a message, ratio to rtrb");
        println!("{:>7} {:>16} {:>16} {:>16} {:>9} {:>9}", "bytes", "batches", "messages", "staged", "rtrb", "memcpy");
        rings::<64>(samples);
        rings::<256>(samples);
        rings::<1024>(samples);
        rings::<7168>(samples);
        rings::<ROW_BYTES>(samples);
    }
    if asked("pulls") {
        println!("pulls: {TOKENS} rows of a rank; ns a row, GB/s of copied bytes");
        println!("{:>7} {:>9} {:>7} {:>8} {:>8} {:>6}", "bytes", "ns", "copies", "GB/s", "memcpy", "share");
        for bytes in [1024, 7168, ROW_BYTES] {
            pulls(bytes, samples);
        }
    }
    if asked("calls") {
        println!("calls: {TOKENS} tokens a rank, rows of {ROW_BYTES} bytes; GB/s of copied bytes");
        println!(
            "{:<34} {:>8} {:>7} {:>8} {:>8} {:>6} {:>8}",
            "", "ms", "copies", "GB/s", "memcpy", "share", "rtrb ms"
        );
        let pulled = Part::Combine { pull: true };
        for (name, placement, part, apart) in [
            ("dispatch, rings", Placement::Ring, Part::Dispatch, false),
            ("dispatch, rings, all to the peer", Placement::Ring, Part::Dispatch, true),
            ("dispatch, placed", Placement::Direct, Part::Dispatch, false),
            ("dispatch, placed, all to the peer", Placement::Direct, Part::Dispatch, true),
            ("combine, rings", Placement::Ring, Part::Combine { pull: false }, false),
            ("combine, rings, all of the peer", Placement::Ring, Part::Combine { pull: false }, true),
            ("combine, pulled", Placement::Direct, pulled, false),
            ("combine, pulled, all of the peer", Placement::Direct, pulled, true),
        ] {
            call(name, placement, part, apart, samples);
        }
    }
}

/// Times of what is measured in turn: `[variants, samples]`, of the slower thread.
struct Times {
    there: Barrier,
    taken: Mutex<Vec<Vec<[Duration; 2]>>>,
}

impl Times {
    fn new(variants: usize) -> Self {
        Self { there: Barrier::new(2), taken: Mutex::new(vec![Vec::new(); variants]) }
    }

    /// Times what one thread does, which begins when both are there. It does it once before, so that what was measured before it
    /// is not in the caches any more. The first sample of a variant does not count.
    fn time(&self, thread: usize, variant: usize, sample: usize, mut work: impl FnMut()) {
        work();
        self.there.wait();
        let began = Instant::now();
        work();
        let took = began.elapsed();
        // Nobody goes on, or leaves, while the other is at work.
        self.there.wait();
        if let Some(sample) = sample.checked_sub(1) {
            let mut taken = self.taken.lock().expect("no thread has panicked");
            let all = &mut taken[variant];
            all.resize(all.len().max(sample + 1), [Duration::ZERO; 2]);
            all[sample][thread] = took;
        }
    }

    /// Nanoseconds of each sample.
    fn of(&self, variant: usize) -> Vec<f64> {
        let taken = self.taken.lock().expect("no thread has panicked");
        taken[variant].iter().map(|[a, b]| (*a).max(*b).as_nanos() as f64).collect()
    }

    fn median(&self, variant: usize) -> f64 {
        median(self.of(variant))
    }

    /// The median of the ratios, sample by sample.
    fn ratio(&self, variant: usize, to: usize) -> f64 {
        median(self.of(variant).iter().zip(self.of(to)).map(|(a, b)| a / b).collect())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Ours in three ways, `rtrb`, and copies, in turn.
fn rings<const BYTES: usize>(samples: usize) {
    let count = (SAMPLE / (BYTES + 64)).next_multiple_of(BATCH);
    let times = Times::new(5);
    let (mut producer, mut consumer) = rtrb::RingBuffer::<[u8; BYTES]>::new(SLOTS);
    let slots = [per_slot(BYTES), 1, 1];
    let machines_of = |slot: usize| machines((SLOTS / slot) as u32, (BATCH / slot) as u32, slot * BYTES);
    let [left, right]: [Vec<Machine>; 2] = {
        let mut all = slots.map(machines_of);
        [0, 1].map(|rank| all.iter_mut().map(|machines| machines[rank].take().expect("not taken yet")).collect())
    };
    // One of the two threads has the producer, the other the consumer.
    let ends = [Mutex::new((left, Some(&mut producer), None)), Mutex::new((right, None, Some(&mut consumer)))];
    both(|thread| {
        let (machines, producer, consumer) = &mut *ends[thread].lock().expect("taken once");
        let ready = messages(BATCH, BYTES);
        let mut ours: Vec<End<'_>> = (0..)
            .zip(machines.iter().zip(slots))
            .map(|(variant, (machine, slot))| End::new(machine, slot, BYTES, variant == 2))
            .collect();
        let mut memory = vec![0; SLOTS * BYTES];
        for sample in 0..=samples {
            for (variant, (end, slot)) in ours.iter_mut().zip(slots).enumerate() {
                times.time(thread, variant, sample, || block_on(end.run(count, slot, BYTES, &ready)));
            }
            times.time(thread, 3, sample, || {
                if let Some(producer) = producer {
                    fill(producer, count, &ready);
                }
                if let Some(consumer) = consumer {
                    drain(consumer, count);
                }
            });
            times.time(thread, 4, sample, || {
                for number in 0..count {
                    let into = &mut memory[number % SLOTS * BYTES..][..BYTES];
                    into.copy_from_slice(black_box(&ready[number % BATCH * BYTES..][..BYTES]));
                }
                black_box(&mut memory);
            });
        }
    });
    let [batches, messages, staged, rtrb, memcpy] = std::array::from_fn(|at| times.median(at) / count as f64);
    let ratios: [f64; 3] = std::array::from_fn(|at| times.ratio(at, 3));
    println!(
        "{BYTES:>7} {batches:>9.1} {:>6.2} {messages:>9.1} {:>6.2} {staged:>9.1} {:>6.2} {rtrb:>9.1} {memcpy:>9.1}",
        ratios[0], ratios[1], ratios[2],
    );
}

/// Rows got from the other's window and read, and as many copied, in turn.
fn pulls(bytes: usize, samples: usize) {
    /// How often the rows are brought for a sample.
    const TURNS: usize = 4;
    /// Copies: into the own window, and out of it.
    const COPIES: f64 = 2.0;
    let shape = calls::shape(TOKENS);
    let settings = Settings::builder(&shape, &topology()).arena_bytes(16 << 20).build().expect("valid settings");
    let cluster = Cluster::builder(topology()).settings(settings).build(shape).expect("a cluster");
    let machines: Vec<_> = cluster.into_machines().into_iter().map(|machine| Mutex::new(Some(machine))).collect();
    let times = Times::new(2);
    let rows = TOKENS as usize;
    both(|thread| {
        let machine = machines[thread].lock().expect("taken once").take().expect("taken once");
        let (layout, peer) = (machine.layout().clone(), Rank(1 - machine.rank().0));
        let deadline = machine.now() + PATIENCE;
        let mut port = machine.port(Opening { role: Role::new(Duty::Reducer), op: 1, generation: 1, deadline });
        let lane = LaneId { peer, kind: LaneKind::Credit(0) };
        let there = |row: usize| layout.arena().offset.plus((row * bytes) as u64).span(bytes as u64);
        let source = vec![1u8; rows * bytes];
        let mut target = vec![0u8; rows * bytes];
        port.write(layout.arena().offset, &source).expect("the arena is in the window");
        times.there.wait();
        for sample in 0..=samples {
            times.time(thread, 0, sample, || {
                for _ in 0..TURNS {
                    for (row, into) in target.chunks_exact_mut(bytes).enumerate() {
                        let to = layout.pull_slot(0, peer, row as u32).offset;
                        let got = block_on(async {
                            let ticket = port.get(lane, there(row), to).await?;
                            port.flush(lane, ticket).await?;
                            port.read(to, into)
                        });
                        got.expect("no verb fails");
                    }
                    black_box(&mut target);
                }
            });
            times.time(thread, 1, sample, || {
                for _ in 0..TURNS {
                    let rows = black_box(&source).chunks_exact(bytes);
                    target.chunks_exact_mut(bytes).zip(rows).for_each(|(into, from)| into.copy_from_slice(from));
                    black_box(&mut target);
                }
            });
        }
        assert!(target.iter().all(|&byte| byte == 1), "rows of the other");
        times.there.wait();
    });
    let [ours, memcpy] = [0, 1].map(|variant| times.median(variant) / (TURNS * rows) as f64);
    println!(
        "{bytes:>7} {ours:>9.1} {COPIES:>7.2} {:>8.2} {:>8.2} {:>6.2}",
        COPIES * bytes as f64 / ours,
        bytes as f64 / memcpy,
        COPIES / times.ratio(0, 1),
    );
}

/// Sends rows and receives as many, what can be done first.
fn swap<const BYTES: usize>(
    producer: &mut rtrb::Producer<[u8; BYTES]>,
    consumer: &mut rtrb::Consumer<[u8; BYTES]>,
    rows: &[u8],
    into: &mut [u8],
) {
    let (rows, _) = rows.as_chunks::<BYTES>();
    let (into, _) = into.as_chunks_mut::<BYTES>();
    let (mut sent, mut got) = (0, 0);
    while sent < rows.len() || got < rows.len() {
        if let Ok(chunk) = producer.write_chunk_uninit(BATCH.min(rows.len() - sent)) {
            sent += chunk.fill_from_iter(rows[sent..].iter().copied());
        }
        if let Ok(chunk) = consumer.read_chunk(BATCH.min(rows.len() - got)) {
            let (first, second) = chunk.as_slices();
            for row in first.iter().chain(second) {
                into[got] = *row;
                got += 1;
            }
            chunk.commit_all();
        }
    }
    black_box(into);
}

/// Bytes copied by all verbs so far.
fn copied(counts: &Counts) -> u64 {
    let lanes: u64 = LaneClass::ALL.iter().map(|&class| counts.lanes(class)).map(|c| c.put_bytes + c.got_bytes).sum();
    counts.read_bytes() + counts.written_bytes() + lanes
}

/// Experts that tokens of `rank` choose: any, or only the other's.
fn choices(rank: Rank, apart: bool) -> Vec<i64> {
    let shape = calls::shape(TOKENS);
    let local = i64::from(shape.experts() / topology().ranks());
    let mut topk_idx = moexpress_benches::routing(&shape, TOKENS, 0);
    if apart {
        // Sixteen experts of every other eight: still different ones of a token.
        for choices in topk_idx.chunks_exact_mut(shape.topk() as usize) {
            let first = choices[0] % local;
            (0..).zip(choices).for_each(|(at, choice)| *choice = i64::from(1 - rank.0) * local + (first + at) % local);
        }
    }
    topk_idx
}

/// One kind of call and copies, in turn.
fn call(name: &str, placement: Placement, part: Part, apart: bool, samples: usize) {
    /// Calls of a sample, and as often is copied.
    const CALLS: usize = 4;
    let shape = calls::shape(TOKENS);
    let settings = Settings::builder(&shape, &topology()).placement(placement).arena_bytes(64 << 20).build();
    let cluster = Cluster::builder(topology()).settings(settings.expect("valid settings")).build(shape);
    let counts = Counts::new();
    let machines = cluster.expect("a cluster").into_machines().into_iter();
    let machines: Vec<_> = machines.map(|machine| Mutex::new(Some(machine))).collect();
    let (times, rows) = (Times::new(3), Mutex::new([([0; 2], 0); 2]));
    let [(left, there), (right, back)] = [(); 2].map(|()| rtrb::RingBuffer::<[u8; ROW_BYTES]>::new(SLOTS));
    let swaps = [Mutex::new((left, back)), Mutex::new((right, there))];
    both(|thread| {
        let machine = machines[thread].lock().expect("taken once").take().expect("taken once");
        let rank = machine.rank();
        let engine = Engine::new(Decorated::new(machine, counts.clone())).expect("an engine");
        let mut calls = block_on(Calls::new(engine, part, choices(rank, apart)));
        times.there.wait();
        let before = copied(&counts);
        times.there.wait();
        let source = vec![1u8; TOKENS as usize * ROW_BYTES];
        let mut target = vec![0u8; calls.received() as usize * ROW_BYTES];
        let mut swapped = vec![0u8; source.len()];
        let (producer, consumer) = &mut *swaps[thread].lock().expect("locked once");
        for sample in 0..=samples {
            times.time(thread, 0, sample, || {
                for _ in 0..CALLS {
                    block_on(calls.call());
                }
            });
            times.time(thread, 1, sample, || {
                for _ in 0..CALLS {
                    let rows = black_box(&source).chunks_exact(ROW_BYTES).cycle();
                    target.chunks_exact_mut(ROW_BYTES).zip(rows).for_each(|(into, from)| into.copy_from_slice(from));
                    black_box(&mut target);
                }
            });
            times.time(thread, 2, sample, || {
                for _ in 0..CALLS {
                    swap(producer, consumer, &source, &mut swapped);
                }
            });
        }
        times.there.wait();
        let copied = (copied(&counts) - before) / (2 * (samples + 1) * CALLS) as u64;
        rows.lock().expect("no thread has panicked")[thread] = ([calls.received(), calls.carried()], copied);
        times.there.wait();
    });
    let [(first, copied), (second, _)] = *rows.lock().expect("no thread has panicked");
    let [received, carried] = [0, 1].map(|at| u64::from(first[at] + second[at]) * ROW_BYTES as u64);
    let rate = |bytes: u64, variant: usize| bytes as f64 * CALLS as f64 / times.median(variant);
    println!(
        "{name:<34} {:>8.2} {:>7.2} {:>8.2} {:>8.2} {:>6.2} {:>8.2}",
        times.median(0) / CALLS as f64 / 1e6,
        copied as f64 / carried as f64,
        rate(copied, 0),
        rate(received, 1),
        copied as f64 / received as f64 / times.ratio(0, 1),
        times.median(2) / CALLS as f64 / 1e6,
    );
}
