//! CUDA graphs: what a stream is being captured into, what a graph keeps alive, and graphs that run.
//!
//! Work that is captured runs later, any number of times, on the same addresses. So the memory that it names must live as long as
//! the graph and everything made of it: [`Capture::keep`] ties it to them. The driver says when the last of them is gone and has
//! ended, from a thread that must not call the driver; a thread of our own then drops the memory.

use std::any::Any;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::thread;

use cudarc::driver::sys;

use super::{Device, Scratch, Stream, check};
use crate::error::CudaError;

/// What a graph keeps alive.
pub(crate) type Kept = Vec<Arc<dyn Any + Send + Sync>>;

/// A capture under way.
#[derive(Debug)]
pub(crate) struct Capture {
    /// No other capture of this process has it.
    pub(crate) id: u64,
    graph: sys::CUgraph,
}

impl Stream {
    /// The capture that work enqueued now goes to; none where it runs.
    ///
    /// # Errors
    /// [`CudaError::Driver`]: something has invalidated the capture.
    pub(crate) fn capture(&self) -> Result<Option<Capture>, CudaError> {
        self.device().bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut id, mut graph) = (0, std::ptr::null_mut());
        // SAFETY: the stream lives; status, id and graph are written to, what is null is not.
        let code = unsafe {
            sys::cuStreamGetCaptureInfo_v3(
                self.raw(),
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            )
        };
        check("cuStreamGetCaptureInfo", code)?;
        match status {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some(Capture { id, graph })),
            _ => Err(CudaError::Driver { call: "cuStreamGetCaptureInfo", code: "the capture was invalidated".into() }),
        }
    }

    /// Whether work enqueued now is captured into a graph, or was to be before the capture was invalidated.
    pub fn is_capturing(&self) -> bool {
        if self.device().bind().is_err() {
            return false;
        }
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream lives; `status` is written to.
        let code = unsafe { sys::cuStreamIsCapturing(self.raw(), &raw mut status) };
        code == sys::CUresult::CUDA_SUCCESS && status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    }

    /// Refuses `what`, which waits for the stream, while it is captured: asking the driver for it would invalidate the capture.
    pub(crate) fn must_run(&self, what: &'static str) -> Result<(), CudaError> {
        if self.is_capturing() { Err(CudaError::Capturing { what }) } else { Ok(()) }
    }

    /// From now on, until [`Stream::end_capture`] on the same thread, work is not run but captured. Other threads are not hindered.
    ///
    /// # Errors
    /// [`CudaError::Driver`], where it is captured already.
    pub fn begin_capture(&self) -> Result<(), CudaError> {
        self.device().bind()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.raw(), mode) })
    }

    /// Ends a capture and makes its graph ready to run.
    ///
    /// # Errors
    /// [`CudaError::Driver`]: nothing was captured, the capture was invalidated, or work cannot be replayed.
    pub fn end_capture(&self) -> Result<Graph, CudaError> {
        self.device().bind()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives; `graph` is written to.
        check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.raw(), &raw mut graph) })?;
        let mut exec = std::ptr::null_mut();
        // SAFETY: `exec` is written to; the graph is the one just captured.
        let made = check("cuGraphInstantiate", unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) });
        // SAFETY: what was made of it keeps what it needs; nobody else has it.
        unsafe { sys::cuGraphDestroy(graph) };
        made?;
        let graph = Graph { device: Arc::clone(self.device()), exec };
        // SAFETY: both live. What the first launch would take is taken now.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(graph.exec, self.raw()) })?;
        Ok(graph)
    }
}

#[cfg(test)]
impl Capture {
    /// One that is not under way, for what looks at its number alone.
    pub(crate) const fn of_nothing(id: u64) -> Self {
        Self { id, graph: std::ptr::null_mut() }
    }
}

