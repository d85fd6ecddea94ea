//! Planted protocol faults: the checks must catch each of them.

use ep_core::plant::Plant;
use ep_core::ring::Geometry;
use ep_core::{Error, Placement, Rings};

use super::by_expert;
use super::fixture::{Layer, TURN, Verdict, ensure, layer, pulled, scenario, text};
use super::low_latency as low;
use super::low_nodes;
use super::memory::{hold_leases, overwrite_output};
use super::misuse;
use super::nodes::over;
use super::overflow::{overflow_then_rings, roomy};
use crate::backend::{Backend, Requirement, Setup};
use crate::harness::{Case, share};
use crate::low_latency::packed;
use crate::low_latency::scenario::{self as low_latency, Sent, Turn};
use crate::scenario::Scenario;

/// Seeds that a planted fault may hide from before it counts as missed.
const SEEDS: u64 = 40;

const MODES: &[Requirement] =
    &[Requirement::Plants, Requirement::Incidents, Requirement::ModesHeard, Requirement::LowLatency];

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, body| Case { name, needs: &[Requirement::Plants], body };
    let units = |name, body| Case { name, needs: &[Requirement::Plants, Requirement::Units], body };
    let coordinated = |name, body| Case { name, needs: &[Requirement::Plants, Requirement::Coordinators], body };
    vec![
        case("planted_tail_before_data_is_caught", tail_before_data::<B> as fn(&B) -> _),
        case("planted_credit_one_row_early_is_caught", credit_early::<B>),
        case("planted_position_off_by_one_is_caught", position::<B>),
        case("planted_errors_on_outboxes_are_caught", outboxes::<B>),
        case("planted_rings_over_outboxes_are_caught", over_outboxes::<B>),
        Case { name: "planted_deafness_to_the_other_mode_is_caught", needs: MODES, body: deaf::<B> },
        case("planted_skipped_flush_is_caught", skipped_flush::<B>),
        case("planted_reuse_without_done_is_caught", without_done::<B>),
        case("planted_impolite_waiting_is_caught", impolite::<B>),
        case("planted_lowered_cell_is_caught", lowered_cell::<B>),
        case("planted_lease_freed_early_is_caught", lease_freed_early::<B>),
        case("planted_forwarding_out_of_order_is_caught", out_of_order::<B>),
        Case {
            name: "planted_errors_on_rows_by_expert_are_caught",
            needs: &[Requirement::Plants, Requirement::ByExpert],
            body: by_expert_faults::<B>,
        },
        Case {
            name: "planted_slot_of_a_packed_row_is_caught",
            needs: &[Requirement::Plants, Requirement::LowLatency, Requirement::LowOrders],
            body: packed_slot::<B>,
        },
        case("planted_partial_not_rounded_is_caught", not_rounded::<B>),
        case("planted_row_sent_twice_to_a_node_is_caught", sent_twice::<B>),
        case("planted_malformed_row_at_a_forwarder_is_caught", malformed_row::<B>),
        case("planted_share_too_long_is_caught", share_too_long::<B>),
        case("planted_operation_in_the_wrong_bank_is_caught", wrong_bank::<B>),
        case("planted_arrival_of_something_else_is_caught", other_arrival::<B>),
        case("planted_low_latency_reuse_without_done_is_caught", low_without_done::<B>),
        case("planted_low_latency_skipped_flush_is_caught", low_skipped_flush::<B>),
        case("planted_skip_without_waiting_is_caught", skip_without_waiting::<B>),
        case("planted_drop_without_skipping_is_caught", drop_without_skipping::<B>),
        case("planted_sending_before_refusing_is_caught", sent_before_refused::<B>),
        units("planted_errors_on_units_are_caught", errors_on_units::<B>),
        case("planted_errors_on_announced_rows_are_caught", errors_on_announced_rows::<B>),
        case("planted_errors_on_far_rings_are_caught", far_rings::<B>),
        coordinated("planted_staging_freed_early_is_caught", staging_freed_early::<B>),
        coordinated("planted_second_poster_is_caught", second_poster::<B>),
    ]
}

