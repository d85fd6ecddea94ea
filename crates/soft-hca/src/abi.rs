//! The part of rdma-core's binary interface that a caller of these functions looks into: structures and numbers of
//! `infiniband/verbs.h` and `infiniband/mlx5dv.h`. `tests/header.rs` compares them with Debian's headers.

use std::ffi::{c_int, c_void};

/// `struct ibv_device`, of which callers know the pointer only.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    pub(crate) opaque: u64,
}

/// `struct ibv_context`, of which callers of exported functions know the device only.
#[repr(C)]
#[derive(Debug)]
pub struct Context {
    /// The device that was opened.
    pub device: *mut Device,
}

/// `struct ibv_pd`.
#[repr(C)]
#[derive(Debug)]
pub struct Pd {
    /// Its context.
    pub context: *mut Context,
    /// The kernel's number, which is not the card's (`mlx5dv_init_obj` gives that).
    pub handle: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
#[derive(Debug)]
pub struct Mr {
    /// Its context.
    pub context: *mut Context,
    /// Its protection domain.
    pub pd: *mut Pd,
    /// Where it begins.
    pub addr: *mut c_void,
    /// Its bytes.
    pub length: usize,
    /// The kernel's number.
    pub handle: u32,
    /// The key of data segments.
    pub lkey: u32,
    /// The key of remote addresses.
    pub rkey: u32,
}

/// `struct ibv_ah`.
#[repr(C)]
#[derive(Debug)]
pub struct Ah {
    /// Its context.
    pub context: *mut Context,
    /// Its protection domain.
    pub pd: *mut Pd,
    /// The kernel's number.
    pub handle: u32,
}

/// `struct ibv_global_route`.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy)]
pub struct GlobalRoute {
    /// The peer's GID.
    pub dgid: [u8; 16],
    /// A flow label of 20 bits.
    pub flow_label: u32,
    /// The own GID's place in the port's table.
    pub sgid_index: u8,
    /// How many routers may be passed.
    pub hop_limit: u8,
    /// The traffic class.
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct AhAttr {
    /// The route between subnets; RoCE has no other.
    pub grh: GlobalRoute,
    /// The peer's LID (InfiniBand).
    pub dlid: u16,
    /// The service level.
    pub sl: u8,
    /// Low bits of the own LID.
    pub src_path_bits: u8,
    /// A limit of the rate.
    pub static_rate: u8,
    /// Whether `grh` holds.
    pub is_global: u8,
    /// The port, 1.
    pub port_num: u8,
}

/// `struct ibv_port_attr` as far as the exported `ibv_query_port` fills it: 48 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PortAttr {
    /// 4 is active.
    pub state: u32,
    /// The largest path MTU, as a code: 5 is 4096.
    pub max_mtu: u32,
    /// The path MTU in use, as a code.
    pub active_mtu: u32,
    /// GIDs that the port has room for.
    pub gid_tbl_len: c_int,
    /// Capabilities.
    pub port_cap_flags: u32,
    /// The longest message.
    pub max_msg_sz: u32,
    /// A counter of errors.
    pub bad_pkey_cntr: u32,
    /// A counter of errors.
    pub qkey_viol_cntr: u32,
    /// Partition keys that the port has room for.
    pub pkey_tbl_len: u16,
    /// The own LID (InfiniBand).
    pub lid: u16,
    /// The subnet manager's LID.
    pub sm_lid: u16,
    /// Low bits of the LID that are free.
    pub lmc: u8,
    /// Virtual lanes.
    pub max_vl_num: u8,
    /// The subnet manager's service level.
    pub sm_sl: u8,
    /// The subnet's timeout.
    pub subnet_timeout: u8,
    /// The subnet manager's answer.
    pub init_type_reply: u8,
    /// Lanes of the cable.
    pub active_width: u8,
    /// Their speed.
    pub active_speed: u8,
    /// 5 is up.
    pub phys_state: u8,
    /// 1 InfiniBand, 2 Ethernet.
    pub link_layer: u8,
    /// Further flags.
    pub flags: u8,
}

/// `struct mlx5dv_context_attr`.
#[repr(C)]
#[derive(Debug)]
pub struct ContextAttr {
    /// 1: DEVX is wanted.
    pub flags: u32,
    /// Zero.
    pub comp_mask: u64,
}

/// `struct mlx5dv_devx_umem`.
#[repr(C)]
#[derive(Debug)]
pub struct Umem {
    /// The card's number.
    pub umem_id: u32,
}

/// `struct mlx5dv_devx_umem_in`.
#[repr(C)]
#[derive(Debug)]
pub struct UmemIn {
    /// The address; of a dmabuf, the offset.
    pub addr: *mut c_void,
    /// Bytes.
    pub size: usize,
    /// Access flags.
    pub access: u32,
    /// Page sizes that may be used.
    pub pgsz_bitmap: u64,
    /// 1: `dmabuf_fd` holds.
    pub comp_mask: u64,
    /// A dmabuf's descriptor.
    pub dmabuf_fd: c_int,
}

/// `struct mlx5dv_devx_uar`.
#[repr(C)]
#[derive(Debug)]
pub struct Uar {
    /// The doorbell register.
    pub reg_addr: *mut c_void,
    /// The page that it lies in.
    pub base_addr: *mut c_void,
    /// The page's number, which queues name.
    pub page_id: u32,
    /// Where the device file maps it.
    pub mmap_off: i64,
    /// Zero.
    pub comp_mask: u64,
}

/// `struct mlx5dv_devx_obj`, of which callers know the pointer only.
#[repr(C)]
#[derive(Debug)]
pub struct Obj {
    pub(crate) opaque: u64,
}

/// `struct mlx5dv_pd`.
#[repr(C)]
#[derive(Debug)]
pub struct PdOut {
    /// The card's number.
    pub pdn: u32,
    /// Zero.
    pub comp_mask: u64,
}

/// `struct mlx5_wqe_av`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Av {
    /// A key of datagrams.
    pub key: [u8; 8],
    /// The peer's number (datagrams).
    pub dqp_dct: [u8; 4],
    /// Rate and service level.
    pub stat_rate_sl: u8,
    /// Path bits.
    pub fl_mlid: u8,
    /// The peer's LID; with RoCE a UDP port.
    pub rlid: [u8; 2],
    /// Nothing.
    pub reserved0: [u8; 4],
    /// The peer's MAC address (RoCE).
    pub rmac: [u8; 6],
    /// The traffic class.
    pub tclass: u8,
    /// How many routers may be passed.
    pub hop_limit: u8,
    /// GRH flag, index of the own GID, flow label.
    pub grh_gid_fl: [u8; 4],
    /// The peer's GID.
    pub rgid: [u8; 16],
}

