//! The tables of roles on the device.

use std::sync::Arc;

use ep_core::device::{ring_roles, ring_roles_of};
use ep_core::layout::Kind;
use ep_core::{Layout, Rank};
use zerocopy::IntoBytes;

use crate::driver::{DeviceMemory, Stream};
use crate::error::CudaError;

/// Which role each warp of the kernels of rings has, for dispatches and combines.
#[derive(Debug)]
pub(super) struct Roles {
    dispatch: DeviceMemory,
    combine: DeviceMemory,
    layout: Layout,
}

impl Roles {
    /// Those of rank `me`. Waits.
    pub(super) fn new(stream: &Arc<Stream>, layout: &Layout, me: Rank) -> Result<Self, CudaError> {
        let table = |kind| {
            let rows = ring_roles(layout, me, kind);
            let memory = DeviceMemory::zeroed(stream, size_of_val(&rows[..]))?;
            memory.write(stream, 0, rows.as_bytes())?;
            Ok::<_, CudaError>(memory)
        };
        Ok(Self { dispatch: table(Kind::Dispatch)?, combine: table(Kind::Combine)?, layout: layout.clone() })
    }

    /// Where the table for operations of a kind lies, and how many rows a call with so many channels takes.
    pub(super) fn of(&self, kind: Kind, channels: u32) -> (u64, u32) {
        let table = if kind == Kind::Combine { &self.combine } else { &self.dispatch };
        (table.address(), ring_roles_of(&self.layout, kind, channels))
    }
}
