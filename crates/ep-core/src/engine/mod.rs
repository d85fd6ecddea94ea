//! Throughput-mode dispatch and combine, composed of plan and roles.

pub mod endpoint;
pub mod handle;
pub mod stats;
