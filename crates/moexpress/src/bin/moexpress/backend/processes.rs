//! This process is one rank; rank 0 learns what all saw, and reports.

use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Environment, Identity, Member, Secret, Settings};
use ep_core::Rank;

use super::{Job, gather};
use crate::failure::Failure;
use crate::rank::Account;

/// Meets the other processes, lets this one `work`, and gives the accounts of all ranks on rank 0, none on the others.
pub(super) fn run(
    job: &Job<'_>,
    environment: &Environment,
    work: impl FnOnce(&Arc<Member>) -> Result<Result<Account, String>, Failure>,
) -> Result<Option<Vec<Result<Account, String>>>, Failure> {
    let within = Duration::from_nanos(job.settings.deadline().0);
    let secret = Secret::detect().map_err(Failure::bad_input)?;
    let settings = Settings::of(environment).secret(secret).identity(identity(job)).within(within);
    let member = Arc::new(Member::join(settings).map_err(Failure::failed)?);
    let account = work(&member)?;
    let accounts = gather::accounts(&member, account, within)?;
    Ok((member.rank() == Rank(0)).then_some(accounts))
}

/// What must be the same for all, or they would do different jobs.
fn identity(job: &Job<'_>) -> Identity {
    let shape = &job.shape;
    Identity::new()
        .number("hidden", shape.hidden().into())
        .number("experts", shape.experts().into())
        .number("topk", shape.topk().into())
        .number("max tokens", shape.max_tokens().into())
        .text("element", format!("{:?}", shape.element()))
        .number("seed", job.seed)
        .text("results", format!("{:?}", job.low_latency))
}
