//! Dispatch and combine against the oracle.

use std::thread;

use ep_core::engine::{Combine, Dispatch, Routing, Scales};
use ep_core::layout::RowFormat;
use ep_core::reference::{self, Returned, World};
use ep_core::ring::Geometry;
use ep_core::{Element, Endpoint, Error, Placement, Rank, RankSet, Rings, Scaling, Settings, Shape, Topology};

use super::fixture::{Layer, TURN, Verdict, check, direct, ensure, finished, layer, placements, scenario, text};
use crate::arrival::{Arrival, travelling};
use crate::backend::{Backend, Requirement, Setup};
use crate::drive::{Round, cached_round, round, upload};
use crate::harness::Case;
use crate::scenario::{Scenario, Turn};
use crate::verify::{self, Observed, bytes_of};
use crate::workload::{Batch, RoutingKind, Workload};

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, body| Case { name, needs: &[], body };
    vec![
        case("engine_one_rank_alone", one_rank::<B> as fn(&B) -> _),
        case("engine_ranks_that_are_no_power_of_two", odd_ranks::<B>),
        Case { name: "engine_sixteen_ranks", needs: &[Requirement::ManyRanks], body: sixteen_ranks::<B> },
        case("engine_hidden_sizes_of_all_kinds", hidden_sizes::<B>),
        case("engine_fp8_rows_of_every_scaling", fp8_rows::<B>),
        case("engine_fp8_scales_may_lie_apart", |backend| scales_apart(backend, &FP8)),
        case("engine_received_fp8_rows_may_be_sent_on", |backend| sent_on(backend, &FP8)),
        Case { name: "engine_int8_rows_with_a_scale_a_row", needs: &[Requirement::Int8], body: int8_rows::<B> },
        case("engine_topk_from_1_to_32", topk_sizes::<B>),
        case("engine_every_routing", routings::<B>),
        case("engine_no_tokens_anywhere", no_tokens::<B>),
        case("engine_a_rank_without_tokens", empty_rank::<B>),
        case("engine_all_tokens_to_one_expert", one_expert::<B>),
        case("engine_every_choice_dropped", all_dropped::<B>),
        case("engine_bias_and_weights", bias_and_weights::<B>),
        case("engine_cached_handles_replay", cached::<B>),
        case("engine_membership_routing", membership::<B>),
        case("engine_expert_counts_are_aligned", alignment::<B>),
        case("engine_worst_case_sizing_keeps_the_rows", worst_case::<B>),
        case("engine_spare_rows_are_zeros_where_they_shall_be", spare_rows::<B>),
        case("engine_counts_that_stay_in_the_machine_change_nothing", device_counts::<B>),
        case("engine_same_bytes_whatever_the_schedule", determinism::<B>),
        case("engine_many_operations_with_changing_rings", many_operations::<B>),
        case("engine_concurrent_communicators", concurrent::<B>),
        case("engine_statistics_count_what_moved", statistics::<B>),
    ]
}

fn one_rank<B: Backend>(backend: &B) -> Verdict {
    check(backend, &scenario(1, 20))?;
    check(backend, &direct(1, 20))
}

fn odd_ranks<B: Backend>(backend: &B) -> Verdict {
    [3, 5, 7].into_iter().try_for_each(|ranks| {
        check(backend, &scenario(ranks, 12))?;
        check(backend, &direct(ranks, 12))
    })
}

fn sixteen_ranks<B: Backend>(backend: &B) -> Verdict {
    check(backend, &Scenario { topk: 8, ..scenario(16, 6) })
}

fn hidden_sizes<B: Backend>(backend: &B) -> Verdict {
    [1, 16, 17, 2880, 5120, 7168, 16384].into_iter().try_for_each(|hidden| {
        check(backend, &Scenario { hidden, ..scenario(3, 5) })?;
        check(backend, &Scenario { hidden, ..direct(3, 5) })
    })
}

/// FP8 of every scaling.
const FP8: [Element; 3] =
    [Element::Fp8(Scaling::Exact), Element::Fp8(Scaling::PowerOfTwo), Element::Fp8(Scaling::Ue8m0)];

