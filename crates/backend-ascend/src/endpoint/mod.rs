//! [`AscendEndpoint`]: dispatch and combine of one rank, as kernels on its device.
//!
//! A call checks its input, launches its kernels, and ends when they have: its results are there then, and its failures are its own. While it
//! waits it looks at who is gone. It never blocks its thread, so ranks may share one.
//!
//! | call | kernels |
//! |---|---|
//! | dispatch | positions (of a membership the host finds them); counts; then as a cached dispatch |
//! | cached dispatch | dispatch |
//! | dispatch by expert | as a dispatch, then spread |
//! | combine | combine; of rows by expert behind fold |
//! | [`AscendEndpoint::quantize`] | quantize |
//! | halves of low latency | [`low_latency`] |
//!
//! Rows always go through rings: with direct placement, too, which is a hint. There is no memory that peers could pull from.

mod by_expert;
mod combine;
mod dispatch;
mod lent;
mod low_latency;
mod quantize;
mod recover;
mod replayed;
mod rows;

use std::fmt;
use std::future::poll_fn;
use std::mem::ManuallyDrop;
use std::task::Poll;

use ep_bootstrap::Peers;
use ep_core::engine::{Combine, Combined, Desk, Dispatch, Handle, Ready, Received, Routing, Scalar, Stats};
use ep_core::plan::Exchange;
use ep_core::topology::Reach;
use ep_core::{Endpoint, Error, Failure, Fault, Layout, Nanos, OutboxUse, Phase, Rank, RankSet, Rings};

use crate::driver::{AscendError, Event, Table};
use crate::rank::{OpEnd, RankDevice};
pub use lent::LowPlaces;
use low_latency::LowHalves;
pub use low_latency::{Combining, Dispatching, LowHandle};
use rows::Held;
pub use rows::{Array, Rows};

/// How much longer than the kernels the host waits before it takes the device for gone. A kernel ends by itself at twice the time allowed.
const GRACE: u64 = 5_000_000_000;

/// One rank of a communicator on an NPU.
pub struct AscendEndpoint {
    /// Not dropped where launches may still use its memory.
    device: ManuallyDrop<RankDevice>,
    desk: Desk,
    stats: Stats,
    peers: Peers,
    /// Whether something was enqueued that has not ended; the end of it, once it is recorded. And whether kernels are among it, which use the
    /// parameters of their launches.
    is_running: bool,
    running: Option<Event>,
    has_launched: bool,
    /// Memory that launches use which have not ended.
    in_use: Vec<Held>,
    /// Events that users' streams wait for, each with one behind the wait.
    led: Vec<[Event; 2]>,
    /// `[nodes]`: slots along the rail that operations of this generation filled and emptied, as far as they were counted.
    counted: Vec<[u64; 2]>,
    low: LowHalves,
    /// Ranks of which the kernels of this generation have been told that they are gone.
    noticed: RankSet,
}

impl fmt::Debug for AscendEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AscendEndpoint")
            .field("rank", &self.desk.rank())
            .field("npu", &self.device.device().ordinal())
            .field("next_op", &self.desk.next_op())
            .field("poisoned", &self.desk.poisoned())
            .finish_non_exhaustive()
    }
}

impl AscendEndpoint {
    pub(crate) fn new(device: RankDevice, me: Rank, peers: Peers) -> Self {
        let layout = device.layout();
        let nodes = layout.topology().nodes() as usize;
        let low = LowHalves::new(layout.topology().ranks(), &RankSet::new());
        Self {
            desk: Desk::new(layout.clone(), me),
            stats: Stats::new(layout),
            device: ManuallyDrop::new(device),
            peers,
            is_running: false,
            running: None,
            has_launched: false,
            in_use: Vec::new(),
            led: Vec::new(),
            low,
            counted: vec![[0; 2]; nodes],
            noticed: RankSet::new(),
        }
    }

    /// The layout of every rank's window.
    pub const fn layout(&self) -> &Layout {
        self.desk.layout()
    }

    pub(crate) fn device(&self) -> &RankDevice {
        &self.device
    }

    fn table(&self) -> &Table {
        self.device.device().table()
    }

    /// Keeps memory until what is launched next has ended.
    fn keep(&mut self, memory: impl IntoIterator<Item = Held>) {
        self.in_use.extend(memory);
    }

    /// Something is enqueued: what was recorded before does not say when that has ended.
    fn enqueued(&mut self) {
        (self.is_running, self.running) = (true, None);
    }

