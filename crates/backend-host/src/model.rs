//! In place of `memory` where loom looks at this crate (`--cfg ep_loom`): the same mappings, made of parts that loom knows.
//!
//! Loom runs a test under every order of its threads and every value that a load may see, and ends it at an access to a line of
//! payload that nothing orders after another one of it. Lines are what the layout keeps different writers on.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ep_core::Fault;
use ep_core::layout::{CELL_BYTES, LINE_BYTES};
use ep_core::port::{Offset, Span};
use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU64;

/// 64 bytes. The cell is what loom watches; the bytes lie where std does.
struct Line {
    watched: UnsafeCell<()>,
    bytes: Mutex<[u8; LINE_BYTES as usize]>,
}

/// A window.
pub(crate) struct Mapping {
    len: u64,
    lines: Vec<Line>,
    /// One at every place where a cell may be. All are there before there are threads, as loom asks.
    cells: Vec<AtomicU64>,
}

// SAFETY: loom's cells are not shareable so that users think of them; every access here tells loom whether it reads or writes,
// and what lies inside is nothing.
unsafe impl Sync for Mapping {}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("len", &self.len).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mapping {
    /// A window of its own of `len` zeroes, whatever the file: a model has no processes.
    pub(crate) fn of(_file: BorrowedFd<'_>, len: u64) -> io::Result<Self> {
        let line = || Line { watched: UnsafeCell::new(()), bytes: Mutex::new([0; LINE_BYTES as usize]) };
        let lines = (0..len.div_ceil(LINE_BYTES)).map(|_| line()).collect();
        let cells = (0..len / CELL_BYTES).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { len, lines, cells })
    }

    /// Never called: a model has no processes.
    pub(crate) fn replace(&self, _file: BorrowedFd<'_>) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The lines of a span, and the range of each that it covers.
    fn parts(&self, span: Span) -> Result<impl Iterator<Item = (&Line, std::ops::Range<usize>)>, Fault> {
        span.within(self.len)?;
        let (start, end) = if span.len == 0 { (0, 0) } else { (span.offset.0, span.end()) };
        Ok((start / LINE_BYTES..end.div_ceil(LINE_BYTES)).map(move |line| {
            let first = line * LINE_BYTES;
            let range = start.max(first) - first..end.min(first + LINE_BYTES) - first;
            (&self.lines[line as usize], range.start as usize..range.end as usize)
        }))
    }

    /// None: a model's window lies in pieces.
    pub(crate) fn at(&self, span: Span) -> Result<NonNull<u8>, Fault> {
        Err(Fault::out_of_range(span, 0))
    }

    /// Copies `from` to `to` in `target`, which may be this one.
    pub(crate) fn copy(&self, from: Span, target: &Self, to: Offset) -> Result<(), Fault> {
        let mut bytes = vec![0; from.len as usize];
        self.read(from.offset, &mut bytes)?;
        target.write(to, &bytes)
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        let mut into = into.iter_mut();
        for (line, range) in self.parts(from.span(into.len() as u64))? {
            line.watched.with(|_| into.by_ref().zip(&lock(&line.bytes)[range]).for_each(|(into, byte)| *into = *byte));
        }
        Ok(())
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        let mut from = bytes;
        for (line, range) in self.parts(to.span(bytes.len() as u64))? {
            let (part, rest) = from.split_at(range.len());
            line.watched.with_mut(|_| lock(&line.bytes)[range].copy_from_slice(part));
            from = rest;
        }
        Ok(())
    }

    /// The cell at `at`; none where no whole and aligned one lies inside.
    pub(crate) fn cell(&self, at: Offset) -> Option<&AtomicU64> {
        at.0.is_multiple_of(CELL_BYTES).then(|| self.cells.get((at.0 / CELL_BYTES) as usize))?
    }
}
