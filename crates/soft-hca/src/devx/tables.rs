//! Where the fields of commands lie: bits from the start of the message.

use crate::bits::{Field, field};

pub(crate) const OPCODE: Field = field("opcode", 0x00, 16);
pub(crate) const OP_MOD: Field = field("op_mod", 0x30, 16);
/// The number of the object that a command is about.
pub(crate) const NUMBER: Field = field("number", 0x48, 24);
/// Of every command. The kernel writes `uid`: a driver leaves it zero.
pub(crate) const HEAD: &[Field] = &[OPCODE, OP_MOD];

/// Answers.
pub(crate) mod out {
    use super::{Field, field};

    pub(crate) const STATUS: Field = field("status", 0x00, 8);
    pub(crate) const SYNDROME: Field = field("syndrome", 0x20, 32);
}

/// CREATE_CQ.
pub(crate) mod cq {
    use super::{Field, field};

    pub(crate) const BYTES: usize = 0x110;
    pub(crate) const DBR_UMEM_VALID: Field = field("dbr_umem_valid", 0x86, 1);
    pub(crate) const CQE_SZ: Field = field("cqe_sz", 0x88, 3);
    pub(crate) const CC: Field = field("cc", 0x8b, 1);
    pub(crate) const OI: Field = field("oi", 0x8e, 1);
    pub(crate) const DBR_UMEM_ID: Field = field("dbr_umem_id", 0xa0, 32);
    pub(crate) const PAGE_OFFSET: Field = field("page_offset", 0xd4, 6);
    pub(crate) const LOG_CQ_SIZE: Field = field("log_cq_size", 0xe3, 5);
    pub(crate) const UAR_PAGE: Field = field("uar_page", 0xe8, 24);
    pub(crate) const C_EQN: Field = field("c_eqn", 0x138, 8);
    pub(crate) const LOG_PAGE_SIZE: Field = field("log_page_size", 0x143, 5);
    pub(crate) const DBR_ADDR: Field = field("dbr_addr", 0x240, 64);
    pub(crate) const CQ_UMEM_OFFSET: Field = field("cq_umem_offset", 0x280, 64);
    pub(crate) const CQ_UMEM_ID: Field = field("cq_umem_id", 0x2c0, 32);
    pub(crate) const CQ_UMEM_VALID: Field = field("cq_umem_valid", 0x2e0, 1);

    pub(crate) const ALL: &[Field] = &[
        DBR_UMEM_VALID,
        CQE_SZ,
        CC,
        OI,
        DBR_UMEM_ID,
        PAGE_OFFSET,
        LOG_CQ_SIZE,
        UAR_PAGE,
        C_EQN,
        LOG_PAGE_SIZE,
        DBR_ADDR,
        CQ_UMEM_OFFSET,
        CQ_UMEM_ID,
        CQ_UMEM_VALID,
    ];
}

/// CREATE_QP, the transitions, and the answer to QUERY_QP: the context lies at byte 18h of each.
pub(crate) mod qp {
    use super::{Field, field};

    pub(crate) const BYTES: usize = 0x110;
    pub(crate) const CONTEXT: std::ops::Range<usize> = 0x18..0x100;
    pub(crate) const OPT_PARAM_MASK: Field = field("opt_param_mask", 0x80, 32);

