//! The functions of libibverbs and libmlx5, with the C calling convention.
//!
//! Every pointer that a caller passes is looked up before it is used: one that stands for no object is complained of and
//! refused. Structures and messages of the caller are read and written as C does.

mod commands;
mod devices;
mod domains;
mod dv;

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use crate::complaint::Rule;
use crate::fabric::State;
use crate::handles::{self, Handle, Kind};
use crate::objects::CardState;

pub(crate) const EIO: c_int = 5;
pub(crate) const EBUSY: c_int = 16;
pub(crate) const ENODEV: c_int = 19;
pub(crate) const EINVAL: c_int = 22;
pub(crate) const EOPNOTSUPP: c_int = 95;
pub(crate) const EHOSTUNREACH: c_int = 113;
pub(crate) const EREMOTEIO: c_int = 121;

unsafe extern "C" {
    /// Where this thread's errno lies.
    fn __errno_location() -> *mut c_int;
}

/// Sets errno and gives it back.
fn errno(value: c_int) -> c_int {
    // SAFETY: the C library's own address of this thread's errno.
    unsafe { *__errno_location() = value };
    value
}

/// A null pointer, with errno.
fn null<T>(value: c_int) -> *mut T {
    errno(value);
    std::ptr::null_mut()
}

impl Handle {
    /// The state of its card's fabric, under the lock.
    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.shared.lock())
    }

    /// Its card, under the lock. None of a dead one: every function fails.
    fn card<R>(&self, function: &str, f: impl FnOnce(&mut CardState) -> Result<R, c_int>) -> Result<R, c_int> {
        self.with(|state| {
            let card = &mut state.cards[self.card];
            if let Some(failure) = card.failure(function) {
                return Err(failure.errno);
            }
            if card.dead { Err(EIO) } else { f(card) }
        })
    }

    fn sibling(&self, kind: Kind, id: u32) -> Self {
        Self { kind, id, ..self.clone() }
    }
}

/// The object behind a caller's pointer.
fn object(at: *const c_void, kinds: &[Kind]) -> Result<Handle, c_int> {
    handles::find(at, kinds).ok_or_else(|| {
        strays().push(format!("{at:p} is no {kinds:?}, or no longer"));
        EINVAL
    })
}

fn strays() -> std::sync::MutexGuard<'static, Vec<String>> {
    static STRAYS: std::sync::Mutex<Vec<String>> = std::sync::Mutex::new(Vec::new());
    STRAYS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Pointers that callers in this process passed and that stand for nothing, in order. No card can be told: nobody knows which.
pub fn stray_pointers() -> Vec<String> {
    strays().clone()
}

/// The end of what gives a pointer back.
fn finish(gone: Result<(), c_int>, at: *const c_void) -> c_int {
    match gone {
        Ok(()) => {
            handles::forget(at);
            0
        }
        Err(value) => errno(value),
    }
}

/// Refuses to give back what is in use, and says so.
fn in_use<R>(card: &mut CardState, text: String) -> Result<R, c_int> {
    card.complain(Rule::Destroy, text);
    Err(EBUSY)
}

/// The function of libibverbs or libmlx5 of this name, as the software card has it. None: it has none (as an old library).
pub fn symbol(name: &str) -> Option<NonNull<c_void>> {
    let function: *const () = match name {
        "ibv_get_device_list" => devices::ibv_get_device_list as *const (),
        "ibv_free_device_list" => devices::ibv_free_device_list as *const (),
        "ibv_get_device_name" => devices::ibv_get_device_name as *const (),
        "ibv_open_device" => devices::ibv_open_device as *const (),
        "ibv_close_device" => devices::ibv_close_device as *const (),
        "ibv_query_port" => devices::ibv_query_port as *const (),
        "ibv_query_gid" => devices::ibv_query_gid as *const (),
        "ibv_alloc_pd" => domains::ibv_alloc_pd as *const (),
        "ibv_dealloc_pd" => domains::ibv_dealloc_pd as *const (),
        "ibv_reg_mr" => domains::ibv_reg_mr as *const (),
        "ibv_reg_mr_iova2" => domains::ibv_reg_mr_iova2 as *const (),
        "ibv_reg_dmabuf_mr" => domains::ibv_reg_dmabuf_mr as *const (),
        "ibv_dereg_mr" => domains::ibv_dereg_mr as *const (),
        "ibv_create_ah" => domains::ibv_create_ah as *const (),
        "ibv_destroy_ah" => domains::ibv_destroy_ah as *const (),
        "mlx5dv_is_supported" => dv::mlx5dv_is_supported as *const (),
        "mlx5dv_open_device" => dv::mlx5dv_open_device as *const (),
        "mlx5dv_init_obj" => dv::mlx5dv_init_obj as *const (),
        "mlx5dv_devx_query_eqn" => dv::mlx5dv_devx_query_eqn as *const (),
        "mlx5dv_devx_alloc_uar" => dv::mlx5dv_devx_alloc_uar as *const (),
        "mlx5dv_devx_free_uar" => dv::mlx5dv_devx_free_uar as *const (),
        "mlx5dv_devx_umem_reg" => dv::mlx5dv_devx_umem_reg as *const (),
        "mlx5dv_devx_umem_reg_ex" => dv::mlx5dv_devx_umem_reg_ex as *const (),
        "mlx5dv_devx_umem_dereg" => dv::mlx5dv_devx_umem_dereg as *const (),
        "mlx5dv_devx_obj_create" => commands::mlx5dv_devx_obj_create as *const (),
        "mlx5dv_devx_obj_query" => commands::mlx5dv_devx_obj_query as *const (),
        "mlx5dv_devx_obj_modify" => commands::mlx5dv_devx_obj_modify as *const (),
        "mlx5dv_devx_obj_destroy" => commands::mlx5dv_devx_obj_destroy as *const (),
        "mlx5dv_devx_general_cmd" => commands::mlx5dv_devx_general_cmd as *const (),
        _ => return None,
    };
    NonNull::new(function as *mut c_void)
}