fn fp8_rows<B: Backend>(backend: &B) -> Verdict {
    rows_of(backend, Element::Bf16)?;
    FP8.into_iter().try_for_each(|element| rows_of(backend, element))?;
    let long = Scenario { element: Element::Fp8(Scaling::Exact), hidden: 17_408, ..direct(2, 3) };
    check(backend, &long)
}

/// All that the cases of FP8 rows do.
fn int8_rows<B: Backend>(backend: &B) -> Verdict {
    rows_of(backend, Element::Int8)?;
    check(backend, &Scenario { element: Element::Int8, hidden: 65_536, ..direct(2, 2) })?;
    scales_apart(backend, &[Element::Int8])?;
    sent_on(backend, &[Element::Int8])
}

/// Rows of many sizes, in a ring and placed.
fn rows_of<B: Backend>(backend: &B, element: Element) -> Verdict {
    let rounds = vec![TURN, Turn { cached: true, pull: true, bias: 1, ..TURN }, Turn { pull: true, ..TURN }];
    // Scales in units of 16 bytes go a way of their own on some machines, and so do rows that are moved in pieces.
    [1, 127, 128, 512, 2880].into_iter().try_for_each(|hidden| {
        check(backend, &Scenario { element, hidden, rounds: rounds.clone(), ..scenario(3, 7) })?;
        check(backend, &Scenario { element, hidden, rounds: rounds.clone(), ..direct(3, 7) })
    })
}

/// Scales of any strides arrive as they do where they follow their codes: in a fresh dispatch, and in a cached one.
fn scales_apart<B: Backend>(backend: &B, elements: &[Element]) -> Verdict {
    for (name, Layer { setup, batches }) in coded_layers(backend, elements, &[48, 127, 512, 640, 2880])? {
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            let (x, routing) = upload(&mut ep, batch)?;
            let got = ep.dispatch(&x, &routing).await?;
            let expected = ep.bytes(&got.x)?;
            let rows = travelling(ep.shape(), &batch.x)?;
            let mut same = Vec::new();
            for (row, word) in [(25, 1), (1, 9), (2, 19)] {
                let (codes, words) = taken_apart(ep.shape(), &rows, row, word);
                let apart = ep.rows_apart(&codes, &Scales { words: &words, row, word }, batch.tokens)?;
                let fresh = ep.dispatch(&apart, &routing).await?;
                let cached = ep.redispatch(&apart, &got.handle).await?;
                same.push(ep.bytes(&fresh.x)? == expected && ep.bytes(&cached.x)? == expected);
            }
            let bf16 = ep.rows_apart(&[], &Scales { words: &[], row: 1, word: 1 }, batch.tokens).is_err();
            Ok((expected.is_empty(), same, bf16))
        })?;
        for (rank, (is_empty, same, refused)) in finished(outcomes)?.into_iter().enumerate() {
            let case = || format!("rank {rank}, {name}");
            ensure(!is_empty && refused, || format!("{}: nothing came, or too few scales were taken", case()))?;
            ensure(same == [true; 3], || format!("{}: other rows came: {same:?}", case()))?;
        }
    }
    Ok(())
}

/// Rows that a dispatch brought, whose codes and scales lie apart, are dispatched again as a copy of them is. A combine wants bf16.
fn sent_on<B: Backend>(backend: &B, elements: &[Element]) -> Verdict {
    // Codes of 18 elements with an f32 scale are as long as bf16 rows.
    for (name, Layer { setup, batches }) in coded_layers(backend, elements, &[18, 512, 2880])? {
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            let (x, routing) = upload(&mut ep, batch)?;
            let got = ep.dispatch(&x, &routing).await?;
            let bytes = ep.bytes(&got.x)?;
            let first = &bytes[..batch.tokens as usize * ep.shape().row_bytes() as usize];
            let copy = ep.rows(first, batch.tokens)?;
            let sent_on = ep.dispatch(&got.x, &routing).await?;
            let copied = ep.dispatch(&copy, &routing).await?;
            let same = ep.bytes(&sent_on.x)? == ep.bytes(&copied.x)?;
            let changed = {
                let mut kept = sent_on.x;
                ep.store(&mut kept, 1, first)?;
                ep.bytes(&kept)?[ep.shape().row_bytes() as usize..].starts_with(first)
            };
            let refused =
                ep.combine(&got.x, &got.handle, Combine::default()).await.err().map(|error| error.to_string());
            Ok((same, changed, refused))
        })?;
        for (rank, (same, changed, refused)) in finished(outcomes)?.into_iter().enumerate() {
            let case = || format!("rank {rank}, {name}");
            ensure(same, || format!("{}: other rows came than of a copy", case()))?;
            ensure(changed, || format!("{}: rows were not stored where they are read", case()))?;
            let said = refused.unwrap_or_default();
            ensure(said.contains("allowed: bf16 rows"), || format!("{}: a combine of them said {said:?}", case()))?;
        }
    }
    Ok(())
}

