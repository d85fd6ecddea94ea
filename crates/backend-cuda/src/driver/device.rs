//! A GPU and its primary context.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};

use super::check;
use super::relaxed::Relaxed;
use crate::error::CudaError;

/// One GPU. The same value for everybody in the process who opens the same ordinal; its context lives as long as the process.
#[derive(Debug)]
pub struct Device {
    ordinal: usize,
    context: sys::CUcontext,
    capability: (u32, u32),
    multiprocessors: u32,
    shared_memory: u32,
    /// Of the PCI bus, as the system writes it; none where the driver does not tell.
    pci: Option<String>,
    /// Of stream-ordered memory.
    pool: sys::CUmemoryPool,
    pub(crate) kept: Mutex<super::memory::Kept>,
    pub(super) beside: super::graph::Beside,
    /// Blocks of other processes.
    pub(super) imports: Mutex<super::ipc::Imports>,
    /// Memory that is freed when what may read it has ended.
    pub(super) deferred: Mutex<super::deferred::Deferred>,
    /// One at a time looks what is free, and takes some of it.
    pub(crate) takes: Mutex<()>,
    /// Events without timing.
    events: Mutex<Vec<super::stream::SpareEvent>>,
}

// SAFETY: contexts may be used from any thread; all that is mutable is behind the mutex.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

static OPEN: Mutex<Option<HashMap<usize, Arc<Device>>>> = Mutex::new(None);

impl Device {
    /// Opens GPU `ordinal`.
    ///
    /// # Errors
    /// Those of [`super::devices`]; [`CudaError::NoSuchDevice`], [`CudaError::TooOld`], [`CudaError::Driver`].
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let present = super::devices()?;
        if ordinal >= present {
            return Err(CudaError::NoSuchDevice { ordinal, present });
        }
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let open = open.get_or_insert_default();
        if let Some(device) = open.get(&ordinal) {
            return Ok(Arc::clone(device));
        }
        let device = Arc::new(Self::retain(ordinal)?);
        open.insert(ordinal, Arc::clone(&device));
        Ok(device)
    }

    fn retain(ordinal: usize) -> Result<Self, CudaError> {
        let mut device = 0;
        // SAFETY: the driver is open; `device` is written to.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal as i32) })?;
        let attribute = |attribute| read_attribute(device, attribute);
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(CudaError::TooOld { ordinal, major, minor });
        }
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_memory = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let place = [
            Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
            Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
            Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
        ];
        let pci = match place.map(attribute) {
            [Ok(domain), Ok(bus), Ok(device)] => Some(format!("{domain:04x}:{bus:02x}:{device:02x}.0")),
            _ => None,
        };
        let mut context = std::ptr::null_mut();
        // SAFETY: `context` is written to. It is never released: kept memory lives in it.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
        // SAFETY: the context is retained for ever.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(context) })?;
        Ok(Self {
            ordinal,
            context,
            capability: (major, minor),
            multiprocessors,
            shared_memory,
            pci,
            pool: pool(device)?,
            kept: Mutex::default(),
            beside: Mutex::default(),
            imports: Mutex::default(),
            deferred: Mutex::default(),
            takes: Mutex::default(),
            events: Mutex::default(),
        })
    }

    /// An attribute of it; 0 for a negative one.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(super) fn attribute(&self, attribute: Attribute) -> Result<u32, CudaError> {
        // Devices are their ordinals.
        read_attribute(self.ordinal as i32, attribute)
    }

    /// Makes its context that of the calling thread.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained for ever.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Events to be recorded again.
    pub(super) fn spare_events(&self) -> MutexGuard<'_, Vec<super::stream::SpareEvent>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where stream-ordered memory comes from.
    pub(crate) const fn pool(&self) -> sys::CUmemoryPool {
        self.pool
    }

    /// Its number among the visible GPUs.
    pub const fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Bytes of its memory that are left to this process: what the driver has free, what was dropped and is kept, and what its pool
    /// holds for later.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn left(&self) -> Result<u64, CudaError> {
        self.sweep();
        let (free, _) = self.memory()?;
        let pooled = |attribute| {
            let mut bytes = 0_u64;
            // SAFETY: the pool lives for ever; these attributes are u64, which are written to.
            let code = unsafe { sys::cuMemPoolGetAttribute(self.pool, attribute, (&raw mut bytes).cast()) };
            check("cuMemPoolGetAttribute", code).map(|()| bytes)
        };
        let held = pooled(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        let used = pooled(sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?;
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).bytes();
        Ok(free.saturating_add(kept).saturating_add(held.saturating_sub(used)))
    }

    /// Bytes of its memory that the driver has free, and all that it has.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub(crate) fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let _relaxed = Relaxed::enter();
        let (mut free, mut all) = (0, 0);
        // SAFETY: the context is current; both numbers are written to.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut all) })?;
        Ok((free as u64, all as u64))
    }

    /// How many blocks of its memory were dropped and are kept for the next who asks for so many bytes.
    #[cfg(feature = "workshop")]
    pub fn kept_of(&self, bytes: usize) -> usize {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).blocks_of(bytes)
    }

    /// Where it is on the PCI bus, as the system writes it; none where the driver does not tell.
    pub(crate) fn pci(&self) -> Option<&str> {
        self.pci.as_deref()
    }

    /// Streaming multiprocessors.
    pub const fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Bytes of dynamic shared memory that one block may have; a little is left to kernels' own variables.
    pub const fn shared_memory(&self) -> u32 {
        self.shared_memory.saturating_sub(1024)
    }

    /// The architecture that kernels are compiled for, such as `sm_90a`.
    pub fn arch(&self) -> String {
        let (major, minor) = self.capability;
        format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
    }

    /// Whether a launch may begin while the one before it ends.
    pub(crate) const fn has_dependent_launches(&self) -> bool {
        self.capability.0 >= 9
    }

    /// Lets this GPU's kernels reach `peer`'s memory.
    ///
    /// # Errors
    /// [`CudaError::NoPeerAccess`], [`CudaError::Driver`].
    pub fn reach(&self, peer: &Self) -> Result<(), CudaError> {
        if self.ordinal == peer.ordinal {
            return Ok(());
        }
        let mut possible = 0;
        let (from, to) = (self.ordinal as i32, peer.ordinal as i32);
        // SAFETY: ordinals are those of devices, which are their numbers; `possible` is written to.
        check("cuDeviceCanAccessPeer", unsafe { sys::cuDeviceCanAccessPeer(&raw mut possible, from, to) })?;
        if possible == 0 {
            return Err(CudaError::NoPeerAccess { from: self.ordinal, to: peer.ordinal });
        }
        self.bind()?;
        // SAFETY: the peer's context is retained for ever; flags must be 0.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.context, 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => check("cuCtxEnablePeerAccess", code),
        }
    }
}

