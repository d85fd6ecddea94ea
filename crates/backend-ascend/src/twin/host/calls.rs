//! The functions, one by one.

use std::ffi::{CStr, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use super::ipc;
use super::network::NETWORK;
use super::objects::{Args, Block, Work};
use super::{Host, IDLE_TICKS, answer, here, streams};
use crate::driver::{
    BATCH, Code, DEVICE_TO_HOST, HOST_TO_DEVICE, INVALID_PARAM, LaunchConfig, MALLOC_HUGE_FIRST, MALLOC_HUGE_FIRST_P2P,
    REPEATED_INITIALIZE, RT_CONTEXT_NULL, RT_FILE_OPEN, RT_INVALID_DEVICE, RT_INVALID_HANDLE, RT_KERNEL_LOOKUP,
    RT_MEMORY_ALLOCATION, RT_MEMORY_FREE, RT_PARAM_INVALID, SCHEDULE_MODE, SUCCESS, Table, UNINITIALIZED,
};
use crate::twin::{Reach, TwinError};

pub(super) const TABLE: Table = Table {
    init: Some(init),
    device_count: Some(device_count),
    set_device: Some(set_device),
    soc_name: Some(soc_name),
    can_access_peer: Some(can_access_peer),
    enable_peer_access: Some(enable_peer_access),
    memory_info: Some(memory_info),
    malloc: Some(malloc),
    free: Some(free),
    memcpy: Some(memcpy),
    memcpy_in_order: Some(streams::memcpy_in_order),
    memset: Some(memset),
    create_stream: Some(streams::create_stream),
    set_failure_mode: Some(streams::set_failure_mode),
    destroy_stream: Some(streams::destroy_stream),
    create_event: Some(streams::create_event),
    destroy_event: Some(streams::destroy_event),
    record_event: Some(streams::record_event),
    wait_event: Some(streams::wait_event),
    query_event: Some(streams::query_event),
    load_binary: Some(load_binary),
    get_function: Some(get_function),
    init_args: Some(init_args),
    append_arg: Some(append_arg),
    finalize_args: Some(finalize_args),
    launch: Some(launch),
    process_number: Some(ipc::process_number),
    export_memory: Some(ipc::export),
    allow_import: Some(ipc::allow),
    import_memory: Some(ipc::import),
    close_memory: Some(ipc::close),
    network: Some(NETWORK),
    ..Table::empty("twin", clock)
};

/// Bytes of memory that a device says it has.
const MEMORY: usize = 64 << 30;
/// Bytes of it that this machine lends: who asks for more gets none, as of a full device.
const BACKED: usize = 1 << 30;

/// Asks the machine of the thread's twin.
pub(super) fn ask<T>(what: impl FnOnce(&mut Host) -> Result<T, TwinError>) -> Result<T, Code> {
    here(|host| what(host).map_err(|error| host.refuse("the network", RT_PARAM_INVALID, error)))
        .unwrap_or(Err(INVALID_PARAM))
}

/// The machine's time. Where nothing can move there, it passes while somebody asks for it.
fn clock() -> u64 {
    here(|host| {
        host.machine.pass_idle_time(IDLE_TICKS);
        host.machine.cycles() * 20
    })
    .unwrap_or(0)
}

/// Gives a value to a caller.
///
/// # Safety
/// `to` is null or may be written to.
pub(super) unsafe fn give<T>(host: &mut Host, call: &'static str, to: *mut T, value: T) -> Code {
    if to.is_null() {
        return host.refuse(call, INVALID_PARAM, "the result has no place");
    }
    // SAFETY: as the caller promises.
    unsafe { to.write(value) };
    SUCCESS
}

impl Host {
    /// The thread's device.
    pub(super) fn device(&mut self, call: &'static str) -> Result<u32, Code> {
        if !self.objects.is_initialised {
            return Err(self.refuse(call, UNINITIALIZED, "aclInit was not called"));
        }
        self.objects.device().ok_or_else(|| self.refuse(call, RT_CONTEXT_NULL, "the thread has no device"))
    }

    /// The block of the thread's device that some bytes lie in.
    pub(super) fn block(&mut self, call: &'static str, at: *const c_void, bytes: usize) -> Result<Block, Code> {
        let device = self.device(call)?;
        match self.objects.block(at as u64, bytes as u64) {
            Some(block) if block.device == device => Ok(block),
            Some(block) => {
                let what = format_args!("memory of device {}, the thread's is {device}", block.device);
                Err(self.refuse(call, RT_PARAM_INVALID, what))
            }
            None => {
                let what = format_args!("{bytes} bytes from {at:p} on are not of one block of device memory");
                Err(self.refuse(call, RT_PARAM_INVALID, what))
            }
        }
    }
}

/// A result, as a code.
pub(super) fn code(result: Result<(), Code>) -> Code {
    result.err().unwrap_or(SUCCESS)
}

extern "C" fn init(config: *const c_char) -> Code {
    answer("aclInit", |host| {
        if !config.is_null() {
            return host.refuse("aclInit", INVALID_PARAM, "a configuration is named");
        }
        if host.objects.is_initialised {
            return REPEATED_INITIALIZE;
        }
        host.objects.is_initialised = true;
        SUCCESS
    })
}

unsafe extern "C" fn device_count(count: *mut u32) -> Code {
    const CALL: &str = "aclrtGetDeviceCount";
    answer(CALL, |host| {
        if !host.objects.is_initialised {
            return host.refuse(CALL, UNINITIALIZED, "aclInit was not called");
        }
        let ranks = host.machine.ranks();
        // SAFETY: the caller gives a place for it.
        unsafe { give(host, CALL, count, ranks) }
    })
}

extern "C" fn set_device(device: i32) -> Code {
    const CALL: &str = "aclrtSetDevice";
    answer(CALL, |host| {
        if !host.objects.is_initialised {
            return host.refuse(CALL, UNINITIALIZED, "aclInit was not called");
        }
        let ranks = host.machine.ranks();
        match u32::try_from(device).ok().filter(|&device| device < ranks) {
            Some(device) => host.objects.set_device(device),
            None => return host.refuse(CALL, RT_INVALID_DEVICE, format_args!("device {device} of {ranks}")),
        }
        SUCCESS
    })
}

extern "C" fn soc_name() -> *const c_char {
    // Its bytes lie where they are as long as the host does.
    let name = here(|host| host.device("aclrtGetSocName").map(|_| host.soc.as_ptr().cast()));
    name.and_then(Result::ok).unwrap_or(ptr::null())
}

unsafe extern "C" fn can_access_peer(can: *mut i32, device: i32, peer: i32) -> Code {
    const CALL: &str = "aclrtDeviceCanAccessPeer";
    answer(CALL, |host| {
        let ranks = host.machine.ranks() as i32;
        if device == peer || ![device, peer].into_iter().all(|device| (0..ranks).contains(&device)) {
            return host.refuse(CALL, RT_INVALID_DEVICE, format_args!("devices {device} and {peer} of {ranks}"));
        }
        // SAFETY: the caller gives a place for it.
        unsafe { give(host, CALL, can, 1) }
    })
}

extern "C" fn enable_peer_access(peer: i32, flags: u32) -> Code {
    const CALL: &str = "aclrtDeviceEnablePeerAccess";
    answer(CALL, |host| {
        let device = match host.device(CALL) {
            Ok(device) => device,
            Err(code) => return code,
        };
        match u32::try_from(peer).ok().filter(|&peer| peer != device && flags == 0) {
            Some(peer) if host.machine.open(device, peer).is_ok() => SUCCESS,
            _ => host.refuse(CALL, RT_PARAM_INVALID, format_args!("peer {peer} of device {device}, flags {flags}")),
        }
    })
}

unsafe extern "C" fn memory_info(_attribute: i32, free: *mut usize, total: *mut usize) -> Code {
    const CALL: &str = "aclrtGetMemInfo";
    answer(CALL, |host| {
        let device = match host.device(CALL) {
            Ok(device) => device,
            Err(code) => return code,
        };
        let used: u64 =
            host.objects.memory.values().filter(|block| block.device == device).map(|block| block.bytes).sum();
        // SAFETY: the caller gives places for both.
        let told = unsafe { give(host, CALL, total, MEMORY) };
        if told != SUCCESS {
            return told;
        }
        // SAFETY: as above.
        unsafe { give(host, CALL, free, MEMORY - (used as usize).min(MEMORY)) }
    })
}

unsafe extern "C" fn malloc(address: *mut *mut c_void, bytes: usize, policy: i32) -> Code {
    const CALL: &str = "aclrtMalloc";
    answer(CALL, |host| {
        let device = match host.device(CALL) {
            Ok(device) => device,
            Err(code) => return code,
        };
        if bytes == 0 || ![MALLOC_HUGE_FIRST, MALLOC_HUGE_FIRST_P2P].contains(&policy) {
            return host.refuse(CALL, RT_PARAM_INVALID, format_args!("{bytes} bytes by policy {policy}"));
        }
        let used: u64 =
            host.objects.memory.values().filter(|block| block.device == device).map(|block| block.bytes).sum();
        if bytes as u64 > (BACKED as u64).saturating_sub(used) {
            return RT_MEMORY_ALLOCATION;
        }
        let reach = if policy == MALLOC_HUGE_FIRST_P2P { Reach::Group } else { Reach::Own };
        let given = match host.is_shared && reach == Reach::Group {
            true => host.alloc_shared(device, bytes as u64),
            false => host.machine.alloc(device, bytes as u64, reach).map(Some),
        };
        match given {
            Ok(None) => RT_MEMORY_ALLOCATION,
            Ok(Some(at)) => {
                host.objects.memory.insert(at, Block { device, bytes: bytes as u64 });
                // SAFETY: the caller gives a place for it.
                unsafe { give(host, CALL, address, at as *mut c_void) }
            }
            Err(error) => host.refuse(CALL, RT_MEMORY_ALLOCATION, error),
        }
    })
}

extern "C" fn free(address: *mut c_void) -> Code {
    const CALL: &str = "aclrtFree";
    answer(CALL, |host| {
        let at = address as u64;
        if host.objects.exported.values().any(|&exported| exported == at) {
            return host.refuse(CALL, RT_MEMORY_FREE, "the key of memory that others may import is not closed");
        }
        if host.objects.memory.get(&at).is_some_and(|block| host.is_copied(at, block.bytes)) {
            return host.refuse(CALL, RT_MEMORY_FREE, "a copy that is enqueued uses the memory");
        }
        if host.objects.memory.remove(&at).is_none() {
            return host.refuse(CALL, RT_MEMORY_FREE, format_args!("no memory begins at {address:p}"));
        }
        host.objects.shared.remove(&at);
        // A kernel that reaches for it from now on breaks a rule.
        match host.machine.release(at) {
            Ok(()) => SUCCESS,
            Err(error) => host.refuse(CALL, RT_MEMORY_FREE, error),
        }
    })
}

unsafe extern "C" fn memcpy(to: *mut c_void, room: usize, from: *const c_void, bytes: usize, kind: i32) -> Code {
    const CALL: &str = "aclrtMemcpy";
    answer(CALL, |host| {
        if bytes > room || bytes == 0 || to.is_null() || from.is_null() {
            return host.refuse(CALL, RT_PARAM_INVALID, format_args!("{bytes} bytes to room for {room}"));
        }
        let (device, is_in) = match kind {
            HOST_TO_DEVICE => (to.cast_const(), true),
            DEVICE_TO_HOST => (from, false),
            _ => return host.refuse(CALL, RT_PARAM_INVALID, format_args!("kind {kind}")),
        };
        if let Err(code) = host.block(CALL, device, bytes) {
            return code;
        }
        let copied = if is_in {
            // SAFETY: the caller gives so many bytes of the host's.
            let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
            host.machine.write(to as u64, bytes)
        } else {
            // SAFETY: the caller gives room for so many bytes of the host's.
            let into = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
            host.machine.read_into(from as u64, into)
        };
        copied.map_or_else(|error| host.refuse(CALL, RT_PARAM_INVALID, error), |()| SUCCESS)
    })
}

extern "C" fn memset(at: *mut c_void, room: usize, value: i32, bytes: usize) -> Code {
    const CALL: &str = "aclrtMemset";
    answer(CALL, |host| {
        if bytes > room || bytes == 0 || !(0..256).contains(&value) {
            return host.refuse(CALL, RT_PARAM_INVALID, format_args!("{bytes} bytes of {value} to room for {room}"));
        }
        if let Err(code) = host.block(CALL, at, bytes) {
            return code;
        }
        let written = host.machine.write(at as u64, &vec![value as u8; bytes]);
        written.map_or_else(|error| host.refuse(CALL, RT_PARAM_INVALID, error), |()| SUCCESS)
    })
}

unsafe extern "C" fn load_binary(path: *const c_char, options: *const c_void, binary: *mut *mut c_void) -> Code {
    const CALL: &str = "aclrtBinaryLoadFromFile";
    answer(CALL, |host| {
        if let Err(code) = host.device(CALL) {
            return code;
        }
        if path.is_null() || !options.is_null() {
            return host.refuse(CALL, RT_PARAM_INVALID, "no path, or options");
        }
        // SAFETY: the caller gives text that ends with zero.
        let path = Path::new(std::ffi::OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes()));
        if path != host.machine.library().path() {
            return RT_FILE_OPEN;
        }
        let handle = host.objects.handle();
        host.objects.binaries.push(handle);
        // SAFETY: the caller gives a place for it.
        unsafe { give(host, CALL, binary, handle as *mut c_void) }
    })
}

