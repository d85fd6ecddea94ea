//! The functions, found by name as a driver finds them.

use std::ffi::{c_char, c_int, c_uint, c_void};

use soft_hca::abi::{Ah, AhAttr, Context, ContextAttr, Device, DvObj, Mr, Obj, Pd, PortAttr, Uar, Umem, UmemIn};

macro_rules! library {
    ($($name:ident: fn($($arg:ty),*) $(-> $out:ty)?;)*) => {
        /// One pointer a function.
        #[derive(Clone, Copy)]
        pub(crate) struct Library { $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $out)?,)* }

        impl Library {
            pub(crate) fn new() -> Self {
                Self { $($name: {
                    let at = soft_hca::symbol(stringify!($name)).expect(stringify!($name));
                    // SAFETY: the signature is rdma-core's for this name.
                    unsafe { std::mem::transmute::<std::ptr::NonNull<c_void>, unsafe extern "C" fn($($arg),*) $(-> $out)?>(at) }
                },)* }
            }
        }
    };
}

library! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut Device;
    ibv_free_device_list: fn(*mut *mut Device);
    ibv_get_device_name: fn(*mut Device) -> *const c_char;
    ibv_open_device: fn(*mut Device) -> *mut Context;
    ibv_close_device: fn(*mut Context) -> c_int;
    ibv_query_port: fn(*mut Context, u8, *mut PortAttr) -> c_int;
    ibv_query_gid: fn(*mut Context, u8, c_int, *mut [u8; 16]) -> c_int;
    ibv_alloc_pd: fn(*mut Context) -> *mut Pd;
    ibv_dealloc_pd: fn(*mut Pd) -> c_int;
    ibv_reg_mr: fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    ibv_reg_mr_iova2: fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
    ibv_reg_dmabuf_mr: fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;
    ibv_dereg_mr: fn(*mut Mr) -> c_int;
    ibv_create_ah: fn(*mut Pd, *mut AhAttr) -> *mut Ah;
    ibv_destroy_ah: fn(*mut Ah) -> c_int;
    mlx5dv_is_supported: fn(*mut Device) -> bool;
    mlx5dv_open_device: fn(*mut Device, *mut ContextAttr) -> *mut Context;
    mlx5dv_init_obj: fn(*mut DvObj, u64) -> c_int;
    mlx5dv_devx_query_eqn: fn(*mut Context, u32, *mut u32) -> c_int;
    mlx5dv_devx_alloc_uar: fn(*mut Context, u32) -> *mut Uar;
    mlx5dv_devx_free_uar: fn(*mut Uar);
    mlx5dv_devx_umem_reg: fn(*mut Context, *mut c_void, usize, u32) -> *mut Umem;
    mlx5dv_devx_umem_reg_ex: fn(*mut Context, *mut UmemIn) -> *mut Umem;
    mlx5dv_devx_umem_dereg: fn(*mut Umem) -> c_int;
    mlx5dv_devx_obj_create: fn(*mut Context, *const c_void, usize, *mut c_void, usize) -> *mut Obj;
    mlx5dv_devx_obj_query: fn(*mut Obj, *const c_void, usize, *mut c_void, usize) -> c_int;
    mlx5dv_devx_obj_modify: fn(*mut Obj, *const c_void, usize, *mut c_void, usize) -> c_int;
    mlx5dv_devx_obj_destroy: fn(*mut Obj) -> c_int;
    mlx5dv_devx_general_cmd: fn(*mut Context, *const c_void, usize, *mut c_void, usize) -> c_int;
}
