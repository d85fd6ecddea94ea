//! Windows of this process as a network made of software moves their bytes: by the GPU's copy engines.

use std::any::Any;
use std::sync::Arc;

use ep_core::port::{Offset, Span};
use ep_core::transport::WindowCopies;
use ep_core::{Error, Rank};

use super::Node;
use crate::driver::{Device, Stream};
use crate::error::CudaError;

/// A rank's window, and a stream of its GPU beside those of kernels.
#[derive(Debug)]
pub(crate) struct Copies {
    node: Arc<Node>,
    rank: Rank,
    bytes: u64,
    stream: Arc<Stream>,
}

impl Copies {
    /// Of `rank`, whose window of so many bytes lies on `device`.
    pub(crate) fn new(node: &Arc<Node>, rank: Rank, device: &Arc<Device>, bytes: u64) -> Result<Self, CudaError> {
        Ok(Self { node: Arc::clone(node), rank, bytes, stream: Stream::new(device, 0)? })
    }

    /// Where a span of the window lies.
    fn at(&self, span: Span) -> Result<u64, Error> {
        let outside = |_| {
            let limit = format_args!("inside of its window of {} bytes", self.bytes);
            Error::invalid(format_args!("a span of rank {}", self.rank), format_args!("{span:?}"), limit)
        };
        span.within(self.bytes).map_err(outside)?;
        Ok(self.node.address(self.rank) + span.offset.0)
    }
}

impl WindowCopies for Copies {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn pull(&self, source: &dyn WindowCopies, from: Span, to: Offset) -> Result<(), Error> {
        let Some(source) = (source as &dyn Any).downcast_ref::<Self>() else {
            return Err(Error::invalid(
                "a window to copy from",
                format_args!("{source:?}"),
                "one on a GPU of this process",
            ));
        };
        let (from, to, bytes) = (source.at(from)?, self.at(to.span(from.len))?, from.len as usize);
        // SAFETY: both ranges lie in windows, whose memory stays for as long as the process lives. The protocol excludes that somebody else writes the one
        // or touches the other; what does so nevertheless makes wrong rows and harms no memory.
        Ok(unsafe { self.stream.copy_rows((to, bytes), (from, bytes), bytes, 1) }?)
    }

    fn raise(&self, at: Offset, bits: u64) -> Result<(), Error> {
        let at = self.at(at.span(8))?;
        // SAFETY: eight bytes of the window, which nobody else writes: the cell has one writer.
        Ok(unsafe { self.stream.store(at, bits) }?)
    }

    fn finish(&self) -> Result<(), Error> {
        Ok(self.stream.synchronize()?)
    }
}
