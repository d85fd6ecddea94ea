//! libibverbs, opened when it is first needed and kept for the life of the process.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::{Arc, OnceLock};

use ep_rdma::sys::Device;
use ep_rdma::sys::{Context, Cq, DeviceAttr, Pd, Qp, QpAttr, QpInitAttr};
use ep_rdma::{Error, Libraries, Verbs};

ep_rdma::functions! {
    /// What this transport alone calls.
    pub(crate) struct Functions {
        needed {
            ibv_open_device: fn(*mut Device) -> *mut Context;
            ibv_query_device: fn(*mut Context, *mut DeviceAttr) -> c_int;
            ibv_create_cq: fn(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut Cq;
            ibv_destroy_cq: fn(*mut Cq) -> c_int;
            ibv_create_qp: fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
            ibv_modify_qp: fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
            ibv_destroy_qp: fn(*mut Qp) -> c_int;
        }
        optional {}
    }
}

/// Its functions, which stay where they are as long as `verbs` does.
pub(crate) struct Library {
    pub(crate) verbs: Verbs,
    pub(crate) functions: Functions,
}

impl Library {
    /// The library; the same answer for the life of the process.
    pub(crate) fn get() -> Result<&'static Self, Error> {
        static OPENED: OnceLock<Result<Library, Error>> = OnceLock::new();
        OPENED.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, Error> {
        let libraries = Arc::new(Libraries::open(&[("libibverbs.so.1", "libibverbs1 and ibverbs-providers")])?);
        // SAFETY: what libibverbs has by these names has been the same since its interface became stable.
        let functions = unsafe { Functions::resolve(&|name| libraries.lookup(name)) }?;
        Ok(Self { verbs: Verbs::of(&libraries)?, functions })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}
