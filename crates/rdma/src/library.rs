//! Functions of libibverbs, and of the libraries beside it, looked up by name at run time.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::Error;
use crate::sys::{Context, Device, Gid, Mr, Pd, PortAttr};

/// A table of functions of C, of which older libraries may lack the optional ones. Its `resolve` looks them up.
///
/// ```
/// ep_rdma::functions! {
///     /// What this example calls.
///     struct Functions {
///         needed { ibv_fork_init: fn() -> std::ffi::c_int; }
///         optional { ibv_is_fork_initialized: fn() -> std::ffi::c_int; }
///     }
/// }
///
/// // SAFETY: nothing is found, so nothing is called.
/// let found = unsafe { Functions::resolve(&|_| None) };
/// assert!(found.err().unwrap().to_string().contains("no ibv_fork_init"));
/// # fn called(functions: &Functions) {
/// #     // SAFETY: no preconditions.
/// #     unsafe { (functions.ibv_fork_init)() };
/// #     functions.ibv_is_fork_initialized.unwrap();
/// # }
/// ```
#[macro_export]
macro_rules! functions {
    (
        $(#[$about:meta])*
        $seen:vis struct $table:ident {
            needed { $($name:ident: fn($($argument:ty),* $(,)?) -> $result:ty;)* }
            optional { $($may:ident: fn($($may_argument:ty),* $(,)?) -> $may_result:ty;)* }
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy)]
        $seen struct $table {
            $($seen $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            $($seen $may: Option<unsafe extern "C" fn($($may_argument),*) -> $may_result>,)*
        }

        impl $table {
            /// Looks all of them up. The error names one that is missing and needed.
            ///
            /// # Safety
            /// What is found by a name is the function that the library has by that name, with the same arguments and rules.
            $seen unsafe fn resolve(
                lookup: &dyn Fn(&str) -> Option<std::ptr::NonNull<std::ffi::c_void>>,
            ) -> Result<Self, $crate::Error> {
                $(
                    let found = lookup(stringify!($name)).ok_or($crate::Error::Symbol { name: stringify!($name) })?;
                    // SAFETY: the caller says that the symbol is this function.
                    let $name = unsafe {
                        std::mem::transmute::<
                            std::ptr::NonNull<std::ffi::c_void>,
                            unsafe extern "C" fn($($argument),*) -> $result,
                        >(found)
                    };
                )*
                $(
                    // SAFETY: as above.
                    let $may = lookup(stringify!($may)).map(|found| unsafe {
                        std::mem::transmute::<
                            std::ptr::NonNull<std::ffi::c_void>,
                            unsafe extern "C" fn($($may_argument),*) -> $may_result,
                        >(found)
                    });
                )*
                Ok(Self { $($name,)* $($may,)* })
            }
        }
    };
}

functions! {
    /// Those that both transports call.
    pub(crate) struct Functions {
        needed {
            ibv_get_device_list: fn(*mut c_int) -> *mut *mut Device;
            ibv_free_device_list: fn(*mut *mut Device) -> ();
            ibv_get_device_name: fn(*mut Device) -> *const c_char;
            ibv_close_device: fn(*mut Context) -> c_int;
            ibv_query_port: fn(*mut Context, u8, *mut PortAttr) -> c_int;
            ibv_query_gid: fn(*mut Context, u8, c_int, *mut Gid) -> c_int;
            ibv_alloc_pd: fn(*mut Context) -> *mut Pd;
            ibv_dealloc_pd: fn(*mut Pd) -> c_int;
            ibv_reg_mr: fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
            ibv_dereg_mr: fn(*mut Mr) -> c_int;
        }
        optional {
            ibv_reg_mr_iova2: fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
            ibv_reg_dmabuf_mr: fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;
        }
    }
}

/// Libraries of this machine, opened. Their code stays where it is as long as the value lives.
#[derive(Debug)]
pub struct Libraries(Vec<libloading::Library>);

impl Libraries {
    /// Opens libraries by their names, each with the packages that have it.
    ///
    /// # Errors
    /// [`Error::Library`] for the first that cannot be opened.
    pub fn open(names: &[(&'static str, &'static str)]) -> Result<Self, Error> {
        let load = |&(name, packages): &(&'static str, &'static str)| {
            // SAFETY: its initialisers are those of a system library.
            let library = unsafe { libloading::Library::new(name) };
            library.map_err(|error| Error::Library { name, packages, why: error.to_string() })
        };
        names.iter().map(load).collect::<Result<_, _>>().map(Self)
    }

    /// Where a function is.
    pub fn lookup(&self, name: &str) -> Option<NonNull<c_void>> {
        self.0.iter().find_map(|library| {
            // SAFETY: taken as an address only.
            let found = unsafe { library.get::<*mut c_void>(name) }.ok()?;
            NonNull::new(*found)
        })
    }
}

/// The functions of libibverbs that both transports call, and what keeps them where they are.
#[derive(Clone)]
pub struct Verbs {
    pub(crate) functions: Functions,
    _libraries: Option<Arc<Libraries>>,
}

impl Verbs {
    /// Those of libibverbs.
    ///
    /// # Errors
    /// [`Error::Symbol`] where one is missing.
    pub fn of(libraries: &Arc<Libraries>) -> Result<Self, Error> {
        // SAFETY: what libibverbs has by these names has been the same since its interface became stable.
        let functions = unsafe { Functions::resolve(&|name| libraries.lookup(name)) }?;
        Ok(Self { functions, _libraries: Some(Arc::clone(libraries)) })
    }

    /// What `lookup` finds by name: another implementation of the same interface, as a software adapter is.
    ///
    /// # Errors
    /// [`Error::Symbol`] where one is missing that nothing can do without.
    ///
    /// # Safety
    /// What is found by a name is the function that libibverbs has by that name, with the same arguments and rules, and it stays where it is for
    /// the life of the process.
    pub unsafe fn from(lookup: &dyn Fn(&str) -> Option<NonNull<c_void>>) -> Result<Self, Error> {
        // SAFETY: the caller says so.
        let functions = unsafe { Functions::resolve(lookup) }?;
        Ok(Self { functions, _libraries: None })
    }
}

impl fmt::Debug for Verbs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verbs").finish_non_exhaustive()
    }
}
