//! The random campaign.

use std::fmt::Write as _;

use ep_core::{Element, Placement};
use proptest::strategy::Strategy;
use proptest::test_runner::{
    Config, FailurePersistence, FileFailurePersistence, RngAlgorithm, TestCaseError, TestRng, TestRunner,
};

use super::by_expert;
use crate::backend::{Backend, Requirement};
use crate::harness::{Case, env_number};
use crate::low_latency::{by_source, packed, scenario as low_latency};
use crate::scenario::{Scenario, scenarios};

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    vec![
        Case { name: THROUGHPUT, needs: &[], body: throughput::<B> },
        Case { name: BY_EXPERT, needs: &[Requirement::ByExpert], body: sorted::<B> },
        Case { name: LOW_LATENCY, needs: &[Requirement::LowLatency], body: low::<B> },
        Case {
            name: LOW_BY_SOURCE,
            needs: &[Requirement::LowLatency, Requirement::LowOrders],
            body: low_by_source::<B>,
        },
        Case { name: LOW_PACKED, needs: &[Requirement::LowLatency, Requirement::LowOrders], body: low_packed::<B> },
    ]
}

const THROUGHPUT: &str = "campaign_random_scenarios_match_the_oracle";
const BY_EXPERT: &str = "campaign_random_dispatches_by_expert_match_the_oracle";
const LOW_LATENCY: &str = "campaign_random_low_latency_scenarios_match_the_oracle";
const LOW_BY_SOURCE: &str = "campaign_random_low_latency_by_source_matches_the_oracle";
const LOW_PACKED: &str = "campaign_random_low_latency_packed_matches_the_oracle";

/// Nodes, and ranks of each, of the largest communicator drawn; one node where the backend has no more.
fn largest<B: Backend>(backend: &B) -> (u32, u32) {
    let (nodes, ranks) = backend.largest();
    if backend.lacks(Requirement::Nodes).is_some() { (1, ranks) } else { (nodes, ranks) }
}

fn haunted<B: Backend>(backend: &B) -> bool {
    backend.lacks(Requirement::Suspensions).is_none()
}

/// The element, or bf16 where the backend does not have it.
const fn known(element: Element, int8: bool) -> Element {
    match element {
        Element::Int8 if !int8 => Element::Bf16,
        _ => element,
    }
}

/// Scenarios of throughput mode that the backend has what it takes for.
fn possible<B: Backend>(backend: &B, haunted: bool) -> impl Strategy<Value = Scenario> + use<B> {
    let (nodes, ranks) = largest(backend);
    let pulls = backend.lacks(Requirement::Get).is_none();
    let int8 = backend.lacks(Requirement::Int8).is_none();
    scenarios(nodes, ranks, haunted).prop_map(move |mut scenario| {
        if scenario.placement == Placement::Pulled && !pulls {
            scenario.placement = Placement::Ring;
        }
        scenario.outboxes = scenario.outboxes.filter(|_| pulls);
        scenario.element = known(scenario.element, int8);
        scenario
    })
}

/// A fourth of the others' number: it has four rounds of each.
fn sorted<B: Backend>(backend: &B) -> Result<(), String> {
    let alignment = proptest::sample::select(&[1u32, 3, 8, 128][..]);
    // Room for all that can come makes a scenario's rows of fourteen ranks a hundred megabytes: cases of three ranks have it.
    let spare = proptest::option::of(proptest::sample::select(&[0u32, 1, 20, 300][..]));
    let asked =
        (alignment, spare).prop_map(|(alignment, spare)| by_expert::Asked { alignment, spare, remainder: false });
    let file = "proptest-regressions/campaign_by_expert.txt";
    let (file, share) = (backend.persists().then_some(file), backend.campaign().div_ceil(4));
    campaign(BY_EXPERT, file, share, (possible(backend, haunted(backend)), asked), |(scenario, asked)| {
        by_expert::check_in(backend, &scenario, asked, None)
    })
}

fn throughput<B: Backend>(backend: &B) -> Result<(), String> {
    let strategy = possible(backend, haunted(backend));
    let file = "proptest-regressions/campaign.txt";
    campaign(THROUGHPUT, backend.persists().then_some(file), backend.campaign(), strategy, |scenario| {
        scenario.check(backend).map(drop)
    })
}

/// Scenarios of low latency that the backend has what it takes for.
fn possible_low<B: Backend>(backend: &B, haunted: bool) -> impl Strategy<Value = low_latency::Scenario> {
    let (nodes, ranks) = largest(backend);
    let nodes = if backend.lacks(Requirement::FarLowLatency).is_some() { 1 } else { nodes };
    let int8 = backend.lacks(Requirement::Int8).is_none();
    low_latency::scenarios(nodes, ranks, haunted).prop_map(move |mut scenario| {
        scenario.element = known(scenario.element, int8);
        if matches!(scenario.element, Element::Fp8(_)) && !backend.makes_fp8() {
            scenario.element = Element::Bf16;
        }
        scenario
    })
}

/// A fourth of the others' number.
fn low_by_source<B: Backend>(backend: &B) -> Result<(), String> {
    let file = "proptest-regressions/campaign_low_by_source.txt";
    let (file, share) = (backend.persists().then_some(file), backend.campaign().div_ceil(4));
    campaign(LOW_BY_SOURCE, file, share, possible_low(backend, haunted(backend)), |scenario| {
        let setup = scenario.setup().map_err(|error| error.to_string())?;
        by_source::check(&scenario, backend, &setup).map(drop)
    })
}

/// A fourth of the others' number.
fn low_packed<B: Backend>(backend: &B) -> Result<(), String> {
    let file = "proptest-regressions/campaign_low_packed.txt";
    let (file, share) = (backend.persists().then_some(file), backend.campaign().div_ceil(4));
    let alignment = proptest::sample::select(&[1, 3, 8, 128][..]);
    campaign(LOW_PACKED, file, share, (possible_low(backend, haunted(backend)), alignment), |(scenario, alignment)| {
        let setup = scenario.setup().map_err(|error| error.to_string())?;
        packed::check(&scenario, backend, &setup, alignment).map(drop)
    })
}

fn low<B: Backend>(backend: &B) -> Result<(), String> {
    let strategy = possible_low(backend, haunted(backend));
    let file = "proptest-regressions/campaign_low_latency.txt";
    campaign(LOW_LATENCY, backend.persists().then_some(file), backend.campaign(), strategy, |scenario| {
        scenario.check(backend).map(drop)
    })
}

fn campaign<S: Strategy>(
    name: &str,
    file: Option<&'static str>,
    share: u32,
    strategy: S,
    check: impl Fn(S::Value) -> Result<(), String>,
) -> Result<(), String> {
    let cases = env_number("EP_CASES").unwrap_or(share);
    let seed = env_number("EP_SEED").unwrap_or(1);
    let config = Config {
        cases,
        failure_persistence: file
            .map(|file| Box::new(FileFailurePersistence::Direct(file)) as Box<dyn FailurePersistence>),
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let result = runner.run(&strategy, |scenario| check(scenario).map_err(TestCaseError::fail));
    result.map_err(|error| {
        let mut message = format!("{error}\nagain: EP_SEED={seed} EP_CASES={cases}");
        let _ = write!(message, ", this case: {name}");
        message
    })
}
