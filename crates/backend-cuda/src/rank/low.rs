//! Low latency of one rank: its state on the device, and the launches of its kernels.

use std::sync::Arc;

use ep_core::layout::KernelWindow;
use ep_core::{Error, Layout, Rank};

use super::{Call, RankDevice, RankView, Tally};
use crate::args::{self, LOW_BYTES, REPORT_BYTES};
use crate::driver::{Device, DeviceMemory, Kernel, Launch, Mapped, Stream};
use crate::error::CudaError;

/// `EP_LOW_SEND`.
pub(crate) const LOW_SEND: u32 = 1;
/// `EP_LOW_RECEIVE`.
pub(crate) const LOW_RECEIVE: u32 = 2;

/// `EP_LOW_THREADS`.
const THREADS: u32 = 512;
/// `EpLow.broken`.
const BROKEN: u64 = 20;
/// `EpLow.generation`.
const GENERATION: u64 = 48;

/// What low latency keeps on the device.
#[derive(Debug)]
pub(super) struct LowDevice {
    /// An `EpLow`, and four words of each rank.
    state: DeviceMemory,
    /// [`Tally`] of low latency.
    counters: DeviceMemory,
    /// Where the windows of the ranks lie that are not masked.
    windows: DeviceMemory,
    report: Mapped,
    blocks: u32,
}

impl LowDevice {
    pub(super) fn new(stream: &Arc<Stream>, layout: &Layout, blocks: u32) -> Result<Option<Self>, CudaError> {
        if !layout.settings().low_latency() {
            return Ok(None);
        }
        let ranks = layout.topology().ranks() as usize;
        let memory = |bytes| DeviceMemory::zeroed(stream, bytes);
        Ok(Some(Self {
            state: memory(LOW_BYTES + 4 * 4 * ranks)?,
            counters: memory(Tally::bytes(ranks, layout.local_experts() as usize))?,
            windows: memory(8 * ranks)?,
            report: Mapped::zeroed(stream.device(), REPORT_BYTES)?,
            blocks,
        }))
    }

    pub(super) fn connect(&self, stream: &Stream, windows: &[u8]) -> Result<(), CudaError> {
        stream.upload(self.windows.address(), windows)
    }

    pub(super) fn enter(&self, stream: &Stream, generation: u32) -> Result<(), CudaError> {
        stream.upload(self.state.address() + GENERATION, &generation.to_le_bytes())
    }

    /// Where it is noted which of `ranks` ranks are gone.
    pub(super) const fn gone(&self, ranks: u32) -> u64 {
        self.state.address() + LOW_BYTES as u64 + 3 * 4 * ranks as u64
    }

    pub(super) fn restart(&self, stream: &Stream) -> Result<(), CudaError> {
        self.state.zero(stream)?;
        self.report.clear();
        Ok(())
    }
}

/// Bytes of what kernels keep in the windows behind the cells of pieces: a cell for each row, and the rows' headers, which travel ahead of
/// them (`ep_low_cell`, `ep_low_head`).
pub(crate) fn announcements(layout: &Layout) -> u64 {
    if !layout.settings().low_latency() {
        return 0;
    }
    let slots = u64::from(layout.topology().ranks()) * u64::from(layout.shape().max_tokens());
    slots * (4 * 8 + 2 * layout.row().header_bytes())
}

/// Shared memory of a dispatch block: that of the larger half.
fn dispatch_shared(window: &KernelWindow) -> u64 {
    let (ranks, warps) = (u64::from(window.ranks), u64::from(THREADS / 32));
    let send = ((28 + 8 * warps) * ranks).next_multiple_of(128) + window.wire_bytes;
    let counts = u64::from(window.experts.max(2 * window.local_experts));
    let receive = warps * (8 + 4 + 4 * 32) + 4 * (4 * ranks + 1 + counts);
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
        self.low
            .as_ref()
            .ok_or_else(|| CudaError::Driver { call: "low latency", code: "left out of the settings".into() })
    }

    fn launch_low<A>(&self, kernel: Kernel, shape: Launch, args: &A) -> Result<(), CudaError> {
        let low = self.low()?;
        let view = RankView {
            windows: low.windows.address(),
            local: low.state.address(),
            report: low.report.address(),
            ..self.view(Call::none())
        };
        // SAFETY: as in `RankDevice::launch`; the view names memory of this value here, too.
        unsafe { kernel.launch(&self.stream, shape, &view, args) }
    }

    /// Halves of a dispatch; `args` without the counters.
    pub(crate) fn low_dispatch(&self, args: args::LowDispatch) -> Result<(), CudaError> {
        let low = self.low()?;
        let args = args::LowDispatch { counters: low.counters.address(), ..args };
        let shared_memory = dispatch_shared(&self.view.window) as u32;
        let shape = Launch { blocks: low.blocks, threads: THREADS, shared_memory, cooperative: true };
        self.launch_low(self.kernels.low_dispatch, shape, &args)
    }

    /// Halves of a combine; `args` without the counters.
    pub(crate) fn low_combine(&self, args: args::LowCombine) -> Result<(), CudaError> {
        let low = self.low()?;
        let args = args::LowCombine { counters: low.counters.address(), ..args };
        let shared_memory = 4 * (5 * self.ranks() + 1);
        let shape = Launch { blocks: low.blocks, threads: THREADS, shared_memory, cooperative: true };
        self.launch_low(self.kernels.low_combine, shape, &args)
    }

    /// Tells `peer` that low latency goes on without it, and does so. Waits.
    pub(crate) fn low_mask(&self, peer: Rank) -> Result<(), CudaError> {
        let shape = Launch { blocks: 1, threads: 32, shared_memory: 0, cooperative: false };
        self.launch_low(self.kernels.low_mask, shape, &args::LowMask { peer: peer.0, reserved: 0 })?;
        self.stream.upload(self.low()?.windows.address() + 8 * u64::from(peer.0), &[0; 8])
    }

    /// What kernels of low latency have reported.
    pub(crate) fn low_report(&self) -> Option<&Mapped> {
        self.low.as_ref().map(|low| &low.report).filter(|report| report.word(0) != 0)
    }

    /// The report has been told: the next launch may try again. Nothing of low latency is enqueued. Waits.
    pub(crate) fn low_resume(&self) -> Result<(), CudaError> {
        let low = self.low()?;
        low.report.clear();
        self.stream.upload(low.state.address() + BROKEN, &[0; 4])
    }

    /// What low latency has moved; none without it. Waits.
    pub(crate) fn low_tally(&self) -> Result<Option<Tally>, CudaError> {
        let read = |low: &LowDevice| Tally::read(&self.stream, &low.counters, self.ranks() as usize);
        self.low.as_ref().map(read).transpose()
    }
}
