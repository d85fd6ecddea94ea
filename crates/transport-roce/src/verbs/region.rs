//! How memory becomes known to an adapter: by its address, or, a device's, by a descriptor of it.

use std::ffi::c_uint;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ep_rdma::{Domain, Part};

use crate::error::Error;
use crate::memory::Memory;

/// By which way an adapter reaches memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// Mapped into this process.
    Mapped,
    /// A device's, by a descriptor.
    Dmabuf,
    /// A device's, by its address: a module of the kernel (`nvidia_peermem`) finds the pages.
    PeerMemory,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mapped => "memory of the host",
            Self::Dmabuf => "memory of a GPU, by dmabuf",
            Self::PeerMemory => "memory of a GPU, by peer memory",
        })
    }
}

/// Memory that the adapter may read and write.
#[derive(Debug)]
pub(crate) struct Region {
    // The adapter lets go of the memory before it ends.
    registered: ep_rdma::Region,
    way: Way,
    memory: Arc<Memory>,
}

impl Region {
    /// Registers all of `memory` with the rights `access`.
    pub(crate) fn new(domain: &Domain, memory: Arc<Memory>, access: c_uint) -> Result<Self, Error> {
        let all = 0..memory.bytes();
        Self::of_part(domain, memory, all, access)
    }

    /// Registers the bytes `part` of `memory`, once more where they are registered already: each has a key of its own, and the
    /// order and rights that go with it. What has a descriptor is shown by that, or by its address where the adapter's driver takes none.
    ///
    /// # Panics
    /// When the part does not lie inside.
    pub(crate) fn of_part(
        domain: &Domain,
        memory: Arc<Memory>,
        part: Range<usize>,
        access: c_uint,
    ) -> Result<Self, Error> {
        assert!(part.start <= part.end && part.end <= memory.bytes(), "{part:?} of {} bytes", memory.bytes());
        let part = Part { base: memory.address(), offset: part.start as u64, bytes: part.len() as u64 };
        // SAFETY: the region holds `memory`. What that maps, it maps for as long as it lives, and touches by atomics and raw pointers only. That a device's lies where
        // `WindowMemory::Device` says, and stays where that has no keeper for this to hold, its maker answers for; no core touches it here.
        let register = |way| unsafe { ep_rdma::Region::new(domain, part, way, access) };
        if let Some(file) = memory.descriptor() {
            match register(ep_rdma::Way::Dmabuf(file)) {
                Ok(registered) => return Ok(Self { registered, way: Way::Dmabuf, memory }),
                Err(error) => tracing::debug!(%error, "no registration by a descriptor"),
            }
        }
        match register(ep_rdma::Way::Address) {
            Ok(registered) if memory.is_of_device() => Ok(Self { registered, way: Way::PeerMemory, memory }),
            Ok(registered) => Ok(Self { registered, way: Way::Mapped, memory }),
            Err(ep_rdma::Error::Call { why, device, .. }) if memory.is_of_device() => {
                Err(Error::DeviceMemory { device, why })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// By which way the adapter reaches it.
    pub(crate) const fn way(&self) -> Way {
        self.way
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(crate) fn local_key(&self) -> u32 {
        self.registered.local_key()
    }

    pub(crate) fn remote_key(&self) -> u32 {
        self.registered.remote_key()
    }
}

#[cfg(test)]
#[path = "region_tests.rs"]
mod tests;
