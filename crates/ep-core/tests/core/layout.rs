//! Regions and parts of a window: everything has bytes of its own, inside its region.

use ep_core::layout::{CELL_BYTES, LINE_BYTES, Outbox, ROW_ALIGN, Region, SLOT_ALIGN};
use ep_core::port::{Cell, Counter, LaneId, LaneKind, Mail, Offset, Span};
use ep_core::{Layout, Node, Rank, Rings};
use proptest::prelude::*;

pub(crate) fn region(layout: &Layout, name: &str) -> Span {
    layout.regions().into_iter().find(|region| region.name == name).expect("a region of that name").span
}

pub(crate) fn ranks(layout: &Layout) -> impl Iterator<Item = Rank> + use<> {
    layout.topology().all()
}

pub(crate) fn inside(part: Span, whole: Span) -> bool {
    whole.offset <= part.offset && part.end() <= whole.end()
}

/// Fails when two spans share a byte or one lies outside `whole`.
pub(crate) fn assert_disjoint_in(whole: Span, mut spans: Vec<Span>) {
    spans.sort_unstable_by_key(|span| span.offset);
    assert!(spans.iter().all(|&span| inside(span, whole)), "{spans:?} leave {whole:?}");
    let apart = |pair: &[Span]| pair[0].end() <= pair[1].offset.0;
    assert!(spans.windows(2).all(apart), "{spans:?} overlap");
}

/// The tracks within a node, or along the rail, that a call with `rings` uses.
fn tracks(layout: &Layout, rings: &Rings, far: bool) -> Vec<u16> {
    let channels = 0..rings.channels;
    if far {
        return channels.filter(|_| layout.topology().nodes() > 1).map(|channel| layout.far_track(channel)).collect();
    }
    let nodes = layout.topology().all_nodes();
    nodes
        .flat_map(|node| channels.clone().map(move |channel| (node, channel)))
        .map(|(n, c)| layout.near_track(n, c))
        .collect()
}

/// Every slot of every ring of `writer`, cut as `rings`.
pub(crate) fn ring_slots(layout: &Layout, writer: Rank, rings: &Rings, far: bool) -> Vec<Span> {
    let slots = |track| (0..layout.geometry(rings, track).slots).map(move |slot| (track, slot));
    let all = tracks(layout, rings, far).into_iter().flat_map(slots);
    all.map(|(track, slot)| layout.ring_slot(writer, rings, track, slot)).collect()
}

/// Every staging slot to `peer`, cut as `rings`.
pub(crate) fn staging_slots(layout: &Layout, peer: Rank, rings: &Rings, far: bool) -> Vec<Span> {
    let slots = |track| (0..layout.staging_slots(rings, track)).map(move |slot| (track, slot));
    let all = tracks(layout, rings, far).into_iter().flat_map(slots);
    all.map(|(track, slot)| layout.staging_slot(peer, rings, track, slot)).collect()
}

/// The neighbours at whose ends a window has rings: the ranks of a node, or one rank of each node.
pub(crate) fn writers(layout: &Layout, far: bool) -> Vec<Rank> {
    let topology = layout.topology();
    if far {
        topology.all_nodes().map(|node| topology.rank_at(node, 0)).collect()
    } else {
        topology.ranks_of(Node(0)).collect()
    }
}

/// A layout, and for each of its ranks rings that a call might ask for.
fn with_rings_per_rank() -> impl Strategy<Value = (Layout, Vec<Rings>)> {
    crate::common::layouts().prop_flat_map(|layout| {
        let ranks = layout.topology().ranks() as usize;
        let rings = proptest::collection::vec(crate::common::call_rings(&layout), ranks);
        (Just(layout), rings)
    })
}

