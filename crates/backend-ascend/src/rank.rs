//! One rank on its device: stream and state, and the launches of every kernel.
//!
//! Nothing here waits. Who calls keeps what launches name until they have ended.

mod low;

use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ep_core::device::{Local, RankView, Report};
use ep_core::layout::{KernelRings, KernelWindow, Kind};
use ep_core::{Error, Layout, Rank, RankSet, Rings};
use zerocopy::{Immutable, IntoBytes};

use crate::Roles;
use crate::args::{
    Combine, Counts, Dispatch, Fold, Launch, Line, Low, Positions, Quantize, Queue, Spread, SpreadEnd, mail_words,
};
use crate::driver::{AscendError, Device, Event, Kernel, Memory, Stream};
use crate::node::Node;
pub(crate) use low::Half;
use low::LowDevice;

/// Nanoseconds of a tick of the device's counter.
const NANOS_PER_TICK: u32 = 20;

/// The kernels of a device.
#[derive(Clone, Copy, Debug)]
struct Kernels {
    positions: Kernel,
    counts: Kernel,
    dispatch: Kernel,
    combine: Kernel,
    spread: Kernel,
    fold: Kernel,
    quantize: Kernel,
    low_send: Kernel,
    low_receive: Kernel,
    low_return: Kernel,
    low_reduce: Kernel,
    low_tell: Kernel,
}

impl Kernels {
    fn load(device: &Device, path: &Path) -> Result<Self, AscendError> {
        let names = ["ep_positions_kernel", "ep_counts_kernel", "ep_dispatch", "ep_combine", "ep_quantize_kernel"];
        let [positions, counts, dispatch, combine, quantize] = Kernel::load(device, path, names)?;
        let [spread, fold] = Kernel::load(device, path, ["ep_spread_kernel", "ep_fold_kernel"])?;
        let names = ["ep_low_send_kernel", "ep_low_receive_kernel", "ep_low_return_kernel", "ep_low_reduce_kernel"];
        let [low_send, low_receive, low_return, low_reduce] = Kernel::load(device, path, names)?;
        let [low_tell] = Kernel::load(device, path, ["ep_low_tell_kernel"])?;
        Ok(Self {
            positions,
            counts,
            dispatch,
            combine,
            spread,
            fold,
            quantize,
            low_send,
            low_receive,
            low_return,
            low_reduce,
            low_tell,
        })
    }
}

/// How a rank uses its device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Which core does what.
    pub(crate) roles: Roles,
    /// A planted fault of kernels that are built for tests; 0 for none.
    pub(crate) plant: u32,
}

/// What the launches of a call have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) rings: Rings,
    /// What all ranks say alike beside the rings: the dispatch that is replayed, 0 for none, and options.
    pub(crate) alike: u64,
}

/// Which launch of an operation ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OpEnd {
    /// One that another follows.
    Followed,
    /// The last one.
    Last,
}

/// One rank on its device.
///
/// # Safety of its launches
/// Addresses in what they are given name memory of this device with room for what the struct says of them, until the launch has ended.
#[derive(Debug)]
pub(crate) struct RankDevice {
    stream: Arc<Stream>,
    layout: Layout,
    kernels: Kernels,
    /// Their file.
    kernels_path: PathBuf,
    options: Options,
    local: Memory,
    report: Memory,
    windows: Memory,
    cursors: Memory,
    lines: Memory,
    /// What cores hand to those that post to other servers, and the queues that these hold.
    mail: Memory,
    queues: Memory,
    /// What cores tell each other of their shares of a batch, and in which launch.
    told: Memory,
    ready: Memory,
    /// How each core's part of the last spread ended.
    spread: Memory,
    /// Launches in which cores told each other something.
    tickets: u64,
    /// Parameters of the launches of a call, one behind the other: positions, counts, rows, and what is done with rows by expert.
    args: [Memory; 4],
    /// None where the communicator has no low latency.
    low: Option<LowDevice>,
    /// What does not change within a generation.
    view: RankView,
    /// The windows of all ranks. Last: others write into this one's until they have ended, too.
    pub(crate) node: Arc<Node>,
}

