//! Structures and numbers of `infiniband/verbs.h`, which have been stable since libibverbs 1.0 (new fields come at ends, new calls get new names).
//!
//! They are written down here and not generated, so that the crate builds on any machine: the library is opened when it is needed. A test compiles a
//! C program against the header, where there is one, and compares every size and offset.

#![allow(missing_docs, reason = "the header's own names")]

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::Remote;

/// What a verb returned by the library, not by a function of its own: those are found through the device's table.
#[repr(C)]
#[derive(Debug)]
pub struct ContextOps {
    before_poll: [*const c_void; 11],
    pub poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut WorkCompletion) -> c_int>,
    between: [*const c_void; 13],
    pub post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendRequest, *mut *mut SendRequest) -> c_int>,
    pub post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut ReceiveRequest, *mut *mut ReceiveRequest) -> c_int>,
}

/// `struct ibv_context`, as far as it is needed.
#[repr(C)]
#[derive(Debug)]
pub struct Context {
    device: *mut Device,
    pub ops: ContextOps,
}

/// `struct ibv_device`, of which nothing is looked at.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    opaque: [u8; 0],
}

/// `struct ibv_pd`, of which nothing is looked at.
#[repr(C)]
#[derive(Debug)]
pub struct Pd {
    opaque: [u8; 0],
}

/// `struct ibv_cq`, as far as it is needed.
#[repr(C)]
#[derive(Debug)]
pub struct Cq {
    pub context: *mut Context,
}

/// `struct ibv_mr`.
#[repr(C)]
#[derive(Debug)]
pub struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// `struct ibv_qp`, as far as it is needed.
#[repr(C)]
#[derive(Debug)]
pub struct Qp {
    pub context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut Pd,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut c_void,
    handle: u32,
    pub qp_num: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttr {
    fw_ver: [c_char; 64],
    node_guid: u64,
    sys_image_guid: u64,
    max_mr_size: u64,
    page_size_cap: u64,
    vendor_id: u32,
    vendor_part_id: u32,
    hw_ver: u32,
    max_qp: c_int,
    pub max_qp_wr: c_int,
    device_cap_flags: c_uint,
    max_sge: c_int,
    max_sge_rd: c_int,
    max_cq: c_int,
    pub max_cqe: c_int,
    max_mr: c_int,
    max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    max_ee_rd_atom: c_int,
    max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_uint,
    rest: [c_int; 14],
    max_pkeys: u16,
    local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PortAttr {
    pub state: c_uint,
    max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    port_cap_flags: u32,
    pub max_msg_sz: u32,
    bad_pkey_cntr: u32,
    qkey_viol_cntr: u32,
    pkey_tbl_len: u16,
    pub lid: u16,
    sm_lid: u16,
    lmc: u8,
    max_vl_num: u8,
    sm_sl: u8,
    subnet_timeout: u8,
    init_type_reply: u8,
    active_width: u8,
    active_speed: u8,
    phys_state: u8,
    pub link_layer: u8,
    flags: u8,
    port_cap_flags2: u16,
}

/// `union ibv_gid`, which C aligns to its 64-bit half.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct Gid(pub [u8; 16]);

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AddressHandle {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    src_path_bits: u8,
    static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
#[derive(Debug)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut c_void,
    pub cap: QpCap,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QpAttr {
    pub qp_state: c_uint,
    cur_qp_state: c_uint,
    pub path_mtu: c_uint,
    path_mig_state: c_uint,
    qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    cap: QpCap,
    pub ah_attr: AddressHandle,
    alt_ah_attr: AddressHandle,
    pub pkey_index: u16,
    alt_pkey_index: u16,
    en_sqd_async_notify: u8,
    sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    alt_port_num: u8,
    alt_timeout: u8,
    rate_limit: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SendRequest {
    pub wr_id: u64,
    pub next: *mut SendRequest,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    pub imm_data: u32,
    pub remote: Remote,
    qp_type: u32,
    bind_or_tso: [u64; 6],
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest {
    pub wr_id: u64,
    pub next: *mut ReceiveRequest,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WorkCompletion {
    pub wr_id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_err: u32,
    byte_len: u32,
    imm_data: u32,
    qp_num: u32,
    src_qp: u32,
    wc_flags: c_uint,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

pub fn set_remote(request: &mut SendRequest, remote: Remote) {
    request.remote = remote;
}

/// The number that its request had.
pub fn identifier(completion: &WorkCompletion) -> u64 {
    completion.wr_id
}

/// Why it failed, if it did: the status, and the vendor's own code.
pub fn failure(completion: &WorkCompletion) -> Option<(c_uint, u32)> {
    (completion.status != 0).then_some((completion.status, completion.vendor_err))
}

/// Of what it is.
pub fn kind(completion: &WorkCompletion) -> c_uint {
    completion.opcode
}

pub fn gid(bytes: [u8; 16]) -> Gid {
    Gid(bytes)
}

pub fn bytes_of(gid: &Gid) -> [u8; 16] {
    gid.0
}

pub const PORT_ACTIVE: c_uint = 4;
pub const LINK_ETHERNET: u8 = 2;
pub const QPT_RC: c_uint = 2;
pub const ATOMIC_NONE: c_uint = 0;

pub const QPS_INIT: c_uint = 1;
pub const QPS_RTR: c_uint = 2;
pub const QPS_RTS: c_uint = 3;

pub const QP_STATE: c_int = 1;
pub const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub const QP_PKEY_INDEX: c_int = 1 << 4;
pub const QP_PORT: c_int = 1 << 5;
pub const QP_AV: c_int = 1 << 7;
pub const QP_PATH_MTU: c_int = 1 << 8;
pub const QP_TIMEOUT: c_int = 1 << 9;
pub const QP_RETRY_CNT: c_int = 1 << 10;
pub const QP_RNR_RETRY: c_int = 1 << 11;
pub const QP_RQ_PSN: c_int = 1 << 12;
pub const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub const QP_SQ_PSN: c_int = 1 << 16;
pub const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub const QP_DEST_QPN: c_int = 1 << 20;

pub const ACCESS_LOCAL_WRITE: c_uint = 1;
pub const ACCESS_REMOTE_WRITE: c_uint = 1 << 1;
pub const ACCESS_REMOTE_ATOMIC: c_uint = 1 << 3;
pub const ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;

pub const WR_RDMA_WRITE: c_uint = 0;
pub const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub const WR_SEND: c_uint = 2;
pub const WR_FETCH_ADD: c_uint = 6;
pub const SEND_SIGNALED: c_uint = 1 << 1;
pub const SEND_INLINE: c_uint = 1 << 3;

/// Set in the opcode of what was received.
pub const WC_RECV: c_uint = 1 << 7;
pub const WC_RECV_RDMA_WITH_IMM: c_uint = WC_RECV + 1;
