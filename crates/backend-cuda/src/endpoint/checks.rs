//! What tests ask of an endpoint whose kernels are built for them.

use std::fmt;
use std::sync::Arc;

use ep_core::{Endpoint as _, Error, Nanos};

use super::{Array, CudaEndpoint, Early, Rows};
use crate::args;
use crate::build::Source;
use crate::checks::{RingEvent, TestDevice};
use crate::driver::{Mapped, Stream};

/// Tells whether a rank has crashed ([`ep_core::incident::Incident::Crash`]), also when its endpoint is gone.
#[derive(Clone)]
pub struct CrashFlag(Option<Arc<Mapped>>);

impl fmt::Debug for CrashFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CrashFlag").field(&self.is_up()).finish()
    }
}

impl CrashFlag {
    /// Whether the rank's kernels do nothing any more. Its calls never end then: drop their futures.
    pub fn is_up(&self) -> bool {
        self.0.as_ref().is_some_and(|crashed| crashed.word(0) != 0)
    }
}

/// What a consumer of [`CudaEndpoint::consume`] reads and writes.
#[derive(Clone, Copy, Debug)]
pub struct Consumed<'a> {
    /// The dispatch's counters.
    pub early: &'a Early,
    /// Of the dispatch.
    pub expert_counts: &'a Array<i32>,
    /// Of the dispatch, bf16.
    pub x: &'a Rows,
    /// Where results go.
    pub y: &'a Rows,
    /// Where it says that they are ready, one word a block.
    pub signals: Option<&'a Array<i32>>,
    /// Blocks that did not come.
    pub out: &'a Array<i32>,
    /// What it waits before each block.
    pub pause: Nanos,
}

impl CudaEndpoint {
    /// Tells when this rank has crashed; never without [`Builder::checks`](crate::Builder::checks).
    pub fn crash_flag(&self) -> CrashFlag {
        CrashFlag(self.device.test.as_ref().map(TestDevice::crashed))
    }

    /// Enqueues to `stream` a kernel of `blocks` blocks that consumes the rows of a low-latency dispatch as they come: its results `y` are the rows `x`,
    /// and it says of each block that it is ready, in `signals` if there are some, else in the dispatch's counters. It waits `pause` before each block's results.
    /// `out`, u32 `[2]`: adds up the blocks whose rows are known not to come, and those waited for in vain.
    ///
    /// # Errors
    /// [`Error::Invalid`] for rows of another size; [`Error::Broken`] where the device fails.
    ///
    /// # Safety
    /// All that is named has room for what the dispatch may bring, and is kept until the kernel has ended.
    pub unsafe fn consume(&self, stream: &Stream, blocks: u32, consumed: &Consumed<'_>) -> Result<(), Error> {
        let Consumed { early, expert_counts, x, y, signals, out, pause } = consumed;
        let (row_bytes, results) = (self.shape().row_bytes(), self.shape().result_bytes());
        if row_bytes != results || !row_bytes.is_multiple_of(16) {
            return Err(Error::invalid("bytes of a row to consume", row_bytes, "those of a result, a multiple of 16"));
        }
        let args = args::Consumer {
            early: early.address(),
            expert_counts: expert_counts.address(),
            x: self.address(x),
            x_stride: x.stride() as u64,
            y: self.address(y),
            y_stride: y.stride() as u64,
            signals: signals.map_or(0, Array::address),
            out: out.address(),
            // Longer than the launch whose failure it is told of.
            allowed: 2 * self.settings().deadline().0,
            pause: pause.0,
            experts: early.experts(),
            blocks: early.blocks(),
            rows: early.rows(),
            wide: self.topology().ranks() * self.shape().max_tokens(),
            columns: (row_bytes / 16) as u32,
            ..args::Consumer::default()
        };
        // SAFETY: as the caller promises.
        Ok(unsafe { self.device.consume(stream, blocks, &args) }?)
    }

    /// Compiles and loads that kernel: it may not wait for a compiler while others wait for it.
    ///
    /// # Errors
    /// [`Error::Broken`] where it does not compile.
    pub fn prepare_to_consume(&self) -> Result<(), Error> {
        Ok(self.device.prepare(&[Source::Consumer])?)
    }

    /// What this rank's ends of rings did since the last call, and how many events found no room. Waits for what is enqueued. Nothing without
    /// [`Checks::events`](crate::checks::Checks::events).
    ///
    /// # Errors
    /// [`Error::Broken`] where the device fails.
    pub fn ring_events(&mut self) -> Result<(Vec<RingEvent>, u32), Error> {
        match &self.device.test {
            Some(test) => Ok(test.events(&self.device.stream)?),
            None => Ok((Vec::new(), 0)),
        }
    }
}
