//! The functions of ACL that the host side calls, as a table.
//!
//! One table opens the vendor's libraries at run time; the twin supplies another ([`crate::twin::Host`]). Everything above goes through a table and
//! knows nothing else of who is behind it. Every function is optional: one that is missing is named by the call that needs it.
//!
//! Names and signatures are those of CANN 8.1's `acl/acl.h` and `acl/acl_rt.h`; those of memory between processes (`aclrtIpcMem...`) of later ones.

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;
use std::time::Instant;

use libloading::Library;

use super::{AscendError, Code, Network};

/// `aclrtMemMallocPolicy`: huge pages first; without and with reach of peers.
pub(crate) const MALLOC_HUGE_FIRST: i32 = 0;
pub(crate) const MALLOC_HUGE_FIRST_P2P: i32 = 3;
/// `aclrtMemcpyKind`.
pub(crate) const HOST_TO_DEVICE: i32 = 1;
pub(crate) const DEVICE_TO_HOST: i32 = 2;
pub(crate) const DEVICE_TO_DEVICE: i32 = 3;
/// `aclrtEventRecordedStatus`: all before the event has ended.
pub(crate) const EVENT_COMPLETE: i32 = 1;
/// `ACL_HBM_MEM` of `aclrtMemAttr`.
pub(crate) const HBM: i32 = 1;

/// `aclrtLaunchKernelAttr` with its value.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchAttribute {
    /// `aclrtLaunchKernelAttrId`.
    pub id: u32,
    /// `aclrtLaunchKernelAttrValue`, a union of 16 bytes: the first byte is a schedule mode.
    pub value: [u32; 4],
}

/// `aclrtLaunchKernelCfg`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    /// The attributes.
    pub attributes: *const LaunchAttribute,
    /// How many.
    pub count: usize,
}

/// `ACL_RT_LAUNCH_KERNEL_ATTR_SCHEM_MODE`, and the mode in which all blocks are resident at the same time.
pub(crate) const SCHEDULE_MODE: u32 = 1;
pub(crate) const BATCH: u32 = 1;

/// `ACL_RT_LAUNCH_KERNEL_ATTR_TIMEOUT`: seconds, 16 bits.
pub(crate) const TIMEOUT: u32 = 7;
/// `ACL_STOP_ON_FAILURE`: who asks for an event behind what failed hears of it.
pub(crate) const STOP_ON_FAILURE: u64 = 1;