unsafe extern "C" fn get_function(binary: *mut c_void, name: *const c_char, function: *mut *mut c_void) -> Code {
    const CALL: &str = "aclrtBinaryGetFunction";
    answer(CALL, |host| {
        if !host.objects.binaries.contains(&(binary as u64)) || name.is_null() {
            return host.refuse(CALL, RT_INVALID_HANDLE, "no such binary, or no name");
        }
        // SAFETY: the caller gives text that ends with zero.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        if !host.machine.library().has_kernel(&name) {
            return RT_KERNEL_LOOKUP;
        }
        let handle = host.objects.handle();
        host.objects.functions.insert(handle, name);
        // SAFETY: the caller gives a place for it.
        unsafe { give(host, CALL, function, handle as *mut c_void) }
    })
}

unsafe extern "C" fn init_args(function: *mut c_void, args: *mut *mut c_void) -> Code {
    const CALL: &str = "aclrtKernelArgsInit";
    answer(CALL, |host| {
        let function = function as u64;
        if !host.objects.functions.contains_key(&function) {
            return host.refuse(CALL, RT_INVALID_HANDLE, "no such function");
        }
        let handle = host.objects.handle();
        host.objects.args.insert(handle, Args { function, bytes: Vec::new(), is_final: false });
        // SAFETY: the caller gives a place for it.
        unsafe { give(host, CALL, args, handle as *mut c_void) }
    })
}

