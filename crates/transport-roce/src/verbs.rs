//! Safe handles of what libibverbs gives out. Each keeps alive what it depends on, and ends after what depends on it.

use std::ffi::{CStr, c_int, c_uint};
use std::fs;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::device::Gid;
use crate::error::Error;
use crate::library::Library;
use crate::memory::Memory;
use crate::sys;

/// A port of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Port {
    pub(crate) device: String,
    /// Counted from 1.
    pub(crate) number: u8,
    pub(crate) state: u32,
    /// The active one, as verbs number it: 1 is 256 bytes, 5 is 4096.
    pub(crate) mtu: u32,
    pub(crate) lid: u16,
    pub(crate) gids: u32,
    /// Bytes of the longest message.
    pub(crate) max_message: u32,
    pub(crate) ethernet: bool,
}

impl Port {
    pub(crate) const fn is_active(&self) -> bool {
        self.state == sys::PORT_ACTIVE
    }
}

/// An opened device.
#[derive(Clone, Debug)]
pub(crate) struct Context(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    library: &'static Library,
    name: String,
    raw: NonNull<sys::Context>,
}

// SAFETY: libibverbs allows any thread to use a context, several at a time too.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened by `Context::open`, and everything made of it has ended: it held this.
        unsafe { (self.library.ibv_close_device)(self.raw.as_ptr()) };
    }
}

/// The devices of this machine, for as long as the list lives.
struct List {
    library: &'static Library,
    raw: NonNull<*mut sys::Device>,
    count: usize,
}

impl List {
    fn new() -> Result<Self, Error> {
        let library = Library::get()?;
        let mut count = 0;
        // SAFETY: the argument is a place for a number.
        let raw = unsafe { (library.ibv_get_device_list)(&mut count) };
        match NonNull::new(raw) {
            Some(raw) => Ok(Self { library, raw, count: count.max(0) as usize }),
            // No module of the kernel: no devices.
            None if io::Error::last_os_error().raw_os_error() == Some(38) => Err(Error::NoDevice),
            None => Err(Error::call("ibv_get_device_list", "this machine", io::Error::last_os_error())),
        }
    }

    fn devices(&self) -> impl Iterator<Item = (String, *mut sys::Device)> + '_ {
        (0..self.count).map(|at| {
            // SAFETY: the list has `count` entries, and lives.
            let device = unsafe { *self.raw.as_ptr().add(at) };
            // SAFETY: of a device of a living list; the name is a string in it.
            let name = unsafe { CStr::from_ptr((self.library.ibv_get_device_name)(device)) };
            (name.to_string_lossy().into_owned(), device)
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: given out by `ibv_get_device_list`, and no device of it is used any more but opened ones, which count for
        // themselves.
        unsafe { (self.library.ibv_free_device_list)(self.raw.as_ptr()) };
    }
}

impl Context {
    /// The names of all devices.
    pub(crate) fn names() -> Result<Vec<String>, Error> {
        Ok(List::new()?.devices().map(|(name, _)| name).collect())
    }

    pub(crate) fn open(name: &str) -> Result<Self, Error> {
        let list = List::new()?;
        let all: Vec<String> = list.devices().map(|(name, _)| name).collect();
        let Some((_, device)) = list.devices().find(|(found, _)| found == name) else {
            return Err(Error::NoSuchDevice { name: name.to_owned(), found: all.join(", ") });
        };
        // SAFETY: a device of a living list.
        let raw = unsafe { (list.library.ibv_open_device)(device) };
        let raw = NonNull::new(raw).ok_or_else(|| Error::call("ibv_open_device", name, io::Error::last_os_error()))?;
        Ok(Self(Arc::new(Opened { library: list.library, name: name.to_owned(), raw })))
    }

    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    fn raw(&self) -> *mut sys::Context {
        self.0.raw.as_ptr()
    }

    /// What a call answered that returns 0 or an error number.
    fn outcome(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        // Some providers return -1 and set errno.
        let error = || if code < 0 { io::Error::last_os_error() } else { io::Error::from_raw_os_error(code) };
        if code == 0 { Ok(()) } else { Err(Error::call(call, self.name(), error())) }
    }

