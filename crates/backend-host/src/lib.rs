//! CPU backend.
#![cfg(target_os = "linux")]
mod cluster;
mod handoff;
mod machine;
mod memory;
mod node;
mod pace;
mod peers;
mod port;
mod roll;
mod seat;
mod window;

pub use cluster::{Builder, Cluster};
pub use machine::{Machine, Window};
pub use pace::block_on;
pub use port::Port;
