//! The part of libibverbs' binary interface that this crate uses: structures and numbers of `infiniband/verbs.h`, which have been
//! stable since libibverbs 1.0 (new fields come at ends, new calls get new names).
//!
//! They are written down here and not generated, so that the crate builds on any machine: the library is opened when it is
//! needed. A test compiles a C program against the header, where there is one, and compares every size and offset.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// What a verb returned by the library, not by a function of its own: those are found through the device's table.
#[repr(C)]
pub(crate) struct ContextOps {
    before_poll: [*const c_void; 11],
    pub(crate) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut WorkCompletion) -> c_int>,
    between: [*const c_void; 13],
    pub(crate) post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendRequest, *mut *mut SendRequest) -> c_int>,
    pub(crate) post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut ReceiveRequest, *mut *mut ReceiveRequest) -> c_int>,
}

/// `struct ibv_context`, as far as it is needed.
#[repr(C)]
pub(crate) struct Context {
    device: *mut Device,
    pub(crate) ops: ContextOps,
}

/// `struct ibv_device`, of which nothing is looked at.
#[repr(C)]
pub(crate) struct Device {
    opaque: [u8; 0],
}

/// `struct ibv_pd`, of which nothing is looked at.
#[repr(C)]
pub(crate) struct Pd {
    opaque: [u8; 0],
}

