//! One rank: its stream, window and state on the device, and the launches of every kernel.
//!
//! Nothing here waits, except where a name says so. Addresses are those of the rank's GPU; who calls keeps what they name alive
//! until the stream has passed.

mod aside;
mod by_expert;
mod combine;
mod counts;
mod desk;
mod dispatch_shape;
mod low;
mod options;
mod plan;
mod pulled;
mod roles;
mod sums;
mod tally;
mod teams;
#[cfg(feature = "workshop")]
mod workshop;

use std::any::Any;
use std::mem::offset_of;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ep_core::device::{Local, RankView, Report, Task, block_roles};
use ep_core::layout::{KernelWindow, Kind, PIECES};
use ep_core::port::Duty;
use ep_core::topology::Reach;
use ep_core::transport::{DevicePlace, WindowCopies, WindowMemory};
use ep_core::{Error, Layout, Rank, RankSet};

use crate::args::{self, BATON_BYTES, DISPATCH_WARPS, EXIT_BYTES, POSITION_BLOCKS, RING_WARPS};
use crate::checks::{Checks, TestDevice};
use crate::driver::{Device, DeviceMemory, Kernel, Launch, Mapped, Mode, Presence, Scratch, Stream};
use crate::error::CudaError;
use crate::far::{Far, Network, Offers};
use crate::kernels::Kernels;
use crate::node::{Copies, Node};
use crate::posting::dmabuf_of;
pub(crate) use aside::{Aside, LOTS};
use by_expert::Shares;
pub(crate) use combine::Offered;
use counts::counts_bytes;
pub(crate) use counts::{Chosen, Counting, HostCounts};
use dispatch_shape::DispatchShape;
use low::LowDevice;
pub(crate) use low::{check_low, layout_of};
pub(crate) use options::Options;
pub(crate) use plan::DevicePlan;
use roles::Roles;
pub(crate) use tally::Tally;
use teams::Teams;

/// Warps of a dispatch block that write headers.
const HEADER_WARPS: u32 = 4;
/// Threads of a block of kernels that move memory of this GPU alone.
const LOCAL_THREADS: u32 = 256;
/// Their blocks on each multiprocessor, at most: as many as it has threads for.
const LOCAL_BLOCKS: u32 = 8;

/// What a call's kernels have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    /// Hash of what all ranks must agree on, without the number of the replayed dispatch.
    pub(crate) settings: u64,
    /// Where the handle's numbers lie ([`DevicePlan::address`]); 0 for none.
    pub(crate) plan: u64,
    /// Whether its kernels run beside those of the stream ([`RankDevice::fork`]).
    pub(crate) is_aside: bool,
}

impl Call {
    /// Of launches that are no operation.
    pub(crate) const fn none() -> Self {
        Self { kind: Kind::Dispatch, settings: 0, plan: 0, is_aside: false }
    }
}

/// Where kernels are told that the window of a rank of another node lies: it takes part, and no store reaches it.
const BEYOND: u64 = 1;

/// Where an `EpLocal` has the generation.
const GENERATION: usize = offset_of!(Local, generation);

