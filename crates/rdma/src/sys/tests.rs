//! Our structures and numbers beside those of the header.

use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::own::*;

/// The header: that of this machine, or below the directory that `EP_VERBS_INCLUDE` names.
fn include() -> Option<PathBuf> {
    let named = std::env::var_os("EP_VERBS_INCLUDE").map(PathBuf::from);
    [named, Some("/usr/include".into())].into_iter().flatten().find(|at| at.join("infiniband/verbs.h").exists())
}

/// What C says of each expression.
fn in_c(include: &Path, expressions: &[&str]) -> Vec<u64> {
    let folder = std::env::temp_dir().join(format!("ep-rdma-abi-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, program) = (folder.join("abi.c"), folder.join("abi"));
    let mut text =
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n".to_owned();
    for expression in expressions {
        writeln!(text, "printf(\"%llu\\n\", (unsigned long long)({expression}));").unwrap();
    }
    std::fs::write(&source, text + "return 0; }\n").unwrap();
    let built = Command::new("cc").arg("-isystem").arg(include).arg("-o").arg(&program).arg(&source).output().unwrap();
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
    field!("ibv_qp, qp_num", Qp, qp_num);
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

/// What the crate's bindings have is what we have declared, so that either serves the library of this machine.
#[cfg(feature = "ibverbs")]
#[test]
fn structures_and_numbers_are_those_of_the_bindings() {
    use crate::sys::{Remote, bound, own};

    macro_rules! same {
        (size $($kind:ident),*) => {$(
            assert_eq!(size_of::<own::$kind>(), size_of::<bound::$kind>(), stringify!($kind));
        )*};
        (fields $($kind:ident: $($field:ident),*;)*) => {$($(
            assert_eq!(offset_of!(own::$kind, $field), offset_of!(bound::$kind, $field), "{}.{}", stringify!($kind), stringify!($field));
        )*)*};
        (numbers $($name:ident),*) => {$(
            assert_eq!(own::$name, bound::$name, stringify!($name));
        )*};
    }
    same!(size DeviceAttr, Gid, QpCap, QpInitAttr, QpAttr, Sge, SendRequest, ReceiveRequest, WorkCompletion);
    // Newer headers have more behind it.
    assert!(size_of::<PortAttr>() <= size_of::<bound::PortAttr>());
    same! { fields
        Context: ops;
        Cq: context;
        Mr: lkey, rkey;
        Qp: context, qp_num;
        DeviceAttr: max_qp_wr, max_cqe, max_qp_rd_atom, max_qp_init_rd_atom, atomic_cap, phys_port_cnt;
        PortAttr: state, active_mtu, gid_tbl_len, max_msg_sz, lid, link_layer;
        QpInitAttr: send_cq, recv_cq, cap, qp_type, sq_sig_all;
        QpAttr: qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, ah_attr, pkey_index, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry;
        SendRequest: wr_id, next, sg_list, num_sge, opcode, send_flags;
        ReceiveRequest: wr_id, next, sg_list, num_sge;
    }
    same!(numbers PORT_ACTIVE, LINK_ETHERNET, QPT_RC, ATOMIC_NONE, QPS_INIT, QPS_RTR, QPS_RTS, QP_STATE, QP_ACCESS_FLAGS, QP_PKEY_INDEX,
        QP_PORT, QP_AV, QP_PATH_MTU, QP_TIMEOUT, QP_RETRY_CNT, QP_RNR_RETRY, QP_RQ_PSN, QP_MAX_QP_RD_ATOMIC, QP_MIN_RNR_TIMER, QP_SQ_PSN,
        QP_MAX_DEST_RD_ATOMIC, QP_DEST_QPN, ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_RELAXED_ORDERING,
        WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_FETCH_ADD, SEND_SIGNALED, SEND_INLINE, WC_RECV_RDMA_WITH_IMM);
    assert_eq!(offset_of!(SendRequest, remote), offset_of!(bound::SendRequest, wr));
    let remote = Remote { addr: 1 << 60 | 2, add_or_key: 3 << 40 | 4, swap: 5, key_of_atomic: 6 };
    let mut request: bound::SendRequest = crate::sys::Zeroed::zeroed();
    bound::set_remote(&mut request, remote);
    // SAFETY: integers, written above.
    let (write, atomic) = unsafe { (request.wr.rdma, request.wr.atomic) };
    assert_eq!((write.remote_addr, write.rkey), (remote.addr, 4), "of a write the key is the lower half");
    assert_eq!((atomic.compare_add, atomic.swap, atomic.rkey), (remote.add_or_key, 5, 6));
    assert_eq!(bound::bytes_of(&bound::gid([7; 16])), [7; 16]);
}
