//! Windows as a network made of software moves their bytes: by the GPU's copy engines.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ep_core::port::{Offset, Span};
#[cfg(target_os = "linux")]
use ep_core::transport::Mirror;
use ep_core::transport::WindowCopies;
use ep_core::{Error, Rank};

use super::Node;
#[cfg(target_os = "linux")]
use super::mirror::Beside;
use super::mover::{Move, Mover};
use crate::driver::{Device, Imported, Mapped, MemoryHandle, Stream};
use crate::error::CudaError;

/// How a network made of software moves bytes to a window.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Moving {
    /// Streams by which copies go.
    pub(crate) ways: usize,
    /// Multiprocessors on which a kernel makes them, if any, in place of the driver.
    pub(crate) movers: u32,
}

/// A rank's window, and streams beside those of kernels. On one alone a copy waits for the cells that were stored before, which takes as long as
/// a copy.
#[derive(Debug)]
pub(crate) struct Copies {
    window: Place,
    /// Of a process the same to all windows: each has few queues of a GPU.
    ways: Arc<[Way]>,
}

#[derive(Debug)]
struct Way {
    stream: Arc<Stream>,
    /// In place of the driver.
    mover: Option<Mover>,
    asked: Mutex<Asked>,
    /// Where the stream stores the last mark that it has reached.
    reached: Mapped,
}

/// What was asked for.
#[derive(Debug, Default)]
struct Asked {
    /// Where somebody else than the driver copies: what, before the next mark.
    moves: Vec<Move>,
    /// Where cells lie, and what is to be stored there at the next mark.
    raises: Vec<(u64, u64)>,
    /// The last mark.
    mark: u64,
    /// Something that was asked for was not enqueued.
    is_broken: bool,
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
    pub(crate) fn new(
        node: &Arc<Node>,
        rank: Rank,
        (device, moving): (&Arc<Device>, Moving),
        bytes: u64,
    ) -> Result<Self, CudaError> {
        let ways = (0..moving.ways.max(1)).map(|_| Way::new(device, moving.movers)).collect::<Result<_, _>>()?;
        Ok(Self { window: Place { at: At::Here(Arc::clone(node), rank), bytes }, ways })
    }

    fn way(&self, way: usize) -> &Way {
        &self.ways[way % self.ways.len()]
    }

    fn device(&self) -> &Arc<Device> {
        self.way(0).stream.device()
    }
}

impl Way {
    fn new(device: &Arc<Device>, movers: u32) -> Result<Self, CudaError> {
        let reached = Mapped::zeroed(device, size_of::<u64>())?;
        let stream = Stream::new(device, 0)?;
        let mover = (movers > 0).then(|| Mover::new(device, &stream, movers)).transpose()?;
        Ok(Self { stream, mover, asked: Mutex::default(), reached })
    }

    fn asked(&self) -> MutexGuard<'_, Asked> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self) -> Result<u64, Error> {
        // Held until all is enqueued: marks are reached in their order, and so are cells raised.
        let mut asked = self.asked();
        if asked.is_broken {
            asked.moves.clear();
            asked.raises.clear();
            return Err(Error::broken(
                "a way of copies",
                "it has lost some that were asked for",
                "start the ranks anew",
            ));
        }
        asked.mark += 1;
        let mark = asked.mark;
        let mark_at = self.reached.address();
        let stored = if let Some(mover) = &self.mover {
            // SAFETY: as below; of moves `pull` says it. This stream is the mover's only one.
            unsafe { mover.launch(&self.stream, &asked.moves, &asked.raises, (mark_at, mark)) }
        } else {
            asked.raises.push((mark_at, mark));
            // SAFETY: eight bytes each of the window, which nobody else writes: a cell has one writer. Those of the mark live as long as the stream, which
            // ends before they do.
            unsafe { self.stream.store_all(&asked.raises) }
        };
        asked.moves.clear();
        asked.raises.clear();
        // Others share the way: what they had asked for before is lost with what this mark was for, and their cells must not be raised by a later mark.
        asked.is_broken = stored.is_err();
        Ok(stored.map(|()| mark)?)
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

    fn ways(&self) -> usize {
        self.ways.len()
    }

    fn pull(&self, way: usize, source: &dyn WindowCopies, from: Span, to: Offset) -> Result<(), Error> {
        let Some(source) = (source as &dyn Any).downcast_ref::<Self>() else {
            return Err(Error::invalid(
                "a window to copy from",
                format_args!("{source:?}"),
                "one on a GPU of this host",
            ));
        };
        let (bytes, way) = (from.len, self.way(way));
        let (from, to) = (source.window.at(from)?, self.window.at(to.span(bytes))?);
        let one = Move { from, to, bytes };
        if way.mover.is_some() && one.is_whole() {
            way.asked().moves.push(one);
            return Ok(());
        }
        let bytes = bytes as usize;
        // SAFETY: both ranges lie in windows, whose memory stays for as long as the process lives; of another process, as long as its mapping,
        // which this value holds. The protocol excludes that somebody else writes the one or touches the other; what does so nevertheless makes
        // wrong rows and harms no memory.
        Ok(unsafe { way.stream.copy_rows((to, bytes), (from, bytes), bytes, 1) }?)
    }

    fn raise(&self, way: usize, at: Offset, bits: u64) -> Result<(), Error> {
        let at = self.window.at(at.span(8))?;
        self.way(way).asked().raises.push((at, bits));
        Ok(())
    }

    fn mark(&self, way: usize) -> Result<u64, Error> {
        self.way(way).mark()
    }

    fn reached(&self, way: usize) -> u64 {
        self.way(way).reached.long(0)
    }

    fn finish(&self) -> Result<(), Error> {
        // All of them, also where one fails.
        let marked = self.ways.iter().map(|way| way.mark().map(drop)).reduce(Result::and);
        let ended = self.ways.iter().map(|way| Ok(way.stream.synchronize()?)).reduce(Result::and);
        marked.into_iter().chain(ended).collect()
    }

    #[cfg(target_os = "linux")]
    fn mirror(&self, bytes: u64) -> Result<Arc<dyn Mirror>, Error> {
        // Nobody else uses it: what has a mirror is copied by no way.
        let stream = Arc::clone(&self.way(0).stream);
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
        let device = self.device();
        let window = Imported::open(device, MemoryHandle::from_bytes(handle))?;
        let window = Place { at: At::There(Arc::new(window)), bytes: self.window.bytes };
        Ok(Arc::new(Self { window, ways: Arc::clone(&self.ways) }))
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // Before another process' memory is given back. What was asked for and not enqueued would be by the next mark of another window.
        let _ = self.finish();
    }
}
