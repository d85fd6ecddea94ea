//! One rank: its stream, window and state on the device, and the launches of every kernel.
//!
//! Nothing here waits, except where a name says so. Addresses are those of the rank's GPU; who calls keeps what they name alive
//! until the stream has passed.

mod combine;
mod counts;
mod low;
mod plan;
mod tally;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ep_core::layout::{KernelWindow, Kind};
use ep_core::{Layout, Rank, RankSet};

use crate::args::{self, LOCAL_BYTES, REPORT_BYTES, RankView};
use crate::checks::{Checks, TestDevice};
use crate::driver::{Device, DeviceMemory, Kernel, Launch, Mapped, Presence, Scratch, Stream};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::node::Node;
pub(crate) use combine::PIECES;
use combine::piece_cells;
use counts::{COUNTS_HEADER, LAYOUT_BLOCKS};
pub(crate) use counts::{Counting, HostCounts};
use low::LowDevice;
use low::announcements;
pub(crate) use low::{LOW_RECEIVE, LOW_SEND, check_low};
pub(crate) use plan::DevicePlan;
pub(crate) use tally::Tally;

/// A piece of a row is at most so long: a few rows then fit into shared memory, whatever the hidden size.
const PIECE: u64 = 16 << 10;
/// So many movers of a block keep its share of the links busy; with more memory they rather load further ahead.
const MOVERS_THAT_FILL: u32 = 9;
/// Warps of a dispatch block that write headers.
const HEADER_WARPS: u32 = 4;
/// Warps of a dispatch block at most: `EP_DISPATCH_THREADS`.
const DISPATCHING: u32 = 16;

/// Warps of a block of the ring kernels: `__launch_bounds__`.
const WARPS: u32 = 8;
/// Bytes of `EpPlace`.
const PLACE_BYTES: u32 = 24;

/// How the blocks of a dispatch are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DispatchShape {
    /// Warps of a block that move payloads.
    pub(crate) movers: u32,
    /// Pieces that a mover has in shared memory.
    pub(crate) stages: u32,
    /// Bytes of a piece.
    pub(crate) piece: u32,
    /// Pieces of a row.
    pub(crate) pieces: u32,
}

impl DispatchShape {
    /// For rows of `stride` bytes as they travel, with at most `movers` movers and `stages` stages, in `shared_memory` bytes of a block.
    /// 0 stages: three, where that leaves enough movers, or two.
    pub(crate) fn new(stride: u64, ranks: u32, shared_memory: u32, movers: u32, stages: u32) -> Self {
        let pieces = stride.div_ceil(PIECE).max(1);
        let piece = stride.div_ceil(pieces).next_multiple_of(16).max(16);
        // Barriers of at most 32 movers with 8 stages, places of all ranks, alignment.
        let room = u64::from(shared_memory).saturating_sub(32 * 8 * 8 + u64::from(ranks) * PLACE_BYTES as u64 + 256);
        let fitting = (room / piece) as u32;
        let stages = if stages == 0 { 2 + u32::from(fitting / 3 >= MOVERS_THAT_FILL) } else { stages };
        let stages = stages.clamp(2, 8).min((fitting / 2).max(2));
        let movers = (fitting / stages).clamp(1, movers.clamp(1, DISPATCHING));
        Self { movers, stages, piece: piece as u32, pieces: pieces as u32 }
    }

    const fn shared_memory(&self, ranks: u32) -> u32 {
        let bars = (self.movers * self.stages * 8).next_multiple_of(16);
        (bars + ranks * PLACE_BYTES).next_multiple_of(128) + self.movers * self.stages * self.piece
    }
}

/// Bytes that the kernels use behind a window, from the next multiple of 128 on.
pub(crate) fn behind(layout: &Layout) -> u64 {
    piece_cells(layout.topology().ranks()) + announcements(layout)
}

/// How a rank uses its GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Blocks of the kernels that move rows.
    pub(crate) blocks: u32,
    /// Blocks of the kernels of low latency.
    pub(crate) low_blocks: u32,
    /// Of the stream.
    pub(crate) priority: i32,
}

/// What a call's kernels have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    /// Hash of what all ranks must agree on, without the number of the replayed dispatch.
    pub(crate) settings: u64,
    /// Where the handle's numbers lie ([`DevicePlan::address`]); 0 for none.
    pub(crate) plan: u64,
}

