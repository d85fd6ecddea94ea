//! What the engine says beside its results, on standard error.

use std::io::{IsTerminal as _, stderr};

use tracing_subscriber::EnvFilter;

/// What nobody would be told of otherwise: that rows are staged, which device each rank uses between nodes, memory that stays. What became of an
/// operation is raised as an exception, and not said here, too.
const UNTOLD: &str = "warn,ep_core=off,ep_cuda::endpoint=off,ep_ascend=off,ep_roce::lanes=info,ep_ibgda::lanes=info";

/// Begins to write it. `RUST_LOG` says how much, as for the command.
pub(crate) fn start() {
    let filter = match std::env::var_os("RUST_LOG") {
        Some(_) => EnvFilter::from_default_env(),
        None => EnvFilter::new(UNTOLD),
    };
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(stderr().is_terminal());
    // Fails where this library has begun already.
    let _ = logs.with_writer(stderr).try_init();
}
