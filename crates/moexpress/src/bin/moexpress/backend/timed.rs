//! Clusters in virtual time, without payload.

use ep_core::layout::RowFormat;
use ep_core::{Error, Settings, Shape, Topology};
use ep_sim::{Builder, Cluster, Model};

/// A cluster whose rows have no payload. Its arena holds as many rows as `settings` have room for with payload.
pub(crate) fn cluster(shape: &Shape, topology: &Topology, settings: &Settings, model: Model) -> Result<Builder, Error> {
    let builder = |settings| Cluster::builder(*topology).settings(settings).timed(model).elide_payload(true);
    let seen = *builder(*settings).layout(shape)?.row();
    let arena_bytes = scaled(settings.arena_bytes(), &RowFormat::new(shape), &seen);
    Ok(builder(with_arena(shape, topology, settings, arena_bytes)?))
}

/// Bytes of shorter rows for as many as `bytes` hold of whole ones, there and back.
fn scaled(bytes: u64, whole: &RowFormat, short: &RowFormat) -> u64 {
    const MANY: u64 = 1 << 16;
    let both = |row: &RowFormat| u128::from(row.block_bytes(MANY) + row.results().block_bytes(MANY));
    u64::try_from(u128::from(bytes) * both(short) / both(whole)).unwrap_or(u64::MAX)
}

fn with_arena(shape: &Shape, topology: &Topology, settings: &Settings, bytes: u64) -> Result<Settings, Error> {
    let rings = settings.rings();
    Settings::builder(shape, topology)
        .channels(rings.channels)
        .slots(rings.near.slots)
        .chunk(rings.near.chunk)
        .credit(rings.near.credit)
        .far_slots(rings.far.slots)
        .far_chunk(rings.far.chunk)
        .far_credit(rings.far.credit)
        .placement(settings.placement())
        .low_latency(settings.low_latency())
        .deadline(settings.deadline())
        .arena_bytes(bytes)
        .build()
}
