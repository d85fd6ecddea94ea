//! The doorbell: a page of an adapter's registers, mapped for a device.
//!
//! One adapter's pages may be handed out more than once, and one page serves many queue pairs. Drivers refuse to map a page a second
//! time, so pages are counted for the whole process.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Context;
use crate::error::Error;
use crate::sys;
use ep_core::transport::PostingDevice;

/// Bytes of a page of registers.
const PAGE: usize = 4096;

/// Which device has mapped which page, where, and how often that was asked for.
type Pages = BTreeMap<(u64, usize), (u64, u32)>;

fn pages() -> MutexGuard<'static, Pages> {
    static PAGES: Mutex<Pages> = Mutex::new(BTreeMap::new());
    PAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A page that stays mapped for a device as long as the value lives.
#[derive(Debug)]
struct Mapped<D: PostingDevice> {
    device: D,
    page: NonNull<u8>,
    address: u64,
}

// SAFETY: a page is known by its address, which any thread may tell the device's driver.
unsafe impl<D: PostingDevice> Send for Mapped<D> {}

impl<D: PostingDevice> Mapped<D> {
    fn new(device: &D, page: NonNull<u8>) -> Result<Self, Error> {
        let mut pages = pages();
        let key = (device.identity(), page.as_ptr() as usize);
        let address = match pages.get_mut(&key) {
            Some((address, count)) => {
                *count += 1;
                *address
            }
            None => {
                let mapped = device.map_register(page, PAGE);
                let what = "mapping the adapter's doorbell for the device";
                let address = mapped.map_err(|error| Error::Device { what, why: error.to_string() })?;
                pages.insert(key, (address, 1));
                address
            }
        };
        Ok(Self { device: device.clone(), page, address })
    }
}

impl<D: PostingDevice> Drop for Mapped<D> {
    fn drop(&mut self) {
        let mut pages = pages();
        let key = (self.device.identity(), self.page.as_ptr() as usize);
        if let Some((_, count)) = pages.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                pages.remove(&key);
                self.device.unmap_register(self.page);
            }
        }
    }
}

/// A page of an adapter's registers (UAR), and where the device has it.
#[derive(Debug)]
pub(crate) struct Register<D: PostingDevice> {
    /// None once the device may ring no more.
    mapped: Option<Mapped<D>>,
    owned: Owned,
    bell: u64,
}

#[derive(Debug)]
struct Owned {
    context: Context,
    raw: NonNull<sys::Uar>,
}

// SAFETY: libmlx5 allows any thread to use it.
unsafe impl Send for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: given out by `mlx5dv_devx_alloc_uar`; queues that name it have ended, by the order in which lanes end.
        unsafe { (self.context.functions().mlx5dv_devx_free_uar)(self.raw.as_ptr()) };
    }
}

impl<D: PostingDevice> Register<D> {
    pub(crate) fn new(context: &Context, device: &D) -> Result<Self, Error> {
        let allocate = context.functions().mlx5dv_devx_alloc_uar;
        // A page of the one kind is not to be had in every virtual machine.
        let kinds = [sys::UAR_BF, sys::UAR_NC].into_iter();
        // SAFETY: an opened device.
        let found = kinds.map(|kind| unsafe { allocate(context.raw(), kind) }).find_map(NonNull::new);
        let raw = context.made("mlx5dv_devx_alloc_uar", found.map_or(std::ptr::null_mut(), NonNull::as_ptr))?;
        let owned = Owned { context: context.clone(), raw };
        // SAFETY: it lives.
        let &sys::Uar { reg_addr, base_addr, .. } = unsafe { raw.as_ref() };
        let page = (base_addr as usize) & !(PAGE - 1);
        let offset = (reg_addr as usize).checked_sub(page).filter(|offset| offset + 8 <= PAGE);
        let (Some(page), Some(offset)) = (NonNull::new(page as *mut u8), offset) else {
            let why = format!("a register at {reg_addr:?} of a page at {base_addr:?}");
            return Err(Error::Device { what: "finding the adapter's doorbell", why });
        };
        let mapped = Mapped::new(device, page)?;
        Ok(Self { bell: mapped.address + offset as u64, mapped: Some(mapped), owned })
    }

    /// Where the device rings.
    pub(crate) const fn bell(&self) -> u64 {
        self.bell
    }

    /// The device rings no more. The page stays, for the queues that name it.
    pub(crate) fn unmap(&mut self) {
        self.mapped = None;
    }

    /// As commands name the page.
    pub(super) fn page(&self) -> u32 {
        // SAFETY: it lives.
        unsafe { self.owned.raw.as_ref().page_id }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::device::{HostDevice, HostMemory};
    use ep_core::transport::Home;

    static MAPPED: AtomicU32 = AtomicU32::new(0);
    static UNMAPPED: AtomicU32 = AtomicU32::new(0);

    /// One that refuses to map a page that is mapped, as drivers do.
    #[derive(Clone, Copy, Debug)]
    struct Strict;

    impl PostingDevice for Strict {
        type Memory = HostMemory;

        fn identity(&self) -> u64 {
            77
        }

        fn memory(&self, bytes: usize, home: Home) -> Result<HostMemory, ep_core::Error> {
            HostDevice.memory(bytes, home)
        }

        fn read(&self, address: u64, into: &mut [u8]) -> Result<(), ep_core::Error> {
            HostDevice.read(address, into)
        }

        fn write(&self, address: u64, bytes: &[u8]) -> Result<(), ep_core::Error> {
            HostDevice.write(address, bytes)
        }

        fn map_register(&self, page: NonNull<u8>, _: usize) -> Result<u64, ep_core::Error> {
            let again = MAPPED.fetch_add(1, Ordering::Relaxed) != UNMAPPED.load(Ordering::Relaxed);
            let refused = || ep_core::Error::broken("cudaHostRegister", "it is registered already", "nothing");
            if again { Err(refused()) } else { Ok(page.as_ptr() as u64) }
        }

        fn unmap_register(&self, _: NonNull<u8>) {
            UNMAPPED.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_page_is_mapped_once_however_many_use_it() {
        let page = NonNull::new(0x7000 as *mut u8).unwrap();
        let first = Mapped::new(&Strict, page).unwrap();
        let second = Mapped::new(&Strict, page).unwrap();
        drop(first);
        assert_eq!(UNMAPPED.load(Ordering::Relaxed), 0, "one still uses it");
        drop(second);
        assert_eq!(UNMAPPED.load(Ordering::Relaxed), 1);
        drop(Mapped::new(&Strict, page).unwrap());
        assert_eq!((MAPPED.load(Ordering::Relaxed), UNMAPPED.load(Ordering::Relaxed)), (2, 2));
    }
}
