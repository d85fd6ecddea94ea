//! Low latency as units: results of small batches travel so, and those of large ones lie in slots. Which, the head of the dispatch says.

use crate::common::{DEADLINE, SEEDS};
use crate::low::{HIDDEN, KINDS, MAX, RANKS, batch, bf16, dispatch, layer, layers, persist, shape, weights, wrong};
use ep_core::engine::Engine;
use ep_core::layout::LowKind;
use ep_core::machine::Machine as _;
use ep_core::plant::Plant;
use ep_core::port::{Counter, LaneKind, Tag};
use ep_core::trace::{Record, Verb};
use ep_core::{Endpoint, Error, Layout, LowLatency, Nanos, Rank, Settings, Topology};
use ep_sim::{Builder, Cluster, Incident, Machine};

/// Of a batch whose results travel as units, at most.
const LIMIT: u32 = 3;

/// A cluster after so many operations.
fn cluster(before: u64, plant: Option<Plant>) -> Builder {
    let topology = Topology::new(1, RANKS).unwrap();
    // Of each token's results half come from the other rank.
    let bytes = u64::from(LIMIT * HIDDEN * 2);
    let settings = Settings::builder(&shape(), &topology).low_latency(true).low_latency_units(true).deadline(DEADLINE);
    let settings = settings.low_latency_unit_bytes(bytes).build().unwrap().with_operations_before(before);
    let settings = plant.map_or(settings, |plant| settings.with_plant(plant));
    Cluster::builder(topology).settings(settings).deadlines(true)
}

/// Nothing is wrong under any seed; with the fault something is under some, and always has one of `signs`.
fn caught(plant: Plant, signs: &[&str], play: impl AsyncFn(&mut Engine<Machine>) -> Result<bool, Error>) {
    let mut found = 0;
    for seed in 0..SEEDS {
        assert_eq!(wrong(&cluster(0, None), seed, &play), None, "seed {seed}");
        if let Some(error) = wrong(&cluster(0, Some(plant)), seed, &play) {
            assert!(signs.iter().any(|sign| error.contains(sign)), "seed {seed}: {error}, expected one of {signs:?}");
            found += 1;
        }
    }
    assert!(found > 0, "{plant:?} went unnoticed");
}

/// How many results `rank` has put into slots in operation 2, and how many arrivals it has published, as `records` say.
fn in_slots(records: &[Record], rank: Rank) -> (usize, usize) {
    let settings =
        Settings::builder(&shape(), &Topology::new(1, RANKS).unwrap()).low_latency(true).low_latency_units(true);
    let layout = Layout::new(&shape(), &Topology::new(1, RANKS).unwrap(), &settings.build().unwrap()).unwrap();
    let slots = layout.low_part(2, rank);
    let mine = || records.iter().filter(|record| record.rank == rank);
    let put =
        |record: &&Record| matches!(record.verb, Verb::Put { to, .. } if to >= slots.offset.0 && to < slots.end());
    let arrival = |record: &&Record| match record.verb {
        Verb::Publish { lane, cell, .. } => {
            lane.kind == LaneKind::LowRows && matches!(cell.counter, Counter::Even | Counter::Odd)
        }
        _ => false,
    };
    (mine().filter(put).count(), mine().filter(arrival).count())
}

#[test]
fn results_for_a_batch_at_the_limit_are_units_and_those_for_one_token_more_lie_in_slots() {
    for kind in KINDS {
        let run = cluster(0, None).record(true).build(shape()).unwrap().run(async |mut ep| {
            assert_eq!(ep.machine().layout().low_unit_tokens(kind), LIMIT);
            let tokens = [LIMIT, LIMIT + 1][ep.rank().index()];
            assert!(layer(&mut ep, (tokens, 7, kind)).await.unwrap());
        });
        let records = run.unwrap_or_else(|violation| panic!("{violation}")).records;
        // Each rank has one expert: a result for each token of the other rank.
        assert_eq!(in_slots(&records, Rank(0)), (LIMIT as usize + 1, 1), "{kind:?}: for rank 1, whose batch is large");
        assert_eq!(in_slots(&records, Rank(1)), (0, 0), "{kind:?}: for rank 0, whose batch is small");
    }
}

/// Small, large, and small again, in one bank: what lies there of the last small one has the tag of then.
#[test]
fn units_of_the_last_use_are_not_taken_for_new_ones() {
    let play = async |ep: &mut Engine<Machine>| layers(ep, &[[LIMIT, 1], [MAX, MAX], [1, LIMIT], [LIMIT, MAX]]).await;
    caught(Plant::TagOfLastUse, &["race", "a wrong result", "waited"], play);
    let found = |seed| wrong(&cluster(0, Some(Plant::TagOfLastUse)), seed, play);
    assert!((0..SEEDS).filter_map(found).any(|error| !error.contains("waited")), "no unit was taken for a new one");
}

