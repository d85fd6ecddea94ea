//! `moexpress._native`: endpoints for Python.
//!
//! The packages beside it (`moexpress`, `deep_ep`) know tensors; this module knows addresses, sizes and streams, and
//! links to no tensor library. What lies in memory of this side comes out as DLPack capsules. Users call the
//! packages:
//!
//! ```python
//! import torch, torch.distributed as dist
//! from moexpress import Communicator
//!
//! dist.init_process_group("gloo")    # torchrun --nproc-per-node 4 first.py
//! with Communicator(experts=8, topk=2, hidden=64, device="cpu") as communicator:
//!     x, topk_idx = torch.randn(5, 64).bfloat16(), torch.tensor([[0, 5]] * 5)
//!     received = communicator.dispatch(x, topk_idx, torch.full((5, 2), 0.5))
//!     back = communicator.combine(received.x, received.handle)    # back.x [5, 64]
//! ```
//!
//! `docs/python.md` is their manual, and its first example is run by a test.
//!
//! # The parts
//!
//! | module | holds |
//! |---|---|
//! | `backend` | `backend::Backend`: the little that differs between CPUs, GPUs and NPUs, raw pointers in and tensors out |
//! | `host`, `cuda`, `npu` | its implementations |
//! | `rank` | the calls of one rank, the same text for all |
//! | `endpoint`, `results`, `handle`, `members`, `meeting` | Python's classes |
//! | `join`, `far` | names and numbers of Python, made into an endpoint, and a transport between its nodes |
//! | `rail` | where rows are between two nodes, as DeepEP's handles tell it |
//! | `turns` | one call of a rank at a time |
//! | `guard` | forks, Ctrl-C, and waiting without the interpreter's lock |
//! | `error` | errors of the engine, as Python's exceptions |
//! | `dlpack`, `room` | memory as DLPack capsules; memory whose size a caller asked for |
//! | `log` | what the engine says beside its results |
//! | `away` | memory of NPUs, which torch cannot take over |
//! | `twin` | with the feature `npu-twin`, for tests: NPUs on a CPU |
//!
//! # What holds
//!
//! - Addresses are believed: the packages check tensors before they pass them.
//! - Every wait lets other Python threads run and answers to Ctrl-C.
//! - A communicator is not used in a child that was forked.
#![cfg(target_os = "linux")]

mod arguments;
mod away;
mod backend;
mod calls;
mod cuda;
mod dlpack;
mod early;
mod endpoint;
mod error;
mod far;
mod guard;
mod handle;
mod host;
mod join;
mod log;
mod meeting;
mod members;
mod npu;
mod rail;
mod rank;
mod results;
mod room;
mod turns;
#[cfg(feature = "npu-twin")]
mod twin;

use pyo3::prelude::*;

/// The module.
#[pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::log::start();
        Ok(())
    }

    #[pymodule_export]
    use super::away::Away;
    #[pymodule_export]
    use super::early::Early;
    #[pymodule_export]
    use super::endpoint::Endpoint;
    #[pymodule_export]
    use super::handle::{Handle, LowHandle, Pending};
    #[pymodule_export]
    use super::join::{block_bytes, cuda_is_available, kernels_absent, kernels_come_from, low_latency_bytes};
    #[pymodule_export]
    use super::meeting::{Meeting, Place};
    #[pymodule_export]
    use super::members::Members;
    #[pymodule_export]
    use super::npu::{int8_row, npu_is_available};
    #[pymodule_export]
    use super::results::{Dispatched, LowDispatched};
    #[cfg(feature = "npu-twin")]
    #[pymodule_export]
    use super::twin::Twin;
}
