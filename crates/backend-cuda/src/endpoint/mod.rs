//! [`CudaEndpoint`]: throughput-mode dispatch and combine of one rank, as kernels on its stream.
//!
//! A call checks its input, enqueues its kernels and ends; everything it names lies in device memory and is used in the order of
//! the endpoint's stream ([`CudaEndpoint::stream`]). The host waits for one thing only: the counts of a dispatch that is not
//! cached, which the counts kernel writes to host memory; with [`ep_core::engine::Dispatch::device_counts`] not even for them.
//!
//! Calls may be captured into CUDA graphs; [`graphs`] says how.
//!
//! | call | kernels |
//! |---|---|
//! | dispatch | positions, counts; then as a cached dispatch; unpack where rows were placed; blank where spare rows are to be zeros |
//! | cached dispatch | dispatch (where rows may be placed), dispatch ring; blank as before |
//! | dispatch by expert | as a dispatch, but slots, which unpacks, too, and spread in place of unpack; cached as a cached dispatch, then spread. Rows that are placed come in several launches of dispatch, with what follows it beside them |
//! | combine | fold where rows are by expert, before or beside the combine; offer where weights travel; combine, which copies rows that lie elsewhere; combine ring |
//! | either half of low latency, or both | low dispatch, or low combine |

mod ahead;
mod by_expert;
#[cfg(feature = "workshop")]
mod checks;
mod combine;
mod dispatch;
mod expected;
pub(crate) mod foreign;
pub mod graphs;
mod growing;
mod landing;
mod low_latency;
pub(crate) mod poll;
mod recover;
mod replayed;
mod report;
mod rows;
mod told;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ep_bootstrap::Peers;
use ep_core::engine::{
    Ages, Combine, Combined, Desk, Dispatch, Handle, Lease, Received, Routing, Scalar, Scales, Stats,
};
use ep_core::layout::{KernelWindow, Kind};
use ep_core::port::Offset;
use ep_core::{Endpoint, Error, Failure, Fault, Layout, Nanos, OutboxUse, Rank, RankSet, Rings};

use zerocopy::IntoBytes as _;

use crate::checks::TestDevice;
use crate::driver::{self, Capture, Scratch};
use crate::far::Far;
use crate::node::Keeper;
use crate::rank::{Call, RankDevice};
#[cfg(feature = "workshop")]
pub use checks::{Consumed, CrashFlag};
pub use foreign::{LowPlaces, LowPlacesBySource, LowPlacesPacked, LowScales};
pub use low_latency::{Combining, Dispatching, Early, LowHandle, Ready, Signals};
pub use rows::{Apart, Array, DeviceWindow, Owned, Rows, ScaleStrides};

/// How much longer than the kernels the host waits before it takes the GPU for gone.
const GRACE: Duration = Duration::from_secs(5);
/// Time between two looks at who is gone, of a call that waits.
const LOOK: Duration = Duration::from_millis(1);

/// When enqueued work of a stream is complete. Of a call that was captured it is a place in the graph, which never comes by itself:
/// other streams of the same capture may wait for it.
#[derive(Clone, Debug)]
pub struct Event(Arc<driver::Event>);

impl Event {
    /// Makes what is enqueued to `stream` from now on wait for it: a stream by the driver's handle; 0 is the default stream.
    ///
    /// # Errors
    /// Where the driver refuses.
    ///
    /// # Safety
    /// `stream` lives.
    pub unsafe fn precede(&self, stream: usize) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        Ok(unsafe { self.0.precede(stream) }?)
    }
}

impl ep_core::engine::Event for Event {
    fn wait(&self, timeout: Nanos) -> bool {
        self.0.wait(Duration::from_nanos(timeout.0)).unwrap_or(false)
    }
}

/// One rank of a communicator on a GPU.
pub struct CudaEndpoint {
    /// Shared with the graphs that its calls were captured into.
    device: Arc<RankDevice>,
    window: DeviceWindow,
    /// Its next operation is that which the host knows of: graphs count on the device, and the host hears of it with the next counts.
    desk: Desk,
    /// Exchanges of counts that the host has waited for.
    tickets: u64,
    /// What their batches let expect of later ones.
    expected: expected::Expected,
    /// Whether the granted block was taken before counts of which the host has not heard: then peers may not have been told of it.
    granted_ahead: bool,
    /// Blocks of operations that are not known to have ended well.
    told: told::Told,
    /// By which of its calls it knows what may go of the arena, and the mark before it followed a stream last.
    ages: Arc<Ages>,
    mark: u64,
    /// Where the arena grows.
    keeper: Option<Keeper>,
    /// Bytes of the last dispatch's rows and as many results.
    last_bytes: u64,
    /// As [`Self::read_beside`] says.
    read_beside: bool,
    peers: Peers,
    wait_for_kernels: bool,
    low: low_latency::Low,
    started: Instant,
    /// Ranks of which the kernels of this generation have been told that they are gone.
    noticed: RankSet,
    /// When to look next at who is gone.
    look_at: Instant,
}

