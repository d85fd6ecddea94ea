//! A rank's GPU as a transport needs it whose lanes kernels post to themselves.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use ep_core::Error;
use ep_core::transport::{Home, PostingDevice, PostingMemory, Ranges};

use crate::driver::{Device, DeviceMemory, Mapped, Stream};

/// Where memory of queues begins: at a multiple of it. Drivers pin and name no smaller pieces of a GPU's memory.
const GRANULE: usize = 1 << 16;

/// The GPU of a rank, for [`Builder::posted`](crate::Builder::posted).
#[derive(Clone, Debug)]
pub struct PostingGpu {
    /// Beside that of the rank's kernels, which may run.
    stream: Arc<Stream>,
    known: Arc<Ranges>,
    /// Where registers are mapped: the adapter's own are, where this is none.
    #[cfg(feature = "hca")]
    beside: Option<Arc<crate::hca::Hca>>,
}

impl PostingGpu {
    /// Of a rank whose window of so many bytes begins there, and stays as long as the process.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a GPU that sees a signal before what an adapter wrote earlier.
    pub(crate) fn new(device: &Arc<Device>, window: u64, bytes: u64) -> Result<Self, Error> {
        if !device.orders_writes()? {
            return Err(Error::unsupported(
                format_args!("an adapter that writes to GPU {}", device.ordinal()),
                "a GPU that orders these writes for its own kernels (GPU_DIRECT_RDMA_WRITES_ORDERING); `--far loop` needs none",
            ));
        }
        let known = Arc::new(Ranges::new());
        known.add(window, bytes);
        let stream = Stream::new(device, 0)?;
        Ok(Self {
            stream,
            known,
            #[cfg(feature = "hca")]
            beside: None,
        })
    }

    /// The same beside adapters that GPUs play: their registers lie in memory, which adapters' do not.
    #[cfg(feature = "hca")]
    #[must_use]
    pub fn beside(self, hca: &Arc<crate::hca::Hca>) -> Self {
        Self { beside: Some(Arc::clone(hca)), ..self }
    }
}

/// Memory of queues and of lanes' states.
#[derive(Debug)]
pub struct QueueMemory {
    place: Place,
    address: u64,
    bytes: usize,
    known: Arc<Ranges>,
}

impl Drop for QueueMemory {
    fn drop(&mut self) {
        self.known.remove(self.address);
    }
}

#[derive(Debug)]
enum Place {
    Device { _memory: DeviceMemory, dmabuf: Option<OwnedFd> },
    Host { _memory: Mapped },
}

impl PostingMemory for QueueMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn dmabuf(&self) -> Option<BorrowedFd<'_>> {
        match &self.place {
            Place::Device { dmabuf, .. } => dmabuf.as_ref().map(|file| file.as_fd()),
            Place::Host { .. } => None,
        }
    }
}

impl PostingDevice for PostingGpu {
    type Memory = QueueMemory;

    fn identity(&self) -> u64 {
        self.stream.device().ordinal() as u64
    }

    fn memory(&self, bytes: usize, home: Home) -> Result<QueueMemory, Error> {
        let limit = || Error::invalid("bytes of queues", bytes, "1 to what can be addressed");
        let room = bytes.checked_next_multiple_of(GRANULE).filter(|&room| room > 0).ok_or_else(limit)?;
        let more = room.checked_add(GRANULE).ok_or_else(limit)?;
        let aligned = |address: u64| address.next_multiple_of(GRANULE as u64);
        let made = |place, address| {
            self.known.add(address, bytes as u64);
            QueueMemory { place, address, bytes, known: Arc::clone(&self.known) }
        };
        match home {
            Home::Device => {
                let memory = DeviceMemory::zeroed(&self.stream, more)?;
                self.stream.synchronize()?;
                let address = aligned(memory.address());
                let dmabuf = self.stream.device().dmabuf(address, room as u64);
                Ok(made(Place::Device { _memory: memory, dmabuf }, address))
            }
            Home::Host => {
                let memory = Mapped::zeroed(self.stream.device(), more)?;
                if memory.host() as u64 != memory.address() {
                    let what = "host memory that lies elsewhere for the GPU";
                    return Err(Error::unsupported(what, "unified addressing, which every system of 64 bits has"));
                }
                let address = aligned(memory.address());
                Ok(made(Place::Host { _memory: memory }, address))
            }
        }
    }

    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error> {
        self.known.within(address, into.len(), || {
            self.stream.device().bind()?;
            // SAFETY: memory of the window or of a queue, which stays meanwhile; others may write it, and whole words stay whole.
            Ok(unsafe { self.stream.download(address, into) }?)
        })
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error> {
        self.known.within(address, bytes.len(), || {
            self.stream.device().bind()?;
            // SAFETY: as above.
            Ok(unsafe { self.stream.upload(address, bytes) }?)
        })
    }

    fn map_register(&self, page: NonNull<u8>, bytes: usize) -> Result<u64, Error> {
        #[cfg(feature = "hca")]
        if let Some(hca) = &self.beside {
            return hca.registers().map(self.stream.device(), page, bytes);
        }
        Ok(self.stream.device().map_register(page, bytes)?)
    }

    fn unmap_register(&self, page: NonNull<u8>) {
        #[cfg(feature = "hca")]
        if let Some(hca) = &self.beside {
            return hca.registers().unmap(page);
        }
        self.stream.device().unmap_register(page);
    }
}

/// A descriptor of a rank's window, where the driver gives one: of all of its pages.
pub(crate) fn dmabuf_of(device: &Arc<Device>, address: u64, bytes: u64) -> Option<OwnedFd> {
    device.dmabuf(address, bytes.checked_next_multiple_of(4096)?)
}
