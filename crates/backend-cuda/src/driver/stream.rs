//! Streams and events.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::relaxed::Relaxed;
use super::{Device, check};
use crate::error::CudaError;

/// Between two questions to the driver. Each takes its lock, which a proxy needs for every copy between nodes: so whoever has asked often pauses.
#[derive(Debug, Default)]
pub(crate) struct Pause {
    asked: u32,
}

impl Pause {
    const EAGER: u32 = 200;
    const TIME: Duration = Duration::from_micros(20);

    pub(crate) fn pass(&mut self) {
        self.asked += 1;
        if self.asked < Self::EAGER {
            thread::yield_now();
        } else {
            thread::sleep(Self::TIME);
        }
    }
}

/// A queue of work of one GPU. Does not wait for the default stream.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    raw: sys::CUstream,
    priority: i32,
    /// Whether others may name it for as long as the process lives.
    is_lent: AtomicBool,
    /// Memory of the pool that is to be given back and could not be, as the stream was captured.
    late: Mutex<Vec<u64>>,
    /// Memory of the pool for its next requests.
    pub(super) spare: Mutex<super::spare::Spare>,
}

/// A stream that had been lent when its owner was done with it.
struct Lent {
    gpu: usize,
    priority: i32,
    raw: sys::CUstream,
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for Lent {}

/// They are taken again where a stream is asked for, and never destroyed.
static LENT: Mutex<Vec<Lent>> = Mutex::new(Vec::new());

fn lent() -> MutexGuard<'static, Vec<Lent>> {
    LENT.lock().unwrap_or_else(PoisonError::into_inner)
}

// SAFETY: the driver's streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream. Lower numbers come first: 0 is the lowest priority, negative ones are higher.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn new(device: &Arc<Device>, priority: i32) -> Result<Arc<Self>, CudaError> {
        Self::make(device, priority).map(Arc::new)
    }

    pub(super) fn make(device: &Arc<Device>, priority: i32) -> Result<Self, CudaError> {
        device.bind()?;
        let own = |raw, is_lent| Self {
            device: Arc::clone(device),
            raw,
            priority,
            is_lent: AtomicBool::new(is_lent),
            late: Mutex::default(),
            spare: Mutex::default(),
        };
        let mut spare = lent();
        if let Some(at) = spare.iter().position(|lent| (lent.gpu, lent.priority) == (device.ordinal(), priority)) {
            return Ok(own(spare.swap_remove(at).raw, true));
        }
        drop(spare);
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `raw` is written to; the context is current.
        check("cuStreamCreateWithPriority", unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, flags, priority) })?;
        Ok(own(raw, false))
    }

    pub(super) fn late(&self) -> MutexGuard<'_, Vec<u64>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The GPU.
    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The driver's handle, for as long as this lives.
    pub const fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// The driver's handle, for as long as the process lives. A framework's allocator, for instance, records events on every stream
    /// that a tensor was used on when the tensor is gone, and that may be after the stream's owner. Streams that were lent are
    /// used again, and not destroyed.
    pub fn lend(&self) -> sys::CUstream {
        self.is_lent.store(true, Ordering::Relaxed);
        self.raw
    }

    /// Waits until everything enqueued has ended. Asks again and again: a call that waits inside the driver could keep other ranks
    /// of this process from launching what is waited for.
    ///
    /// # Errors
    /// [`CudaError::Driver`], also for what failed before; [`CudaError::Capturing`].
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.device.bind()?;
        self.must_run("a wait for the stream")?;
        let _relaxed = Relaxed::enter();
        let mut pause = Pause::default();
        loop {
            // SAFETY: the stream lives.
            match unsafe { sys::cuStreamQuery(self.raw) } {
                sys::CUresult::CUDA_ERROR_NOT_READY => pause.pass(),
                code => return check("cuStreamQuery", code),
            }
        }
    }

    /// Makes what is enqueued from now on wait for what `other` holds now: a stream of the same GPU, by the driver's handle. 0 is the
    /// default stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// `other` lives.
    pub unsafe fn follow(&self, other: usize) -> Result<(), CudaError> {
        // SAFETY: as the caller promises, and as this lives.
        unsafe { self.order(other as sys::CUstream, self.raw) }
    }

    /// Makes what is enqueued to `other` from now on wait for what this stream holds now. See [`Stream::follow`].
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// `other` lives.
    pub unsafe fn lead(&self, other: usize) -> Result<(), CudaError> {
        // SAFETY: as the caller promises, and as this lives.
        unsafe { self.order(self.raw, other as sys::CUstream) }
    }

    /// `then` waits for what `first` holds.
    ///
    /// # Safety
    /// Both live.
    unsafe fn order(&self, first: sys::CUstream, then: sys::CUstream) -> Result<(), CudaError> {
        self.device.bind()?;
        let SpareEvent(raw) = self.device.event()?;
        // SAFETY: the event is nobody else's; the stream lives.
        let recorded = check("cuEventRecord", unsafe { sys::cuEventRecord(raw, first) });
        // SAFETY: both live; flags must be 0. Who waits, waits for what the event is now: it may be recorded anew at once.
        let waits = || check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(then, raw, 0) });
        let ordered = recorded.and_then(|()| waits());
        self.device.spare_events().push(SpareEvent(raw));
        ordered
    }

    /// Makes what is enqueued from now on wait for `event`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: stream and event live; flags must be 0.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// An event after everything enqueued so far. `timed`: for [`Event::since`].
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn record(self: &Arc<Self>, timed: bool) -> Result<Event, CudaError> {
        self.device.bind()?;
        let SpareEvent(raw) = if timed { create(true)? } else { self.device.event()? };
        let event = Event { stream: Arc::clone(self), raw, timed, captured: self.is_capturing() };
        // SAFETY: event and stream live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(raw, self.raw) })?;
        Ok(event)
    }
}