impl Call {
    /// Of launches that are no operation.
    pub(crate) const fn none() -> Self {
        Self { kind: Kind::Dispatch, settings: 0, plan: 0 }
    }
}

/// `EpLocal.generation`.
const GENERATION: u64 = 40;
/// One rank on its GPU.
#[derive(Debug)]
pub(crate) struct RankDevice {
    pub(crate) stream: Arc<Stream>,
    pub(crate) layout: Layout,
    pub(crate) kernels: Arc<Kernels>,
    pub(crate) report: Mapped,
    /// Counts on the host: op, tokens, matrix, choices of the own experts.
    pub(crate) counts: Mapped,
    local: DeviceMemory,
    windows: DeviceMemory,
    cursors: DeviceMemory,
    /// rows `[ranks]`, choices `[experts]`, partial `[LAYOUT_BLOCKS, ranks]`; u32.
    numbers: DeviceMemory,
    flags: DeviceMemory,
    /// u32 `[ranks, PIECES]`: what a running combine has copied; zero in between.
    copied: DeviceMemory,
    /// [`Tally`] of throughput mode.
    tally: DeviceMemory,
    /// What does not change.
    view: RankView,
    generation: AtomicU32,
    first_op: AtomicU64,
    /// None where the settings leave low latency out.
    low: Option<LowDevice>,
    /// Of kernels built for tests.
    pub(crate) test: Option<TestDevice>,
    /// Where arrays of no numbers lie: an address of 0 would say that there is none.
    pub(crate) nothing: Arc<Scratch>,
    /// Given up before the windows, so that the last rank of the GPU closes those of other processes.
    _presence: Presence,
    /// The windows of all ranks. Last: peers write into this one's until the others have ended, too.
    pub(crate) node: Arc<Node>,
    /// Blocks of the kernels that move rows.
    pub(crate) blocks: u32,
    pub(crate) movers: u32,
    pub(crate) stages: u32,
}

impl RankDevice {
    /// The rank `me` of those whose windows are `node`.
    pub(crate) fn new(
        device: &Arc<Device>,
        layout: &Layout,
        me: Rank,
        node: &Arc<Node>,
        options: Options,
        checks: Option<&Checks>,
    ) -> Result<Self, CudaError> {
        let Options { blocks, low_blocks, priority } = options;
        let presence = Presence::new(device);
        let stream = Stream::new(device, priority)?;
        let (ranks, experts) = (layout.topology().ranks() as usize, layout.shape().experts() as usize);
        let channels = layout.settings().rings().channels as usize;
        let memory = |bytes| DeviceMemory::zeroed(&stream, bytes);
        let local_experts = layout.local_experts() as usize;
        let (local, windows, cursors) =
            (memory(LOCAL_BYTES + 4 * ranks)?, memory(ranks * 8)?, memory(2 * ranks * channels * 8)?);
        let report = Mapped::zeroed(device, REPORT_BYTES)?;
        let test =
            checks.map(|checks| TestDevice::new(&stream, checks, me, layout.settings().deadline())).transpose()?;
        let view = RankView {
            window: KernelWindow::from(layout),
            windows: windows.address(),
            local: local.address(),
            report: report.address(),
            cursors: cursors.address(),
            first_op: 1,
            settings: 0,
            allowed: layout.settings().deadline().0,
            me: me.0,
            generation: 1,
            kind: 0,
            plan: 0,
            tally: 0,
            replays: 0,
            test: test.as_ref().map_or(0, TestDevice::address),
        };
        let low = LowDevice::new(&stream, layout, low_blocks)?;
        let this = Self {
            low,
            kernels: Kernels::of(device, test.is_some())?,
            test,
            counts: Mapped::zeroed(device, COUNTS_HEADER + 4 * (ranks + ranks * ranks + local_experts) + 8)?,
            tally: memory(Tally::bytes(ranks, local_experts))?,
            generation: AtomicU32::new(1),
            first_op: AtomicU64::new(1),
            numbers: memory(4 * (ranks + experts + LAYOUT_BLOCKS as usize * ranks))?,
            flags: memory(LAYOUT_BLOCKS as usize * 8)?,
            copied: memory(4 * ranks * PIECES as usize)?,
            nothing: Arc::new(Scratch::new(&stream, 0)?),
            _presence: presence,
            layout: layout.clone(),
            local,
            windows,
            cursors,
            report,
            view,
            blocks,
            movers: DISPATCHING,
            stages: 0,
            node: Arc::clone(node),
            stream,
        };
        this.connect(&RankSet::new())?;
        this.enter(1)?;
        Ok(this)
    }

