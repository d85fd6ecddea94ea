//! Rows that lie in their sender's outbox until their readers have pulled them.

use ep_core::ring::Geometry;
use ep_core::{Element, OutboxUse, Rings, Scaling};

use super::fixture::{TURN, Verdict, check, pulled};
use crate::backend::{Backend, Requirement};
use crate::harness::Case;
use crate::scenario::{Scenario, Turn};
use crate::workload::RoutingKind;

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, body| Case { name, needs: &[Requirement::Get], body };
    vec![
        case("pulled_of_one_to_eight_ranks", ranks::<B> as fn(&B) -> _),
        case("pulled_from_outboxes_of_one_to_three_slots", small_outboxes::<B>),
        case("pulled_hundred_times_the_outbox", hundred_times::<B>),
        case("pulled_rows_of_every_size", sizes::<B>),
        case("pulled_without_rows", without_rows::<B>),
        case("pulled_by_one_rank_alone", one_reader::<B>),
        case("pulled_along_handles_in_other_cuts", handles::<B>),
        case("pulled_by_ranks_that_use_their_outboxes_differently", uses::<B>),
    ]
}

const CACHED: Turn = Turn { cached: true, return_weights: false, ..TURN };

fn ranks<B: Backend>(backend: &B) -> Verdict {
    [1, 2, 3, 4, 8].into_iter().try_for_each(|ranks| check(backend, &pulled(ranks, 12)))
}

fn small_outboxes<B: Backend>(backend: &B) -> Verdict {
    for (slots, chunk, credit) in [(1, 1, 1), (2, 1, 2), (2, 2, 2), (3, 2, 3)] {
        let rings = Rings::uniform(2, Geometry { slots, chunk, credit });
        let rounds = vec![Turn { channels: 2, ..TURN }, Turn { channels: 2, ..CACHED }];
        check(backend, &Scenario { rings, rounds, ..pulled(3, 17) })?;
    }
    Ok(())
}

/// The readers' tokens and rows differ, so that some are done long before others.
fn hundred_times<B: Backend>(backend: &B) -> Verdict {
    let rings = Rings::uniform(1, Geometry { slots: 2, chunk: 1, credit: 1 });
    let routing = RoutingKind::Skewed { exponent: 1.5 };
    check(backend, &Scenario { rings, routing, tokens: vec![400, 3, 0], hidden: 16, ..pulled(3, 0) })
}

fn sizes<B: Backend>(backend: &B) -> Verdict {
    for hidden in [1, 8, 130, 1024] {
        check(backend, &Scenario { hidden, ..pulled(2, 9) })?;
    }
    for element in [Element::Fp8(Scaling::Exact), Element::Fp8(Scaling::Ue8m0)] {
        for hidden in [16, 144, 512] {
            check(backend, &Scenario { element, hidden, rounds: vec![TURN, CACHED], ..pulled(3, 9) })?;
        }
    }
    Ok(())
}

fn without_rows<B: Backend>(backend: &B) -> Verdict {
    check(backend, &pulled(3, 0))?;
    check(backend, &Scenario { tokens: vec![0, 30, 1], ..pulled(3, 0) })?;
    check(backend, &Scenario { drop: 1.0, ..pulled(3, 11) })
}

/// All choose the experts of one rank: of the others' outboxes one reader wants every row, and the rest none.
fn one_reader<B: Backend>(backend: &B) -> Verdict {
    check(backend, &Scenario { routing: RoutingKind::Single, ..pulled(4, 60) })
}

/// Operations that follow each other cut the same memory differently.
fn handles<B: Backend>(backend: &B) -> Verdict {
    let rings = Rings::uniform(3, Geometry { slots: 4, chunk: 2, credit: 1 });
    let turn = |channels, cached, bias| Turn { channels, cached, bias, return_weights: !cached, ..TURN };
    let rounds = vec![turn(3, false, 2), turn(3, true, 0), turn(1, false, 1), turn(1, true, 0), turn(2, false, 0)];
    check(backend, &Scenario { rings, rounds, ..pulled(4, 25) })
}

/// Steps and windows from the least to more than there is: each rank has its own, and another in each round. Some ranks get back fewer rows on a
/// channel than an outbox has slots, and more than the least window.
fn uses<B: Backend>(backend: &B) -> Verdict {
    let of = |piece, slots| OutboxUse { piece, slots };
    let [pieces, windows] = [[Some(1), Some(3), Some(8), Some(24)], [Some(1), Some(32), Some(45), None]];
    let all: Vec<_> = pieces.into_iter().flat_map(|piece| windows.map(|slots| of(piece, slots))).collect();
    // One that another rank follows which takes three times as many at once.
    let apart = vec![
        of(Some(24), Some(1)),
        of(Some(3), Some(1)),
        of(Some(1000), Some(1)),
        of(None, Some(1)),
        of(Some(1), None),
    ];
    for (tokens, slots) in [(vec![190, 100], 70), (vec![190, 40, 7], 50)] {
        for uses in
            [apart.clone(), all.iter().step_by(5).copied().collect(), all.iter().rev().step_by(3).copied().collect()]
        {
            let rings = Rings::uniform(2, Geometry { slots, chunk: slots / 4, credit: slots / 3 });
            let turn = |cached| Turn { channels: 2, cached, return_weights: !cached, ..TURN };
            let rounds = vec![turn(false), turn(true), turn(true)];
            check(
                backend,
                &Scenario { rings, rounds, uses, hidden: 16, tokens: tokens.clone(), ..pulled(tokens.len() as u32, 0) },
            )?;
        }
    }
    Ok(())
}
