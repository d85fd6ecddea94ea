//! Modules and launches.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys;

use super::relaxed::Relaxed;
use super::{Device, Stream, check};
use crate::build::is_whole;
use crate::error::CudaError;

/// Kernels loaded into a GPU. Never unloaded: unloading waits for the device.
#[derive(Debug)]
pub(crate) struct Module {
    device: Arc<Device>,
    raw: sys::CUmodule,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin.
    ///
    /// # Errors
    /// [`CudaError::Driver`], also for what is no whole cubin: the driver reads as far as the headers say.
    pub(crate) fn load(device: &Arc<Device>, cubin: &[u8]) -> Result<Self, CudaError> {
        is_whole(cubin).map_err(|problem| CudaError::Driver { call: "image of a module", code: problem.into() })?;
        device.bind()?;
        let _relaxed = Relaxed::enter();
        let mut raw = std::ptr::null_mut();
        // SAFETY: all that its headers name lies in the image; the driver copies it. The code in it runs in launches only, which
        // are unsafe.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut raw, cubin.as_ptr().cast()) })?;
        Ok(Self { device: Arc::clone(device), raw })
    }

    /// The kernel `name`, brought to the device now: a lazy load at its first launch could wait for kernels that wait for it.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(crate) fn kernel(&self, name: &str, shared_memory: u32) -> Result<Kernel, CudaError> {
        self.device.bind()?;
        let name = CString::new(name).map_err(|_| CudaError::Driver { call: "name of a kernel", code: name.into() })?;
        let _relaxed = Relaxed::enter();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module lives for ever; the name ends with zero.
        check("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&raw mut raw, self.raw, name.as_ptr()) })?;
        // SAFETY: the function is the module's, which is never unloaded.
        check("cuFuncLoad", unsafe { sys::cuFuncLoad(raw) })?;
        if shared_memory > 48 << 10 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: as above.
            let code = unsafe { sys::cuFuncSetAttribute(raw, attribute, shared_memory as i32) };
            check("cuFuncSetAttribute", code)?;
        }
        Ok(Kernel { raw })
    }
}

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    raw: sys::CUfunction,
}

// SAFETY: functions may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    /// Blocks.
    pub(crate) blocks: u32,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub(crate) shared_memory: u32,
    /// What its blocks run beside.
    pub(crate) mode: Mode,
}

/// What the blocks of a launch run beside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// No other launch of the stream.
    Plain,
    /// All of them beside each other, because they wait for others.
    Cooperative,
    /// The end of the launch before, where the GPU can: the kernel has `ep_wait_for_launches_before` before whatever is to come behind that.
    Dependent,
}

impl Mode {
    /// How the driver is asked for it; not at all, where there is nothing to ask for: that takes time, too.
    fn attribute(self, device: &Device) -> Option<sys::CUlaunchAttribute> {
        let (id, value) = match self {
            Self::Cooperative => (
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
                sys::CUlaunchAttributeValue { cooperative: 1 },
            ),
            Self::Dependent if device.has_dependent_launches() => (
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            ),
            Self::Plain | Self::Dependent => return None,
        };
        Some(sys::CUlaunchAttribute { id, pad: [0; 4], value })
    }
}

impl Kernel {
    /// Enqueues it. `rank` and `args` are its two parameters, by value.
    ///
    /// # Safety
    /// `R` and `A` are the kernel's parameter types, and the addresses in them stay valid until it has ended.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(crate) unsafe fn launch<R, A>(
        &self,
        stream: &Stream,
        shape: Launch,
        rank: &R,
        args: &A,
    ) -> Result<(), CudaError> {
        let parameters = [
            std::ptr::from_ref(rank).cast_mut().cast::<c_void>(),
            std::ptr::from_ref(args).cast_mut().cast::<c_void>(),
        ];
        // SAFETY: as the caller promises; the stream lives.
        unsafe { self.enqueue(stream.device(), stream.raw(), shape, parameters) }
    }

    /// Enqueues one whose only parameter is `args`, to a stream by the driver's handle.
    ///
    /// # Safety
    /// As [`Kernel::launch`]; and the stream is of this GPU and lives.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(crate) unsafe fn launch_alone<A>(
        &self,
        device: &Device,
        stream: usize,
        shape: Launch,
        args: &A,
    ) -> Result<(), CudaError> {
        let parameters = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: as the caller promises.
        unsafe { self.enqueue(device, stream as sys::CUstream, shape, parameters) }
    }

    /// # Safety
    /// `parameters` point to what the kernel takes; the stream lives.
    unsafe fn enqueue<const N: usize>(
        &self,
        device: &Device,
        stream: sys::CUstream,
        shape: Launch,
        mut parameters: [*mut c_void; N],
    ) -> Result<(), CudaError> {
        device.bind()?;
        let mut attribute = shape.mode.attribute(device);
        let (attrs, num_attrs) =
            attribute.as_mut().map_or((std::ptr::null_mut(), 0), |one| (std::ptr::from_mut(one), 1));
        let config = sys::CUlaunchConfig {
            gridDimX: shape.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_memory,
            hStream: stream,
            attrs,
            numAttrs: num_attrs,
        };
        // SAFETY: the caller vouches for the parameters; the driver copies them before it returns.
        let code = unsafe {
            sys::cuLaunchKernelEx(&raw const config, self.raw, parameters.as_mut_ptr(), std::ptr::null_mut())
        };
        check("cuLaunchKernelEx", code)
    }
}
