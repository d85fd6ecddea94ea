//! The functions of libibverbs and libmlx5, looked up by name when they are first needed.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use ep_rdma::sys::{AddressHandle, Context, Device, Pd};
use ep_rdma::{Libraries, Verbs};

use crate::error::Error;
use crate::sys::{ContextAttr, Obj, Opaque, Uar, Umem, UmemIn};

/// The libraries, each with the package that has it.
const NAMES: [(&str, &str); 2] = [("libibverbs.so.1", "libibverbs1"), ("libmlx5.so.1", "ibverbs-providers")];

ep_rdma::functions! {
    /// What this transport alone calls.
    pub(crate) struct Functions {
        needed {
            ibv_create_ah: fn(*mut Pd, *mut AddressHandle) -> *mut Opaque;
            ibv_destroy_ah: fn(*mut Opaque) -> c_int;
            mlx5dv_is_supported: fn(*mut Device) -> bool;
            mlx5dv_open_device: fn(*mut Device, *mut ContextAttr) -> *mut Context;
            mlx5dv_devx_query_eqn: fn(*mut Context, u32, *mut u32) -> c_int;
            mlx5dv_devx_alloc_uar: fn(*mut Context, u32) -> *mut Uar;
            mlx5dv_devx_free_uar: fn(*mut Uar) -> ();
            mlx5dv_devx_umem_reg: fn(*mut Context, *mut c_void, usize, u32) -> *mut Umem;
            mlx5dv_devx_umem_dereg: fn(*mut Umem) -> c_int;
            mlx5dv_devx_obj_create: fn(*mut Context, *const c_void, usize, *mut c_void, usize) -> *mut Opaque;
            mlx5dv_devx_obj_query: fn(*mut Opaque, *const c_void, usize, *mut c_void, usize) -> c_int;
            mlx5dv_devx_obj_modify: fn(*mut Opaque, *const c_void, usize, *mut c_void, usize) -> c_int;
            mlx5dv_devx_obj_destroy: fn(*mut Opaque) -> c_int;
            mlx5dv_devx_general_cmd: fn(*mut Context, *const c_void, usize, *mut c_void, usize) -> c_int;
            mlx5dv_init_obj: fn(*mut Obj, u64) -> c_int;
        }
        optional {
            mlx5dv_devx_umem_reg_ex: fn(*mut Context, *mut UmemIn) -> *mut Umem;
        }
    }
}

/// The functions of libibverbs and libmlx5, and what keeps them where they are.
#[derive(Clone)]
pub struct Library {
    verbs: Verbs,
    /// They stay where they are as long as `verbs` does.
    functions: Functions,
}

impl Library {
    /// Those of this machine; the same answer for the life of the process.
    ///
    /// # Errors
    /// [`Error::Rdma`], with what is missing and the package that has it.
    pub fn open() -> Result<Self, Error> {
        static OPENED: OnceLock<Result<Library, ep_rdma::Error>> = OnceLock::new();
        Ok(OPENED.get_or_init(Self::load).clone()?)
    }

    fn load() -> Result<Self, ep_rdma::Error> {
        let libraries = Arc::new(Libraries::open(&NAMES)?);
        // SAFETY: what libibverbs and libmlx5 have by these names has been the same since their interfaces became stable.
        let functions = unsafe { Functions::resolve(&|name| libraries.lookup(name)) }?;
        Ok(Self { verbs: Verbs::of(&libraries)?, functions })
    }

    pub(crate) const fn verbs(&self) -> &Verbs {
        &self.verbs
    }

    pub(crate) const fn functions(&self) -> &Functions {
        &self.functions
    }

    /// What `lookup` finds by name: another implementation of the same interface, as a software adapter is.
    ///
    /// # Errors
    /// [`ep_rdma::Error::Symbol`] where one is missing that nothing can do without.
    ///
    /// # Safety
    /// What is found by a name is the function that libibverbs or libmlx5 has by that name, with the same arguments and rules, and it
    /// stays where it is for the life of the process.
    pub unsafe fn from(lookup: impl Fn(&str) -> Option<NonNull<c_void>>) -> Result<Self, Error> {
        // SAFETY: the caller says so.
        let (functions, verbs) = unsafe { (Functions::resolve(&lookup)?, Verbs::from(&lookup)?) };
        Ok(Self { verbs, functions })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn nothing() {}

    #[test]
    fn what_is_missing_is_named_and_what_may_be_missing_is_not() {
        let have = |missing: &'static str| {
            move |name: &str| (name != missing).then(|| NonNull::new(nothing as *mut c_void)).flatten()
        };
        // SAFETY: no function of it is called.
        let library = |missing| unsafe { Library::from(have(missing)) };
        let error = library("mlx5dv_devx_obj_create").unwrap_err();
        assert!(error.to_string().contains("no mlx5dv_devx_obj_create"), "{error}");
        let old = library("mlx5dv_devx_umem_reg_ex").unwrap();
        assert!(old.functions().mlx5dv_devx_umem_reg_ex.is_none());
    }
}
