//! The command line as a user meets it: exit codes, messages, JSON, dumps.

use std::process::{Command, Output};

#[cfg(feature = "ascend")]
mod ascend;
mod compare;
mod cuda;
mod doctor;
mod dump;
#[cfg(target_os = "linux")]
mod host;
mod input;
mod launch;
mod links;
mod low_latency;
mod memory;
mod page;
mod plan;
mod readme;
mod run;
mod timed;
mod tune;

/// What `moexpress` did with `arguments`, which are separated by blanks.
fn moexpress(arguments: &str) -> Done {
    moexpress_with(arguments, &[])
}

/// With more arguments, which may hold blanks.
fn moexpress_with(arguments: &str, more: &[&str]) -> Done {
    run(command(arguments).args(more))
}

/// With variables of the environment.
fn moexpress_with_env(arguments: &str, variables: &[(&str, &str)]) -> Done {
    run(command(arguments).envs(variables.iter().copied()))
}

fn command(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moexpress"));
    command.args(arguments.split_whitespace());
    // No GPU is visible, whether this machine has one or not.
    command.env_remove("RUST_LOG").env("CUDA_VISIBLE_DEVICES", "");
    command
}

fn run(command: &mut Command) -> Done {
    Done(command.output().expect("the binary runs"))
}

struct Done(Output);

impl Done {
    /// Its standard output, which must have come with exit code 0.
    fn success(&self) -> String {
        assert_eq!(self.0.status.code(), Some(0), "stderr: {}", self.stderr());
        String::from_utf8(self.0.stdout.clone()).expect("text")
    }

    /// Its JSON object, which must have come with exit code 0.
    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.success()).expect("one JSON object")
    }

    /// Its complaint, which must have come with exit code 2 and nothing on standard output.
    fn refusal(&self) -> String {
        assert_eq!(self.0.status.code(), Some(2), "stderr: {}", self.stderr());
        assert!(self.0.stdout.is_empty(), "a refusal prints nothing on stdout");
        self.stderr()
    }

    /// Its complaint, which must have come with exit code 1.
    fn failure(&self) -> String {
        assert_eq!(self.0.status.code(), Some(1), "stderr: {}", self.stderr());
        self.stderr()
    }

    fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.0.stderr).into_owned()
    }
}
