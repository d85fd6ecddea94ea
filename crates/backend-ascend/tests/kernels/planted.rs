//! Faults that are planted in the kernels, and what catches each.

use ep_ascend::args::Plant;
use ep_conformance::harness::share;
use ep_core::Rings;
use ep_core::device::Status;
use ep_core::layout::Mismatch;

use crate::common::IN_CASES;
use crate::failures::{self, Expected};
use crate::job::{Job, Round};
use crate::servers::servers;
use crate::{blame, by_expert, hosted, job, left, library, low, low_far, quantize, rings};

/// Seeds that are tried until one catches.
const SEEDS: u64 = 24;
/// Seeds under which nothing is wrong without a plant.
const WELL: u64 = 6;

/// A job, and how it must fail; without that it must go well.
type Case = (Job, Option<Expected>);

/// Three ranks, rings of one to four slots.
fn usual(seed: u64) -> Case {
    let slots = 1 + seed as u32 % 4;
    let mut job = job(seed, 3, rings(slots, 1 + slots / 2, 1), 12);
    (job.topk, job.allowed) = (4, 10_000_000);
    (job, None)
}

/// Rows of several pieces.
fn long(seed: u64) -> Case {
    let mut job = job(seed, 2, rings(3, 1, 1), 4);
    (job.hidden, job.allowed) = (24_000, 10_000_000);
    (job, None)
}

/// Ends that owe and hold back much.
fn late(seed: u64) -> Case {
    let mut job = job(seed, 3, rings(3, 2, 3), 11);
    job.allowed = 10_000_000;
    (job, None)
}

/// Calls that cut the rings differently.
fn recut(seed: u64) -> Case {
    let (mut job, _) = late(seed);
    job.channels = 2;
    let first = job.rounds[0].clone();
    let of = |channels, slots| Round { rings: Rings::uniform(channels, rings(slots, 1, slots)), ..first.clone() };
    job.rounds = vec![of(2, 2), of(1, 5), of(2, 3)];
    job.allowed = 20_000_000;
    (job, None)
}

/// Two servers of two ranks, more rows than rings, queues and staging memory have room for.
fn far(seed: u64) -> Case {
    let mut job = servers(seed, 2, 2, rings(3, 1, 1), 10);
    (job.topk, job.allowed, job.roles.senders) = (4, 30_000_000, 2);
    (job, None)
}

/// The same on the other route of completion.
fn polled(seed: u64) -> Case {
    let (mut job, expected) = far(seed);
    job.polls = true;
    (job, expected)
}

/// Counts of elements that wrap: only some queues begin there.
fn wrapping(seed: u64) -> Case {
    let (mut job, expected) = far(seed);
    job.rounds = vec![job.rounds[0].clone(); 2];
    (job, expected)
}

fn absent(seed: u64) -> Case {
    let (job, expected) = failures::absent(seed);
    (job, Some(expected))
}

fn gone(seed: u64) -> Case {
    let (job, expected) = failures::gone(seed);
    (job, Some(expected))
}

fn kind(seed: u64) -> Case {
    let (job, expected) = failures::kind(seed);
    (job, Some(expected))
}

fn settings(seed: u64) -> Case {
    let (job, expected) = failures::settings(seed);
    (job, Some(expected))
}

/// What is wrong after a job with a fault planted; nothing where all is as it must be.
fn found((mut job, expected): Case, plant: u32) -> Option<String> {
    job.plant = plant;
    let outcome = match job.run(library()) {
        Ok(outcome) => outcome,
        Err(wrong) if wrong.starts_with("round ") => return Some(format!("oracle: {wrong}")),
        Err(wrong) => return Some(wrong),
    };
    if let Some(expected) = expected {
        return expected(&job, &outcome).err().map(|wrong| format!("failure: {wrong}"));
    }
    // The one that found out by itself.
    let own = |status: u32| status != 0 && status != Status::Aborted as u32;
    let report = outcome.reports.iter().find(|report| own(report.status))?;
    Some(match Status::of(report.status) {
        Some(Status::Timeout) => format!("deadline: {report:?}"),
        _ => format!("refused: {}: {report:?}", Mismatch::of(report.field).map_or("?", Mismatch::name)),
    })
}

/// A planted fault, the job that shows it for a seed, and what must be said of it: a rule of the twin, or one of what ranks and tests say.
type Planted = (Plant, fn(u64) -> Case, &'static [&'static str]);

