//! GPUs as a backend: every rank a thread of this process, or a process of its own.

#[cfg(all(feature = "host", target_os = "linux"))]
use ep_core::Error;
use ep_cuda::{Builder, Cluster};
use futures_executor::block_on;

use super::{Job, Ran, processes, rank};
#[cfg(all(feature = "host", target_os = "linux"))]
use crate::args::{Far, FarArgs};
use crate::failure::Failure;

pub(super) fn run(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Option<Ran>, Failure> {
    let accounts = match job.launched {
        None => {
            let cluster = builder(job)?.build(job.shape).map_err(Failure::bad_input)?;
            let user = async |ep| rank(job, step, ep).await;
            Some(cluster.run(user).map_err(Failure::failed)?)
        }
        Some(environment) => processes::run(job, environment, step, |member, step| {
            let endpoint = builder(job)?.join(job.shape, member).map_err(Failure::bad_input)?;
            Ok(block_on(rank(job, step, endpoint)))
        })?,
    };
    Ok(accounts.map(Ran::of_accounts))
}

fn builder(job: &Job<'_>) -> Result<Builder, Failure> {
    let builder = Cluster::builder(job.topology).settings(job.settings).wait_for_kernels(true);
    match job.far {
        None => Ok(builder),
        #[cfg(all(feature = "host", target_os = "linux"))]
        Some(args) => over(job, args, builder).map_err(Failure::bad_input),
        #[cfg(not(all(feature = "host", target_os = "linux")))]
        Some(_) => Err(Failure::bad_input("--far: this program was built without the feature host")),
    }
}

/// With the network that the arguments name.
#[cfg(all(feature = "host", target_os = "linux"))]
fn over(job: &Job<'_>, args: &FarArgs, builder: Builder) -> Result<Builder, Error> {
    match args.far {
        None => Ok(builder),
        Some(Far::Loop) => {
            let network = super::far::looped(args, job.asked_far_lanes)?;
            Ok(builder.far(if job.launched.is_some() { network.between_processes() } else { network }))
        }
        #[cfg(feature = "roce")]
        Some(Far::Roce) => Ok(builder.far(super::far::roce(args, job.asked_far_lanes)?)),
        #[cfg(not(feature = "roce"))]
        Some(Far::Roce) => Err(Error::unsupported("--far roce", "a program that was built with the feature roce")),
    }
}
