//! The kernels' very sources on the twin: what they move is held bit for bit against the oracle, how they fail against what the protocol says,
//! and faults that are planted in them are caught.

mod blame;
mod by_expert;
#[path = "../common/mod.rs"]
mod common;
mod failures;
mod hosted;
mod job;
mod left;
mod low;
mod low_far;
mod planted;
mod quantize;
mod servers;

use std::sync::OnceLock;

use ep_ascend::Roles;
use ep_ascend::twin::Library;
use ep_conformance::workload::RoutingKind;
use ep_core::Rings;
use ep_core::ring::Geometry;

use job::{Job, Misuse, Round};

/// Compiled once for all tests, with planted faults.
fn library() -> &'static Library {
    static BUILT: OnceLock<Library> = OnceLock::new();
    let build = || Library::build(&ep_ascend::headers(), &ep_ascend::sources(), &["EP_TEST"]);
    BUILT.get_or_init(|| build().unwrap_or_else(|error| panic!("{error}")))
}

const FEW: Roles = Roles { senders: 2, coordinators: 1, forwarders: 0, forwarder_coordinators: 0, receivers: 2 };

/// A job of one round of so many tokens a rank.
fn job(seed: u64, ranks: u32, geometry: Geometry, tokens: u32) -> Job {
    let round = Round {
        tokens: vec![tokens; ranks as usize],
        routing: RoutingKind::Uniform,
        drop: 0.0,
        bias: 0,
        rings: Rings::uniform(1, geometry),
    };
    Job {
        seed,
        nodes: 1,
        ranks,
        local_experts: 2,
        topk: 2,
        hidden: 72,
        channels: 1,
        geometry,
        roles: FEW,
        rounds: vec![round],
        allowed: 2_000_000_000,
        polls: false,
        plant: 0,
        absent: None,
        misuse: Misuse::None,
    }
}

/// Slots, and rows after which a tail and credit are due.
const fn rings(slots: u32, chunk: u32, credit: u32) -> Geometry {
    Geometry { slots, chunk, credit }
}

/// Runs a job that must go well.
fn passes(name: &str, job: &Job) -> u64 {
    let outcome = job.run(library()).unwrap_or_else(|wrong| panic!("{name}, seed {}: {wrong}\n{job:?}", job.seed));
    let compared = outcome.compared.unwrap_or_else(|| panic!("{name}, seed {}: {:?}", job.seed, outcome.reports));
    let tokens: u32 = job.rounds.iter().flat_map(|round| &round.tokens).sum();
    assert!(compared.rows >= tokens.into(), "{name}: {compared:?}");
    outcome.history
}

/// Shapes, rings and batches of every kind: what there is none of, one of, or many of.
fn jobs(seed: u64) -> Vec<(&'static str, Job)> {
    let of = |geometry, tokens: &[u32], change: &dyn Fn(&mut Job)| {
        let mut job = job(seed, tokens.len() as u32, geometry, 0);
        job.rounds[0].tokens = tokens.to_vec();
        change(&mut job);
        job
    };
    let channels = |job: &mut Job, channels: u32| {
        job.channels = channels;
        job.rounds[0].rings = Rings::uniform(channels, job.geometry);
    };
    let one_expert = |job: &mut Job| job.rounds[0].routing = RoutingKind::Single;
    vec![
        ("rings of one slot", of(rings(1, 1, 1), &[11, 5, 8], &|_| {})),
        ("steps of the whole ring", of(rings(4, 4, 4), &[19, 0, 14], &|_| {})),
        ("one rank", of(rings(2, 1, 1), &[9], &|_| {})),
        ("one token in all", of(rings(2, 1, 1), &[0, 1, 0], &|_| {})),
        ("no token at all", of(rings(3, 1, 1), &[0, 0], &|_| {})),
        ("top-1", of(rings(4, 2, 1), &[12, 12], &|job| job.topk = 1)),
        (
            "as many choices as a token may have",
            of(rings(2, 1, 1), &[3, 4], &|job| (job.local_experts, job.topk) = (16, 32)),
        ),
        ("all tokens to one expert", of(rings(2, 2, 2), &[9, 9, 9], &one_expert)),
        ("dropped choices", of(rings(2, 1, 2), &[16, 3, 9], &|job| job.rounds[0].drop = 0.6)),
        ("everything dropped", of(rings(2, 1, 1), &[4, 4], &|job| job.rounds[0].drop = 1.0)),
        ("a bias", of(rings(3, 2, 1), &[5, 6, 7], &|job| (job.rounds[0].bias, job.topk) = (1, 4))),
        (
            "two rows of bias, one element",
            of(rings(2, 1, 1), &[5, 6, 7], &|job| (job.rounds[0].bias, job.hidden) = (2, 1)),
        ),
        ("rows of several pieces", of(rings(2, 2, 1), &[2, 3], &|job| job.hidden = 16_456)),
        ("more channels than cores", of(rings(3, 2, 3), &[20, 7], &|job| channels(job, 5))),
        ("eight ranks", of(rings(2, 1, 1), &[4; 8], &|job| channels(job, 2))),
    ]
}

