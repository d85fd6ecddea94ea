//! This process is one rank; rank 0 learns what all saw, and reports.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Environment, Identity, Member, Secret, Settings};
use ep_conformance::workload::Batch;
use ep_core::reference::Weighing;

use super::budget::Budget;
use super::{Job, gather};
use crate::args::name_of;
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
    let (shape, rings) = (&job.shape, job.settings.rings());
    Identity::new()
        .number("hidden", shape.hidden().into())
        .number("experts", shape.experts().into())
        .number("topk", shape.topk().into())
        .number("max tokens", shape.max_tokens().into())
        .text("--backend", name_of(job.backend))
        .text("--mode", if job.low_latency.is_some() { "low-latency" } else { "throughput" })
        .text("--results", job.low_latency.map_or("none", weighed))
        .text("--dtype", shape.element().to_string())
        .number("--seed", job.seed)
        .number("--channels", rings.channels.into())
        .number("--slots", rings.near.slots.into())
        .text("--placement", format!("{:?}", job.settings.placement()).to_lowercase())
        .text("tokens of the ranks", tokens(job.batches))
        .text("batches, of --tokens, --routing, --drop or --input, by a hash,", format!("{:016x}", digest(job.batches)))
}

fn weighed(weighing: Weighing) -> &'static str {
    match weighing {
        Weighing::AtSource => "per-choice",
        Weighing::AtExperts => "per-rank",
    }
}

/// Of the first ranks, which say most.
fn tokens(batches: &[Batch]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<String> = batches.iter().take(SHOWN).map(|batch| batch.tokens.to_string()).collect();
    shown.join(",") + if batches.len() > SHOWN { ",..." } else { "" }
}

/// Of where the tokens of all ranks go, and of the first values.
fn digest(batches: &[Batch]) -> u64 {
    // The same in all processes of one program, and another version is refused before.
    let mut hasher = DefaultHasher::new();
    for batch in batches {
        batch.topk_idx.hash(&mut hasher);
        batch.x.first_chunk::<64>().hash(&mut hasher);
    }
    hasher.finish()
}
