//! This process is one rank; rank 0 learns what all saw, and reports.

use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Environment, Identity, Member, Secret, Settings};

use super::budget::Budget;
use super::{Job, gather};
use crate::failure::Failure;
use crate::rank::Account;

/// Meets the other processes, lets this one `work`, and gives the accounts of all ranks on rank 0, none on the others.
///
/// `work` is given what it is to call after each step. Whatever it does, and bringing the accounts together after it, has the
/// same time: that of an operation, from the last thing that went well.
pub(super) fn run(
    job: &Job<'_>,
    environment: &Environment,
    step: &(dyn Fn() + Sync),
    work: impl FnOnce(&Arc<Member>, &(dyn Fn() + Sync)) -> Result<Result<Account, String>, Failure>,
) -> Result<Option<Vec<Result<Account, String>>>, Failure> {
    let within = Duration::from_nanos(job.settings.deadline().0);
    let secret = Secret::detect().map_err(Failure::bad_input)?;
    let settings = Settings::of(environment).secret(secret).identity(identity(job)).within(within);
    let member = Arc::new(Member::join(settings).map_err(Failure::failed)?);
    let budget = Budget::new(within);
    let account = work(&member, &|| {
        budget.renew();
        step();
    })?;
    let failed = account.as_ref().err().cloned();
    gather::accounts(&member, account, &budget).map_err(|failure| match failed {
        // Why this rank failed says more than that others did not say how they fared.
        Some(own) => {
            Failure { text: format!("{own}\n       nor is known what the others saw: {}", failure.text), ..failure }
        }
        None => failure,
    })
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
