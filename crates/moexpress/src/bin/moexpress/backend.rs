//! Runs all ranks of a job on a backend.

use ep_conformance::workload::Batch;
use ep_core::reference::World;
use ep_core::trace::Record;
use ep_core::{Settings, Topology};

use crate::args::Backend;
use crate::failure::Failure;
use crate::rank::Account;

mod sim;

/// What is to be run.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    pub(crate) world: &'a World,
    pub(crate) topology: Topology,
    pub(crate) settings: Settings,
    pub(crate) seed: u64,
    /// Whether to record every verb.
    pub(crate) record: bool,
    /// `[ranks]`
    pub(crate) batches: &'a [Batch],
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Ran {
    /// `[ranks]`: what each saw, or why it failed.
    pub(crate) accounts: Vec<Result<Account, String>>,
    /// Things that the backend let happen, for backends that count them.
    pub(crate) events: u64,
    /// Every verb, if recorded.
    pub(crate) records: Vec<Record>,
}

/// Runs `job`; `step` is called [`crate::rank::STEPS`] times a rank.
///
/// Fails as bad input where the backend refuses the job before anything moved, and as failed where it found a rule of
/// the protocol broken.
pub(crate) fn run(backend: Backend, job: &Job<'_>, step: &dyn Fn()) -> Result<Ran, Failure> {
    match backend {
        Backend::Sim => sim::run(job, step),
    }
}
