//! Windows as a network made of software moves their bytes: by the GPU's copy engines.

use std::any::Any;
use std::sync::Arc;

use ep_core::port::{Offset, Span};
#[cfg(target_os = "linux")]
use ep_core::transport::Mirror;
use ep_core::transport::WindowCopies;
use ep_core::{Error, Rank};

use super::Node;
#[cfg(target_os = "linux")]
use super::mirror::Beside;
use crate::driver::{Device, Imported, MemoryHandle, Stream};
use crate::error::CudaError;

/// A rank's window, and a stream beside those of kernels.
#[derive(Debug)]
pub(crate) struct Copies {
    window: Place,
    stream: Arc<Stream>,
}

/// Where a window of so many bytes lies.
#[derive(Clone, Debug)]
pub(super) struct Place {
    at: At,
    bytes: u64,
}

#[derive(Clone, Debug)]
enum At {
    /// In memory of this process.
    Here(Arc<Node>, Rank),
    /// In memory of another one.
    There(Arc<Imported>),
}

impl Copies {
    /// Of `rank`, whose window of so many bytes lies on `device`.
    pub(crate) fn new(node: &Arc<Node>, rank: Rank, device: &Arc<Device>, bytes: u64) -> Result<Self, CudaError> {
        let window = Place { at: At::Here(Arc::clone(node), rank), bytes };
        Ok(Self { window, stream: Stream::new(device, 0)? })
    }
}

impl Place {
    /// Where a span of the window lies.
    pub(super) fn at(&self, span: Span) -> Result<u64, Error> {
        let outside = |_| {
            let limit = format_args!("inside of it: {} bytes", self.bytes);
            Error::invalid(format_args!("a span of a window of {self}"), format_args!("{span:?}"), limit)
        };
        span.within(self.bytes).map_err(outside)?;
        let base = match &self.at {
            At::Here(node, rank) => node.address(*rank),
            At::There(window) => window.address(),
        };
        Ok(base + span.offset.0)
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.at {
            At::Here(_, rank) => write!(f, "rank {rank}"),
            At::There(_) => f.write_str("another process"),
        }
    }
}

impl WindowCopies for Copies {
    fn bytes(&self) -> u64 {
        self.window.bytes
    }

    fn pull(&self, source: &dyn WindowCopies, from: Span, to: Offset) -> Result<(), Error> {
        let Some(source) = (source as &dyn Any).downcast_ref::<Self>() else {
            return Err(Error::invalid(
                "a window to copy from",
                format_args!("{source:?}"),
                "one on a GPU of this host",
            ));
        };
        let (from, to, bytes) = (source.window.at(from)?, self.window.at(to.span(from.len))?, from.len as usize);
        // SAFETY: both ranges lie in windows, whose memory stays for as long as the process lives; of another process, as long as its mapping,
        // which this value holds. The protocol excludes that somebody else writes the one or touches the other; what does so nevertheless makes
        // wrong rows and harms no memory.
        Ok(unsafe { self.stream.copy_rows((to, bytes), (from, bytes), bytes, 1) }?)
    }

    fn raise(&self, at: Offset, bits: u64) -> Result<(), Error> {
        let at = self.window.at(at.span(8))?;
        // SAFETY: eight bytes of the window, which nobody else writes: the cell has one writer.
        Ok(unsafe { self.stream.store(at, bits) }?)
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(self.stream.synchronize()?)
    }

    #[cfg(target_os = "linux")]
    fn mirror(&self, bytes: u64) -> Result<Arc<dyn Mirror>, Error> {
        let stream = Stream::new(self.stream.device(), 0)?;
        Ok(Arc::new(Beside::new(self.window.clone(), stream, bytes)?))
    }

    fn name(&self) -> Result<Vec<u8>, Error> {
        match &self.window.at {
            At::Here(node, rank) => Ok(node.handle(*rank)?.to_bytes().to_vec()),
            At::There(_) => Err(Error::invalid("a window to name", &self.window, "one of this process")),
        }
    }

    fn open(&self, name: &[u8]) -> Result<Arc<dyn WindowCopies>, Error> {
        let Ok(handle) = name.try_into() else {
            let limit = format_args!("{}", MemoryHandle::BYTES);
            return Err(Error::invalid("bytes of a window's name", name.len(), limit));
        };
        let device = self.stream.device();
        let window = Imported::open(device, MemoryHandle::from_bytes(handle))?;
        let window = Place { at: At::There(Arc::new(window)), bytes: self.window.bytes };
        Ok(Arc::new(Self { window, stream: Stream::new(device, 0)? }))
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // Before another process' memory is given back.
        let _ = self.stream.synchronize();
    }
}
