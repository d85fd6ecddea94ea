//! The tables of roles on the device.

use std::sync::Arc;

use ep_core::device::{RoleRow, ring_roles, ring_roles_of};
use ep_core::layout::Kind;
use ep_core::port::Duty;
use ep_core::{Layout, Rank};
use zerocopy::IntoBytes;

use crate::driver::{DeviceMemory, Stream};
use crate::error::CudaError;

/// Which role each warp of the kernels of rings has, for dispatches and combines.
#[derive(Debug)]
pub(super) struct Roles {
    dispatch: DeviceMemory,
    combine: DeviceMemory,
    reducers: DeviceMemory,
    layout: Layout,
}

impl Roles {
    /// Those of rank `me`. Waits.
    pub(super) fn new(stream: &Arc<Stream>, layout: &Layout, me: Rank) -> Result<Self, CudaError> {
        let table = |rows: Vec<RoleRow>| {
            let memory = DeviceMemory::zeroed(stream, size_of_val(&rows[..]))?;
            memory.write(stream, 0, rows.as_bytes())?;
            Ok::<_, CudaError>(memory)
        };
        let combine = ring_roles(layout, me, Kind::Combine);
        let reducers = combine.iter().copied().filter(|row| row.duty == Duty::Reducer.number()).collect();
        Ok(Self {
            dispatch: table(ring_roles(layout, me, Kind::Dispatch))?,
            combine: table(combine)?,
            reducers: table(reducers)?,
            layout: layout.clone(),
        })
    }

    /// Where the table for operations of a kind lies, and how many rows a call with so many channels takes.
    pub(super) fn of(&self, kind: Kind, channels: u32) -> (u64, u32) {
        let table = if kind == Kind::Combine { &self.combine } else { &self.dispatch };
        (table.address(), ring_roles_of(&self.layout, kind, channels))
    }

    /// Kernels that nobody can wait for may use them.
    pub(super) fn lose(&mut self) {
        [&mut self.dispatch, &mut self.combine, &mut self.reducers].into_iter().for_each(DeviceMemory::lose);
    }

    /// Where the table of a combine's reducers lies: one for each channel.
    pub(super) fn reducers(&self) -> u64 {
        self.reducers.address()
    }
}
