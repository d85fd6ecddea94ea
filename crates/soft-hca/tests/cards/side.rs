//! One end of a connection: a card that was opened, with memory, queues and one queue pair or more.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use soft_hca::abi::{
    self, AhAttr, AhOut, Context, ContextAttr, DvObj, GlobalRoute, InOut, Mr, Obj, Pd, PdOut, Uar, Umem,
};
use soft_hca::{Card, Link};

use super::library::Library;
use super::message::{Command, get};

pub(crate) const PAGE: usize = 4096;
/// Bytes of each of the two regions.
pub(crate) const REGION: usize = 64 * 1024;

/// Memory at page boundaries that cards may use.
pub(crate) struct Arena {
    base: *mut u8,
    layout: Layout,
}

impl Arena {
    pub(crate) fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, PAGE).unwrap();
        // SAFETY: the size is not zero.
        Self { base: unsafe { alloc_zeroed(layout) }, layout }
    }

    pub(crate) fn at(&self, offset: usize) -> *mut c_void {
        assert!(offset < self.layout.size());
        self.base.wrapping_add(offset).cast()
    }

    pub(crate) fn addr(&self, offset: usize) -> u64 {
        self.at(offset) as u64
    }

    pub(crate) fn double(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: within the arena, aligned as its users keep it, and only reached by atomics.
        unsafe { AtomicU64::from_ptr(self.at(offset).cast()) }
    }

    pub(crate) fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.at(offset).cast()) }
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: as above.
        unsafe { AtomicU8::from_ptr(self.at(offset).cast()) }
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        for (place, &byte) in bytes.iter().enumerate() {
            self.byte(offset + place).store(byte, Ordering::Relaxed);
        }
    }

    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        (offset..offset + len).map(|offset| self.byte(offset).load(Ordering::Relaxed)).collect()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// A queue pair with its completion queue.
pub(crate) struct Queue {
    pub(crate) arena: Arena,
    pub(crate) umem: *mut Umem,
    pub(crate) uar: *mut Uar,
    pub(crate) cq: *mut Obj,
    pub(crate) qp: *mut Obj,
    pub(crate) number: u32,
    pub(crate) depth: u64,
    pub(crate) log_cq: u32,
    pub(crate) collapsed: bool,
}

/// Where a queue's parts lie in its arena.
pub(crate) const RECORD: usize = 0;
pub(crate) const CQ_RECORD: usize = 64;
pub(crate) const ENTRIES: usize = PAGE;

impl Queue {
    /// Where the elements begin.
    pub(crate) fn elements(&self) -> usize {
        ENTRIES + (64_usize << self.log_cq).next_multiple_of(PAGE)
    }
}

/// A card that was opened.
pub(crate) struct Side {
    pub(crate) lib: Library,
    pub(crate) card: Card,
    pub(crate) link: Link,
    pub(crate) context: *mut Context,
    pub(crate) pd: *mut Pd,
    pub(crate) pdn: u32,
    /// Rows: relaxed.
    pub(crate) rows: Arena,
    pub(crate) rows_mr: *mut Mr,
    /// Cells: strict.
    pub(crate) cells: Arena,
    pub(crate) cells_mr: *mut Mr,
    pub(crate) queues: Vec<Queue>,
    /// The kind of doorbell pages.
    pub(crate) pages: u32,
}

const ALL_ACCESS: u32 = abi::LOCAL_WRITE | abi::REMOTE_WRITE | abi::REMOTE_READ | abi::REMOTE_ATOMIC;