/// Coded rows of these elements and sizes, wherever rows may land; each with a name.
fn coded_layers<B: Backend>(backend: &B, elements: &[Element], sizes: &[u32]) -> Result<Vec<(String, Layer)>, String> {
    let mut layers = Vec::new();
    for &element in elements {
        for &hidden in sizes {
            for placement in placements(backend) {
                let layer = coded_layer(element, hidden, placement).map_err(text)?;
                layers.push((format!("{element}, hidden {hidden}, {placement:?}"), layer));
            }
        }
    }
    Ok(layers)
}

/// Three ranks with nine tokens each.
fn coded_layer(element: Element, hidden: u32, placement: Placement) -> Result<Layer, Error> {
    let (topology, tokens) = (Topology::new(1, 3)?, 9);
    let shape = Shape::builder().experts(6).topk(2).hidden(hidden).max_tokens(tokens).element(element).build()?;
    let settings =
        Settings::builder(&shape, &topology).channels(1).slots(3).chunk(2).credit(2).placement(placement).build()?;
    let batches = Workload::new(shape, vec![tokens; 3]).seed(4).batches()?;
    Ok(Layer { setup: Setup::new(shape, topology, 4)?.settings(settings), batches })
}

/// Codes of `rows` as they travel, and their scales with these strides.
fn taken_apart(shape: &Shape, rows: &[u8], row: usize, word: usize) -> (Vec<u8>, Vec<u32>) {
    let format = RowFormat::new(shape);
    let (hidden, offset) = (shape.hidden() as usize, format.scales_offset() as usize);
    let (mut codes, mut words) = (Vec::new(), vec![u32::MAX; 9 * row + 23 * word]);
    for (number, bytes) in rows.chunks_exact(format.payload_bytes() as usize).enumerate() {
        codes.extend_from_slice(&bytes[..hidden]);
        for (at, scales) in bytes[offset..].chunks(4).enumerate() {
            let mut four = [0xff; 4];
            four[..scales.len()].copy_from_slice(scales);
            words[number * row + at * word] = u32::from_ne_bytes(four);
        }
    }
    (codes, words)
}

fn topk_sizes<B: Backend>(backend: &B) -> Verdict {
    [1, 2, 11, 16, 32]
        .into_iter()
        .try_for_each(|topk| check(backend, &Scenario { topk, local_experts: 11, ..scenario(3, 9) }))
}

fn routings<B: Backend>(backend: &B) -> Verdict {
    let kinds = [
        RoutingKind::Uniform,
        RoutingKind::Grouped { groups: 4, limit: 2 },
        RoutingKind::Skewed { exponent: 1.5 },
        RoutingKind::Single,
    ];
    kinds
        .into_iter()
        .try_for_each(|routing| check(backend, &Scenario { routing, drop: 0.1, local_experts: 4, ..scenario(4, 15) }))
}

fn no_tokens<B: Backend>(backend: &B) -> Verdict {
    check(backend, &scenario(4, 0))?;
    check(backend, &direct(4, 0))
}

fn empty_rank<B: Backend>(backend: &B) -> Verdict {
    (0..3).try_for_each(|empty| {
        let mut tokens = vec![14; 3];
        tokens[empty] = 0;
        check(backend, &Scenario { tokens: tokens.clone(), ..scenario(3, 0) })?;
        check(backend, &Scenario { tokens, ..direct(3, 0) })
    })
}

