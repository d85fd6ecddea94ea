//! Memory of the caller's: what a framework has allocated is read and written where it lies.
//!
//! Rows lie one behind the other, each at a multiple of 16 bytes, as [`Rows`] have them. The caller orders his own work with the
//! endpoint's stream ([`CudaEndpoint::stream`]).

use std::sync::Arc;

use ep_core::Error;
use ep_core::engine::Scalar;
use ep_core::engine::low_latency::{LowCombined, LowReceived};

use super::low_latency::{Combining, Dispatching};
use super::rows::stride;
use super::{Array, CudaEndpoint, Rows};
use crate::driver::Scratch;

/// Where a low-latency dispatch puts what it brings: addresses of arrays with the shapes of [`LowReceived`].
#[derive(Clone, Copy, Debug)]
pub struct LowPlaces {
    /// `[local experts, ranks * max_tokens]` rows as they travelled, each at a multiple of 16 bytes.
    pub x: u64,
    /// i32 `[local experts]`.
    pub expert_counts: u64,
    /// i64 `[local experts, ranks]`.
    pub segments: u64,
    /// i32 `[local experts, ranks * max_tokens]`.
    pub source_token: u64,
}

impl CudaEndpoint {
    /// Rows at an address of this GPU, which is a multiple of 16.
    ///
    /// # Safety
    /// As [`Scratch::foreign`].
    pub unsafe fn foreign_rows(&self, address: u64, rows: u32, row_bytes: usize) -> Rows {
        // SAFETY: as the caller promises.
        let memory = unsafe { Scratch::foreign(self.stream(), address, rows as usize * stride(row_bytes)) };
        Rows::Owned { memory: Arc::new(memory), rows, row_bytes }
    }

    /// Numbers at an address of this GPU, aligned.
    ///
    /// # Safety
    /// As [`Scratch::foreign`].
    pub unsafe fn foreign_array<T: Scalar>(&self, address: u64, len: usize) -> Array<T> {
        // SAFETY: as the caller promises.
        Array::of_memory(Arc::new(unsafe { Scratch::foreign(self.stream(), address, len * size_of::<T>()) }), len)
    }

    /// Room for rows, undefined.
    ///
    /// # Errors
    /// For want of memory.
    pub fn room(&self, rows: u32, row_bytes: usize) -> Result<Rows, Error> {
        Rows::new(self.stream(), rows, row_bytes)
    }

    /// Room for numbers, undefined.
    ///
    /// # Errors
    /// For want of memory.
    pub fn array_room<T: Scalar>(&self, len: usize) -> Result<Array<T>, Error> {
        Array::new(self.stream(), len)
    }

    /// Where rows of this endpoint lie in the GPU's memory.
    pub fn address_of(&self, rows: &Rows) -> u64 {
        self.address(rows)
    }

    /// [`receive_dispatch`](ep_core::LowLatency::receive_dispatch) into memory of the caller's.
    ///
    /// # Errors
    /// Those of `receive_dispatch`.
    ///
    /// # Safety
    /// As [`Scratch::foreign`], for all of `places`.
    pub async unsafe fn receive_dispatch_into(
        &mut self,
        sent: &Dispatching,
        places: &LowPlaces,
    ) -> Result<LowReceived<Self>, Error> {
        self.low_receive(sent, Some(places)).await
    }

    /// [`receive_combine`](ep_core::LowLatency::receive_combine) into rows of the caller's.
    ///
    /// # Errors
    /// Those of `receive_combine`.
    pub async fn receive_combine_into(&mut self, sent: &Combining, x: Rows) -> Result<LowCombined<Self>, Error> {
        self.low_receive_sums(sent, Some(x)).await
    }
}
