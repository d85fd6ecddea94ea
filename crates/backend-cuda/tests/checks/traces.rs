//! What both ends of all rings did during operations of both kinds, against the rules and the plan.

use ep_conformance::drive::{Round, round};
use ep_conformance::verify;
use ep_conformance::workload::Workload;
use ep_core::engine::Handle;
use ep_core::reference::World;
use ep_core::ring::Geometry;
use ep_core::{Endpoint as _, Error, Placement, Rank, RankSet, Settings, Shape, Topology};
use ep_cuda::Cluster;
use ep_cuda::checks::{Checks, RingEvent, check_rings};

use crate::{DEADLINE, disturbed};

const RANKS: u32 = 3;
const CHANNELS: u32 = 2;
const ROUNDS: u64 = 3;
/// Events of a rank that there is room for.
const EVENTS: u32 = 1 << 16;

/// Slots that `from` fills towards `to` on a channel: the opening one, and one a row.
fn slots(handle: &Handle, from: Rank, to: Rank, channel: u32, tokens: u32) -> u64 {
    let first = |channel: u32| u64::from(tokens) * u64::from(channel) / u64::from(CHANNELS);
    let plan = handle.plan().expect("the plan was asked for while its rank was there");
    let own = (first(channel)..first(channel + 1))
        .filter(|&token| plan.reached(token as u32).iter().any(|(rank, _)| *rank == to));
    debug_assert_ne!(from, to);
    1 + own.count() as u64
}

pub(crate) fn rings() -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let topology = Topology::new(1, RANKS).map_err(text)?;
    let shape = Shape::builder().experts(2 * RANKS).topk(3).hidden(64).max_tokens(40).build().map_err(text)?;
    let geometries = [
        Geometry { slots: 1, chunk: 1, credit: 1 },
        Geometry { slots: 3, chunk: 2, credit: 2 },
        Geometry { slots: 8, chunk: 4, credit: 3 },
    ];
    // In kernels of their own, and in those of direct placement where nobody has room.
    for (placement, geometry) in [Placement::Ring, Placement::Direct]
        .into_iter()
        .flat_map(|placement| geometries.map(|rings| (placement, rings)))
    {
        let Geometry { slots: room, chunk, credit } = geometry;
        let settings = Settings::builder(&shape, &topology).channels(CHANNELS).slots(room).chunk(chunk).credit(credit);
        let settings = settings.placement(placement).arena_bytes(0).deadline(DEADLINE).build().map_err(text)?;
        let batches = Workload::new(shape, vec![40, 7, 33]).seed(5).batches().map_err(text)?;
        let world = World::new(shape, topology, RankSet::new()).map_err(text)?;
        let checks = Checks { events: EVENTS, ..disturbed() };
        let cluster =
            Cluster::builder(topology).settings(settings).multiprocessors(2).specialise(false).wait_for_kernels(true);
        let cluster = cluster.checks(checks).build(shape).map_err(text)?;
        let ran = cluster.run(async |mut ep| {
            let batch = &batches[ep.rank().index()];
            let mut last = None;
            for _ in 0..ROUNDS {
                last = Some(round(&mut ep, &world, batch, &Round { return_weights: true, ..Round::default() }).await?);
            }
            let (observed, handle) = last.expect("there were rounds");
            handle.plan()?;
            let (events, lost) = ep.ring_events()?;
            Ok::<_, Error>((observed, handle, events, lost))
        });
        let ran = ran.map_err(text)?.into_iter().collect::<Result<Vec<_>, _>>().map_err(text)?;
        let observed: Vec<_> = ran.iter().map(|(observed, ..)| observed.clone()).collect();
        verify::run(&world, &batches, &observed).map_err(|mismatch| mismatch.to_string())?;
        let events: Vec<Vec<RingEvent>> = ran.iter().map(|(_, _, events, _)| events.clone()).collect();
        if let Some(lost) = ran.iter().map(|(.., lost)| *lost).find(|&lost| lost > 0) {
            return Err(format!("{lost} events found no room"));
        }
        let rows = check_rings(&events, geometry).map_err(|fault| format!("{geometry:?}: {fault}"))?;
        // Odd operations are dispatches, even ones combines: rows go back where they came from.
        let mut checked = 0;
        for (&(writer, owner, track, op), &seen) in &rows {
            let (source, other) = if op % 2 == 1 { (writer, owner) } else { (owner, writer) };
            let (handle, batch) = (&ran[source.index()].1, &batches[source.index()]);
            let expected = slots(handle, source, other, track, batch.tokens);
            if seen != expected {
                return Err(format!(
                    "{geometry:?}: {seen} slots of rank {writer} into rank {owner}, track {track}, operation {op}; the plan says {expected}"
                ));
            }
            checked += 1;
        }
        let rings = u64::from(RANKS * (RANKS - 1) * CHANNELS);
        if checked != rings * ROUNDS * 2 {
            return Err(format!("{checked} parts of rings were used, expected {} ", rings * ROUNDS * 2));
        }
    }
    Ok(())
}
