//! Memory of a user's on the device, by its address: read and written where it lies, in the order of his stream.

use std::sync::Arc;

use ep_core::engine::Scalar;
use ep_core::{Endpoint as _, Error};

use super::low_latency::{Combining, Dispatching, LowArrays, LowHandle};
use super::{Array, AscendEndpoint, Rows};
use crate::driver::Stream;

/// Where the results of a low-latency dispatch go, on the device.
#[derive(Clone, Copy, Debug)]
pub struct LowPlaces {
    /// Rows as they lie in a message without its header: of INT8 codes, and the scale behind them.
    pub x: u64,
    /// `[local experts]`, i32.
    pub expert_counts: u64,
    /// `[local experts, ranks]`, i64.
    pub segments: u64,
    /// `[local experts, ranks * max_tokens]`, i32.
    pub source_token: u64,
}

impl AscendEndpoint {
    /// The stream that its kernels are enqueued to. It may outlive the endpoint.
    pub fn stream(&self) -> &Arc<Stream> {
        self.device.stream()
    }

    /// Lets what calls launch from now on come behind what `stream` holds now: [`Stream::follow`]. Nothing need be said the other way round: a
    /// call ends when its kernels have.
    ///
    /// # Errors
    /// What the table says.
    ///
    /// # Safety
    /// As [`Stream::follow`].
    pub unsafe fn follow(&mut self, stream: u64) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        let event = unsafe { self.device.stream().follow(stream) }?;
        self.keep([Arc::new(event) as _]);
        self.enqueued();
        Ok(())
    }

    /// Rows of a user's, side by side, `row_bytes` each. They are read when a call's kernels run, or written.
    ///
    /// # Safety
    /// So many bytes of the device's memory lie at the address until all calls that were given the rows have ended, and the operations that they sent
    /// have ended or were dropped. Nobody writes them meanwhile, nor reads them where a call writes, but in the order of streams.
    pub unsafe fn lent_rows(&self, address: u64, rows: u32, row_bytes: usize) -> Rows {
        // SAFETY: as the caller promises.
        unsafe { Rows::lent(self.device.device(), address, rows, row_bytes) }
    }

    /// Numbers of a user's.
    ///
    /// # Safety
    /// As [`AscendEndpoint::lent_rows`].
    pub unsafe fn lent_array<T: Scalar>(&self, address: u64, len: usize) -> Array<T> {
        // SAFETY: as the caller promises.
        unsafe { Array::lent(self.device.device(), address, len) }
    }

    /// Room for rows of the endpoint's own, undefined.
    ///
    /// # Errors
    /// Where the device has no memory left.
    pub fn rows_room(&self, rows: u32, row_bytes: usize) -> Result<Rows, Error> {
        Rows::new(self.device.device(), rows, row_bytes)
    }

    /// Numbers of the endpoint's own that are copied from a user's, in the order of the endpoint's stream.
    ///
    /// # Errors
    /// Where the device has no memory left; what the table says.
    ///
    /// # Safety
    /// As [`Stream::copy`], of so many numbers.
    pub unsafe fn copied_array<T: Scalar>(&mut self, address: u64, len: usize) -> Result<Array<T>, Error> {
        let own = Array::filled(self.device.device(), len, 0)?;
        self.keep([own.memory()]);
        // SAFETY: as the caller promises; there is room for so many numbers.
        unsafe { self.device.stream().copy(own.address(), address, len * size_of::<T>()) }?;
        self.enqueued();
        Ok(own)
    }

    /// Adds to a user's numbers, where nothing of his is under way that uses them.
    ///
    /// # Errors
    /// What the table says.
    ///
    /// # Safety
    /// So many numbers lie there, and nobody else uses them before this returns.
    pub unsafe fn add_to(&self, address: u64, counts: &[i32]) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        let lent = unsafe { self.lent_array::<i32>(address, counts.len()) };
        let sums: Vec<i32> = lent.to_vec()?.iter().zip(counts).map(|(sum, count)| sum.wrapping_add(*count)).collect();
        lent.write(&sums)
    }

    /// Lets `stream` come behind what this endpoint has launched, where that has not ended: after a call that was dropped.
    ///
    /// # Errors
    /// What the table says.
    ///
    /// # Safety
    /// As [`Stream::follow`].
    pub unsafe fn lead(&mut self, stream: u64) -> Result<(), Error> {
        self.led.retain(|[_, passed]| !passed.has_come().unwrap_or(false));
        if self.is_running {
            // SAFETY: as the caller promises.
            self.led.push(unsafe { self.device.stream().lead(stream) }?);
        }
        Ok(())
    }

    /// Receives a dispatch of low latency into memory of the caller's, which `owner` keeps. Says the rows of each local expert.
    ///
    /// # Errors
    /// Those of [`LowLatency::receive_dispatch`](ep_core::LowLatency::receive_dispatch).
    ///
    /// # Safety
    /// The memory is the device's, of the sizes that [`LowReceived`](ep_core::engine::low_latency::LowReceived) says, and lies there as long as
    /// `owner` does.
    pub async unsafe fn receive_dispatch_into(
        &mut self,
        sent: &Dispatching,
        places: LowPlaces,
        owner: Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<(LowHandle, Vec<i32>), Error> {
        let [ranks, local] = [self.topology().ranks(), self.layout().local_experts()].map(|number| number as usize);
        let rows = self.layout().low_expert_rows()?;
        // SAFETY: as the caller promises, of all of these.
        let into = unsafe {
            LowArrays {
                x: self.lent_rows(places.x, rows, self.layout().row().payload_bytes() as usize),
                expert_counts: self.lent_array(places.expert_counts, local),
                segments: self.lent_array(places.segments, local * ranks),
                source_token: self.lent_array(places.source_token, rows as usize),
            }
        };
        // Kernels write what there is of these.
        into.expert_counts.fill(0)?;
        into.segments.fill(0)?;
        into.source_token.fill(0)?;
        let received = self.low_receive_dispatch(sent, into, Some(owner)).await?;
        Ok((received.handle, received.expert_counts.to_vec()?))
    }

    /// Receives a combine of low latency into rows of the caller's, as many as the dispatch had tokens.
    ///
    /// # Errors
    /// Those of [`LowLatency::receive_combine`](ep_core::LowLatency::receive_combine).
    ///
    /// # Safety
    /// As [`AscendEndpoint::lent_rows`]; there is room for the tokens.
    pub async unsafe fn receive_combine_into(&mut self, sent: &Combining, address: u64) -> Result<(), Error> {
        let row = self.shape().result_bytes() as usize;
        // SAFETY: as the caller promises.
        let x = unsafe { self.lent_rows(address, sent.tokens(), row) };
        self.low_receive_combine(sent, x).await.map(drop)
    }

    /// Copies memory of the device in the order of the endpoint's stream. Returns when it is copied.
    ///
    /// # Errors
    /// What the table says; that the device does not answer.
    ///
    /// # Safety
    /// As [`Stream::copy`].
    pub async unsafe fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { self.device.stream().copy(to, from, bytes) }?;
        self.enqueued();
        self.ended().await
    }
}
