//! How memory becomes known to an adapter: by its address, or, a device's, by a descriptor of it.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::ptr::NonNull;

use crate::library::Library;
use crate::memory::Memory;
use crate::sys::{self, Mr, Pd};

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

/// The functions that register memory.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    plain: unsafe extern "C" fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr,
    relaxed: unsafe extern "C" fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr,
    by_descriptor: Option<unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr>,
}

impl Functions {
    pub(super) const fn of(library: &Library) -> Self {
        Self { plain: library.ibv_reg_mr, relaxed: library.ibv_reg_mr_iova2, by_descriptor: library.ibv_reg_dmabuf_mr }
    }

    /// Registers the bytes `part` of `memory` with the rights `access`, under their own addresses. What has a descriptor is shown by that, or
    /// by its address where the adapter's driver takes none.
    ///
    /// # Safety
    /// `pd` is a living protection domain of these functions' library, and the memory outlives what is returned.
    pub(super) unsafe fn register(
        self,
        pd: *mut Pd,
        memory: &Memory,
        part: Range<usize>,
        access: c_uint,
    ) -> io::Result<(NonNull<Mr>, Way)> {
        let (address, bytes) = (memory.address() + part.start as u64, part.len());
        if let (Some(file), Some(by_descriptor)) = (memory.descriptor(), self.by_descriptor) {
            let (file, at) = (file.as_raw_fd(), part.start as u64);
            // SAFETY: a living domain and an open file; the kernel refuses a range that the file does not have.
            let made = unsafe { by_descriptor(pd, at, bytes, address, file, access as c_int) };
            match NonNull::new(made) {
                Some(made) => return Ok((made, Way::Dmabuf)),
                None => tracing::debug!(error = %io::Error::last_os_error(), "no registration by a descriptor"),
            }
        }
        let made = if access & sys::ACCESS_RELAXED_ORDERING == 0 {
            // SAFETY: the memory is mapped, and lives as long as the region; a device's is looked for by the kernel, which refuses what is none.
            unsafe { (self.plain)(pd, address as *mut _, bytes, access as c_int) }
        } else {
            // SAFETY: as above.
            unsafe { (self.relaxed)(pd, address as *mut _, bytes, address, access) }
        };
        let way = if memory.is_of_device() { Way::PeerMemory } else { Way::Mapped };
        NonNull::new(made).map(|made| (made, way)).ok_or_else(io::Error::last_os_error)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::os::fd::OwnedFd;
    use std::ptr;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    const FROM: u64 = 0x7f00_0000_0000;
    const BYTES: usize = 1 << 16;

    thread_local! {
        /// What was called, in order, with its arguments; by which way a call has success.
        static SAID: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
        static TAKES: RefCell<&'static str> = const { RefCell::new("") };
    }

    fn call(name: &'static str, arguments: &str) -> *mut Mr {
        SAID.with_borrow_mut(|said| said.push(format!("{name} {arguments}")));
        if TAKES.with_borrow(|takes| *takes == name) { ptr::dangling_mut() } else { ptr::null_mut() }
    }
    extern "C" fn plain(_: *mut Pd, address: *mut c_void, bytes: usize, access: c_int) -> *mut Mr {
        call("plain", &format!("{address:p} {bytes} {access:#x}"))
    }
    extern "C" fn relaxed(_: *mut Pd, address: *mut c_void, bytes: usize, known: u64, access: c_uint) -> *mut Mr {
        call("relaxed", &format!("{address:p} {bytes} {known:#x} {access:#x}"))
    }
    extern "C" fn dmabuf(_: *mut Pd, at: u64, bytes: usize, known: u64, file: c_int, access: c_int) -> *mut Mr {
        call("dmabuf", &format!("{at} {bytes} {known:#x} {} {access:#x}", file >= 0))
    }

    /// Registers bytes 4096 to 4608 of a device's memory; what was called, and the way.
    fn registered(takes: &'static str, file: bool, knows_files: bool, access: c_uint) -> (Vec<String>, Option<Way>) {
        TAKES.set(takes);
        SAID.take();
        let file = file.then(|| -> OwnedFd { memfd_create("window", MemfdFlags::CLOEXEC).unwrap() });
        let memory = Memory::of_device(FROM, BYTES, file).unwrap();
        let by_descriptor = knows_files.then_some(dmabuf as unsafe extern "C" fn(_, _, _, _, _, _) -> _);
        let functions = Functions { plain, relaxed, by_descriptor };
        // SAFETY: these functions look at no domain and no memory.
        let made = unsafe { functions.register(ptr::dangling_mut(), &memory, 4096..4608, access) };
        (SAID.take(), made.ok().map(|(_, way)| way))
    }

    const WRITE: c_uint = sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE;

    #[test]
    fn memory_with_a_descriptor_is_registered_by_it() {
        let (said, way) = registered("dmabuf", true, true, WRITE);
        assert_eq!((said, way), (vec!["dmabuf 4096 512 0x7f0000001000 true 0x3".to_owned()], Some(Way::Dmabuf)));
        let relaxed = WRITE | sys::ACCESS_RELAXED_ORDERING;
        let (said, way) = registered("dmabuf", true, true, relaxed);
        assert_eq!((said.len(), way), (1, Some(Way::Dmabuf)));
        assert!(said[0].ends_with(&format!("{relaxed:#x}")), "{said:?}");
    }

    #[test]
    fn where_that_is_refused_or_unknown_it_is_registered_by_its_address() {
        let plain = || "plain 0x7f0000001000 512 0x3".to_owned();
        let (said, way) = registered("plain", true, true, WRITE);
        assert_eq!((said.last(), said.len(), way), (Some(&plain()), 2, Some(Way::PeerMemory)));
        for (file, knows_files) in [(true, false), (false, true), (false, false)] {
            assert_eq!(registered("plain", file, knows_files, WRITE), (vec![plain()], Some(Way::PeerMemory)));
        }
        let (said, way) = registered("relaxed", false, true, WRITE | sys::ACCESS_RELAXED_ORDERING);
        assert!(said[0].starts_with("relaxed 0x7f0000001000 512 0x7f0000001000"), "{said:?}");
        assert_eq!(way, Some(Way::PeerMemory));
    }

    #[test]
    fn what_no_way_takes_is_refused() {
        assert_eq!(registered("", true, true, WRITE).1, None);
    }
}
