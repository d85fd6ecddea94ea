//! Regions of a window have room for what lies in them, and for nothing else: each part has bytes of its own, and no more than its alignment is left.

use ep_core::layout::{CELL_BYTES, Kind, LINE_BYTES, LowKind, PIECES, ROW_ALIGN, SLOT_ALIGN};
use ep_core::port::{Cell, Counter, LaneId, LaneKind, Offset, Span, UNIT_BYTES, unit_bytes};
use ep_core::{Layout, OutboxUse, Placement, Rank, Rings, Settings, Shape, Topology};
use proptest::prelude::*;

use crate::layout::{assert_disjoint_in, inside, ranks, region, ring_slots, staging_slots, writers};

/// Fails where spans overlap, where one leaves `whole`, and where more than what aligns them is left of it.
fn assert_fill(whole: Span, spans: Vec<Span>) {
    let used: u64 = spans.iter().map(|span| span.len.next_multiple_of(SLOT_ALIGN)).sum();
    assert_disjoint_in(whole, spans);
    assert_eq!(used, whole.len, "{whole:?} has room for more");
}

/// All parts of low latency in a window: of each bank and writer.
fn parts(layout: &Layout) -> impl Iterator<Item = (u64, Rank)> + use<> {
    let topology = *layout.topology();
    [6u64, 7].into_iter().flat_map(move |op| topology.all().map(move |rank| (op, rank)))
}

/// What units take, in place of so many bytes.
fn units(at: Offset, bytes: u64) -> Span {
    at.span(bytes.div_ceil(12) * 16)
}

fn low_latency() -> impl Strategy<Value = Layout> {
    crate::common::layouts().prop_filter("low latency", |layout| layout.settings().low_latency())
}

