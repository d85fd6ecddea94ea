//! Low latency of one rank: its state on the device, and the launches of its kernels.

use std::mem::offset_of;
use std::sync::Arc;

use ep_core::device::{Low, LowFar, Report, low_roles};
use ep_core::layout::{KernelWindow, LowKind};
use ep_core::port::UNIT_BYTES;
use ep_core::{Error, Layout, Rank, RankSet, Settings, Shape, Topology};

use super::{Call, RankDevice, RankView, Tally};
use crate::args::{self, LOW_THREADS};
use crate::driver::{Device, DeviceMemory, Kernel, Launch, Mapped, Mode, Stream};
use crate::error::CudaError;

/// Where an `EpLow` says that a launch has failed.
const BROKEN: usize = offset_of!(Low, broken);
/// Where it has the generation.
const GENERATION: usize = offset_of!(Low, generation);

/// What low latency keeps on the device.
#[derive(Debug)]
pub(super) struct LowDevice {
    /// An `EpLow`, and what lies behind it.
    state: DeviceMemory,
    /// [`Tally`] of low latency.
    counters: DeviceMemory,
    /// Where the windows of the ranks lie that are not masked.
    windows: DeviceMemory,
    /// An `EpLowFar` of each rank, where there are several nodes.
    far: Option<DeviceMemory>,
    report: Mapped,
    blocks: u32,
}

impl LowDevice {
    pub(super) fn new(stream: &Arc<Stream>, layout: &Layout, blocks: u32) -> Result<Option<Self>, CudaError> {
        if !layout.settings().low_latency() {
            return Ok(None);
        }
        let ranks = layout.topology().ranks() as usize;
        // Each thread of a block looks at the share of one.
        let blocks = blocks.clamp(1, LOW_THREADS);
        let memory = |bytes| DeviceMemory::zeroed(stream, bytes);
        let low = Self {
            state: memory(Low::bytes(ranks, blocks as usize))?,
            counters: memory(Tally::bytes(ranks, layout.local_experts() as usize))?,
            windows: memory(8 * ranks)?,
            far: (layout.topology().nodes() > 1).then(|| memory(size_of::<LowFar>() * ranks)).transpose()?,
            report: Mapped::zeroed(stream.device(), size_of::<Report>())?,
            blocks,
        };
        let before = layout.settings().operations_before();
        low.count_on(stream, before, before)?;
        Ok(Some(low))
    }

    /// Kernels that nobody can wait for may use its memory.
    pub(super) fn lose(&mut self) {
        let memory = [&mut self.state, &mut self.counters, &mut self.windows].into_iter();
        memory.chain(&mut self.far).for_each(DeviceMemory::lose);
        self.report.lose();
    }

    pub(super) fn connect(&self, stream: &Stream, windows: &[u8]) -> Result<(), CudaError> {
        self.windows.write(stream, 0, windows)
    }

    pub(super) fn enter(&self, stream: &Stream, generation: u32) -> Result<(), CudaError> {
        self.state.write(stream, GENERATION, &generation.to_le_bytes())
    }

    /// Notes that `rank`, of `ranks`, is gone.
    pub(super) fn notice_gone(&self, stream: &Stream, ranks: u32, rank: Rank) -> Result<(), CudaError> {
        self.state.write(stream, Low::gone(ranks, rank), &1u32.to_le_bytes())
    }

    /// The number of the last operation that was sent, among all of the communicator. Waits.
    pub(super) fn serial(&self, stream: &Stream) -> Result<u64, CudaError> {
        let word = |at| {
            let mut bytes = [0; 8];
            self.state.read(stream, at, &mut bytes).map(|()| u64::from_le_bytes(bytes))
        };
        Ok(word(offset_of!(Low, serials))? + word(offset_of!(Low, sent))?)
    }

    /// Counts on from so many operations, of which this rank sent `last` as the last one.
    pub(super) fn count_on(&self, stream: &Stream, serials: u64, last: u64) -> Result<(), CudaError> {
        self.state.write(stream, offset_of!(Low, serials), &serials.to_le_bytes())?;
        self.state.write(stream, offset_of!(Low, last), &last.to_le_bytes())
    }