proptest! {
    #![proptest_config(crate::common::config("layout"))]

    #[test]
    fn regions_are_aligned_disjoint_and_fill_the_window(layout in crate::common::layouts()) {
        let regions = layout.regions();
        let mut end = 0;
        for Region { name, span } in &regions {
            prop_assert_eq!(span.offset.0, end, "{} does not follow its predecessor", name);
            prop_assert!(span.offset.0.is_multiple_of(SLOT_ALIGN), "{} is not aligned", name);
            end = span.end();
        }
        prop_assert_eq!(end, layout.window_bytes());
    }

    #[test]
    fn cells_are_distinct_and_no_line_has_two_lanes(layout in crate::common::layouts()) {
        let lanes = LaneKind::count(layout.tracks());
        let whole = region(&layout, "cells");
        let mut lines = Vec::new();
        for (generation, writer) in [6, 7].into_iter().flat_map(|g| ranks(&layout).map(move |rank| (g, rank))) {
            for lane in (0..lanes).map(LaneKind::from_index) {
                let cells = lane.counters().iter().map(|&counter| Cell::new(writer, lane, counter));
                prop_assert!(cells.clone().all(|cell| layout.has_cell(cell)));
                let places: Vec<_> = cells.map(|cell| layout.cell(cell, generation)).collect();
                let line = Offset(places[0].0 / LINE_BYTES * LINE_BYTES).span(LINE_BYTES);
                assert_disjoint_in(line, places.into_iter().map(|place| place.span(CELL_BYTES)).collect());
                lines.push(line);
            }
        }
        let nodes = layout.topology().nodes();
        let channels = if nodes > 1 { layout.settings().rings().channels } else { 0 };
        for (node, channel) in layout.topology().all_nodes().flat_map(|node| (0..channels).map(move |c| (node, c))) {
            for (mail, generation) in [Mail::Staged, Mail::Sent, Mail::Owed, Mail::Control].into_iter().flat_map(|m| [(m, 6), (m, 7)]) {
                let lane = LaneKind::Mailbox(mail, layout.mailbox(node, channel));
                let cell = Cell::new(Rank(0), lane, lane.counters()[0]);
                prop_assert!(layout.has_cell(cell));
                let to = |peer| LaneId { peer, kind: lane };
                prop_assert!(layout.has_lane(Rank(0), to(Rank(0))) && !layout.has_lane(Rank(0), to(Rank(1))));
                lines.push(layout.cell(cell, generation).span(LINE_BYTES));
            }
        }
        let beyond = LaneKind::Mailbox(Mail::Staged, (nodes * channels) as u16);
        prop_assert!(!layout.has_cell(Cell::new(Rank(0), beyond, Counter::Tail)));
        assert_disjoint_in(whole, lines);
    }

    #[test]
    fn cells_of_a_generation_bank_return_two_generations_later(layout in crate::common::layouts(), generation: u16) {
        let cell = Cell::new(Rank(0), LaneKind::Data(0), Counter::Tail);
        prop_assert_eq!(layout.cell(cell, generation), layout.cell(cell, generation.wrapping_add(2)));
        prop_assert_ne!(layout.cell(cell, generation), layout.cell(cell, generation.wrapping_add(1)));
    }

    #[test]
    fn messages_of_two_writers_or_banks_are_disjoint(layout in crate::common::layouts(), op in 0..u64::MAX - 2) {
        let both = || [op, op + 1].into_iter().flat_map(|op| ranks(&layout).map(move |writer| (op, writer)));
        assert_disjoint_in(region(&layout, "counts"), both().map(|(op, w)| layout.counts(op, w)).collect());
        assert_disjoint_in(region(&layout, "notes"), both().map(|(op, w)| layout.note(op, w)).collect());
        assert_disjoint_in(region(&layout, "notes outbox"), ranks(&layout).map(|r| layout.note_outbox(r)).collect());
        prop_assert_eq!(layout.counts(op, Rank(0)), layout.counts(op + 2, Rank(0)));
        let numbers = u64::from(layout.topology().ranks() + layout.shape().experts());
        prop_assert!(layout.counts(op, Rank(0)).len >= 48 + 4 * numbers, "a counts message fits");
        for source in ranks(&layout) {
            let rail = layout.rail_counts(op, layout.topology().local_of(source));
            prop_assert!(inside(layout.counts(op, source), rail), "a rail's messages lie side by side");
        }
    }

    /// Every writer may cut its part in its own way at any time, so all cuts must stay apart.
    #[test]
    fn parts_of_two_writers_are_disjoint_whatever_the_rings_of_each((layout, rings) in with_rings_per_rank()) {
        for rings in &rings {
            prop_assert!(layout.check_rings(rings).is_ok(), "{:?}", rings);
        }
        let near = (!layout.is_pulled()).then_some((false, "near rings", "near staging"));
        for (far, ring_region, staging_region) in near.into_iter().chain([(true, "far rings", "far staging")]) {
            let writers = writers(&layout, far);
            let each = || writers.iter().zip(&rings);
            let slots = each().flat_map(|(writer, rings)| ring_slots(&layout, *writer, rings, far)).collect();
            assert_disjoint_in(region(&layout, ring_region), slots);
            let slots = each().flat_map(|(peer, rings)| staging_slots(&layout, *peer, rings, far)).collect();
            assert_disjoint_in(region(&layout, staging_region), slots);
        }
    }

    #[test]
    fn every_ring_has_staging_memory_and_aligned_slots((layout, rings) in with_rings_per_rank()) {
        let near = (!layout.is_pulled()).then_some((false, layout.row().slot_room()));
        for (far, len) in near.into_iter().chain([(true, layout.far_wire_bytes())]) {
            for (writer, rings) in writers(&layout, far).into_iter().zip(&rings) {
                for track in tracks(&layout, rings, far) {
                    let asked = layout.geometry(rings, track).staging_slots();
                    prop_assert!((1..=asked).contains(&layout.staging_slots(rings, track)));
                }
                let staging = staging_slots(&layout, writer, rings, far);
                for slot in ring_slots(&layout, writer, rings, far).into_iter().chain(staging) {
                    prop_assert!(slot.offset.0.is_multiple_of(SLOT_ALIGN));
                    prop_assert_eq!(slot.len, len);
                }
            }
        }
    }

    /// Every operation cuts the outbox anew, so only the outboxes of one operation must stay apart.
    #[test]
    fn outboxes_are_disjoint_whatever_the_rings_of_the_call(
        (layout, rings) in with_rings_per_rank().prop_filter("pulled", |(layout, _)| layout.is_pulled())
    ) {
        let whole = region(&layout, "outbox");
        let parts = |outbox: Outbox| {
            let slots = (0..outbox.slots()).flat_map(move |slot| [outbox.codes(slot), outbox.scales(slot), outbox.head(slot)]);
            slots.filter(|span| span.len > 0)
        };
        let (row, locals) = (layout.row(), layout.topology().ranks_per_node());
        for rings in rings.iter().chain([&layout.settings().rings()]) {
            prop_assert!(layout.check_rings(rings).is_ok(), "{:?}", rings);
            let laid: Vec<_> = (0..rings.channels).map(|channel| layout.outbox(rings, channel)).collect();
            for outbox in &laid {
                prop_assert_eq!(outbox.slots(), rings.near.slots * 1.max(locals - 1));
                let last = outbox.slots() - 1;
                prop_assert!(outbox.codes(last).len + outbox.scales(last).len >= row.payload_stride());
                prop_assert!(layout.position_in_head(locals) <= outbox.head(last).len);
            }
            assert_disjoint_in(whole, laid.into_iter().flat_map(parts).collect());
            let channels = (0..rings.channels).flat_map(|channel| ranks(&layout).map(move |peer| (peer, channel)));
            let returned: Vec<_> = channels.map(|(peer, channel)| layout.outbox_to(rings, peer, channel)).collect();
            for outbox in &returned {
                prop_assert_eq!(outbox.slots(), rings.near.slots);
                prop_assert_eq!((outbox.codes(0).len, outbox.scales(0).len), (row.results().payload_stride(), 0));
                prop_assert_eq!(outbox.head(0).len, row.header_bytes());
            }
            let parts: Vec<_> = returned.into_iter().flat_map(parts).collect();
            prop_assert!(parts.iter().all(|part| part.offset.0.is_multiple_of(ROW_ALIGN)));
            assert_disjoint_in(whole, parts);
        }
    }

    /// They lie where rings do, and need more room or less.
    #[test]
    fn outboxes_of_batches_without_room_are_within_the_rings_region(layout in crate::common::layouts()) {
        if let Some(rings) = layout.settings().outboxes() {
            let whole = region(&layout, "near rings");
            let peers = || layout.topology().all().flat_map(|peer| (0..rings.channels).map(move |channel| (peer, channel)));
            let laid = (0..rings.channels).map(|channel| layout.outbox(&rings, channel)).collect::<Vec<_>>();
            let returned = peers().map(|(peer, channel)| layout.outbox_to(&rings, peer, channel)).collect();
            for outboxes in [laid, returned] {
                let last = |outbox: &Outbox| outbox.slots() - 1;
                let ends = outboxes.iter().flat_map(|outbox| [outbox.codes(0), outbox.head(last(outbox))]);
                prop_assert!(ends.clone().all(|span| span.offset.0 >= whole.offset.0 && span.end() <= whole.end()));
            }
            prop_assert!(layout.tracks() >= rings.channels.max(layout.settings().rings().channels));
        }
    }

    #[test]
    fn a_pulled_row_lands_with_its_head(layout in crate::common::layouts()) {
        let slot = layout.pull_slot(0, Rank(0), 1);
        prop_assert!(slot.offset.0.is_multiple_of(SLOT_ALIGN));
        let head = match layout.settings().has_outboxes() {
            true => layout.outbox(&layout.settings().rings(), 0).head(0).len,
            false => layout.row().header_bytes(),
        };
        prop_assert_eq!(slot.len, layout.row().slot_room() - layout.row().header_bytes() + head);
    }

    #[test]
    fn slots_of_low_latency_are_disjoint(layout in crate::common::layouts().prop_filter("low latency", |l| l.settings().low_latency())) {
        let (tokens, columns) = (layout.shape().max_tokens(), layout.low_columns());
        // An operation brings rows or results. Of either kind a writer fills its part of a bank, and no other writer's.
        let parts = || [6u64, 7].into_iter().flat_map(|op| ranks(&layout).map(move |rank| (op, rank)));
        assert_disjoint_in(region(&layout, "low slots"), parts().map(|(op, rank)| layout.low_part(op, rank)).collect());
        for (op, rank) in parts() {
            let part = layout.low_part(op, rank);
            assert_disjoint_in(part, (0..tokens).map(|at| layout.low_row(op, rank, at)).collect());
            let results = (0..tokens).flat_map(|token| (0..columns).map(move |column| (token, column)));
            let results = results.map(|(token, column)| layout.low_result(op, rank, token, column));
            assert_disjoint_in(part, results.collect());
        }
        let staging: Vec<_> = (0..layout.low_staging_slots()).map(|slot| layout.low_staging(slot)).collect();
        prop_assert!(staging.len() >= tokens as usize, "every token of a batch can be staged");
        let longest = layout.low_row(0, Rank(0), 0).len.max(layout.low_result(0, Rank(0), 0, 0).len);
        prop_assert!(staging.iter().all(|slot| slot.len >= longest));
        assert_disjoint_in(region(&layout, "low staging"), staging);
    }

    #[test]
    fn without_low_latency_there_is_no_room_for_it(layout in crate::common::layouts()) {
        let bytes: u64 = ["low slots", "low staging"].map(|name| region(&layout, name).len).iter().sum();
        prop_assert_eq!(bytes > 0, layout.settings().low_latency());
        prop_assert_eq!(layout.check_low_latency().is_ok(), layout.settings().low_latency());
    }

    #[test]
    fn rings_beyond_the_window_are_refused(layout in crate::common::layouts(), more in 1u32..5) {
        let mut rings = layout.settings().rings();
        rings.near.slots += more;
        prop_assert!(layout.check_rings(&rings).is_err());
        let mut rings = layout.settings().rings();
        rings.far.slots += more;
        prop_assert!(layout.check_rings(&rings).is_err());
        let mut rings = layout.settings().rings();
        rings.channels += more;
        prop_assert!(layout.check_rings(&rings).is_err());
    }

    #[test]
    fn pulled_rows_in_flight_do_not_touch(layout in crate::common::layouts()) {
        let writers = writers(&layout, false);
        let slots = tracks(&layout, &layout.settings().rings(), false)
            .into_iter()
            .flat_map(|track| writers.iter().map(move |writer| (track, *writer)))
            .flat_map(|(track, writer)| [0, 1].map(|turn| layout.pull_slot(track, writer, turn)))
            .collect();
        assert_disjoint_in(region(&layout, "pulls"), slots);
    }

    #[test]
    fn rows_of_a_block_are_disjoint(layout in crate::common::layouts(), rows in 1u32..40, base in 0u64..1000) {
        let block = layout.row().block(Offset(base * SLOT_ALIGN), rows);
        let spans = (0..rows).flat_map(|row| [block.codes(row), block.scales(row), block.header(row)]);
        assert_disjoint_in(block.span(), spans.filter(|span| span.len > 0).collect());
    }

    #[test]
    fn the_parts_of_a_placed_row_are_its_payload(layout in crate::common::layouts(), rows in 1u32..40) {
        let (format, block) = (layout.row(), layout.row().block(Offset(0), rows));
        let parts: Vec<_> = block.parts(rows - 1).collect();
        let [codes, scales] = [block.codes(rows - 1), block.scales(rows - 1)];
        prop_assert_eq!(parts[0].clone(), (0..format.codes_bytes() as usize, codes.offset));
        prop_assert_eq!(parts.len(), 1 + usize::from(format.scales_bytes() > 0));
        for (part, at) in &parts[1..] {
            prop_assert_eq!((part.start, part.end), (format.scales_offset() as usize, format.payload_bytes() as usize));
            prop_assert_eq!(*at, scales.offset);
        }
    }

    #[test]
    fn the_settings_hash_tells_cuts_apart((layout, rings) in with_rings_per_rank()) {
        for rings in &rings {
            let own = layout.settings().rings();
            let cut = |rings: &Rings| (rings.channels, rings.near.slots, rings.far.slots);
            prop_assert_eq!(layout.hash(rings) == layout.hash(&own), cut(rings) == cut(&own));
        }
    }
}

