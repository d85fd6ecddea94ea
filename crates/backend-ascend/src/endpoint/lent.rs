//! Memory of a user's on the device, by its address: read and written where it lies, in the order of his stream.

use std::sync::Arc;

use ep_core::Error;
use ep_core::engine::Scalar;

use super::{Array, AscendEndpoint, Rows};
use crate::driver::Stream;

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
        // What was recorded before does not say when the event has been passed.
        (self.is_running, self.running) = (true, None);
        Ok(())
    }

    /// Rows of a user's, side by side, `row_bytes` each. They are read when a call's kernels run, or written.
    ///
    /// # Safety
    /// So many bytes of the device's memory lie at the address until all calls that were given the rows, and the operations that they sent, have
    /// ended. Nobody writes them meanwhile, nor reads them where a call writes, but in the order of streams.
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

    /// Room for numbers of the endpoint's own, 0 at first.
    ///
    /// # Errors
    /// As [`AscendEndpoint::rows_room`].
    pub fn array_room<T: Scalar>(&self, len: usize) -> Result<Array<T>, Error> {
        Array::filled(self.device.device(), len, 0)
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
        (self.is_running, self.running) = (true, None);
        self.ended().await
    }
}
