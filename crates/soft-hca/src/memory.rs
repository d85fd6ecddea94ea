//! The memory that queues and windows lie in: real memory of this process, which others read and write at the same time.
//!
//! Everything here is an atomic access of bytes or aligned words, so that what races is a value and never an undefined one.
//! Programs that reach the same words with other widths (C++, a GPU) see what the machine's own memory model gives them.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags};

/// A range that someone has promised to keep mapped until it is given back.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    base: usize,
    len: usize,
    /// What keeps a mapping of this card's own (dmabuf) alive.
    _mapping: Option<Arc<Mapping>>,
}

/// A mapping of a file, made by this card.
#[derive(Debug)]
struct Mapping {
    base: usize,
    len: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `map` made this mapping with this length, and every `Memory` of it holds the `Arc` that is being dropped.
        let _ = unsafe { rustix::mm::munmap(self.base as *mut _, self.len) };
    }
}

impl Memory {
    /// Memory of this process.
    ///
    /// # Safety
    /// `base..base + len` stays mapped, readable and writable as far as it is used so, while the value or a part of it is used.
    pub(crate) unsafe fn of(base: usize, len: usize) -> Self {
        Self { base, len, _mapping: None }
    }

    /// `len` bytes of a file (a memfd stands for a dmabuf) from `offset`.
    pub(crate) fn map(file: BorrowedFd<'_>, offset: usize, len: usize) -> Result<Self, rustix::io::Errno> {
        let end = offset.checked_add(len).ok_or(rustix::io::Errno::INVAL)?;
        if rustix::fs::fstat(file)?.st_size < end as i64 {
            return Err(rustix::io::Errno::INVAL);
        }
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses aliases nothing of this process.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), end, flags, MapFlags::SHARED, file, 0) }? as usize;
        Ok(Self { base: base + offset, len, _mapping: Some(Arc::new(Mapping { base, len: end })) })
    }

    /// New memory of zeros, whole pages.
    pub(crate) fn anonymous(len: usize) -> Result<Self, rustix::io::Errno> {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses aliases nothing of this process.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, flags, MapFlags::PRIVATE) }? as usize;
        Ok(Self { base, len, _mapping: Some(Arc::new(Mapping { base, len })) })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Its first byte's address.
    pub(crate) fn base(&self) -> usize {
        self.base
    }

    /// A part of it. None: not within.
    pub(crate) fn part(&self, offset: u64, len: usize) -> Option<Self> {
        let offset = usize::try_from(offset).ok()?;
        (offset.checked_add(len)? <= self.len).then(|| Self {
            base: self.base + offset,
            len,
            _mapping: self._mapping.clone(),
        })
    }

    fn check(&self, offset: usize, len: usize, align: usize) -> usize {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{offset} + {len} of {}", self.len);
        let at = self.base + offset;
        assert!(at.is_multiple_of(align), "{at:#x} is not a multiple of {align}");
        at
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: `check` keeps it within the range, which `of`'s caller keeps mapped; atomics may be shared with other writers.
        unsafe { AtomicU8::from_ptr(self.check(offset, 1, 1) as *mut u8) }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as in `byte`, and `check` keeps it aligned.
        unsafe { AtomicU32::from_ptr(self.check(offset, 4, 4) as *mut u32) }
    }

    fn double(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as in `byte`, and `check` keeps it aligned.
        unsafe { AtomicU64::from_ptr(self.check(offset, 8, 8) as *mut u64) }
    }

    /// How many bytes of the copy at `offset` go as one aligned access.
    fn stride(&self, offset: usize, left: usize) -> usize {
        if left >= 8 && (self.base + offset).is_multiple_of(8) {
            8
        } else if left >= 4 && (self.base + offset).is_multiple_of(4) {
            4
        } else {
            1
        }
    }

    /// Copies out. Panics beyond the end.
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done;
            let stride = self.stride(at, into.len() - done);
            let to = &mut into[done..done + stride];
            match stride {
                8 => to.copy_from_slice(&self.double(at).load(Ordering::Relaxed).to_ne_bytes()),
                4 => to.copy_from_slice(&self.word(at).load(Ordering::Relaxed).to_ne_bytes()),
                _ => to[0] = self.byte(at).load(Ordering::Relaxed),
            }
            done += stride;
        }
        fence(Ordering::Acquire);
    }

    /// `len` bytes from `offset`.
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes);
        bytes
    }

    /// Copies in, after everything that this thread wrote before. Aligned words of 8 and 4 bytes are never torn. Panics beyond the end.
    pub(crate) fn write(&self, offset: usize, from: &[u8]) {
        fence(Ordering::Release);
        let mut done = 0;
        while done < from.len() {
            let at = offset + done;
            let stride = self.stride(at, from.len() - done);
            let bytes = &from[done..done + stride];
            match stride {
                8 => self.double(at).store(u64::from_ne_bytes(bytes.try_into().unwrap()), Ordering::Relaxed),
                4 => self.word(at).store(u32::from_ne_bytes(bytes.try_into().unwrap()), Ordering::Relaxed),
                _ => self.byte(at).store(bytes[0], Ordering::Relaxed),
            }
            done += stride;
        }
    }

    /// A big-endian word that another thread releases. Panics where it is not aligned.
    pub(crate) fn be32(&self, offset: usize) -> u32 {
        u32::from_be(self.word(offset).load(Ordering::Acquire))
    }

    /// The eight bytes of a register, which is zero afterwards.
    pub(crate) fn take(&self, offset: usize) -> [u8; 8] {
        let register = self.double(offset);
        if register.load(Ordering::Relaxed) == 0 {
            return [0; 8];
        }
        register.swap(0, Ordering::Acquire).to_ne_bytes()
    }

    /// Adds to a counter in this machine's byte order, and gives its old value. Panics where it is not aligned.
    pub(crate) fn fetch_add(&self, offset: usize, add: u64) -> u64 {
        self.double(offset).fetch_add(add, Ordering::AcqRel)
    }
}