    /// Begins a generation behind `serials` operations, which no rank has sent more of.
    pub(super) fn restart(&self, stream: &Stream, serials: u64) -> Result<(), CudaError> {
        let last = self.serial(stream)?;
        self.state.zero(stream)?;
        self.count_on(stream, serials, last)?;
        self.far.as_ref().map_or(Ok(()), |far| far.zero(stream))?;
        self.report.clear();
        Ok(())
    }
}

/// How windows of GPUs are cut: low latency of one node travels as units, and kernels have regions of their own.
pub(crate) fn layout_of(shape: &Shape, topology: &Topology, settings: &Settings) -> Result<Layout, Error> {
    Layout::new(shape, topology, &settings.with_units(topology))?.with_kernels()
}

/// Shared memory of a dispatch block: that of the larger half.
fn dispatch_shared(window: &KernelWindow) -> u64 {
    let (ranks, warps) = (u64::from(window.ranks), u64::from(LOW_THREADS / 32));
    // Where rows travel as units, and the last unit of a row may end behind it.
    let experts = if window.nodes == 1 { (4 + 4 * warps) * u64::from(window.experts) } else { 0 };
    let send = ((28 + 8 * warps) * ranks + experts).next_multiple_of(128) + window.wire_bytes + UNIT_BYTES;
    let counts = u64::from(window.experts.max(2 * window.local_experts));
    // Where rows are packed, also how many each expert gets, and where these begin.
    let slots = 2 * u64::from(window.local_experts) + 1;
    let receive = warps * (8 + 4 + 4 * 32 + 4) + 4 * (4 * ranks + 1 + counts + slots);
    send.max(receive)
}

/// Refuses shapes of which a row or the counts of the experts do not fit into a multiprocessor.
pub(crate) fn check_low(device: &Device, layout: &Layout) -> Result<(), Error> {
    let (needed, most) = (dispatch_shared(&KernelWindow::from(layout)), device.shared_memory());
    if layout.settings().low_latency() && needed > u64::from(most) {
        let limit = format_args!("at most {most}: fewer experts, or a smaller hidden size");
        return Err(Error::invalid("bytes of a row, or of counts of the experts, in low latency", needed, limit));
    }
    Ok(())
}

impl RankDevice {
    fn low(&self) -> Result<&LowDevice, CudaError> {
        // Callers have asked the layout for its low latency first.
        self.low.as_ref().ok_or(CudaError::LeftOut { what: "low latency", needs: "settings that do not leave it out" })
    }

    fn own_window(&self) -> u64 {
        self.node.address(Rank(self.view.me))
    }

    /// # Safety
    /// As [`RankDevice`] says; `args` is the struct that the kernel takes.
    unsafe fn launch_low<A>(&self, kernel: Kernel, shape: Launch, args: &A) -> Result<(), CudaError> {
        let low = self.low()?;
        let view = RankView {
            windows: low.windows.address(),
            local: low.state.address(),
            report: low.report.address(),
            cursors: low.far.as_ref().map_or(0, DeviceMemory::address),
            ..self.view(Call::none())
        };
        // SAFETY: as in `launch`.
        unsafe { kernel.launch(&self.stream, shape, &view, args) }
    }

