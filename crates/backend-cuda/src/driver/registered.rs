//! Memory of the host that a transport maps by a descriptor, and a GPU by its address: pinned, so that copies need no other memory between.
//!
//! Pages that were pinned for all GPUs are given back by a call that may wait for kernels of each of them, and keep others from launching meanwhile, as the calls do that
//! give back other memory: nobody has tried it. A kernel of a rank that is left may be waiting for one that is launched by this process only. So pages stay pinned until no
//! rank of this process is left.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use ep_core::Error;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::relaxed::Relaxed;
use super::{Device, check};
use crate::error::CudaError;

/// Pages of a file in memory, mapped by this process and by a GPU.
#[derive(Debug)]
pub(crate) struct Registered {
    device: Arc<Device>,
    file: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
    /// Where the GPU has it; none until it is registered.
    address: Option<u64>,
}

// SAFETY: an address range of the process, which belongs to no thread; it is used through raw pointers and atomics only.
unsafe impl Send for Registered {}
// SAFETY: as above: `&Registered` gives addresses and atomics only.
unsafe impl Sync for Registered {}

impl Registered {
    /// At least so many bytes, zero.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the system refused.
    pub(crate) fn zeroed(device: &Arc<Device>, bytes: u64) -> Result<Self, Error> {
        let refused = |call: &'static str| {
            move |error: rustix::io::Errno| {
                let what = format_args!("pinned memory of {bytes} bytes: {call}");
                Error::broken(what, error, "raise the limits of memory and of locked memory (ulimit -l)")
            }
        };
        let bytes_here = (bytes as usize).next_multiple_of(1 << 16);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("moexpress mirror", flags).map_err(refused("memfd_create"))?;
        ftruncate(&file, bytes_here as u64).map_err(refused("ftruncate"))?;
        fcntl_add_seals(&file, SealFlags::SHRINK).map_err(refused("a seal"))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the system chooses a free range of addresses; the pages stay, since the file cannot shrink.
        let base = unsafe { mmap(ptr::null_mut(), bytes_here, protection, MapFlags::SHARED, &file, 0) };
        let base = base.map_err(refused("mmap"))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| refused("mmap")(rustix::io::Errno::NOMEM))?;
        let mut this = Self { device: Arc::clone(device), file, base, bytes: bytes_here, address: None };
        this.register()?;
        Ok(this)
    }

    fn register(&mut self) -> Result<(), CudaError> {
        self.device.bind()?;
        let _relaxed = Relaxed::enter();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: a mapping of this length, which stays until `drop` ends the registration.
        check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(self.base.as_ptr().cast(), self.bytes, flags) })?;
        // From here on there is something to end.
        self.address = Some(0);
        let mut address = 0;
        // SAFETY: just registered, and mapped for the device.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, self.base.as_ptr().cast(), 0) };
        check("cuMemHostGetDevicePointer", code)?;
        self.address = Some(address);
        Ok(())
    }

    /// By which others map it.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Where the GPU has it.
    pub(crate) fn address(&self) -> u64 {
        self.address.unwrap_or_default()
    }

    /// Its length.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The eight bytes at `at`; none where no whole and aligned ones lie inside.
    pub(crate) fn word(&self, at: u64) -> Option<&AtomicU64> {
        let inside = at.is_multiple_of(8) && at.checked_add(8).is_some_and(|end| end <= self.bytes());
        // SAFETY: eight aligned bytes of the mapping, that live as long as `self` and that this process touches by atomic operations only.
        inside.then(|| unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(at as usize).cast()) })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let pages = Pages { device: Arc::clone(&self.device), base: self.base, bytes: self.bytes };
        if self.address.is_none() {
            return pages.unmap();
        }
        let mut pinned = pinned();
        pinned.unused.push(pages);
        pinned.sweep();
    }
}

/// Pages that nobody uses any more.
#[derive(Debug)]
struct Pages {
    device: Arc<Device>,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: as `Registered`.
unsafe impl Send for Pages {}

impl Pages {
    fn unpin(self) {
        let _relaxed = Relaxed::enter();
        let ended = self.device.bind().and_then(|()| {
            // SAFETY: registered by `register`; copies from and to it have ended, by the word of whoever asked for them.
            check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(self.base.as_ptr().cast()) })
        });
        match ended {
            Ok(()) => self.unmap(),
            Err(error) => tracing::warn!(%error, "pinned memory stays"),
        }
    }

    fn unmap(self) {
        // SAFETY: mapped with this length; nobody has its addresses any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// What this process has pinned for its GPUs and does not use any more.
#[derive(Debug)]
struct Pinned {
    unused: Vec<Pages>,
    /// Ranks of this process whose kernels may run, on whichever GPU.
    ranks: usize,
}

fn pinned() -> MutexGuard<'static, Pinned> {
    static PINNED: Mutex<Pinned> = Mutex::new(Pinned { unused: Vec::new(), ranks: 0 });
    PINNED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pinned {
    /// Gives it back where no kernel can be waiting for anybody. A rank that comes meanwhile waits for that.
    fn sweep(&mut self) {
        if self.ranks == 0 {
            self.unused.drain(..).for_each(Pages::unpin);
        }
    }
}

/// A rank of this process has come.
pub(super) fn rank_comes() {
    pinned().ranks += 1;
}

/// One has left.
pub(super) fn rank_leaves() {
    let mut pinned = pinned();
    pinned.ranks -= 1;
    pinned.sweep();
}