proptest! {
    #![proptest_config(crate::common::config("room"))]

    #[test]
    fn cells_messages_and_rings_fill_their_regions(layout in crate::common::layouts()) {
        let (tracks, nodes) = (layout.tracks(), layout.topology().nodes());
        let channels = layout.settings().rings().channels.max(layout.settings().outboxes().map_or(0, |rings| rings.channels));
        prop_assert_eq!(tracks, channels * if nodes > 1 { nodes + 1 } else { 1 });
        let both = || [6u16, 7].into_iter().flat_map(|bank| ranks(&layout).map(move |rank| (bank, rank)));
        let mailboxes = 2 * layout.mailboxes() as u64 * LINE_BYTES;
        let cells = region(&layout, "cells");
        let of_writers: Vec<_> = both().map(|(bank, writer)| layout.cells_of(writer, bank)).collect();
        assert_disjoint_in(cells, of_writers.clone());
        let used: u64 = of_writers.iter().map(|span| span.len).sum();
        prop_assert_eq!((used + mailboxes).next_multiple_of(SLOT_ALIGN), cells.len);
        assert_fill(region(&layout, "counts"), both().map(|(op, rank)| layout.counts(op.into(), rank)).collect());
        let numbers = u64::from(layout.topology().ranks() + layout.shape().experts());
        prop_assert_eq!(layout.counts_bytes(), (48 + 4 * numbers).next_multiple_of(SLOT_ALIGN));
        assert_fill(region(&layout, "notes"), both().map(|(op, rank)| layout.note(op.into(), rank)).collect());
        assert_fill(region(&layout, "notes outbox"), ranks(&layout).map(|rank| layout.note_outbox(rank)).collect());
        let own = layout.settings().rings();
        let near = (!layout.is_pulled() && layout.settings().outboxes().is_none()).then_some((false, "near rings", "near staging"));
        for (far, rings, staging) in near.into_iter().chain([(true, "far rings", "far staging")]) {
            let of_all = |slots: fn(&Layout, Rank, &Rings, bool) -> Vec<Span>| {
                writers(&layout, far).into_iter().flat_map(|rank| slots(&layout, rank, &own, far)).collect::<Vec<_>>()
            };
            assert_fill(region(&layout, rings), of_all(ring_slots));
            assert_fill(region(&layout, staging), of_all(staging_slots));
        }
        prop_assert_eq!(region(&layout, "arena").len, layout.settings().arena_bytes().next_multiple_of(SLOT_ALIGN));
    }

    #[test]
    fn the_cells_of_a_writer_are_those_that_it_publishes(layout in crate::common::layouts(), generation: u16) {
        let kinds = (0..LaneKind::count(layout.tracks())).map(LaneKind::from_index);
        for (writer, kind) in ranks(&layout).flat_map(|writer| kinds.clone().map(move |kind| (writer, kind))) {
            let whole = layout.cells_of(writer, generation);
            for &counter in kind.counters() {
                let cell = layout.cell(Cell::new(writer, kind, counter), generation).span(CELL_BYTES);
                prop_assert!(inside(cell, whole), "{:?} of {:?} in {:?}", cell, writer, whole);
            }
        }
    }

    #[test]
    fn lanes_end_with_the_ranks_and_the_tracks(layout in crate::common::layouts()) {
        let (count, ranks) = (LaneKind::count(layout.tracks()), layout.topology().ranks());
        let has = |peer, index| layout.has_lane(Rank(0), LaneId { peer: Rank(peer), kind: LaneKind::from_index(index) });
        prop_assert!(has(0, 0) && has(ranks - 1, count - 1));
        prop_assert!(!has(ranks, 0) && !has(0, count));
    }

    #[test]
    fn rows_that_are_announced_one_by_one_have_lanes_and_cells_of_their_own(layout in crate::common::layouts()) {
        let (tokens, ranks) = (layout.shape().max_tokens(), layout.topology().ranks());
        let announced = layout.settings().low_latency_announced();
        prop_assert_eq!(layout.row_lanes(), if announced { tokens as usize } else { 0 });
        let lane = |token: u32| LaneKind::LowRow(token as u16);
        let has = |token| layout.has_lane(Rank(0), LaneId { peer: Rank(ranks - 1), kind: lane(token) });
        prop_assert_eq!((has(0), has(tokens - 1), has(tokens)), (announced, announced, false));
        let known = |writer, kind| layout.has_cell(Cell::new(Rank(writer), kind, Counter::Tail));
        prop_assert_eq!((known(0, LaneKind::Data(0)), known(ranks, LaneKind::Data(0))), (true, false));
        for (op, counter) in [(0, Counter::Even), (1, Counter::Odd)].into_iter().filter(|_| announced) {
            let cell = Cell::new(Rank(ranks - 1), lane(tokens - 1), counter);
            prop_assert!(layout.has_cell(cell));
            prop_assert_eq!(layout.cell(cell, 7), layout.low_cell(7, op, Rank(ranks - 1), tokens - 1));
        }
    }

    #[test]
    fn numbers_are_those_of_shape_and_topology(layout in crate::common::layouts()) {
        let (shape, topology, row) = (layout.shape(), layout.topology(), layout.row());
        let local = shape.experts() / topology.ranks();
        prop_assert_eq!(layout.local_experts(), local);
        let columns = if layout.settings().low_latency_per_choice() { shape.topk().min(local) } else { 1 };
        prop_assert_eq!(layout.low_columns(), columns);
        prop_assert_eq!(layout.mask_bytes(), 4 * u64::from(topology.ranks_per_node().div_ceil(32)));
        prop_assert_eq!(layout.far_wire_bytes(), (row.wire_bytes() + layout.mask_bytes()).max(row.results().wire_bytes()));
        let positions = row.header_bytes() + 4 * u64::from(topology.ranks_per_node());
        prop_assert_eq!(layout.position_in_head(topology.ranks_per_node()), positions);
        prop_assert_eq!(layout.outbox_head_bytes(), positions.next_multiple_of(ROW_ALIGN));
    }

    #[test]
    fn rows_and_results_of_low_latency_fill_their_parts(layout in low_latency()) {
        assert_fill(region(&layout, "low slots"), parts(&layout).map(|(op, rank)| layout.low_part(op, rank)).collect());
        let tokens = layout.shape().max_tokens();
        let part = layout.low_part(6, Rank(0));
        let result = layout.low_result(6, Rank(0), 0, 0).len.next_multiple_of(SLOT_ALIGN);
        let results = layout.low_result(6, Rank(0), tokens - 1, layout.low_columns() - 1);
        let used = layout.low_row(6, Rank(0), tokens - 1).end().max(results.end()) - part.offset.0;
        prop_assert!(used <= part.len && part.len < used + result + SLOT_ALIGN, "{} of {:?}", used, part);
        // Staged is whatever travels; where that is little, every result of a batch at a time.
        let header = if layout.settings().low_latency_units() { layout.low_unit_header_bytes() } else { 0 };
        let counts = if layout.settings().low_latency_units() { 4 * u64::from(layout.local_experts()) } else { 0 };
        let longest = (layout.row().wire_bytes() + header).max(counts).max(layout.low_result(0, Rank(0), 0, 0).len);
        let staged = longest.next_multiple_of(SLOT_ALIGN);
        prop_assert_eq!(layout.low_staging(0).len, staged);
        let all = u64::from(tokens * layout.shape().topk());
        prop_assert_eq!(u64::from(layout.low_staging_slots()), u64::from(tokens).max(all.min((64 << 20) / staged)));
        let slots = (0..layout.low_staging_slots()).map(|slot| layout.low_staging(slot)).collect();
        assert_fill(region(&layout, "low staging"), slots);
    }

    #[test]
    fn units_fill_their_parts(
        layout in low_latency().prop_filter("units", |layout| layout.settings().low_latency_units())
    ) {
        assert_fill(region(&layout, "low units"), parts(&layout).map(|(op, rank)| layout.low_unit_part(op, rank)).collect());
        let tokens = layout.shape().max_tokens();
        let header_bytes = 12 * (1 + u64::from(layout.shape().topk()));
        prop_assert_eq!(layout.low_unit_header_bytes(), header_bytes);
        prop_assert_eq!(unit_bytes(header_bytes), UNIT_BYTES * (1 + u64::from(layout.shape().topk())));
        for (op, rank) in parts(&layout) {
            let part = layout.low_unit_part(op, rank);
            let head = layout.low_unit_head(op, rank).span(UNIT_BYTES);
            let counts = units(layout.low_unit_counts(op, rank), 4 * u64::from(layout.local_experts()));
            let header = |at| units(layout.low_unit_header(op, rank, at), header_bytes);
            let row = |token| units(layout.low_unit_row(op, rank, token), layout.row().payload_bytes());
            let rows: Vec<_> = [head, counts].into_iter().chain((0..tokens).flat_map(|at| [header(at), row(at)])).collect();
            let result = |token, column| {
                units(layout.low_unit_result(op, rank, token, column), layout.row().results().payload_bytes())
            };
            let columns = layout.low_columns();
            let results = (0..tokens).flat_map(|token| (0..columns).map(move |column| (token, column)));
            let results: Vec<_> = [head].into_iter().chain(results.map(|(token, column)| result(token, column))).collect();
            let bytes = |spans: &[Span]| spans.iter().map(|span| span.len).sum::<u64>();
            prop_assert_eq!(bytes(&rows).max(bytes(&results)).next_multiple_of(SLOT_ALIGN), part.len);
            assert_disjoint_in(part, rows);
            assert_disjoint_in(part, results);
        }
    }

    #[test]
    fn what_kernels_have_behind_the_window_fills_its_regions(layout in crate::common::layouts()) {
        let layout = layout.with_kernels().expect("no large window");
        let lines = [0u16, 1].into_iter().flat_map(|bank| ranks(&layout).map(move |rank| (bank, rank)));
        let pieces = lines.flat_map(|(bank, writer)| (0..PIECES).map(move |piece| (bank, writer, piece)));
        let pieces: Vec<_> =
            pieces.map(|(bank, writer, piece)| layout.piece_cell(bank, writer, piece).span(CELL_BYTES)).collect();
        let whole = region(&layout, "piece cells");
        prop_assert_eq!((pieces.len() as u64 * CELL_BYTES).next_multiple_of(SLOT_ALIGN), whole.len);
        assert_disjoint_in(whole, pieces);
        let low = layout.settings().low_latency();
        let tokens = layout.shape().max_tokens();
        let of_writer = (u64::from(tokens) * CELL_BYTES).next_multiple_of(SLOT_ALIGN);
        let banks = [(0u16, 0u64), (0, 1), (1, 0), (1, 1)];
        let writers = || banks.into_iter().flat_map(|(bank, op)| ranks(&layout).map(move |rank| (bank, op, rank)));
        let cells = writers().filter(|_| low).map(|(bank, op, rank)| layout.low_cell(bank, op, rank, 0).span(of_writer));
        assert_fill(region(&layout, "low cells"), cells.collect());
        for (bank, op, rank) in writers().filter(|_| low) {
            let last = layout.low_cell(bank, op, rank, tokens - 1).span(CELL_BYTES);
            prop_assert!(inside(last, layout.low_cell(bank, op, rank, 0).span(of_writer)));
        }
        let heads = parts(&layout).flat_map(|(op, rank)| (0..tokens).map(move |at| (op, rank, at)));
        let heads: Vec<_> = heads.filter(|_| low).map(|(op, rank, at)| layout.low_head(op, rank, at)).collect();
        let whole = region(&layout, "low heads");
        prop_assert_eq!(heads.iter().map(|head| head.len).sum::<u64>().next_multiple_of(SLOT_ALIGN), whole.len);
        assert_disjoint_in(whole, heads);
        // What a rank has for each rank of another node: rows and their heads.
        let topology = *layout.topology();
        for me in topology.all() {
            let beyond = topology.all().filter(|&peer| low && topology.node_of(peer) != topology.node_of(me));
            let staged = beyond.map(|peer| {
                let (rows, heads) = (layout.low_far(me, peer), layout.low_far_heads(me, peer));
                assert_eq!(rows.end(), heads.offset.0);
                assert_eq!(heads.len, u64::from(tokens) * layout.row().header_bytes());
                rows.offset.span(rows.len + heads.len)
            });
            assert_fill(region(&layout, "low far staging"), staged.collect());
        }
    }
}

