//! Generators that the property tests share.

#![allow(dead_code, unreachable_pub)] // Each test crate uses its own part.

use ep_core::ring::Geometry;
use ep_core::{Element, Layout, Placement, Rings, Settings, Shape, Topology};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// Keeps the failing cases of the test file `name` in `proptest-regressions/`, to be committed and tried first.
pub fn config(name: &str) -> ProptestConfig {
    let file = format!("{}/proptest-regressions/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    let persistence = FileFailurePersistence::Direct(Box::leak(file.into_boxed_str()));
    ProptestConfig { failure_persistence: Some(Box::new(persistence)), ..ProptestConfig::default() }
}

/// Shapes, topologies and settings of every kind, small enough that windows could be walked.
pub fn layouts() -> impl Strategy<Value = Layout> {
    let topology = (1u32..=4, 1u32..=6);
    let element = proptest::sample::select(&Element::ALL[..]);
    let shape = (1u32..=5, 1u32..=8, 1u32..=300, element);
    (topology, shape, rings(5, 24), any::<bool>(), 0u64..5000).prop_map(
        |((nodes, per_node), (local, topk, hidden, element), rings, direct, arena)| {
            let topology = Topology::new(nodes, per_node).expect("a valid topology");
            let experts = local * topology.ranks();
            let shape = Shape::builder().experts(experts).topk(topk.min(experts)).hidden(hidden).max_tokens(64);
            let shape = shape.element(element).build().expect("a valid shape");
            let placement = if direct { Placement::Direct } else { Placement::Ring };
            let Rings { channels, geometry: Geometry { slots, chunk, credit } } = rings;
            let settings = Settings::builder(&shape, &topology).channels(channels).slots(slots).chunk(chunk);
            let settings = settings.credit(credit).placement(placement).arena_bytes(arena).build();
            Layout::new(&shape, &topology, &settings.expect("valid settings")).expect("a valid layout")
        },
    )
}

/// Valid rings of at most so many channels and slots.
pub fn rings(channels: u32, slots: u32) -> impl Strategy<Value = Rings> {
    (1..=channels, 1..=slots).prop_flat_map(|(channels, slots)| {
        (1..=slots, 1..=slots)
            .prop_map(move |(chunk, credit)| Rings { channels, geometry: Geometry { slots, chunk, credit } })
    })
}

/// Rings that a call over `layout` may ask for.
pub fn call_rings(layout: &Layout) -> impl Strategy<Value = Rings> + use<> {
    let own = layout.settings().rings();
    (1..=own.channels)
        .prop_flat_map(move |channels| {
            let most = (own.slots_in_all() / u64::from(channels)) as u32;
            rings(1, most).prop_map(move |rings| Rings { channels, ..rings })
        })
        .boxed()
}
