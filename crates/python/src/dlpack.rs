//! Tensors that leave for Python, as DLPack capsules.
//!
//! A capsule owns its memory until somebody takes it over (`torch.from_dlpack`), who then calls its deleter, from any thread, with or
//! without the interpreter's lock. For rows of an arena that ends the lease.

use std::any::Any;
use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::away::{Away, Home};

const NAME: *const c_char = c"dltensor".as_ptr();

/// What the elements are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Element {
    U8,
    I8,
    I32,
    I64,
    F32,
    Bf16,
    /// FP8, for readers that know its name; see [`Element::plain`].
    E4m3,
}

impl Element {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::E4m3 => 1,
            Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::I64 => 8,
        }
    }

    /// In the words of readers that do not know FP8.
    pub(crate) const fn plain(self) -> Self {
        match self {
            Self::E4m3 => Self::U8,
            known => known,
        }
    }
}

/// Where the memory is.
#[derive(Clone, Debug)]
pub(crate) enum Device {
    Cpu,
    Cuda(i32),
    /// torch has no way to take such memory over: it is copied.
    Npu(Arc<Home>),
}

/// Memory with a shape.
pub(crate) struct Tensor {
    /// Of the first element.
    pub(crate) address: usize,
    pub(crate) shape: Vec<i64>,
    /// In elements; none where rows lie one behind the other.
    pub(crate) strides: Option<Vec<i64>>,
    pub(crate) element: Element,
    pub(crate) device: Device,
    /// Keeps the memory.
    pub(crate) owner: Box<dyn Any + Send>,
}

impl Tensor {
    /// For a reader that knows FP8 by name, or does not.
    pub(crate) fn named(self, knows_fp8: bool) -> Self {
        let element = if knows_fp8 { self.element } else { self.element.plain() };
        Self { element, ..self }
    }

    /// Numbers in memory of this process.
    pub(crate) fn of_vec<T: Send + 'static>(mut values: Vec<T>, shape: Vec<i64>, element: Element) -> Self {
        let address = values.as_mut_ptr() as usize;
        Self { address, shape, strides: None, element, device: Device::Cpu, owner: Box::new(values) }
    }

    /// The capsule, which owns it; of an NPU what is copied from.
    pub(crate) fn into_capsule(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        if let Device::Npu(home) = &self.device {
            let home = Arc::clone(home);
            return Ok(Bound::new(py, Away::new(self, home))?.into_any());
        }
        let managed = Box::into_raw(Managed::new(self));
        // SAFETY: the name is static; the destructor knows what it is given.
        let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME, Some(destroy)) };
        if capsule.is_null() {
            // SAFETY: nobody else has it.
            drop(unsafe { Box::from_raw(managed) });
            return Err(PyErr::fetch(py));
        }
        // SAFETY: a new reference to an object.
        Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
    }
}

#[repr(C)]
struct DlDevice {
    kind: i32,
    index: i32,
}

#[repr(C)]
struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    dimensions: i32,
    element: DlType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// DLPack's `DLManagedTensor`, and behind it what it points to.
#[repr(C)]
struct Managed {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    // From here on ours.
    shape: Vec<i64>,
    strides: Vec<i64>,
    owner: Box<dyn Any + Send>,
}

impl Managed {
    fn new(tensor: Tensor) -> Box<Self> {
        let Tensor { address, shape, strides, element, device, owner } = tensor;
        let (code, bits) = match element {
            Element::U8 => (1, 8),
            Element::I8 => (0, 8),
            Element::I32 => (0, 32),
            Element::I64 => (0, 64),
            Element::F32 => (2, 32),
            Element::Bf16 => (4, 16),
            Element::E4m3 => (10, 8),
        };
        let (kind, index) = match device {
            Device::Cpu => (1, 0),
            Device::Cuda(index) => (2, index),
            Device::Npu(_) => unreachable!("memory of NPUs leaves otherwise"),
        };
        let strides = strides.unwrap_or_else(|| {
            let mut strides: Vec<i64> = shape
                .iter()
                .rev()
                .scan(1, |step, &size| {
                    let here = *step;
                    *step *= size;
                    Some(here)
                })
                .collect();
            strides.reverse();
            strides
        });
        let mut managed = Box::new(Self {
            tensor: DlTensor {
                data: address as *mut c_void,
                device: DlDevice { kind, index },
                dimensions: shape.len() as i32,
                element: DlType { code, bits, lanes: 1 },
                shape: ptr::null_mut(),
                strides: ptr::null_mut(),
                byte_offset: 0,
            },
            context: ptr::null_mut(),
            deleter: Some(delete),
            shape,
            strides,
            owner,
        });
        managed.tensor.shape = managed.shape.as_mut_ptr();
        managed.tensor.strides = managed.strides.as_mut_ptr();
        managed
    }
}

/// Whoever took the tensor over is done with it.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: it came from `Box::into_raw`, and DLPack calls this once.
    let Managed { owner, .. } = *unsafe { Box::from_raw(managed) };
    drop(owner);
}

/// The capsule is gone. Whoever took the tensor over has renamed it.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule; pointer and name are those it was made with, unless it was renamed.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME).cast());
        }
    }
}
