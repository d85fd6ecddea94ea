//! Memory of an NPU that leaves for Python. torch has no sound way to take it over: a tensor that DLPack makes has a storage of torch's own kind,
//! and torch_npu's operators take every storage of an NPU for one of theirs. So Python asks torch for memory, and what lies here is copied there.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use moexpress::Error;
use moexpress::ascend::driver::Stream;
use pyo3::prelude::*;

use crate::dlpack::{Element, Tensor};
use crate::error::{invalid, of};
use crate::guard::Own;
use crate::npu;

/// Whose memory it is, and what copies it.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) stream: Arc<Stream>,
    /// How long a copy may take, with what it comes behind.
    pub(crate) within: Duration,
}

impl Home {
    /// Copies in the order of the endpoint's stream, behind what `behind` holds now. Returns when it is copied.
    ///
    /// # Safety
    /// So many bytes of the NPU's memory lie at both. `behind` is a stream of the NPU, and lives.
    unsafe fn copy(&self, to: u64, from: u64, bytes: usize, behind: u64) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        let followed = unsafe { self.stream.follow(behind) }?;
        // SAFETY: as the caller promises.
        let enqueued = unsafe { self.stream.copy(to, from, bytes) }.and_then(|()| self.stream.record());
        let ended = enqueued.map_err(Error::from).and_then(|end| {
            let until = Instant::now() + self.within;
            while !end.has_come()? {
                if Instant::now() > until {
                    let remedy = "look what your stream waits for; a larger timeout of the communicator";
                    return Err(Error::broken(
                        "copying results",
                        format_args!("not done in {:?}", self.within),
                        remedy,
                    ));
                }
                std::thread::yield_now();
            }
            Ok(())
        });
        if ended.is_err() {
            // The stream may still wait for it.
            std::mem::forget(followed);
        }
        ended
    }
}

/// Memory of an NPU with a shape.
#[pyclass(frozen, module = "moexpress._native")]
pub(crate) struct Away {
    tensor: Own<Mutex<Option<Tensor>>>,
    home: Arc<Home>,
    /// Sizes.
    #[pyo3(get)]
    shape: Vec<i64>,
    /// The name of its elements' type in torch.
    #[pyo3(get)]
    dtype: &'static str,
}

impl Away {
    pub(crate) fn new(tensor: Tensor, home: Arc<Home>) -> Self {
        let dtype = match tensor.element {
            Element::U8 | Element::E4m3 => "uint8",
            Element::I8 => "int8",
            Element::I32 => "int32",
            Element::I64 => "int64",
            Element::F32 => "float32",
            Element::Bf16 => "bfloat16",
        };
        let shape = tensor.shape.clone();
        Self { tensor: Own::new(Mutex::new(Some(tensor))), home, shape, dtype }
    }
}

#[pymethods]
impl Away {
    /// Copies all of it to a tensor of these sizes, behind what `stream` holds. Returns when it is copied; other threads run meanwhile.
    fn copy_to(&self, py: Python<'_>, address: usize, stream: usize) -> PyResult<()> {
        let place = self.tensor.get(py)?;
        let bytes = |tensor: &Tensor| tensor.shape.iter().product::<i64>() as usize * tensor.element.bytes();
        let copied = py.detach(|| {
            let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(tensor) = place.as_ref() else { return Ok(false) };
            let (from, bytes) = (tensor.address as u64, bytes(tensor));
            if bytes == 0 {
                return Ok(true);
            }
            // SAFETY: this package's Python names a tensor of these sizes that it has just made, and its current stream.
            let copied =
                npu::place(address, bytes).and_then(|to| unsafe { self.home.copy(to, from, bytes, stream as u64) });
            if copied.is_err() {
                // A copy may be under way.
                std::mem::forget(place.take());
            }
            copied.map(|()| true)
        });
        match copied {
            Ok(true) => Ok(()),
            Ok(false) => Err(invalid(py, "memory of the NPU was lost in a copy that failed, allowed: none before")),
            Err(error) => Err(of(py, &error)),
        }
    }
}
