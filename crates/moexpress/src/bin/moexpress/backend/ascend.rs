//! NPUs as a backend, every rank a device of this process, or a process of its own; or their twin on a CPU.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ep_ascend::driver::Table;
use ep_ascend::twin::{Host, Library, Machine, Session};
use ep_ascend::{Builder, Cluster, block_on};
use ep_bootstrap::Member;

use super::{Job, Ran, processes, rank};
use crate::failure::Failure;
use crate::rank::Account;

/// The file of the kernels that the vendor's compiler has built.
const KERNELS: &str = "EP_ASCEND_KERNELS";
/// What devices of the twin call themselves: 48 cores a rank.
const SOC: &str = "Ascend910B1";
/// How long processes wait at least for the one that compiles the twin.
const COMPILATION: Duration = Duration::from_secs(300);

pub(super) fn run(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Option<Ran>, Failure> {
    let accounts = match (job.launched, job.twin) {
        (None, true) => Some(on_twin(job, step)?),
        (None, false) => {
            let (table, kernels) = npus()?;
            Some(on(job, step, kernels, &table)?)
        }
        (Some(environment), true) => processes::run(job, environment, step, |member, step| apart(job, member, step))?,
        (Some(environment), false) => {
            let (table, kernels) = npus()?;
            processes::run(job, environment, step, |member, step| {
                let endpoint =
                    builder(job, kernels).join(&table, job.shape, member).map_err(|error| Failure::of_join(&error))?;
                Ok(block_on(rank(job, step, endpoint)))
            })?
        }
    };
    Ok(accounts.map(Ran::of_accounts))
}

/// What drives the NPUs of this host, and the file of their kernels.
fn npus() -> Result<(Table, PathBuf), Failure> {
    let table = Table::open().map_err(|error| Failure::bad_input(format_args!("--backend ascend: {error}")))?;
    match env::var_os(KERNELS) {
        Some(kernels) => Ok((table, PathBuf::from(kernels))),
        None => Err(Failure::bad_input(format_args!(
            "--backend ascend: {KERNELS} is not set, expected the file of the compiled kernels (docs/ascend.md)"
        ))),
    }
}

fn builder(job: &Job<'_>, kernels: PathBuf) -> Builder {
    Cluster::builder(job.topology, kernels).settings(job.settings)
}

fn on(
    job: &Job<'_>,
    step: &(dyn Fn() + Sync),
    kernels: PathBuf,
    table: &Table,
) -> Result<Vec<Result<Account, String>>, Failure> {
    let cluster = builder(job, kernels).build(table, job.shape).map_err(Failure::bad_input)?;
    Ok(cluster.run(async |endpoint| rank(job, step, endpoint).await))
}

/// The whole device of each rank, with the kernels as they ship.
fn on_twin(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Vec<Result<Account, String>>, Failure> {
    let library = Library::build(&ep_ascend::headers(), &ep_ascend::sources(), &[]).map_err(Failure::bad_input)?;
    let session = twin(job, &library, job.seed)?;
    let ran = on(job, step, library.path(), &session.table());
    match session.fault() {
        Some(fault) => Err(Failure::failed(format_args!("the twin: {fault}"))),
        None => ran,
    }
}

/// A twin with the devices of all ranks.
fn twin(job: &Job<'_>, library: &Library, seed: u64) -> Result<Session, Failure> {
    let (ranks, group) = (job.topology.ranks(), job.topology.ranks_per_node());
    let machine = Machine::new(library, seed, ranks, group).map_err(Failure::bad_input)?;
    Host::install(machine, SOC).map_err(Failure::bad_input)
}

/// The rank of this process, on a twin of its own, which shares windows with those of the others.
fn apart(job: &Job<'_>, member: &Arc<Member>, step: &(dyn Fn() + Sync)) -> Result<Result<Account, String>, Failure> {
    let library = Library::build_for_all(&ep_ascend::headers(), &ep_ascend::sources(), &[], member, COMPILATION);
    let library = library.map_err(Failure::bad_input)?;
    let me = member.rank();
    let session = twin(job, &library, job.seed.wrapping_add(u64::from(me.0) << 32))?;
    session.share();
    // Its machine has the devices of all ranks, those of other servers, too.
    let builder = builder(job, library.path()).devices(vec![me.0]);
    let account = match builder.join(&session.table(), job.shape, member) {
        Ok(endpoint) => Ok(block_on(rank(job, step, endpoint))),
        Err(error) => Err(Failure::bad_input(error)),
    };
    match session.fault() {
        Some(fault) => Ok(Err(format!("the twin: {fault}"))),
        None => account,
    }
}