/// What low latency is made of is in the number too: ranks that differ in it would misread each other.
#[test]
fn the_settings_hash_tells_forms_of_low_latency_apart() {
    use std::collections::HashMap;

    use ep_core::{Settings, Shape, Topology};
    let (shape, topology) = (Shape::builder().build().unwrap(), Topology::new(1, 2).unwrap());
    let mut seen = HashMap::new();
    for bits in 0..16 {
        let is = |bit: u32| bits >> bit & 1 == 1;
        let form = (is(0), is(0) && is(1), is(0) && is(2), is(3));
        let settings = Settings::builder(&shape, &topology).low_latency(form.0).low_latency_units(form.1);
        let settings = settings.low_latency_announced(form.2).low_latency_per_choice(form.3).build();
        let Ok(layout) = settings.and_then(|settings| Layout::new(&shape, &topology, &settings)) else { continue };
        let other = seen.insert(layout.hash(&layout.settings().rings()), form);
        assert!(other.is_none_or(|other| other == form), "{other:?} and {form:?}");
    }
    assert!(seen.len() > 8, "{seen:?}");
}

/// A call's hash does not know the time that it is allowed; ranks that start together have it alike.
#[test]
fn ranks_that_start_have_shape_settings_and_deadline_alike() {
    use ep_core::{Nanos, Settings, Shape, Topology};
    let (shape, topology) = (Shape::builder().build().unwrap(), Topology::new(1, 2).unwrap());
    let layout = |slots, seconds| {
        let settings = Settings::builder(&shape, &topology).slots(slots).deadline(Nanos::from_secs(seconds));
        Layout::new(&shape, &topology, &settings.build().unwrap()).unwrap()
    };
    let at_start = |slots, seconds| layout(slots, seconds).hash_at_start();
    assert_eq!(at_start(4, 60), at_start(4, 60));
    assert!(at_start(4, 60) != at_start(4, 61) && at_start(4, 60) != at_start(5, 60));
    let hash = |seconds| layout(4, seconds).hash(&layout(4, seconds).settings().rings());
    assert_eq!(hash(60), hash(61));
}