    /// The same of a kernel.
    fn launched(&mut self) {
        self.enqueued();
        self.has_launched = true;
    }

    /// Waits for kernels that a call has left which was dropped: their parameters lie where the next launches' go.
    async fn unused(&mut self) -> Result<(), Error> {
        if self.has_launched { self.ended().await } else { Ok(()) }
    }

    /// Tells the kernels who is gone.
    fn look_who_is_gone(&mut self) -> Result<(), Error> {
        let mut gone = self.peers.lost();
        gone.extend(&self.device.node.gone());
        for rank in gone.iter().filter(|rank| *rank != self.desk.rank()) {
            if !self.noticed.contains(rank) {
                self.device.notice_gone(rank)?;
                self.noticed.insert(rank);
            }
        }
        Ok(())
    }

    /// When what is launched now has ended by itself, and a little later.
    fn patience(&self) -> u64 {
        let allowed = self.layout().settings().deadline().0;
        let grace = allowed.saturating_mul(2).saturating_add(GRACE);
        (self.table().clock)().saturating_add(grace)
    }

    /// Whether all has ended that was launched.
    fn has_ended(&mut self) -> Result<bool, AscendError> {
        if !self.is_running {
            return Ok(true);
        }
        let running = match self.running.take() {
            Some(running) => running,
            None => self.device.record()?,
        };
        let has_come = running.has_come();
        self.running = Some(running);
        if has_come? {
            (self.is_running, self.running, self.has_launched) = (false, None, false);
            self.in_use.clear();
        }
        Ok(!self.is_running)
    }

    /// Cores of this rank did not come to the end of operation `op`: nobody's fault but the device's.
    fn not_come(&self, op: u64) -> Failure {
        let me = self.desk.rank();
        Failure { op, culprit: me, reporter: me, fault: Fault::PeerGone { peer: me, phase: Phase::Rows } }
    }

    /// Waits for what was launched, a little longer than its kernels do.
    async fn ended(&mut self) -> Result<(), Error> {
        let (clock, until) = (self.table().clock, self.patience());
        poll_fn(|context| match self.has_ended() {
            Ok(true) => Poll::Ready(Ok(())),
            Ok(false) if clock() < until => match self.look_who_is_gone() {
                Ok(()) => {
                    context.waker().wake_by_ref();
                    Poll::Pending
                }
                Err(error) => Poll::Ready(Err(error)),
            },
            Ok(false) => Poll::Ready(Err(Error::Failed(self.not_come(self.desk.next_op().saturating_sub(1))))),
            Err(error) => Poll::Ready(Err(error.into())),
        })
        .await
    }

    /// Waits for what was launched, and holds up the thread; whether it has ended.
    fn has_ended_in_time(&mut self) -> bool {
        let (clock, until) = (self.table().clock, self.patience());
        loop {
            match self.has_ended() {
                Ok(false) if clock() < until => std::thread::yield_now(),
                Ok(over) => return over,
                Err(_) => return false,
            }
        }
    }

    /// Refuses to go on where the operation's last launch did not come to its end, and reported nothing: a core did not come, or has crashed.
    fn check_done(&mut self, end: OpEnd) -> Result<(), Error> {
        let op = self.desk.next_op().saturating_sub(1);
        if self.device.is_done(op, end)? {
            return Ok(());
        }
        let failure = self.not_come(op);
        tracing::error!(%failure, "the kernels have ended and did not come to their end");
        self.desk.set_poisoned(Some(failure));
        Err(Error::Failed(failure))
    }

    /// Waits for what was launched in this operation, and for its failure, if it has one.
    async fn finish(&mut self) -> Result<(), Error> {
        self.look_who_is_gone()?;
        let ended = match self.ended().await {
            Ok(()) => self.device.failure(self.desk.rank())?.map_or(Ok(()), Err),
            Err(error) => Err(error),
        };
        if let Err(Error::Failed(failure)) = &ended {
            tracing::error!(%failure, "operation failed");
            self.desk.set_poisoned(Some(*failure));
        }
        ended
    }

    /// The same of the operation's last launch, which has to have come to its end.
    async fn finish_last(&mut self) -> Result<(), Error> {
        self.finish().await?;
        self.check_done(OpEnd::Last)
    }

