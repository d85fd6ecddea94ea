//! Queue pairs of reliable connections.

use std::ffi::{c_int, c_uint};
use std::ptr::{self, NonNull};

use super::{Completions, Domain, Port};
use crate::error::Error;
use crate::sys::{self, Zeroed as _};

/// What a queue pair holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depths {
    pub(crate) send: u32,
    pub(crate) receive: u32,
    pub(crate) inline: u32,
}

/// How a queue pair reaches the other end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    pub(crate) number: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    /// Packet sequence numbers that each end begins with.
    pub(crate) their_psn: u32,
    pub(crate) our_psn: u32,
    pub(crate) mtu: u32,
    pub(crate) service_level: u8,
    pub(crate) traffic_class: u8,
    pub(crate) ack_timeout: u8,
    pub(crate) retries: u8,
    pub(crate) not_ready_retries: u8,
    /// Atomics under way at a time: that we ask for, and that we serve.
    pub(crate) atomics_out: u8,
    pub(crate) atomics_in: u8,
}

/// A queue pair of a reliable connection.
#[derive(Debug)]
pub(crate) struct QueuePair {
    raw: NonNull<sys::Qp>,
    domain: Domain,
    _completions: Completions,
    /// Bytes that fit inside a request.
    pub(crate) inline: u32,
}

// SAFETY: libibverbs allows any thread to use a queue pair.
unsafe impl Send for QueuePair {}

impl QueuePair {
    pub(crate) fn new(domain: &Domain, completions: &Completions, depths: Depths) -> Result<Self, Error> {
        let context = domain.context();
        let mut wanted = sys::QpInitAttr::zeroed();
        (wanted.send_cq, wanted.recv_cq) = (completions.raw(), completions.raw());
        wanted.qp_type = sys::QPT_RC;
        let Depths { send, receive, inline } = depths;
        wanted.cap = sys::QpCap {
            max_send_wr: send,
            max_recv_wr: receive.max(1),
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: inline,
        };
        // SAFETY: domain and completions live as long as the queue pair; the structure is whole.
        let raw = unsafe { (context.library().ibv_create_qp)(domain.raw(), &mut wanted) };
        let raw = context.made("ibv_create_qp", raw)?;
        let inline = wanted.cap.max_inline_data;
        Ok(Self { raw, domain: domain.clone(), _completions: completions.clone(), inline })
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives.
        unsafe { self.raw.as_ref().qp_num }
    }

    fn modify(&self, call: &'static str, attributes: &mut sys::QpAttr, mask: c_int) -> Result<(), Error> {
        let context = self.domain.context();
        // SAFETY: the queue pair lives, and the structure is whole.
        let code = unsafe { (context.library().ibv_modify_qp)(self.raw.as_ptr(), attributes, mask) };
        context.outcome(call, code)
    }

    /// From reset to init: requests to receive may be posted.
    pub(crate) fn init(&self, port: &Port, access: c_uint) -> Result<(), Error> {
        let mut to = sys::QpAttr::zeroed();
        (to.qp_state, to.port_num, to.qp_access_flags) = (sys::QPS_INIT, port.number, access);
        let mask = sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS;
        self.modify("ibv_modify_qp to INIT", &mut to, mask)
    }

    /// From init to ready: what the other end sends is taken in, requests may be posted.
    pub(crate) fn connect(&self, port: &Port, gid_index: u8, path: &Path) -> Result<(), Error> {
        let mut to = sys::QpAttr::zeroed();
        (to.qp_state, to.path_mtu, to.dest_qp_num, to.rq_psn) = (sys::QPS_RTR, path.mtu, path.number, path.their_psn);
        (to.max_dest_rd_atomic, to.min_rnr_timer) = (path.atomics_in, 12);
        to.ah_attr.port_num = port.number;
        to.ah_attr.sl = path.service_level;
        to.ah_attr.dlid = path.lid;
        // Ethernet has no other addresses; on InfiniBand the local one serves within a subnet.
        to.ah_attr.is_global = port.ethernet.into();
        if port.ethernet {
            to.ah_attr.grh.dgid = sys::gid(path.gid);
            to.ah_attr.grh.sgid_index = gid_index;
            to.ah_attr.grh.hop_limit = 64;
            to.ah_attr.grh.traffic_class = path.traffic_class;
        }
        let mask = sys::QP_STATE
            | sys::QP_AV
            | sys::QP_PATH_MTU
            | sys::QP_DEST_QPN
            | sys::QP_RQ_PSN
            | sys::QP_MAX_DEST_RD_ATOMIC
            | sys::QP_MIN_RNR_TIMER;
        self.modify("ibv_modify_qp to RTR", &mut to, mask)?;
        let mut to = sys::QpAttr::zeroed();
        (to.qp_state, to.sq_psn, to.timeout) = (sys::QPS_RTS, path.our_psn, path.ack_timeout);
        (to.retry_cnt, to.rnr_retry, to.max_rd_atomic) = (path.retries, path.not_ready_retries, path.atomics_out);
        let mask = sys::QP_STATE
            | sys::QP_TIMEOUT
            | sys::QP_RETRY_CNT
            | sys::QP_RNR_RETRY
            | sys::QP_SQ_PSN
            | sys::QP_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp to RTS", &mut to, mask)
    }

    /// Posts a chain of requests. The error says from which on none was taken: its address, and why.
    ///
    /// # Safety
    /// The chain's requests and scatter entries are valid for the call, and what the entries name stays registered until the
    /// requests have completed or the queue pair is destroyed. Inline sources are valid for the call.
    pub(crate) unsafe fn post_send(&self, first: *mut sys::SendRequest) -> Result<(), (*mut sys::SendRequest, i32)> {
        let mut refused = ptr::null_mut();
        // SAFETY: the queue pair lives, and so does its device.
        let post = unsafe { (*self.raw.as_ref().context).ops.post_send };
        // SAFETY: the caller says so.
        let code = post.map_or(38, |post| unsafe { post(self.raw.as_ptr(), first, &mut refused) });
        if code == 0 { Ok(()) } else { Err((refused, code.abs())) }
    }

    /// Posts one request to receive.
    ///
    /// # Safety
    /// As for [`post_send`](Self::post_send).
    pub(crate) unsafe fn post_receive(&self, request: &mut sys::ReceiveRequest) -> Result<(), i32> {
        let mut refused = ptr::null_mut();
        // SAFETY: the queue pair lives, and so does its device.
        let post = unsafe { (*self.raw.as_ref().context).ops.post_recv };
        // SAFETY: the caller says so.
        let code = post.map_or(38, |post| unsafe { post(self.raw.as_ptr(), request, &mut refused) });
        if code == 0 { Ok(()) } else { Err(code.abs()) }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made by `new`. From here on the adapter neither reads nor writes anything for it.
        unsafe { (self.domain.context().library().ibv_destroy_qp)(self.raw.as_ptr()) };
    }
}