impl fmt::Debug for CudaEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEndpoint")
            .field("rank", &self.desk.rank())
            .field("gpu", &self.device.stream.device().ordinal())
            .field("next_op", &self.desk.next_op())
            .field("poisoned", &self.desk.poisoned())
            .finish_non_exhaustive()
    }
}

impl CudaEndpoint {
    pub(crate) fn new(device: RankDevice, me: Rank, peers: Peers, wait_for_kernels: bool) -> Self {
        let layout = &device.layout;
        device.node.readers().add(&device.stream);
        let window = DeviceWindow {
            stream: Arc::clone(&device.stream),
            node: Arc::clone(&device.node),
            within: Offset(0).span(layout.window_bytes()),
            me,
            leased: Arc::default(),
        };
        Self {
            desk: Desk::new(layout.clone(), me),
            window,
            tickets: 0,
            expected: expected::Expected::default(),
            granted_ahead: false,
            told: told::Told::default(),
            ages: Arc::default(),
            mark: 0,
            keeper: None,
            last_bytes: 0,
            read_beside: false,
            peers,
            wait_for_kernels,
            low: low_latency::Low::default(),
            started: Instant::now(),
            noticed: RankSet::new(),
            look_at: Instant::now(),
            device: Arc::new(device),
        }
    }

    /// Whether its kernels were [compiled for its shape alone](crate::Builder::specialise).
    pub fn is_specialised(&self) -> bool {
        self.device.kernels.is_specialised
    }

    /// Whether rows between nodes travel by copies that the driver makes: over the loop, and where they are staged. Whatever waits inside the driver
    /// for kernels here, such as a copy of pageable memory or the first launch of a kernel that is loaded lazily, holds up such copies, which the kernels
    /// wait for: so nobody may ask the driver for that before [calls have waited](Self::wait_for_kernels) for their kernels.
    pub fn copies_between_nodes(&self) -> bool {
        self.far().is_some_and(|far| far.lanes().is_copied())
    }

    /// As [`Builder::wait_for_kernels`](crate::Builder::wait_for_kernels), from the next call on.
    pub const fn wait_for_kernels(&mut self, on: bool) {
        self.wait_for_kernels = on;
    }

    /// Says that streams which calls [follow](Self::follow) may read results after these were given back. Then the window's memory outlives the endpoint
    /// until those streams [have done so](Self::ends_behind). Off at first.
    pub const fn read_beside(&mut self, on: bool) {
        self.read_beside = on;
    }

    /// Waits for the kernels before an event.
    async fn ended(&mut self, event: &Event) -> Result<(), Error> {
        let mut pause = driver::Pause::default();
        self.until(|_| {
            let has_come = event.0.has_come()?;
            if !has_come {
                pause.pass();
            }
            Ok(has_come.then_some(()))
        })
        .await
    }

    /// Its lanes to other nodes.
    pub(crate) fn far(&self) -> Option<&Far> {
        self.device.far.as_ref()
    }

    #[cfg(feature = "workshop")]
    pub(crate) fn device(&self) -> &RankDevice {
        &self.device
    }

    /// The stream of its work. What the caller enqueues there is ordered with it; other streams wait for the events of results,
    /// and this one for theirs.
    pub fn stream(&self) -> &Arc<driver::Stream> {
        &self.device.stream
    }

    /// The layout of every rank's window.
    pub fn layout(&self) -> &Layout {
        &self.device.layout
    }

    /// Refuses to start while poisoned, and tells of a failure that kernels have reported since.
    fn ready(&mut self) -> Result<(), Error> {
        self.desk.ready()?;
        match self.device.reported(self.desk.rank()) {
            Some(error) => Err(self.told_late(error)),
            None => Ok(()),
        }
    }

    /// Takes note of what kernels of earlier calls have reported. Bad choices, which a graph or a call without a wait brought, are a failure then: the others
    /// wait for what does not come.
    fn told_late(&mut self, error: Error) -> Error {
        self.suspect_told();
        self.desk.set_poisoned(Some(self.desk.abandoned(self.last_op())));
        self.fail(error)
    }

