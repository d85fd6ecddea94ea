//! Ranks of several nodes: rows along the rail, fanned out at the other end, and sums that begin where the rows are.

use std::ops::RangeInclusive;

use ep_conformance::harness::share;
use ep_conformance::workload::RoutingKind;
use ep_core::ring::Geometry;
use ep_core::{Element, Scaling};
use ep_cuda::checks::Plant;

use crate::job::Job;
use crate::program::{Checks, Mutation, Nodes, Program};
use crate::{again, job};

/// A job of one round of `nodes` nodes of `width` ranks.
pub(crate) fn far_job(seed: u64, nodes: u32, width: u32, slots: u32, tokens: &[u32]) -> Job {
    let mut job = job(seed, slots, [0; 3]);
    job.topology = (nodes, width);
    job.rounds[0].tokens = tokens.to_vec();
    job
}

/// Shapes, rings and batches of every kind: what there is none of, one of, or many of.
pub(crate) fn jobs(seed: u64) -> Vec<(&'static str, Job)> {
    let skewed = RoutingKind::Skewed { exponent: 2.0 };
    let of = |nodes, width, slots, tokens: &[u32], change: &dyn Fn(&mut Job)| {
        let mut job = far_job(seed, nodes, width, slots, tokens);
        change(&mut job);
        job
    };
    let uneven = Geometry { slots: 7, chunk: 3, credit: 2 };
    vec![
        ("rings of one slot", of(2, 2, 1, &[11, 5, 0, 8], &|_| {})),
        ("a rank a node", of(3, 1, 2, &[9, 4, 6], &|job| job.geometry.chunk = 2)),
        ("one token in all", of(2, 2, 2, &[0, 1, 0, 0], &|_| {})),
        ("no token at all", again(of(2, 2, 3, &[0; 4], &|_| {}), |round| round.tokens = vec![2; 4])),
        ("all choices", of(2, 2, 3, &[5, 6, 7, 8], &|job| (job.local_experts, job.topk) = (1, 4))),
        ("one rank has all that is chosen", of(2, 2, 2, &[9; 4], &|job| job.rounds[0].routing = RoutingKind::Single)),
        ("dropped choices", of(2, 2, 2, &[16, 3, 9, 7], &|job| job.rounds[0].drop = 0.6)),
        ("two rows of bias", of(2, 2, 2, &[5, 6, 7, 4], &|job| (job.rounds[0].bias, job.topk) = (2, 5))),
        ("FP8", of(2, 2, 2, &[8, 9, 4, 3], &|job| (job.element, job.hidden) = (Element::Fp8(Scaling::Exact), 300))),
        (
            "channels, several rounds, and fewer channels than there are",
            again(
                again(
                    of(2, 2, 7, &[30, 23, 5, 14], &|job| (job.channels, job.geometry, job.topk) = (3, uneven, 4)),
                    |round| (round.channels, round.tokens) = (2, vec![3, 40, 12, 9]),
                ),
                |round| (round.channels, round.routing, round.bias) = (3, skewed, 2),
            ),
        ),
        ("rows of several parts", of(2, 2, 3, &[5, 0, 6, 4], &|job| (job.hidden, job.topk) = (2500, 4))),
        (
            "a short first put, of rows of several batches, and a short last one",
            of(2, 2, 64, &[40, 150, 120, 90], &|job| {
                job.geometry = Geometry { slots: 64, chunk: 48, credit: 16 };
                job.rounds[0].drop = 0.6;
            }),
        ),
        ("three nodes of two ranks", of(3, 2, 3, &[7, 3, 9, 2, 6, 5], &|job| job.topk = 6)),
    ]
}

#[test]
fn rows_cross_the_network_once_and_every_bit_is_as_the_oracle_says() {
    let Some(program) = Program::new(Checks::Off, Nodes::Several, None) else { return };
    for seed in 1..=share(2, 1) {
        for (name, job) in jobs(seed) {
            let compared = program.run(&job).unwrap_or_else(|wrong| panic!("{name}, seed {seed}: {wrong}\n{job:?}"));
            let tokens: u32 = job.rounds.iter().flat_map(|round| &round.tokens).sum();
            assert!(compared.rows >= tokens.into(), "{name}: {compared:?}");
        }
    }
}

/// Of jobs that are to find something.
const SEEDS: RangeInclusive<u64> = 1..=40;

/// What is wrong after one of some jobs. Whether a seed finds something depends on how the processor is shared, too.
fn found(program: &Program, mut seeds: RangeInclusive<u64>, change: impl Fn(&mut Job)) -> Option<String> {
    seeds.find_map(|seed| {
        let mut job = far_job(seed, 2, 3, 1 + seed as u32 % 4, &[12, 7, 9, 10, 8, 11]);
        (job.topk, job.local_experts) = (4, 1);
        change(&mut job);
        let wrong = program.run(&job).err()?;
        assert!(!wrong.contains("signal"), "seed {seed}: {wrong}");
        Some(wrong)
    })
}

