//! One process, with everything that it starts.

use std::fmt;
use std::io;
use std::process::{Child, ChildStderr, ChildStdout, Command};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::signals::{self, Home, Signal};

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

    /// Whether a signal ended it.
    pub(super) const fn is_killed(self) -> bool {
        matches!(self, Self::Killed(_))
    }

    /// The exit code that says the same.
    pub(super) fn code(self) -> u8 {
        match self {
            // Where none is known it may be any number.
            Self::Exited(code) => u8::try_from(code).unwrap_or(crate::failure::FAILED),
            Self::Killed(signal) => signals::code(signal),
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "exit code {code}"),
            Self::Killed(number) => match signals::name(*number) {
                Some(name) => write!(f, "signal {number} ({name})"),
                None => write!(f, "signal {number}"),
            },
        }
    }
}

/// A process that several threads look at.
#[derive(Clone)]
pub(super) struct Shared(Arc<Mutex<Child>>);

impl Shared {
    pub(super) fn child(&self) -> MutexGuard<'_, Child> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A process. Until it is reaped its number stays taken, so that signals reach nobody else.
pub(super) struct Process {
    child: Shared,
    home: Home,
    reaped: bool,
}

impl Process {
    pub(super) fn start(mut command: Command, home: Home) -> io::Result<(Self, ChildStdout, ChildStderr)> {
        home.admit(&mut command);
        let mut child = command.spawn()?;
        let pipes = child.stdout.take().zip(child.stderr.take());
        let process = Self { child: Shared(Arc::new(Mutex::new(child))), home, reaped: false };
        let (stdout, stderr) = pipes.ok_or_else(|| io::Error::other("its output is not piped"))?;
        Ok((process, stdout, stderr))
    }

    /// Calls `ended` once it has ended, on a thread that waits for nothing else: so the order of calls is that of the ends.
    pub(super) fn watch(&self, ended: impl FnOnce(Ending) + Send + 'static) -> io::Result<()> {
        let child = self.child.clone();
        let thread = thread::Builder::new().name("end of a process".to_owned());
        thread.spawn(move || ended(signals::ending(&child))).map(drop)
    }

    /// Passes a signal on.
    pub(super) fn signal(&self, signal: Signal) {
        if !self.reaped {
            self.home.pass_on(signal);
        }
    }

    /// Tells it, and all that it started, to end.
    pub(super) fn end(&self) {
        if !self.reaped {
            self.home.end();
        }
    }

    /// Ends it, and all that it started, without asking.
    pub(super) fn kill(&self) {
        if !self.reaped {
            self.home.kill();
        }
    }

    /// Waits until it has ended, and lets go of it.
    pub(super) fn reap(&mut self) {
        if !self.reaped {
            // A process that cannot be waited for is none of ours any more.
            let _ = self.child.child().wait();
            self.home.reap();
            self.reaped = true;
        }
    }
}
