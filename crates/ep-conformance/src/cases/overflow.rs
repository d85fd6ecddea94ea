//! Batches for which an arena has no room, where a communicator has outboxes for them.

use ep_core::engine::Combine;
use ep_core::ring::Geometry;
use ep_core::{Element, Endpoint, Placement, Rank, Rings, Scaling, Settings};

use super::fixture::{Layer, TURN, Verdict, check, ensure, finished, layer, overflowing, text};
use crate::backend::{Backend, Requirement};
use crate::drive::upload;
use crate::harness::Case;
use crate::scenario::{Scenario, Turn};
use crate::verify::bytes_of;
use crate::workload::RoutingKind;

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, body| Case { name, needs: &[Requirement::Get], body };
    vec![
        case("overflow_of_arenas_of_every_size", arenas::<B> as fn(&B) -> _),
        case("overflow_of_one_full_arena_takes_all_ranks_along", one_full_arena::<B>),
        case("overflow_through_outboxes_of_one_to_three_slots", small_outboxes::<B>),
        case("overflow_of_coded_rows_and_of_none", rows::<B>),
        case("overflow_is_followed_by_placed_rows_and_by_rings", turns::<B>),
    ]
}

/// Along the handle of a batch: its results, and its rows again.
const CACHED: Turn = Turn { cached: true, return_weights: false, ..TURN };
const PULL: Turn = Turn { pull: true, bias: 1, ..TURN };

/// From none to one with room for all: between them some ranks have room, and some have it for rows but not for results.
fn arenas<B: Backend>(backend: &B) -> Verdict {
    [0, 64, 3000, 9000, 4 << 20].into_iter().try_for_each(|arena_bytes| {
        let tokens = vec![20, 3, 40];
        check(backend, &Scenario { arena_bytes, tokens, rounds: vec![TURN, CACHED, PULL], ..overflowing(3, 0) })
    })
}

fn one_full_arena<B: Backend>(backend: &B) -> Verdict {
    for full in [0, 2].map(|rank| Some(Rank(rank))) {
        let rings = Rings::uniform(3, Geometry { slots: 3, chunk: 2, credit: 2 });
        let rounds = vec![Turn { channels: 3, ..TURN }, CACHED, PULL, Turn { pull: true, ..CACHED }];
        check(backend, &Scenario { full, rings, rounds, arena_bytes: 48 << 10, ..overflowing(3, 20) })?;
    }
    Ok(())
}

/// Fewer channels than the rings have, and more.
fn small_outboxes<B: Backend>(backend: &B) -> Verdict {
    for (rings, outboxes) in [(1, (3, 1)), (3, (1, 2)), (2, (2, 3))] {
        let rings = Rings::uniform(rings, Geometry { slots: 2, chunk: 1, credit: 2 });
        let skewed = RoutingKind::Skewed { exponent: 1.5 };
        let some = Scenario { outboxes: Some(outboxes), rings, routing: skewed, ..overflowing(4, 17) };
        check(backend, &Scenario { rounds: vec![TURN, CACHED], ..some })?;
    }
    Ok(())
}

fn rows<B: Backend>(backend: &B) -> Verdict {
    for element in [Element::Fp8(Scaling::Exact), Element::Fp8(Scaling::Ue8m0)] {
        check(backend, &Scenario { element, hidden: 144, rounds: vec![TURN, CACHED], ..overflowing(2, 9) })?;
    }
    check(backend, &Scenario { tokens: vec![0, 30, 1], ..overflowing(3, 0) })?;
    check(backend, &Scenario { drop: 1.0, ..overflowing(3, 11) })
}

fn turns<B: Backend>(backend: &B) -> Verdict {
    (0..backend.seeds(10)).try_for_each(|seed| overflow_then_rings(backend, roomy(seed)?))
}

/// A communicator whose arenas have room for a batch, and outboxes.
pub(super) fn roomy(seed: u64) -> Result<Layer, String> {
    let mut layer = layer(3, 12, seed, Placement::Direct).map_err(text)?;
    let (shape, topology) = (layer.setup.shape, layer.setup.topology);
    let settings = Settings::builder(&shape, &topology).placement(Placement::Direct).outboxes(2).outbox_slots(8);
    layer.setup.settings = settings.channels(1).slots(3).chunk(2).credit(2).build().map_err(text)?;
    Ok(layer)
}

/// A batch is placed. Then rank 0 has no room left, so that one goes through outboxes; and the first, along its handle, through the rings
/// to rank 0, which lie where the outboxes were.
pub(super) fn overflow_then_rings<B: Backend>(backend: &B, layer: Layer) -> Verdict {
    let Layer { setup, batches } = layer;
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch)?;
        let ones = ep.rows(&bytes_of(&vec![0x3f80u16; batch.x.len()]), batch.tokens)?;
        let placed = ep.dispatch(&x, &routing).await?;
        let expected = ep.bytes(&placed.x)?;
        let mut ways = vec![placed.handle.outboxes()];
        let handle = placed.handle;
        drop(placed.x);
        let full: Vec<_> = match ep.rank() {
            Rank(0) => std::iter::from_fn(|| ep.output(&handle)).collect(),
            _ => Vec::new(),
        };
        let pulled = ep.dispatch(&x, &routing).await?;
        let seen = ep.bytes(&pulled.x)?;
        let again = ep.redispatch(&ones, &handle).await?;
        let replayed = ep.bytes(&again.x)?;
        let sums = ep.combine(&pulled.x, &pulled.handle, Combine::default()).await?;
        let direct = ep.combine(&pulled.x, &handle, Combine::default()).await?;
        let same = ep.bytes(&sums.x)? == ep.bytes(&direct.x)?;
        drop((full, again));
        let room = ep.dispatch(&x, &routing).await?;
        ways.extend([pulled.handle.outboxes(), room.handle.outboxes()]);
        Ok((ways, seen == expected && ep.bytes(&room.x)? == expected, replayed, same))
    })?;
    for (rank, (ways, right, replayed, same)) in finished(outcomes)?.into_iter().enumerate() {
        ensure(ways == [false, true, false], || format!("rank {rank}: through outboxes: {ways:?}"))?;
        ensure(right, || format!("rank {rank} received other rows through outboxes than placed ones"))?;
        ensure(same, || format!("rank {rank} got other sums through outboxes"))?;
        let ones = replayed.chunks_exact(2).all(|value| value == [0x80, 0x3f]);
        ensure(ones, || format!("rank {rank} received wrong rows through rings"))?;
    }
    Ok(())
}