    /// Counts the rows that an operation moved over each link, and the operation: within the server as the counts say, with what ranks passed
    /// on; along the rail as the rings' slots say, of which one opens each.
    fn count(&mut self, exchange: &Exchange, rings: &Rings, is_dispatch: bool) -> Result<(), Error> {
        let (row, me, topology) = (*self.layout().row(), self.desk.rank(), *self.topology());
        let bytes = if is_dispatch { row } else { row.results() }.wire_bytes();
        let passed = |gate, to| -> u64 {
            let sources = topology.all_nodes().map(|node| topology.rank_at(node, topology.local_of(gate)));
            sources.map(|source| u64::from(exchange.rows(source, to))).sum()
        };
        let slots = if topology.nodes() > 1 { self.device.far_slots()? } else { Vec::new() };
        for (rank, peer) in topology.all().zip(&mut self.stats.peers) {
            let (sent, received) = match topology.reach(me, rank) {
                Reach::Own => (exchange.rows(me, me).into(), exchange.rows(me, me).into()),
                Reach::Near if is_dispatch => (passed(me, rank), passed(rank, me)),
                Reach::Near => (passed(rank, me), passed(me, rank)),
                Reach::Far if topology.local_of(rank) == topology.local_of(me) && !self.desk.mask().contains(rank) => {
                    let node = topology.node_of(rank).index();
                    let [sent, received] = [0, 1].map(|side| slots[node][side] - self.counted[node][side]);
                    (sent - u64::from(rings.channels), received - u64::from(rings.channels))
                }
                Reach::Far => (0, 0),
            };
            peer.count(sent, received, bytes);
        }
        self.counted = slots;
        self.stats.operations += 1;
        Ok(())
    }
}

impl Drop for AscendEndpoint {
    fn drop(&mut self) {
        // A call that was dropped may have left launches: they end by their deadline, and use memory until then.
        let over = self.has_ended_in_time() && self.low_drain().is_ok() && self.has_ended_in_time();
        self.device.node.strike(self.desk.rank());
        self.peers.leave(self.desk.rank());
        if over {
            // SAFETY: it is dropped here and nowhere else, and not used after that.
            unsafe { ManuallyDrop::drop(&mut self.device) };
        } else {
            // A device that does not answer may still write there.
            std::mem::forget(std::mem::take(&mut self.in_use));
        }
        // A stream that still waits for an event has it for good.
        self.led.retain(|[_, passed]| !passed.has_come().unwrap_or(false));
        std::mem::forget(std::mem::take(&mut self.led));
    }
}

impl Endpoint for AscendEndpoint {
    type Buf = Rows;
    type Array<T: Scalar> = Array<T>;
    type Stream = ();
    type Event = Ready;

    fn desk(&self) -> &Desk {
        &self.desk
    }

    fn now(&self) -> Nanos {
        Nanos((self.table().clock)())
    }

    fn rows(&mut self, bytes: &[u8], rows: u32) -> Result<Rows, Error> {
        let row = self.desk.row_bytes_of(bytes.len(), rows);
        Rows::from_bytes(self.device.device(), bytes, rows, row)
    }

    fn bytes(&self, rows: &Rows) -> Result<Vec<u8>, Error> {
        rows.to_vec()
    }

    fn array<T: Scalar>(&mut self, values: &[T]) -> Result<Array<T>, Error> {
        Array::from_values(self.device.device(), values)
    }

    fn values<T: Scalar>(&self, array: &Array<T>) -> Result<Vec<T>, Error> {
        array.to_vec()
    }

    /// None: peers do not pull.
    fn output(&mut self, _handle: &Handle) -> Option<Rows> {
        None
    }

    fn store(&mut self, buf: &mut Rows, first: u32, bytes: &[u8]) -> Result<(), Error> {
        buf.store(first, bytes)
    }

    async fn dispatch_with(
        &mut self,
        x: &Rows,
        routing: &Routing<Array<i64>, Array<f32>, Array<u8>>,
        options: &Dispatch,
    ) -> Result<Received<Self>, Error> {
        self.dispatch_routing(x, routing, options).await
    }

    async fn redispatch_with(&mut self, x: &Rows, handle: &Handle, outbox: OutboxUse) -> Result<Received<Self>, Error> {
        outbox.check()?;
        self.dispatch_cached(x, handle).await
    }

    async fn combine(
        &mut self,
        y: &Rows,
        handle: &Handle,
        options: Combine<'_, Self>,
    ) -> Result<Combined<Self>, Error> {
        self.combine_rows(y, handle, &options).await
    }

    async fn recover(&mut self, mask: &RankSet) -> Result<(), Error> {
        self.recover_without(mask).await
    }

    /// Counted on the host; the time that was waited is not.
    fn stats(&self) -> Stats {
        Stats { ways: self.desk.ways, ..self.stats.clone() }
    }
}