impl Side {
    /// Opens a card and registers its memory.
    pub(crate) fn open(card: Card, link: Link) -> Self {
        let lib = Library::new();
        let mut attr = ContextAttr { flags: abi::CONTEXT_FLAGS_DEVX, comp_mask: 0 };
        let (rows, cells) = (Arena::new(REGION), Arena::new(REGION));
        // SAFETY: pointers come from the functions themselves, and the arenas outlive the side's registrations.
        unsafe {
            let list = (lib.ibv_get_device_list)(std::ptr::null_mut());
            let mut device = list;
            while CStr::from_ptr((lib.ibv_get_device_name)(*device)).to_str() != Ok(&card.name()) {
                device = device.add(1);
            }
            assert!((lib.mlx5dv_is_supported)(*device));
            let context = (lib.mlx5dv_open_device)(*device, &mut attr);
            (lib.ibv_free_device_list)(list);
            assert!(!context.is_null(), "the card opens");
            let pd = (lib.ibv_alloc_pd)(context);
            let mut out = PdOut { pdn: 0, comp_mask: 0 };
            let mut obj = empty();
            obj.pd = InOut { input: pd, output: &mut out };
            assert_eq!((lib.mlx5dv_init_obj)(&mut obj, abi::OBJ_PD), 0);
            let relaxed = ALL_ACCESS | abi::RELAXED_ORDERING;
            let rows_mr = (lib.ibv_reg_mr_iova2)(pd, rows.at(0), REGION, rows.addr(0), relaxed);
            let cells_mr = (lib.ibv_reg_mr)(pd, cells.at(0), REGION, ALL_ACCESS as i32);
            assert!(!rows_mr.is_null() && !cells_mr.is_null());
            Self {
                lib,
                card,
                link,
                context,
                pd,
                pdn: out.pdn,
                rows,
                rows_mr,
                cells,
                cells_mr,
                queues: Vec::new(),
                pages: 0,
            }
        }
    }

    /// The registered region's keys: local, remote.
    pub(crate) fn keys(mr: *mut Mr) -> (u32, u32) {
        // SAFETY: a region that is registered.
        unsafe { ((*mr).lkey, (*mr).rkey) }
    }

    pub(crate) fn create(&self, command: &Command) -> Result<(*mut Obj, u32), (u8, u32)> {
        let mut out = [0_u8; 16];
        // SAFETY: both messages are as long as they say.
        let obj = unsafe {
            (self.lib.mlx5dv_devx_obj_create)(
                self.context,
                command.0.as_ptr().cast(),
                command.0.len(),
                out.as_mut_ptr().cast(),
                out.len(),
            )
        };
        match obj.is_null() {
            false => Ok((obj, get(&out, 0x48, 24) as u32)),
            true => Err((out[0], get(&out, 0x20, 32) as u32)),
        }
    }

    pub(crate) fn modify(&self, obj: *mut Obj, command: &Command) -> Result<(), u8> {
        let mut out = [0_u8; 16];
        // SAFETY: both messages are as long as they say.
        let result = unsafe {
            (self.lib.mlx5dv_devx_obj_modify)(
                obj,
                command.0.as_ptr().cast(),
                command.0.len(),
                out.as_mut_ptr().cast(),
                out.len(),
            )
        };
        if result == 0 { Ok(()) } else { Err(out[0]) }
    }

    /// CREATE_CQ of a queue's memory.
    pub(crate) fn create_cq(&self, queue: &Queue) -> Command {
        let mut eqn = 0;
        // SAFETY: a live context, page and umem.
        let (umem, page) = unsafe {
            assert_eq!((self.lib.mlx5dv_devx_query_eqn)(self.context, 0, &mut eqn), 0);
            ((*queue.umem).umem_id, (*queue.uar).page_id)
        };
        Command::new(0x400, 0x110)
            .set(0x86, 1, 1)
            .set(0x8b, 1, queue.collapsed.into())
            .set(0x8e, 1, queue.collapsed.into())
            .set(0xa0, 32, umem.into())
            .set(0xe3, 5, queue.log_cq.into())
            .set(0xe8, 24, page.into())
            .set(0x138, 8, eqn.into())
            .set(0x240, 64, CQ_RECORD as u128)
            .set(0x280, 64, ENTRIES as u128)
            .set(0x2c0, 32, umem.into())
            .set(0x2e0, 1, 1)
    }

