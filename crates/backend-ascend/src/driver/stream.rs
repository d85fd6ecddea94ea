//! Streams, events and launches.

use std::ffi::{CString, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use super::{
    AscendError, BATCH, Device, EVENT_COMPLETE, LaunchAttribute, LaunchConfig, Memory, RT_FILE_OPEN, SCHEDULE_MODE,
    check, name_of,
};

/// A kernel of a binary that stays loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel(*mut c_void);

impl Kernel {
    /// Kernels of a file, by name.
    pub(crate) fn load<const N: usize>(
        device: &Device,
        path: &Path,
        names: [&str; N],
    ) -> Result<[Self; N], AscendError> {
        let table = device.bind()?;
        let no_text =
            |_| AscendError::Call { call: "aclrtBinaryLoadFromFile", cause: name_of(RT_FILE_OPEN), code: RT_FILE_OPEN };
        let file = CString::new(path.as_os_str().as_encoded_bytes()).map_err(no_text)?;
        let mut binary = ptr::null_mut();
        // SAFETY: the path ends with zero, there are no options, and `binary` is written to.
        let code = unsafe { table.load_binary()?(file.as_ptr(), ptr::null(), &raw mut binary) };
        check(table, "aclrtBinaryLoadFromFile", code)?;
        let mut kernels = [Self(ptr::null_mut()); N];
        for (name, kernel) in names.into_iter().zip(&mut kernels) {
            let name = CString::new(name).map_err(no_text)?;
            // SAFETY: the binary is loaded, the name ends with zero, and the handle is written to.
            let code = unsafe { table.get_function()?(binary, name.as_ptr(), &raw mut kernel.0) };
            check(table, "aclrtBinaryGetFunction", code)?;
        }
        Ok(kernels)
    }
}

/// A stream of a device.
#[derive(Debug)]
pub(crate) struct Stream {
    device: Arc<Device>,
    stream: *mut c_void,
}

impl Stream {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, AscendError> {
        let table = device.bind()?;
        let mut stream = ptr::null_mut();
        // SAFETY: `stream` is written to.
        check(table, "aclrtCreateStream", unsafe { table.create_stream()?(&raw mut stream) })?;
        Ok(Self { device: Arc::clone(device), stream })
    }

    pub(crate) const fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Enqueues a launch of `blocks` blocks, all resident at the same time, whose one parameter is the address of `args`.
    ///
    /// # Safety
    /// What `args` names is memory of the device, or windows that it reaches, with room for what the kernel's parameters say of it. It and
    /// `args` stay until the launch has ended.
    pub(crate) unsafe fn launch(&self, kernel: Kernel, blocks: u32, args: &Memory) -> Result<(), AscendError> {
        let table = self.device.bind()?;
        let mut list = ptr::null_mut();
        // SAFETY: the kernel's binary stays loaded, and `list` is written to.
        check(table, "aclrtKernelArgsInit", unsafe { table.init_args()?(kernel.0, &raw mut list) })?;
        let (mut address, mut parameter) = (args.address(), ptr::null_mut());
        // SAFETY: 8 bytes are copied from `address`; `parameter` is written to.
        let code =
            unsafe { table.append_arg()?(list, (&raw mut address).cast(), size_of::<u64>(), &raw mut parameter) };
        check(table, "aclrtKernelArgsAppend", code)?;
        // SAFETY: the list was made above.
        check(table, "aclrtKernelArgsFinalize", unsafe { table.finalize_args()?(list) })?;
        let attributes = [LaunchAttribute { id: SCHEDULE_MODE, value: [BATCH, 0, 0, 0] }];
        let config = LaunchConfig { attributes: attributes.as_ptr(), count: attributes.len() };
        // SAFETY: kernel, stream and list live; the configuration is read before the call returns. Of the parameters the caller promises it.
        let code = unsafe { table.launch()?(kernel.0, blocks, self.stream, &raw const config, list, ptr::null_mut()) };
        check(table, "aclrtLaunchKernelWithConfig", code)
    }

    /// The end of what is enqueued.
    pub(crate) fn record(&self) -> Result<Event, AscendError> {
        let table = self.device.bind()?;
        let mut event = ptr::null_mut();
        // SAFETY: `event` is written to.
        check(table, "aclrtCreateEvent", unsafe { table.create_event()?(&raw mut event) })?;
        let event = Event { device: Arc::clone(&self.device), event };
        // SAFETY: both live.
        check(table, "aclrtRecordEvent", unsafe { table.record_event()?(event.event, self.stream) })?;
        Ok(event)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A device that answers the second time is still there.
        let Ok(table) = self.device.bind().or_else(|_| self.device.bind()) else { return };
        if let Some(destroy) = table.destroy_stream {
            // SAFETY: it was made by this table, and nobody uses it any more.
            unsafe { destroy(self.stream) };
        }
    }
}

/// A place in a stream.
#[derive(Debug)]
pub(crate) struct Event {
    device: Arc<Device>,
    event: *mut c_void,
}

impl Event {
    /// Whether all that was enqueued before it has ended.
    pub(crate) fn has_come(&self) -> Result<bool, AscendError> {
        let table = self.device.bind()?;
        let mut status = 0;
        // SAFETY: the event lives, and `status` is written to.
        check(table, "aclrtQueryEventStatus", unsafe { table.query_event()?(self.event, &raw mut status) })?;
        Ok(status == EVENT_COMPLETE)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // A device that answers the second time is still there.
        let Ok(table) = self.device.bind().or_else(|_| self.device.bind()) else { return };
        if let Some(destroy) = table.destroy_event {
            // SAFETY: it was made by this table, and nobody uses it any more.
            unsafe { destroy(self.event) };
        }
    }
}
