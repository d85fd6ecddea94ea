//! What a transport needs of the device whose kernels post to its queues themselves: memory, a way to look at it, and an adapter's registers
//! mapped for it.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use crate::error::Error;

/// Where memory lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Home {
    /// On the device.
    Device,
    /// On the host, mapped for the device at an address that the host uses, too.
    Host,
}

/// A device whose kernels post. A backend has one for each rank.
///
/// Who implements it vouches for it, as a transport hands these addresses to adapters: memory is as [`PostingMemory`] says. What
/// [`read`](Self::read) and [`write`](Self::write) are given is an address of the device; they touch those bytes and no others, and
/// refuse memory that is not the rank's ([`Ranges`](super::Ranges)). Where
/// [`map_register`](Self::map_register) says that a page lies, a store of the device of eight aligned bytes reaches the page whole.
pub trait PostingDevice: Clone + Send + Sync + fmt::Debug + 'static {
    /// Memory that the device reaches.
    type Memory: PostingMemory;

    /// A number that values of the same device have, and others do not: a page is mapped once for each device.
    fn identity(&self) -> u64;

    /// So many bytes, zero, beginning at a multiple of 64 KiB.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the system refused, [`Error::Unsupported`] where there is none of the kind.
    fn memory(&self, bytes: usize, home: Home) -> Result<Self::Memory, Error>;

    /// Reads bytes of the window or of memory that this device gave. Kernels may run, and are not waited for.
    ///
    /// # Errors
    /// [`Error::Invalid`] for other bytes, [`Error::Broken`] with what the system refused.
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Error>;

    /// Writes bytes of the window or of memory that this device gave. On return they are there for kernels and adapters.
    ///
    /// # Errors
    /// [`Error::Invalid`] for other bytes, [`Error::Broken`] with what the system refused.
    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Error>;

    /// Maps a page of an adapter's registers for the device: its address there.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the system refused, and what allows it (NVIDIA: the driver's `PeerMappingOverride`).
    fn map_register(&self, page: NonNull<u8>, bytes: usize) -> Result<u64, Error>;

    /// Ends that. No kernel posts.
    fn unmap_register(&self, page: NonNull<u8>);
}

/// Memory that a device reaches.
///
/// For as long as the value lives, [`bytes`](Self::bytes) bytes lie at [`address`](Self::address) for the device. They may be registered with
/// an adapter by [`dmabuf`](Self::dmabuf), or by that address where the system's drivers know it.
pub trait PostingMemory: Send + Sync + fmt::Debug {
    /// Where it lies for the device.
    fn address(&self) -> u64;

    /// Its size.
    fn bytes(&self) -> usize;

    /// By which an adapter may register it, where the driver gives one. The memory begins with it.
    fn dmabuf(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