fn read_attribute(device: sys::CUdevice, attribute: Attribute) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: the driver is open; `value` is written to.
    check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) })?;
    Ok(u32::try_from(value).unwrap_or(0))
}

/// A pool of a GPU's memory that keeps what is given back, since returning it to the system would synchronise, and that never
/// makes one stream wait for another: what was given back behind a kernel that waits for a peer is not for that peer's stream.
fn pool(device: sys::CUdevice) -> Result<sys::CUmemoryPool, CudaError> {
    let properties = sys::CUmemPoolProps {
        allocType: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device },
        win32SecurityAttributes: std::ptr::null_mut(),
        maxSize: 0,
        usage: 0,
        reserved: [0; 54],
    };
    let mut pool = std::ptr::null_mut();
    // SAFETY: `pool` is written to; the properties are those of a GPU's memory.
    check("cuMemPoolCreate", unsafe { sys::cuMemPoolCreate(&raw mut pool, &raw const properties) })?;
    let mut threshold = u64::MAX;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: this attribute is a u64, which is read from.
    let code = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut threshold).cast()) };
    check("cuMemPoolSetAttribute", code)?;
    let mut no = 0_i32;
    let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
    // SAFETY: this attribute is an int, which is read from.
    let code = unsafe { sys::cuMemPoolSetAttribute(pool, attribute, (&raw mut no).cast()) };
    check("cuMemPoolSetAttribute", code)?;
    Ok(pool)
}
