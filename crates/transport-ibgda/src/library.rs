//! The functions of libibverbs and libmlx5, looked up by name when they are first needed.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use crate::error::Error;
use crate::sys::{AhAttr, ContextAttr, Gid, Mr, Obj, Opaque, PortAttr, Uar, Umem, UmemIn};

/// Names under which the libraries are looked for, each with the package that has it.
const NAMES: [(&str, &str); 2] = [("libibverbs.so.1", "libibverbs1"), ("libmlx5.so.1", "ibverbs-providers")];

macro_rules! functions {
    (
        needed { $($name:ident: fn($($argument:ty),*) -> $result:ty;)* }
        optional { $($may:ident: fn($($may_argument:ty),*) -> $may_result:ty;)* }
    ) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
            $($may: Option<unsafe extern "C" fn($($may_argument),*) -> $may_result>,)*
        }

        impl Functions {
            fn resolve(lookup: &dyn Fn(&str) -> Option<NonNull<c_void>>) -> Result<Self, Error> {
                $(
                    let found = lookup(stringify!($name)).ok_or(Error::Symbol { name: stringify!($name) })?;
                    // SAFETY: whoever looks up says that the symbol is this function of the stable interface.
                    let $name = unsafe {
                        std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($argument),*) -> $result>(found)
                    };
                )*
                $(
                    // SAFETY: as above.
                    let $may = lookup(stringify!($may)).map(|found| unsafe {
                        std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($may_argument),*) -> $may_result>(found)
                    });
                )*
                Ok(Self { $($name,)* $($may,)* })
            }
        }

        impl Library {
            $(pub(crate) fn $name(&self) -> unsafe extern "C" fn($($argument),*) -> $result {
                self.0.functions.$name
            })*
            $(pub(crate) fn $may(&self) -> Option<unsafe extern "C" fn($($may_argument),*) -> $may_result> {
                self.0.functions.$may
            })*
        }
    };
}

functions! {
    needed {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut Opaque;
    ibv_free_device_list: fn(*mut *mut Opaque) -> ();
    ibv_get_device_name: fn(*mut Opaque) -> *const c_char;
    ibv_close_device: fn(*mut Opaque) -> c_int;
    ibv_query_port: fn(*mut Opaque, u8, *mut PortAttr) -> c_int;
    ibv_query_gid: fn(*mut Opaque, u8, c_int, *mut Gid) -> c_int;
    ibv_alloc_pd: fn(*mut Opaque) -> *mut Opaque;
    ibv_dealloc_pd: fn(*mut Opaque) -> c_int;
    ibv_reg_mr: fn(*mut Opaque, *mut c_void, usize, c_int) -> *mut Mr;
    ibv_dereg_mr: fn(*mut Mr) -> c_int;
    ibv_create_ah: fn(*mut Opaque, *mut AhAttr) -> *mut Opaque;
    ibv_destroy_ah: fn(*mut Opaque) -> c_int;
    mlx5dv_is_supported: fn(*mut Opaque) -> bool;
    mlx5dv_open_device: fn(*mut Opaque, *mut ContextAttr) -> *mut Opaque;
    mlx5dv_devx_query_eqn: fn(*mut Opaque, u32, *mut u32) -> c_int;
    mlx5dv_devx_alloc_uar: fn(*mut Opaque, u32) -> *mut Uar;
    mlx5dv_devx_free_uar: fn(*mut Uar) -> ();
    mlx5dv_devx_umem_reg: fn(*mut Opaque, *mut c_void, usize, u32) -> *mut Umem;
    mlx5dv_devx_umem_dereg: fn(*mut Umem) -> c_int;
    mlx5dv_devx_obj_create: fn(*mut Opaque, *const c_void, usize, *mut c_void, usize) -> *mut Opaque;
    mlx5dv_devx_obj_query: fn(*mut Opaque, *const c_void, usize, *mut c_void, usize) -> c_int;
    mlx5dv_devx_obj_modify: fn(*mut Opaque, *const c_void, usize, *mut c_void, usize) -> c_int;
    mlx5dv_devx_obj_destroy: fn(*mut Opaque) -> c_int;
    mlx5dv_devx_general_cmd: fn(*mut Opaque, *const c_void, usize, *mut c_void, usize) -> c_int;
    mlx5dv_init_obj: fn(*mut Obj, u64) -> c_int;
    }
    optional {
    ibv_reg_mr_iova2: fn(*mut Opaque, *mut c_void, usize, u64, c_uint) -> *mut Mr;
    ibv_reg_dmabuf_mr: fn(*mut Opaque, u64, usize, u64, c_int, c_int) -> *mut Mr;
    mlx5dv_devx_umem_reg_ex: fn(*mut Opaque, *mut UmemIn) -> *mut Umem;
    }
}

/// The functions of libibverbs and libmlx5, and what keeps them where they are.
#[derive(Clone)]
pub struct Library(Arc<Loaded>);

struct Loaded {
    functions: Functions,
    /// Keeps the code where it is.
    _libraries: Vec<libloading::Library>,
}

impl Library {
    /// Those of this machine; the same answer for the life of the process.
    ///
    /// # Errors
    /// [`Error::Library`] and [`Error::Symbol`], with what is missing and the package that has it.
    pub fn open() -> Result<Self, Error> {
        static OPENED: OnceLock<Result<Library, Error>> = OnceLock::new();
        OPENED.get_or_init(Self::load).clone()
    }

    fn load() -> Result<Self, Error> {
        let load = |(name, package)| {
            // SAFETY: its initialisers are those of a system library.
            let library = unsafe { libloading::Library::new(name) };
            library.map_err(|error| Error::Library { name, package, why: error.to_string() })
        };
        let libraries = NAMES.map(load).into_iter().collect::<Result<Vec<_>, _>>()?;
        let lookup = |name: &str| {
            libraries.iter().find_map(|library| {
                // SAFETY: taken as an address only.
                let found = unsafe { library.get::<*mut c_void>(name) }.ok()?;
                NonNull::new(*found)
            })
        };
        let functions = Functions::resolve(&lookup)?;
        Ok(Self(Arc::new(Loaded { functions, _libraries: libraries })))
    }

    /// What `lookup` finds by name: another implementation of the same interface, as a software adapter is.
    ///
    /// # Errors
    /// [`Error::Symbol`] where one is missing that nothing can do without.
    ///
    /// # Safety
    /// What is found by a name is the function that libibverbs or libmlx5 has by that name, with the same arguments and rules, and it
    /// stays where it is for the life of the process.
    pub unsafe fn from(lookup: impl Fn(&str) -> Option<NonNull<c_void>>) -> Result<Self, Error> {
        Ok(Self(Arc::new(Loaded { functions: Functions::resolve(&lookup)?, _libraries: Vec::new() })))
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
        assert!(old.mlx5dv_devx_umem_reg_ex().is_none() && old.ibv_reg_mr_iova2().is_some());
    }
}
