//! The part of libmlx5's interface that is used: structures and numbers, as C lays them out. That of libibverbs is in [`ep_rdma::sys`].
//!
//! The tests compare them with `infiniband/mlx5dv.h`.

use std::ffi::{c_int, c_void};

/// `struct ibv_ah`, `struct mlx5dv_devx_obj`: known by address only.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Opaque {
    _private: [u8; 0],
}

/// `struct mlx5dv_context_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ContextAttr {
    pub(crate) flags: u32,
    pub(crate) comp_mask: u64,
}

/// `struct mlx5dv_devx_uar`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Uar {
    pub(crate) reg_addr: *mut c_void,
    pub(crate) base_addr: *mut c_void,
    pub(crate) page_id: u32,
    mmap_off: i64,
    comp_mask: u64,
}

/// `struct mlx5dv_devx_umem`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Umem {
    pub(crate) umem_id: u32,
}

/// `struct mlx5dv_devx_umem_in`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct UmemIn {
    pub(crate) addr: *mut c_void,
    pub(crate) size: usize,
    pub(crate) access: u32,
    pub(crate) pgsz_bitmap: u64,
    pub(crate) comp_mask: u64,
    pub(crate) dmabuf_fd: c_int,
}

/// `struct mlx5dv_pd`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PdNumber {
    pub(crate) pdn: u32,
    pub(crate) comp_mask: u64,
}

/// `struct mlx5_wqe_av`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AddressVector {
    key: u64,
    dqp_dct: u32,
    stat_rate_sl: u8,
    fl_mlid: u8,
    rlid: u16,
    reserved0: [u8; 4],
    pub(crate) rmac: [u8; 6],
    tclass: u8,
    hop_limit: u8,
    grh_gid_fl: u32,
    rgid: [u8; 16],
}

/// `struct mlx5dv_ah`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Ah {
    pub(crate) av: *mut AddressVector,
    pub(crate) comp_mask: u64,
}

/// A pair of `struct mlx5dv_obj`: what is asked about, and where the answer goes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObjPart {
    pub(crate) of: *mut c_void,
    pub(crate) out: *mut c_void,
}

impl ObjPart {
    pub(crate) const NONE: Self = Self { of: std::ptr::null_mut(), out: std::ptr::null_mut() };
}

/// `struct mlx5dv_obj`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Obj {
    /// Of queue pairs, completion queues, receive queues and device memory: not asked for.
    pub(crate) others: [ObjPart; 5],
    pub(crate) ah: ObjPart,
    pub(crate) pd: ObjPart,
}

impl Obj {
    pub(crate) const NONE: Self = Self { others: [ObjPart::NONE; 5], ah: ObjPart::NONE, pd: ObjPart::NONE };
}

/// `MLX5DV_CONTEXT_FLAGS_DEVX`.
pub(crate) const CONTEXT_DEVX: u32 = 1;
/// `MLX5DV_UMEM_MASK_DMABUF`.
pub(crate) const UMEM_DMABUF: u64 = 1;
/// `MLX5DV_UAR_ALLOC_TYPE_BF`.
pub(crate) const UAR_BF: u32 = 0;
/// `MLX5DV_UAR_ALLOC_TYPE_NC`.
pub(crate) const UAR_NC: u32 = 1;
/// `MLX5DV_OBJ_AH`.
pub(crate) const OBJ_AH: u64 = 1 << 5;
/// `MLX5DV_OBJ_PD`.
pub(crate) const OBJ_PD: u64 = 1 << 6;

#[cfg(test)]
#[path = "sys_tests.rs"]
mod tests;