/// `struct mlx5dv_ah`.
#[repr(C)]
#[derive(Debug)]
pub struct AhOut {
    /// The address vector, which lives as long as the address handle.
    pub av: *mut Av,
    /// Zero.
    pub comp_mask: u64,
}

/// One member of `struct mlx5dv_obj`.
#[repr(C)]
#[derive(Debug)]
pub struct InOut<I, O> {
    /// The verbs object.
    pub input: *mut I,
    /// What is filled.
    pub output: *mut O,
}

/// `struct mlx5dv_obj`.
#[repr(C)]
#[derive(Debug)]
pub struct DvObj {
    /// Queue pair, completion queue, shared receive queue, work queue, device memory: not used here.
    pub others: [InOut<c_void, c_void>; 5],
    /// Address handle.
    pub ah: InOut<Ah, AhOut>,
    /// Protection domain.
    pub pd: InOut<Pd, PdOut>,
}

/// `MLX5DV_OBJ_AH`.
pub const OBJ_AH: u64 = 1 << 5;
/// `MLX5DV_OBJ_PD`.
pub const OBJ_PD: u64 = 1 << 6;
/// `MLX5DV_CONTEXT_FLAGS_DEVX`.
pub const CONTEXT_FLAGS_DEVX: u32 = 1;
/// `MLX5DV_UMEM_MASK_DMABUF`.
pub const UMEM_MASK_DMABUF: u64 = 1;
/// `IBV_ACCESS_LOCAL_WRITE`.
pub const LOCAL_WRITE: u32 = 1;
/// `IBV_ACCESS_REMOTE_WRITE`.
pub const REMOTE_WRITE: u32 = 2;
/// `IBV_ACCESS_REMOTE_READ`.
pub const REMOTE_READ: u32 = 4;
/// `IBV_ACCESS_REMOTE_ATOMIC`.
pub const REMOTE_ATOMIC: u32 = 8;
/// `IBV_ACCESS_RELAXED_ORDERING`.
pub const RELAXED_ORDERING: u32 = 1 << 20;