    fn ranks(&self) -> u32 {
        self.view.window.ranks
    }

    /// Where the own window lies.
    pub(crate) fn window(&self) -> u64 {
        self.node.address(Rank(self.view.me))
    }

    /// Takes note of which ranks take part. Waits.
    pub(crate) fn connect(&self, mask: &RankSet) -> Result<(), CudaError> {
        let address = |rank| if mask.contains(rank) { 0 } else { self.node.address(rank) };
        let bytes: Vec<u8> = self.node.ranks().flat_map(|rank| address(rank).to_le_bytes()).collect();
        if let Some(low) = &self.low {
            low.connect(&self.stream, &bytes)?;
        }
        self.stream.upload(self.windows.address(), &bytes)
    }

    /// Lets kernels that wait for `rank` know that it does nothing any more. They may be running. Waits, for other work than theirs.
    pub(crate) fn notice_gone(&self, rank: Rank) -> Result<(), CudaError> {
        let aside = Stream::new(self.stream.device(), 0)?;
        let flag = |base: u64| aside.upload(base + 4 * u64::from(rank.0), &1u32.to_le_bytes());
        flag(self.local.address() + LOCAL_BYTES as u64)?;
        self.low.as_ref().map_or(Ok(()), |low| flag(low.gone(self.ranks())))
    }

    /// Says to the kernels which generation it is. Waits.
    fn enter(&self, generation: u16) -> Result<(), CudaError> {
        let generation = u32::from(generation);
        self.stream.upload(self.local.address() + GENERATION, &generation.to_le_bytes())?;
        self.low.as_ref().map_or(Ok(()), |low| low.enter(&self.stream, generation))
    }

    /// Operations of throughput mode that have ended, replayed ones among them. Waits.
    pub(crate) fn ops_done(&self) -> Result<u64, CudaError> {
        let mut op = [0; 8];
        self.stream.download(self.local.address(), &mut op)?;
        Ok(u64::from_le_bytes(op))
    }

    /// Begins a generation after a failure: nothing of this rank runs any more. Waits.
    pub(crate) fn restart(&self, generation: u16, op: u64) -> Result<(), CudaError> {
        for memory in [&self.local, &self.cursors, &self.numbers, &self.flags, &self.copied] {
            memory.zero(&self.stream)?;
        }
        self.stream.upload(self.local.address(), &(op - 1).to_le_bytes())?;
        if let Some(low) = &self.low {
            low.restart(&self.stream)?;
        }
        self.enter(generation)?;
        self.report.clear();
        self.generation.store(generation.into(), Ordering::Relaxed);
        self.first_op.store(op, Ordering::Relaxed);
        Ok(())
    }

    fn view(&self, call: Call) -> RankView {
        RankView {
            kind: call.kind as u32,
            settings: call.settings,
            plan: call.plan,
            tally: if call.plan == 0 { 0 } else { self.tally.address() },
            replays: (!matches!(call.kind, Kind::Dispatch | Kind::MembershipDispatch)).into(),
            generation: self.generation.load(Ordering::Relaxed),
            first_op: self.first_op.load(Ordering::Relaxed),
            ..self.view
        }
    }

    /// What throughput mode has moved. Waits.
    pub(crate) fn tally(&self) -> Result<Tally, CudaError> {
        Tally::read(&self.stream, &self.tally, self.ranks() as usize)
    }

    fn launch<A>(&self, kernel: Kernel, shape: Launch, call: Call, args: &A) -> Result<(), CudaError> {
        // SAFETY: every method below passes the arguments that its kernel takes (the sizes were compared when it was compiled);
        // the view names memory of this value, which lives until the stream has been synchronised (see Drop), and callers
        // keep what else is named.
        unsafe { kernel.launch(&self.stream, shape, &self.view(call), args) }
    }