fn one_expert<B: Backend>(backend: &B) -> Verdict {
    check(backend, &Scenario { routing: RoutingKind::Single, ..scenario(4, 60) })?;
    check(backend, &Scenario { routing: RoutingKind::Single, ..direct(4, 60) })
}

fn all_dropped<B: Backend>(backend: &B) -> Verdict {
    let rounds = vec![Turn { bias: 1, ..TURN }, TURN];
    check(backend, &Scenario { drop: 1.0, rounds: rounds.clone(), ..scenario(3, 11) })?;
    check(backend, &Scenario { drop: 1.0, rounds, ..direct(3, 11) })
}

fn bias_and_weights<B: Backend>(backend: &B) -> Verdict {
    let turns = [(0, false), (1, false), (1, true), (2, true), (2, false)];
    let rounds = turns.map(|(bias, return_weights)| Turn { bias, return_weights, ..TURN }).to_vec();
    check(backend, &Scenario { rounds, ..scenario(4, 13) })
}

fn cached<B: Backend>(backend: &B) -> Verdict {
    let again = Turn { cached: true, ..TURN };
    let rounds = vec![TURN, again, Turn { pull: true, ..again }, TURN, again];
    check(backend, &Scenario { rounds: rounds.clone(), ..scenario(4, 13) })?;
    check(backend, &Scenario { rounds, ..direct(4, 13) })
}

fn many_operations<B: Backend>(backend: &B) -> Verdict {
    let rings = Rings::uniform(3, Geometry { slots: 3, chunk: 2, credit: 3 });
    let rounds: Vec<Turn> = (0u32..24).map(|at| Turn { channels: 1 + at * 7 % 3, pull: at % 2 == 0, ..TURN }).collect();
    check(backend, &Scenario { rings, rounds: rounds.clone(), ..scenario(3, 9) })?;
    check(backend, &Scenario { rings, rounds, ..direct(3, 9) })
}

/// A membership computed from choices moves the same rows as the choices do.
fn membership<B: Backend>(backend: &B) -> Verdict {
    let Layer { setup, batches } = layer(4, 17, 9, Placement::Ring).map_err(text)?;
    let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
    let inputs: Vec<_> = batches.iter().map(|batch| batch.reference()).collect();
    let expected = reference::dispatch(&world, &inputs);
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let x = ep.rows(&bytes_of(&batch.x), batch.tokens)?;
        let (mut in_rank, mut tokens_per_expert) = (vec![0u8; batch.tokens as usize * 4], vec![0; 8]);
        for (token, choices) in batch.topk_idx.chunks_exact(2).enumerate() {
            for &expert in choices {
                in_rank[token * 4 + expert as usize / 2] = 1;
                tokens_per_expert[expert as usize] += 1;
            }
        }
        let in_rank = ep.array(&in_rank)?;
        let got = ep.dispatch(&x, &Routing::Membership { in_rank, tokens_per_expert }).await?;
        let mut observed = Observed::of_dispatch(&ep, &got)?;
        let handle = got.handle.clone();
        let combined = ep.combine(&got.x, &handle, Combine::default()).await?;
        observed.combined_x = ep.bytes(&combined.x)?;
        Ok(observed)
    })?;
    let observed = finished(outcomes)?;
    let bare: Vec<_> = expected
        .iter()
        .map(|got| reference::Received { topk_idx: Vec::new(), topk_weights: Vec::new(), ..got.clone() })
        .map(|received| Arrival { received, coded: None })
        .collect();
    verify::dispatched(&world, &bare, &observed).map_err(text)?;
    let returned: Vec<_> =
        expected.iter().map(|got| Returned { y: &got.x, topk_weights: None, tokens: 17, bias: [None; 2] }).collect();
    verify::combined(&world, &reference::combine(&world, &expected, &returned), &observed).map_err(text).map(drop)
}

