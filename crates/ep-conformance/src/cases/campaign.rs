//! The random campaign.

use std::fmt::Write as _;

use proptest::test_runner::{Config, FileFailurePersistence, RngAlgorithm, TestRng, TestRunner};

use crate::backend::{Backend, Requirement};
use crate::harness::{Case, env_number};
use crate::scenario::scenarios;

/// Nodes and ranks of the largest communicator drawn; one node where the backend has no more.
const LARGEST: (u32, u32) = (8, 16);

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    vec![Case { name: "campaign_random_scenarios_match_the_oracle", needs: &[], body: campaign::<B> }]
}

fn campaign<B: Backend>(backend: &B) -> Result<(), String> {
    let cases = env_number("EP_CASES").unwrap_or_else(|| backend.campaign());
    let seed = env_number("EP_SEED").unwrap_or(1);
    let config = Config {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct("proptest-regressions/campaign.txt"))),
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let nodes = if backend.lacks(Requirement::Nodes).is_some() { 1 } else { LARGEST.0 };
    let result = runner.run(&scenarios(nodes, LARGEST.1), |scenario| {
        scenario.check(backend).map_err(proptest::test_runner::TestCaseError::fail)?;
        Ok(())
    });
    result.map_err(|error| {
        let mut message = format!("{error}\nagain: EP_SEED={seed} EP_CASES={cases}");
        let _ = write!(message, ", this case: campaign_random_scenarios_match_the_oracle");
        message
    })
}
