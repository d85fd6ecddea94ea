//! The part of libibverbs' and libmlx5's interface that is used: structures and numbers, as C lays them out.
//!
//! The tests compare them with `infiniband/verbs.h` and `infiniband/mlx5dv.h`.

use std::ffi::{c_int, c_uint, c_void};

/// `struct ibv_device`, `struct ibv_context`, `struct ibv_pd`, `struct ibv_ah`, `struct mlx5dv_devx_obj`: known by address only.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Opaque {
    _private: [u8; 0],
}

/// `struct ibv_mr`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Mr {
    context: *mut c_void,
    pd: *mut c_void,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PortAttr {
    pub(crate) state: c_uint,
    max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    port_cap_flags: u32,
    max_msg_sz: u32,
    bad_pkey_cntr: u32,
    qkey_viol_cntr: u32,
    pkey_tbl_len: u16,
    pub(crate) lid: u16,
    sm_lid: u16,
    lmc: u8,
    max_vl_num: u8,
    sm_sl: u8,
    subnet_timeout: u8,
    init_type_reply: u8,
    active_width: u8,
    active_speed: u8,
    phys_state: u8,
    pub(crate) link_layer: u8,
    flags: u8,
    port_cap_flags2: u16,
    /// Newer libraries have more behind it.
    more: [u32; 8],
}

/// `union ibv_gid`, which C aligns to its 64-bit half.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gid(pub(crate) [u8; 16]);

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GlobalRoute {
    pub(crate) dgid: Gid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AhAttr {
    pub(crate) grh: GlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
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

/// `IBV_PORT_ACTIVE`.
pub(crate) const PORT_ACTIVE: c_uint = 4;
/// `IBV_LINK_LAYER_ETHERNET`.
pub(crate) const LINK_ETHERNET: u8 = 2;
/// `IBV_ACCESS_LOCAL_WRITE`.
pub(crate) const ACCESS_LOCAL_WRITE: u32 = 1;
/// `IBV_ACCESS_REMOTE_WRITE`.
pub(crate) const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
/// `IBV_ACCESS_REMOTE_ATOMIC`.
pub(crate) const ACCESS_REMOTE_ATOMIC: u32 = 1 << 3;
/// `IBV_ACCESS_RELAXED_ORDERING`.
pub(crate) const ACCESS_RELAXED_ORDERING: u32 = 1 << 20;
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
