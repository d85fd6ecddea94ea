//! NVIDIA backend.
pub mod bench;
pub mod build;
pub mod checks;
pub mod driver;
pub mod probe;

mod args;
mod cluster;
mod endpoint;
mod error;
mod kernels;
mod layouts;
mod node;
mod rank;

pub use cluster::{Builder, Cluster};
pub use endpoint::graphs;
pub use endpoint::{
    Apart, Array, Combining, CrashFlag, CudaEndpoint, DeviceWindow, Dispatching, Event, LowHandle, LowPlaces,
    LowScales, Rows, ScaleStrides,
};
pub use error::CudaError;
pub use layouts::{LayoutOf, Layouts};