/// `struct ibv_cq`, as far as it is needed.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) context: *mut Context,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(crate) struct Mr {
    context: *mut Context,
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// `struct ibv_qp`, as far as it is needed.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut Pd,
    send_cq: *mut Cq,
    recv_cq: *mut Cq,
    srq: *mut c_void,
    handle: u32,
    pub(crate) number: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceAttr {
    fw_ver: [c_char; 64],
    node_guid: u64,
    sys_image_guid: u64,
    max_mr_size: u64,
    page_size_cap: u64,
    vendor_id: u32,
    vendor_part_id: u32,
    hw_ver: u32,
    max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    device_cap_flags: c_uint,
    max_sge: c_int,
    max_sge_rd: c_int,
    max_cq: c_int,
    pub(crate) max_cqe: c_int,
    max_mr: c_int,
    max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    max_ee_rd_atom: c_int,
    max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: c_uint,
    rest: [c_int; 14],
    max_pkeys: u16,
    local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PortAttr {
    pub(crate) state: c_uint,
    max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
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
}

/// `union ibv_gid`, which C aligns to its 64-bit half.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(crate) struct Gid(pub(crate) [u8; 16]);

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct GlobalRoute {
    pub(crate) dgid: Gid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AddressHandle {
    pub(crate) grh: GlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    src_path_bits: u8,
    static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut Cq,
    pub(crate) recv_cq: *mut Cq,
    pub(crate) srq: *mut c_void,
    pub(crate) cap: QpCap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QpAttr {
    pub(crate) qp_state: c_uint,
    cur_qp_state: c_uint,
    pub(crate) path_mtu: c_uint,
    path_mig_state: c_uint,
    qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    cap: QpCap,
    pub(crate) ah_attr: AddressHandle,
    alt_ah_attr: AddressHandle,
    pub(crate) pkey_index: u16,
    alt_pkey_index: u16,
    en_sqd_async_notify: u8,
    sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    alt_port_num: u8,
    alt_timeout: u8,
    rate_limit: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// The part of `struct ibv_send_wr` that differs from request to request: of writes the first two, of atomics all.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Remote {
    pub(crate) addr: u64,
    /// Of writes, the key in its lower half (little-endian machines) and nothing in the upper.
    pub(crate) add_or_key: u64,
    pub(crate) swap: u64,
    pub(crate) key_of_atomic: u32,
}

/// `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendRequest {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut SendRequest,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) send_flags: c_uint,
    pub(crate) imm_data: u32,
    pub(crate) remote: Remote,
    qp_type: u32,
    bind_or_tso: [u64; 6],
}

/// `struct ibv_recv_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ReceiveRequest {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut ReceiveRequest,
    pub(crate) sg_list: *mut Sge,
    pub(crate) num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct WorkCompletion {
    pub(crate) wr_id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    pub(crate) vendor_err: u32,
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

macro_rules! zeroed {
    ($($kind:ty),*) => {$(
        impl $kind {
            pub(crate) const fn zeroed() -> Self {
                // SAFETY: the structure has integers and pointers only, for which zero is a value.
                unsafe { std::mem::zeroed() }
            }
        }
    )*};
}
zeroed!(DeviceAttr, PortAttr, QpInitAttr, QpAttr, SendRequest, ReceiveRequest, WorkCompletion);

pub(crate) const PORT_ACTIVE: c_uint = 4;
pub(crate) const LINK_ETHERNET: u8 = 2;
pub(crate) const QPT_RC: c_uint = 2;
pub(crate) const ATOMIC_NONE: c_uint = 0;

pub(crate) const QPS_INIT: c_uint = 1;
pub(crate) const QPS_RTR: c_uint = 2;
pub(crate) const QPS_RTS: c_uint = 3;

pub(crate) const QP_STATE: c_int = 1;
pub(crate) const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(crate) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(crate) const QP_PORT: c_int = 1 << 5;
pub(crate) const QP_AV: c_int = 1 << 7;
pub(crate) const QP_PATH_MTU: c_int = 1 << 8;
pub(crate) const QP_TIMEOUT: c_int = 1 << 9;
pub(crate) const QP_RETRY_CNT: c_int = 1 << 10;
pub(crate) const QP_RNR_RETRY: c_int = 1 << 11;
pub(crate) const QP_RQ_PSN: c_int = 1 << 12;
pub(crate) const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(crate) const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(crate) const QP_SQ_PSN: c_int = 1 << 16;
pub(crate) const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(crate) const QP_DEST_QPN: c_int = 1 << 20;

pub(crate) const ACCESS_LOCAL_WRITE: c_uint = 1;
pub(crate) const ACCESS_REMOTE_WRITE: c_uint = 1 << 1;
pub(crate) const ACCESS_REMOTE_ATOMIC: c_uint = 1 << 3;
pub(crate) const ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;

pub(crate) const WR_RDMA_WRITE: c_uint = 0;
pub(crate) const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub(crate) const WR_SEND: c_uint = 2;
pub(crate) const WR_FETCH_ADD: c_uint = 6;
pub(crate) const SEND_SIGNALED: c_uint = 1 << 1;
pub(crate) const SEND_INLINE: c_uint = 1 << 3;

/// Set in the opcode of what was received.
pub(crate) const WC_RECV: c_uint = 1 << 7;
pub(crate) const WC_RECV_RDMA_WITH_IMM: c_uint = WC_RECV + 1;

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::mem::{offset_of, size_of};
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::*;

    /// The header: that of this machine, or below the directory that `EP_VERBS_INCLUDE` names.
    fn include() -> Option<PathBuf> {
        let named = std::env::var_os("EP_VERBS_INCLUDE").map(PathBuf::from);
        [named, Some("/usr/include".into())].into_iter().flatten().find(|at| at.join("infiniband/verbs.h").exists())
    }

    /// What C says of each expression.
    fn in_c(include: &Path, expressions: &[&str]) -> Vec<u64> {
        let folder = std::env::temp_dir().join(format!("ep-roce-abi-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (source, program) = (folder.join("abi.c"), folder.join("abi"));
        let mut text =
            "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n".to_owned();
        for expression in expressions {
            writeln!(text, "printf(\"%llu\\n\", (unsigned long long)({expression}));").unwrap();
        }
        std::fs::write(&source, text + "return 0; }\n").unwrap();
        let built =
            Command::new("cc").arg("-isystem").arg(include).arg("-o").arg(&program).arg(&source).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let said = Command::new(&program).output().unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        String::from_utf8(said.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect()
    }

    #[test]
    #[ignore = "NOT RUN: needs infiniband/verbs.h (EP_VERBS_INCLUDE) and a C compiler; ci/roce has them"]
    fn structures_and_numbers_are_those_of_the_header() {
        let include = include().expect("infiniband/verbs.h; EP_VERBS_INCLUDE says where");
        let mut rows: Vec<(&str, u64)> = Vec::new();
        macro_rules! field { ($c:literal, $rust:ty, $($field:ident).+) => { rows.push((concat!("offsetof(struct ", $c, ")"), offset_of!($rust, $($field).+) as u64)); }; }
        macro_rules! whole {
            ($c:literal, $rust:ty) => {
                rows.push((concat!("sizeof(", $c, ")"), size_of::<$rust>() as u64));
            };
        }
        rows.push((
            "offsetof(struct ibv_context, ops.poll_cq)",
            (offset_of!(Context, ops) + offset_of!(ContextOps, poll_cq)) as u64,
        ));
        rows.push((
            "offsetof(struct ibv_context, ops.post_send)",
            (offset_of!(Context, ops) + offset_of!(ContextOps, post_send)) as u64,
        ));
        rows.push((
            "offsetof(struct ibv_context, ops.post_recv)",
            (offset_of!(Context, ops) + offset_of!(ContextOps, post_recv)) as u64,
        ));
        field!("ibv_cq, context", Cq, context);
        field!("ibv_mr, lkey", Mr, lkey);
        field!("ibv_mr, rkey", Mr, rkey);
        field!("ibv_qp, context", Qp, context);
        field!("ibv_qp, qp_num", Qp, number);
        whole!("struct ibv_device_attr", DeviceAttr);
        field!("ibv_device_attr, max_qp_wr", DeviceAttr, max_qp_wr);
        field!("ibv_device_attr, max_cqe", DeviceAttr, max_cqe);
        field!("ibv_device_attr, max_qp_rd_atom", DeviceAttr, max_qp_rd_atom);
        field!("ibv_device_attr, max_qp_init_rd_atom", DeviceAttr, max_qp_init_rd_atom);
        field!("ibv_device_attr, atomic_cap", DeviceAttr, atomic_cap);
        field!("ibv_device_attr, phys_port_cnt", DeviceAttr, phys_port_cnt);
        whole!("struct ibv_port_attr", PortAttr);
        field!("ibv_port_attr, active_mtu", PortAttr, active_mtu);
        field!("ibv_port_attr, gid_tbl_len", PortAttr, gid_tbl_len);
        field!("ibv_port_attr, max_msg_sz", PortAttr, max_msg_sz);
        field!("ibv_port_attr, lid", PortAttr, lid);
        field!("ibv_port_attr, link_layer", PortAttr, link_layer);
        whole!("union ibv_gid", Gid);
        rows.push(("_Alignof(union ibv_gid)", align_of::<Gid>() as u64));
        whole!("struct ibv_ah_attr", AddressHandle);
        field!("ibv_ah_attr, grh.traffic_class", AddressHandle, grh.traffic_class);
        field!("ibv_ah_attr, dlid", AddressHandle, dlid);
        field!("ibv_ah_attr, port_num", AddressHandle, port_num);
        whole!("struct ibv_qp_init_attr", QpInitAttr);
        field!("ibv_qp_init_attr, cap.max_inline_data", QpInitAttr, cap.max_inline_data);
        field!("ibv_qp_init_attr, qp_type", QpInitAttr, qp_type);
        whole!("struct ibv_qp_attr", QpAttr);
        field!("ibv_qp_attr, path_mtu", QpAttr, path_mtu);
        field!("ibv_qp_attr, rq_psn", QpAttr, rq_psn);
        field!("ibv_qp_attr, sq_psn", QpAttr, sq_psn);
        field!("ibv_qp_attr, dest_qp_num", QpAttr, dest_qp_num);
        field!("ibv_qp_attr, qp_access_flags", QpAttr, qp_access_flags);
        field!("ibv_qp_attr, ah_attr", QpAttr, ah_attr);
        field!("ibv_qp_attr, pkey_index", QpAttr, pkey_index);
        field!("ibv_qp_attr, max_rd_atomic", QpAttr, max_rd_atomic);
        field!("ibv_qp_attr, max_dest_rd_atomic", QpAttr, max_dest_rd_atomic);
        field!("ibv_qp_attr, min_rnr_timer", QpAttr, min_rnr_timer);
        field!("ibv_qp_attr, port_num", QpAttr, port_num);
        field!("ibv_qp_attr, timeout", QpAttr, timeout);
        field!("ibv_qp_attr, retry_cnt", QpAttr, retry_cnt);
        field!("ibv_qp_attr, rnr_retry", QpAttr, rnr_retry);
        whole!("struct ibv_sge", Sge);
        whole!("struct ibv_send_wr", SendRequest);
        field!("ibv_send_wr, num_sge", SendRequest, num_sge);
        field!("ibv_send_wr, opcode", SendRequest, opcode);
        field!("ibv_send_wr, send_flags", SendRequest, send_flags);
        field!("ibv_send_wr, imm_data", SendRequest, imm_data);
        field!("ibv_send_wr, wr.rdma.remote_addr", SendRequest, remote.addr);
        field!("ibv_send_wr, wr.rdma.rkey", SendRequest, remote.add_or_key);
        field!("ibv_send_wr, wr.atomic.compare_add", SendRequest, remote.add_or_key);
        field!("ibv_send_wr, wr.atomic.rkey", SendRequest, remote.key_of_atomic);
        whole!("struct ibv_recv_wr", ReceiveRequest);
        whole!("struct ibv_wc", WorkCompletion);
        field!("ibv_wc, status", WorkCompletion, status);
        field!("ibv_wc, opcode", WorkCompletion, opcode);
        field!("ibv_wc, vendor_err", WorkCompletion, vendor_err);
        for (name, value) in [
            ("IBV_PORT_ACTIVE", PORT_ACTIVE),
            ("IBV_LINK_LAYER_ETHERNET", LINK_ETHERNET.into()),
            ("IBV_QPT_RC", QPT_RC),
            ("IBV_ATOMIC_NONE", ATOMIC_NONE),
            ("IBV_QPS_INIT", QPS_INIT),
            ("IBV_QPS_RTR", QPS_RTR),
            ("IBV_QPS_RTS", QPS_RTS),
            ("IBV_ACCESS_LOCAL_WRITE", ACCESS_LOCAL_WRITE),
            ("IBV_ACCESS_REMOTE_WRITE", ACCESS_REMOTE_WRITE),
            ("IBV_ACCESS_REMOTE_ATOMIC", ACCESS_REMOTE_ATOMIC),
            ("IBV_ACCESS_RELAXED_ORDERING", ACCESS_RELAXED_ORDERING),
            ("IBV_WR_RDMA_WRITE", WR_RDMA_WRITE),
            ("IBV_WR_RDMA_WRITE_WITH_IMM", WR_RDMA_WRITE_WITH_IMM),
            ("IBV_WR_SEND", WR_SEND),
            ("IBV_WR_ATOMIC_FETCH_AND_ADD", WR_FETCH_ADD),
            ("IBV_SEND_SIGNALED", SEND_SIGNALED),
            ("IBV_SEND_INLINE", SEND_INLINE),
            ("IBV_WC_RECV", WC_RECV),
            ("IBV_WC_RECV_RDMA_WITH_IMM", WC_RECV_RDMA_WITH_IMM),
        ] {
            rows.push((name, value.into()));
        }
        for (name, value) in [
            ("IBV_QP_STATE", QP_STATE),
            ("IBV_QP_ACCESS_FLAGS", QP_ACCESS_FLAGS),
            ("IBV_QP_PKEY_INDEX", QP_PKEY_INDEX),
            ("IBV_QP_PORT", QP_PORT),
            ("IBV_QP_AV", QP_AV),
            ("IBV_QP_PATH_MTU", QP_PATH_MTU),
            ("IBV_QP_TIMEOUT", QP_TIMEOUT),
            ("IBV_QP_RETRY_CNT", QP_RETRY_CNT),
            ("IBV_QP_RNR_RETRY", QP_RNR_RETRY),
            ("IBV_QP_RQ_PSN", QP_RQ_PSN),
            ("IBV_QP_MAX_QP_RD_ATOMIC", QP_MAX_QP_RD_ATOMIC),
            ("IBV_QP_MIN_RNR_TIMER", QP_MIN_RNR_TIMER),
            ("IBV_QP_SQ_PSN", QP_SQ_PSN),
            ("IBV_QP_MAX_DEST_RD_ATOMIC", QP_MAX_DEST_RD_ATOMIC),
            ("IBV_QP_DEST_QPN", QP_DEST_QPN),
        ] {
            rows.push((name, value as u64));
        }
        let names: Vec<&str> = rows.iter().map(|(name, _)| *name).collect();
        let said = in_c(&include, &names);
        assert_eq!(said.len(), rows.len());
        for ((name, ours), theirs) in rows.iter().zip(said) {
            assert_eq!(*ours, theirs, "{name}");
        }
    }
}
