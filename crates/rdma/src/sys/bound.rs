//! The same structures and numbers from the crate `ibverbs-sys`, which makes them of rdma-core's own headers when it is built. They are those of a
//! newer rdma-core than this machine may have: structures that have grown since are longer.

#![allow(missing_docs, reason = "the header's own names")]

use std::ffi::{c_int, c_uint};

use ibverbs_sys as raw;

pub use raw::{
    ibv_ah_attr as AddressHandle, ibv_context as Context, ibv_cq as Cq, ibv_device as Device,
    ibv_device_attr as DeviceAttr, ibv_gid as Gid, ibv_mr as Mr, ibv_pd as Pd, ibv_port_attr as PortAttr, ibv_qp as Qp,
    ibv_qp_attr as QpAttr, ibv_qp_cap as QpCap, ibv_qp_init_attr as QpInitAttr, ibv_recv_wr as ReceiveRequest,
    ibv_send_wr as SendRequest, ibv_sge as Sge, ibv_wc as WorkCompletion,
};

use super::Remote;

/// Of a write the lower half of the addend is the key: so it lies in the union.
pub fn set_remote(request: &mut SendRequest, remote: Remote) {
    let Remote { addr, add_or_key, swap, key_of_atomic } = remote;
    request.wr.atomic.remote_addr = addr;
    request.wr.atomic.compare_add = add_or_key;
    request.wr.atomic.swap = swap;
    request.wr.atomic.rkey = key_of_atomic;
}

/// The number that its request had.
pub fn identifier(completion: &WorkCompletion) -> u64 {
    completion.wr_id()
}

/// Why it failed, if it did: the status, and the vendor's own code.
pub fn failure(completion: &WorkCompletion) -> Option<(c_uint, u32)> {
    completion.error()
}

/// Of what it is.
pub fn kind(completion: &WorkCompletion) -> c_uint {
    completion.opcode()
}

pub fn gid(bytes: [u8; 16]) -> Gid {
    Gid { raw: bytes }
}

pub fn bytes_of(gid: &Gid) -> [u8; 16] {
    // SAFETY: all bytes of the union are those of this array.
    unsafe { gid.raw }
}

pub const PORT_ACTIVE: c_uint = raw::ibv_port_state::IBV_PORT_ACTIVE;
pub const LINK_ETHERNET: u8 = raw::IBV_LINK_LAYER_ETHERNET as u8;
pub const QPT_RC: c_uint = raw::ibv_qp_type::IBV_QPT_RC;
pub const ATOMIC_NONE: c_uint = raw::IBV_ATOMIC_NONE;

pub const QPS_INIT: c_uint = raw::ibv_qp_state::IBV_QPS_INIT;
pub const QPS_RTR: c_uint = raw::ibv_qp_state::IBV_QPS_RTR;
pub const QPS_RTS: c_uint = raw::ibv_qp_state::IBV_QPS_RTS;

macro_rules! masks {
    ($($name:ident = $theirs:ident;)*) => {
        $(pub const $name: c_int = raw::ibv_qp_attr_mask::$theirs.0 as c_int;)*
    };
}
masks! {
    QP_STATE = IBV_QP_STATE;
    QP_ACCESS_FLAGS = IBV_QP_ACCESS_FLAGS;
    QP_PKEY_INDEX = IBV_QP_PKEY_INDEX;
    QP_PORT = IBV_QP_PORT;
    QP_AV = IBV_QP_AV;
    QP_PATH_MTU = IBV_QP_PATH_MTU;
    QP_TIMEOUT = IBV_QP_TIMEOUT;
    QP_RETRY_CNT = IBV_QP_RETRY_CNT;
    QP_RNR_RETRY = IBV_QP_RNR_RETRY;
    QP_RQ_PSN = IBV_QP_RQ_PSN;
    QP_MAX_QP_RD_ATOMIC = IBV_QP_MAX_QP_RD_ATOMIC;
    QP_MIN_RNR_TIMER = IBV_QP_MIN_RNR_TIMER;
    QP_SQ_PSN = IBV_QP_SQ_PSN;
    QP_MAX_DEST_RD_ATOMIC = IBV_QP_MAX_DEST_RD_ATOMIC;
    QP_DEST_QPN = IBV_QP_DEST_QPN;
}

pub const ACCESS_LOCAL_WRITE: c_uint = raw::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
pub const ACCESS_REMOTE_WRITE: c_uint = raw::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
pub const ACCESS_REMOTE_ATOMIC: c_uint = raw::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;
pub const ACCESS_RELAXED_ORDERING: c_uint = raw::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;

pub const WR_RDMA_WRITE: c_uint = raw::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
pub const WR_RDMA_WRITE_WITH_IMM: c_uint = raw::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
pub const WR_SEND: c_uint = raw::ibv_wr_opcode::IBV_WR_SEND;
pub const WR_FETCH_ADD: c_uint = raw::ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
pub const SEND_SIGNALED: c_uint = raw::ibv_send_flags::IBV_SEND_SIGNALED.0;
pub const SEND_INLINE: c_uint = raw::ibv_send_flags::IBV_SEND_INLINE.0;

pub const WC_RECV_RDMA_WITH_IMM: c_uint = raw::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