/// An event of the current context.
fn create(timed: bool) -> Result<SpareEvent, CudaError> {
    let mut raw = std::ptr::null_mut();
    let flags = if timed { 0 } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 };
    // SAFETY: `raw` is written to; the context is current.
    check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
    Ok(SpareEvent(raw))
}

impl Device {
    /// An event without timing, to be recorded; the context is current. Whoever is done with it puts it back: making one takes longer than recording it.
    pub(super) fn event(&self) -> Result<SpareEvent, CudaError> {
        let spare = self.spare_events().pop();
        spare.map_or_else(|| create(false), Ok)
    }
}

/// An event that nobody has any more, to be recorded anew. Who waited for it waits for what it was then.
#[derive(Debug)]
pub(super) struct SpareEvent(pub(super) sys::CUevent);

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for SpareEvent {}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            self.late().extend(self.drain_spare());
            self.give_back_late();
            if *self.is_lent.get_mut() {
                lent().push(Lent { gpu: self.device.ordinal(), priority: self.priority, raw: self.raw });
                return;
            }
            // SAFETY: nobody else has it; the driver lets what is enqueued end.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A moment in a stream. One that was recorded while the stream was captured is a place in that capture: other streams may wait
/// for it there, but it never comes by itself.
#[derive(Debug)]
pub struct Event {
    stream: Arc<Stream>,
    raw: sys::CUevent,
    timed: bool,
    captured: bool,
}

// SAFETY: the driver's events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Whether it has come.
    ///
    /// # Errors
    /// [`CudaError::Driver`]; [`CudaError::Capturing`] for one that was captured.
    pub fn has_come(&self) -> Result<bool, CudaError> {
        if self.captured {
            return Err(CudaError::Capturing { what: "a wait for an event of the capture" });
        }
        let _relaxed = Relaxed::enter();
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.raw) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Makes what is enqueued to `stream` from now on wait for it: a stream of any GPU, by the driver's handle. 0 is the default stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// `stream` lives.
    pub unsafe fn precede(&self, stream: usize) -> Result<(), CudaError> {
        self.stream.device.bind()?;
        // SAFETY: as the caller promises, and as the event lives; flags must be 0.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream as sys::CUstream, self.raw, 0) })
    }

    /// Waits for it, at most `timeout`; false when it did not come.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn wait(&self, timeout: Duration) -> Result<bool, CudaError> {
        let (began, mut pause) = (Instant::now(), Pause::default());
        while !self.has_come()? {
            if began.elapsed() > timeout {
                return Ok(false);
            }
            pause.pass();
        }
        Ok(true)
    }

    /// Microseconds from `earlier` to this event. Both were recorded with timing and have come.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn since(&self, earlier: &Self) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events live; the number is written to.
        let code = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.raw, self.raw) };
        check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.timed {
            self.stream.device.spare_events().push(SpareEvent(self.raw));
        } else if self.stream.device.bind().is_ok() {
            // SAFETY: nobody else has it.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