    fn made<T>(&self, call: &'static str, raw: *mut T) -> Result<NonNull<T>, Error> {
        NonNull::new(raw).ok_or_else(|| Error::call(call, self.name(), io::Error::last_os_error()))
    }

    pub(crate) fn attributes(&self) -> Result<sys::DeviceAttr, Error> {
        let mut attributes = sys::DeviceAttr::zeroed();
        // SAFETY: an opened device and a place for the structure.
        let code = unsafe { (self.0.library.ibv_query_device)(self.raw(), &mut attributes) };
        self.outcome("ibv_query_device", code).map(|()| attributes)
    }

    pub(crate) fn port(&self, number: u8) -> Result<Port, Error> {
        let mut found = sys::PortAttr::zeroed();
        // SAFETY: an opened device and a place for the structure, of which the function fills a part.
        let code = unsafe { (self.0.library.ibv_query_port)(self.raw(), number, &mut found) };
        self.outcome("ibv_query_port", code)?;
        Ok(Port {
            device: self.name().to_owned(),
            number,
            state: found.state,
            mtu: found.active_mtu,
            lid: found.lid,
            gids: found.gid_tbl_len.clamp(0, 255) as u32,
            max_message: found.max_msg_sz,
            ethernet: found.link_layer == sys::LINK_ETHERNET,
        })
    }

    pub(crate) fn ports(&self) -> Result<Vec<Port>, Error> {
        (1..=self.attributes()?.phys_port_cnt).map(|number| self.port(number)).collect()
    }

    /// The addresses of a port; unused places of the table are left out.
    pub(crate) fn gids(&self, port: &Port) -> Result<Vec<Gid>, Error> {
        let mut gids = Vec::new();
        for index in 0..port.gids {
            let mut gid = sys::Gid([0; 16]);
            // SAFETY: an opened device and a place for the address.
            let code = unsafe { (self.0.library.ibv_query_gid)(self.raw(), port.number, index as c_int, &mut gid) };
            if code == 0 && gid.0 != [0; 16] {
                let routable = self.gid_kind(port, index).is_none_or(|kind| kind.trim() == "RoCE v2");
                gids.push(Gid { index: index as u8, bytes: gid.0, routable });
            }
        }
        Ok(gids)
    }

    /// What the kernel says of an address; none where it says nothing.
    fn gid_kind(&self, port: &Port, index: u32) -> Option<String> {
        let (name, number) = (self.name(), port.number);
        fs::read_to_string(format!("/sys/class/infiniband/{name}/ports/{number}/gid_attrs/types/{index}")).ok()
    }
}

/// A protection domain.
#[derive(Clone, Debug)]
pub(crate) struct Domain(Arc<OwnedDomain>);

#[derive(Debug)]
struct OwnedDomain {
    context: Context,
    raw: NonNull<sys::Pd>,
}

// SAFETY: libibverbs allows any thread to use a protection domain.
unsafe impl Send for OwnedDomain {}
// SAFETY: as above.
unsafe impl Sync for OwnedDomain {}

impl Domain {
    pub(crate) fn new(context: &Context) -> Result<Self, Error> {
        // SAFETY: an opened device.
        let raw = unsafe { (context.0.library.ibv_alloc_pd)(context.raw()) };
        Ok(Self(Arc::new(OwnedDomain { context: context.clone(), raw: context.made("ibv_alloc_pd", raw)? })))
    }
}

impl Drop for OwnedDomain {
    fn drop(&mut self) {
        // SAFETY: made by `Domain::new`; regions and queue pairs of it have ended, as they held it.
        unsafe { (self.context.0.library.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Memory that the adapter may read and write.
#[derive(Debug)]
pub(crate) struct Region {
    raw: NonNull<sys::Mr>,
    domain: Domain,
    memory: Memory,
}

// SAFETY: libibverbs allows any thread to use a region.
unsafe impl Send for Region {}

impl Region {
    /// Registers all of `memory` with the rights `access`.
    pub(crate) fn new(domain: &Domain, memory: Memory, access: c_uint) -> Result<Self, Error> {
        let context = &domain.0.context;
        let (library, pd) = (context.0.library, domain.0.raw.as_ptr());
        let (address, bytes) = (memory.address(), memory.bytes());
        let raw = if access & sys::ACCESS_RELAXED_ORDERING == 0 {
            // SAFETY: the memory is mapped, and lives as long as the region.
            unsafe { (library.ibv_reg_mr)(pd, address as *mut _, bytes, access as c_int) }
        } else {
            // SAFETY: as above.
            unsafe { (library.ibv_reg_mr_iova2)(pd, address as *mut _, bytes, address, access) }
        };
        Ok(Self { raw: context.made("ibv_reg_mr", raw)?, domain: domain.clone(), memory })
    }

    pub(crate) const fn memory(&self) -> &Memory {
        &self.memory
    }

    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().lkey }
    }

    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: made by `Region::new`. Queue pairs that used it have been destroyed by whoever owns both.
        unsafe { (self.domain.0.context.0.library.ibv_dereg_mr)(self.raw.as_ptr()) };
    }
}

/// A completion queue.
#[derive(Clone, Debug)]
pub(crate) struct Completions(Arc<OwnedCompletions>);

#[derive(Debug)]
struct OwnedCompletions {
    context: Context,
    raw: NonNull<sys::Cq>,
}

// SAFETY: libibverbs allows any thread to use a completion queue.
unsafe impl Send for OwnedCompletions {}
// SAFETY: as above.
unsafe impl Sync for OwnedCompletions {}

impl Completions {
    /// With room for `entries`.
    pub(crate) fn new(context: &Context, entries: u32) -> Result<Self, Error> {
        let null = ptr::null_mut();
        // SAFETY: an opened device; no context, no channel, the first vector.
        let raw = unsafe { (context.0.library.ibv_create_cq)(context.raw(), entries as c_int, null, null, 0) };
        Ok(Self(Arc::new(OwnedCompletions { context: context.clone(), raw: context.made("ibv_create_cq", raw)? })))
    }

