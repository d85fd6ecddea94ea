//! libibverbs, opened when it is first needed and kept for the life of the process.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::error::Error;
use crate::sys::{Context, Cq, Device, DeviceAttr, Gid, Mr, Pd, PortAttr, Qp, QpAttr, QpInitAttr};

/// Names under which the library is looked for.
const NAMES: [&str; 2] = ["libibverbs.so.1", "libibverbs.so"];

macro_rules! functions {
    (
        needed { $($name:ident: fn($($argument:ty),*) -> $result:ty;)* }
        optional { $($may:ident: fn($($may_argument:ty),*) -> $may_result:ty;)* }
    ) => {
        /// Its functions; those that older ones lack are optional.
        pub(crate) struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(crate) $may: Option<unsafe extern "C" fn($($may_argument),*) -> $may_result>,)*
            /// Keeps the code where it is.
            _library: libloading::Library,
        }

        impl Library {
            fn resolve(library: libloading::Library) -> Result<Self, Error> {
                $(
                    // SAFETY: the symbol, if it is there, is this function of the stable interface, with these arguments.
                    let found = unsafe { library.get::<unsafe extern "C" fn($($argument),*) -> $result>(stringify!($name)) };
                    let $name = *found.map_err(|_| Error::Symbol { name: stringify!($name) })?;
                )*
                $(
                    // SAFETY: as above.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($may_argument),*) -> $may_result>(stringify!($may))
                    };
                    let $may = found.ok().map(|found| *found);
                )*
                Ok(Self { $($name,)* $($may,)* _library: library })
            }
        }
    };
}

functions! {
    needed {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut Device;
    ibv_free_device_list: fn(*mut *mut Device) -> ();
    ibv_get_device_name: fn(*mut Device) -> *const c_char;
    ibv_open_device: fn(*mut Device) -> *mut Context;
    ibv_close_device: fn(*mut Context) -> c_int;
    ibv_query_device: fn(*mut Context, *mut DeviceAttr) -> c_int;
    ibv_query_port: fn(*mut Context, u8, *mut PortAttr) -> c_int;
    ibv_query_gid: fn(*mut Context, u8, c_int, *mut Gid) -> c_int;
    ibv_alloc_pd: fn(*mut Context) -> *mut Pd;
    ibv_dealloc_pd: fn(*mut Pd) -> c_int;
    ibv_reg_mr: fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    ibv_reg_mr_iova2: fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
    ibv_dereg_mr: fn(*mut Mr) -> c_int;
    ibv_create_cq: fn(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut Cq;
    ibv_destroy_cq: fn(*mut Cq) -> c_int;
    ibv_create_qp: fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    ibv_modify_qp: fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    ibv_destroy_qp: fn(*mut Qp) -> c_int;
    }
    optional {
    ibv_reg_dmabuf_mr: fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;
    }
}

impl Library {
    /// The library; the same answer for the life of the process.
    pub(crate) fn get() -> Result<&'static Self, Error> {
        static OPENED: OnceLock<Result<Library, String>> = OnceLock::new();
        let opened = OPENED.get_or_init(|| {
            let mut why = String::new();
            for name in NAMES {
                // SAFETY: its initialisers are those of a system library.
                match unsafe { libloading::Library::new(name) } {
                    Ok(library) => return Self::resolve(library).map_err(|error| error.to_string()),
                    Err(error) if why.is_empty() => why = error.to_string(),
                    Err(_) => {}
                }
            }
            Err(why)
        });
        opened.as_ref().map_err(|why| Error::Library { why: why.clone() })
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}
