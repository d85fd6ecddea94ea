//! Systems without signals: processes are killed, and the console tells all of them about Ctrl-C. They outlive this command
//! where that is killed: only Unix has groups that another process can end.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::process::{Child, Command};
use std::thread;
use std::time::Duration;

use super::process::{Ending, Shared};

/// There are none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Signal(Infallible);

impl Signal {
    pub(super) fn code(self) -> u8 {
        match self.0 {}
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {}
    }
}

pub(super) fn code(_: i32) -> u8 {
    crate::failure::FAILED
}

pub(super) struct Signals;

impl Signals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self)
    }

    pub(super) fn pending(&mut self) -> Vec<Signal> {
        Vec::new()
    }
}

pub(super) fn name(_: i32) -> Option<&'static str> {
    None
}

/// Waits until a process has ended, and says how.
pub(super) fn ending(child: &Shared) -> Ending {
    loop {
        let failed = i32::from(crate::failure::FAILED);
        match child.child().try_wait() {
            Ok(None) => {}
            Ok(Some(status)) => return Ending::Exited(status.code().unwrap_or(failed)),
            Err(_) => return Ending::Exited(failed),
        }
        // It must be possible to kill it meanwhile.
        thread::sleep(Duration::from_millis(1));
    }
}

/// Where a process is started: among all others.
pub(super) struct Home;

impl Home {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self)
    }

    pub(super) fn admit(&self, _: &mut Command) {}

    pub(super) fn pass_on(&self, _: &mut Child, signal: Signal) {
        match signal.0 {}
    }

    pub(super) fn end(&self, child: &mut Child) {
        self.kill(child);
    }

    pub(super) fn kill(&self, child: &mut Child) {
        // It may have ended already.
        let _ = child.kill();
    }

    pub(super) fn reap(&mut self) {}
}
