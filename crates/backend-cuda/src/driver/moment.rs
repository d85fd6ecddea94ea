//! Moments in streams that whoever asks for them does not capture, and others may.

use std::sync::Arc;

use cudarc::driver::sys;

use super::relaxed::Relaxed;
use super::stream::SpareEvent;
use super::{Device, check};
use crate::error::CudaError;

/// A moment in a stream that comes by itself.
#[derive(Debug)]
pub(crate) struct Moment {
    device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Moment {}

impl Moment {
    /// Behind all that `stream` holds now: a stream of `device`, by the driver's handle; 0 is the default stream. None while the stream is captured, or
    /// others are that it would wait for.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// `stream` lives.
    pub(crate) unsafe fn behind(device: &Arc<Device>, stream: usize) -> Result<Option<Self>, CudaError> {
        device.bind()?;
        let _relaxed = Relaxed::enter();
        let stream = stream as sys::CUstream;
        // SAFETY: as the caller promises.
        if unsafe { is_captured(stream) } {
            return Ok(None);
        }
        let moment = Self { device: Arc::clone(device), raw: device.event()?.0 };
        // SAFETY: the event is nobody else's; the stream lives.
        check("cuEventRecord", unsafe { sys::cuEventRecord(moment.raw, stream) })?;
        // A capture that another thread has begun meanwhile has the event, and would break if that were asked for.
        // SAFETY: as above.
        Ok((!unsafe { is_captured(stream) }).then_some(moment))
    }

    /// Those that have not come.
    ///
    /// # Errors
    /// As [`Self::has_come`].
    pub(crate) fn to_come(all: Vec<Self>) -> Result<Vec<Self>, CudaError> {
        all.into_iter().filter_map(|moment| moment.has_come().map(|has| (!has).then_some(moment)).transpose()).collect()
    }

    /// Whether it has come.
    ///
    /// # Errors
    /// [`CudaError::Driver`], for what failed before it, too.
    pub(crate) fn has_come(&self) -> Result<bool, CudaError> {
        self.device.bind()?;
        let _relaxed = Relaxed::enter();
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Moment {
    fn drop(&mut self) {
        self.device.spare_events().push(SpareEvent(self.raw));
    }
}

/// Whether work that is enqueued now is captured, or nobody can tell.
///
/// # Safety
/// `stream` lives.
unsafe fn is_captured(stream: sys::CUstream) -> bool {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: as the caller promises; `status` is written to.
    let code = unsafe { sys::cuStreamIsCapturing(stream, &raw mut status) };
    code != sys::CUresult::CUDA_SUCCESS || status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
}
