//! Dispatch and combine in virtual time.

use crate::common::{DEADLINE, pause};
use ep_conformance::drive::{Round, round};
use ep_conformance::verify;
use ep_conformance::workload::Workload;
use ep_core::engine::low_latency::LowRouting;
use ep_core::engine::{Combine, Engine, Routing};
use ep_core::reference::World;
use ep_core::{Element, Endpoint, LowLatency, Nanos, Placement, Rank, RankSet, Scaling, Settings, Shape, Topology};
use ep_sim::{Builder, Cluster, Machine, Model, Rate, Run};

fn shape(experts: u32, hidden: u32, tokens: u32) -> Shape {
    Shape::builder().experts(experts).topk(8).hidden(hidden).max_tokens(tokens).build().unwrap()
}

fn builder(topology: Topology, shape: &Shape, placement: Placement, model: Model) -> Builder {
    let arena = 4 * u64::from(topology.ranks()) * u64::from(shape.max_tokens()) * (shape.row_bytes() + 512);
    let settings = Settings::builder(shape, &topology).placement(placement).arena_bytes(arena).build().unwrap();
    Cluster::builder(topology).settings(settings).timed(model)
}

/// `[ranks][tokens, topk]`: the same whatever the hidden size.
fn choices(shape: &Shape, topology: &Topology) -> Vec<Vec<i64>> {
    let thin = Shape::builder().experts(shape.experts()).topk(shape.topk()).hidden(1).build().unwrap();
    let workload = Workload::new(thin, vec![shape.max_tokens(); topology.ranks() as usize]).seed(3);
    workload.batches().unwrap().into_iter().map(|batch| batch.topk_idx).collect()
}

#[test]
fn rounds_agree_with_the_oracle() {
    for (nodes, locals) in [(1, 1), (1, 4), (2, 4), (3, 2)] {
        for (placement, pull) in [(Placement::Ring, false), (Placement::Direct, true)] {
            let topology = Topology::new(nodes, locals).unwrap();
            let shape = shape(48, 32, 40);
            let world = World::new(shape, topology, RankSet::new()).unwrap();
            let workload = Workload::new(shape, vec![shape.max_tokens(); topology.ranks() as usize]);
            let batches = workload.seed(3).batches().unwrap();
            let cluster = builder(topology, &shape, placement, Model::h800_cx7()).build(shape).unwrap();
            let run = cluster.run(async |mut ep| {
                let how = Round { pull, return_weights: true, ..Round::default() };
                let batch = &batches[ep.rank().index()];
                round(&mut ep, &world, batch, &how).await.unwrap().0
            });
            let observed = run.unwrap().finished();
            verify::run(&world, &batches, &observed).unwrap_or_else(|wrong| panic!("{nodes} x {locals}: {wrong}"));
        }
    }
}

/// When a dispatch and a combine of rows of zeros ended on each rank, both begun by all ranks at the same time.
async fn times(mut ep: Engine<Machine>, choices: &[Vec<i64>]) -> [Nanos; 2] {
    let topk_idx = choices[ep.rank().index()].clone();
    let tokens = (topk_idx.len() / ep.shape().topk() as usize) as u32;
    let row = ep.shape().row_bytes() as usize;
    let x = ep.rows(&vec![0; tokens as usize * row], tokens).unwrap();
    let routing = Routing::TopK { topk_idx, topk_weights: None };
    let got = ep.dispatch(&x, &routing).await.unwrap();
    let dispatched = ep.now();
    let result = 2 * ep.shape().hidden() as usize;
    let y = ep.rows(&vec![0; got.rows as usize * result], got.rows).unwrap();
    ep.combine(&y, &got.handle, Combine::default()).await.unwrap();
    [dispatched, ep.now()]
}

fn run(builder: Builder, shape: &Shape, topology: &Topology) -> Run<[Nanos; 2]> {
    let choices = choices(shape, topology);
    builder.build(*shape).unwrap().run(async |ep| times(ep, &choices).await).unwrap()
}

