//! Memory of the caller's: what a framework has allocated is read and written where it lies.
//!
//! Rows lie one behind the other, each at a multiple of 16 bytes, as [`Rows`] have them. The caller orders his own work with the
//! endpoint's stream ([`CudaEndpoint::stream`]).

use std::any::Any;
use std::sync::Arc;

use ep_core::Error;
use ep_core::engine::Scalar;
use ep_core::engine::low_latency::{LowCombined, LowReceived, LowRoutingOf};

use super::low_latency::{Combining, Dispatching, LowHandle};
use super::rows::stride;
use super::{Apart, Array, CudaEndpoint, Owned, Rows, ScaleStrides};
use crate::driver::Scratch;

/// Where a low-latency dispatch puts what it brings: addresses of arrays with the shapes of [`LowReceived`].
#[derive(Clone, Debug)]
pub struct LowPlaces {
    /// `[local experts, ranks * max_tokens]` rows as they travelled, or codes alone, each at a multiple of 16 bytes.
    pub x: u64,
    /// Where FP8 rows' scales go; none: they follow their codes.
    pub scales: Option<LowScales>,
    /// i32 `[local experts]`.
    pub expert_counts: u64,
    /// i64 `[local experts, ranks]`.
    pub segments: u64,
    /// i32 `[local experts, ranks * max_tokens]`.
    pub source_token: u64,
    /// Where what is told of received rows goes, by source and packed; then `x`, `scales` and `source_token` have no local experts.
    pub by_source: Option<LowPlacesBySource>,
    /// Where it goes which packed rows stand where; then `x` and `scales` have a row for each slot.
    pub packed: Option<LowPlacesPacked>,
    /// Rows of `x` that may come, by source and packed, where that is less than there is room for: more are refused.
    pub most_rows: Option<u32>,
    /// i32 `[local experts]`, to which `expert_counts` are added; 0: none.
    pub stats: u64,
    /// What a graph must keep that the call is captured into: the memory of these places, where it is not kept otherwise.
    pub owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// Where a low-latency dispatch by source puts what it tells: arrays with the shapes of [`LowBySource`](ep_core::engine::low_latency::LowBySource).
#[derive(Clone, Copy, Debug)]
pub struct LowPlacesBySource {
    /// i32 `[ranks + 1]`.
    pub first_of: u64,
    /// i64 `[ranks * max_tokens, topk]`.
    pub topk_idx: u64,
    /// i64 `[ranks * max_tokens, topk]`, the same once more; 0: nowhere.
    pub topk_idx_too: u64,
    /// f32 `[ranks * max_tokens, topk]`.
    pub topk_weights: u64,
    /// i32 `[ranks * max_tokens]`.
    pub source_rank: u64,
}

/// Where a low-latency dispatch puts what it tells of packed rows: arrays with the shapes of [`LowPacked`](ep_core::engine::low_latency::LowPacked).
#[derive(Clone, Copy, Debug)]
pub struct LowPlacesPacked {
    /// i32 `[local experts + 1]`.
    pub first: u64,
    /// i32 `[ranks * max_tokens, topk]`.
    pub slots: u64,
    /// f32 `[slots]`.
    pub weights: u64,
}

/// Where a low-latency dispatch puts scales: `[local experts, ranks * max_tokens, words]`, words of 4 bytes, an f32 or four UE8M0 bytes
/// each. Strides in bytes, multiples of 4. The hidden size is a multiple of 16.
#[derive(Clone, Copy, Debug, Default)]
pub struct LowScales {
    /// Of the first word.
    pub address: u64,
    /// From one expert to the next.
    pub expert: u64,
    /// From one row to the next.
    pub row: u64,
    /// From one word to the next.
    pub word: u64,
}

impl CudaEndpoint {
    /// FP8 rows of a dispatch, codes and scales each at an address of this GPU. Codes lie one row behind the other, at a multiple of 16;
    /// scales in words of 4 bytes, with any strides.
    ///
    /// # Errors
    /// [`Error::Invalid`] where rows of the shape are not FP8, a row of codes is no multiple of 16 bytes, or an address or stride is not
    /// aligned.
    ///
    /// # Safety
    /// As [`Scratch::foreign`], for both.
    pub unsafe fn foreign_rows_apart(
        &self,
        codes: u64,
        scales: u64,
        strides: ScaleStrides,
        rows: u32,
    ) -> Result<Rows, Error> {
        let format = *self.layout().row();
        let (codes_bytes, scales_bytes) = (format.codes_bytes(), format.scales_bytes());
        if scales_bytes == 0 {
            return Err(Error::invalid("scales", "given", format_args!("none, of {} rows", format.element())));
        }
        for (what, value, unit) in [
            ("bytes of a row's codes", codes_bytes, 16),
            ("address of the codes", codes, 16),
            ("address of the scales", scales, 4),
            ("bytes between scales of rows", strides.row, 4),
            ("bytes between scales of a row", strides.word, 4),
        ] {
            if !value.is_multiple_of(unit) {
                return Err(Error::invalid(what, value, format_args!("a multiple of {unit}")));
            }
        }
        // From the first word to the end of the last.
        let last = |stride: u64, count: u64| stride.checked_mul(count.saturating_sub(1));
        let span = last(strides.row, rows.into()).zip(last(strides.word, scales_bytes.div_ceil(4)));
        let Some(span) = span.and_then(|(row, word)| row.checked_add(word)?.checked_add(4)) else {
            let value = format_args!("{} and {}", strides.row, strides.word);
            return Err(Error::invalid("bytes between scales", value, "less than all memory"));
        };
        // SAFETY: as the caller promises.
        let foreign = |at, bytes: u64| Arc::new(unsafe { Scratch::foreign(self.stream(), at, bytes as usize) });
        let (codes, scales) = (foreign(codes, u64::from(rows) * codes_bytes), foreign(scales, span));
        Ok(Rows::Apart(Apart::new(&format, codes, scales, strides, rows)))
    }