    /// Takes what has completed, and returns how much of `into` it filled.
    pub(crate) fn poll(&self, into: &mut [sys::WorkCompletion]) -> Result<usize, Error> {
        let cq = self.0.raw.as_ptr();
        // SAFETY: the queue lives, and its first field is its device, which lives as well.
        let poll = unsafe { (*(*cq).context).ops.poll_cq };
        let Some(poll) = poll else { return Err(Error::Symbol { name: "poll_cq" }) };
        // SAFETY: room for as many entries as are asked for.
        let count = unsafe { poll(cq, into.len() as c_int, into.as_mut_ptr()) };
        usize::try_from(count)
            .map_err(|_| Error::call("ibv_poll_cq", self.0.context.name(), io::Error::from_raw_os_error(-count)))
    }
}

impl Drop for OwnedCompletions {
    fn drop(&mut self) {
        // SAFETY: made by `Completions::new`; its queue pairs have been destroyed, as they held it.
        unsafe { (self.context.0.library.ibv_destroy_cq)(self.raw.as_ptr()) };
    }
}

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
        let context = &domain.0.context;
        let mut wanted = sys::QpInitAttr::zeroed();
        (wanted.send_cq, wanted.recv_cq) = (completions.0.raw.as_ptr(), completions.0.raw.as_ptr());
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
        let raw = unsafe { (context.0.library.ibv_create_qp)(domain.0.raw.as_ptr(), &mut wanted) };
        let raw = context.made("ibv_create_qp", raw)?;
        let inline = wanted.cap.max_inline_data;
        Ok(Self { raw, domain: domain.clone(), _completions: completions.clone(), inline })
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair lives.
        unsafe { self.raw.as_ref().number }
    }

    fn modify(&self, call: &'static str, attributes: &mut sys::QpAttr, mask: c_int) -> Result<(), Error> {
        let context = &self.domain.0.context;
        // SAFETY: the queue pair lives, and the structure is whole.
        let code = unsafe { (context.0.library.ibv_modify_qp)(self.raw.as_ptr(), attributes, mask) };
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
            to.ah_attr.grh.dgid = sys::Gid(path.gid);
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
        unsafe { (self.domain.0.context.0.library.ibv_destroy_qp)(self.raw.as_ptr()) };
    }
}
