//! Where the bytes of elements and completions lie. The test below compares all of it with Debian's `mlx5dv.h`.

/// Bytes of a unit of the send queue.
pub(crate) const UNIT: usize = 64;
/// Bytes of every segment but an inline one.
pub(crate) const SEGMENT: usize = 16;

/// The control segment.
pub(crate) mod control {
    pub(crate) const MODIFIER_INDEX_OPCODE: usize = 0;
    pub(crate) const QPN_SEGMENTS: usize = 4;
    pub(crate) const SIGNATURE: usize = 8;
    pub(crate) const FLAGS: usize = 11;

    pub(crate) const CQ_UPDATE: u8 = 2 << 2;
    /// Both bits that say when a completion is written.
    pub(crate) const COMPLETION: u8 = 3 << 2;
    /// The highest of the three bits of fences.
    pub(crate) const FENCE: u8 = 4 << 5;
    pub(crate) const FENCES: u8 = 7 << 5;
    pub(crate) const SOLICITED: u8 = 1 << 1;
}

/// Opcodes of elements.
pub(crate) mod opcode {
    pub(crate) const NOP: u8 = 0x00;
    pub(crate) const WRITE: u8 = 0x08;
    pub(crate) const FETCH_ADD: u8 = 0x12;
}

/// The remote address segment.
pub(crate) mod remote {
    pub(crate) const ADDR: usize = 0;
    pub(crate) const KEY: usize = 8;
    pub(crate) const RESERVED: usize = 12;
}

/// The atomic segment.
pub(crate) mod atomic {
    pub(crate) const ADD: usize = 0;
}

/// The data segment.
pub(crate) mod data {
    pub(crate) const LEN: usize = 0;
    pub(crate) const KEY: usize = 4;
    pub(crate) const ADDR: usize = 8;
}

/// The inline segment: a length with this bit, then the bytes.
pub(crate) mod inline {
    pub(crate) const BIT: u32 = 1 << 31;
    pub(crate) const BYTES: usize = 4;
}

/// Completions.
pub(crate) mod cqe {
    pub(crate) const USER: usize = 32;
    pub(crate) const IMMEDIATE: usize = 36;
    pub(crate) const LEN: usize = 44;
    pub(crate) const OPCODE_QPN: usize = 56;
    pub(crate) const COUNTER: usize = 60;
    pub(crate) const SIGNATURE: usize = 62;
    pub(crate) const OPCODE_OWNER: usize = 63;
    /// Of errors.
    pub(crate) const VENDOR: usize = 54;
    pub(crate) const SYNDROME: usize = 55;

    pub(crate) const REQUEST: u8 = 0;
    pub(crate) const REQUEST_ERROR: u8 = 13;
    /// All bits of an entry that was never written.
    pub(crate) const INVALID: u8 = 15;
}

/// Syndromes of errors.
pub(crate) mod syndrome {
    pub(crate) const LOCAL_LENGTH: u8 = 0x01;
    pub(crate) const LOCAL_OPERATION: u8 = 0x02;
    pub(crate) const LOCAL_PROTECTION: u8 = 0x04;
    pub(crate) const FLUSH: u8 = 0x05;
    pub(crate) const REMOTE_INVALID: u8 = 0x12;
    pub(crate) const REMOTE_ACCESS: u8 = 0x13;
    pub(crate) const RETRIES: u8 = 0x15;
}