    pub(crate) const STATE: Field = field("state", 0xc0, 4);
    pub(crate) const ST: Field = field("st", 0xc8, 8);
    pub(crate) const ISOLATE_VL_TC: Field = field("isolate_vl_tc", 0xd2, 1);
    pub(crate) const PM_STATE: Field = field("pm_state", 0xd3, 2);
    pub(crate) const PD: Field = field("pd", 0xe8, 24);
    pub(crate) const MTU: Field = field("mtu", 0x100, 3);
    pub(crate) const LOG_MSG_MAX: Field = field("log_msg_max", 0x103, 5);
    pub(crate) const LOG_RQ_SIZE: Field = field("log_rq_size", 0x109, 4);
    pub(crate) const NO_SQ: Field = field("no_sq", 0x110, 1);
    pub(crate) const LOG_SQ_SIZE: Field = field("log_sq_size", 0x111, 4);
    pub(crate) const RLKY: Field = field("rlky", 0x11b, 1);
    pub(crate) const COUNTER_SET_ID: Field = field("counter_set_id", 0x120, 8);
    pub(crate) const UAR_PAGE: Field = field("uar_page", 0x128, 24);
    pub(crate) const SEND_DBR_MODE: Field = field("send_dbr_mode", 0x140, 2);
    pub(crate) const USER_INDEX: Field = field("user_index", 0x148, 24);
    pub(crate) const LOG_PAGE_SIZE: Field = field("log_page_size", 0x163, 5);
    pub(crate) const REMOTE_QPN: Field = field("remote_qpn", 0x168, 24);
    pub(crate) const PKEY_INDEX: Field = field("pkey_index", 0x190, 16);
    pub(crate) const GRH: Field = field("grh", 0x1a8, 1);
    pub(crate) const RLID: Field = field("rlid", 0x1b0, 16);
    pub(crate) const ACK_TIMEOUT: Field = field("ack_timeout", 0x1c0, 5);
    pub(crate) const SRC_ADDR_INDEX: Field = field("src_addr_index", 0x1c8, 8);
    pub(crate) const HOP_LIMIT: Field = field("hop_limit", 0x1d8, 8);
    pub(crate) const TCLASS: Field = field("tclass", 0x1e4, 8);
    pub(crate) const RGID: Field = field("rgid", 0x200, 128);
    pub(crate) const DSCP: Field = field("dscp", 0x28a, 6);
    pub(crate) const UDP_SPORT: Field = field("udp_sport", 0x290, 16);
    pub(crate) const ETH_PRIO: Field = field("eth_prio", 0x2a1, 3);
    pub(crate) const SL: Field = field("sl", 0x2a4, 4);
    pub(crate) const VHCA_PORT_NUM: Field = field("vhca_port_num", 0x2a8, 8);
    pub(crate) const RMAC: Field = field("rmac", 0x2b0, 48);
    pub(crate) const LOG_ACK_REQ_FREQ: Field = field("log_ack_req_freq", 0x440, 4);
    pub(crate) const LOG_SRA_MAX: Field = field("log_sra_max", 0x448, 3);
    pub(crate) const RETRY_COUNT: Field = field("retry_count", 0x44d, 3);
    pub(crate) const RNR_RETRY: Field = field("rnr_retry", 0x450, 3);
    pub(crate) const NEXT_SEND_PSN: Field = field("next_send_psn", 0x488, 24);
    pub(crate) const CQN_SND: Field = field("cqn_snd", 0x4a8, 24);
    pub(crate) const LOG_RRA_MAX: Field = field("log_rra_max", 0x548, 3);
    pub(crate) const ATOMIC_MODE: Field = field("atomic_mode", 0x54c, 4);
    pub(crate) const RRE: Field = field("rre", 0x550, 1);
    pub(crate) const RWE: Field = field("rwe", 0x551, 1);
    pub(crate) const RAE: Field = field("rae", 0x552, 1);
    pub(crate) const PAGE_OFFSET: Field = field("page_offset", 0x554, 6);
    pub(crate) const MIN_RNR_NAK: Field = field("min_rnr_nak", 0x563, 5);
    pub(crate) const NEXT_RCV_PSN: Field = field("next_rcv_psn", 0x568, 24);
    pub(crate) const CQN_RCV: Field = field("cqn_rcv", 0x5a8, 24);
    pub(crate) const DBR_ADDR: Field = field("dbr_addr", 0x5c0, 64);
    pub(crate) const RQ_TYPE: Field = field("rq_type", 0x625, 3);
    pub(crate) const SRQN: Field = field("srqn_rmpn_xrqn", 0x628, 24);
    pub(crate) const HW_SQ_COUNTER: Field = field("hw_sq_wqebb_counter", 0x660, 16);
    pub(crate) const SW_SQ_COUNTER: Field = field("sw_sq_wqebb_counter", 0x670, 16);
    pub(crate) const DBR_UMEM_VALID: Field = field("dbr_umem_valid", 0x743, 1);
    pub(crate) const DBR_UMEM_ID: Field = field("dbr_umem_id", 0x7e0, 32);
    pub(crate) const WQ_UMEM_OFFSET: Field = field("wq_umem_offset", 0x800, 64);
    pub(crate) const WQ_UMEM_ID: Field = field("wq_umem_id", 0x840, 32);
    pub(crate) const WQ_UMEM_VALID: Field = field("wq_umem_valid", 0x860, 1);