#[test]
fn two_runs_have_the_same_records() {
    let (topology, shape) = (Topology::new(2, 2).unwrap(), shape(16, 64, 32));
    let records = || run(builder(topology, &shape, Placement::Ring, Model::h800_cx7()).record(true), &shape, &topology);
    let (one, two) = (records(), records());
    assert!(one.records.len() > 1000);
    assert_eq!(one.records, two.records);
    assert_eq!((one.events, one.time), (two.events, two.time));
    let mut by_role = std::collections::BTreeMap::new();
    for record in &one.records {
        let last = by_role.insert((record.rank, record.role), record.at).unwrap_or_default();
        assert!(last <= record.at, "{record:?} after {last}");
    }
    let mut json = String::new();
    ep_core::trace::perfetto(&one.records, &mut json).unwrap();
    assert!(json.contains("rank 3"));
}

#[test]
fn elided_payload_takes_the_same_time_to_the_nanosecond_and_no_memory() {
    let (ring, direct, pulled) = (Placement::Ring, Placement::Direct, Placement::Pulled);
    let fp8 = Element::Fp8(Scaling::Exact);
    for (nodes, locals) in [(1, 4), (2, 3), (3, 1)] {
        for (placement, hidden, topk, element) in [
            (ring, 1000, 3, Element::Bf16),
            (direct, 1000, 8, Element::Bf16),
            (pulled, 1000, 3, Element::Bf16),
            (pulled, 1024, 8, fp8),
        ] {
            if placement == pulled && nodes > 1 {
                continue;
            }
            let topology = Topology::new(nodes, locals).unwrap();
            let shape = Shape::builder()
                .experts(24)
                .topk(topk)
                .hidden(hidden)
                .max_tokens(100)
                .element(element)
                .build()
                .unwrap();
            let model = builder(topology, &shape, placement, Model::h800_cx7());
            let whole = run(model.clone().record(true), &shape, &topology);
            let elided = run(model.elide_payload(true).record(true), &shape, &topology);
            assert_eq!((whole.time, whole.events), (elided.time, elided.events), "{nodes} x {locals}, {placement:?}");
            assert_eq!(whole.records.len(), elided.records.len());
            let moments = |run: &Run<[Nanos; 2]>| run.records.iter().map(|record| record.at).collect::<Vec<_>>();
            assert_eq!(moments(&whole), moments(&elided));
            assert_eq!(whole.outcomes, elided.outcomes);
            assert!(elided.resident * 3 < whole.resident, "{} of {} bytes", elided.resident, whole.resident);
        }
    }
}

#[test]
fn a_large_dispatch_comes_near_the_rate_of_its_links() {
    // Cores that cost nothing to speak of: what is left are the links.
    let model = Model::builder().near(Rate::gb_per_s(100), Nanos(500)).far(Rate::gb_per_s(20), Nanos(2000));
    let fast = Rate::gb_per_s(100_000);
    let model = model.copy(fast).reduce(fast).build().unwrap();
    for (nodes, locals, rate) in [(1, 4, 100), (2, 2, 20)] {
        let (topology, shape) = (Topology::new(nodes, locals).unwrap(), shape(256, 7168, 4096));
        let run = run(builder(topology, &shape, Placement::Ring, model).elide_payload(true), &shape, &topology);
        let [dispatched, _] = run.outcomes[0].finished().unwrap();
        // Every token goes to all other ranks or, between nodes, once to the other node: a few reach less.
        let copies = if nodes == 1 { 3.0 * 0.9 } else { 1.0 };
        let bytes = 4096.0 * copies * 14416.0;
        let reached = bytes / dispatched.0 as f64;
        assert!(reached > 0.95 * f64::from(rate) && reached < 1.02 * f64::from(rate), "{reached} GB/s of {rate}");
    }
}

#[test]
fn latency_and_bandwidth_are_as_they_were() {
    let mut table = String::from("topology  tokens  dispatch ns  combine ns  dispatch MB/s per rank\n");
    for (nodes, locals) in [(1, 4), (2, 4)] {
        for tokens in [1, 128, 4096] {
            let (topology, shape) = (Topology::new(nodes, locals).unwrap(), shape(256, 7168, tokens));
            let model = if nodes == 1 { Model::h200_node() } else { Model::h800_cx7() };
            let run = run(builder(topology, &shape, Placement::Ring, model).elide_payload(true), &shape, &topology);
            let ranks = run.finished();
            let last = |at: usize| ranks.iter().map(|times| times[at].0).max().unwrap();
            let (dispatch, combine) = (last(0), last(1) - last(0));
            let rows: u64 = received(&shape, &topology);
            let rate = rows * shape.row_bytes() * 1000 / dispatch / u64::from(topology.ranks());
            table += &format!("{nodes} x {locals}     {tokens:>6}  {dispatch:>11}  {combine:>10}  {rate:>22}\n");
        }
    }
    insta::assert_snapshot!(table);
}