impl RankDevice {
    /// The rank `me` of those whose windows are `node`.
    pub(crate) fn new(
        device: &Arc<Device>,
        layout: &Layout,
        me: Rank,
        node: &Arc<Node>,
        kernels: &Path,
        options: Options,
    ) -> Result<Self, AscendError> {
        let stream = Arc::new(Stream::new(device)?);
        let ranks = layout.topology().ranks() as usize;
        let memory = |bytes| Memory::zeroed(device, bytes);
        let (cores, told) = (options.roles.cores() as usize, ranks + layout.shape().experts() as usize + 1);
        let args = |bytes| Memory::new(device, bytes);
        let rows = size_of::<Dispatch>().max(size_of::<Combine>()).max(size_of::<Quantize>()).max(size_of::<Low>());
        let view = RankView {
            w: KernelWindow::from(layout),
            allowed: layout.settings().deadline().0,
            me: me.0,
            ..RankView::default()
        };
        let mut this = Self {
            kernels: Kernels::load(device, kernels)?,
            kernels_path: kernels.to_owned(),
            local: memory(Local::bytes(ranks))?,
            report: memory(size_of::<Report>())?,
            windows: memory(8 * ranks)?,
            cursors: memory(16 * ranks * layout.tracks() as usize)?,
            lines: memory(size_of::<Line>() * cores)?,
            mail: memory(8 * mail_words(layout.topology().nodes(), view.w.channels))?,
            queues: memory(size_of::<Queue>() * ranks)?,
            told: memory(4 * cores * told)?,
            ready: memory(8 * cores)?,
            spread: memory(8 * cores)?,
            tickets: 0,
            args: [
                args(size_of::<Positions>())?,
                args(size_of::<Counts>())?,
                args(rows)?,
                args(size_of::<Spread>().max(size_of::<Fold>()))?,
            ],
            low: LowDevice::new(device, layout, cores, node.staging(me, layout)?)?,
            layout: layout.clone(),
            node: Arc::clone(node),
            stream,
            options,
            view,
        };
        this.restart(1, 1, &RankSet::new())?;
        Ok(this)
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        self.stream.device()
    }

    pub(crate) const fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    pub(crate) const fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Begins a generation, in which the ranks of `mask` take no part: nothing of this rank runs any more.
    pub(crate) fn restart(&mut self, generation: u16, op: u64, mask: &RankSet) -> Result<(), AscendError> {
        for memory in [&self.local, &self.report, &self.cursors, &self.lines, &self.mail] {
            memory.fill(0)?;
        }
        self.local.write(offset_of!(Local, ops_done), &(op - 1).to_le_bytes())?;
        self.local.write(offset_of!(Local, generation), &u32::from(generation).to_le_bytes())?;
        let address = |rank| if mask.contains(rank) { 0 } else { self.node.address(rank) };
        let windows: Vec<u64> = self.node.ranks().map(address).collect();
        self.windows.write(0, windows.as_bytes())?;
        self.low.as_ref().map_or(Ok(()), |low| low.restart(generation, &windows))?;
        self.connect(mask)?;
        self.view = RankView {
            windows: self.windows.address(),
            local: self.local.address(),
            report: self.report.address(),
            cursors: self.cursors.address(),
            first_op: op,
            generation: generation.into(),
            ..self.view
        };
        Ok(())
    }

    /// Opens a queue to each rank of another server that takes part and that this one speaks to: its rail peers, and with low latency all.
    fn connect(&self, mask: &RankSet) -> Result<(), AscendError> {
        let (topology, me) = (self.layout.topology(), Rank(self.view.me));
        let is_spoken_to = |peer: Rank| {
            let is_peer = topology.local_of(peer) == topology.local_of(me) || self.low.is_some();
            is_peer && topology.node_of(peer) != topology.node_of(me) && !mask.contains(peer)
        };
        self.open_queues(topology.all().filter(|&peer| is_spoken_to(peer)))
    }

    /// New queues to these ranks of other servers.
    fn open_queues(&self, peers: impl Iterator<Item = Rank>) -> Result<(), AscendError> {
        let peers: Vec<Rank> = peers.collect();
        for (peer, queue) in peers.iter().zip(self.node.queues(Rank(self.view.me), &peers, &self.layout)?) {
            self.queues.write(size_of::<Queue>() * peer.index(), queue.as_bytes())?;
        }
        Ok(())
    }