/// Runs `scenario` with the fault under many seeds. Some must fail, and each failure must be one of `signs`; without
/// the fault none may fail.
fn caught<B: Backend>(backend: &B, plant: Plant, scenario: &Scenario, signs: &[&str]) -> Verdict {
    hunt(plant, signs, |seed| {
        let scenario = Scenario { seed, ..scenario.clone() };
        (scenario.setup(), move |setup: &Setup| scenario.check_in(backend, setup).map(drop))
    })
}

/// [`caught`] in low latency.
fn low_caught<B: Backend>(backend: &B, plant: Plant, scenario: &low_latency::Scenario, signs: &[&str]) -> Verdict {
    hunt(plant, signs, |seed| {
        let scenario = low_latency::Scenario { seed, ..scenario.clone() };
        (scenario.setup(), move |setup: &Setup| scenario.check_in(backend, setup).map(drop))
    })
}

/// Runs what `of_seed` gives for each seed: a communicator, and what checks one. A run that is not thorough is content with two seeds that notice.
fn hunt<F: Fn(&Setup) -> Verdict>(
    plant: Plant,
    signs: &[&str],
    of_seed: impl Fn(u64) -> (Result<Setup, Error>, F),
) -> Verdict {
    let mut failures = 0;
    for seed in 0..SEEDS {
        if failures == share(SEEDS, 2) {
            break;
        }
        let (setup, check) = of_seed(seed);
        let mut setup = setup.map_err(text)?;
        check(&setup).map_err(|error| format!("seed {seed} fails without the fault: {error}"))?;
        setup.settings = setup.settings.with_plant(plant);
        if let Err(error) = check(&setup) {
            failures += 1;
            let known = signs.iter().any(|sign| error.contains(sign));
            ensure(known, || format!("seed {seed}: caught by `{error}`, expected one of {signs:?}"))?;
        }
    }
    ensure(failures > 0, || format!("{plant:?} went unnoticed under {SEEDS} seeds"))
}

/// Small rings, several rounds.
fn busy() -> Scenario {
    Scenario { rounds: vec![TURN; 2], ..scenario(3, 14) }
}

fn tail_before_data<B: Backend>(backend: &B) -> Verdict {
    caught(backend, Plant::TailBeforeData, &busy(), &["race", "gave up on", "of the operation is", "of a row is"])
}

fn credit_early<B: Backend>(backend: &B) -> Verdict {
    let rings = Rings::uniform(1, Geometry { slots: 2, chunk: 1, credit: 1 });
    caught(backend, Plant::CreditOneRowEarly, &Scenario { rings, ..busy() }, &["race"])
}

/// The faults of rings, of rows that are pulled; and a sender that forgets all readers but one.
fn outboxes<B: Backend>(backend: &B) -> Verdict {
    let busy = || Scenario { rounds: vec![TURN; 2], ..pulled(3, 14) };
    caught(backend, Plant::TailBeforeData, &busy(), &["race", "of a row is"])?;
    let rings = Rings::uniform(1, Geometry { slots: 2, chunk: 1, credit: 1 });
    caught(backend, Plant::CreditOneRowEarly, &Scenario { rings, ..busy() }, &["race", "of a row is"])?;
    caught(backend, Plant::FirstReaderOnly, &Scenario { rings, ..busy() }, &["race", "of the ring is", "of a row is"])?;
    let cached = crate::scenario::Turn { cached: true, ..TURN };
    let again = vec![TURN, cached, cached];
    let left = Scenario { rounds: again, tokens: vec![2, 14, 0], ..busy() };
    caught(backend, Plant::OutboxLeftFull, &left, &["race", "of the ring is", "of a row is"])?;
    caught(backend, Plant::PositionOffByOne, &busy(), &["position of a row", "race", "rows received in all"])?;
    let rings = Rings::uniform(1, Geometry { slots: 3, chunk: 2, credit: 3 });
    caught(backend, Plant::ImpoliteWaiting, &Scenario { rings, ..busy() }, &["deadlock"])
}

/// Whoever is done with an operation in outboxes writes into the rings of a rank whose outbox others still read.
fn over_outboxes<B: Backend>(backend: &B) -> Verdict {
    let case = |layer| overflow_then_rings(backend, layer);
    seen_wrong_in(Plant::RingsOverOutboxes, roomy, case, &["race", "of a row is", "other rows"])
}

