//! A process that outlives this command by a moment: when nothing is left of the command, it ends what the command started.
//!
//! It is this program once more, in a group of its own, and reads the groups of the job's processes from a pipe. The
//! system closes the pipe when the command ends, however that comes about.

use std::io::{self, BufRead, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::signals;
use crate::args::GuardArgs;
use crate::failure::Failure;

/// How often the guard looks whether all have ended.
const PERIOD: Duration = Duration::from_millis(20);

/// What the guard reads when nothing is left to be guarded.
const DONE: &str = "done";

/// The command's end of the pipe.
pub(super) struct Guard {
    process: Child,
    pipe: ChildStdin,
}

impl Guard {
    /// Starts it. The processes that it ends have `grace`, as those that the command itself ends.
    pub(super) fn start(grace: Duration) -> io::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["guard", "--grace", &format!("{}ns", grace.as_nanos())]);
        // Who reads this command's output is not to wait for the guard.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        signals::separate(&mut command);
        let mut process = command.spawn()?;
        let pipe = process.stdin.take().ok_or_else(|| io::Error::other("its input is not piped"))?;
        Ok(Self { process, pipe })
    }

    /// Guards the process with this number, the first of its group.
    pub(super) fn watch(&mut self, process: u32) -> io::Result<()> {
        writeln!(self.pipe, "{process}")
    }

    /// All have been killed and none has been let go of: from then on their numbers may be another's.
    pub(super) fn dismiss(&mut self) {
        // A guard that is gone guards nothing.
        let _ = writeln!(self.pipe, "{DONE}");
        let _ = self.process.wait();
    }
}

/// `moexpress guard`: the other end.
pub(crate) fn guard(args: &GuardArgs) -> Result<String, Failure> {
    let mut groups = Vec::new();
    for line in io::stdin().lock().lines() {
        let line = line.map_err(Failure::failed)?;
        if line == DONE {
            return Ok(String::new());
        }
        let group = line.parse().ok().and_then(signals::Group::new);
        groups.push(group.ok_or_else(|| {
            Failure::bad_input(format_args!("the number of a process is '{line}', allowed: a positive number"))
        })?);
    }
    groups.iter().for_each(signals::Group::end);
    let end = Instant::now() + args.grace;
    while groups.iter().any(signals::Group::is_there) {
        if Instant::now() >= end {
            groups.iter().for_each(signals::Group::kill);
            break;
        }
        thread::sleep(PERIOD);
    }
    Ok(String::new())
}
