//! The command line: `moexpress run` moves a batch to its experts and back and checks every bit of it; `moexpress plan`
//! says how much memory a layout takes; `moexpress tune` proposes settings by runs in virtual time; `moexpress compare` holds
//! such runs against published figures; `moexpress bench` measures a backend; `moexpress doctor` says what this machine has; `moexpress launch` starts the processes of a job on this machine.
//!
//! Exit codes: 0 verified, 1 failed or not verified, 2 bad arguments or input. Those of `launch` are its processes'.

#[cfg(not(unix))]
compile_error!("the command needs Unix, the library does not: build it without the feature cli");

mod args;
mod backend;
mod bench;
mod compare;
mod deepep;
mod doctor;
mod dump;
mod failure;
mod input;
mod launch;
mod layer;
mod manual;
mod memory;
mod page;
mod plan;
mod rank;
mod report;
mod run;
mod show;
mod traces;
mod traffic;
mod tune;
mod whole;

use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

use args::{Cli, Command};
use failure::Failure;

fn main() -> ExitCode {
    let cli = Cli::parse();
    // RUST_LOG=info shows every operation of every rank, once it has ended. Without, which device each rank uses
    // between nodes, and why, and that rows are staged. What became of an operation is not said here, too: the command itself says it.
    let filter = match std::env::var_os("RUST_LOG") {
        Some(_) => EnvFilter::from_default_env(),
        None => EnvFilter::new("error,ep_core=off,ep_cuda=off,ep_cuda::far=warn,ep_ascend=off,ep_roce::lanes=info"),
    };
    let logs = tracing_subscriber::fmt().with_env_filter(filter);
    logs.with_span_events(FmtSpan::CLOSE).with_writer(io::stderr).init();
    // Without it such a file ends this program, as it ends others.
    let _ = launch::survive_large_files();
    let outcome = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Plan(args) => plan::plan(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Tune(args) => tune::tune(&args),
        Command::Compare(args) => compare::compare(&args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Completions { shell } => Ok(manual::completions(shell)),
        Command::Man => manual::page(),
        Command::Launch(args) => launch::launch(&args),
        Command::Guard(args) => launch::guard(&args),
    };
    match outcome {
        Ok(text) => print(&text, ExitCode::SUCCESS),
        Err(Failure { text, report, code }) => {
            let code = print(&report, ExitCode::from(code));
            show::complain(&format!("error: {text}"));
            code
        }
    }
}

/// Prints a result; a reader that closed the pipe has seen enough.
fn print(text: &str, code: ExitCode) -> ExitCode {
    // A stream that another thread waits for is not asked for nothing.
    if text.is_empty() {
        return code;
    }
    match io::stdout().write_all(text.as_bytes()).and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            show::complain(&format!("error: cannot write the result: {error}"));
            ExitCode::from(failure::FAILED)
        }
        _ => code,
    }
}
