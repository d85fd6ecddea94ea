//! How the kernels fail: by the deadline at the latest, with reports that name the same culprit.

use ep_core::device::{Report, Status};
use ep_core::error::Phase;
use ep_core::layout::{Kind, Mismatch};

use crate::job::{Job, Misuse, Outcome};
use crate::{job, library, rings};

/// Ticks of the counter are 20 ns.
fn nanoseconds(outcome: &Outcome) -> u64 {
    outcome.cycles * 20
}

/// What is wrong with how a job has failed; nothing where it has failed as it must.
pub(crate) type Expected = fn(&Job, &Outcome) -> Result<(), String>;

fn check(holds: bool, what: &str, outcome: &Outcome) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("{what}: {:?} after {} ns", outcome.reports, nanoseconds(outcome))) }
}

/// A rank that is not there.
pub(crate) fn absent(seed: u64) -> (Job, Expected) {
    let mut job = job(seed, 3, rings(2, 1, 1), 12);
    (job.absent, job.allowed) = (Some(2), 10_000_000);
    let expected: Expected = |job, outcome| {
        let [first, second, _] = outcome.reports[..] else { return Err("three ranks".to_owned()) };
        check(first.status == Status::Timeout as u32, "rank 0 has the first turn", outcome)?;
        check(second.status == Status::Aborted as u32 && second.peer == 0, "rank 1 hears of it", outcome)?;
        check(outcome.alarms[0] >= 2, "rank 0 has said that it waits before it gave up", outcome)?;
        check(first.culprit == 2 && second.culprit == 2, "both blame rank 2", outcome)?;
        let waits = job.allowed / 8 * 7..job.allowed;
        check(waits.contains(&first.waited), "rank 0 waits until its turn", outcome)?;
        check(nanoseconds(outcome) < job.allowed / 4 * 5, "soon after the deadline all is over", outcome)
    };
    (job, expected)
}

/// A rank that is not there, of which rank 0's host knows.
pub(crate) fn gone(seed: u64) -> (Job, Expected) {
    let (mut job, _) = absent(seed);
    job.misuse = Misuse::KnowsWhoIsGone;
    let expected: Expected = |job, outcome| {
        let first = &outcome.reports[0];
        let right = first.status == Status::Gone as u32 && first.peer == 2;
        check(right && outcome.reports[1].culprit == 2, "rank 0 knows who is gone", outcome)?;
        check(nanoseconds(outcome) < job.allowed / 2, "no deadline is awaited", outcome)
    };
    (job, expected)
}

fn names(report: &Report, field: Mismatch) -> bool {
    report.status == Status::Mismatch as u32 && report.field == field as u32 && report.op == 1
}

/// Rank 0 combines where the other dispatches. No row moves, so its own part may end before it hears of the other.
pub(crate) fn kind(seed: u64) -> (Job, Expected) {
    let mut job = job(seed, 2, rings(2, 1, 1), 0);
    (job.misuse, job.allowed) = (Misuse::Kind, 10_000_000);
    let expected: Expected = |job, outcome| {
        let refuses = |(rank, mine, theirs): (usize, Kind, Kind)| {
            let report = &outcome.reports[rank];
            names(report, Mismatch::Kind) && report.awaited == mine as u64 && report.seen == theirs as u64
        };
        let either = refuses((0, Kind::Combine, Kind::Dispatch)) || refuses((1, Kind::Dispatch, Kind::Combine));
        check(either, "one of them names both kinds", outcome)?;
        check(nanoseconds(outcome) < job.allowed / 2, "no deadline is awaited", outcome)
    };
    (job, expected)
}

/// Rank 0 has other settings.
pub(crate) fn settings(seed: u64) -> (Job, Expected) {
    let mut job = job(seed, 2, rings(2, 1, 1), 6);
    (job.misuse, job.allowed) = (Misuse::Settings, 10_000_000);
    let expected: Expected = |_, outcome| {
        let refused = outcome.reports.iter().any(|report| names(report, Mismatch::Settings));
        check(refused, "the first header is refused", outcome)?;
        check(outcome.reports.iter().all(|report| report.status != 0), "both fail", outcome)
    };
    (job, expected)
}

fn fails_as_it_must(name: &str, of: fn(u64) -> (Job, Expected)) {
    for seed in 1..=6 {
        let (job, expected) = of(seed);
        let outcome = job.run(library()).unwrap_or_else(|wrong| panic!("{name}, seed {seed}: {wrong}"));
        expected(&job, &outcome).unwrap_or_else(|wrong| panic!("{name}, seed {seed}: {wrong}"));
    }
}

#[test]
fn a_rank_that_is_not_there_is_blamed_by_all_when_time_is_up() {
    fails_as_it_must("absent", absent);
}

#[test]
fn a_rank_that_the_host_knows_to_be_gone_is_not_waited_for() {
    fails_as_it_must("gone", gone);
}

#[test]
fn a_rank_that_does_something_else_is_refused_at_once() {
    fails_as_it_must("kind", kind);
}

#[test]
fn a_rank_with_other_settings_is_refused() {
    fails_as_it_must("settings", settings);
}

#[test]
fn a_report_is_the_error_that_users_get() {
    let (job, _) = absent(1);
    let outcome = job.run(library()).expect("it ends");
    let said = outcome.reports[0].error(ep_core::Rank(0)).expect("an error").to_string();
    assert!(said.contains("rank 2"), "{said}");
    assert_eq!(Phase::of(outcome.reports[0].phase), Phase::Rows, "{:?}", outcome.reports[0]);
}