fn by_expert_faults<B: Backend>(backend: &B) -> Verdict {
    let caught = |plant, spare, signs: &[&str]| {
        hunt(plant, signs, |seed| {
            let scenario = Scenario { seed, topk: 6, local_experts: 4, ..scenario(2, 9) };
            let asked = by_expert::Asked { alignment: 8, spare, remainder: false };
            (scenario.setup(), move |setup: &Setup| by_expert::check_in(backend, &scenario, asked, Some(setup)))
        })
    };
    caught(Plant::PaddingLeft, None, &["byte of the rows by expert"])?;
    caught(Plant::RoomLeft, Some(u32::MAX), &["byte of the rows by expert"])?;
    caught(Plant::SlotOffByOne, None, &["byte of the rows by expert"])?;
    caught(Plant::ChoicesDescending, None, &["combined_x"])
}

fn packed_slot<B: Backend>(backend: &B) -> Verdict {
    hunt(Plant::SlotOffByOne, &["byte of the rows by expert"], |seed| {
        let scenario = low_latency::Scenario { seed, ..low::scenario(2, 9) };
        (scenario.setup(), move |setup: &Setup| packed::check(&scenario, backend, setup, 8).map(drop))
    })
}

/// Who waits in throughput mode blames a rank that waits in low latency.
fn deaf<B: Backend>(backend: &B) -> Verdict {
    hunt(Plant::DeafToTheOtherMode, &["failed with"], |seed| {
        let layer = low_nodes::losing(seed, false);
        let setup = layer.as_ref().map(|layer| layer.setup.clone()).map_err(Clone::clone);
        (setup, move |setup: &Setup| low_nodes::survive(backend, layer.as_ref().map_err(text)?, setup, true))
    })
}

fn position<B: Backend>(backend: &B) -> Verdict {
    caught(backend, Plant::PositionOffByOne, &busy(), &["position of a row", "gave up on"])
}

fn skipped_flush<B: Backend>(backend: &B) -> Verdict {
    caught(backend, Plant::SkippedFlush, &busy(), &["race"])
}

fn without_done<B: Backend>(backend: &B) -> Verdict {
    seen_wrong(Plant::BankReusedWithoutDone, |layer| overwrite_output(backend, layer), &["race", "got back"])
}

fn impolite<B: Backend>(backend: &B) -> Verdict {
    let rings = Rings::uniform(1, Geometry { slots: 3, chunk: 2, credit: 3 });
    caught(backend, Plant::ImpoliteWaiting, &Scenario { rings, ..busy() }, &["deadlock"])
}

fn lowered_cell<B: Backend>(backend: &B) -> Verdict {
    caught(backend, Plant::CellLowered, &busy(), &["F4"])
}

fn lease_freed_early<B: Backend>(backend: &B) -> Verdict {
    seen_wrong(Plant::LeaseFreedEarly, |layer| hold_leases(backend, layer), &["the first lease"])
}

fn out_of_order<B: Backend>(backend: &B) -> Verdict {
    caught(backend, Plant::ForwardedOutOfOrder, &over(2, 2, 14), &["recv_src_token", "token of a row", "gave up on"])
}

fn not_rounded<B: Backend>(backend: &B) -> Verdict {
    let every_rank = Scenario { topk: 8, ..over(2, 2, 14) };
    caught(backend, Plant::PartialNotRounded, &every_rank, &["combined_x"])
}

fn sent_twice<B: Backend>(backend: &B) -> Verdict {
    caught(backend, Plant::SentTwiceToNode, &over(2, 2, 14), &["position", "rows", "outside", "gave up on"])
}

/// One rank on each node: what a forwarder takes in is for itself, and nobody else looks at it.
fn malformed_row<B: Backend>(backend: &B) -> Verdict {
    caught(backend, Plant::FarRowOfAnotherSource, &busy_far(), &["source of a row", "gave up on"])?;
    caught(backend, Plant::FarRowOfAnotherOp, &busy_far(), &["operation of a row", "gave up on"])
}

fn share_too_long<B: Backend>(backend: &B) -> Verdict {
    caught(backend, Plant::ShareTooLong, &busy_far(), &["rows sent to a node", "gave up on"])
}

/// Two operations in flight all the time.
fn ahead() -> low_latency::Scenario {
    low_latency::Scenario { turns: vec![Turn { ahead: true, ..low::TURN }; 4], ..low::scenario(3, 9) }
}

