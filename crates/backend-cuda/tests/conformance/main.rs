//! The shared suite on GPUs: ranks are threads of this process, then processes.
//!
//! Ranks of one GPU must run at the same time: set `CUDA_DEVICE_MAX_CONNECTIONS=32`, and `--test-threads=1`. Processes that share a GPU
//! take turns on it.

#[path = "../common/apart.rs"]
mod apart;
#[path = "../common/mod.rs"]
mod common;

use apart::{Apart, Between};
use common::Cuda;

ep_conformance::suite!(Cuda::new(), processes: Apart::over(Between::Loop));