/// With the checks of kernels for tests: late verbs, slots overwritten behind the reader; and what is done wrong between nodes.
#[test]
fn planted_faults_of_the_far_hop_are_found() {
    let Some(program) = Program::new(Checks::On, Nodes::Several, None) else { return };
    for (name, mut job) in jobs(3) {
        job.longest = 30_000;
        program.run(&job).unwrap_or_else(|wrong| panic!("{name}: {wrong}\n{job:?}"));
    }
    let plants = [
        Plant::TailBeforeData,
        Plant::CreditEarly,
        Plant::StagingNotFlushed,
        Plant::WrongGate,
        Plant::MaskOfAnotherNode,
        Plant::PartialNotRounded,
        Plant::ClosedEarly,
    ];
    for plant in plants.into_iter().step_by(share(1, 4)) {
        let planted = |job: &mut Job| (job.plant, job.allowed) = (plant as u32, 4_000_000_000);
        let wrong = found(&program, SEEDS, planted).unwrap_or_else(|| panic!("{plant:?} was not found"));
        assert!(!wrong.contains("the contract is broken"), "kernels that report, {plant:?}: {wrong}");
    }
    assert_eq!(found(&program, 1..=8, |_| {}), None, "without a plant nothing is wrong");
}

/// Changes of the text that break a rule between nodes.
const MUTATIONS: [(&str, Mutation); 6] = [
    (
        "F3: a run is put by a lane that has not met the others",
        (
            "ep_ring.h",
            "    if (o.ring.published == o.ring.tail) return;\n    ep_warp_meet();",
            "    if (o.ring.published == o.ring.tail) return;",
        ),
    ),
    (
        "F9: a forwarder's credit by a leader that has not met its team",
        (
            "ep_forward.h",
            "        ep_forward_rows(r, a, far, f, going.rows, team);\n        ep_team_meet(team.number, team.warps);\n",
            "        for (ep_u32 i = 0; i < 200 && !leads; ++i) ep_nap(1000);\n        \
             ep_forward_rows(r, a, far, f, going.rows, team);\n",
        ),
    ),
    (
        "a run that goes on where the staging memory begins anew",
        ("ep_far_ring.h", "        if (run > depth - from) run = depth - from;\n", ""),
    ),
    (
        "a part of a row is added before it has come",
        ("ep_combine_team.h", "        ep_await_oldest(asked - taken);\n", ""),
    ),
    (
        "a row goes on before it has come",
        ("ep_carry.h", "ep_fetch_wait<EP_CARRY_STAGES - 1>();", "ep_fetch_wait<EP_CARRY_STAGES>();"),
    ),
    (
        "F9: rows of a batch are given back by a leader that has not met its team",
        (
            "ep_combine_team.h",
            "        ep_sum_due<columns, To>(r, a, sources, desk, team, batch);\n        ep_team_meet(team.number, team.warps);\n",
            "        for (ep_u32 i = 0; i < 200 && !ep_leads(team); ++i) ep_nap(1000);\n        \
             ep_sum_due<columns, To>(r, a, sources, desk, team, batch);\n",
        ),
    ),
];

#[test]
fn text_that_breaks_the_contract_between_nodes_is_found() {
    for (rule, mutation) in MUTATIONS.into_iter().step_by(share(1, 8)) {
        let Some(program) = Program::new(Checks::Off, Nodes::Several, Some(mutation)) else { return };
        let by_rows = |job: &mut Job| job.allowed = 4_000_000_000;
        // The ring is full in the middle of a chunk: the next run begins at an odd slot, of four that are staged.
        let by_runs = |job: &mut Job| {
            (job.geometry, job.allowed) = (Geometry { slots: 7, chunk: 2, credit: 2 }, 4_000_000_000);
        };
        let either = |seed| found(&program, seed..=seed, by_runs).or_else(|| found(&program, seed..=seed, by_rows));
        assert!(SEEDS.into_iter().find_map(either).is_some(), "not found: {rule}");
    }
}

/// A rank that does nothing, of another node: all that wait for it blame it.
#[test]
fn a_rank_of_another_node_that_is_not_there_is_blamed() {
    let Some(program) = Program::new(Checks::Off, Nodes::Several, None) else { return };
    let mut job = far_job(1, 2, 2, 2, &[5, 6, 7, 8]);
    (job.absent, job.allowed) = (Some(3), 6_000_000_000);
    let reports = program.reports(&job).expect("the program ends");
    assert!(reports[..3].iter().all(|report| report.status != 0 && report.culprit == 3), "{reports:?}");
}