fn wrong_bank<B: Backend>(backend: &B) -> Verdict {
    low_caught(backend, Plant::OpInWrongBank, &ahead(), &["race", "low-latency row", "gave up", "operation"])
}

fn other_arrival<B: Backend>(backend: &B) -> Verdict {
    let signs = ["number of the low-latency operation", "gave up", "masked"];
    low_caught(backend, Plant::ArrivalOfAnotherOp, &low::scenario(3, 9), &signs)?;
    let signs = ["kind of the low-latency operation", "gave up", "masked"];
    low_caught(backend, Plant::ArrivalOfAnotherKind, &low::scenario(3, 9), &signs)
}

fn low_without_done<B: Backend>(backend: &B) -> Verdict {
    low_caught(backend, Plant::BankReusedWithoutDone, &ahead(), &["race", "low-latency", "results of a rank"])
}

fn low_skipped_flush<B: Backend>(backend: &B) -> Verdict {
    low_caught(backend, Plant::SkippedFlush, &ahead(), &["race"])
}

/// What is a fault of arrivals and banks is one of units, too; and tags have faults of their own.
fn errors_on_units<B: Backend>(backend: &B) -> Verdict {
    let caught = |plant, signs: &[&str]| {
        hunt(plant, signs, |seed| {
            let scenario = low_latency::Scenario { seed, ..ahead() };
            let setup =
                scenario.setup().map(|setup| Setup { settings: setup.settings.with_units(&setup.topology), ..setup });
            (setup, move |setup: &Setup| scenario.check_in(backend, setup).map(drop))
        })
    };
    // Where a rank ends with an error, the others wait for it in vain.
    let row = "low-latency row";
    caught(Plant::TagOfBefore, &["race", row, "deadlock"])?;
    let torn = ["race", row, "of a source", "of a rank", "of a token", "of an expert", "turn", "deadlock"];
    caught(Plant::FirstUnitOnly, &torn)?;
    caught(Plant::OpInWrongBank, &["race", row, "F11", "deadlock"])?;
    caught(Plant::BankReusedWithoutDone, &["race", row, "F11", "deadlock"])?;
    caught(Plant::SkippedFlush, &["race"])?;
    caught(Plant::ArrivalOfAnotherOp, &["number of the low-latency operation", "gave up", "masked", "deadlock"])?;
    // Batches of different sizes, of which the small ones, up to the second rank's, have results as units.
    let sizes = |plant, signs: &[&str]| {
        hunt(plant, signs, |seed| {
            // What is given up has put results in slots of the bank in which the next generation begins.
            let (twice, anew) = (Turn { twice: true, ..low::TURN }, Turn { anew: Some(Sent::Combine), ..low::TURN });
            let turns = vec![twice, anew, Turn { ahead: true, ..low::TURN }, low::TURN];
            let scenario =
                low_latency::Scenario { seed: 4 * seed + 2, tokens: vec![1, 5, 6], turns, ..low::scenario(3, 8) };
            let setup =
                scenario.setup().map(|setup| Setup { settings: setup.settings.with_units(&setup.topology), ..setup });
            (setup, move |setup: &Setup| scenario.check_in(backend, setup).map(drop))
        })
    };
    let form = ["form of low-latency results", "gave up", "deadlock"];
    sizes(Plant::FormOfTheOwnBatch, &form)?;
    sizes(Plant::UnitLimitOffByOne, &form)?;
    sizes(Plant::TokensOffByOne, &form)?;
    sizes(Plant::UnitsLaidOutInSlots, &["race", "deadlock"])
}

/// What is a fault of arrivals and banks is one of rows that are announced, too; and their cells have faults of their own.
fn errors_on_announced_rows<B: Backend>(backend: &B) -> Verdict {
    let caught = |plant, signs: &[&str]| {
        hunt(plant, signs, |seed| {
            let scenario = low_latency::Scenario { seed, ..ahead() };
            let setup = scenario.setup().map(|setup| Setup { settings: setup.settings.with_announced_rows(), ..setup });
            (setup, move |setup: &Setup| scenario.check_in(backend, setup).map(drop))
        })
    };
    let wrong = ["race", "low-latency row", "of a source", "of a rank", "of a token", "turn", "deadlock"];
    caught(Plant::RowRaisedEarly, &wrong)?;
    caught(Plant::HeadersLate, &wrong)?;
    caught(Plant::RowNotAwaited, &wrong)?;
    caught(Plant::OpInWrongBank, &wrong)?;
    caught(Plant::BankReusedWithoutDone, &wrong)?;
    caught(Plant::SkippedFlush, &["race"])
}