    /// CREATE_QP of a queue's memory.
    pub(crate) fn create_qp(&self, queue: &Queue, cqn: u32) -> Command {
        // SAFETY: a live page and umem.
        let (umem, page) = unsafe { ((*queue.umem).umem_id, (*queue.uar).page_id) };
        Command::new(0x500, 0x110)
            .set(0xd3, 2, 3)
            .set(0xe8, 24, self.pdn.into())
            .set(0x111, 4, queue.depth.ilog2().into())
            .set(0x128, 24, page.into())
            .set(0x148, 24, 0xabcde)
            .set(0x4a8, 24, cqn.into())
            .set(0x5a8, 24, cqn.into())
            .set(0x5c0, 64, RECORD as u128)
            .set(0x625, 3, 3)
            .set(0x743, 1, 1)
            .set(0x7e0, 32, umem.into())
            .set(0x800, 64, queue.elements() as u128)
            .set(0x840, 32, umem.into())
            .set(0x860, 1, 1)
    }

    /// Memory and a doorbell page for a queue, without objects.
    pub(crate) fn prepare(&self, log_depth: u32, log_cq: u32, collapsed: bool) -> Queue {
        let entries = (64_usize << log_cq).next_multiple_of(PAGE);
        let bytes = ENTRIES + entries + (64_usize << log_depth).next_multiple_of(PAGE);
        let arena = Arena::new(bytes);
        arena.write(ENTRIES, &vec![0xff; 64 << log_cq]);
        // SAFETY: the arena lives as long as the queue, which is destroyed in order.
        let (umem, uar) = unsafe {
            let umem = (self.lib.mlx5dv_devx_umem_reg)(self.context, arena.at(0), bytes, abi::LOCAL_WRITE);
            (umem, (self.lib.mlx5dv_devx_alloc_uar)(self.context, self.pages))
        };
        assert!(!umem.is_null() && !uar.is_null());
        let null = std::ptr::null_mut();
        Queue { arena, umem, uar, cq: null, qp: null, number: 0, depth: 1 << log_depth, log_cq, collapsed }
    }

    /// Makes a queue pair.
    pub(crate) fn add_queue(&mut self, log_depth: u32, log_cq: u32, collapsed: bool) -> usize {
        let mut queue = self.prepare(log_depth, log_cq, collapsed);
        let (cq, cqn) = self.create(&self.create_cq(&queue)).expect("a completion queue");
        queue.cq = cq;
        (queue.qp, queue.number) = self.create(&self.create_qp(&queue, cqn)).expect("a queue pair");
        self.queues.push(queue);
        self.queues.len() - 1
    }

    pub(crate) fn init(number: u32) -> Command {
        Command::new(0x502, 0x110)
            .set(0x48, 24, number.into())
            .set(0xd3, 2, 3)
            .set(0x2a8, 8, 1)
            .set(0x54c, 4, 3)
            .set(0x550, 3, 7)
    }

    /// INIT2RTR towards a queue pair of a peer.
    pub(crate) fn rtr(&self, number: u32, peer: &Side, remote: u32) -> Command {
        let command = Command::new(0x503, 0x110)
            .set(0x48, 24, number.into())
            .set(0x100, 3, 5)
            .set(0x103, 5, 30)
            .set(0x168, 24, remote.into())
            .set(0x548, 3, 4)
            .set(0x563, 5, 12)
            .set(0x568, 24, 0x123);
        match self.link {
            Link::InfiniBand => command.set(0x1b0, 16, peer.lid().into()),
            Link::Ethernet => {
                let (mac, gid) = self.resolve(peer.gid(1));
                command
                    .set(0x1c8, 8, 1)
                    .set(0x1d8, 8, 255)
                    .set(0x200, 128, u128::from_be_bytes(gid))
                    .set(0x290, 16, 0xc0de)
                    .set(0x2b0, 48, mac)
            }
        }
    }

