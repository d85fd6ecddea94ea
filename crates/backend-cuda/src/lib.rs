//! NVIDIA backend.
pub mod build;
pub mod driver;
mod args;
mod error;
pub use error::CudaError;