/// Rows that all ranks receive, their own included.
fn received(shape: &Shape, topology: &Topology) -> u64 {
    let local = i64::from(shape.experts() / topology.ranks());
    let of = |choices: &[i64]| {
        let mut ranks: Vec<i64> = choices.iter().map(|expert| expert / local).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks.len() as u64
    };
    choices(shape, topology).iter().flat_map(|choices| choices.chunks(shape.topk() as usize)).map(of).sum()
}

/// Whoever comes late is whom the others waited for, in both modes; nobody else kept them waiting half as long.
#[test]
fn statistics_say_who_kept_the_others_waiting() {
    const LATE: Rank = Rank(2);
    const PAUSE: Nanos = Nanos(1_000_000);
    for (low_latency, units) in [(false, false), (true, false), (true, true)] {
        let (topology, shape) = (Topology::new(1, 3).unwrap(), shape(24, 64, 8));
        let settings = Settings::builder(&shape, &topology).low_latency(low_latency).low_latency_units(units);
        let cluster = Cluster::builder(topology)
            .settings(settings.build().unwrap())
            .timed(Model::h200_node())
            .deadlines(true)
            .build(shape)
            .unwrap();
        let choices = choices(&shape, &topology);
        let run = cluster.run(async |mut ep| {
            let (me, topk_idx) = (ep.rank(), choices[ep.rank().index()].clone());
            let x = ep.rows(&vec![0; 8 * shape.row_bytes() as usize], 8).unwrap();
            if me == LATE {
                pause(ep.machine(), ep.now() + PAUSE).await;
            }
            // In the second one nobody is late.
            for _ in 0..2 {
                if low_latency {
                    ep.low_latency_dispatch(&x, &LowRouting::new(topk_idx.clone(), None)).await.unwrap();
                } else {
                    let routing = Routing::TopK { topk_idx: topk_idx.clone(), topk_weights: None };
                    ep.dispatch(&x, &routing).await.unwrap();
                }
            }
            ep.stats().peers.iter().map(|peer| peer.waited).collect::<Vec<_>>()
        });
        for (me, waited) in topology.all().zip(run.unwrap().finished()) {
            for (peer, waited) in topology.all().zip(waited) {
                let kept_waiting = me != LATE && peer == LATE;
                assert_eq!(
                    waited.0 > PAUSE.0 / 2,
                    kept_waiting,
                    "{me} waited {waited} for {peer}, low latency: {low_latency}, units: {units}"
                );
                assert!(waited.0 < 2 * PAUSE.0, "{me} waited {waited} for {peer}, units: {units}");
            }
        }
    }
}

/// Ranks that give up at the same time speak in turn, and lower ones first: what the first says the others hear before their own turns.
#[test]
fn who_gives_up_first_speaks_for_all() {
    let (topology, shape, lost) = (Topology::new(1, 4).unwrap(), shape(32, 64, 1), Rank(3));
    let settings = Settings::builder(&shape, &topology).deadline(DEADLINE).build().unwrap();
    let cluster = Cluster::builder(topology).settings(settings).timed(Model::h200_node()).deadlines(true);
    let run = cluster.build(shape).unwrap().run(async |mut ep| {
        if ep.rank() == lost {
            return None;
        }
        let x = ep.rows(&[], 0).unwrap();
        let routing = Routing::TopK { topk_idx: Vec::new(), topk_weights: None };
        let error = ep.dispatch(&x, &routing).await.unwrap_err();
        error.failure().map(|failure| (failure.culprit, failure.reporter))
    });
    let all = Some((lost, Rank(0)));
    assert_eq!(run.unwrap().finished(), [all, all, all, None]);
}
