//! The contract of devices is not CUDA in disguise: the kernels' own text of the rings' roles runs on a toy device, and moves every bit as the
//! oracle says.
//!
//! The toy is a processor of CPU threads (`machine.h`) with words (`ep_device.h`) and near verbs (`ep_near.h`) of its own, all of `crates/cuda-twin/device`.
//! Everything else that its program is made of is what GPUs run: `counts.cu`, `dispatch_ring.cu`, `combine_ring.cu`, `offer_none.cu` and the headers they include. A word
//! of CUDA in any of these does not compile. Needs g++, or the compiler that `CXX` names, and nothing else.

mod adapters;
#[path = "../../../ep-core/tests/core/common/compiler.rs"]
mod compiler;
mod hca;
mod job;
mod nodes;
mod processor;
mod program;

use std::ops::RangeInclusive;

use ep_conformance::harness::share;
use ep_conformance::workload::RoutingKind;
use ep_core::ring::Geometry;
use ep_core::{Element, Scaling};
use ep_cuda::checks::Plant;

use job::{Job, Round};
use program::{Checks, Mutation, Nodes, Program};

/// A job of one round that all ranks have a share of.
fn job(seed: u64, slots: u32, tokens: [u32; 3]) -> Job {
    let round = Round { tokens: tokens.to_vec(), routing: RoutingKind::Uniform, drop: 0.0, bias: 0, channels: 1 };
    Job {
        seed,
        topology: (1, 3),
        local_experts: 2,
        topk: 2,
        hidden: 72,
        element: Element::Bf16,
        channels: 1,
        geometry: Geometry { slots, chunk: 1, credit: 1 },
        rounds: vec![round],
        allowed: 60_000_000_000,
        plant: 0,
        longest: 0,
        absent: None,
    }
}

/// One more round, as the first but for a change: counts of rings run on.
fn again(mut job: Job, change: impl Fn(&mut Round)) -> Job {
    let mut round = job.rounds[0].clone();
    change(&mut round);
    job.rounds.push(round);
    job
}

/// Shapes, rings and batches of every kind: what there is none of, one of, or many of.
fn jobs(seed: u64) -> Vec<(&'static str, Job)> {
    let skewed = RoutingKind::Skewed { exponent: 2.0 };
    let of = |slots, tokens, change: &dyn Fn(&mut Job)| {
        let mut job = job(seed, slots, tokens);
        change(&mut job);
        job
    };
    let uneven = Geometry { slots: 7, chunk: 3, credit: 2 };
    vec![
        ("rings of one slot", of(1, [11, 5, 8], &|_| {})),
        ("rings of two slots, steps of two", of(2, [9, 0, 14], &|job| job.geometry.chunk = 2)),
        ("one token in all", of(2, [0, 1, 0], &|_| {})),
        ("no token at all", again(of(3, [0, 0, 0], &|_| {}), |round| round.tokens = vec![2, 2, 2])),
        ("top-1", of(4, [20, 20, 20], &|job| job.topk = 1)),
        ("one expert a rank, chosen by all", of(3, [6, 7, 8], &|job| (job.local_experts, job.topk) = (1, 3))),
        ("as many choices as a token may have", of(2, [4, 5, 6], &|job| (job.local_experts, job.topk) = (16, 32))),
        ("one rank has all that is chosen", of(2, [9, 9, 9], &|job| job.rounds[0].routing = RoutingKind::Single)),
        ("dropped choices", of(2, [16, 3, 9], &|job| job.rounds[0].drop = 0.6)),
        ("everything dropped", of(2, [4, 4, 4], &|job| job.rounds[0].drop = 1.0)),
        ("a bias", of(2, [5, 6, 7], &|job| (job.rounds[0].bias, job.rounds[0].routing) = (1, skewed))),
        ("two rows of bias", of(2, [5, 6, 7], &|job| (job.rounds[0].bias, job.hidden) = (2, 1))),
        ("FP8", of(2, [8, 9, 4], &|job| (job.element, job.hidden) = (Element::Fp8(Scaling::Exact), 300))),
        ("FP8, UE8M0", of(2, [8, 2, 9], &|job| (job.element, job.hidden) = (Element::Fp8(Scaling::Ue8m0), 640))),
        ("rows longer than a warp copies at once", of(2, [3, 2, 4], &|job| job.hidden = 2500)),
        (
            "channels, several rounds, and fewer channels than there are",
            again(
                again(of(7, [40, 33, 5], &|job| (job.channels, job.geometry) = (3, uneven)), |round| {
                    (round.channels, round.tokens) = (2, vec![3, 50, 12]);
                }),
                |round| (round.channels, round.routing, round.bias) = (3, skewed, 2),
            ),
        ),
    ]
}

/// Runs the kernels' text as GPUs run it.
#[test]
fn rings_move_every_bit_on_a_device_that_is_no_gpu() {
    let Some(program) = Program::new(Checks::Off, Nodes::One, None) else { return };
    for seed in 1..=share(3, 1) {
        for (name, job) in jobs(seed) {
            let compared = program.run(&job).unwrap_or_else(|wrong| panic!("{name}, seed {seed}: {wrong}\n{job:?}"));
            let tokens: u32 = job.rounds.iter().flat_map(|round| &round.tokens).sum();
            assert!(compared.rows >= tokens.into(), "{name}: {compared:?}");
        }
    }
}

