//! NPUs on a CPU, for tests: the twin of this process, tensors over its memory, and a stream of a user's.
//!
//! Kernels see the twin's memory at addresses that are nobody's on the host. A tensor has the same memory at another address, where the host has
//! it: [`place`] finds the one for the other.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use moexpress::Error;
use moexpress::ascend::driver::{Device as Npu, Memory, Stream};
use moexpress::ascend::twin::{Host, Library, Machine, Session};
use moexpress::ascend::{Roles, headers, sources};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::dlpack::{Device, Element, Tensor};
use crate::error::of;
use crate::npu::Driver;

/// What devices of the twin call themselves.
const SOC: &str = "Ascend910B1";

/// The twin of this process.
struct Started {
    kernels: PathBuf,
    roles: Roles,
    npu: Arc<Npu>,
    users: Stream,
}

static STARTED: Mutex<Option<Started>> = Mutex::new(None);
/// Of the twin's memory that tensors lie in: by the host's address how much it is, and where kernels see it.
static LENT: Mutex<BTreeMap<usize, (usize, u64)>> = Mutex::new(BTreeMap::new());

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What drives the twin, if it was started.
pub(crate) fn driver() -> Option<Driver> {
    let (session, started) = (Host::of_process()?, lock(&STARTED));
    let started = started.as_ref()?;
    Some(Driver { table: session.table(), kernels: started.kernels.clone(), roles: Some(started.roles) })
}

/// Where bytes of a tensor lie on the twin; none without a twin.
pub(crate) fn place(address: usize, bytes: usize) -> Option<Result<u64, Error>> {
    Host::of_process()?;
    let lent = lock(&LENT);
    let found = lent.range(..=address).next_back();
    let found = found.filter(|(first, (len, _))| address - *first + bytes <= *len);
    Some(match found {
        Some((first, (_, at))) => Ok(at + (address - first) as u64),
        None => Err(Error::invalid("memory of a tensor", "the host's", "the NPU's")),
    })
}

/// Memory of the twin that a tensor lies in.
struct Lent {
    /// Given back behind the entry.
    _memory: Memory,
    first: usize,
}

impl Drop for Lent {
    fn drop(&mut self) {
        lock(&LENT).remove(&self.first);
    }
}

/// The twin of this process.
#[pyclass(frozen, module = "moexpress._native")]
pub(crate) struct Twin;

fn failed(error: impl ToString) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

fn session() -> PyResult<Session> {
    Host::of_process().ok_or_else(|| failed("the twin was not started"))
}

/// Does something with what was started.
fn with<T>(py: Python<'_>, what: impl FnOnce(&Started) -> Result<T, Error>) -> PyResult<T> {
    let started = lock(&STARTED);
    what(started.as_ref().ok_or_else(|| failed("the twin was not started"))?).map_err(|error| of(py, &error))
}

#[pymethods]
impl Twin {
    /// Compiles the kernels with the twin, by the C++ compiler of this machine; the file, whose folder is the caller's to remove.
    #[staticmethod]
    fn build(py: Python<'_>) -> PyResult<PathBuf> {
        py.detach(|| {
            let library = Library::build(&headers(), &sources(), &[]).map_err(failed)?;
            let path = library.path();
            // Dropped, it would remove the file.
            std::mem::forget(library);
            Ok(path)
        })
    }

    /// Starts it with devices of all ranks, those of a node in a server, of which this process is one.
    #[staticmethod]
    fn start(library: PathBuf, rank: u32, ranks: u32, ranks_per_node: u32) -> PyResult<()> {
        // SAFETY: whoever starts it has built it with this module.
        let library = unsafe { Library::open(&library) }.map_err(failed)?;
        let machine = Machine::new(&library, u64::from(rank), ranks, ranks_per_node).map_err(failed)?;
        let session = Host::install_for_process(machine, SOC).map_err(failed)?;
        session.share();
        let npu = Npu::open(&session.table(), rank).map_err(failed)?;
        let users = Stream::new(&npu).map_err(failed)?;
        let far = u32::from(ranks > ranks_per_node);
        // Few cores, so that a call takes milliseconds; of servers, queues and forwarders, too.
        let roles =
            Roles { senders: 2, coordinators: 1 + far, forwarders: far, forwarder_coordinators: 0, receivers: 2 };
        *lock(&STARTED) = Some(Started { kernels: library.path(), roles, npu, users });
        Ok(())
    }

    /// The first rule that a kernel or a call broke; None where there was none.
    #[staticmethod]
    fn fault() -> PyResult<Option<String>> {
        Ok(session()?.fault())
    }

    /// What was made and not given back: blocks of memory, streams, events.
    #[staticmethod]
    fn left() -> PyResult<[usize; 3]> {
        Ok(session()?.left())
    }

    /// Bytes of the device's memory, as a tensor of a CPU.
    #[staticmethod]
    fn empty(py: Python<'_>, bytes: usize) -> PyResult<Bound<'_, PyAny>> {
        let memory = with(py, |started| Ok(Memory::new(&started.npu, bytes)?))?;
        let found = session()?.lies_at(memory.address(), bytes as u64);
        let address = found.ok_or_else(|| failed("the twin's memory is nobody's"))? as usize;
        lock(&LENT).insert(address, (bytes.max(1), memory.address()));
        Tensor {
            address,
            shape: vec![bytes as i64],
            strides: None,
            element: Element::U8,
            device: Device::Cpu,
            owner: Box::new(Lent { _memory: memory, first: address }),
        }
        .into_capsule(py)
    }

    /// A stream of the user's.
    #[staticmethod]
    fn stream(py: Python<'_>) -> PyResult<u64> {
        with(py, |started| Ok(started.users.lend()))
    }

    /// Enqueues a copy between tensors to the user's stream. It is late.
    #[staticmethod]
    fn copy(py: Python<'_>, to: usize, source: usize, bytes: usize) -> PyResult<()> {
        with(py, |started| {
            let nowhere = || Error::invalid("twin", "none", "one that was started");
            let at = |address| place(address, bytes).unwrap_or_else(|| Err(nowhere()));
            // SAFETY: the twin refuses what is no memory of the device.
            Ok(unsafe { started.users.copy(at(to)?, at(source)?, bytes) }?)
        })
    }

    /// Waits for the user's stream.
    #[staticmethod]
    fn synchronize(py: Python<'_>) -> PyResult<()> {
        with(py, |started| {
            let end = started.users.record()?;
            while !end.has_come()? {}
            Ok(())
        })
    }
}
