//! The engine on the simulator's explore scheduler, race tracking off, hidden 7168: bytes of received rows (payload) per
//! second on one core. Beside it, `memcpy` of the same bytes, row by row on one thread, as the yardstick.
//!
//! A row that a peer sends has been copied three times when it arrives through a ring (into staging memory, into the
//! ring, out of it), twice when it is placed directly. Starting the cluster and the first dispatch are not timed.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ep_core::{Placement, Settings, Topology};
use ep_sim::Cluster;
use moexpress_benches::calls::{Calls, Part, ROW_BYTES, shape};

const RANKS: u32 = 4;
const TOKENS: u32 = 128;

/// Adversaries, each with inclinations of its own, over which times are averaged.
const SEEDS: u32 = 4;

fn cluster(placement: Placement, seed: u32) -> Cluster {
    let topology = Topology::new(1, RANKS).expect("a valid topology");
    let settings = Settings::builder(&shape(TOKENS), &topology).placement(placement).arena_bytes(64 << 20).build();
    let builder = Cluster::builder(topology).settings(settings.expect("valid settings")).race_tracking(false);
    builder.seed(seed.into()).max_events(u64::MAX).build(shape(TOKENS)).expect("a cluster")
}

/// `times` times the part, from the first rank's first call to the last one's end. All ranks run on this thread.
fn timed(cluster: &Cluster, part: Part, times: u64) -> Duration {
    let run = cluster.run(async |ep| {
        let mut calls = Calls::new(ep, part, moexpress_benches::routing(&shape(TOKENS), TOKENS, 0)).await;
        let began = Instant::now();
        for _ in 0..times {
            calls.call().await;
        }
        [began, Instant::now()]
    });
    let moments = run.expect("a run without findings").finished();
    let began = moments.iter().map(|[began, _]| *began).min();
    let ended = moments.iter().map(|[_, ended]| *ended).max();
    ended.zip(began).map_or(Duration::ZERO, |(ended, began)| ended - began)
}

/// Payload bytes of the rows that all ranks receive in one dispatch, and in one combine.
fn received() -> usize {
    let topk_idx = moexpress_benches::routing(&shape(TOKENS), TOKENS, 0);
    let local = i64::from(shape(TOKENS).experts() / RANKS);
    let ranks =
        |choices: &[i64]| (0..i64::from(RANKS)).filter(|rank| choices.iter().any(|e| e / local == *rank)).count();
    let rows: usize = topk_idx.chunks(shape(TOKENS).topk() as usize).map(ranks).sum();
    RANKS as usize * rows * ROW_BYTES
}

fn engine(c: &mut Criterion) {
    let mut group = c.benchmark_group("engine");
    group.sample_size(10);
    for (name, placement, part) in [
        ("dispatch/ring", Placement::Ring, Part::Dispatch),
        ("dispatch/direct", Placement::Direct, Part::Dispatch),
        ("combine/ring", Placement::Ring, Part::Combine { pull: false }),
        ("combine/pull", Placement::Ring, Part::Combine { pull: true }),
        ("round/ring", Placement::Ring, Part::Round),
    ] {
        let clusters: Vec<_> = (0..SEEDS).map(|seed| cluster(placement, seed)).collect();
        let all = |times| clusters.iter().map(|cluster| timed(cluster, part, times)).sum::<Duration>() / SEEDS;
        let bytes = received() * if part == Part::Round { 2 } else { 1 };
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(name, |b| b.iter_custom(all));
    }
    let source = vec![1u8; received()];
    let mut target = vec![0u8; received()];
    group.throughput(Throughput::Bytes(received() as u64));
    group.bench_function("memcpy", |b| {
        b.iter(|| {
            for (into, from) in target.chunks_exact_mut(ROW_BYTES).zip(source.chunks_exact(ROW_BYTES)) {
                into.copy_from_slice(black_box(from));
            }
            black_box(&mut target);
        });
    });
    group.finish();
}

criterion_group!(benches, engine);
criterion_main!(benches);