/// Doorbell records: bytes to the halves.
pub(crate) mod record {
    pub(crate) const RECEIVE: usize = 0;
    pub(crate) const SEND: usize = 4;
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};
    use std::process::Command;

    use super::*;
    use crate::abi;

    /// What C++ says, and what this crate says.
    fn rows() -> Vec<(String, u64)> {
        let mut rows = Vec::new();
        let mut row = |c: String, value: u64| rows.push((c, value));
        for (structure, fields) in [
            (
                "mlx5_wqe_ctrl_seg",
                &[
                    ("opmod_idx_opcode", control::MODIFIER_INDEX_OPCODE),
                    ("qpn_ds", control::QPN_SEGMENTS),
                    ("signature", control::SIGNATURE),
                    ("fm_ce_se", control::FLAGS),
                ][..],
            ),
            ("mlx5_wqe_raddr_seg", &[("raddr", remote::ADDR), ("rkey", remote::KEY), ("reserved", remote::RESERVED)]),
            ("mlx5_wqe_atomic_seg", &[("swap_add", atomic::ADD)]),
            ("mlx5_wqe_data_seg", &[("byte_count", data::LEN), ("lkey", data::KEY), ("addr", data::ADDR)]),
            (
                "mlx5_cqe64",
                &[
                    ("srqn_uidx", cqe::USER),
                    ("imm_inval_pkey", cqe::IMMEDIATE),
                    ("byte_cnt", cqe::LEN),
                    ("sop_drop_qpn", cqe::OPCODE_QPN),
                    ("wqe_counter", cqe::COUNTER),
                    ("signature", cqe::SIGNATURE),
                    ("op_own", cqe::OPCODE_OWNER),
                ],
            ),
            (
                "mlx5_err_cqe",
                &[
                    ("srqn", cqe::USER),
                    ("vendor_err_synd", cqe::VENDOR),
                    ("syndrome", cqe::SYNDROME),
                    ("s_wqe_opcode_qpn", cqe::OPCODE_QPN),
                    ("wqe_counter", cqe::COUNTER),
                    ("op_own", cqe::OPCODE_OWNER),
                ],
            ),
        ] {
            for (field, at) in fields {
                row(format!("offsetof({structure}, {field})"), *at as u64);
            }
        }
        for (name, bytes) in [
            ("mlx5_wqe_ctrl_seg", SEGMENT),
            ("mlx5_wqe_raddr_seg", SEGMENT),
            ("mlx5_wqe_atomic_seg", SEGMENT),
            ("mlx5_wqe_data_seg", SEGMENT),
            ("mlx5_wqe_inl_data_seg", inline::BYTES),
            ("mlx5_cqe64", 64),
            ("mlx5_err_cqe", 64),
            ("mlx5_wqe_av", size_of::<abi::Av>()),
            ("mlx5dv_obj", size_of::<abi::DvObj>()),
            ("mlx5dv_pd", size_of::<abi::PdOut>()),
            ("mlx5dv_ah", size_of::<abi::AhOut>()),
            ("mlx5dv_devx_umem", size_of::<abi::Umem>()),
            ("mlx5dv_devx_umem_in", size_of::<abi::UmemIn>()),
            ("mlx5dv_devx_uar", size_of::<abi::Uar>()),
            ("mlx5dv_context_attr", size_of::<abi::ContextAttr>()),
            ("ibv_pd", size_of::<abi::Pd>()),
            ("ibv_mr", size_of::<abi::Mr>()),
            ("ibv_ah", size_of::<abi::Ah>()),
            ("ibv_ah_attr", size_of::<abi::AhAttr>()),
            ("ibv_global_route", size_of::<abi::GlobalRoute>()),
        ] {
            row(format!("sizeof({name})"), bytes as u64);
        }
        numbers(&mut row);
        offsets(&mut row);
        rows
    }

    fn numbers(row: &mut impl FnMut(String, u64)) {
        for (name, value) in [
            ("MLX5_SEND_WQE_BB", UNIT as u64),
            ("MLX5_WQE_CTRL_CQ_UPDATE", control::CQ_UPDATE.into()),
            ("MLX5_WQE_CTRL_FENCE", control::FENCE.into()),
            ("MLX5_WQE_CTRL_SOLICITED", control::SOLICITED.into()),
            ("MLX5_OPCODE_NOP", opcode::NOP.into()),
            ("MLX5_OPCODE_RDMA_WRITE", opcode::WRITE.into()),
            ("MLX5_OPCODE_ATOMIC_FA", opcode::FETCH_ADD.into()),
            ("MLX5_INLINE_SEG", inline::BIT.into()),
            ("MLX5_CQE_REQ", cqe::REQUEST.into()),
            ("MLX5_CQE_REQ_ERR", cqe::REQUEST_ERROR.into()),
            ("MLX5_CQE_INVALID", cqe::INVALID.into()),
            ("MLX5_CQE_OWNER_MASK", 1),
            ("MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR", syndrome::LOCAL_LENGTH.into()),
            ("MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR", syndrome::LOCAL_OPERATION.into()),
            ("MLX5_CQE_SYNDROME_LOCAL_PROT_ERR", syndrome::LOCAL_PROTECTION.into()),
            ("MLX5_CQE_SYNDROME_WR_FLUSH_ERR", syndrome::FLUSH.into()),
            ("MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR", syndrome::REMOTE_INVALID.into()),
            ("MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR", syndrome::REMOTE_ACCESS.into()),
            ("MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR", syndrome::RETRIES.into()),
            ("MLX5_RCV_DBR * 4", record::RECEIVE as u64),
            ("MLX5_SND_DBR * 4", record::SEND as u64),
            ("MLX5DV_OBJ_AH", abi::OBJ_AH),
            ("MLX5DV_OBJ_PD", abi::OBJ_PD),
            ("MLX5DV_CONTEXT_FLAGS_DEVX", abi::CONTEXT_FLAGS_DEVX.into()),
            ("MLX5DV_UMEM_MASK_DMABUF", abi::UMEM_MASK_DMABUF),
            ("IBV_ACCESS_LOCAL_WRITE", abi::LOCAL_WRITE.into()),
            ("IBV_ACCESS_REMOTE_WRITE", abi::REMOTE_WRITE.into()),
            ("IBV_ACCESS_REMOTE_READ", abi::REMOTE_READ.into()),
            ("IBV_ACCESS_REMOTE_ATOMIC", abi::REMOTE_ATOMIC.into()),
            ("IBV_ACCESS_RELAXED_ORDERING", abi::RELAXED_ORDERING.into()),
        ] {
            row(name.into(), value);
        }
    }

    fn offsets(row: &mut impl FnMut(String, u64)) {
        macro_rules! same {
            ($c:ident, $rust:ty: $($field:ident $(= $other:ident)?),*) => {$(
                let c = [$(stringify!($other),)? stringify!($field)][0];
                row(format!("offsetof({}, {c})", stringify!($c)), offset_of!($rust, $field) as u64);
            )*};
        }
        same!(ibv_context, abi::Context: device);
        same!(ibv_pd, abi::Pd: context, handle);
        same!(ibv_mr, abi::Mr: context, pd, addr, length, handle, lkey, rkey);
        same!(ibv_ah, abi::Ah: context, pd, handle);
        same!(ibv_global_route, abi::GlobalRoute: dgid, flow_label, sgid_index, hop_limit, traffic_class);
        same!(ibv_ah_attr, abi::AhAttr: grh, dlid, sl, src_path_bits, static_rate, is_global, port_num);
        same!(ibv_port_attr, abi::PortAttr: state, max_mtu, active_mtu, gid_tbl_len, max_msg_sz, pkey_tbl_len, lid, sm_lid, lmc);
        same!(ibv_port_attr, abi::PortAttr: max_vl_num, subnet_timeout, active_width, phys_state, link_layer, flags);
        same!(mlx5dv_context_attr, abi::ContextAttr: flags, comp_mask);
        same!(mlx5dv_devx_umem, abi::Umem: umem_id);
        same!(mlx5dv_devx_umem_in, abi::UmemIn: addr, size, access, pgsz_bitmap, comp_mask, dmabuf_fd);
        same!(mlx5dv_devx_uar, abi::Uar: reg_addr, base_addr, page_id, mmap_off, comp_mask);
        same!(mlx5dv_pd, abi::PdOut: pdn, comp_mask);
        same!(mlx5dv_ah, abi::AhOut: av, comp_mask);
        same!(mlx5dv_obj, abi::DvObj: ah, pd);
        same!(mlx5_wqe_av, abi::Av: key, dqp_dct, stat_rate_sl, fl_mlid, rlid, rmac, tclass, hop_limit, grh_gid_fl, rgid);
    }

    /// Elements, completions and the structures of the C interface are those of Debian's headers.
    #[test]
    #[ignore = "needs libibverbs-dev"]
    fn bytes_lie_where_the_headers_have_them() {
        let asserts: String = rows()
            .iter()
            .map(|(c, value)| format!("static_assert(({c}) == {value}u, \"{c} is not {value}\");\n"))
            .collect();
        let text = format!("#include <cstddef>\n#include <infiniband/mlx5dv.h>\n{asserts}");
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("layout.cpp");
        std::fs::write(&source, text).unwrap();
        let output = Command::new("g++").args(["-std=c++17", "-fsyntax-only"]).arg(&source).output().expect("g++");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