    /// A failure that kernels have reported and no call has told: what was read may be nothing.
    fn untold(&self) -> Option<Error> {
        let reported = self.device.reported(self.desk.rank()).or_else(|| self.low_failure());
        reported.filter(|_| self.desk.poisoned().is_none())
    }

    /// [`Self::ready`], and the capture that this call goes to.
    fn begin(&mut self) -> Result<Option<Capture>, Error> {
        self.ready()?;
        Ok(self.stream().capture()?)
    }

    /// Takes note of a failure.
    fn fail(&mut self, error: Error) -> Error {
        if let Error::Failed(failure) = &error {
            tracing::error!(%failure, "operation failed");
            self.desk.set_poisoned(Some(*failure));
        }
        error
    }

    /// Starts the next operation along the numbers at `plan`. `alike`: what all ranks say alike beside the rings; of a replayed dispatch kernels know it by
    /// themselves. One that is captured does not run now: it has no number, and nothing is lost where its call ends early.
    fn start(&mut self, kind: Kind, (rings, alike): (&Rings, u64), plan: u64, captured: bool) -> Call {
        if !captured {
            self.desk.start();
        }
        Call { kind, settings: self.layout().hash(rings).wrapping_add(alike), plan, is_aside: false }
    }

    /// Ends an operation whose kernels are enqueued.
    async fn end(&mut self, captured: bool) -> Result<Event, Error> {
        let event = Event(Arc::new(self.device.stream.record(false)?));
        if captured {
            return Ok(event);
        }
        if self.wait_for_kernels {
            self.ended(&event).await?;
            if let Some(error) = self.device.reported(self.desk.rank()) {
                return Err(self.fail(error));
            }
        }
        self.desk.set_poisoned(None);
        Ok(event)
    }

