//! The simulator's timed scheduler: events a second, an event being one entry taken from its agenda. Recording is off,
//! payload elided, hidden 7168, top-8. Making the cluster is timed with the run, routing is not.
//!
//! *layers*: engines of 64 ranks, one node and eight, a few dispatches and combines of 128 tokens a rank. *low_latency*: engines
//! of 64 and 1024 ranks, one low-latency dispatch and combine, each rank with a routing of its own. *slots*: 64 and 1024 ranks
//! that put rows to each other as a low-latency dispatch does, on the machine contract alone: each token to a slot at each of 8
//! experts' ranks, then a publish to every rank. So *slots* shows the scheduler, the others the roles on it.
//!
//! The last part of a name is the number of threads: one, and where there are several nodes one a core. With `--test`, which shows
//! that they run, there are 64 ranks at most.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ep_core::engine::low_latency::LowRouting;
use ep_core::engine::{Combine, Engine, Routing};
use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Port as _, Role, Work};
use ep_core::{Endpoint, LowLatency, Nanos, Rank, Settings, Shape, Topology};
use ep_sim::{Cluster, Machine, Model, Run};

const TOKENS: u32 = 128;
/// Dispatches and combines of one run.
const LAYERS: u32 = 5;

fn shape(experts: u32) -> Shape {
    Shape::builder().experts(experts).topk(8).hidden(7168).max_tokens(TOKENS).build().expect("a valid shape")
}

fn cluster(nodes: u32, locals: u32, arena: u64) -> Cluster {
    let topology = Topology::new(nodes, locals).expect("a valid topology");
    let shape = shape(topology.ranks().max(256));
    let settings =
        Settings::builder(&shape, &topology).arena_bytes(arena).low_latency(true).build().expect("valid settings");
    let builder = Cluster::builder(topology).settings(settings).timed(Model::h800_cx7()).elide_payload(true);
    builder.max_events(u64::MAX).build(shape).expect("a cluster")
}

/// Dispatches and combines.
async fn layers(mut ep: Engine<Machine>, topk_idx: &[i64]) {
    let row = ep.shape().row_bytes() as usize;
    let x = ep.rows(&vec![0; TOKENS as usize * row], TOKENS).expect("rows");
    let routing = Routing::TopK { topk_idx: topk_idx.to_vec(), topk_weights: None };
    for _ in 0..LAYERS {
        let got = ep.dispatch(&x, &routing).await.expect("a dispatch");
        let y = ep.rows(&vec![0; got.rows as usize * row], got.rows).expect("rows");
        black_box(ep.combine(&y, &got.handle, Combine::default()).await.expect("a combine"));
    }
}

/// A low-latency dispatch and combine.
async fn low_latency(mut ep: Engine<Machine>, choices: &[Vec<i64>]) {
    let topk_idx = &choices[ep.rank().index()];
    let (row, tokens) = (ep.shape().result_bytes() as usize, ep.shape().max_tokens());
    let x = ep.rows(&vec![0; TOKENS as usize * row], TOKENS).expect("rows");
    let routing = LowRouting::new(topk_idx.to_vec(), Some(vec![1.0; topk_idx.len()]));
    let got = ep.low_latency_dispatch(&x, &routing).await.expect("a dispatch");
    let rows = ep.topology().ranks() * tokens * ep.layout().local_experts();
    let y = ep.rows(&vec![0; rows as usize * row], rows).expect("rows");
    drop(got.x);
    black_box(ep.low_latency_combine(&y, &got.handle, None).await.expect("a combine"));
}

