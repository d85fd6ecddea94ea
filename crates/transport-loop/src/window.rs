//! Where a rank's window lies: in memory of the host, or of a device, whose bytes its backend moves. Ranks of other processes open it by
//! its name.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ep_core::Error;
use ep_core::port::{Offset, Span};
use ep_core::transport::WindowCopies;
use zerocopy::{FromBytes, IntoBytes};

use crate::memory::{self, Memory};

type U32 = zerocopy::little_endian::U32;

/// Where processes reach each other's memory.
pub(crate) const ONE_HOST: &str = "ranks on one host, in one container, of one user; for several hosts use RoCE";

#[derive(Debug)]
pub(crate) enum Window {
    Host(File),
    Device(Arc<dyn WindowCopies>),
}

/// Memory of the host that has a descriptor.
#[derive(Debug)]
pub(crate) struct File {
    memory: Memory,
    /// By which other processes open it: of a rank of this one.
    descriptor: Option<OwnedFd>,
}

impl File {
    /// The window of a rank of this process. `shared`: other processes are to open it.
    pub(crate) fn own(window: impl AsFd, bytes: u64, shared: bool) -> io::Result<Self> {
        let window = window.as_fd();
        let descriptor = shared.then(|| window.try_clone_to_owned()).transpose()?;
        Ok(Self { memory: Memory::of(window, bytes)?, descriptor })
    }

    /// That of a rank of another process of this host.
    fn open(process: u32, name: &[u8], bytes: u64) -> io::Result<Self> {
        let told = U32::read_from_bytes(name).map_err(|_| {
            io::Error::other(format!("its window's name has {} bytes, expected {}", name.len(), size_of::<U32>()))
        })?;
        Ok(Self { memory: memory::of_process(process, told.get(), bytes)?, descriptor: None })
    }

    fn name(&self) -> Vec<u8> {
        let number = self.descriptor.as_ref().map_or(0, |file| file.as_raw_fd().unsigned_abs());
        U32::new(number).as_bytes().to_vec()
    }
}

impl Window {
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Self::Host(file) => file.memory.bytes(),
            Self::Device(copies) => copies.bytes(),
        }
    }

    /// By which ranks of other processes [`open`](Self::open) it.
    pub(crate) fn name(&self) -> Result<Vec<u8>, Error> {
        match self {
            Self::Host(file) => Ok(file.name()),
            Self::Device(copies) => copies.name(),
        }
    }

    /// The window of the same kind and size that `process` calls `name`.
    pub(crate) fn open(&self, process: u32, name: &[u8]) -> Result<Self, Error> {
        match self {
            Self::Host(own) => File::open(process, name, own.memory.bytes()).map(Self::Host).map_err(|error| {
                Error::broken(format_args!("the window of process {process} over the loop"), error, ONE_HOST)
            }),
            Self::Device(own) => own.open(name).map(Self::Device),
        }
    }

    /// Ways by which copies come here; what goes by one arrives in its order.
    pub(crate) fn ways(&self) -> usize {
        match self {
            Self::Host(_) => 1,
            Self::Device(copies) => copies.ways(),
        }
    }

    /// Copies `from` of `source` to `to` here, after what was copied by this way before; false where that cannot be.
    pub(crate) fn pull(&self, way: usize, source: &Self, from: Span, to: Offset) -> bool {
        match (source, self) {
            (Self::Host(source), Self::Host(sink)) => source.memory.copy(from, &sink.memory, to).is_ok(),
            (Self::Device(source), Self::Device(sink)) => told(sink.pull(way, &**source, from, to)),
            // Offers of the one do not fit the other.
            _ => false,
        }
    }

    /// Raises a cell, after all that was copied by this way before; false where there is none.
    pub(crate) fn raise(&self, way: usize, at: Offset, bits: u64) -> bool {
        match self {
            Self::Host(file) => file.memory.cell(at).is_some_and(|cell| {
                debug_assert!(cell.load(Ordering::Relaxed) <= bits, "the cell at {at:?} would fall");
                cell.store(bits, Ordering::Release);
                true
            }),
            Self::Device(copies) => told(copies.raise(way, at, bits)),
        }
    }

    /// What [`reached`](Self::reached) gives once all that was copied and raised by this way so far is there; none where something went wrong.
    pub(crate) fn mark(&self, way: usize) -> Option<u64> {
        match self {
            // Copied by the core that was asked.
            Self::Host(_) => Some(0),
            Self::Device(copies) => copies.mark(way).inspect_err(tell).ok(),
        }
    }

    /// How far it is.
    pub(crate) fn reached(&self, way: usize) -> u64 {
        match self {
            Self::Host(_) => 0,
            Self::Device(copies) => copies.reached(way),
        }
    }

    /// Whether somebody else than ranks that wait carries what is due on its lanes: a device has a proxy.
    pub(crate) const fn has_proxy(&self) -> bool {
        matches!(self, Self::Device(_))
    }

    /// Returns when all that was copied and raised here is there; false where something went wrong.
    pub(crate) fn finish(&self) -> bool {
        match self {
            Self::Host(_) => true,
            Self::Device(copies) => told(copies.finish()),
        }
    }
}

/// Whether it went well; what went wrong is in the log: a lane that breaks has no room for it.
fn told(done: Result<(), Error>) -> bool {
    done.inspect_err(tell).is_ok()
}

fn tell(error: &Error) {
    tracing::error!(%error, "the loop cannot move bytes of a device");
}
