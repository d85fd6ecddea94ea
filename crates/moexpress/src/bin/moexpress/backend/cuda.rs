//! GPUs as a backend: every rank a thread of this process, or a process of its own.

use ep_cuda::{Builder, Cluster};
use futures_executor::block_on;

use super::{Job, Ran, processes, rank};
use crate::args::Far;
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
    match job.far.filter(|args| args.far.is_some()) {
        None => Ok(builder),
        #[cfg(all(feature = "ibgda", target_os = "linux"))]
        Some(args) if args.far == Some(Far::Ibgda) => {
            super::posted::over(builder, args, job.asked_far_lanes).map_err(Failure::bad_input)
        }
        #[cfg(not(all(feature = "ibgda", target_os = "linux")))]
        Some(args) if args.far == Some(Far::Ibgda) => {
            Err(Failure::bad_input("--far ibgda: this program was built without the feature ibgda"))
        }
        #[cfg(all(feature = "host", target_os = "linux"))]
        Some(args) => {
            let network = super::far::looped(args, job.asked_far_lanes).map_err(Failure::bad_input)?;
            Ok(builder.far(network))
        }
        #[cfg(not(all(feature = "host", target_os = "linux")))]
        Some(_) => Err(Failure::bad_input("--far loop: this program was built without the feature host")),
    }
}