#[test]
fn a_rank_that_returns_results_in_another_form_than_their_rank_awaits_is_told() {
    let form = ["form of low-latency results", "waited"];
    for (plant, tokens) in [
        (Plant::FormOfTheOwnBatch, [1, MAX]),
        (Plant::FormOfTheOwnBatch, [MAX, LIMIT]),
        (Plant::UnitLimitOffByOne, [1, LIMIT + 1]),
        (Plant::TokensOffByOne, [LIMIT, 0]),
    ] {
        caught(plant, &form, async |ep| layers(ep, &[tokens, tokens]).await);
        let told = |seed| wrong(&cluster(0, Some(plant)), seed, async |ep| layers(ep, &[tokens]).await);
        assert!((0..SEEDS).filter_map(told).any(|error| error.contains(form[0])), "{plant:?}: nobody names the form");
    }
}

/// What goes to a rank whose bank was not free in time is sent again by the receiving half. The head of a dispatch says the same then, and results
/// come in the form that they have.
#[test]
fn what_was_held_travels_in_the_form_that_its_batch_has() {
    // What rank 1 says of having received comes after the time allowed.
    let by = Nanos(DEADLINE.0 / 4 * 5);
    let late = Incident::Delay { from: Rank(1), to: Rank(0), kind: Some(LaneKind::LowDone), by, after: 0 };
    let sizes = [[MAX, LIMIT], [LIMIT, MAX]];
    for (seed, tokens, results) in (0..SEEDS)
        .flat_map(|seed| sizes.into_iter().flat_map(move |tokens| [false, true].map(|results| (seed, tokens, results))))
    {
        let cluster = cluster(0, None).incident(late).seed(seed).build(shape()).unwrap();
        let run = cluster.run(async |mut ep| {
            let tokens = tokens[ep.rank().index()];
            let (x, routing) = batch(&mut ep, (tokens, 1, LowKind::PerChoice));
            let [first, second] = [ep.send_dispatch(&x, &routing).await?, ep.send_dispatch(&x, &routing).await?];
            let got = ep.receive_dispatch(&first).await?;
            // The third operation is held: results, or a dispatch.
            let combine = if results {
                let combine = ep.send_combine(&got.x, &got.handle, Some(&weights(tokens))).await?;
                persist(async || ep.receive_dispatch(&second).await).await?;
                combine
            } else {
                let third = ep.send_dispatch(&x, &routing).await?;
                persist(async || ep.receive_dispatch(&second).await).await?;
                let got = persist(async || ep.receive_dispatch(&third).await).await?;
                ep.send_combine(&got.x, &got.handle, Some(&weights(tokens))).await?
            };
            let back = persist(async || ep.receive_combine(&combine).await).await?;
            Ok(ep.bytes(&back.x)? == bf16(RANKS).repeat((tokens * HIDDEN) as usize))
        });
        let run = run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}"));
        let right: Vec<Result<bool, Error>> = run.finished();
        assert_eq!(right, [Ok(true), Ok(true)], "seed {seed}: {tokens:?}, results {results}");
    }
}

/// Results that were put into slots and not received may land after all have agreed to go on. Nothing else is written there.
#[test]
fn results_put_into_slots_before_a_recovery_fall_upon_nothing() {
    let play = async |ep: &mut Engine<Machine>| {
        // Its combine has the bank of the second operation of what follows.
        let (y, handle) = dispatch(ep, (MAX, 1, LowKind::PerChoice)).await?;
        drop(ep.send_combine(&y, &handle, Some(&weights(MAX))).await?);
        ep.rejoin().await?;
        for fill in [2, 3] {
            dispatch(ep, (MAX, fill, LowKind::PerChoice)).await?;
        }
        layers(ep, &[[1, MAX], [MAX, LIMIT]]).await
    };
    caught(Plant::UnitsLaidOutInSlots, &["race"], play);
    let found = |seed| wrong(&cluster(0, Some(Plant::UnitsLaidOutInSlots)), seed, play);
    let race = (0..SEEDS).find_map(found).unwrap();
    assert!(race.contains("low slots") && race.contains("is not ordered after write by a put"), "{race}");
}

/// The same of units: those of a batch that nobody received lie where a stretch of tags begins. They are cleared when all peers have published
/// something since.
#[test]
fn memory_for_units_is_cleared_after_a_recovery() {
    let last = (1..).find(|&power| Tag::era(1 << power) == 1).map(|power| (1u64 << power) - 1).unwrap();
    let play = async |ep: &mut Engine<Machine>| {
        let (x, routing) = batch(ep, (MAX, 1, LowKind::PerChoice));
        drop(ep.send_dispatch(&x, &routing).await?);
        ep.rejoin().await?;
        layers(ep, &[[1, LIMIT], [MAX, 1]]).await
    };
    for seed in 0..SEEDS {
        assert_eq!(wrong(&cluster(last - 1, None), seed, play), None, "seed {seed}");
    }
    let early = |seed| wrong(&cluster(last - 1, Some(Plant::ClearedBeforeAnyPublish)), seed, play);
    assert!((0..SEEDS).filter_map(early).any(|error| error.contains("low units")), "cleared early, and nobody noticed");
}