    /// Direct placement, and rings where a rank grants nothing; `args` without what this fills in: the shape, and how scales are loaded.
    pub(crate) fn dispatch(&self, call: Call, args: &args::Dispatch) -> Result<(), CudaError> {
        let device = self.stream.device();
        let stride = self.view.window.payload_stride;
        let writers = if args.headers != 0 { HEADER_WARPS } else { 0 };
        let movers = self.movers.min(DISPATCHING - writers);
        let shape = DispatchShape::new(stride, self.ranks(), device.shared_memory(), movers, self.stages);
        let DispatchShape { movers, stages, piece, pieces } = shape;
        // In each block, so that there are warps for all roles of the rings.
        let playing = self.ring_roles(&args.ring).div_ceil(self.blocks);
        let plays = playing <= DISPATCHING;
        let scales = [args.ring.scales, args.ring.scales_token, self.view.window.scales_stride];
        let bulk_scales = args.ring.scales_word == 4 && scales.iter().all(|value| value.is_multiple_of(16));
        let [plays_all, bulk_scales] = [plays, bulk_scales].map(u32::from);
        let args = args::Dispatch { movers, stages, piece, pieces, plays: plays_all, bulk_scales, ..*args };
        let warps = (movers + writers).max(if plays { playing } else { 0 });
        let shape = Launch {
            blocks: self.blocks,
            threads: 32 * warps,
            shared_memory: shape.shared_memory(self.ranks()),
            cooperative: true,
        };
        self.launch(self.kernels.dispatch, shape, call, &args)?;
        if plays { Ok(()) } else { self.dispatch_ring(call, &args.ring) }
    }

    /// Headers of a block of placed rows.
    pub(crate) fn unpack(&self, call: Call, args: &args::Unpack) -> Result<(), CudaError> {
        self.launch(self.kernels.unpack, self.light(), call, args)
    }

    /// Headers of a block that is offered.
    pub(crate) fn offer(&self, call: Call, args: &args::Offer) -> Result<(), CudaError> {
        self.launch(self.kernels.offer, self.light(), call, args)
    }

    /// Senders and receivers of a dispatch's rings.
    fn ring_roles(&self, args: &args::DispatchRing) -> u32 {
        2 * self.ranks() * args.rings.channels
    }

    /// Rows that are not placed, through rings.
    pub(crate) fn dispatch_ring(&self, call: Call, args: &args::DispatchRing) -> Result<(), CudaError> {
        self.launch(self.kernels.dispatch_ring, self.for_roles(self.ring_roles(args), 0), call, args)
    }

    /// A warp for each role.
    const fn for_roles(&self, roles: u32, shared_memory: u32) -> Launch {
        Launch { blocks: roles.div_ceil(WARPS), threads: 32 * WARPS, shared_memory, cooperative: true }
    }

    /// Comes together with all ranks on the device, and pauses for so many nanoseconds.
    pub(crate) fn meet(&self, number: u64, pause: u64) -> Result<(), CudaError> {
        let shape = Launch { blocks: 1, threads: 32, shared_memory: 0, cooperative: true };
        self.launch(self.kernels.meet, shape, Call::none(), &args::Meet { number, pause })
    }

    /// Executes scripts of verbs.
    pub(crate) fn probe(&self, kernel: Kernel, scripts: u32, args: &args::Probe) -> Result<(), CudaError> {
        let shape = Launch { blocks: scripts, threads: 256, shared_memory: 0, cooperative: true };
        self.launch(kernel, shape, Call::none(), args)
    }

    /// Stores as much to every peer as `args` say, for measurements.
    pub(crate) fn ceiling(&self, args: &args::Ceiling) -> Result<(), CudaError> {
        let shape = Launch { blocks: self.blocks, threads: 1024, shared_memory: 0, cooperative: false };
        self.launch(self.kernels.ceiling, shape, Call::none(), args)
    }

    /// Kernels that wait for nobody and move little.
    const fn light(&self) -> Launch {
        Launch { blocks: self.blocks, threads: 256, shared_memory: 0, cooperative: false }
    }
}

impl Drop for RankDevice {
    fn drop(&mut self) {
        // What the kernels use is kept for others from here on.
        let _ = self.stream.synchronize();
    }
}
