//! CPU ranks as a backend: every rank a thread of this process, or a process of its own.

use ep_core::transport::{AnyTransport, NoTransport};
use ep_host::{Cluster, block_on};

use super::{Job, Ran, processes, rank};
use crate::args::Far;
use crate::failure::Failure;

/// The network between nodes. Ranks over any have one type: an engine takes long to compile.
fn network(job: &Job<'_>) -> Result<AnyTransport, Failure> {
    let Some(args) = job.far else { return Ok(AnyTransport::new(NoTransport)) };
    for (option, given) in [("--far-staged", args.far_staged), ("--far-movers", args.far_movers.is_some())] {
        if given {
            let why = format_args!("{option}: windows of --backend host lie in memory of the host");
            return Err(Failure::bad_input(why));
        }
    }
    match args.far {
        None => Ok(AnyTransport::new(NoTransport)),
        Some(Far::Ibgda) => Err(Failure::bad_input("--far ibgda: kernels post, so it needs --backend cuda")),
        Some(Far::Loop) => {
            let transport =
                super::far::looped(args, job.asked_far_lanes, job.launched.is_some()).map_err(Failure::bad_input)?;
            Ok(AnyTransport::new(transport))
        }
        #[cfg(feature = "roce")]
        Some(Far::Roce) => {
            let transport = super::far::roce(args, job.asked_far_lanes).map_err(Failure::bad_input)?;
            Ok(AnyTransport::new(transport))
        }
        #[cfg(not(feature = "roce"))]
        Some(Far::Roce) => Err(Failure::bad_input("--far roce: this program was built without the feature roce")),
    }
}

pub(super) fn run(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Option<Ran>, Failure> {
    let builder = Cluster::builder(job.topology).settings(job.settings).far(network(job)?);
    let accounts = match job.launched {
        None => {
            let cluster = builder.build(job.shape).map_err(Failure::bad_input)?;
            let user = async |ep| rank(job, step, ep).await;
            Some(cluster.run(user).map_err(Failure::failed)?)
        }
        Some(environment) => processes::run(job, environment, step, |member, step| {
            let endpoint = builder.join(job.shape, member).map_err(|error| Failure::of_join(&error))?;
            Ok(block_on(rank(job, step, endpoint)))
        })?,
    };
    Ok(accounts.map(Ran::of_accounts))
}