fn alignment<B: Backend>(backend: &B) -> Verdict {
    let Layer { setup, batches } = layer(3, 19, 4, Placement::Ring).map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch)?;
        let plain = ep.dispatch(&x, &routing).await?;
        let options = Dispatch { expert_alignment: 16, ..Dispatch::default() };
        let aligned = ep.dispatch_with(&x, &routing, &options).await?;
        Ok((plain.expert_counts, aligned.expert_counts, ep.bytes(&plain.x)? == ep.bytes(&aligned.x)?))
    })?;
    for (plain, aligned, same_rows) in finished(outcomes)? {
        let rounded: Vec<u32> = plain.iter().map(|count| count.div_ceil(16) * 16).collect();
        ensure(aligned == rounded, || format!("{plain:?} became {aligned:?}, expected {rounded:?}"))?;
        ensure(same_rows, || "the alignment changed the rows".into())?;
    }
    Ok(())
}

fn worst_case<B: Backend>(backend: &B) -> Verdict {
    for placement in placements(backend) {
        let Layer { setup, batches } = layer(3, 10, 6, placement).map_err(text)?;
        let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
        let how = Round { worst_rows: 30, return_weights: true, ..Round::default() };
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            let (x, routing) = upload(&mut ep, batch)?;
            let options = Dispatch { worst_rows: 30, ..Dispatch::default() };
            let got = ep.dispatch_with(&x, &routing, &options).await?;
            let tail = ep.values(&got.topk_idx)?.split_off(got.rows as usize * 2);
            drop(got);
            let (observed, _) = round(&mut ep, &world, batch, &how).await?;
            Ok((observed, tail))
        })?;
        let (observed, tails): (Vec<_>, Vec<_>) = finished(outcomes)?.into_iter().unzip();
        ensure(tails.iter().flatten().all(|&expert| expert == -1), || "the tail names experts".into())?;
        ensure(tails.iter().any(|tail| !tail.is_empty()), || "there was no tail to look at".into())?;
        verify::run(&world, &batches, &observed).map_err(text)?;
    }
    Ok(())
}

/// Of the dispatch and of one along its handle, with counts on the host and without, in memory that rows of others filled before.
fn spare_rows<B: Backend>(backend: &B) -> Verdict {
    for placement in placements(backend) {
        let Layer { setup, batches } = layer(3, 10, 6, placement).map_err(text)?;
        for device_counts in [false, true] {
            let outcomes = backend.run(&setup, async |mut ep| {
                let batch = &batches[ep.rank().index()];
                let (x, routing) = upload(&mut ep, batch)?;
                let exact = ep.dispatch(&x, &routing).await?;
                let brought = ep.bytes(&exact.x)?;
                drop(exact);
                // All tokens go to the first two ranks, which fill two rooms with rows.
                let crowd = Batch { topk_idx: [0, 2].repeat(batch.tokens as usize), ..batch.clone() };
                let (all, to_two) = upload(&mut ep, &crowd)?;
                let options = Dispatch { worst_rows: 30, device_counts, ..Dispatch::default() };
                let filled = (
                    ep.dispatch_with(&all, &to_two, &options).await?,
                    ep.dispatch_with(&all, &to_two, &options).await?,
                );
                drop(filled);
                let got = ep.dispatch_with(&x, &routing, &Dispatch { zero_spare: true, ..options }).await?;
                let along = ep.redispatch(&x, &got.handle).await?;
                let [first, again] = [ep.bytes(&got.x)?, ep.bytes(&along.x)?].map(|all| {
                    let (came, beyond) = all.split_at(brought.len());
                    (came == brought, beyond.len(), beyond.iter().all(|&byte| byte == 0))
                });
                Ok((first, again))
            })?;
            let seen = finished(outcomes)?;
            let right = |(came, spare, zeros): &(bool, usize, bool), has: bool| *came && (*spare > 0) == has && *zeros;
            // A handle that knows how many rows came makes room for those alone.
            ensure(seen.iter().all(|(first, again)| right(first, true) && right(again, device_counts)), || {
                format!("rows, bytes of spare ones, zeros there, of the dispatch and along its handle: {seen:?}")
            })?;
        }
    }
    Ok(())
}