    /// New queues to those ranks of other servers that are given up, after [`RankDevice::disconnect`]: by them they learn of it.
    pub(crate) fn connect_lost(&self, lost: &RankSet) -> Result<(), AscendError> {
        let (topology, me) = (self.layout.topology(), Rank(self.view.me));
        self.open_queues(lost.iter().filter(|&rank| topology.node_of(rank) != topology.node_of(me)))
    }

    /// Ends the queues to other servers: nothing that was posted arrives any more. Nothing of this rank runs.
    pub(crate) fn disconnect(&self) -> Result<(), AscendError> {
        self.node.close(Rank(self.view.me))
    }

    /// Lets kernels that wait for `rank` know that it does nothing any more. They may be running.
    pub(crate) fn notice_gone(&self, rank: Rank) -> Result<(), AscendError> {
        self.low.as_ref().map_or(Ok(()), |low| low.notice_gone(rank))?;
        self.local.write(Local::gone(rank), &1u32.to_le_bytes())
    }

    /// Operations that have ended. Nothing of this rank runs.
    pub(crate) fn ops_done(&self) -> Result<u64, AscendError> {
        Ok(self.local.values::<u64>(offset_of!(Local, ops_done), 1)?[0])
    }

    /// `[nodes]`: slots of the rings with this rank's rail peer there that were filled in this generation, and that were emptied. Nothing of
    /// this rank runs.
    pub(crate) fn far_slots(&self) -> Result<Vec<[u64; 2]>, AscendError> {
        let (topology, me) = (*self.layout.topology(), Rank(self.view.me));
        let (tracks, first) = (self.layout.tracks() as usize, self.layout.far_track(0) as usize);
        let ranks = topology.ranks() as usize;
        let cursors = self.cursors.values::<u64>(0, 2 * ranks * tracks)?;
        let of = |node, side: usize| {
            let peer = topology.rank_at(node, topology.local_of(me)).index();
            cursors[(side * ranks + peer) * tracks..][first..tracks].iter().sum()
        };
        Ok(topology.all_nodes().map(|node| [of(node, 0), of(node, 1)]).collect())
    }

    /// The first token whose choices are wrong, as the launches that have ended found; none where all are right. It is told once.
    pub(crate) fn bad_token(&self) -> Result<Option<u32>, AscendError> {
        Self::bad_token_in(&self.local)
    }

    fn bad_token_in(local: &Memory) -> Result<Option<u32>, AscendError> {
        let at = offset_of!(Local, bad_token);
        let first = local.values::<u32>(at, 1)?[0].checked_sub(1);
        if first.is_some() {
            local.write(at, &[0; 4])?;
        }
        Ok(first)
    }

    /// What the launches that have ended reported; none where they ended well.
    pub(crate) fn failure(&self, me: Rank) -> Result<Option<Error>, AscendError> {
        let report = self.report.values::<Report>(0, 1)?;
        Ok(report[0].error(me))
    }

    /// Whether a launch of operation `op` has come to its end on all cores, as the control core has found. Nothing of this rank runs.
    pub(crate) fn is_done(&self, op: u64, end: OpEnd) -> Result<bool, AscendError> {
        let line = size_of::<Line>() * self.options.roles.senders as usize + offset_of!(Line, ended);
        Ok(self.lines.values::<u64>(line, 1)?[0] == op << 1 | u64::from(end == OpEnd::Last))
    }

    /// The end of what is enqueued.
    pub(crate) fn record(&self) -> Result<Event, AscendError> {
        self.stream.record()
    }

    /// What a launch is given. `follows`: another one of the same operation does.
    pub(crate) fn prepared(&self, call: &Call, follows: bool) -> Launch {
        let settings = self.layout.hash(&call.rings).wrapping_add(call.alike);
        Launch {
            r: RankView { settings, kind: call.kind as u32, ..self.view },
            rings: KernelRings::new(&self.layout, call.kind, &call.rings),
            roles: self.options.roles,
            nanos_per_tick: NANOS_PER_TICK,
            plant: self.options.plant,
            follows: follows.into(),
            lines: self.lines.address(),
            mail: self.mail.address(),
            queues: self.queues.address(),
        }
    }

