//! Low latency whose rows are announced one by one, beyond what the suite sees: rows that come late, operations that are dropped or held, and a peer
//! that goes on without the rank that waits for its row.

use crate::common::{DEADLINE, SEEDS};
use crate::low::{HIDDEN, MAX, RANKS, batch, bf16, dispatch, layers, persist, shape, weights, wrong};
use ep_core::engine::Engine;
use ep_core::layout::LowKind;
use ep_core::plant::Plant;
use ep_core::port::LaneKind;
use ep_core::trace::Verb;
use ep_core::{Endpoint, Error, LowLatency, Nanos, Rank, Settings, Topology};
use ep_sim::{Builder, Cluster, Incident, Machine};

fn cluster(plant: Option<Plant>) -> Builder {
    let topology = Topology::new(1, RANKS).unwrap();
    let settings = Settings::builder(&shape(), &topology).low_latency(true).low_latency_announced(true);
    let settings = settings.deadline(DEADLINE).build().unwrap();
    let settings = plant.map_or(settings, |plant| settings.with_plant(plant));
    Cluster::builder(topology).settings(settings).deadlines(true)
}

/// What rank 1 posts on this lane to rank 0 comes so long after it was posted.
fn late(kind: LaneKind, by: Nanos) -> Incident {
    Incident::Delay { from: Rank(1), to: Rank(0), kind: Some(kind), by, after: 0 }
}

/// All but one row have come, and the arrival, which is ahead. The others are taken; for the last one the rank waits.
#[test]
fn a_row_that_comes_late_is_waited_for() {
    for seed in 0..SEEDS {
        for token in [0, 2, MAX as u16 - 1] {
            let builder = cluster(None).incident(late(LaneKind::LowRow(token), Nanos(DEADLINE.0 / 8)));
            let play = async |ep: &mut Engine<Machine>| layers(ep, &[[MAX, MAX], [1, 3]]).await;
            assert_eq!(wrong(&builder, seed, play), None, "seed {seed}, token {token}");
        }
    }
}

/// A rank that dropped a batch waits for all its rows, or for all results, before their bank is filled again.
#[test]
fn what_is_dropped_is_waited_for_row_by_row() {
    let play = async |ep: &mut Engine<Machine>| {
        let (x, routing) = batch(ep, (MAX, 1, LowKind::PerChoice));
        drop(ep.send_dispatch(&x, &routing).await?);
        let (y, handle) = dispatch(ep, (MAX, 2, LowKind::PerChoice)).await?;
        drop(ep.send_combine(&y, &handle, Some(&weights(MAX))).await?);
        layers(ep, &[[MAX, MAX], [2, MAX]]).await
    };
    for seed in 0..SEEDS {
        let builder = |plant| cluster(plant).incident(late(LaneKind::LowRow(2), Nanos(DEADLINE.0 / 8)));
        assert_eq!(wrong(&builder(None), seed, play), None, "seed {seed}");
    }
    let found = |seed| wrong(&cluster(Some(Plant::RowNotAwaited)), seed, play);
    assert!((0..SEEDS).filter_map(found).any(|error| error.contains("race")), "nobody waits, and nobody noticed");
}

/// Of a rank whose bank was not free in time the rows of an operation come when those of the next one have come. Each bank has cells of its own.
#[test]
fn what_was_held_comes_behind_the_next_operation() {
    // What rank 1 says of having received comes after the time allowed.
    let late = late(LaneKind::LowDone, Nanos(DEADLINE.0 / 4 * 5));
    let run = |seed, plant| {
        let play = async |ep: &mut Engine<Machine>| {
            let (x, routing) = batch(ep, (MAX, 1, LowKind::PerChoice));
            let [first, second] = [ep.send_dispatch(&x, &routing).await?, ep.send_dispatch(&x, &routing).await?];
            let got = ep.receive_dispatch(&first).await?;
            let third = ep.send_dispatch(&x, &routing).await?;
            persist(async || ep.receive_dispatch(&second).await).await?;
            let fourth = ep.send_combine(&got.x, &got.handle, Some(&weights(MAX))).await?;
            persist(async || ep.receive_dispatch(&third).await).await?;
            let back = persist(async || ep.receive_combine(&fourth).await).await?;
            Ok(ep.bytes(&back.x)? == bf16(RANKS).repeat((MAX * HIDDEN) as usize))
        };
        wrong(&cluster(plant).incident(late), seed, play)
    };
    let mut found = 0;
    for seed in 0..SEEDS {
        assert_eq!(run(seed, None), None, "seed {seed}");
        found += u64::from(run(seed, Some(Plant::OneRowCell)).is_some());
    }
    assert!(found > 0, "one cell for both banks went unnoticed");
}

/// A peer that goes on without this rank says so, wherever this rank waits: here for a row that was said to come.
#[test]
fn who_waits_for_a_row_is_told_that_it_was_masked() {
    let mut masked = 0;
    for seed in 0..SEEDS {
        let builder = cluster(None).incident(late(LaneKind::LowRow(1), Nanos(DEADLINE.0 / 2)));
        let run = builder.seed(seed).build(shape()).unwrap().run(async |mut ep| {
            let (x, routing) = batch(&mut ep, (MAX, 1, LowKind::PerChoice));
            let sent = ep.send_dispatch(&x, &routing).await?;
            if ep.rank() == Rank(1) {
                ep.mask_rank(Rank(0)).await?;
                return Ok(());
            }
            ep.receive_dispatch(&sent).await.map(drop)
        });
        let ended: Vec<Result<(), Error>> =
            run.unwrap_or_else(|violation| panic!("seed {seed}: {violation}")).finished();
        // Now and then the peer takes its time, and the row is there before.
        let Err(told) = &ended[0] else { continue };
        assert!(told.to_string().contains("masked"), "seed {seed}: {told}");
        masked += 1;
    }
    assert!(masked > 0, "no rank was masked while it waited");
}

/// An arrival is ahead of what it announces, and nobody is asked for a bank that is owed no results.
#[test]
fn an_arrival_is_ahead_of_the_rows() {
    let run = cluster(None).record(true).build(shape()).unwrap().run(async |mut ep| {
        assert!(layers(&mut ep, &[[MAX, MAX]]).await.unwrap());
    });
    let records = run.unwrap_or_else(|violation| panic!("{violation}")).records;
    let of_first = records.iter().filter(|record| record.rank == Rank(0));
    let posted: Vec<LaneKind> = of_first
        .filter_map(|record| match record.verb {
            Verb::Publish { lane, .. } => Some(lane.kind),
            _ => None,
        })
        .filter(|kind| matches!(kind, LaneKind::LowRows | LaneKind::LowRow(_)))
        .collect();
    let rows = (0..MAX as u16).map(LaneKind::LowRow);
    let one: Vec<LaneKind> = [LaneKind::LowRows].into_iter().chain(rows).collect();
    // Two layers of a dispatch and a combine.
    assert_eq!(posted, one.repeat(4));
}
