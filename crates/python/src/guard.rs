//! What Python does to a process: forks it, interrupts it, and has a lock that no wait may hold.

use std::mem::ManuallyDrop;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rustix::process::{Pid, getpid};

use crate::error::forked;

/// Time between two looks for signals.
pub(crate) const LOOK: Duration = Duration::from_millis(20);

/// Something that belongs to the process that made it: sockets, threads and shared memory do not survive a fork. In a child it is
/// neither used nor dropped.
#[derive(Debug)]
pub(crate) struct Own<T> {
    value: ManuallyDrop<T>,
    process: Pid,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: ManuallyDrop::new(value), process: getpid() }
    }

    /// It, or what to tell a child.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&T> {
        self.here().ok_or_else(|| forked(py))
    }

    /// It, where this is the process that made it.
    pub(crate) fn here(&self) -> Option<&T> {
        (getpid() == self.process).then_some(&self.value)
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if getpid() == self.process {
            // SAFETY: the value is dropped here and nowhere else, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// Looks for signals while a call waits. Python delivers them to the main thread only, so others do not look.
#[derive(Debug)]
pub(crate) struct Patience {
    looked: Instant,
    is_main: bool,
    caught: Option<PyErr>,
}

impl Patience {
    pub(crate) fn new() -> Self {
        // On Linux a process has the number of its main thread.
        let is_main = rustix::thread::gettid() == getpid();
        Self { looked: Instant::now(), is_main, caught: None }
    }

    /// Whether to wait on. Takes the interpreter's lock every so often.
    pub(crate) fn go_on(&mut self) -> bool {
        if !self.is_main || self.looked.elapsed() < LOOK {
            return true;
        }
        self.caught = Python::attach(|py| py.check_signals()).err();
        self.looked = Instant::now();
        self.caught.is_none()
    }

    /// What a signal handler raised.
    pub(crate) fn into_error(self) -> PyErr {
        self.caught.unwrap_or_else(|| PyRuntimeError::new_err("the call was stopped"))
    }

    /// Whether a signal handler raised something.
    pub(crate) const fn has_caught(&self) -> bool {
        self.caught.is_some()
    }
}

/// Runs `work`, which blocks, on a thread of its own, without the interpreter's lock. Ctrl-C ends the wait; the work then goes on
/// to its end, which its deadline brings, and its result is dropped.
pub(crate) fn aside<T: Send + 'static>(py: Python<'_>, work: impl FnOnce() -> T + Send + 'static) -> PyResult<T> {
    let mut patience = Patience::new();
    py.detach(|| {
        let (sender, receiver) = channel();
        thread::spawn(move || {
            // Who was interrupted does not listen any more.
            let _ = sender.send(work());
        });
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Timeout) if patience.go_on() => {}
                Err(RecvTimeoutError::Timeout) => return Err(patience.into_error()),
                Err(RecvTimeoutError::Disconnected) => return Err(PyRuntimeError::new_err("a thread panicked")),
            }
        }
    })
}
