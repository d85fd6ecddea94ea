//! Early consumers' counters, as Python has them, and readiness of results in Python's memory.

use std::any::Any;

use moexpress::{Error, Layout};
use pyo3::prelude::*;

use crate::dlpack::Tensor;
use crate::results::Taken;

/// What a machine gives for counters: its own value, and tensors that lie in it.
pub(crate) struct EarlyOut {
    pub(crate) early: Box<dyn Any + Send + Sync>,
    pub(crate) epoch: Tensor,
    pub(crate) stopped: Tensor,
    pub(crate) arrived: Tensor,
    pub(crate) expected: Tensor,
    pub(crate) ready: Tensor,
}

/// When results are ready that a combine reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawReady {
    /// Words of 32 bits; none: the counters of the dispatch.
    pub(crate) signals: Option<(usize, usize)>,
    /// Rows of a block; 0: an expert's all.
    pub(crate) rows: u32,
    pub(crate) due: u32,
    pub(crate) multiprocessors: Option<u32>,
}

/// `((address, words) or None, rows, due, multiprocessors or None)`.
impl<'py> FromPyObject<'_, 'py> for RawReady {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (signals, rows, due, multiprocessors) = given.extract()?;
        Ok(Self { signals, rows, due, multiprocessors })
    }
}

/// That machines other than GPUs of one node have none.
pub(crate) fn unsupported() -> Error {
    Error::unsupported("early consumers", "GPUs of one node")
}

/// Counters of one communicator.
#[pyclass(frozen, module = "moexpress._native")]
pub(crate) struct Early {
    pub(crate) inner: Box<dyn Any + Send + Sync>,
    /// That made it.
    pub(crate) endpoint: u64,
    epoch: Taken,
    stopped: Taken,
    arrived: Taken,
    expected: Taken,
    ready: Taken,
}

impl Early {
    pub(crate) fn new(out: EarlyOut, endpoint: u64) -> Self {
        let EarlyOut { early, epoch, stopped, arrived, expected, ready } = out;
        let [epoch, stopped, arrived, expected, ready] = [epoch, stopped, arrived, expected, ready].map(Taken::new);
        Self { inner: early, endpoint, epoch, stopped, arrived, expected, ready }
    }
}

/// Tensors, each to be taken once.
#[pymethods]
impl Early {
    fn epoch<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.epoch.take(py)
    }

    fn stopped<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.stopped.take(py)
    }

    fn arrived<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.arrived.take(py)
    }

    fn expected<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.expected.take(py)
    }

    fn ready<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.ready.take(py)
    }
}

/// `[local experts, blocks]` of a layout's experts.
pub(crate) fn shape(layout: &Layout, blocks: u32) -> Vec<i64> {
    vec![layout.local_experts().into(), blocks.into()]
}
