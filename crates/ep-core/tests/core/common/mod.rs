//! Generators that the property tests share.

pub(crate) mod compiler;
pub(crate) mod cpp;

use ep_core::ring::Geometry;
use ep_core::{Element, Layout, Placement, Rings, Settings, Shape, Topology};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

/// Keeps the failing cases of the test file `name` in `proptest-regressions/`, to be committed and tried first.
pub(crate) fn config(name: &str) -> ProptestConfig {
    let file = format!("{}/proptest-regressions/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    let persistence = FileFailurePersistence::Direct(Box::leak(file.into_boxed_str()));
    ProptestConfig { failure_persistence: Some(Box::new(persistence)), ..ProptestConfig::default() }
}

/// How low latency travels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Low {
    Slots,
    Announced,
    Units,
}

/// Shapes, topologies and settings of every kind, small enough that windows could be walked.
pub(crate) fn layouts() -> impl Strategy<Value = Layout> {
    let topology = (1u32..=4, 1u32..=6);
    let element = proptest::sample::select(&Element::ALL[..]);
    let shape = (1u32..=5, 1u32..=8, 1u32..=300, element, 1u32..=64);
    let placement = proptest::sample::select(&[Placement::Ring, Placement::Direct, Placement::Pulled][..]);
    let low_latency = proptest::sample::select(&[None, Some(Low::Slots), Some(Low::Announced), Some(Low::Units)][..]);
    let switches = (placement, (low_latency, any::<bool>()), proptest::option::of((1u32..=7, 1u32..=9)));
    (topology, shape, rings(5, 24), switches, 0u64..5000).prop_map(
        |(
            (nodes, per_node),
            (local, topk, hidden, element, tokens),
            rings,
            (placement, (low, per_choice), outboxes),
            arena,
        )| {
            let nodes = if placement == Placement::Pulled || low == Some(Low::Units) { 1 } else { nodes };
            let topology = Topology::new(nodes, per_node).expect("a valid topology");
            let experts = local * topology.ranks();
            let shape = Shape::builder().experts(experts).topk(topk.min(experts)).hidden(hidden).max_tokens(tokens);
            let shape = shape.element(element).build().expect("a valid shape");
            let Rings { channels, near, far } = rings;
            let settings = Settings::builder(&shape, &topology).channels(channels).slots(near.slots).chunk(near.chunk);
            let settings =
                settings.credit(near.credit).far_slots(far.slots).far_chunk(far.chunk).far_credit(far.credit);
            let settings = settings.placement(placement).arena_bytes(arena).low_latency(low.is_some());
            let settings = settings.low_latency_units(low == Some(Low::Units)).low_latency_per_choice(per_choice);
            let settings = settings.low_latency_announced(low == Some(Low::Announced));
            let settings = match outboxes.filter(|_| placement == Placement::Direct && nodes == 1) {
                Some((channels, slots)) => settings.outboxes(channels).outbox_slots(slots),
                None => settings,
            };
            Layout::new(&shape, &topology, &settings.build().expect("valid settings")).expect("a valid layout")
        },
    )
}

/// Valid rings of at most so many channels and slots.
pub(crate) fn rings(channels: u32, slots: u32) -> impl Strategy<Value = Rings> {
    (1..=channels, geometry(slots), geometry(slots)).prop_map(|(channels, near, far)| Rings { channels, near, far })
}

/// A valid geometry of at most so many slots.
pub(crate) fn geometry(slots: u32) -> impl Strategy<Value = Geometry> {
    (1..=slots).prop_flat_map(|slots| {
        (1..=slots, 1..=slots).prop_map(move |(chunk, credit)| Geometry { slots, chunk, credit })
    })
}

/// Rings that a call over `layout` may ask for.
pub(crate) fn call_rings(layout: &Layout) -> impl Strategy<Value = Rings> + use<> {
    let own = layout.settings().rings();
    (1..=own.channels)
        .prop_flat_map(move |channels| {
            let most = |geometry: Geometry| own.channels * geometry.slots / channels;
            (geometry(most(own.near)), geometry(most(own.far))).prop_map(move |(near, far)| Rings {
                channels,
                near,
                far,
            })
        })
        .boxed()
}
