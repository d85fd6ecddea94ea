//! `moexpress._native`: endpoints for Python.
//!
//! The packages beside it (`moexpress`, `deep_ep`) know tensors; this module knows addresses, sizes and streams, and links to no
//! tensor library. What lies in memory of this side comes out as DLPack capsules.
//!
//! | module | holds |
//! |---|---|
//! | `backend` | `backend::Backend`: the little that differs between CPUs and GPUs, raw pointers in and tensors out |
//! | `host`, `cuda` | its two implementations |
//! | `rank` | the calls of one rank, the same text for both |
//! | `endpoint`, `results`, `handle`, `layout`, `meeting` | Python's classes |
//! | `join` | names and numbers of Python, made into an endpoint |
//! | `guard` | forks, Ctrl-C, and waiting without the interpreter's lock |
#![cfg(target_os = "linux")]

mod backend;
mod cuda;
mod dlpack;
mod endpoint;
mod error;
mod guard;
mod handle;
mod host;
mod join;
mod layout;
mod meeting;
mod rank;
mod results;
mod room;

use pyo3::prelude::*;

/// The module.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::endpoint::Endpoint;
    #[pymodule_export]
    use super::handle::{Handle, LowHandle, Pending};
    #[pymodule_export]
    use super::join::{cuda_is_available, low_latency_bytes};
    #[pymodule_export]
    use super::layout::Layouts;
    #[pymodule_export]
    use super::meeting::{Meeting, Place};
    #[pymodule_export]
    use super::results::{Dispatched, LowDispatched};
}