/// The text with the checks of kernels for tests: verbs come late, and what was read from a slot is overwritten.
#[test]
fn delays_and_poison_change_nothing() {
    let Some(program) = Program::new(Checks::On, Nodes::One, None) else { return };
    for seed in 4..=share(5, 4) {
        for (name, mut job) in jobs(seed) {
            job.longest = 30_000;
            program.run(&job).unwrap_or_else(|wrong| panic!("{name}, seed {seed}: {wrong}\n{job:?}"));
        }
    }
}

/// Of jobs that are to find something.
const SEEDS: RangeInclusive<u64> = 1..=100;

/// What is wrong after one of some jobs, with rings of one and of several slots. Whether a seed finds something depends on how the processor is
/// shared, too.
fn found(program: &Program, mut seeds: RangeInclusive<u64>, plant: u32) -> Option<String> {
    seeds.find_map(|seed| {
        let mut job = job(seed, 1 + seed as u32 % 4, [24, 20, 30]);
        job.plant = plant;
        let wrong = program.run(&job).err()?;
        assert!(!wrong.contains("signal"), "seed {seed}: {wrong}");
        Some(wrong)
    })
}

/// A tail before its row, credit before the read, a wrong slot, a wrong position.
#[test]
fn planted_faults_are_found() {
    let Some(program) = Program::new(Checks::On, Nodes::One, None) else { return };
    for plant in [Plant::TailBeforeData, Plant::CreditEarly, Plant::WrongSlot, Plant::PositionOffByOne] {
        let wrong = found(&program, SEEDS, plant as u32).unwrap_or_else(|| panic!("{plant:?} was not found"));
        assert!(!wrong.contains("the contract is broken"), "kernels that report, {plant:?}: {wrong}");
    }
    assert_eq!(found(&program, 1..=20, 0), None, "without a plant nothing is wrong");
}

/// Changes of the text that break a rule of ep_verbs.h or ep_words.h: a GPU may well forgive them.
const MUTATIONS: [(&str, Mutation); 5] = [
    (
        "F3: a tail without a fence",
        (
            "ep_ring.h",
            "            ep_fence_sys();\n            ep_outlet_tell(r, o)",
            "            ep_outlet_tell(r, o)",
        ),
    ),
    (
        "F3: a tail by a lane that has not met the others",
        (
            "ep_ring.h",
            "    if (o.ring.published == o.ring.tail) return;\n    ep_warp_meet();",
            "    if (o.ring.published == o.ring.tail) return;",
        ),
    ),
    (
        "F9: a receiver's credit by a lane that has not met the others",
        ("ep_dispatch_ring.h", "        ep_warp_meet();\n        ep_poison(r, at,", "        ep_poison(r, at,"),
    ),
    (
        "F9: a reducer's credit by a lane that has not met the others",
        (
            "ep_combine_ring.h",
            "    ep_warp_meet();\n    for (ep_u32 i = 0; i < rows; ++i)",
            "    for (ep_u32 i = 0; i < rows; ++i)",
        ),
    ),
    (
        "a meeting that one lane leaves out",
        (
            "ep_dispatch_ring.h",
            "        if (lane == 0) ep_inlet_plant(r, ring);\n        ep_warp_meet();",
            "        if (lane != 7) ep_warp_meet();",
        ),
    ),
];

#[test]
fn text_that_breaks_the_contract_is_found() {
    for (rule, mutation) in MUTATIONS.into_iter().step_by(share(1, 8)) {
        let Some(program) = Program::new(Checks::Off, Nodes::One, Some(mutation)) else { return };
        assert!(found(&program, SEEDS, 0).is_some(), "not found: {rule}");
    }
}

/// Two returners of rank 0's rows begin late, on two channels: the others' have given all by then. Rings into a peer must not be waited for that
/// are of this operation: who empties them may wait for the late ones.
#[test]
fn returners_that_begin_late_close_no_circle() {
    let begins = "    EpAt at;\n    if (!ep_outlet_open(r, ring, gate, role.track, began)";
    let late = "    if (role.peer == 0 && r.me == 1 + role.channel)\n        \
                for (const ep_u64 until = ep_now() + 300000000ull; ep_now() < until;) ep_nap(1000);\n";
    let delayed = [late, begins].concat().leak();
    let Some(program) = Program::new(Checks::Off, Nodes::One, Some(("ep_combine_ring.h", begins, delayed))) else {
        return;
    };
    for seed in 1..=2 {
        let mut job = job(seed, 64, [12, 12, 12]);
        (job.topk, job.channels, job.rounds[0].channels, job.allowed) = (6, 2, 2, 20_000_000_000);
        program.run(&job).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

/// What is not in the contract does not compile.
#[test]
fn a_word_of_cuda_does_not_compile() {
    let word = ("ep_dispatch_ring.h", "lane = ep_warp_lane(), source", "lane = threadIdx.x % 32, source");
    let Some(said) = program::refusal(word) else { return };
    assert!(said.contains("threadIdx"), "{said}");
}

/// A rank that does nothing: the others' waits end by their deadline, and both blame it.
#[test]
fn a_rank_that_is_not_there_is_blamed_by_all() {
    let Some(program) = Program::new(Checks::Off, Nodes::One, None) else { return };
    let mut job = job(1, 2, [5, 6, 7]);
    (job.absent, job.allowed) = (Some(2), 6_000_000_000);
    let reports = program.reports(&job).expect("the program ends");
    assert!(reports[..2].iter().all(|report| report.status != 0 && report.culprit == 2), "{reports:?}");
}
