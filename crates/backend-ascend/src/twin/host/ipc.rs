//! Memory between processes: keys name a process, a descriptor of it, the device and the bytes. So do the descriptions of cards.

use std::ffi::{CStr, c_char, c_void};

use super::calls::give;
use super::{Host, answer};
use crate::driver::{Code, KEY, PEER_ACCESS, RT_INVALID_HANDLE, RT_PARAM_INVALID, SUCCESS};
use crate::twin::TwinError;
use crate::twin::shared::Theirs;

/// What a key says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Named {
    pub(super) process: i32,
    pub(super) descriptor: i32,
    pub(super) device: u32,
    pub(super) bytes: u64,
}

impl Named {
    pub(super) fn text(self) -> String {
        let Self { process, descriptor, device, bytes } = self;
        format!("twin {process} {descriptor} {device} {bytes}")
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut words = text.strip_prefix("twin ")?.split(' ');
        let named = Self {
            process: words.next()?.parse().ok()?,
            descriptor: words.next()?.parse().ok()?,
            device: words.next()?.parse().ok()?,
            bytes: words.next()?.parse().ok()?,
        };
        words.next().is_none().then_some(named)
    }

    pub(super) const fn theirs(self) -> Theirs {
        Theirs { rank: self.device, bytes: self.bytes, process: self.process, descriptor: self.descriptor }
    }
}

pub(super) fn this_process() -> i32 {
    std::process::id() as i32
}

/// What a caller's key says.
///
/// # Safety
/// `key` is null, or text that ends with zero.
unsafe fn named(host: &mut Host, call: &'static str, key: *const c_char) -> Result<Named, Code> {
    // SAFETY: as the caller promises.
    let text = if key.is_null() { None } else { unsafe { CStr::from_ptr(key) }.to_str().ok() };
    text.and_then(Named::parse).ok_or_else(|| host.refuse(call, RT_INVALID_HANDLE, "no such key"))
}

pub(super) unsafe extern "C" fn process_number(number: *mut i32) -> Code {
    const CALL: &str = "aclrtDeviceGetBareTgid";
    answer(CALL, |host| match host.device(CALL) {
        // SAFETY: the caller gives a place for it.
        Ok(_) => unsafe { give(host, CALL, number, this_process()) },
        Err(code) => code,
    })
}

pub(super) unsafe extern "C" fn export(
    at: *mut c_void,
    bytes: usize,
    key: *mut c_char,
    room: usize,
    flags: u64,
) -> Code {
    const CALL: &str = "aclrtIpcMemGetExportKey";
    answer(CALL, |host| {
        let device = match host.device(CALL) {
            Ok(device) => device,
            Err(code) => return code,
        };
        let shared = host.objects.shared.get(&(at as u64)).copied();
        let whole = host.objects.memory.get(&(at as u64)).is_some_and(|block| block.bytes == bytes as u64);
        let Some(descriptor) = shared.filter(|_| whole && room == KEY && flags == 0 && !key.is_null()) else {
            let what =
                format_args!("{bytes} bytes at {at:p}, a key of {room}, flags {flags}: not a whole block for peers");
            return host.refuse(CALL, RT_PARAM_INVALID, what);
        };
        let text = Named { process: this_process(), descriptor, device, bytes: bytes as u64 }.text();
        host.objects.exported.insert(text.clone(), at as u64);
        // SAFETY: the caller gives a place of so many bytes, and the text is shorter.
        unsafe {
            key.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
            key.add(text.len()).write(0);
        }
        SUCCESS
    })
}

pub(super) unsafe extern "C" fn allow(key: *const c_char, processes: *mut i32, count: usize) -> Code {
    const CALL: &str = "aclrtIpcMemSetImportPid";
    answer(CALL, |host| {
        // SAFETY: the caller gives text that ends with zero.
        let named = match unsafe { named(host, CALL, key) } {
            Ok(named) => named,
            Err(code) => return code,
        };
        let at = host.objects.exported.get(&named.text()).copied();
        // SAFETY: the caller gives so many numbers.
        let processes = unsafe { std::slice::from_raw_parts(processes, count) };
        match at {
            Some(at) if host.machine.allow(at, processes) => SUCCESS,
            _ => host.refuse(CALL, RT_PARAM_INVALID, "a key that this process has not exported, or too many processes"),
        }
    })
}

pub(super) unsafe extern "C" fn import(address: *mut *mut c_void, key: *const c_char, flags: u64) -> Code {
    const CALL: &str = "aclrtIpcMemImportByKey";
    answer(CALL, |host| {
        // SAFETY: the caller gives text that ends with zero.
        let named = match unsafe { named(host, CALL, key) } {
            Ok(named) => named,
            Err(code) => return code,
        };
        match host.import(CALL, named, flags) {
            // SAFETY: the caller gives a place for it.
            Ok(at) => unsafe { give(host, CALL, address, at as *mut c_void) },
            Err(code) => code,
        }
    })
}

pub(super) unsafe extern "C" fn close(key: *const c_char) -> Code {
    const CALL: &str = "aclrtIpcMemClose";
    answer(CALL, |host| {
        // SAFETY: the caller gives text that ends with zero.
        let named = match unsafe { named(host, CALL, key) } {
            Ok(named) => named,
            Err(code) => return code,
        };
        if host.objects.exported.remove(&named.text()).is_some() {
            return SUCCESS;
        }
        match host.objects.imported.remove(&named.text()) {
            Some(at) if host.machine.release(at).is_ok() => SUCCESS,
            _ => host.refuse(CALL, RT_INVALID_HANDLE, "a key that was neither exported nor imported"),
        }
    })
}

impl Host {
    fn import(&mut self, call: &'static str, named: Named, flags: u64) -> Result<u64, Code> {
        let device = self.device(call)?;
        if flags != PEER_ACCESS || named.process == this_process() {
            return Err(self.refuse(
                call,
                RT_PARAM_INVALID,
                "flags that do not let devices reach each other, or own memory",
            ));
        }
        let theirs = named.device;
        if theirs == device || !self.machine.is_group(device, theirs) {
            let what =
                format_args!("memory of device {theirs}, the thread's is {device}: no other device of its server");
            return Err(self.refuse(call, RT_PARAM_INVALID, what));
        }
        let mapped = self.machine.map(named.theirs(), false);
        let opened = self.machine.open(device, theirs);
        match mapped.and_then(|at| opened.map(|()| at)) {
            Ok(Some(at)) => {
                self.objects.imported.insert(named.text(), at);
                Ok(at)
            }
            // The other process may be gone; or it has not said that this one may.
            Ok(None) => Err(RT_PARAM_INVALID),
            Err(error) => Err(self.refuse(call, RT_PARAM_INVALID, error)),
        }
    }

    /// A window that other processes may map. None where the system gives no memory.
    pub(super) fn alloc_shared(&mut self, device: u32, bytes: u64) -> Result<Option<u64>, TwinError> {
        let Some((at, descriptor)) = self.machine.alloc_shared(device, bytes)? else { return Ok(None) };
        self.objects.shared.insert(at, descriptor);
        Ok(Some(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_fit_and_are_read_as_they_were_written() {
        let named = Named { process: i32::MAX, descriptor: i32::MAX, device: u32::MAX, bytes: u64::MAX };
        assert!(named.text().len() < KEY);
        assert_eq!(Named::parse(&named.text()), Some(named));
        for wrong in ["", "twin", "twin 1 2 3", "twin 1 2 3 4 5", "twin 1 2 3 x"] {
            assert_eq!(Named::parse(wrong), None, "{wrong}");
        }
    }
}
