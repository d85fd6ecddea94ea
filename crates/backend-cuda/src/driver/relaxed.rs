//! Calls beside a capture.
//!
//! While a stream is captured in global mode, as frameworks do, the driver forbids every thread calls that might be meant for the
//! capture, on whatever stream: to give memory back, to ask an event or a stream. One such call, and the capture is lost. Ours are never
//! meant for it, and say so.

use cudarc::driver::sys;

/// Lets the calling thread make calls that a capture, of its own or of another thread, would forbid.
pub(super) struct Relaxed {
    before: sys::CUstreamCaptureMode,
}

impl Relaxed {
    pub(super) fn enter() -> Self {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the mode is read from and written to.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        Self { before: mode }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.before) };
    }
}
