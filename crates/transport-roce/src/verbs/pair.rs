//! Queue pairs of reliable connections.

use std::ffi::{c_int, c_uint};
use std::ptr::{self, NonNull};

use ep_rdma::sys::{self, Zeroed as _};
use ep_rdma::{Connection, Domain, Error, Gid, Port};

use super::{Completions, Context};

/// How often a request is repeated at a receiver that has no room: for ever. A dead one answers nothing, which ends it.
const NOT_READY_FOR_EVER: u8 = 7;
/// Routers that a packet may pass.
const HOPS: u8 = 64;

/// What a queue pair holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Depths {
    pub(crate) send: u32,
    pub(crate) receive: u32,
    pub(crate) inline: u32,
}

/// Atomics under way at a time: that we ask for, and that we serve.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Atomics {
    pub(crate) out: u8,
    pub(crate) served: u8,
}

/// A queue pair of a reliable connection.
#[derive(Debug)]
pub(crate) struct QueuePair {
    raw: NonNull<sys::Qp>,
    context: Context,
    _domain: Domain,
    _completions: Completions,
    inline: u32,
}

// SAFETY: libibverbs allows any thread to use a queue pair.
unsafe impl Send for QueuePair {}

impl QueuePair {
    pub(crate) fn new(
        context: &Context,
        domain: &Domain,
        completions: &Completions,
        depths: Depths,
    ) -> Result<Self, Error> {
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
        let raw = unsafe { (context.functions().ibv_create_qp)(domain.raw(), &mut wanted) };
        let raw = context.made("ibv_create_qp", raw)?;
        let inline = wanted.cap.max_inline_data;
        let (context, _domain, _completions) = (context.clone(), domain.clone(), completions.clone());
        Ok(Self { raw, context, _domain, _completions, inline })
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives.
        unsafe { self.raw.as_ref().qp_num }
    }

    fn modify(&self, call: &'static str, attributes: &mut sys::QpAttr, mask: c_int) -> Result<(), Error> {
        // SAFETY: the queue pair lives, and the structure is whole.
        let code = unsafe { (self.context.functions().ibv_modify_qp)(self.raw.as_ptr(), attributes, mask) };
        self.context.outcome(call, code)
    }

    /// From reset to init: requests to receive may be posted.
    pub(crate) fn init(&self, port: &Port, access: c_uint) -> Result<(), Error> {
        let mut to = sys::QpAttr::zeroed();
        (to.qp_state, to.port_num, to.qp_access_flags) = (sys::QPS_INIT, port.number, access);
        let mask = sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS;
        self.modify("ibv_modify_qp to INIT", &mut to, mask)
    }

    /// From init to ready: what the other end sends is taken in, requests may be posted.
    pub(crate) fn connect(&self, port: &Port, gid: &Gid, path: &Connection, atomics: Atomics) -> Result<(), Error> {
        let mut to = sys::QpAttr::zeroed();
        (to.qp_state, to.path_mtu, to.dest_qp_num, to.rq_psn) = (sys::QPS_RTR, path.mtu, path.number, path.their_psn);
        (to.max_dest_rd_atomic, to.min_rnr_timer) = (atomics.served, 12);
        to.ah_attr = path.address(port, gid, HOPS);
        let mask = sys::QP_STATE
            | sys::QP_AV
            | sys::QP_PATH_MTU
            | sys::QP_DEST_QPN
            | sys::QP_RQ_PSN
            | sys::QP_MAX_DEST_RD_ATOMIC
            | sys::QP_MIN_RNR_TIMER;
        self.modify("ibv_modify_qp to RTR", &mut to, mask)?;
        let mut to = sys::QpAttr::zeroed();
        (to.qp_state, to.sq_psn, to.timeout) = (sys::QPS_RTS, path.our_psn, path.wire.ack_timeout);
        (to.retry_cnt, to.rnr_retry, to.max_rd_atomic) = (path.wire.retries, NOT_READY_FOR_EVER, atomics.out);
        let mask = sys::QP_STATE
            | sys::QP_TIMEOUT
            | sys::QP_RETRY_CNT
            | sys::QP_RNR_RETRY
            | sys::QP_SQ_PSN
            | sys::QP_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp to RTS", &mut to, mask)
    }
}

/// What takes a lane's requests: a queue pair, but in tests.
pub(crate) trait Queue {
    /// Bytes that fit inside a request.
    fn inline(&self) -> u32;

    /// Posts a chain of requests. The error says from which on none was taken: its address, and why.
    ///
    /// # Safety
    /// The chain's requests and scatter entries are valid for the call, and what the entries name stays registered until the
    /// requests have completed or the queue pair is destroyed. Inline sources are valid for the call.
    unsafe fn post_send(&self, first: *mut sys::SendRequest) -> Result<(), (*mut sys::SendRequest, i32)>;

    /// Posts one request to receive.
    ///
    /// # Safety
    /// As for [`post_send`](Self::post_send).
    unsafe fn post_receive(&self, request: &mut sys::ReceiveRequest) -> Result<(), i32>;
}

impl Queue for QueuePair {
    fn inline(&self) -> u32 {
        self.inline
    }

    unsafe fn post_send(&self, first: *mut sys::SendRequest) -> Result<(), (*mut sys::SendRequest, i32)> {
        let mut refused = ptr::null_mut();
        // SAFETY: the queue pair lives, and so does its device.
        let post = unsafe { (*self.raw.as_ref().context).ops.post_send };
        // SAFETY: the caller says so.
        let code = post.map_or(38, |post| unsafe { post(self.raw.as_ptr(), first, &mut refused) });
        if code == 0 { Ok(()) } else { Err((refused, code.abs())) }
    }

    unsafe fn post_receive(&self, request: &mut sys::ReceiveRequest) -> Result<(), i32> {
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
        unsafe { (self.context.functions().ibv_destroy_qp)(self.raw.as_ptr()) };
    }
}
