//! Streams, events and launches.

use std::ffi::{CString, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use super::{
    AscendError, BATCH, DEVICE_TO_DEVICE, Device, EVENT_COMPLETE, LaunchAttribute, LaunchConfig, Memory, RT_FILE_OPEN,
    SCHEDULE_MODE, STOP_ON_FAILURE, TIMEOUT, check, name_of,
};

/// Seconds, less than those after which the runtime ends a kernel of its own accord where nothing is said: 1091 on Atlas A2.
const USUALLY_ALLOWED: u64 = 1000;

/// By what a library calls something of its own.
#[derive(Clone, Copy, Debug)]
struct Object(*mut c_void);

// SAFETY: it is not followed here, only given back to the library, which takes it from any thread that has named its device before. Every call
// here does.
unsafe impl Send for Object {}
// SAFETY: as above; the library's functions may be called at the same time.
unsafe impl Sync for Object {}

/// A kernel of a binary that stays loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel(Object);

impl Kernel {
    /// Kernels of a file, by name.
    pub(crate) fn load<const N: usize>(
        device: &Device,
        path: &Path,
        names: [&str; N],
    ) -> Result<[Self; N], AscendError> {
        let table = device.bind()?;
        let unread = |cause| AscendError::KernelsUnread { path: path.display().to_string(), cause };
        let no_text = |_| unread(name_of(RT_FILE_OPEN));
        let file = CString::new(path.as_os_str().as_encoded_bytes()).map_err(no_text)?;
        let mut binary = ptr::null_mut();
        // SAFETY: the path ends with zero, there are no options, and `binary` is written to.
        let code = unsafe { table.load_binary()?(file.as_ptr(), ptr::null(), &raw mut binary) };
        check(table, "aclrtBinaryLoadFromFile", code).map_err(|error| unread(error.to_string()))?;
        let mut kernels = [Self(Object(ptr::null_mut())); N];
        for (name, kernel) in names.into_iter().zip(&mut kernels) {
            let name = CString::new(name).map_err(no_text)?;
            // SAFETY: the binary is loaded, the name ends with zero, and the handle is written to.
            let code = unsafe { table.get_function()?(binary, name.as_ptr(), &raw mut kernel.0.0) };
            check(table, "aclrtBinaryGetFunction", code)?;
        }
        Ok(kernels)
    }
}

/// A stream of a device: what is enqueued to it is done in that order.
#[derive(Debug)]
pub struct Stream {
    device: Arc<Device>,
    stream: Object,
}

impl Stream {
    /// A new one.
    ///
    /// # Errors
    /// What the table says.
    pub fn new(device: &Arc<Device>) -> Result<Self, AscendError> {
        let table = device.bind()?;
        let mut stream = ptr::null_mut();
        // SAFETY: `stream` is written to.
        check(table, "aclrtCreateStream", unsafe { table.create_stream()?(&raw mut stream) })?;
        let this = Self { device: Arc::clone(device), stream: Object(stream) };
        // Otherwise an event behind a kernel that has crashed comes as if it had ended well.
        // SAFETY: the stream lives.
        let code = unsafe { table.set_failure_mode()?(this.stream.0, STOP_ON_FAILURE) };
        check(table, "aclrtSetStreamFailureMode", code)?;
        Ok(this)
    }

    /// Whose it is.
    pub const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Enqueues a launch of `blocks` blocks, all resident at the same time, whose one parameter is the address of `args`. It ends by itself within
    /// `longest` nanoseconds.
    ///
    /// # Safety
    /// What `args` names is memory of the device, or windows that it reaches, with room for what the kernel's parameters say of it. It and
    /// `args` stay until the launch has ended.
    pub(crate) unsafe fn launch(
        &self,
        kernel: Kernel,
        blocks: u32,
        args: &Memory,
        longest: u64,
    ) -> Result<(), AscendError> {
        let table = self.device.bind()?;
        let mut list = ptr::null_mut();
        // SAFETY: the kernel's binary stays loaded, and `list` is written to.
        check(table, "aclrtKernelArgsInit", unsafe { table.init_args()?(kernel.0.0, &raw mut list) })?;
        let (mut address, mut parameter) = (args.address(), ptr::null_mut());
        // SAFETY: 8 bytes are copied from `address`; `parameter` is written to.
        let code =
            unsafe { table.append_arg()?(list, (&raw mut address).cast(), size_of::<u64>(), &raw mut parameter) };
        check(table, "aclrtKernelArgsAppend", code)?;
        // SAFETY: the list was made above.
        check(table, "aclrtKernelArgsFinalize", unsafe { table.finalize_args()?(list) })?;
        let seconds = longest.div_ceil(1_000_000_000);
        let allowed = u32::try_from(seconds).unwrap_or(u32::MAX).min(u16::MAX.into());
        let attributes = [
            LaunchAttribute { id: SCHEDULE_MODE, value: [BATCH, 0, 0, 0] },
            LaunchAttribute { id: TIMEOUT, value: [allowed, 0, 0, 0] },
        ];
        let count = if seconds < USUALLY_ALLOWED { 1 } else { attributes.len() };
        let config = LaunchConfig { attributes: attributes.as_ptr(), count };
        // SAFETY: kernel, stream and list live; the configuration is read before the call returns. Of the parameters the caller promises it.
        let code =
            unsafe { table.launch()?(kernel.0.0, blocks, self.stream.0, &raw const config, list, ptr::null_mut()) };
        check(table, "aclrtLaunchKernelWithConfig", code)
    }

    /// The library's own name for it, for those who call the library themselves. It lives as long as this value.
    pub fn lend(&self) -> u64 {
        self.stream.0 as u64
    }

    /// The end of what is enqueued.
    ///
    /// # Errors
    /// What the table says.
    pub fn record(&self) -> Result<Event, AscendError> {
        // SAFETY: it lives.
        unsafe { self.recorded(self.stream.0) }
    }

    /// An event behind what `stream` holds.
    ///
    /// # Safety
    /// `stream` is one of this device, and lives.
    unsafe fn recorded(&self, stream: *mut c_void) -> Result<Event, AscendError> {
        let table = self.device.bind()?;
        let mut event = ptr::null_mut();
        // SAFETY: `event` is written to.
        check(table, "aclrtCreateEvent", unsafe { table.create_event()?(&raw mut event) })?;
        let event = Event { device: Arc::clone(&self.device), event: Object(event) };
        // SAFETY: the event lives, and by the caller's word the stream.
        check(table, "aclrtRecordEvent", unsafe { table.record_event()?(event.event.0, stream) })?;
        Ok(event)
    }

    /// What is enqueued here from now on comes behind what another stream holds now, a user's for instance. The event that it comes behind: it
    /// must be kept until something that was enqueued behind it has ended.
    ///
    /// # Errors
    /// What the table says.
    ///
    /// # Safety
    /// `stream` is one of this device by the library's own name, and lives.
    pub unsafe fn follow(&self, stream: u64) -> Result<Event, AscendError> {
        // SAFETY: as the caller promises.
        let event = unsafe { self.recorded(stream as *mut c_void) }?;
        let table = self.device.bind()?;
        // SAFETY: both live, the event as long as the caller keeps it.
        check(table, "aclrtStreamWaitEvent", unsafe { table.wait_event()?(self.stream.0, event.event.0) })?;
        Ok(event)
    }

    /// Lets what is enqueued to another stream from now on come behind what this one holds. The event that it comes behind, and one behind that
    /// on the other stream: the first must be kept until the second has come.
    ///
    /// # Errors
    /// What the table says.
    ///
    /// # Safety
    /// As [`Stream::follow`].
    pub unsafe fn lead(&self, stream: u64) -> Result<[Event; 2], AscendError> {
        let (event, table) = (self.record()?, self.device.bind()?);
        // SAFETY: the event lives as long as the caller keeps it, and by the caller's word the stream lives.
        check(table, "aclrtStreamWaitEvent", unsafe { table.wait_event()?(stream as *mut c_void, event.event.0) })?;
        // SAFETY: by the caller's word the stream lives.
        match unsafe { self.recorded(stream as *mut c_void) } {
            Ok(passed) => Ok([event, passed]),
            Err(error) => {
                // Nobody can say when the other stream has passed it.
                std::mem::forget(event);
                Err(error)
            }
        }
    }

    /// Enqueues a copy from memory of the device to memory of the device.
    ///
    /// # Errors
    /// What the table says.
    ///
    /// # Safety
    /// So many bytes of the device's memory lie at both, until what was enqueued has ended.
    pub unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), AscendError> {
        if bytes == 0 {
            return Ok(());
        }
        let table = self.device.bind()?;
        let (to, from) = (to as *mut c_void, from as *const c_void);
        // SAFETY: as the caller promises; the stream lives.
        let code = unsafe { table.memcpy_in_order()?(to, bytes, from, bytes, DEVICE_TO_DEVICE, self.stream.0) };
        check(table, "aclrtMemcpyAsync", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A device that answers the second time is still there.
        let Ok(table) = self.device.bind().or_else(|_| self.device.bind()) else { return };
        if let Some(destroy) = table.destroy_stream {
            // SAFETY: it was made by this table, and nobody uses it any more.
            unsafe { destroy(self.stream.0) };
        }
    }
}

/// A place in a stream.
#[derive(Debug)]
pub struct Event {
    device: Arc<Device>,
    event: Object,
}

impl Event {
    /// Whether all that was enqueued before it has ended.
    ///
    /// # Errors
    /// What the table says.
    pub fn has_come(&self) -> Result<bool, AscendError> {
        let table = self.device.bind()?;
        let mut status = 0;
        // SAFETY: the event lives, and `status` is written to.
        check(table, "aclrtQueryEventStatus", unsafe { table.query_event()?(self.event.0, &raw mut status) })?;
        Ok(status == EVENT_COMPLETE)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // A device that answers the second time is still there.
        let Ok(table) = self.device.bind().or_else(|_| self.device.bind()) else { return };
        if let Some(destroy) = table.destroy_event {
            // SAFETY: it was made by this table, and nobody uses it any more.
            unsafe { destroy(self.event.0) };
        }
    }
}