    pub(crate) fn rts(number: u32) -> Command {
        Command::new(0x504, 0x110)
            .set(0x48, 24, number.into())
            .set(0x1c0, 5, 8)
            .set(0x448, 3, 4)
            .set(0x44d, 3, 7)
            .set(0x450, 3, 7)
            .set(0x488, 24, 0x123)
    }

    /// Connects a queue to the peer's of the same place, from reset on.
    pub(crate) fn connect(&self, queue: usize, peer: &Side) {
        let (number, qp, remote) = (self.queues[queue].number, self.queues[queue].qp, peer.queues[queue].number);
        self.modify(qp, &Self::init(number)).expect("init");
        self.modify(qp, &self.rtr(number, peer, remote)).expect("ready to receive");
        self.modify(qp, &Self::rts(number)).expect("ready to send");
    }

    pub(crate) fn lid(&self) -> u16 {
        let mut attr = abi::PortAttr::default();
        // SAFETY: a live context, and room for the answer.
        assert_eq!(unsafe { (self.lib.ibv_query_port)(self.context, 1, &mut attr) }, 0);
        assert_eq!(attr.state, 4);
        attr.lid
    }

    pub(crate) fn gid(&self, index: i32) -> [u8; 16] {
        let mut gid = [0; 16];
        // SAFETY: a live context, and room for the answer.
        assert_eq!(unsafe { (self.lib.ibv_query_gid)(self.context, 1, index, &mut gid) }, 0);
        gid
    }

    /// The MAC address of a GID, by an address handle.
    fn resolve(&self, gid: [u8; 16]) -> (u128, [u8; 16]) {
        let grh = GlobalRoute { dgid: gid, flow_label: 0, sgid_index: 1, hop_limit: 255, traffic_class: 0 };
        let mut attr = AhAttr { grh, dlid: 0, sl: 0, src_path_bits: 0, static_rate: 0, is_global: 1, port_num: 1 };
        let mut out = AhOut { av: std::ptr::null_mut(), comp_mask: 0 };
        let mut obj = empty();
        // SAFETY: a live domain; the vector is read before the handle goes.
        unsafe {
            let ah = (self.lib.ibv_create_ah)(self.pd, &mut attr);
            assert!(!ah.is_null());
            obj.ah = InOut { input: ah, output: &mut out };
            assert_eq!((self.lib.mlx5dv_init_obj)(&mut obj, abi::OBJ_AH), 0);
            let av = *out.av;
            assert_eq!((self.lib.ibv_destroy_ah)(ah), 0);
            (av.rmac.iter().fold(0, |mac, &byte| mac << 8 | u128::from(byte)), av.rgid)
        }
    }

    /// Gives everything back, in the order that is safe.
    pub(crate) fn close(mut self) {
        // SAFETY: each pointer is live and given back once; memory goes last.
        unsafe {
            for queue in &self.queues {
                assert_eq!((self.lib.mlx5dv_devx_obj_destroy)(queue.qp), 0);
                assert_eq!((self.lib.mlx5dv_devx_obj_destroy)(queue.cq), 0);
                (self.lib.mlx5dv_devx_free_uar)(queue.uar);
                assert_eq!((self.lib.mlx5dv_devx_umem_dereg)(queue.umem), 0);
            }
            self.queues.clear();
            assert_eq!((self.lib.ibv_dereg_mr)(self.rows_mr), 0);
            assert_eq!((self.lib.ibv_dereg_mr)(self.cells_mr), 0);
            assert_eq!((self.lib.ibv_dealloc_pd)(self.pd), 0);
            assert_eq!((self.lib.ibv_close_device)(self.context), 0);
        }
        assert_eq!(self.card.objects(), 0);
    }
}

pub(crate) fn empty() -> DvObj {
    fn none<I, O>() -> InOut<I, O> {
        InOut { input: std::ptr::null_mut(), output: std::ptr::null_mut() }
    }
    DvObj { others: [(); 5].map(|()| none()), ah: none(), pd: none() }
}