const PLANTED: &[Planted] = &[
    (Plant::WordFlag, usual, &["order: "]),
    (Plant::WordReused, usual, &["order: "]),
    (Plant::StaleCell, usual, &["deadline: "]),
    (Plant::TailBeforeRows, usual, &["oracle: ", "refused: "]),
    (Plant::CreditEarly, usual, &["oracle: ", "refused: "]),
    (Plant::BufferReused, usual, &["order: "]),
    (Plant::FilledFlag, usual, &["order: "]),
    (Plant::ReadFlag, usual, &["order: "]),
    (Plant::HeaderFlag, usual, &["order: "]),
    (Plant::LoadedFlag, usual, &["order: "]),
    (Plant::VectorBarrier, usual, &["order: "]),
    (Plant::OutReused, long, &["order: "]),
    (Plant::SummedFlag, usual, &["order: "]),
    (Plant::WrongSlot, usual, &["oracle: ", "refused: "]),
    (Plant::PositionOffByOne, usual, &["refused: position of a row"]),
    (Plant::NoCredit, usual, &["oracle: ", "refused: "]),
    (Plant::Impolite, late, &["deadline: "]),
    (Plant::TailLost, usual, &["deadline: "]),
    (Plant::NoDeadline, absent, &["failure: "]),
    (Plant::Silent, absent, &["failure: rank 0 has said that it waits"]),
    (Plant::LineFlag, absent, &["order: "]),
    (Plant::ScalarStore, usual, &["cache: "]),
    (Plant::SharedLine, usual, &["deadline: ", "refused: ", "oracle: "]),
    (Plant::WholeBlocks, usual, &["floor: "]),
    (Plant::BeyondTheRing, usual, &["oracle: ", "refused: ", "bounds: "]),
    (Plant::BeyondTheRows, usual, &["bounds: "]),
    (Plant::NoWindow, usual, &["bounds: "]),
    (Plant::FlagTwice, usual, &["flags: "]),
    (Plant::FlagLeft, usual, &["flags: "]),
    (Plant::FlagMissing, usual, &["hang: "]),
    (Plant::FlagId, usual, &["flags: "]),
    (Plant::UbFull, usual, &["UB: "]),
    (Plant::UbAlignment, usual, &["alignment: "]),
    (Plant::RoundedTooEarly, usual, &["oracle: "]),
    (Plant::Rounding, usual, &["limits: "]),
    (Plant::SumNotCleared, usual, &["oracle: "]),
    (Plant::InputReused, long, &["order: "]),
    (Plant::WeightsLost, usual, &["oracle: "]),
    (Plant::ExpertsOfOthers, usual, &["oracle: "]),
    (Plant::HeaderUnchecked, settings, &["failure: the first header is refused"]),
    (Plant::KindUnheard, kind, &["failure: "]),
    (Plant::GoneUnheard, gone, &["failure: rank 0 knows who is gone"]),
    (Plant::VerdictUnheard, absent, &["failure: rank 1 hears of it"]),
    (Plant::NoGeneration, usual, &["deadline: "]),
    (Plant::WrongCell, usual, &["deadline: "]),
    (Plant::Ticks, absent, &["failure: "]),
    (Plant::HeadBeyond, usual, &["refused: ", "oracle: "]),
    (Plant::TailBeyond, usual, &["refused: tail of the ring"]),
    (Plant::LaterPieces, long, &["oracle: "]),
    (Plant::WrongShare, usual, &["refused: "]),
    (Plant::RowsTooMany, usual, &["refused: ", "deadline: "]),
    (Plant::NotClear, recut, &["oracle: ", "refused: ", "deadline: "]),
    (Plant::OtherDepth, far, &["roce: "]),
    (Plant::OwnerStays, far, &["roce: "]),
    (Plant::KeysSwapped, far, &["roce: "]),
    (Plant::ElementFlag, far, &["order: "]),
    (Plant::BellEarly, far, &["roce: "]),
    (Plant::BellWide, wrapping, &["roce: "]),
    (Plant::OneWord, far, &["oracle: ", "refused: ", "deadline: "]),
    (Plant::QueueFull, far, &["roce: "]),
    (Plant::CompletionsKept, polled, &["roce: a queue's element: no room for a completion"]),
    (Plant::TailFirst, far, &["oracle: ", "refused: "]),
    (Plant::StagingEarly, far, &["oracle: ", "refused: "]),
    (Plant::GapsSent, far, &["oracle: ", "refused: ", "deadline: "]),
    (Plant::FarCreditLost, far, &["deadline: "]),
    (Plant::FarUnasked, far, &["oracle: ", "refused: "]),
    (Plant::StagingUnasked, far, &["oracle: ", "refused: "]),
    (Plant::ShareTooLong, far, &["refused: "]),
    (Plant::MaskOfAll, far, &["refused: "]),
    (Plant::NotLocalized, far, &["oracle: "]),
    (Plant::PartUnrounded, far, &["oracle: "]),
    (Plant::LeftUnsent, far, &["deadline: "]),
];

#[test]
fn each_planted_fault_is_caught_by_what_it_breaks() {
    for (plant, case, said) in PLANTED {
        let caught = (1..=SEEDS).find_map(|seed| found(case(seed), *plant as u32));
        let caught = caught.unwrap_or_else(|| panic!("{plant:?} is not caught in {SEEDS} seeds"));
        assert!(said.iter().any(|said| caught.starts_with(said)), "{plant:?} is caught as {caught}, expected {said:?}");
    }
}

#[test]
fn without_a_plant_nothing_is_caught() {
    for case in [usual, long, late, recut, absent, gone, kind, settings, far, polled, wrapping] {
        for seed in 1..=share(WELL, 2) {
            assert_eq!(found(case(seed), 0), None, "seed {seed}");
        }
    }
}

#[test]
fn every_plant_is_in_the_table() {
    let is_planted = |plant: &Plant| {
        PLANTED.iter().any(|(other, ..)| other == plant)
            || blame::PLANTED.iter().any(|(other, _)| other == plant)
            || hosted::PLANTED.iter().any(|(other, ..)| other == plant)
            || by_expert::PLANTED.iter().any(|(other, ..)| other == plant)
            || quantize::PLANTED.iter().any(|(other, _)| other == plant)
            || left::PLANTED == *plant
            || low::PLANTED.iter().any(|(other, ..)| other == plant)
            || low_far::PLANTED.iter().any(|(other, ..)| other == plant)
            || low::ROUNDED.contains(plant)
            || IN_CASES.iter().any(|(other, ..)| other == plant)
    };
    let missing: Vec<_> = Plant::ALL.iter().filter(|plant| !is_planted(plant)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
