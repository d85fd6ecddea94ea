//! Memory for a while: the stream-ordered pool, which is taken from and given back to without waiting for any kernel.

use std::sync::Arc;

use cudarc::driver::sys;

use super::relaxed::Relaxed;
use super::{Stream, check, range, spare};
use crate::error::CudaError;

/// Memory of the stream-ordered pool: usable by work that is enqueued after it was taken, given back after what was enqueued
/// when it is dropped. While the stream is captured it is usable at once, and by whatever is made of the capture; who captures
/// keeps it for as long.
#[derive(Debug)]
pub struct Scratch {
    stream: Arc<Stream>,
    address: u64,
    bytes: usize,
    /// Whether it is somebody else's, who gives it back.
    is_foreign: bool,
    /// The capture that it was taken for, where its work is captured.
    captured: Option<u64>,
}

impl Scratch {
    /// Takes `bytes` bytes, at least some: an address is never 0. Undefined at first.
    ///
    /// # Errors
    /// [`CudaError::Driver`], for want of memory for one.
    pub fn new(stream: &Arc<Stream>, bytes: usize) -> Result<Self, CudaError> {
        stream.device().bind()?;
        let room = spare::room(bytes);
        let captured = if stream.is_capturing() { stream.capture()?.map(|capture| capture.id) } else { None };
        let address = if captured.is_some() {
            super::graph::take_beside(stream.device(), room)?
        } else {
            stream.give_back_late();
            match stream.take_spare(room) {
                Some(address) => address,
                None => Self::take(stream, room)?,
            }
        };
        Ok(Self { stream: Arc::clone(stream), address, bytes, is_foreign: false, captured })
    }

    /// Memory of somebody else's, who gives it back.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are of the stream's GPU. They stay, and nobody writes to what work of the stream reads or touches
    /// what it writes, until work that was enqueued while this or a clone of an `Arc` of it lived has ended; and until whatever
    /// was made of a capture of such work is gone.
    pub unsafe fn foreign(stream: &Arc<Stream>, address: u64, bytes: usize) -> Self {
        Self { stream: Arc::clone(stream), address, bytes, is_foreign: true, captured: None }
    }

    /// Takes memory on a stream that is not captured.
    pub(super) fn take(stream: &Stream, bytes: usize) -> Result<u64, CudaError> {
        let _relaxed = Relaxed::enter();
        let mut address = 0;
        let pool = stream.device().pool();
        // SAFETY: `address` is written to; the pool lives as long as the process.
        let code = unsafe { sys::cuMemAllocFromPoolAsync(&raw mut address, bytes, pool, stream.raw()) };
        check("cuMemAllocFromPoolAsync", code).map(|()| address)
    }

    /// Takes room for `bytes` and copies them there.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn from_bytes(stream: &Arc<Stream>, bytes: &[u8]) -> Result<Self, CudaError> {
        let this = Self::new(stream, bytes.len())?;
        this.write(0, bytes)?;
        Ok(this)
    }

    /// Takes room for `count` times `each` bytes.
    ///
    /// # Errors
    /// As [`Scratch::new`]; a product that no memory has is an error, too.
    pub(crate) fn of(stream: &Arc<Stream>, count: usize, each: usize) -> Result<Self, CudaError> {
        let too_many = || CudaError::TooLarge { what: "memory", bytes: format!("{count} x {each}") };
        Self::new(stream, count.checked_mul(each).ok_or_else(too_many)?)
    }

    /// Copies `bytes` to byte `at`, after everything enqueued to its stream. Waits.
    ///
    /// # Errors
    /// [`CudaError::Beyond`] outside of it, with nothing touched; [`CudaError::Driver`]; [`CudaError::Capturing`].
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let to = range(self.address, self.bytes, at, bytes.len())?;
        // SAFETY: the range is this memory's, which work of its stream may use.
        unsafe { self.stream.upload(to, bytes) }
    }

    /// Copies what lies from byte `at` on, after everything enqueued to its stream. Waits.
    ///
    /// # Errors
    /// As [`Scratch::write`].
    pub fn read(&self, at: usize, into: &mut [u8]) -> Result<(), CudaError> {
        let from = range(self.address, self.bytes, at, into.len())?;
        // SAFETY: as in `write`.
        unsafe { self.stream.download(from, into) }
    }

    /// Fills it with a byte, enqueued to its stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// While the stream is captured: it lives as long as anything made of the capture.
    pub unsafe fn fill(&self, byte: u8) -> Result<(), CudaError> {
        // SAFETY: all of this memory, which is given back in the order of its stream; of a capture, as the caller promises.
        unsafe { self.stream.fill(self.address, byte, self.bytes) }
    }

    /// Takes room for `count` times `each` bytes. Where the stream is captured, they are `byte` until a graph writes there.
    ///
    /// # Errors
    /// As [`Scratch::of`].
    pub(crate) fn of_byte_at_first(
        stream: &Arc<Stream>,
        count: usize,
        each: usize,
        byte: u8,
    ) -> Result<Self, CudaError> {
        let this = Self::of(stream, count, each)?;
        if this.captured.is_some() {
            // SAFETY: all of this memory, which was taken just now.
            unsafe { super::graph::fill_beside(stream.device(), this.address, byte, this.bytes) }?;
        }
        Ok(this)
    }

    /// The stream whose work may use it.
    pub(crate) const fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Where it lies.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it is somebody else's.
    pub(crate) const fn is_foreign(&self) -> bool {
        self.is_foreign
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.is_foreign {
            return;
        }
        // The call that took it for a capture has failed, but what it had enqueued is in the capture, and runs with every replay: the
        // memory is never handed out again. (Of a call that succeeded the capture keeps it, and drops it when the graph is gone; by then the stream
        // may be captured anew.)
        if self.captured.is_some_and(|id| self.stream.may_be_in(id)) {
            return;
        }
        let Some(address) = self.stream.keep_spare(spare::room(self.bytes), self.address) else { return };
        // A capture would take it for its own; and where the capture is another thread's, it may begin at any moment.
        if super::graph::buries() || self.stream.is_capturing() {
            self.stream.late().push(address);
        } else if self.stream.device().bind().is_ok() {
            self.stream.give_back(address);
        }
    }
}

impl Stream {
    /// Whether the capture `id` is under way; also where the driver does not say, as one was invalidated.
    fn may_be_in(&self, id: u64) -> bool {
        self.capture().map_or(true, |capture| capture.is_some_and(|capture| capture.id == id))
    }

    /// Gives back memory of the pool, after everything enqueued.
    fn give_back(&self, address: u64) {
        let _relaxed = Relaxed::enter();
        // SAFETY: it came from the pool; work enqueued before may still use it, later work may not, as it is gone.
        unsafe { sys::cuMemFreeAsync(address, self.raw()) };
    }

    /// Gives back what could not be when it was dropped. The stream is not captured.
    pub(super) fn give_back_late(&self) {
        let late = std::mem::take(&mut *self.late());
        late.into_iter().for_each(|address| self.give_back(address));
    }
}
