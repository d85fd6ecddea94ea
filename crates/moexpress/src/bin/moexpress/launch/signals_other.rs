//! Systems without signals: processes are killed, and the console tells all of them about Ctrl-C.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::process::{Child, Command};

use super::process::Ending;

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

pub(super) fn separate(_: &mut Command) {}

pub(super) fn ending(child: &mut Child) -> Option<Ending> {
    let status = child.try_wait().ok().flatten()?;
    Some(Ending::Exited(status.code().unwrap_or(i32::from(crate::failure::FAILED))))
}

pub(super) fn pass_on(_: &mut Child, signal: Signal) {
    match signal.0 {}
}

pub(super) fn end(child: &mut Child) {
    kill(child);
}

pub(super) fn kill(child: &mut Child) {
    // It may have ended already.
    let _ = child.kill();
}