    /// How long a kernel may wait for others, in nanoseconds, and a second for its work.
    const fn longest(&self) -> u64 {
        self.view.allowed.saturating_mul(2).saturating_add(1_000_000_000)
    }

    /// # Safety
    /// As [`RankDevice`] says; `args` is the struct that the kernel takes, in `place`, which no launch under way uses.
    unsafe fn launch<A: IntoBytes + Immutable>(
        &self,
        kernel: Kernel,
        args: &A,
        place: usize,
    ) -> Result<(), AscendError> {
        let memory = &self.args[place];
        memory.write(0, args.as_bytes())?;
        // SAFETY: `ep_args.h` declares the struct to the kernel from that very struct; what it names of this value's lives as long as the value,
        // which outlives its launches (see the endpoint's Drop). Of the rest the caller promises it.
        unsafe { self.stream.launch(kernel, self.options.roles.cores(), memory, self.longest()) }
    }

    /// Positions and counts of a batch, before the exchange of counts; `args` without what cores tell each other.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs.
    pub(crate) unsafe fn positions(&mut self, args: Positions) -> Result<(), AscendError> {
        self.tickets += 1;
        let (told, ready) = (self.told.address(), self.ready.address());
        let args = Positions { told, ready, ticket: self.tickets, ..args };
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.positions, &args, 0) }
    }

    /// The exchange of counts: the first launch of its operation that speaks to others.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs but its positions.
    pub(crate) unsafe fn counts(&self, args: &Counts) -> Result<(), AscendError> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.counts, args, 1) }
    }

    /// Rows of a dispatch.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs.
    pub(crate) unsafe fn dispatch(&self, args: &Dispatch) -> Result<(), AscendError> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.dispatch, args, 2) }
    }

    /// Rows by expert, behind a dispatch; `args` without what cores tell each other. [`RankDevice::spread_end`] says how it ended.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs but the dispatch.
    pub(crate) unsafe fn spread(&mut self, args: Spread) -> Result<(), AscendError> {
        self.tickets += 1;
        let (told, ready, ended) = (self.told.address(), self.ready.address(), self.spread.address());
        let args = Spread { told, ready, ended, ticket: self.tickets, ..args };
        // SAFETY: as the caller promises. Cores tell fewer numbers here than where they find positions.
        unsafe { self.launch(self.kernels.spread, &args, 3) }
    }

    /// How the last launch of [`RankDevice::spread`] ended, which runs no more: the worst of its cores.
    pub(crate) fn spread_end(&self) -> Result<SpreadEnd, AscendError> {
        let cores = self.spread.values::<u64>(0, self.options.roles.cores() as usize)?;
        let of_core = |word: u64| match SpreadEnd::of(word as u32 & 0xff) {
            Some(end) if word >> 8 == self.tickets => end,
            _ => SpreadEnd::Late,
        };
        Ok(cores.into_iter().map(of_core).max().unwrap_or(SpreadEnd::Late))
    }

    /// Sums of the results of rows by expert, before a combine.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs.
    pub(crate) unsafe fn fold(&self, args: &Fold) -> Result<(), AscendError> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.fold, args, 3) }
    }

    /// A combine.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs but the sums of rows by expert.
    pub(crate) unsafe fn combine(&self, args: &Combine) -> Result<(), AscendError> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.combine, args, 2) }
    }

    /// Scripts of verbs, each on a core, with these parameters.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs.
    pub(crate) unsafe fn probe(&self, scripts: u32, args: &Memory) -> Result<(), AscendError> {
        let [kernel] = Kernel::load(self.device(), &self.kernels_path, ["ep_probe_kernel"])?;
        // SAFETY: as the caller promises.
        unsafe { self.stream.launch(kernel, scripts, args, self.longest()) }
    }

    /// INT8 rows of bf16 rows.
    ///
    /// # Safety
    /// As [`RankDevice`] says, and nothing of this rank runs.
    pub(crate) unsafe fn quantize(&self, args: &Quantize) -> Result<(), AscendError> {
        // SAFETY: as the caller promises.
        unsafe { self.launch(self.kernels.quantize, args, 2) }
    }
}