unsafe extern "C" fn append_arg(
    args: *mut c_void,
    from: *mut c_void,
    bytes: usize,
    parameter: *mut *mut c_void,
) -> Code {
    const CALL: &str = "aclrtKernelArgsAppend";
    answer(CALL, |host| {
        let Some(list) = host.objects.args.get_mut(&(args as u64)).filter(|list| !list.is_final) else {
            return host.refuse(CALL, RT_INVALID_HANDLE, "no such list of parameters, or one that is final");
        };
        if from.is_null() {
            return host.refuse(CALL, RT_PARAM_INVALID, "no parameter");
        }
        // SAFETY: the caller gives so many bytes.
        list.bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) });
        let handle = host.objects.handle();
        // SAFETY: the caller gives a place for it.
        unsafe { give(host, CALL, parameter, handle as *mut c_void) }
    })
}

extern "C" fn finalize_args(args: *mut c_void) -> Code {
    const CALL: &str = "aclrtKernelArgsFinalize";
    answer(CALL, |host| match host.objects.args.get_mut(&(args as u64)) {
        Some(list) if !list.is_final => {
            list.is_final = true;
            SUCCESS
        }
        _ => host.refuse(CALL, RT_INVALID_HANDLE, "no such list of parameters, or one that is final"),
    })
}