/// Without counts on the host: the same rows, and the same along the handle.
fn device_counts<B: Backend>(backend: &B) -> Verdict {
    for placement in placements(backend) {
        let Layer { setup, batches } = layer(3, 10, 6, placement).map_err(text)?;
        let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
        for pull in [false, true] {
            let how = Round { worst_rows: 29, device_counts: true, return_weights: true, pull, ..Round::default() };
            let outcomes = backend.run(&setup, async |mut ep| {
                let batch = &batches[ep.rank().index()];
                let (observed, handle) = round(&mut ep, &world, batch, &how).await?;
                let (_, exact) = round(&mut ep, &world, batch, &Round::default()).await?;
                let along = cached_round(&mut ep, &world, batch, &handle, &how).await?;
                let expected = cached_round(&mut ep, &world, batch, &exact, &Round::default()).await?;
                let known = handle.rows() == 29 && exact.rows() < 29;
                let told = handle.plan()? == exact.plan()? && handle.exchange()? == exact.exchange()?;
                Ok((observed, along == expected, known, told))
            })?;
            let mut observed = Vec::new();
            for (rank, (saw, along, known, told)) in finished(outcomes)?.into_iter().enumerate() {
                ensure(along, || format!("rank {rank} saw other rows along the handle"))?;
                ensure(known, || format!("the handle of rank {rank} has another bound than 29"))?;
                ensure(told, || format!("the handle of rank {rank} tells another routing"))?;
                observed.push(saw);
            }
            verify::run(&world, &batches, &observed).map_err(text)?;
        }
    }
    Ok(())
}

fn determinism<B: Backend>(backend: &B) -> Verdict {
    let mut first: Option<Vec<Observed>> = None;
    for seed in 0..backend.seeds(8).max(2) {
        let Layer { mut setup, batches } = layer(4, 21, 3, Placement::Ring).map_err(text)?;
        setup.seed = seed;
        let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
        let outcomes = backend.run(&setup, async |mut ep| {
            let batch = &batches[ep.rank().index()];
            round(&mut ep, &world, batch, &Round::default()).await.map(|(observed, _)| observed)
        })?;
        let observed = finished(outcomes)?;
        match &first {
            Some(first) => ensure(*first == observed, || format!("seed {seed} gave other bytes than seed 0"))?,
            None => first = Some(observed),
        }
    }
    Ok(())
}

fn concurrent<B: Backend>(backend: &B) -> Verdict {
    thread::scope(|scope| {
        let communicators: Vec<_> = (0..3)
            .map(|seed| {
                let scenario = Scenario { seed, rounds: vec![TURN; 4], ..scenario(3 + seed as u32, 15) };
                scope.spawn(move || check(backend, &scenario))
            })
            .collect();
        communicators
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a communicator's thread panicked".to_owned())?)
    })
}

fn statistics<B: Backend>(backend: &B) -> Verdict {
    let Layer { setup, batches } = layer(3, 16, 2, Placement::Ring).map_err(text)?;
    let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let (_, handle) = round(&mut ep, &world, batch, &Round::default()).await?;
        let exchange = handle.exchange()?;
        let me = ep.rank();
        let moved: Vec<(u64, u64)> = (0..3)
            .map(|peer| {
                let (sent, got) = (exchange.rows(me, Rank(peer)), exchange.rows(Rank(peer), me));
                // A combine moves every row of the dispatch back.
                (u64::from(sent + got), u64::from(got + sent))
            })
            .collect();
        Ok((ep.stats(), moved, exchange.expert_counts().to_vec()))
    })?;
    for (stats, moved, experts) in finished(outcomes)? {
        ensure(stats.operations == 2, || format!("{} operations were counted, 2 ran", stats.operations))?;
        for (peer, (sent, received)) in stats.peers.iter().zip(moved) {
            let counted = (peer.rows_sent, peer.rows_received);
            ensure(counted == (sent, received), || format!("{counted:?} rows were counted, {sent} moved"))?;
            ensure((peer.bytes_sent > 0) == (sent > 0), || "bytes and rows disagree".into())?;
        }
        let experts: Vec<u64> = experts.into_iter().map(u64::from).collect();
        ensure(stats.expert_rows == experts, || format!("{:?} per expert, expected {experts:?}", stats.expert_rows))?;
    }
    Ok(())
}
