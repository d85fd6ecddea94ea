//! The shared suite's cases of several nodes on GPUs that play adapters for one another: kernels post to mlx5 queues themselves, and no adapter is
//! there. Ranks are threads of this process, then processes.
//!
//! Ranks of one GPU must run at the same time: set `CUDA_DEVICE_MAX_CONNECTIONS=32`, and `--test-threads=1`. Processes that share a GPU take turns on it.

#[path = "../common/apart.rs"]
mod apart;
#[path = "../common/broken.rs"]
mod broken;
#[path = "../common/mod.rs"]
#[allow(dead_code)] // Ranks of one node are another program's.
mod common;
#[path = "../common/played.rs"]
mod played;
#[path = "../common/posted.rs"]
mod posted;
#[path = "../common/striped.rs"]
mod striped;

use std::process::ExitCode;

use apart::{Apart, Between};
use ep_conformance::Requirement;
use ep_conformance::harness::Suite;
use ep_cuda::hca::Pace;
use posted::{Cards, Posted};

fn main() -> ExitCode {
    let absent = common::absent();
    let cards = Cards::Played(Pace::default());
    let suite = Suite::default().on_those("played", Requirement::Nodes, Posted { absent, cards, incidents: true });
    let suite = suite.with(broken::trials("played", cards, absent));
    let suite = suite.with(vec![striped::trial("played", cards, absent)]);
    let processes = Apart::over(Between::Adapters((Pace::default(), played::apart)));
    suite.run_with_processes_on_those(processes, Requirement::Nodes)
}
