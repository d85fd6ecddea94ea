//! What tests ask of an endpoint whose kernels are built for them.

use std::fmt;
use std::sync::Arc;

use ep_core::Error;

use super::CudaEndpoint;
use crate::checks::{RingEvent, TestDevice};
use crate::driver::Mapped;

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

impl CudaEndpoint {
    /// Tells when this rank has crashed; never without [`Builder::checks`](crate::Builder::checks).
    pub fn crash_flag(&self) -> CrashFlag {
        CrashFlag(self.device.test.as_ref().map(TestDevice::crashed))
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
