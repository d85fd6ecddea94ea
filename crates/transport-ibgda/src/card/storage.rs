//! Memory of queues: elements, completions, records. On the device where an adapter can be shown its memory, else on the host.

use std::ffi::c_void;
use std::fmt;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use ep_rdma::sys::ACCESS_LOCAL_WRITE;
use ep_rdma::{Part, Region, Way};

use super::{Context, Domain};
use crate::error::Error;
use crate::sys;
use ep_core::transport::{Home, PostingDevice, PostingMemory};

/// Bytes of a page as adapters count: what begins in memory of queues begins at a multiple.
pub(super) const PAGE: u64 = 4096;
/// Memory is taken in multiples of this: a device's driver gives descriptors for no less.
const GRANULE: usize = 1 << 16;

/// Memory that an adapter may use for queues (umem).
#[derive(Debug)]
struct Umem {
    context: Context,
    raw: NonNull<sys::Umem>,
}

// SAFETY: libmlx5 allows any thread to use it.
unsafe impl Send for Umem {}

impl Umem {
    fn new(context: &Context, memory: &impl PostingMemory, way: Way<'_>) -> Result<Self, Error> {
        let (functions, access) = (context.functions(), ACCESS_LOCAL_WRITE);
        let (call, raw) = match way {
            Way::Dmabuf(file) => {
                let missing = ep_rdma::Error::Symbol { name: "mlx5dv_devx_umem_reg_ex" };
                let register = functions.mlx5dv_devx_umem_reg_ex.ok_or(missing)?;
                let mut what = sys::UmemIn {
                    // Counted from the descriptor's beginning.
                    addr: std::ptr::null_mut(),
                    size: memory.bytes(),
                    access,
                    pgsz_bitmap: !(PAGE - 1),
                    comp_mask: sys::UMEM_DMABUF,
                    dmabuf_fd: file.as_raw_fd(),
                };
                // SAFETY: an opened device; the memory lives as long as the value, by the word of `Storage`.
                ("mlx5dv_devx_umem_reg_ex", unsafe { register(context.raw(), &mut what) })
            }
            Way::Address => {
                let (address, bytes) = (memory.address() as *mut c_void, memory.bytes());
                let register = functions.mlx5dv_devx_umem_reg;
                // SAFETY: as above.
                ("mlx5dv_devx_umem_reg", unsafe { register(context.raw(), address, bytes, access) })
            }
        };
        Ok(Self { raw: context.made(call, raw)?, context: context.clone() })
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        // SAFETY: made by `Umem::new`; queues in it have ended, by the order in which lanes end.
        unsafe { (self.context.functions().mlx5dv_devx_umem_dereg)(self.raw.as_ptr()) };
    }
}

/// Where memory of queues lies, and how the adapter was shown it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// On the device, by a descriptor.
    Dmabuf,
    /// On the device, by its address: a driver (nvidia-peermem) knows it.
    PeerMemory,
    /// On the host.
    Host,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dmabuf => "device memory by dmabuf",
            Self::PeerMemory => "device memory by peer memory",
            Self::Host => "host memory",
        })
    }
}

/// Memory of queues, known to the adapter.
#[derive(Debug)]
pub(crate) struct Storage<M> {
    // The adapter lets go of the memory before it ends.
    umem: Umem,
    region: Region,
    memory: M,
    /// Which it is, and what others were refused with.
    pub(crate) description: String,
}

impl<M: PostingMemory> Storage<M> {
    /// At least so many bytes, the best kind that is to be had.
    pub(crate) fn new<D: PostingDevice<Memory = M>>(domain: &Domain, device: &D, bytes: u64) -> Result<Self, Error> {
        let bytes = (bytes as usize).next_multiple_of(GRANULE);
        let mut why = Vec::new();
        for kind in [Kind::Dmabuf, Kind::PeerMemory, Kind::Host] {
            match Self::of(domain, device, bytes, kind) {
                Ok(mut storage) => {
                    let refused = why.iter().map(|why| format!("; {why}")).collect::<String>();
                    storage.description = format!("queues in {kind}{refused}");
                    return Ok(storage);
                }
                Err(error) => why.push(format!("{kind}: {error}")),
            }
        }
        let device = domain.context().name().to_owned();
        Err(Error::Memory { what: "memory of queues", device, why: why.join("; ") })
    }

    fn of<D: PostingDevice<Memory = M>>(domain: &Domain, device: &D, bytes: usize, kind: Kind) -> Result<Self, Error> {
        let home = if kind == Kind::Host { Home::Host } else { Home::Device };
        let refused = |error: ep_core::Error| Error::Device { what: "taking memory", why: error.to_string() };
        let memory = device.memory(bytes, home).map_err(refused)?;
        let way = match (kind, memory.dmabuf()) {
            (Kind::Dmabuf, Some(file)) => Way::Dmabuf(file),
            (Kind::Dmabuf, None) => {
                return Err(Error::Device {
                    what: "taking a descriptor",
                    why: "the device's driver gives none".into(),
                });
            }
            _ => Way::Address,
        };
        let umem = Umem::new(domain.context(), &memory, way)?;
        let part = Part { base: memory.address(), offset: 0, bytes: bytes as u64 };
        // SAFETY: the memory lives as long as the region, as both are here; it is used by address.
        let region = unsafe { Region::new(domain.verbs(), part, way, ACCESS_LOCAL_WRITE) }?;
        Ok(Self { umem, region, memory, description: String::new() })
    }

    /// Where it lies for the device, and for the adapter by [`key`](Self::key).
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// The key by which the adapter writes what fetch-adds return.
    pub(crate) fn key(&self) -> u32 {
        self.region.local_key()
    }

    /// As commands name it.
    pub(super) fn number(&self) -> u32 {
        // SAFETY: it lives.
        unsafe { self.umem.raw.as_ref().umem_id }
    }
}