/// One rank on its GPU.
///
/// # Safety of its launches
/// Addresses in what they are given name memory of this GPU with room for what the struct says of them, which work of the own stream
/// may use: [`Scratch`](crate::driver::Scratch), foreign or not, the window, and what stays until the stream was synchronised.
#[derive(Debug)]
pub(crate) struct RankDevice {
    pub(crate) stream: Arc<Stream>,
    /// Where received rows are copied while further ones come.
    aside: Option<Arc<Stream>>,
    /// As [`Options`] say.
    launches: Option<u32>,
    pub(crate) layout: Layout,
    pub(crate) kernels: Arc<Kernels>,
    pub(crate) report: Mapped,
    /// Counts on the host: op, tokens, matrix, choices of the own experts.
    pub(crate) counts: Mapped,
    local: DeviceMemory,
    windows: DeviceMemory,
    cursors: DeviceMemory,
    roles: Roles,
    /// rows `[ranks]`, choices `[experts]`, partial `[POSITION_BLOCKS, ranks]`; u32.
    numbers: DeviceMemory,
    flags: DeviceMemory,
    /// u32 `[ranks, PIECES]`: what a running combine has copied; zero in between.
    copied: DeviceMemory,
    /// u32 `[ranks]`: rows that a running dispatch by way of outboxes has pulled; zero in between.
    arrived: DeviceMemory,
    /// What blocks that order rows by expert tell each other.
    shares: Shares,
    /// [`Tally`] of throughput mode.
    tally: DeviceMemory,
    /// What does not change.
    view: RankView,
    generation: AtomicU32,
    first_op: AtomicU64,
    /// None where the settings leave low latency out.
    low: Option<LowDevice>,
    /// Whether a put more costs little: a driver takes as long to be asked for a copy as one of many rows takes.
    short_runs: bool,
    /// Lanes to other nodes, where there are such. Given up before the windows: the network moves their bytes.
    pub(crate) far: Option<Far>,
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
        network: Option<(&dyn Network, &Arc<Offers>)>,
    ) -> Result<Self, Error> {
        let Options { blocks, most, low_blocks, low_beside_copies, priority, moving, launches, specialises, is_alone } =
            options;
        let presence = Presence::new(device);
        let stream = Stream::new(device, priority)?;
        let (ranks, experts) = (layout.topology().ranks() as usize, layout.shape().experts() as usize);
        let tracks = layout.tracks() as usize;
        let memory = |bytes| DeviceMemory::zeroed(&stream, bytes);
        let local_experts = layout.local_experts() as usize;
        let (local, windows, cursors) =
            (memory(Local::bytes(ranks))?, memory(ranks * 8)?, memory(2 * ranks * tracks * 8)?);
        let report = Mapped::zeroed(device, size_of::<Report>())?;
        let test =
            checks.map(|checks| TestDevice::new(&stream, checks, me, layout.settings().deadline())).transpose()?;
        let view = RankView {
            w: KernelWindow::from(layout),
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
            far: 0,
        };
        let far = network.map(|(network, offers)| {
            let copies = || Copies::new(node, me, (device, moving), layout.window_bytes()).map(Arc::new);
            let copies: Option<Arc<dyn WindowCopies>> = network.copies().then(copies).transpose()?.map(|one| one as _);
            let (address, bytes) = (node.address(me), layout.window_bytes());
            let dmabuf = dmabuf_of(device, address, bytes);
            let dmabuf = dmabuf.as_ref().map(|file| file.as_fd());
            let keeper: Arc<dyn Any + Send + Sync> = Arc::clone(node) as _;
            let window = WindowMemory::Device { address, keeper: Some(&keeper), dmabuf, copies: copies.as_ref() };
            let lanes = network.open(DevicePlace { me, layout, window }, &stream)?;
            Far::new(lanes, network.source(), Arc::clone(offers), layout, &stream)
        });
        let far = far.transpose()?;
        let copied = far.as_ref().is_some_and(|far| far.lanes().is_copied());
        // Movers make many short puts cheap. Staged rows the driver copies, whatever was asked for.
        let is_moved = moving.movers > 0 && !far.as_ref().is_some_and(|far| far.lanes().is_staged());
        let short_runs = !copied || is_moved;
        let low = LowDevice::new(&stream, layout, if copied { low_beside_copies } else { low_blocks })?;
        let view = RankView { far: far.as_ref().map_or(0, Far::address), ..view };
        let this = Self {
            low,
            short_runs,
            kernels: Kernels::of(
                device,
                test.is_some(),
                far.as_ref().map(Far::source),
                specialises.then_some(&view.w),
            )?,
            far,
            test,
            counts: Mapped::zeroed(device, counts_bytes(ranks, local_experts))?,
            tally: memory(Tally::bytes(ranks, local_experts))?,
            generation: AtomicU32::new(1),
            first_op: AtomicU64::new(1),
            numbers: memory(4 * (ranks + experts + POSITION_BLOCKS as usize * ranks))?,
            flags: memory(POSITION_BLOCKS as usize * 8)?,
            copied: memory(4 * ranks * PIECES as usize)?,
            arrived: memory(4 * ranks)?,
            shares: Shares::new(&stream, layout.local_experts())?,
            nothing: Arc::new(Scratch::new(&stream, 0)?),
            _presence: presence,
            layout: layout.clone(),
            local,
            windows,
            cursors,
            roles: Roles::new(&stream, layout, me)?,
            report,
            view,
            blocks,
            movers: DISPATCH_WARPS,
            stages: 0,
            node: Arc::clone(node),
            aside: (is_alone && layout.topology().nodes() == 1).then(|| Stream::new(device, priority)).transpose()?,
            launches,
            stream,
        };
        this.check_rings(layout.settings().rings().channels, most)?;
        this.connect(&RankSet::new())?;
        this.enter(1)?;
        Ok(this)
    }

    fn ranks(&self) -> u32 {
        self.view.w.ranks
    }

    /// Takes note of which ranks take part. Waits.
    pub(crate) fn connect(&self, mask: &RankSet) -> Result<(), CudaError> {
        let topology = self.layout.topology();
        let address = |rank| match topology.reach(Rank(self.view.me), rank) {
            _ if mask.contains(rank) => 0,
            Reach::Far => BEYOND,
            Reach::Own | Reach::Near => self.node.address(rank),
        };
        let bytes: Vec<u8> = self.node.ranks().flat_map(|rank| address(rank).to_le_bytes()).collect();
        if let Some(low) = &self.low {
            low.connect(&self.stream, &bytes)?;
        }
        self.windows.write(&self.stream, 0, &bytes)
    }

    /// Lets kernels that wait for `rank` know that it does nothing any more. They may be running. Waits, for other work than theirs.
    pub(crate) fn notice_gone(&self, rank: Rank) -> Result<(), CudaError> {
        let aside = Stream::new(self.stream.device(), 0)?;
        self.local.write(&aside, Local::gone(rank), &1u32.to_le_bytes())?;
        self.low.as_ref().map_or(Ok(()), |low| low.notice_gone(&aside, self.ranks(), rank))
    }

    /// Says to the kernels which generation it is. Waits.
    fn enter(&self, generation: u16) -> Result<(), CudaError> {
        let generation = u32::from(generation);
        self.local.write(&self.stream, GENERATION, &generation.to_le_bytes())?;
        self.low.as_ref().map_or(Ok(()), |low| low.enter(&self.stream, generation))
    }

    /// Whether kernels of throughput mode do nothing any more, as this rank has failed on the device. Waits.
    pub(crate) fn is_closed(&self) -> Result<bool, CudaError> {
        self.has_set(offset_of!(Local, failed))
    }

    /// Whether what was enqueued behind the last exchange of counts went ahead. Waits.
    pub(crate) fn went_ahead(&self) -> Result<bool, CudaError> {
        self.has_set(offset_of!(Local, ahead))
    }

    /// Whether a word of the `EpLocal` is not 0. Waits.
    fn has_set(&self, at: usize) -> Result<bool, CudaError> {
        let mut word = [0; 4];
        self.local.read(&self.stream, at, &mut word)?;
        Ok(word != [0; 4])
    }

    /// Operations of throughput mode that have ended, replayed ones among them. Waits.
    pub(crate) fn ops_done(&self) -> Result<u64, CudaError> {
        let mut op = [0; 8];
        self.local.read(&self.stream, 0, &mut op)?;
        Ok(u64::from_le_bytes(op))
    }

    /// The number of the last operation of low latency that was sent, among all of the communicator; replays count. Waits.
    pub(crate) fn low_serial(&self) -> Result<u64, CudaError> {
        self.low.as_ref().map_or(Ok(0), |low| low.serial(&self.stream))
    }

    /// Begins a generation after a failure, whose first operation is `op`: nothing of this rank runs any more. Waits.
    pub(crate) fn restart(&self, generation: u16, op: u64) -> Result<(), CudaError> {
        for memory in [&self.local, &self.cursors, &self.numbers, &self.flags, &self.copied, &self.arrived] {
            memory.zero(&self.stream)?;
        }
        self.local.write(&self.stream, 0, &(op - 1).to_le_bytes())?;
        if let Some(low) = &self.low {
            low.restart(&self.stream, op)?;
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

    /// # Safety
    /// As [`RankDevice`] says; `args` is the struct that the kernel takes.
    unsafe fn launch<A>(&self, kernel: Kernel, shape: Launch, call: Call, args: &A) -> Result<(), CudaError> {
        // SAFETY: ep_args.h declares the struct to the kernel from that very struct; the view names memory of this value, which is nobody else's
        // before the kernel has ended (see Drop; graphs keep this value); of the rest the caller promises it.
        unsafe { kernel.launch(self.stream_of(call), shape, &self.view(call), args) }
    }

    fn stream_of(&self, call: Call) -> &Stream {
        self.aside.as_deref().filter(|_| call.is_aside).unwrap_or(&self.stream)
    }

    /// Direct placement, and rings where a rank grants nothing; `args` without what this fills in: the shape, and how scales are loaded.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn dispatch(&self, call: Call, args: &args::Dispatch) -> Result<(), CudaError> {
        let device = self.stream.device();
        let stride = self.view.w.payload_stride;
        let writers = if args.headers != 0 { HEADER_WARPS } else { 0 };
        let movers = self.movers.min(DISPATCH_WARPS - writers);
        let shape = DispatchShape::new(stride, self.ranks(), device.shared_memory(), movers, self.stages);
        let DispatchShape { movers, stages, piece, pieces } = shape;
        // In each block, so that there are warps for all roles of the rings.
        let ring = self.with_roles(&args.ring);
        let playing = ring.role_count.div_ceil(self.blocks);
        let plays = playing <= DISPATCH_WARPS;
        let scales = [args.ring.scales, args.ring.scales_token, self.view.w.scales_stride];
        let bulk_scales = args.ring.scales_word == 4 && scales.iter().all(|value| value.is_multiple_of(16));
        let [plays_all, bulk_scales] = [plays, bulk_scales].map(u32::from);
        let warps = (movers + writers).max(if plays { playing } else { 0 });
        let writers = if args.headers != 0 { warps - movers } else { 0 };
        let block = block_roles(&[(Duty::Placer, Task::Rows, movers), (Duty::Placer, Task::Headers, writers)]);
        let args =
            args::Dispatch { movers, stages, piece, pieces, plays: plays_all, bulk_scales, ring, block, ..*args };
        let shape = Launch {
            blocks: self.blocks,
            threads: 32 * warps,
            shared_memory: shape.shared_memory(self.ranks()),
            mode: Mode::Cooperative,
        };
        // SAFETY: as the caller promises, for both.
        unsafe {
            self.launch(self.kernels.dispatch, shape, call, &args)?;
            if plays || args.end_lot < args.lots { Ok(()) } else { self.dispatch_ring(call, &args.ring) }
        }
    }

    /// Headers of a block of placed rows.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn unpack(&self, call: Call, args: &args::Unpack) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.unpack, self.local(args.rows), call, args) }
    }

    /// Zeros behind the rows that came.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn blank(&self, call: Call, args: &args::Blank) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.blank, self.local(args.rows), call, args) }
    }

    /// Headers of a block that is offered.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn offer(&self, call: Call, args: &args::Offer) -> Result<(), CudaError> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.offer, self.light(), call, args) }
    }

    /// `args` with the table of its roles.
    fn with_roles(&self, args: &args::DispatchRing) -> args::DispatchRing {
        let (roles, role_count) = self.roles.of(Kind::Dispatch, args.rings.channels);
        args::DispatchRing { roles, role_count, ..*args }
    }

    /// Who moves the rows of a dispatch of so many roles through rings: a block's teams, and as [`Teams::rooms`] has them each warp's room and a block's
    /// shared memory.
    fn carriers(&self, role_count: u32) -> (Teams, (u32, u32)) {
        let w = &self.view.w;
        if self.far.is_none() {
            return (Teams { roles: RING_WARPS, warps: 1 }, (0, 0));
        }
        let teams = Teams::new(role_count, self.blocks, w.nodes);
        let of_team = w.ranks_per_node * EXIT_BYTES + BATON_BYTES;
        (teams, teams.rooms(of_team, w.scales_offset as u32, self.stream.device().shared_memory()))
    }

    /// Rows that are not placed, through rings.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn dispatch_ring(&self, call: Call, args: &args::DispatchRing) -> Result<(), CudaError> {
        let args = &self.with_roles(args);
        let (Teams { roles, warps }, (room, shared_memory)) = self.carriers(args.role_count);
        let (blocks, threads) = (args.role_count.div_ceil(roles), 32 * roles * warps);
        let shape = Launch { blocks, threads, shared_memory, mode: Mode::Cooperative };
        let args = &args::DispatchRing { team: warps, room, short_runs: self.short_runs.into(), ..*args };
        // SAFETY: as the caller promises; the roles are this value's.
        unsafe { self.launch(self.kernels.dispatch_ring, shape, call, args) }
    }

    /// Kernels that wait for nobody and move little.
    const fn light(&self) -> Launch {
        Launch { blocks: self.blocks, threads: 256, shared_memory: 0, mode: Mode::Plain }
    }

    /// Kernels that wait for nobody, and move up to so many rows in memory of this GPU alone, a warp each. They take all multiprocessors: with as
    /// many as the links need they would last longer than what they follow.
    fn local(&self, rows: u32) -> Launch {
        let most = self.stream.device().multiprocessors() * LOCAL_BLOCKS;
        let blocks = rows.div_ceil(LOCAL_THREADS / 32).clamp(1, most);
        Launch { blocks, threads: LOCAL_THREADS, shared_memory: 0, mode: Mode::Plain }
    }
}

impl Drop for RankDevice {
    fn drop(&mut self) {
        // What the kernels use is kept for others from here on; where nobody can say whether they have ended, as another's capture of the stream is
        // under way, it is lost.
        if self.stream.synchronize().is_ok() {
            // Lanes first: they move bytes of the windows.
            drop(self.far.take());
            self.node.part(false);
            return;
        }
        std::mem::forget(self.far.take());
        self.node.let_run();
        let memory = [
            &mut self.local,
            &mut self.windows,
            &mut self.cursors,
            &mut self.numbers,
            &mut self.flags,
            &mut self.copied,
            &mut self.arrived,
            &mut self.tally,
        ];
        memory.into_iter().for_each(DeviceMemory::lose);
        [&mut self.report, &mut self.counts].into_iter().for_each(Mapped::lose);
        self.roles.lose();
        self.shares.lose();
        if let Some(low) = &mut self.low {
            low.lose();
        }
    }
}
