//! Errors as the exceptions of `moexpress.errors`.

use std::time::Duration;

use moexpress::{Error, Failure};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

/// An exception of `moexpress.errors` by name.
fn exception(py: Python<'_>, name: &str, message: &str, attributes: Option<Bound<'_, PyDict>>) -> PyErr {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let made = || -> PyResult<PyErr> {
        let module = MODULE.get_or_try_init(py, || py.import("moexpress.errors").map(Bound::unbind))?;
        let value = module.bind(py).getattr(name)?.call1((message,))?;
        for (attribute, it) in attributes.iter().flatten() {
            value.setattr(attribute.cast::<pyo3::types::PyString>()?, it)?;
        }
        Ok(PyErr::from_value(value))
    };
    made().unwrap_or_else(|error| error)
}

fn of_failure<'py>(py: Python<'py>, failure: &Failure) -> PyResult<Bound<'py, PyDict>> {
    let attributes = PyDict::new(py);
    attributes.set_item("op", failure.op)?;
    attributes.set_item("culprit", failure.culprit.0)?;
    attributes.set_item("reporter", failure.reporter.0)?;
    attributes.set_item("peer", failure.fault.peer().map(|peer| peer.0))?;
    Ok(attributes)
}

/// The exception of an error of the protocol.
pub(crate) fn of(py: Python<'_>, error: &Error) -> PyErr {
    let name = match error {
        Error::Invalid { .. } => "InvalidArgument",
        Error::Unsupported { .. } => "Unsupported",
        Error::Broken { .. } => "Broken",
        Error::Failed(_) => "OperationFailed",
        Error::Poisoned { .. } => "Poisoned",
        Error::TooManyInFlight { .. } => "TooManyInFlight",
        Error::Excluded { .. } => "Excluded",
        _ => "Error",
    };
    let attributes = match error.failure().map(|failure| of_failure(py, failure)).transpose() {
        Ok(attributes) => attributes,
        Err(error) => return error,
    };
    exception(py, name, &error.to_string(), attributes)
}

/// The exception of a meeting that failed.
pub(crate) fn of_meeting(py: Python<'_>, error: &ep_bootstrap::Error) -> PyErr {
    exception(py, "MeetingFailed", &error.to_string(), None)
}

/// The exception of a collective that failed: how to go on, where the ranks can.
pub(crate) fn of_collective(py: Python<'_>, error: &ep_bootstrap::Error) -> PyErr {
    let remedy = match error {
        ep_bootstrap::Error::Refused { .. } => "; the ranks meet again after recover, which all of them call",
        _ => "",
    };
    exception(py, "MeetingFailed", &format!("{error}{remedy}"), None)
}

/// An argument outside its limits.
pub(crate) fn invalid(py: Python<'_>, message: &str) -> PyErr {
    exception(py, "InvalidArgument", message, None)
}

/// A call on something that was closed.
pub(crate) fn closed(py: Python<'_>, what: &str) -> PyErr {
    exception(py, "Closed", &format!("the {what} was closed; make a new one"), None)
}

/// A call that came while another was under way. `None`: in this thread; else in another, for that long.
pub(crate) fn busy(py: Python<'_>, under_way: &str, waited: Option<Duration>) -> PyErr {
    let message = match waited {
        None => format!(
            "{under_way} is under way in this thread, and waits for what made this call: a signal handler or a destructor. Call when \
             {under_way} has returned (let the handler set a flag), or raise an exception to end it"
        ),
        Some(waited) => format!(
            "{under_way} has been under way in another thread for {} s, the timeout: threads take turns with a communicator, one call \
             at a time. Call when {under_way} has returned, or close the communicator to end it",
            waited.as_secs_f64()
        ),
    };
    exception(py, "Busy", &message, None)
}

/// A call in a process that was forked from the one that made the thing.
pub(crate) fn forked(py: Python<'_>) -> PyErr {
    let message = "this was made by another process, from which this one was forked: its connections and threads are not here. Make \
                   it in the process that uses it, and start processes by spawn or forkserver (multiprocessing.set_start_method)";
    exception(py, "Forked", message, None)
}