impl Capture {
    /// Keeps `what` until the graph, and everything made of it, is gone and has ended.
    pub(crate) fn keep(&self, what: Kept) -> Result<(), CudaError> {
        undertaker();
        let kept = Box::into_raw(Box::new(what));
        let mut object = std::ptr::null_mut();
        let flags = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
        // SAFETY: `object` is written to; `let_go` takes what was boxed here, once.
        let code = unsafe { sys::cuUserObjectCreate(&raw mut object, kept.cast(), Some(let_go), 1, flags) };
        if let Err(error) = check("cuUserObjectCreate", code) {
            // SAFETY: there is no object that would free it.
            drop(unsafe { Box::from_raw(kept) });
            return Err(error);
        }
        let flags = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
        // SAFETY: the capture is under way, so its graph lives; the one reference goes over to it.
        let code = unsafe { sys::cuGraphRetainUserObject(self.graph, object, 1, flags) };
        check("cuGraphRetainUserObject", code).inspect_err(|_| {
            // SAFETY: the reference is still ours.
            unsafe { sys::cuUserObjectRelease(object, 1) };
        })
    }
}

/// Called by the driver when nothing of a graph is left; must not call it.
unsafe extern "C" fn let_go(kept: *mut c_void) {
    // SAFETY: boxed by `Capture::keep`, and given to the driver for this one call.
    let kept = unsafe { Box::from_raw(kept.cast::<Kept>()) };
    match undertaker() {
        // An undertaker ends with the process only.
        Some(undertaker) => drop(undertaker.send(*kept)),
        // Freeing would call the driver.
        None => std::mem::forget(kept),
    }
}

thread_local! {
    /// Whether this thread drops what graphs have kept, while others may be capturing the streams that it was used on.
    static BURIES: Cell<bool> = const { Cell::new(false) };
}

/// Whether memory dropped by this thread must be given back by another one.
pub(super) fn buries() -> bool {
    BURIES.get()
}

/// Drops what it is sent. None where the system has no thread for it: then that is kept for ever.
fn undertaker() -> Option<&'static mpsc::Sender<Kept>> {
    static UNDERTAKER: OnceLock<Option<mpsc::Sender<Kept>>> = OnceLock::new();
    let begin = || {
        let (sender, receiver) = mpsc::channel::<Kept>();
        let work = move || {
            BURIES.set(true);
            receiver.into_iter().for_each(drop);
        };
        thread::Builder::new().name("ep-cuda-graphs".into()).spawn(work).ok().map(|_| sender)
    };
    UNDERTAKER.get_or_init(begin).as_ref()
}

/// Takes `bytes` bytes of the pool for work that is captured: beside the capture, so that they are the process's and not the graph's. Zeros: a call may read
/// what the graph is to write there before it has run.
pub(super) fn take_beside(device: &Arc<Device>, bytes: usize) -> Result<u64, CudaError> {
    beside(device, |stream| {
        let address = Scratch::take(stream, bytes)?;
        // SAFETY: so many bytes lie there, of which nobody else knows yet.
        unsafe { stream.fill(address, 0, bytes) }?;
        Ok(address)
    })
}

/// Fills what [`take_beside`] took.
///
/// # Safety
/// So many bytes lie there, and nobody else reads or writes them.
pub(super) unsafe fn fill_beside(device: &Arc<Device>, address: u64, byte: u8, bytes: usize) -> Result<(), CudaError> {
    // SAFETY: as the caller promises.
    beside(device, |stream| unsafe { stream.fill(address, byte, bytes) })
}

/// Does something on a stream of its own, and waits for that.
fn beside<T>(device: &Arc<Device>, work: impl FnOnce(&Stream) -> Result<T, CudaError>) -> Result<T, CudaError> {
    let mut beside = device.beside.lock().unwrap_or_else(PoisonError::into_inner);
    let stream = match &*beside {
        Some(stream) => stream,
        None => beside.insert(Stream::make(device, 0)?),
    };
    let done = work(stream)?;
    // Nothing else is on this stream, and the pool makes it wait for nobody: the memory is there now, for every stream.
    stream.synchronize()?;
    Ok(done)
}

/// The stream of [`take_beside`].
pub(super) type Beside = Mutex<Option<Stream>>;

/// Captured work, ready to run any number of times. What it names lives as long.
#[derive(Debug)]
pub struct Graph {
    device: Arc<Device>,
    exec: sys::CUgraphExec,
}

// SAFETY: executable graphs may be used from any thread, by one at a time: launches take the graph exclusively.
unsafe impl Send for Graph {}

impl Graph {
    /// Runs it once, on `stream`. Runs of one graph follow each other, on whatever streams.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn launch(&mut self, stream: &Stream) -> Result<(), CudaError> {
        self.device.bind()?;
        // SAFETY: both live; what the graph names is kept by it.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: nobody else has it; the driver lets what runs end.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}