    /// What CREATE_QP leaves in the context.
    pub(crate) const CREATED: &[Field] = &[
        ST,
        ISOLATE_VL_TC,
        PM_STATE,
        PD,
        LOG_RQ_SIZE,
        NO_SQ,
        LOG_SQ_SIZE,
        RLKY,
        COUNTER_SET_ID,
        UAR_PAGE,
        SEND_DBR_MODE,
        USER_INDEX,
        LOG_PAGE_SIZE,
        CQN_SND,
        PAGE_OFFSET,
        CQN_RCV,
        DBR_ADDR,
        RQ_TYPE,
        SRQN,
        DBR_UMEM_VALID,
        DBR_UMEM_ID,
    ];
    /// Of the memory of a queue pair, beside the context.
    pub(crate) const CREATE_ONLY: &[Field] = &[WQ_UMEM_OFFSET, WQ_UMEM_ID, WQ_UMEM_VALID];
    /// What RST2INIT sets.
    pub(crate) const INIT: &[Field] = &[PM_STATE, PKEY_INDEX, VHCA_PORT_NUM, ATOMIC_MODE, RRE, RWE, RAE];
    /// What INIT2RTR sets.
    pub(crate) const RTR: &[Field] = &[
        MTU,
        LOG_MSG_MAX,
        REMOTE_QPN,
        GRH,
        RLID,
        SRC_ADDR_INDEX,
        HOP_LIMIT,
        TCLASS,
        RGID,
        DSCP,
        UDP_SPORT,
        ETH_PRIO,
        SL,
        RMAC,
        LOG_RRA_MAX,
        MIN_RNR_NAK,
        NEXT_RCV_PSN,
    ];
    /// What RTR2RTS sets.
    pub(crate) const RTS: &[Field] =
        &[LOG_ACK_REQ_FREQ, LOG_SRA_MAX, RETRY_COUNT, RNR_RETRY, NEXT_SEND_PSN, ACK_TIMEOUT];
    /// What only the card writes.
    pub(crate) const COUNTERS: &[Field] = &[HW_SQ_COUNTER, SW_SQ_COUNTER];
}

/// Capabilities: bits from byte 10h of the answer.
pub(crate) mod cap {
    use super::{Field, field};

    pub(crate) const BYTES: usize = 0x1000;
    pub(crate) const LOG_MAX_QP_SZ: Field = field("log_max_qp_sz", 0x88, 8);
    pub(crate) const LOG_MAX_CQ_SZ: Field = field("log_max_cq_sz", 0xc8, 8);
    pub(crate) const RELAXED_ORDERING_WRITE: Field = field("relaxed_ordering_write", 0xe8, 1);
    pub(crate) const PORT_TYPE: Field = field("port_type", 0x1b6, 2);
    pub(crate) const CQE_VERSION: Field = field("cqe_version", 0x1fc, 4);
    pub(crate) const ROCE: Field = field("roce", 0x21d, 1);
    pub(crate) const ATOMIC: Field = field("atomic", 0x21e, 1);
    pub(crate) const CQ_OI: Field = field("cq_oi", 0x220, 1);
    pub(crate) const RC: Field = field("rc", 0x23f, 1);
    pub(crate) const BF: Field = field("bf", 0x260, 1);
    pub(crate) const MAX_WQE_SZ_SQ: Field = field("max_wqe_sz_sq", 0x290, 16);

    /// Of the page of atomics: operations, then the sizes of queue pairs, in bytes.
    pub(crate) const ATOMIC_OPERATIONS: Field = field("atomic_operations", 0x90, 16);
    pub(crate) const ATOMIC_SIZE_QP: Field = field("atomic_size_qp", 0xb0, 16);
}