    /// Halves of a dispatch, on so many multiprocessors at most where that is said; `args` without counters and window.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn low_dispatch(&self, args: args::LowDispatch, most: Option<u32>) -> Result<(), CudaError> {
        let low = self.low()?;
        let blocks = low.blocks.min(most.unwrap_or(u32::MAX));
        let (counters, window) = (low.counters.address(), self.own_window());
        // Between nodes one block says all headers: the arrival goes behind them.
        let one_node = self.layout.topology().nodes() == 1;
        let units = if one_node { 1 + self.layout.shape().topk() } else { 0 };
        let roles = low_roles(blocks, LOW_THREADS / 32, args.tokens, units);
        let args = args::LowDispatch { counters, window, roles, ..args };
        let shared_memory = dispatch_shared(&self.view.w) as u32;
        let shape = Launch { blocks, threads: LOW_THREADS, shared_memory, mode: Mode::Dependent };
        // SAFETY: as the caller promises.
        unsafe { self.launch_low(self.kernels.low_dispatch, shape, &args) }
    }

    /// Halves of a combine, on so many multiprocessors at most where that is said; `args` without counters, window and what the settings say.
    ///
    /// # Safety
    /// As [`RankDevice`] says.
    pub(crate) unsafe fn low_combine(&self, args: args::LowCombine, most: Option<u32>) -> Result<(), CudaError> {
        let low = self.low()?;
        let blocks = low.blocks.min(most.unwrap_or(u32::MAX));
        let (counters, window) = (low.counters.address(), self.own_window());
        let kind = if args.kind == LowKind::PerRank as u32 { LowKind::PerRank } else { LowKind::PerChoice };
        let (roles, unit_tokens) = (low_roles(blocks, LOW_THREADS / 32, 0, 0), self.layout.low_unit_tokens(kind));
        let args = args::LowCombine { counters, window, roles, unit_tokens, ..args };
        let shared_memory = 4 * (5 * self.ranks() + 2);
        let shape = Launch { blocks, threads: LOW_THREADS, shared_memory, mode: Mode::Dependent };
        let kernel = match (args.ready, self.kernels.low_combine_ready) {
            (0, _) => self.kernels.low_combine,
            (_, Some(waits)) => waits,
            (_, None) => {
                return Err(CudaError::LeftOut { what: "a combine that waits for results", needs: "one node" });
            }
        };
        // SAFETY: as the caller promises.
        unsafe { self.launch_low(kernel, shape, &args) }
    }

    /// Tells `peer` that low latency goes on without it, and does so. Waits.
    pub(crate) fn low_mask(&self, peer: Rank) -> Result<(), CudaError> {
        let shape = Launch { blocks: 1, threads: 32, shared_memory: 0, mode: Mode::Plain };
        // SAFETY: nothing is named.
        unsafe { self.launch_low(self.kernels.low_mask, shape, &args::OfPeer::from(peer)) }?;
        self.low()?.windows.write(&self.stream, 8 * peer.index(), &[0; 8])
    }

    /// Tells all ranks that this one is about to give up `culprit`, where there are several nodes.
    pub(crate) fn low_last_words(&self, culprit: Rank) -> Result<(), CudaError> {
        let Some(kernel) = self.kernels.low_last_words.filter(|_| self.low.is_some()) else { return Ok(()) };
        let shape = Launch { blocks: 1, threads: 32, shared_memory: 0, mode: Mode::Plain };
        // SAFETY: nothing is named.
        unsafe { self.launch(kernel, shape, Call::none(), &args::OfPeer::from(culprit)) }
    }

    /// What kernels of low latency have reported.
    pub(crate) fn low_report(&self) -> Option<&Mapped> {
        self.low.as_ref().map(|low| &low.report).filter(|report| report.word(0) != 0)
    }

    /// The report has been told: the next launch may try again. Nothing of low latency is enqueued. Waits.
    pub(crate) fn low_resume(&self) -> Result<(), CudaError> {
        let low = self.low()?;
        low.report.clear();
        low.state.write(&self.stream, BROKEN, &[0; 4])
    }

    /// Whether there are ranks, not in `mask`, that operation `op`, the last of its bank, could not be sent to in time: its receiving
    /// half will read rows again. Waits.
    pub(crate) fn low_is_late(&self, op: u64, mask: &RankSet) -> Result<bool, CudaError> {
        // `ep_low_late`, behind the words of ranks that were skipped.
        let ranks = self.ranks() as usize;
        let mut late = vec![0; 4 * ranks];
        self.low()?.state.read(&self.stream, Low::late(self.ranks(), op), &mut late)?;
        let (words, _) = late.as_chunks::<4>();
        Ok((0..).map(Rank).zip(words).any(|(rank, late)| *late != [0; 4] && !mask.contains(rank)))
    }

    /// What low latency has moved; none without it. Waits.
    pub(crate) fn low_tally(&self) -> Result<Option<Tally>, CudaError> {
        let read = |low: &LowDevice| Tally::read(&self.stream, &low.counters, self.ranks() as usize);
        self.low.as_ref().map(read).transpose()
    }
}