/// Rows to slots of the peers that hold a token's experts, and a publish to each peer at the end.
async fn slots(machine: Machine, topk_idx: &[i64]) {
    let (me, layout) = (machine.rank(), machine.layout().clone());
    let (ranks, bytes) = (layout.topology().ranks(), layout.row().wire_bytes());
    let opening = Opening { role: Role::new(Duty::Probe), op: 1, generation: 1, deadline: Nanos::from_secs(1) };
    let mut port = machine.port(opening);
    let lane = |peer| LaneId { peer, kind: LaneKind::Data(0) };
    let cell = |writer| Cell::new(writer, LaneKind::Data(0), Counter::Probe);
    let base = layout.arena().offset;
    for (token, experts) in (0u64..).zip(topk_idx.chunks(layout.shape().topk() as usize)) {
        for &expert in experts {
            let peer = layout.rank_of_expert(expert as u32);
            port.charge(Work::Row { bytes });
            let slot = base.plus((u64::from(me.0) * u64::from(TOKENS) + token) * layout.row().slot_bytes());
            port.put(lane(peer), slot.span(bytes), slot).await.expect("a put");
        }
    }
    for peer in (1..ranks).map(|step| Rank((me.0 + step) % ranks)) {
        port.publish(lane(peer), cell(me), 1).await.expect("a publish");
    }
    for peer in (1..ranks).map(|step| Rank((me.0 + step) % ranks)) {
        port.wait_any(&[Need { cell: cell(peer), at_least: 1 }]).await.expect("a publish comes");
    }
}

/// Times `times` runs.
fn time<T>(times: u64, run: impl Fn() -> Run<T>) -> Duration {
    let began = Instant::now();
    for _ in 0..times {
        black_box(run().events);
    }
    began.elapsed()
}

/// Numbers of threads to run so many nodes on.
fn threads(nodes: u32) -> Vec<NonZeroUsize> {
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let most = cores.min(NonZeroUsize::new(nodes as usize).unwrap_or(NonZeroUsize::MIN));
    let mut counts = vec![NonZeroUsize::MIN, most];
    counts.dedup();
    counts
}

fn timed(c: &mut Criterion) {
    let mut group = c.benchmark_group("timed");
    group.sample_size(10);
    for (nodes, locals) in [(1, 64), (8, 8)] {
        let cluster = cluster(nodes, locals, 0);
        let topk_idx = moexpress_benches::routing(cluster.layout().shape(), TOKENS, 0);
        for threads in threads(nodes) {
            let run =
                || cluster.run_on(threads, async |ep| layers(ep, &topk_idx).await).expect("a run without findings");
            let once = run();
            println!("{nodes} x {locals}: {} events in {} of virtual time", once.events, once.time);
            group.throughput(Throughput::Elements(once.events));
            let name = format!("layers/{nodes}x{locals}/{threads}");
            group.bench_function(name, |b| b.iter_custom(|times| time(times, run)));
        }
    }
    let most = if std::env::args().any(|argument| argument == "--test") { 8 } else { 128 };
    for (nodes, locals) in [(1, 64), (8, 8), (128, 8)].into_iter().filter(|&(nodes, _)| nodes <= most) {
        let cluster = cluster(nodes, locals, 0);
        let shape = *cluster.layout().shape();
        let choices: Vec<_> =
            (0..u64::from(nodes * locals)).map(|seed| moexpress_benches::routing(&shape, TOKENS, seed)).collect();
        for threads in threads(nodes) {
            let run = || {
                let each = async |ep| low_latency(ep, &choices).await;
                cluster.run_on(threads, each).expect("a run without findings")
            };
            let began = Instant::now();
            let once = run();
            println!(
                "{nodes} x {locals}, low latency, {threads} threads: {} events, {} of virtual time, {} MB of windows, {:?}",
                once.events,
                once.time,
                once.resident / 1_000_000,
                began.elapsed()
            );
            group.throughput(Throughput::Elements(once.events));
            let name = format!("low_latency/{nodes}x{locals}/{threads}");
            group.bench_function(name, |b| b.iter_custom(|times| time(times, run)));
        }
    }
    for (nodes, locals) in [(1, 64), (most, 8)] {
        let cluster = cluster(nodes, locals, 1 << 30);
        let topk_idx = moexpress_benches::routing(cluster.layout().shape(), TOKENS, 0);
        let each = async |machine| slots(machine, &topk_idx).await;
        for threads in threads(nodes) {
            let run = || cluster.run_machines_on(threads, each).expect("a run without findings");
            let once = run();
            println!(
                "{nodes} x {locals}: {} events in {} of virtual time, {} MB",
                once.events,
                once.time,
                once.resident / 1_000_000
            );
            group.throughput(Throughput::Elements(once.events));
            let name = format!("slots/{nodes}x{locals}/{threads}");
            group.bench_function(name, |b| b.iter_custom(|times| time(times, run)));
        }
    }
    group.finish();
}

criterion_group!(benches, timed);
criterion_main!(benches);
