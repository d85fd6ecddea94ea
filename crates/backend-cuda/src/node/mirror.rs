//! Pinned memory of the host beside a rank's window, and the GPU's copies between them.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ep_core::Error;
use ep_core::port::{Offset, Span};
use ep_core::transport::Mirror;

use super::copies::Place;
use crate::driver::{Registered, Stream};

/// A window, its mirror, and a stream for what moves between them.
#[derive(Debug)]
pub(crate) struct Beside {
    window: Place,
    memory: Registered,
    stream: Arc<Stream>,
}

impl Beside {
    /// Pinned memory of so many bytes beside a window.
    pub(super) fn new(window: Place, stream: Arc<Stream>, bytes: u64) -> Result<Self, Error> {
        let memory = Registered::zeroed(stream.device(), bytes)?;
        Ok(Self { window, memory, stream })
    }

    fn cell(&self, at: Offset) -> Result<&AtomicU64, Error> {
        let limit = || format!("eight aligned bytes of {}", self.memory.bytes());
        self.memory.word(at.0).ok_or_else(|| Error::invalid("a word of a mirror", at.0, limit()))
    }

    /// Where a span of the window lies in both. The mirror is no shorter.
    fn both(&self, span: Span) -> Result<[u64; 2], Error> {
        Ok([self.window.at(span)?, self.memory.address() + span.offset.0])
    }
}

impl Mirror for Beside {
    fn file(&self) -> BorrowedFd<'_> {
        self.memory.file()
    }

    fn fetch(&self, span: Span) -> Result<(), Error> {
        let ([window, mirror], bytes) = (self.both(span)?, span.len as usize);
        // SAFETY: both ranges lie in memory that this value keeps until the stream is through. The protocol excludes that somebody else writes the
        // window's meanwhile; the mirror's is written by whoever asks, one after the other. What does so nevertheless makes wrong rows and harms
        // no memory.
        Ok(unsafe { self.stream.copy_rows((mirror, bytes), (window, bytes), bytes, 1) }?)
    }

    fn store(&self, span: Span) -> Result<(), Error> {
        let ([window, mirror], bytes) = (self.both(span)?, span.len as usize);
        // SAFETY: as above, the other way round.
        Ok(unsafe { self.stream.copy_rows((window, bytes), (mirror, bytes), bytes, 1) }?)
    }

    fn raise(&self, at: Offset, bits: u64) -> Result<(), Error> {
        let at = self.window.at(at.span(8))?;
        // SAFETY: eight bytes of the window, which nobody else writes: the cell has one writer.
        Ok(unsafe { self.stream.store(at, bits) }?)
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(self.stream.synchronize()?)
    }

    fn word(&self, at: Offset) -> Result<u64, Error> {
        Ok(self.cell(at)?.load(Ordering::Acquire))
    }

    fn set_word(&self, at: Offset, bits: u64) -> Result<(), Error> {
        self.cell(at)?.store(bits, Ordering::Release);
        Ok(())
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Before the mirror ends.
        let _ = self.stream.synchronize();
    }
}