    /// Tells the kernels who is gone, from time to time.
    fn look_who_is_gone(&mut self) -> Result<(), Error> {
        let now = Instant::now();
        if now < self.look_at {
            return Ok(());
        }
        self.look_at = now + LOOK;
        self.settle(now);
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

    /// Waits for something of the device, a little longer than its kernels do.
    async fn until<T>(&mut self, mut ask: impl FnMut(&RankDevice) -> Result<Option<T>, Error>) -> Result<T, Error> {
        let (began, op, me) = (Instant::now(), self.last_op(), self.desk.rank());
        let allowed = Duration::from_nanos(self.layout().settings().deadline().0).saturating_add(GRACE);
        let answer = poll::until(|| {
            // A rank that has crashed, in a test, does nothing any more: this future is dropped.
            if self.device.test.as_ref().is_some_and(TestDevice::has_crashed) {
                return None;
            }
            match self.look_who_is_gone().and_then(|()| ask(&self.device)) {
                Ok(Some(value)) => Some(Ok(value)),
                Err(error) => Some(Err(error)),
                Ok(None) if began.elapsed() < allowed => None,
                Ok(None) => {
                    let fault = Fault::PeerGone { peer: me, phase: ep_core::Phase::Rows };
                    Some(Err(Error::Failed(Failure { op, culprit: me, reporter: me, fault })))
                }
            }
        });
        match answer.await {
            Ok(value) => Ok(value),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// The number of the operation just started.
    const fn last_op(&self) -> u64 {
        self.desk.next_op().saturating_sub(1)
    }

    /// Refuses what is no bf16 rows of this endpoint's GPU, or too few.
    fn check_results(&self, what: &str, rows: &Rows, expected: u32) -> Result<(), Error> {
        self.desk.check_results(what, rows.extent(), expected)?;
        self.check_home(what, rows)
    }

    /// Refuses rows that lie elsewhere.
    fn check_home(&self, what: &str, rows: &Rows) -> Result<(), Error> {
        rows.check_home(what, self.desk.arena(), self.stream())
    }

    fn address(&self, rows: &Rows) -> u64 {
        rows.address(self.desk.arena(), &self.window)
    }

    /// Where the scales of dispatched rows lie, and how; address 0 where the shape's rows have none.
    fn scales(&self, rows: &Rows) -> (u64, ScaleStrides) {
        rows.scales(self.layout().row(), self.desk.arena(), &self.window)
    }

    /// What the device has counted, both modes together; nothing where it cannot be asked.
    fn counted(&self) -> Stats {
        let mut stats = Stats { ways: self.desk.ways, ..Stats::new(self.layout()) };
        let (row, window) = (*self.layout().row(), KernelWindow::from(self.layout()));
        let plain = (row.wire_bytes(), row.results().wire_bytes());
        let low = (row.header_bytes() + row.payload_bytes(), window.low_result_header_bytes + window.result_bytes);
        let tallies = [(self.device.tally().ok(), plain), (self.device.low_tally().ok().flatten(), low)];
        for (tally, bytes) in tallies.into_iter().filter_map(|(tally, bytes)| Some((tally?, bytes))) {
            for (rows, bytes) in [(&tally.dispatched, bytes.0), (&tally.combined, bytes.1)] {
                for (peer, &(sent, received)) in stats.peers.iter_mut().zip(rows) {
                    peer.count(sent, received, bytes);
                }
            }
            for (sum, rows) in stats.expert_rows.iter_mut().zip(&tally.expert_rows) {
                *sum += rows;
            }
            stats.operations += tally.operations;
        }
        stats
    }
}

impl Drop for CudaEndpoint {
    fn drop(&mut self) {
        // Nothing comes or goes any more. Its thread has the device, too, whose count is asked for below.
        self.keeper = None;
        // Its kernels end first: what they publish counts.
        let _ = self.device.stream.synchronize();
        if self.window.is_leased() || self.read_beside {
            self.device.node.outlive();
        }
        // What it published is with the others before they learn that it is gone.
        self.far().inspect(|far| far.settle());
        self.device.node.strike(self.desk.rank());
        self.peers.leave(self.desk.rank());
        // Otherwise the device parts, which is dropped now. A graph that keeps it may be dropped at any time, and by any thread.
        if Arc::strong_count(&self.device) > 1 {
            self.device.node.part(true);
        }
    }
}

impl Endpoint for CudaEndpoint {
    type Buf = Rows;
    type Array<T: Scalar> = Array<T>;
    type Stream = driver::Stream;
    type Event = Event;

    fn desk(&self) -> &Desk {
        &self.desk
    }

    fn now(&self) -> Nanos {
        Nanos(self.started.elapsed().as_nanos() as u64)
    }

    fn rows(&mut self, bytes: &[u8], rows: u32) -> Result<Rows, Error> {
        let row = self.desk.row_bytes_of(bytes.len(), rows);
        Rows::from_bytes(&self.device.stream, bytes, rows, row)
    }

    fn rows_apart(&mut self, codes: &[u8], scales: &Scales<'_>, rows: u32) -> Result<Rows, Error> {
        scales.check(self.shape(), codes, rows)?;
        if !self.shape().hidden().is_multiple_of(16) {
            // Codes would not begin where kernels can load them from.
            return self.rows(&scales.joined(&self.shape().clone(), codes, rows)?, rows);
        }
        let stream = &self.device.stream;
        let words = Scratch::from_bytes(stream, scales.words.as_bytes())?;
        let codes = Scratch::from_bytes(stream, codes)?;
        let strides = ScaleStrides { row: 4 * scales.row as u64, word: 4 * scales.word as u64 };
        Ok(Rows::Apart(Apart::new(self.layout().row(), Arc::new(codes), Arc::new(words), strides, rows)))
    }

    fn bytes(&self, rows: &Rows) -> Result<Vec<u8>, Error> {
        let bytes = rows.to_vec(self.desk.arena(), &self.window)?;
        self.untold().map_or(Ok(bytes), Err)
    }

    fn array<T: Scalar>(&mut self, values: &[T]) -> Result<Array<T>, Error> {
        Array::from_values(&self.device.stream, values)
    }

    fn values<T: Scalar>(&self, array: &Array<T>) -> Result<Vec<T>, Error> {
        let values = array.to_vec()?;
        self.untold().map_or(Ok(values), Err)
    }

    fn output(&mut self, handle: &Handle) -> Option<Rows> {
        self.desk.check_handle(handle).ok()?;
        self.suspect_if_failed();
        let block = self.desk.arena().take(&self.layout().row().results(), handle.rows())?;
        Some(Rows::Leased(Lease::new(self.desk.arena(), block, self.window.of(&block))))
    }

    fn store(&mut self, buf: &mut Rows, first: u32, bytes: &[u8]) -> Result<(), Error> {
        if buf.lease().is_some() && !self.stream().is_capturing() {
            // A combine that has offered the rows may fail yet; what follows waits for the stream in any case.
            self.stream().synchronize()?;
            self.suspect_if_failed();
        }
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
        self.dispatch_cached(x, handle, outbox).await
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

    /// Counted on the device, replays of graphs among them; what is enqueued is waited for. All zero while the stream is captured.
    fn stats(&self) -> Stats {
        self.counted()
    }
}
