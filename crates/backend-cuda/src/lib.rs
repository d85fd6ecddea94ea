//! NVIDIA backend.
pub mod build;
pub mod driver;
mod args;
mod error;
mod kernels;
mod rank;
pub mod bench;
pub use error::CudaError;
