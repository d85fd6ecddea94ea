//! Memory that ranks share: the one module with unsafe code.
//!
//! Several threads or processes write the same pages, so nobody ever holds a reference to bytes of them: payload is copied
//! between raw pointers, and cells are atomics. The protocol orders the copies (rules F3, F5, F9 and F10): every put and get
//! is ordered against every other access to its bytes by a release store of a cell and the acquire load that saw it. That
//! is what makes plain copies sound, as it does for any memory handed from thread to thread.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use ep_core::Fault;
use ep_core::layout::CELL_BYTES;
use ep_core::port::{Offset, Span};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A window in the address space of this process. Its memory lives until the last process unmaps it.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: u64,
}

// SAFETY: a mapping is an address range of the whole process and belongs to no thread; what its methods do with it is safe
// for several threads (`Sync`, below).
unsafe impl Send for Mapping {}

// SAFETY: methods hand out no references but those to atomics, and copy between raw pointers otherwise. Two copies that
// touch the same bytes at the same time are what the protocol's rules exclude (module documentation).
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The first `len` bytes, 1 or more, of a file in memory that has at least so many and cannot shrink.
    pub(crate) fn of(file: BorrowedFd<'_>, len: u64) -> io::Result<Self> {
        let bytes = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        // SAFETY: the system chooses a free range of addresses, so that no other object lies there. The file is sealed against
        // shrinking (the caller checks), so that its pages stay.
        let base =
            unsafe { mmap(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    /// Puts the first bytes of `file` in the place of what lies here, for all who have an address of it. It has as many bytes, cannot shrink,
    /// and holds what is here for whoever goes on reading.
    pub(crate) fn replace(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        let (base, bytes) = (self.base.as_ptr().cast(), self.len as usize);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range is this mapping's, whole, and stays mapped: the system puts the one file in the other's place at once. References into
        // it are to atomics only, which may change at any time.
        unsafe { mmap(base, bytes, protection, MapFlags::SHARED | MapFlags::FIXED, file, 0) }?;
        Ok(())
    }

    /// The first byte of a span that lies inside (rule F8).
    #[inline]
    pub(crate) fn at(&self, span: Span) -> Result<NonNull<u8>, Fault> {
        span.within(self.len)?;
        // An empty span may name any place: it is at the start as well as anywhere.
        let offset = if span.len == 0 { 0 } else { span.offset.0 as usize };
        // SAFETY: the offset is below the length of the mapping, or 0.
        Ok(unsafe { self.base.add(offset) })
    }

    /// Copies `from` to `to` in `target`, which may be this one.
    #[inline]
    pub(crate) fn copy(&self, from: Span, target: &Self, to: Offset) -> Result<(), Fault> {
        let (source, sink) = (self.at(from)?, target.at(to.span(from.len))?);
        // SAFETY: both ranges lie in live mappings, as was just checked, and `copy` allows them to overlap. Nobody has a
        // reference to their bytes; the protocol excludes that somebody else writes the one or touches the other.
        unsafe { ptr::copy(source.as_ptr(), sink.as_ptr(), from.len as usize) };
        Ok(())
    }

    /// Copies bytes out.
    #[inline]
    pub(crate) fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        let source = self.at(from.span(into.len() as u64))?;
        // SAFETY: the source lies in the mapping, as was just checked. The buffer is borrowed mutably and cannot be part of a
        // mapping, to which there are no references. The protocol excludes that somebody writes the source.
        unsafe { ptr::copy_nonoverlapping(source.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies bytes in.
    #[inline]
    pub(crate) fn write(&self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        let sink = self.at(to.span(bytes.len() as u64))?;
        // SAFETY: as in `read`, the other way round; the protocol excludes that somebody else touches the sink.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), sink.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// The cell at `at`; none where no whole and aligned one lies inside.
    #[inline]
    pub(crate) fn cell(&self, at: Offset) -> Option<&AtomicU64> {
        if !at.0.is_multiple_of(CELL_BYTES) {
            return None;
        }
        let place = self.at(at.span(CELL_BYTES)).ok()?;
        // SAFETY: eight bytes of the mapping, which starts at a page, at a multiple of eight. They live as long as `self`. Cells
        // lie in a region of their own, which nothing but atomic operations touches.
        Some(unsafe { AtomicU64::from_ptr(place.as_ptr().cast()) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `of` with this length, and nothing borrows from `self` any more.
        // It cannot fail for a range that is mapped.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len as usize) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::window;

    fn mapping(len: u64) -> Mapping {
        Mapping::of(window::create(len).unwrap().as_fd(), len).unwrap()
    }

    #[test]
    fn fresh_memory_is_zero_and_copies_change_exactly_what_they_name() {
        let (here, there) = (mapping(10_000), mapping(10_000));
        here.write(Offset(100), &[7; 5000]).unwrap();
        here.copy(Offset(100).span(5000), &there, Offset(4990)).unwrap();
        let mut seen = vec![1; 10_000];
        there.read(Offset(0), &mut seen).unwrap();
        assert_eq!(seen, [vec![0; 4990], vec![7; 5000], vec![0; 10]].concat());
    }

    #[test]
    fn two_mappings_of_a_file_are_the_same_memory() {
        let file = window::create(64).unwrap();
        let [a, b] = [(); 2].map(|()| Mapping::of(file.as_fd(), 64).unwrap());
        drop(file);
        a.cell(Offset(8)).unwrap().store(5, Ordering::Release);
        assert_eq!(b.cell(Offset(8)).unwrap().load(Ordering::Acquire), 5);
        drop(a);
        assert_eq!(b.cell(Offset(8)).unwrap().load(Ordering::Acquire), 5);
    }

    #[test]
    fn memory_is_replaced_where_it_lies() {
        let files = [(); 2].map(|()| window::create(10_000).unwrap());
        let [old, new] = [0, 1].map(|file: usize| Mapping::of(files[file].as_fd(), 10_000).unwrap());
        let (here, other) = (&old, Mapping::of(files[0].as_fd(), 10_000).unwrap());
        new.write(Offset(5000), &[3; 8]).unwrap();
        let cell = here.cell(Offset(8)).unwrap();
        here.replace(files[1].as_fd()).unwrap();
        other.write(Offset(0), &[9; 10_000]).unwrap();
        assert_eq!(cell.load(Ordering::Relaxed), 0, "what the other writes falls on the old memory");
        let mut seen = [0; 8];
        here.read(Offset(5000), &mut seen).unwrap();
        assert_eq!(seen, [3; 8]);
        cell.store(4, Ordering::Release);
        assert_eq!(new.cell(Offset(8)).unwrap().load(Ordering::Acquire), 4);
    }

    #[test]
    fn ranges_outside_are_refused_and_touch_nothing() {
        let (here, there) = (mapping(100), mapping(100));
        let refused = |result: Result<(), Fault>| assert!(matches!(result, Err(Fault::OutOfRange { window: 100, .. })));
        here.write(Offset(0), &[9; 100]).unwrap();
        refused(here.write(Offset(99), &[1; 2]));
        refused(here.read(Offset(u64::MAX), &mut [0; 2]));
        refused(here.copy(Offset(90).span(11), &there, Offset(0)));
        refused(here.copy(Offset(0).span(11), &there, Offset(90)));
        here.copy(Offset(500).span(0), &there, Offset(900)).unwrap();
        let mut seen = [1; 100];
        there.read(Offset(0), &mut seen).unwrap();
        assert_eq!(seen, [0; 100]);
        for at in [4, 93, 96, 100, u64::MAX - 7] {
            assert!(here.cell(Offset(at)).is_none(), "{at}");
        }
    }
}
