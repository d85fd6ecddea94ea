//! Signals, and process groups to send them to: a process and all that it started.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions, kill_process_group, test_kill_process_group, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};

use super::process::{Ending, Shared};

/// A signal that this command got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Signal(i32);

impl Signal {
    /// The exit code of what it ended.
    pub(super) fn code(self) -> u8 {
        code(self.0)
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            SIGINT => f.write_str("SIGINT"),
            SIGTERM => f.write_str("SIGTERM"),
            SIGHUP => f.write_str("SIGHUP"),
            other => write!(f, "signal {other}"),
        }
    }
}

/// The exit code of what a signal ended, as shells have it.
pub(super) fn code(signal: i32) -> u8 {
    u8::try_from(signal.saturating_add(128)).unwrap_or(crate::failure::FAILED)
}

/// Signals that this command gets, instead of being ended by them.
pub(super) struct Signals(signal_hook::iterator::Signals);

impl Signals {
    /// All that whoever started this command does not have ignored: `nohup` does, and shells for commands behind `&`.
    pub(super) fn new() -> io::Result<Self> {
        let heard = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| !is_ignored(signal));
        signal_hook::iterator::Signals::new(heard).map(Self)
    }

    /// Those that came since the last call.
    pub(super) fn pending(&mut self) -> Vec<Signal> {
        self.0.pending().map(Signal).collect()
    }
}

/// Whether this process ignores a signal, as far as the system says.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // A bit for each, the lowest for signal 1.
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Lets a write beyond the limit of a file's size fail as any other does: by itself the system ends whoever writes.
pub(crate) fn survive_large_files() -> io::Result<()> {
    // Processes that this one starts get the signal as before: caught, it is not passed on to them, and what was ignored stays so.
    if is_ignored(SIGXFSZ) {
        return Ok(());
    }
    signal_hook::flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Makes the process the first of a group of its own: signals of a terminal then reach it once, through this command.
pub(super) fn separate(command: &mut Command) {
    command.process_group(0);
}

/// Whether anybody may yet write to a pipe, whatever lies in it unread.
pub(super) fn has_writer(pipe: &impl AsFd) -> bool {
    let mut polled = [PollFd::new(pipe, PollFlags::empty())];
    // Where the system does not say, nobody is kept waiting.
    poll(&mut polled, Some(&Timespec::default())).is_err() || !polled[0].revents().contains(PollFlags::HUP)
}

/// What the system's headers call a signal.
pub(super) fn name(signal: i32) -> Option<&'static str> {
    signal_hook::low_level::signal_name(signal)
}

/// Waits until a process has ended, and says how, without letting go of it.
pub(super) fn ending(child: &Shared) -> Ending {
    let id = WaitId::Pid(Pid::from_child(&child.child()));
    let status = loop {
        match waitid(id.clone(), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT) {
            Err(Errno::INTR) => {}
            other => break other.ok().flatten(),
        }
    };
    let killed = status.as_ref().and_then(|status| status.terminating_signal()).map(Ending::Killed);
    let exited = || status.as_ref().and_then(|status| status.exit_status()).map(Ending::Exited);
    // One that cannot be waited for is none of ours any more.
    killed.or_else(exited).unwrap_or(Ending::Exited(crate::failure::FAILED.into()))
}

/// The group that a process is started in, which is there before the process: the guard knows it by then. A process could
/// make a group of its own only as it starts, and would be nobody's if this command were killed in that moment.
pub(super) struct Home {
    /// This program once more, which ends at once. Its number, which is the group's, stays taken until it is reaped.
    first: Child,
    group: Group,
}

impl Home {
    pub(super) fn new() -> io::Result<Self> {
        // A guard that is told nothing has nothing to guard.
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["guard", "--grace", "0s"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        separate(&mut command);
        let first = command.spawn()?;
        let group = Group(Pid::from_child(&first));
        Ok(Self { first, group })
    }

    /// The system's number of the group.
    pub(super) fn id(&self) -> u32 {
        self.first.id()
    }

    /// Has the command's process start in the group: it is in it before its program runs.
    pub(super) fn admit(&self, command: &mut Command) {
        command.process_group(self.group.0.as_raw_pid());
    }

    pub(super) fn pass_on(&self, signal: Signal) {
        if let Some(signal) = rustix::process::Signal::from_named_raw(signal.0) {
            self.group.tell(signal);
        }
    }

    pub(super) fn end(&self) {
        self.group.end();
    }

    pub(super) fn kill(&self) {
        self.group.kill();
    }

    /// Lets go of the group's number, once nothing of it is left.
    pub(super) fn reap(&mut self) {
        // What cannot be waited for is none of ours any more.
        let _ = self.first.wait();
    }
}

/// A process and all that it started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group(Pid);

impl Group {
    /// That of the process with this number.
    pub(super) fn new(process: i32) -> Option<Self> {
        (process > 0).then(|| Pid::from_raw(process)).flatten().map(Self)
    }

    /// Tells all of it to end.
    pub(super) fn end(&self) {
        self.tell(rustix::process::Signal::TERM);
    }

    /// Ends all of it without asking.
    pub(super) fn kill(&self) {
        self.send(rustix::process::Signal::KILL);
    }

    /// Whether any of it still runs, or has not been let go of.
    pub(super) fn is_there(&self) -> bool {
        test_kill_process_group(self.0).is_ok()
    }

    /// Sends a signal, and lets go on what was stopped: nobody hears a signal before.
    fn tell(self, signal: rustix::process::Signal) {
        self.send(signal);
        self.send(rustix::process::Signal::CONT);
    }

    fn send(self, signal: rustix::process::Signal) {
        // It may have ended already.
        let _ = kill_process_group(self.0, signal);
    }
}
