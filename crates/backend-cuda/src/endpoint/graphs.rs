//! Calls captured into CUDA graphs.
//!
//! While the endpoint's stream is captured ([`Stream::begin_capture`](crate::driver::Stream::begin_capture), `cuStreamBeginCapture`, or a
//! framework's own), these calls are captured instead of run, and any number of replays do what so many calls would have done:
//! cached dispatch; dispatch of choices with [`device_counts`](ep_core::engine::Dispatch::device_counts); combine; all of low latency.
//! What waits for the device is refused with [`Error::Unsupported`], and the capture goes on: a dispatch whose counts the host wants
//! or whose membership it holds, copies from and to the host, masks, recovery.
//!
//! ```no_run
//! # async fn example(ep: &mut ep_cuda::CudaEndpoint, x: &ep_cuda::Rows, y: &ep_cuda::Rows, handle: &ep_core::engine::Handle)
//! # -> Result<(), ep_core::Error> {
//! use ep_core::Endpoint as _;
//! use ep_core::engine::Combine;
//!
//! let stream = ep.stream().clone();
//! stream.begin_capture()?;
//! let got = ep.redispatch(x, handle).await?;
//! // The experts' kernels, on the same stream: from got.x to y.
//! let back = ep.combine(y, handle, Combine::default()).await?;
//! let mut graph = stream.end_capture()?;
//! for _ in 0..100 {
//!     graph.launch(&stream)?; // New rows in x, new sums in back.x, each time.
//! }
//! # drop((got, back));
//! # Ok(()) }
//! ```
//!
//! **All ranks** replay the same graph, in the same place among their other calls, as they make the same calls. Operations are
//! numbered on the device, so calls and replays mix freely. A graph runs on the endpoint's stream, or on one that is ordered with it
//! by events: two operations of a rank must not overlap.
//!
//! **Memory.** A replay reads and writes where the captured call did: in what it was given, and in the results it gave. All of it
//! is the graph's too, which keeps it, and the endpoint's own memory, until the graph and what was made of it are gone; blocks of
//! the arena likewise, so captured calls take them from other calls. Dropping results or handles early, or the endpoint, is
//! harmless. Where ranks are processes and one still has graphs when all drop their endpoints, no window of these is used again.
//!
//! **Low latency.** A graph receives what it sends, and nothing else: it starts and ends with nothing in flight.
//!
//! **Failures** of a replay are told by the next call ([`Error::Failed`]); what is enqueued behind ends at once, and no replay waits
//! longer than the deadline. After a recovery graphs are stale: a replay does nothing, and fails the communicator anew.
//! A capture in which a call failed is to be thrown away.
//!
//! Capture by thread ([`Stream::begin_capture`](crate::driver::Stream::begin_capture) does), not globally, where ranks are threads of one
//! process: the others' calls would be forbidden meanwhile.

use std::sync::Arc;

use ep_core::Error;

use super::{CudaEndpoint, Rows};
use crate::driver::{Capture, Kept};

impl CudaEndpoint {
    /// Lets the graph of a captured call keep what the call uses, beside the endpoint's own memory.
    pub(super) fn keep_for(&self, capture: Option<&Capture>, uses: impl FnOnce() -> Kept) -> Result<(), Error> {
        let Some(capture) = capture else { return Ok(()) };
        let mut kept = uses();
        kept.push(Arc::clone(&self.device) as _);
        Ok(capture.keep(kept)?)
    }

    /// Lets a graph keep the rows by source that its rows by expert are copied from.
    pub(super) fn keep_by_source(&mut self, capture: Option<&Capture>, rows: &Rows) -> Result<(), Error> {
        self.keep_leased(capture, rows);
        self.keep_for(capture, || vec![rows.memory()])
    }

    /// A block that a graph grants is remembered.
    pub(super) fn keep_leased(&mut self, capture: Option<&Capture>, rows: &Rows) {
        if let Some(lease) = rows.lease().filter(|_| capture.is_some()) {
            self.pin(lease.held());
        }
    }
}
