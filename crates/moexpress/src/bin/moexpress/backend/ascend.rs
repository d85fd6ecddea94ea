//! NPUs as a backend, every rank a device of this process; or their twin on a CPU.

use std::env;
use std::path::PathBuf;

use ep_ascend::Cluster;
use ep_ascend::driver::Table;
use ep_ascend::twin::{Host, Library, Machine};

use super::{Job, Ran, rank};
use crate::failure::Failure;

/// The file of the kernels that the vendor's compiler has built.
const KERNELS: &str = "EP_ASCEND_KERNELS";

pub(super) fn run(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Ran, Failure> {
    if job.twin { on_twin(job, step) } else { on_npus(job, step) }
}

fn on_npus(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Ran, Failure> {
    let table = Table::open().map_err(|error| Failure::bad_input(format_args!("--backend ascend: {error}")))?;
    let Some(kernels) = env::var_os(KERNELS) else {
        return Err(Failure::bad_input(format_args!(
            "--backend ascend: {KERNELS} is not set, expected the file of the compiled kernels (docs/ascend.md)"
        )));
    };
    on(job, step, PathBuf::from(kernels), &table)
}

/// The whole device, 48 cores a rank, with the kernels as they ship.
fn on_twin(job: &Job<'_>, step: &(dyn Fn() + Sync)) -> Result<Ran, Failure> {
    let ranks = job.topology.ranks();
    let library = Library::build(&ep_ascend::headers(), &ep_ascend::sources(), &[]).map_err(Failure::bad_input)?;
    let machine = Machine::new(&library, job.seed, ranks, job.topology.ranks_per_node()).map_err(Failure::bad_input)?;
    let session = Host::install(machine, "Ascend910B1").map_err(Failure::bad_input)?;
    let ran = on(job, step, library.path(), &session.table());
    match session.fault() {
        Some(fault) => Err(Failure::failed(format_args!("the twin: {fault}"))),
        None => ran,
    }
}

fn on(job: &Job<'_>, step: &(dyn Fn() + Sync), kernels: PathBuf, table: &Table) -> Result<Ran, Failure> {
    let builder = Cluster::builder(job.topology, kernels).settings(job.settings);
    let cluster = builder.build(table, job.shape).map_err(Failure::bad_input)?;
    Ok(Ran::of_accounts(cluster.run(async |endpoint| rank(job, step, endpoint).await)))
}
