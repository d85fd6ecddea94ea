//! GPUs as a backend: every rank a thread of this process, or a process of its own.

use ep_bootstrap::Member;
use ep_core::Error;
use ep_core::layout::Queues;
use ep_cuda::{Builder, Cluster};
use futures_executor::block_on;

use super::{Job, Ran, processes, rank};
use crate::args::{Far, FarArgs};
use crate::failure::Failure;

pub(super) fn run(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Option<Ran>, Failure> {
    let accounts = match job.launched {
        None => {
            let cluster = builder(job, None)?.build(job.shape).map_err(Failure::bad_input)?;
            let user = async |ep| rank(job, step, ep).await;
            Some(cluster.run(user).map_err(Failure::failed)?)
        }
        Some(environment) => processes::run(job, environment, step, |member, step| {
            let endpoint =
                builder(job, Some(member))?.join(job.shape, member).map_err(|error| Failure::of_join(&error))?;
            Ok(block_on(rank(job, step, endpoint)))
        })?,
    };
    Ok(accounts.map(Ran::of_accounts))
}

/// `member`: this process's place among the others, where each rank has one.
fn builder(job: &Job<'_>, member: Option<&Member>) -> Result<Builder, Failure> {
    let builder = Cluster::builder(job.topology).settings(job.settings).wait_for_kernels(true);
    let Some(args) = job.far else { return Ok(builder) };
    let network = Between { args, far_lanes: job.asked_far_lanes, ranks: job.topology.ranks() };
    network.over(builder, member).map_err(Failure::bad_input)
}

/// What lies between nodes of so many ranks in all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Between<'a> {
    pub(crate) args: &'a FarArgs,
    pub(crate) far_lanes: Option<Queues>,
    pub(crate) ranks: u32,
}

impl Between<'_> {
    /// With the network that the arguments name, between threads, or the processes of `member`.
    #[cfg_attr(
        not(all(any(feature = "host", feature = "ibgda"), target_os = "linux")),
        expect(unused_variables, reason = "no transport asks who is a process")
    )]
    pub(crate) fn over(self, builder: Builder, member: Option<&Member>) -> Result<Builder, Error> {
        let Self { args, far_lanes, ranks } = self;
        match args.far {
            None => Ok(builder),
            #[cfg(all(feature = "ibgda", target_os = "linux"))]
            Some(Far::Ibgda) => super::posted::over(builder, args, far_lanes, (ranks, member)),
            #[cfg(all(feature = "roce", target_os = "linux"))]
            Some(Far::Roce) => {
                let network = super::far::roce(args, far_lanes)?;
                Ok(if args.far_staged { builder.far_staged(network) } else { builder.far(network) })
            }
            #[cfg(all(feature = "host", target_os = "linux"))]
            Some(Far::Loop) => {
                let network = super::far::looped(args, far_lanes, member.is_some())?;
                let builder = builder.far_movers(args.far_movers.unwrap_or(0));
                Ok(if args.far_staged { builder.far_staged(network) } else { builder.far(network) })
            }
            #[cfg(not(all(feature = "ibgda", feature = "roce", feature = "host", target_os = "linux")))]
            Some(far) => {
                let name = crate::args::name_of(far);
                let feature = if matches!(far, Far::Loop) { "host" } else { &name };
                let needed = format_args!("a program that was built with the feature {feature}");
                Err(Error::unsupported(format_args!("--far {name} with {ranks} ranks"), needed))
            }
        }
    }
}