#[test]
fn what_cannot_be_pulled_is_refused() {
    use ep_core::{Placement, Settings, Shape, Topology};
    let shape = Shape::builder().experts(64).topk(1).hidden(1).build().unwrap();
    let one = Topology::new(1, 64).unwrap();
    let settings = |slots| {
        let builder = Settings::builder(&shape, &one).placement(Placement::Pulled).channels(64).slots(slots).chunk(1);
        builder.credit(1).build().unwrap()
    };
    let refused = |topology: Topology, slots| Layout::new(&shape, &topology, &settings(slots)).unwrap_err().to_string();
    let two = Topology::new(2, 32).unwrap();
    assert_eq!(refused(two, 1), "nodes is 2, allowed: 1 with pulled placement");
    let most = i32::MAX as u32 / 64 / 63;
    assert!(Layout::new(&shape, &one, &settings(most)).is_ok());
    assert_eq!(refused(one, most + 1), "channels x outbox slots is 2147487552, allowed: at most 2147483647");
}

#[test]
fn an_arena_that_no_address_space_holds_is_refused() {
    use ep_core::{Settings, Shape, Topology};
    let (shape, topology) = (Shape::builder().build().unwrap(), Topology::new(1, 1).unwrap());
    for bytes in [1 << 63, u64::MAX - 63, u64::MAX] {
        let settings = Settings::builder(&shape, &topology).arena_bytes(bytes).build().unwrap();
        let error = Layout::new(&shape, &topology, &settings).unwrap_err().to_string();
        assert_eq!(error, "window is more than 2^63 bytes, allowed: less than 2^63 bytes");
    }
}
