//! Doorbell registers of adapters that GPUs play: words in pinned memory, in place of those that lie in the cards' pages.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ep_core::Error;

use crate::driver::{Device, Mapped};

/// Where the register lies in its page.
const REGISTER: usize = 0x800;
/// A kernel looks at so many at a time.
pub(super) const MOST: usize = 32;

/// Pages by where the card has them. Pinned memory is never freed, so a kernel that still looks at a page that was unmapped does no harm.
#[derive(Debug, Default)]
pub(crate) struct Registers(Mutex<HashMap<usize, (usize, Mapped)>>);

impl Registers {
    fn pages(&self) -> MutexGuard<'_, HashMap<usize, (usize, Mapped)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps a page for a GPU: where that finds it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more pages than a kernel looks at; [`Error::Broken`] with what the driver refuses.
    pub(crate) fn map(&self, device: &Arc<Device>, page: NonNull<u8>, bytes: usize) -> Result<u64, Error> {
        let mut pages = self.pages();
        let here = pages.values().filter(|(gpu, _)| *gpu == device.ordinal()).count();
        if here == MOST {
            let what = format_args!("doorbell pages of adapters that GPU {} plays", device.ordinal());
            return Err(Error::invalid(what, here + 1, format_args!("at most {MOST}")));
        }
        let mapped = Mapped::zeroed(device, bytes)?;
        let address = mapped.address();
        pages.insert(page.as_ptr() as usize, (device.ordinal(), mapped));
        Ok(address)
    }

    pub(crate) fn unmap(&self, page: NonNull<u8>) {
        self.pages().remove(&(page.as_ptr() as usize));
    }

    /// Where a page's register lies for kernels; none where it is not mapped.
    pub(super) fn find(&self, page: u64) -> Option<u64> {
        self.pages().get(&(page as usize)).map(|(_, mapped)| mapped.address() + REGISTER as u64)
    }

    /// What is in a page's register; 0 where it is not mapped any more.
    pub(super) fn value(&self, page: u64) -> u64 {
        self.pages().get(&(page as usize)).map_or(0, |(_, mapped)| mapped.long(REGISTER))
    }
}