/// A bit for each rank of a node, in whole words.
#[test]
fn masks_grow_with_the_node() {
    let bytes = |ranks| {
        let topology = Topology::new(2, ranks).unwrap();
        let shape = Shape::builder().experts(2 * ranks).topk(1).hidden(8).max_tokens(1).build().unwrap();
        let settings = Settings::builder(&shape, &topology).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        // The slot holds the row with its mask, and the opening with a share for each rank.
        let rings = layout.settings().rings();
        let slots = [0, 1].map(|slot| layout.ring_slot(Rank(0), &rings, layout.far_track(0), slot).offset.0);
        assert!(slots[1] - slots[0] >= 64 + 8 * u64::from(ranks), "{ranks}: {slots:?}");
        layout.mask_bytes()
    };
    assert_eq!([1, 32, 33, 64, 65].map(bytes), [4, 4, 8, 8, 12]);
}

/// A slot for each result of a batch would be half a gigabyte: as many as 64 MiB hold are staged at a time.
#[test]
fn little_is_staged_of_large_batches() {
    let slots = |tokens| {
        let topology = Topology::new(1, 2).unwrap();
        let shape = Shape::builder().experts(16).topk(8).hidden(7168).max_tokens(tokens).build().unwrap();
        let settings = Settings::builder(&shape, &topology).low_latency(true).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        (layout.low_staging_slots(), layout.low_staging(0).len)
    };
    let (small, bytes) = slots(100);
    assert_eq!((small, u64::from(slots(4096).0)), (800, (64 << 20) / bytes));
    // But a slot for each token.
    assert_eq!(slots(8192).0, 8192);
}

