//! Signals, and process groups to send them to: a process and all that it started.

use std::fmt;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::process::{Pid, WaitId, WaitIdOptions, kill_process_group, waitid};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::process::Ending;

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
    pub(super) fn new() -> io::Result<Self> {
        signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).map(Self)
    }

    /// Those that came since the last call.
    pub(super) fn pending(&mut self) -> Vec<Signal> {
        self.0.pending().map(Signal).collect()
    }
}

/// Makes the process the first of a group of its own: signals of a terminal then reach it once, through this command.
pub(super) fn separate(command: &mut Command) {
    command.process_group(0);
}

/// How a process ended, without letting go of it.
pub(super) fn ending(child: &mut Child) -> Option<Ending> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let status = waitid(WaitId::Pid(Pid::from_child(child)), options).ok().flatten()?;
    let killed = status.terminating_signal().map(Ending::Killed);
    killed.or_else(|| status.exit_status().map(Ending::Exited))
}

pub(super) fn pass_on(child: &mut Child, signal: Signal) {
    if let Some(signal) = rustix::process::Signal::from_named_raw(signal.0) {
        send(child, signal);
    }
}

pub(super) fn end(child: &mut Child) {
    send(child, rustix::process::Signal::TERM);
}

pub(super) fn kill(child: &mut Child) {
    send(child, rustix::process::Signal::KILL);
}

fn send(child: &Child, signal: rustix::process::Signal) {
    // It may have ended already.
    let _ = kill_process_group(Pid::from_child(child), signal);
}