/// Low latency misused under many seeds: see [`hunt`].
fn misused(plant: Plant, case: impl Fn(&low::Layer, u64) -> Verdict, signs: &[&str]) -> Verdict {
    hunt(plant, signs, |seed| {
        let layer = low::layer(3, 5, seed);
        let setup = layer.as_ref().map(|layer| layer.setup.clone()).map_err(Error::clone);
        let case = &case;
        (setup, move |setup: &Setup| {
            let layer = layer.as_ref().map_err(text)?;
            let low::Layer { world, batches, .. } = layer;
            case(&low::Layer { setup: setup.clone(), world: world.clone(), batches: batches.clone() }, seed)
        })
    })
}

fn skip_without_waiting<B: Backend>(backend: &B) -> Verdict {
    let case = |layer: &low::Layer, seed| misuse::skip(backend, layer, seed);
    misused(Plant::SkippedWithoutWaiting, case, &["race", "low-latency row", "operation"])
}

fn drop_without_skipping<B: Backend>(backend: &B) -> Verdict {
    let case = |layer: &low::Layer, seed| misuse::skip(backend, layer, seed);
    misused(Plant::DroppedWithoutSkipping, case, &["deadlock", "low-latency row"])
}

fn sent_before_refused<B: Backend>(backend: &B) -> Verdict {
    let case = |layer: &low::Layer, seed| misuse::refuse(backend, layer, seed);
    misused(Plant::SentBeforeRefused, case, &["was told", "operation"])
}

/// Small rings between nodes of one rank: there are no others.
fn busy_far() -> Scenario {
    Scenario { rounds: vec![TURN; 2], ..over(2, 1, 14) }
}

fn far_rings<B: Backend>(backend: &B) -> Verdict {
    let one = Rings::uniform(1, Geometry { slots: 2, chunk: 1, credit: 1 });
    let tight = Rings::uniform(1, Geometry { slots: 3, chunk: 2, credit: 3 });
    let signs = ["race", "gave up on", "of the operation is", "of a row is"];
    caught(backend, Plant::TailBeforeData, &busy_far(), &signs)?;
    caught(backend, Plant::SkippedFlush, &busy_far(), &["race"])?;
    caught(backend, Plant::CellLowered, &busy_far(), &["F4"])?;
    caught(backend, Plant::CreditOneRowEarly, &Scenario { rings: one, ..busy_far() }, &["race"])?;
    caught(backend, Plant::ImpoliteWaiting, &Scenario { rings: tight, ..busy_far() }, &["deadlock"])
}

fn staging_freed_early<B: Backend>(backend: &B) -> Verdict {
    caught(backend, Plant::StagingFreedEarly, &busy_far(), &["race"])
}

fn second_poster<B: Backend>(backend: &B) -> Verdict {
    caught(backend, Plant::SecondPoster, &busy_far(), &["F4"])
}

/// As [`caught`], for a case of its own over [`layer`].
fn seen_wrong(plant: Plant, case: impl Fn(Layer) -> Verdict, signs: &[&str]) -> Verdict {
    seen_wrong_in(plant, |seed| layer(3, 12, seed, Placement::Direct).map_err(text), case, signs)
}

/// [`seen_wrong`] in a communicator of one's own.
fn seen_wrong_in(
    plant: Plant,
    of_seed: impl Fn(u64) -> Result<Layer, String>,
    case: impl Fn(Layer) -> Verdict,
    signs: &[&str],
) -> Verdict {
    let mut failures = 0;
    for seed in 0..SEEDS {
        let mut layer = of_seed(seed)?;
        layer.setup.settings = layer.setup.settings.with_plant(plant);
        if let Err(error) = case(layer) {
            failures += 1;
            let known = signs.iter().any(|sign| error.contains(sign));
            ensure(known, || format!("seed {seed}: caught by `{error}`, expected one of {signs:?}"))?;
        }
    }
    ensure(failures > 0, || format!("{plant:?} went unnoticed under {SEEDS} seeds"))
}
