//! One process, with everything that it starts.

use std::fmt;
use std::io;
use std::process::{Child, ChildStderr, ChildStdout, Command};

use super::signals::{self, Signal};

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ending {
    Exited(i32),
    Killed(i32),
}

impl Ending {
    pub(super) const fn is_success(self) -> bool {
        matches!(self, Self::Exited(0))
    }

    /// The exit code that says the same.
    pub(super) fn code(self) -> u8 {
        match self {
            // Codes of other systems than Unix may not fit.
            Self::Exited(code) => u8::try_from(code).unwrap_or(crate::failure::FAILED),
            Self::Killed(signal) => signals::code(signal),
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "ended with exit code {code}"),
            Self::Killed(signal) => write!(f, "was ended by signal {signal}"),
        }
    }
}

/// A process. Until it is reaped its number stays taken, so that signals reach nobody else.
pub(super) struct Process {
    child: Child,
    ending: Option<Ending>,
    reaped: bool,
}

impl Process {
    pub(super) fn start(mut command: Command) -> io::Result<(Self, ChildStdout, ChildStderr)> {
        signals::separate(&mut command);
        let mut child = command.spawn()?;
        let pipes = child.stdout.take().zip(child.stderr.take());
        let process = Self { child, ending: None, reaped: false };
        let (stdout, stderr) = pipes.ok_or_else(|| io::Error::other("its output is not piped"))?;
        Ok((process, stdout, stderr))
    }

    /// How it ended, once it has.
    pub(super) fn ending(&mut self) -> Option<Ending> {
        if self.ending.is_none() {
            self.ending = signals::ending(&mut self.child);
        }
        self.ending
    }

    /// Passes a signal on.
    pub(super) fn signal(&mut self, signal: Signal) {
        if !self.reaped {
            signals::pass_on(&mut self.child, signal);
        }
    }

    /// Tells it, and all that it started, to end.
    pub(super) fn end(&mut self) {
        if !self.reaped {
            signals::end(&mut self.child);
        }
    }

    /// Ends it, and all that it started, without asking.
    pub(super) fn kill(&mut self) {
        if !self.reaped {
            signals::kill(&mut self.child);
        }
    }

    /// Waits until it has ended, and lets go of it.
    pub(super) fn reap(&mut self) {
        if !self.reaped {
            // A process that cannot be waited for is none of ours any more.
            let _ = self.child.wait();
            self.reaped = true;
        }
    }
}
