//! Pointers that callers hold, and which object each stands for. A pointer that stands for nothing (any more) is refused.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::abi::Device;
use crate::fabric::Shared;

/// What a pointer stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Device,
    Context,
    Pd,
    Mr,
    Ah,
    Umem,
    Uar,
    Cq,
    Qp,
}

/// An object behind a pointer.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) card: usize,
    pub(crate) kind: Kind,
    /// The object's number on its card.
    pub(crate) id: u32,
}

/// A structure that a caller may look into.
#[derive(Debug)]
struct Shell {
    handle: Handle,
    live: bool,
    at: NonNull<c_void>,
    free: unsafe fn(NonNull<c_void>),
}

// SAFETY: the structure is reached through raw pointers by C's rules only; this value moves its address about.
unsafe impl Send for Shell {}

#[derive(Debug)]
struct Plug {
    handle: Handle,
    name: CString,
    device: NonNull<Device>,
    /// Device lists and contexts that keep the pointer alive.
    holders: u32,
    plugged: bool,
}

// SAFETY: as for `Shell`.
unsafe impl Send for Plug {}

#[derive(Debug, Default)]
struct Registry {
    devices: Vec<Plug>,
    shells: BTreeMap<usize, Shell>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { devices: Vec::new(), shells: BTreeMap::new() });

fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Puts those of a fabric's cards into the device list that `is_own` holds for.
pub(crate) fn plug(shared: &Arc<Shared>, names: &[String], is_own: impl Fn(usize) -> bool) {
    let mut registry = registry();
    for (card, name) in names.iter().enumerate().filter(|(card, _)| is_own(*card)) {
        // A device's structure is never freed: a pointer kept too long is then refused, and never another's.
        let device = NonNull::from(Box::leak(Box::new(Device { opaque: 0 })));
        let handle = Handle { shared: Arc::clone(shared), card, kind: Kind::Device, id: 0 };
        let name = CString::new(name.as_str()).expect("a name without zeros");
        registry.devices.push(Plug { handle, name, device, holders: 0, plugged: true });
    }
}

/// Takes cards out of the list. What was opened stays.
pub(crate) fn unplug(names: &[String]) {
    let mut registry = registry();
    for device in &mut registry.devices {
        device.plugged &= !names.iter().any(|name| name.as_bytes() == device.name.as_bytes());
    }
    registry.devices.retain(|device| device.plugged || device.holders > 0);
}

/// All devices, each held once more.
pub(crate) fn devices() -> Vec<NonNull<Device>> {
    let mut registry = registry();
    registry
        .devices
        .iter_mut()
        .filter(|device| device.plugged)
        .map(|device| {
            device.holders += 1;
            device.device
        })
        .collect()
}

/// Takes one hold back.
pub(crate) fn release_device(at: *const Device) {
    let mut registry = registry();
    for device in &mut registry.devices {
        if std::ptr::eq(device.device.as_ptr(), at) {
            device.holders = device.holders.saturating_sub(1);
        }
    }
    registry.devices.retain(|device| device.plugged || device.holders > 0);
}

/// A device that a list or a context holds, and its name.
pub(crate) fn device(at: *const Device) -> Option<(Handle, NonNull<Device>, *const std::ffi::c_char)> {
    let registry = registry();
    let device = registry.devices.iter().find(|device| std::ptr::eq(device.device.as_ptr(), at))?;
    (device.holders > 0).then(|| (device.handle.clone(), device.device, device.name.as_ptr()))
}

/// Holds a device once more: a context does.
pub(crate) fn hold_device(at: *const Device) {
    for device in &mut registry().devices {
        if std::ptr::eq(device.device.as_ptr(), at) {
            device.holders += 1;
        }
    }
}

/// Hands a structure out.
pub(crate) fn give<T>(handle: Handle, structure: T) -> *mut T {
    /// # Safety
    /// `at` is a `T` that `give` boxed, and nobody uses it any more.
    unsafe fn free<T>(at: NonNull<c_void>) {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(at.cast::<T>().as_ptr()) });
    }
    let at = NonNull::from(Box::leak(Box::new(structure)));
    let shell = Shell { handle, live: true, at: at.cast(), free: free::<T> };
    registry().shells.insert(at.as_ptr() as usize, shell);
    at.as_ptr()
}

/// What a pointer stands for.
pub(crate) fn find(at: *const c_void, kinds: &[Kind]) -> Option<Handle> {
    let registry = registry();
    let shell = registry.shells.get(&(at as usize))?;
    (shell.live && kinds.contains(&shell.handle.kind)).then(|| shell.handle.clone())
}

/// The pointer stands for nothing from now on. Its memory is kept until the card's last object goes, so that no other gets
/// the same address and a use after this is found out.
pub(crate) fn forget(at: *const c_void) {
    let mut registry = registry();
    let Some(shell) = registry.shells.get_mut(&(at as usize)) else { return };
    shell.live = false;
    let shared = Arc::clone(&shell.handle.shared);
    let used = registry.shells.values().any(|shell| shell.live && Arc::ptr_eq(&shell.handle.shared, &shared));
    if used {
        return;
    }
    let gone = |shell: &Shell| Arc::ptr_eq(&shell.handle.shared, &shared);
    let addresses: Vec<usize> =
        registry.shells.iter().filter(|(_, shell)| gone(shell)).map(|(&address, _)| address).collect();
    for address in addresses {
        if let Some(shell) = registry.shells.remove(&address) {
            // SAFETY: `give` made it, and it was forgotten: its holder gave it back.
            unsafe { (shell.free)(shell.at) };
        }
    }
}