macro_rules! table {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal: ($($arg:ty),*) -> $result:ty;)*) => {
        /// Functions by which a host drives its devices, and a clock.
        #[derive(Clone, Copy, Debug)]
        pub struct Table {
            /// Who is behind it.
            pub name: &'static str,
            /// Nanoseconds of the host's clock.
            pub clock: fn() -> u64,
            /// The way to other servers; none where there is none.
            pub network: Option<Network>,
            $($(#[$doc])* pub $field: Option<unsafe extern "C" fn($($arg),*) -> $result>,)*
        }

        impl Table {
            /// A table of nothing.
            pub(crate) const fn empty(name: &'static str, clock: fn() -> u64) -> Self {
                Self { name, clock, network: None, $($field: None,)* }
            }

            /// The functions of a library that is loaded for good.
            fn of(library: &'static Library, clock: fn() -> u64) -> Self {
                // SAFETY: the vendor's headers declare the symbols with these parameters, and the library is never unloaded.
                Self { name: "ACL", clock, network: None, $($field: unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.ok().map(|found| *found),)* }
            }

            /// Each function's name, and whether it is there.
            pub fn functions(&self) -> Vec<(&'static str, bool)> {
                vec![$(($symbol, self.$field.is_some()),)*]
            }

            $(
                #[allow(dead_code)] // What may be missing in silence is asked for as a field.
                pub(super) fn $field(&self) -> Result<unsafe extern "C" fn($($arg),*) -> $result, AscendError> {
                    self.$field.ok_or(AscendError::FunctionMissing { name: $symbol })
                }
            )*
        }
    };
}

table! {
    /// `configPath`, or null.
    init = "aclInit": (*const c_char) -> Code;
    /// Out: count.
    device_count = "aclrtGetDeviceCount": (*mut u32) -> Code;
    /// The calling thread's device from now on.
    set_device = "aclrtSetDevice": (i32) -> Code;
    /// Of the calling thread's device.
    soc_name = "aclrtGetSocName": () -> *const c_char;
    /// Out: 1 where the first device can reach the second.
    can_access_peer = "aclrtDeviceCanAccessPeer": (*mut i32, i32, i32) -> Code;
    /// Lets the calling thread's device reach a peer; flags 0.
    enable_peer_access = "aclrtDeviceEnablePeerAccess": (i32, u32) -> Code;
    /// `aclrtMemAttr`; out: bytes free, bytes in all.
    memory_info = "aclrtGetMemInfo": (i32, *mut usize, *mut usize) -> Code;
    /// Out: address; bytes; policy.
    malloc = "aclrtMalloc": (*mut *mut c_void, usize, i32) -> Code;
    /// Address.
    free = "aclrtFree": (*mut c_void) -> Code;
    /// Destination, its size, source, bytes, kind.
    memcpy = "aclrtMemcpy": (*mut c_void, usize, *const c_void, usize, i32) -> Code;
    /// Destination, its size, source, bytes, kind, stream: done in the stream's order.
    memcpy_in_order = "aclrtMemcpyAsync": (*mut c_void, usize, *const c_void, usize, i32, *mut c_void) -> Code;
    /// Address, its size, value, bytes.
    memset = "aclrtMemset": (*mut c_void, usize, i32, usize) -> Code;
    /// Out: stream of the calling thread's device.
    create_stream = "aclrtCreateStream": (*mut *mut c_void) -> Code;
    /// Stream, mode: whether what stands behind work that failed is done.
    set_failure_mode = "aclrtSetStreamFailureMode": (*mut c_void, u64) -> Code;
    /// Stream.
    destroy_stream = "aclrtDestroyStream": (*mut c_void) -> Code;
    /// Out: event.
    create_event = "aclrtCreateEvent": (*mut *mut c_void) -> Code;
    /// Event.
    destroy_event = "aclrtDestroyEvent": (*mut c_void) -> Code;
    /// Event, stream.
    record_event = "aclrtRecordEvent": (*mut c_void, *mut c_void) -> Code;
    /// Stream, event: what is enqueued from now on comes behind the event.
    wait_event = "aclrtStreamWaitEvent": (*mut c_void, *mut c_void) -> Code;
    /// Event; out: whether all before it has ended.
    query_event = "aclrtQueryEventStatus": (*mut c_void, *mut i32) -> Code;
    /// Path, options or null; out: binary.
    load_binary = "aclrtBinaryLoadFromFile": (*const c_char, *const c_void, *mut *mut c_void) -> Code;
    /// Binary, name of the kernel; out: function.
    get_function = "aclrtBinaryGetFunction": (*mut c_void, *const c_char, *mut *mut c_void) -> Code;
    /// Function; out: parameters.
    init_args = "aclrtKernelArgsInit": (*mut c_void, *mut *mut c_void) -> Code;
    /// Parameters, bytes of one, how many; out: parameter.
    append_arg = "aclrtKernelArgsAppend": (*mut c_void, *mut c_void, usize, *mut *mut c_void) -> Code;
    /// Parameters.
    finalize_args = "aclrtKernelArgsFinalize": (*mut c_void) -> Code;
    /// Function, blocks, stream, configuration, parameters, null.
    launch = "aclrtLaunchKernelWithConfig": (*mut c_void, u32, *mut c_void, *const LaunchConfig, *mut c_void, *mut c_void) -> Code;
    /// Out: this process's number, as the library calls it.
    process_number = "aclrtDeviceGetBareTgid": (*mut i32) -> Code;
    /// Address, bytes; out: key, of so many bytes; flags 0.
    export_memory = "aclrtIpcMemGetExportKey": (*mut c_void, usize, *mut c_char, usize, u64) -> Code;
    /// Key; numbers of the processes that may open it, how many.
    allow_import = "aclrtIpcMemSetImportPid": (*const c_char, *mut i32, usize) -> Code;
    /// Out: address; key; flags: 1 lets the devices reach each other.
    import_memory = "aclrtIpcMemImportByKey": (*mut *mut c_void, *const c_char, u64) -> Code;
    /// Key.
    close_memory = "aclrtIpcMemClose": (*const c_char) -> Code;
    /// What went wrong last on the calling thread, or null.
    recent_error = "aclGetRecentErrMsg": () -> *const c_char;
}

/// Libraries of CANN, and what each is needed for.
pub const LIBRARIES: [(&str, &str); 2] = [
    ("libascendcl.so", "devices, memory, streams, launches"),
    ("libhccl.so", "the way between servers, which nothing asks it for yet"),
];

/// Nanoseconds since the first look.
fn system_clock() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

impl Table {
    /// The vendor's libraries, opened once for the process.
    ///
    /// # Errors
    /// [`AscendError::LibraryMissing`] where there is no ACL. Functions that it lacks are told by the calls that need them.
    pub fn open() -> Result<Self, AscendError> {
        static OPENED: OnceLock<Option<Library>> = OnceLock::new();
        let (library, _) = LIBRARIES[0];
        // SAFETY: the vendor's library; what it does when it is loaded is the vendor's matter.
        let opened = OPENED.get_or_init(|| unsafe { Library::new(library) }.ok());
        match opened {
            Some(opened) => Ok(Self::of(opened, system_clock)),
            None => Err(AscendError::LibraryMissing { library }),
        }
    }
}

/// Whether a library of [`LIBRARIES`] can be opened.
pub fn is_present(library: &str) -> bool {
    // SAFETY: as in `Table::open`.
    unsafe { Library::new(library) }.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine without CANN says so by name; one with it has its functions.
    #[test]
    fn what_is_missing_is_named() {
        match Table::open() {
            Ok(table) => assert!(table.functions().iter().any(|(_, there)| *there)),
            Err(error) => assert!(error.to_string().contains("libascendcl.so"), "{error}"),
        }
        let nothing = Table::empty("nothing", || 0);
        assert!(nothing.functions().iter().all(|(_, there)| !there));
        let said = nothing.launch().err().map(|error| error.to_string());
        assert!(said.is_some_and(|said| said.contains("aclrtLaunchKernelWithConfig")));
    }

    #[test]
    fn structs_are_laid_out_as_the_headers_say() {
        assert_eq!((size_of::<LaunchAttribute>(), size_of::<LaunchConfig>()), (20, 16));
    }
}