    /// Rows at an address of this GPU, which is a multiple of 16.
    ///
    /// # Safety
    /// As [`Scratch::foreign`].
    pub unsafe fn foreign_rows(&self, address: u64, rows: u32, row_bytes: usize) -> Rows {
        // SAFETY: as the caller promises.
        let memory =
            unsafe { Scratch::foreign(self.stream(), address, (rows as usize).saturating_mul(stride(row_bytes))) };
        Rows::Owned(Owned::new(Arc::new(memory), rows, row_bytes))
    }

    /// Numbers at an address of this GPU, aligned.
    ///
    /// # Safety
    /// As [`Scratch::foreign`].
    pub unsafe fn foreign_array<T: Scalar>(&self, address: u64, len: usize) -> Array<T> {
        // SAFETY: as the caller promises.
        Array::of_memory(
            Arc::new(unsafe { Scratch::foreign(self.stream(), address, len.saturating_mul(size_of::<T>())) }),
            len,
        )
    }

    /// Room for rows, undefined.
    ///
    /// # Errors
    /// For want of memory.
    pub fn room(&self, rows: u32, row_bytes: usize) -> Result<Rows, Error> {
        Rows::new(self.stream(), rows, row_bytes)
    }

    /// Room for `bytes` bytes, undefined.
    ///
    /// # Errors
    /// For want of memory.
    pub fn bytes_room(&self, bytes: usize) -> Result<Arc<Scratch>, Error> {
        Ok(Arc::new(Scratch::new(self.stream(), bytes)?))
    }

    /// Room for numbers, undefined.
    ///
    /// # Errors
    /// For want of memory.
    pub fn array_room<T: Scalar>(&self, len: usize) -> Result<Array<T>, Error> {
        Array::new(self.stream(), len)
    }

    /// Where rows of this endpoint lie in the GPU's memory; where their codes do, of FP8 rows of a dispatch.
    pub fn address_of(&self, rows: &Rows) -> u64 {
        self.address(rows)
    }

    /// Where the scales of FP8 rows of a dispatch lie, and how; address 0 where rows of the shape have none.
    pub fn scales_of(&self, rows: &Rows) -> (u64, ScaleStrides) {
        self.scales(rows)
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

    /// [`receive_combine`](ep_core::LowLatency::receive_combine) into `x`, at least as many bf16 rows as the batch has tokens.
    ///
    /// # Errors
    /// Those of `receive_combine`, and [`Error::Invalid`] for rows that are too few, of another size, or of another endpoint.
    pub async fn receive_combine_into(&mut self, sent: &Combining, x: Rows) -> Result<LowCombined<Self>, Error> {
        self.low_receive_sums(sent, Some(x)).await
    }

    /// [`low_latency_dispatch`](ep_core::LowLatency::low_latency_dispatch) into memory of the caller's. `waits`: for its kernel, so that what it
    /// told may be read.
    ///
    /// # Errors
    /// Those of `low_latency_dispatch`; [`Error::Unsupported`] for a captured call that waits.
    ///
    /// # Safety
    /// As [`Scratch::foreign`], for all of `places`.
    pub async unsafe fn low_latency_dispatch_into(
        &mut self,
        x: &Rows,
        routing: &LowRoutingOf<Self>,
        places: &LowPlaces,
        waits: bool,
    ) -> Result<LowReceived<Self>, Error> {
        self.low_dispatch_at_once(x, routing, Some(places), waits).await
    }

    /// [`low_latency_combine`](ep_core::LowLatency::low_latency_combine) into `x`, as of [`CudaEndpoint::receive_combine_into`].
    ///
    /// # Errors
    /// Those of `low_latency_combine` and `receive_combine_into`.
    pub async fn low_latency_combine_into(
        &mut self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
        x: Rows,
    ) -> Result<LowCombined<Self>, Error> {
        self.low_combine_at_once(y, handle, topk_weights, Some(x)).await
    }
}