#[test]
fn rings_move_every_bit() {
    for seed in 1..=3 {
        for (name, job) in jobs(seed) {
            passes(name, &job);
        }
    }
}

/// Without the means of tests, as an NPU gets them.
#[test]
fn kernels_as_they_ship_move_every_bit() {
    let shipped = Library::build(&ep_ascend::headers(), &ep_ascend::sources(), &[]);
    let shipped = shipped.unwrap_or_else(|error| panic!("{error}"));
    for (name, mut job) in jobs(9) {
        job.plant = 1;
        let outcome = job.run(&shipped).unwrap_or_else(|wrong| panic!("{name}: {wrong}"));
        assert!(outcome.compared.is_some(), "{name}: {:?}", outcome.reports);
    }
}

/// The cores of both SoCs, as the roles divide them: a channel for each sender.
#[test]
fn all_cores_of_both_socs_play_their_roles() {
    for (seed, cores) in [(1, 48), (2, 40)] {
        let mut job = job(seed, 2, rings(2, 1, 2), 60);
        job.roles = Roles::of_cores(cores).expect("a SoC's cores");
        job.channels = job.roles.senders;
        job.rounds[0].rings = Rings::uniform(job.channels, job.geometry);
        passes("all cores", &job);
    }
}

/// Rings of 2 slots, and up to 400 rows for each of them.
#[test]
fn a_batch_of_any_size_goes_through() {
    let mut job = job(5, 2, rings(2, 1, 1), 400);
    job.hidden = 16;
    passes("a large batch", &job);
}

/// Counts of rings run on from call to call, and calls cut the rings as they like.
#[test]
fn calls_follow_each_other_with_other_rings() {
    for seed in 1..=4 {
        let mut job = job(seed, 3, rings(6, 1, 1), 12);
        job.channels = 2;
        let cuts = [(1, rings(12, 5, 7)), (2, rings(3, 3, 1)), (1, rings(1, 1, 1)), (2, rings(6, 2, 4))];
        let first = job.rounds[0].clone();
        job.rounds = (0..)
            .zip(cuts)
            .map(|(drop, (channels, geometry))| Round {
                rings: Rings::uniform(channels, geometry),
                drop: f64::from(drop) / 10.0,
                ..first.clone()
            })
            .collect();
        passes("calls", &job);
    }
}

/// Sizes that nobody chose. `EP_CASES` says how many, `EP_SEED` from which seed on.
#[test]
fn drawn_jobs_move_every_bit() {
    let number = |name, default| std::env::var(name).map_or(default, |text| text.parse().expect(name));
    let (first, cases): (u64, u64) = (number("EP_SEED", 100), number("EP_CASES", 40));
    for seed in first..first + cases {
        let mut state = seed;
        let mut below = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % limit) as u32
        };
        let (slots, ranks) = (1 + below(6), 1 + below(4));
        let geometry = rings(slots, 1 + below(u64::from(slots)), 1 + below(u64::from(slots)));
        let mut job = job(seed, ranks, geometry, 0);
        job.rounds[0].tokens = (0..ranks).map(|_| below(24)).collect();
        job.local_experts = 1 + below(4);
        job.topk = 1 + below(u64::from(job.local_experts * ranks));
        job.hidden = 1 + below(300);
        job.channels = 1 + below(4);
        job.rounds[0].rings = Rings::uniform(job.channels, geometry);
        job.rounds[0].bias = below(3) as usize;
        job.rounds[0].drop = f64::from(below(3)) / 4.0;
        (job.roles.senders, job.roles.receivers, job.roles.forwarders) = (1 + below(3), 1 + below(3), below(2));
        passes("a drawn job", &job);
    }
}

#[test]
fn a_seed_replays_exactly() {
    let history = |seed| passes("a job", &job(seed, 3, rings(2, 1, 1), 8));
    assert_eq!(history(7), history(7));
    assert_ne!(history(7), history(8));
}