/// In a dispatch all other ranks of the node read an outbox, in a combine one does.
#[test]
fn outboxes_are_read_by_those_who_get_rows_of_them() {
    let topology = Topology::new(1, 4).unwrap();
    let shape = Shape::builder().experts(4).topk(2).hidden(8).max_tokens(8).build().unwrap();
    let settings = Settings::builder(&shape, &topology).placement(Placement::Pulled).build().unwrap();
    let layout = Layout::new(&shape, &topology, &settings).unwrap();
    let rings = layout.settings().rings();
    let window = |kind| layout.outbox_steps(kind, &rings, OutboxUse::default()).window;
    let each = rings.near.slots;
    assert_eq!([Kind::Dispatch, Kind::CachedDispatch, Kind::Combine].map(window), [3 * each, 3 * each, each]);
}

/// What a rank says as it begins: the operation above its kind, so that it rises.
#[test]
fn openings_rise_with_the_operation_and_tell_kinds_apart() {
    let said: Vec<_> = [1, 2, 1 << 40].into_iter().flat_map(|op| Kind::ALL.map(|kind| kind.opening(op))).collect();
    assert!(said.is_sorted_by(|one, next| one < next), "{said:?}");
    assert_eq!(Kind::ALL.map(|kind| kind.opening(5) >> 3), [5; 4]);
}

#[test]
fn what_a_carrier_has_behind_a_window_is_a_region() {
    let topology = Topology::new(1, 2).unwrap();
    let shape = Shape::builder().experts(2).topk(1).hidden(8).max_tokens(1).build().unwrap();
    let layout = Layout::new(&shape, &topology, &Settings::auto(&shape, &topology)).unwrap();
    let has = |layout: &Layout| layout.regions().iter().any(|region| region.name == "behind");
    assert!(!has(&layout) && !has(&layout.followed_by(0)));
    let more = layout.followed_by(100).followed_by(28);
    assert_eq!(region(&more, "behind"), Offset(layout.window_bytes()).span(128));
    assert_eq!(more.window_bytes(), layout.window_bytes() + 128);
}

#[test]
fn a_row_a_choice_needs_room_for_it() {
    let topology = Topology::new(1, 2).unwrap();
    let shape = Shape::builder().experts(2).topk(1).hidden(8).max_tokens(1).build().unwrap();
    let refused = |has| {
        let settings =
            Settings::builder(&shape, &topology).low_latency(true).low_latency_per_choice(has).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        [LowKind::Dispatch, LowKind::PerChoice, LowKind::PerRank].map(|kind| layout.check_low_kind(kind).is_err())
    };
    assert_eq!((refused(true), refused(false)), ([false; 3], [false, true, false]));
}

/// Where rows travel as units, what each expert gets is staged, too, and may be more than a row.
#[test]
fn counts_of_many_experts_are_staged() {
    let topology = Topology::new(1, 2).unwrap();
    let shape = Shape::builder().experts(4096).topk(1).hidden(8).max_tokens(4).build().unwrap();
    let settings = Settings::builder(&shape, &topology).low_latency(true).low_latency_units(true).build().unwrap();
    assert_eq!(Layout::new(&shape, &topology, &settings).unwrap().low_staging(0).len, 4 * 2048);
}