unsafe extern "C" fn launch(
    function: *mut c_void,
    blocks: u32,
    stream: *mut c_void,
    config: *const LaunchConfig,
    args: *mut c_void,
    reserved: *mut c_void,
) -> Code {
    const CALL: &str = "aclrtLaunchKernelWithConfig";
    answer(CALL, |host| {
        code((|| {
            host.stream(CALL, stream)?;
            let Some(name) = host.objects.functions.get(&(function as u64)).cloned() else {
                return Err(host.refuse(CALL, RT_INVALID_HANDLE, "no such function"));
            };
            let Some(list) = host.objects.args.remove(&(args as u64)) else {
                return Err(host.refuse(CALL, RT_INVALID_HANDLE, "no such list of parameters"));
            };
            if !list.is_final || list.function != function as u64 || !reserved.is_null() {
                return Err(host.refuse(
                    CALL,
                    RT_PARAM_INVALID,
                    "a list of parameters that is not final, or of another function",
                ));
            }
            // SAFETY: the caller gives null, or a configuration and as many attributes as it says.
            let is_batch = unsafe { config.as_ref() }.is_some_and(|config| unsafe {
                let attributes = std::slice::from_raw_parts(config.attributes, config.count);
                attributes.iter().any(|attribute| attribute.id == SCHEDULE_MODE && attribute.value[0] == BATCH)
            });
            if !is_batch {
                return Err(host.refuse(
                    CALL,
                    RT_PARAM_INVALID,
                    "blocks that wait for each other are not launched in batch mode",
                ));
            }
            let Ok(at) = <[u8; 8]>::try_from(&list.bytes[..]) else {
                return Err(host.refuse(CALL, RT_PARAM_INVALID, "parameters that are not one address"));
            };
            let at = u64::from_ne_bytes(at);
            host.block(CALL, at as *const c_void, 8)?;
            host.enqueue(stream, Work::Launch { kernel: name, blocks, at, number: None })
        })())
    })
}
