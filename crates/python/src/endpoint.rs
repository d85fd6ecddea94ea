//! Python's view of one rank of a communicator. Everything is checked for meaning in Python (dtypes, shapes, devices) and for limits in
//! the protocol.

use std::any::Any;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use moexpress::engine::low_latency::LowOrder;
use moexpress::{Rank, Topology};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{CombineOptions, DispatchOptions, Order, RawOrder, RawOutbox, Room, outbox_use};
use crate::backend::{RawBatch, RawRows};
use crate::calls::{Answer, Calls, Ended, GoOn, RawCombine, RawRouting};
use crate::early::{Early, RawReady};
use crate::error::{busy, closed, invalid, of};
use crate::guard::{Own, Patience, aside};
use crate::handle::{Handle, LowHandle, Pending};
use crate::join::{Options, Plan, Sizes, join};
use crate::meeting::{Meeting, within};
use crate::results::{Dispatched, LowDispatched};
use crate::turns::{Refused, Turns};

/// One rank of a communicator. All ranks make the same calls in the same order. Addresses are of contiguous tensors that live until the
/// call returns; None where there is none.
#[pyclass(frozen, module = "moexpress._native")]
pub(crate) struct Endpoint {
    rank: Own<Turns<Box<dyn Calls>>>,
    /// No other endpoint of this process has it.
    id: u64,
    me: Rank,
    topology: Topology,
}

/// Endpoints made by this process.
static MADE: AtomicU64 = AtomicU64::new(0);

impl Endpoint {
    /// Makes a call by this name, without the interpreter's lock.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        work: impl FnOnce(&mut dyn Calls, GoOn<'_>) -> Answer<T> + Send,
    ) -> PyResult<T> {
        let rank = self.rank.get(py)?;
        // Most calls wait for nothing.
        let mut patience = None;
        // Whoever waits for his turn must not hold the interpreter's lock, which the other call asks for.
        let ended = py.detach(|| {
            let mut go_on = || patience.get_or_insert_with(Patience::new).go_on();
            rank.take(name, &mut go_on, |rank, go_on| work(&mut **rank, go_on))
        });
        match ended {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(Ended::Failed(error))) => Err(of(py, &error)),
            Ok(Err(Ended::Stopped)) => Err(refusal(py, patience, Refused::Stopped)),
            Err(refused) => Err(refusal(py, patience, refused)),
        }
    }

    /// Makes a call whose work is ordered with the caller's.
    fn call_on<T: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        (stream, defers): Order,
        work: impl FnOnce(&mut dyn Calls, GoOn<'_>) -> Answer<T> + Send,
    ) -> PyResult<T> {
        self.call(py, name, |rank, go_on| {
            // SAFETY: this package's Python names the current stream.
            unsafe { rank.follow(stream) }?;
            let answer = work(rank, go_on);
            if defers {
                return answer;
            }
            // SAFETY: as above. After a failure, too: what was enqueued may still use the caller's memory.
            let led = unsafe { rank.lead(stream) };
            let value = answer?;
            led?;
            Ok(value)
        })
    }

    fn sent(&self, sent: Box<dyn Any + Send>, tokens: u32) -> Pending {
        Pending { inner: Own::new(Mutex::new(Some(sent))), tokens, endpoint: self.id }
    }

    /// Refuses what another endpoint made.
    fn check(&self, py: Python<'_>, what: &str, endpoint: u64) -> PyResult<()> {
        if endpoint == self.id {
            return Ok(());
        }
        Err(invalid(py, &format!("{what} is of another communicator, allowed: one of this communicator")))
    }
}

/// Why a call did not go on.
fn refusal(py: Python<'_>, patience: Option<Patience>, refused: Refused) -> PyErr {
    match (refused, patience) {
        (Refused::Within(under_way), _) => busy(py, under_way, None),
        (Refused::Busy(under_way, waited), _) => busy(py, under_way, Some(waited)),
        (Refused::Closed | Refused::Stopped, Some(patience)) if patience.has_caught() => patience.into_error(),
        // Only a signal handler and a close stop a call.
        (Refused::Closed | Refused::Stopped, _) => closed(py, "communicator"),
    }
}

#[pymethods]
impl Endpoint {
    /// Joins the other ranks of the meeting, all of which make one with the same arguments.
    #[new]
    fn new(py: Python<'_>, meeting: &Meeting, backend: String, sizes: Sizes, options: Options) -> PyResult<Self> {
        let member = meeting.member(py)?;
        let (me, ranks, seconds) = (member.rank(), member.world(), options.seconds);
        let plan = Plan::new(&backend, &sizes, ranks, &options).map_err(|error| of(py, &error))?;
        let topology = plan.topology();
        let joined = aside(py, move || join(&backend, plan, &options, member))?;
        let rank = joined.map_err(|error| of(py, &error))?;
        let rank = Own::new(Turns::new(rank, within(seconds)));
        Ok(Self { rank, id: MADE.fetch_add(1, Ordering::Relaxed), me, topology })
    }

    /// See `moexpress.Communicator.dispatch`.
    fn dispatch(
        &self,
        py: Python<'_>,
        order: Order,
        x: RawRows,
        routing: RawRouting,
        options: DispatchOptions,
    ) -> PyResult<Dispatched> {
        // SAFETY: this package's Python names contiguous tensors of these sizes, which it holds until this returns.
        let dispatched = self.call_on(py, "dispatch", order, |rank, go_on| unsafe {
            rank.dispatch(&x, &routing, &options.into(), go_on)
        })?;
        Ok(Dispatched::new(dispatched, self.me, self.topology))
    }

    /// See `moexpress.Communicator.redispatch`.
    fn redispatch(
        &self,
        py: Python<'_>,
        order: Order,
        x: RawRows,
        handle: &Handle,
        outbox: Option<RawOutbox>,
    ) -> PyResult<Dispatched> {
        let (handle, outbox) = (handle.inner.clone(), outbox_use(outbox));
        // SAFETY: as in `dispatch`.
        let dispatched = self
            .call_on(py, "redispatch", order, |rank, go_on| unsafe { rank.redispatch(&x, &handle, outbox, go_on) })?;
        Ok(Dispatched::new(dispatched, self.me, self.topology))
    }

    /// See `moexpress.Communicator.quantize`. Codes and scales as they lie on the machine.
    fn quantize<'py>(&self, py: Python<'py>, order: Order, x: RawRows) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: as in `dispatch`.
        let quantized = self.call_on(py, "quantize", order, |rank, go_on| unsafe { rank.quantize(&x, go_on) })?;
        quantized.into_capsule(py)
    }

    /// See `moexpress.Communicator.combine`. `y` has at least the handle's rows of results; `bias` at most two addresses.
    fn combine<'py>(
        &self,
        py: Python<'py>,
        order: Order,
        y: usize,
        handle: &Handle,
        options: CombineOptions,
    ) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
        let handle = handle.inner.clone();
        let y = RawRows { address: y, rows: handle.result_rows(), scales: None };
        let with = RawCombine::from(options);
        // SAFETY: as in `dispatch`.
        let combined =
            self.call_on(py, "combine", order, |rank, go_on| unsafe { rank.combine(&y, &handle, &with, go_on) })?;
        let topk_weights = combined.topk_weights.map(|weights| weights.into_capsule(py)).transpose()?;
        Ok((combined.x.into_capsule(py)?, topk_weights))
    }

    /// Counters of early consumers.
    fn early(&self, py: Python<'_>, rows: u32, multiprocessors: Option<u32>) -> PyResult<Early> {
        let made = self.call(py, "early", |rank, _| Ok(rank.early(rows, multiprocessors)?))?;
        Ok(Early::new(made, self.id))
    }

    /// The sending half of a low-latency dispatch; beside it where the receiving half will write.
    fn send_dispatch(
        &self,
        py: Python<'_>,
        order: Order,
        batch: RawBatch,
        early: Option<&Early>,
        room: Option<Room>,
    ) -> PyResult<(Pending, LowDispatched)> {
        early.map_or(Ok(()), |early| self.check(py, "early", early.endpoint))?;
        let early = early.map(|early| &*early.inner);
        // SAFETY: as in `dispatch`.
        let (sent, room) = self.call_on(py, "send_dispatch", order, |rank, go_on| unsafe {
            rank.send_dispatch(&batch, early, room.map(Room::into), go_on)
        })?;
        Ok((self.sent(sent, batch.x.rows), LowDispatched::new(room)))
    }

    /// Bytes of the blocks that `room` of a low-latency dispatch has, whose rows lie so.
    fn low_sizes(&self, py: Python<'_>, lies: Option<RawOrder>) -> PyResult<Vec<usize>> {
        let order = lies.map_or(LowOrder::ByExpert, LowOrder::from);
        self.call(py, "low_sizes", |rank, _| Ok(rank.low_sizes(order)?))
    }

    /// The receiving half. `stats`: int32 `[local experts]`, to which counts are added.
    fn receive_dispatch(
        &self,
        py: Python<'_>,
        order: Order,
        sent: &Pending,
        stats: Option<usize>,
    ) -> PyResult<LowHandle> {
        let inner = self.take(py, "receive_dispatch", order, sent, |rank, sent, go_on| {
            // SAFETY: as in `dispatch`.
            unsafe { rank.receive_dispatch(sent, stats, go_on) }
        })?;
        Ok(LowHandle::new(inner, sent.tokens, self.id))
    }

    /// Both halves of a low-latency dispatch; `along` a handle, by whose choices it is sent. `stats` as of `receive_dispatch`.
    fn low_dispatch(
        &self,
        py: Python<'_>,
        order: Order,
        batch: RawBatch,
        along: Option<&LowHandle>,
        stats: Option<usize>,
        room: Option<Room>,
    ) -> PyResult<(LowHandle, LowDispatched)> {
        along.map_or(Ok(()), |handle| self.check(py, "handle", handle.endpoint))?;
        let along = along.map(|handle| &*handle.inner as &(dyn Any + Send + Sync));
        // SAFETY: as in `dispatch`.
        let (inner, room) = self.call_on(py, "low_dispatch", order, |rank, go_on| unsafe {
            rank.low_dispatch(&batch, along.map(|handle| handle as &dyn Any), stats, room.map(Room::into), go_on)
        })?;
        Ok((LowHandle::new(inner, batch.x.rows, self.id), LowDispatched::new(room)))
    }

    /// The choices of the batch that a low-latency handle is of, as a DLPack capsule.
    fn low_choices<'py>(&self, py: Python<'py>, handle: &LowHandle) -> PyResult<Bound<'py, PyAny>> {
        self.check(py, "handle", handle.endpoint)?;
        let choices = self.call(py, "low_choices", |rank, _| rank.low_choices(&*handle.inner))?;
        choices.into_capsule(py)
    }

    /// Both halves of a low-latency combine: writes bf16 `[tokens, hidden]`.
    fn low_combine(
        &self,
        py: Python<'_>,
        order: Order,
        y: usize,
        handle: &LowHandle,
        topk_weights: Option<usize>,
        into: usize,
    ) -> PyResult<()> {
        self.check(py, "handle", handle.endpoint)?;
        // SAFETY: as in `dispatch`.
        self.call_on(py, "low_combine", order, |rank, go_on| unsafe {
            rank.low_combine(y, &*handle.inner, topk_weights, into, go_on)
        })
    }

    /// The sending half of a low-latency combine.
    fn send_combine(
        &self,
        py: Python<'_>,
        order: Order,
        y: usize,
        handle: &LowHandle,
        topk_weights: Option<usize>,
        ready: Option<RawReady>,
    ) -> PyResult<Pending> {
        self.check(py, "handle", handle.endpoint)?;
        // SAFETY: as in `dispatch`.
        let sent = self.call_on(py, "send_combine", order, |rank, go_on| unsafe {
            rank.send_combine(y, &*handle.inner, topk_weights, ready.as_ref(), go_on)
        })?;
        Ok(self.sent(sent, handle.tokens))
    }

    /// The receiving half: writes bf16 `[tokens, hidden]`.
    fn receive_combine(&self, py: Python<'_>, order: Order, sent: &Pending, into: usize) -> PyResult<()> {
        self.take(py, "receive_combine", order, sent, |rank, sent, go_on| {
            // SAFETY: as in `dispatch`.
            unsafe { rank.receive_combine(sent, into, go_on) }
        })
    }

    /// Goes on without `rank` in low latency.
    fn mask_rank(&self, py: Python<'_>, rank: u32) -> PyResult<()> {
        self.call(py, "mask_rank", |endpoint, go_on| endpoint.mask_rank(rank, go_on))
    }

    /// Goes on without the ranks of `mask`, or after a failure; rejoins in low latency. Behind what the caller's stream holds: replays of graphs, whose
    /// kernels must not run into the next generation.
    fn recover(&self, py: Python<'_>, order: Order, mask: Vec<u32>) -> PyResult<()> {
        self.call_on(py, "recover", order, |endpoint, go_on| endpoint.recover(&mask, go_on))
    }

    /// The ranks given up by recover.
    fn mask(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.call(py, "mask", |endpoint, _| Ok(endpoint.mask()))
    }

    /// The ranks left out of low latency.
    fn low_latency_mask(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.call(py, "low_latency_mask", |endpoint, _| Ok(endpoint.low_mask()))
    }

    /// Per peer: rows and bytes there and back, nanoseconds waited; rows of each local expert; operations.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, arena) = self.call(py, "stats", |endpoint, _| Ok((endpoint.stats(), endpoint.arena_bytes())))?;
        let all = PyDict::new(py);
        let of = |get: fn(&moexpress::engine::PeerStats) -> u64| stats.peers.iter().map(get).collect::<Vec<_>>();
        all.set_item("rows_sent", of(|peer| peer.rows_sent))?;
        all.set_item("rows_received", of(|peer| peer.rows_received))?;
        all.set_item("bytes_sent", of(|peer| peer.bytes_sent))?;
        all.set_item("bytes_received", of(|peer| peer.bytes_received))?;
        all.set_item("waited_ns", of(|peer| peer.waited.0))?;
        all.set_item("expert_rows", &stats.expert_rows)?;
        all.set_item("operations", stats.operations)?;
        all.set_item("rows_placed", stats.ways.placed)?;
        all.set_item("rows_through_rings", stats.ways.ringed)?;
        all.set_item("results_pulled", stats.ways.pulled)?;
        all.set_item("results_through_rings", stats.ways.returned)?;
        all.set_item("arena_bytes", arena)?;
        all.set_item("outbox_piece", stats.ways.outbox_piece)?;
        all.set_item("outbox_slots", stats.ways.outbox_slots)?;
        Ok(all)
    }

    /// Rows of dispatches, and results of combines, that went through rings so far.
    fn through_rings(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let ways = self.call(py, "through_rings", |endpoint, _| Ok(endpoint.ways()))?;
        Ok((ways.ringed, ways.returned))
    }

    /// Whether the arena has as much as it may, and had no room for something not long ago.
    fn is_arena_full(&self, py: Python<'_>) -> PyResult<bool> {
        self.call(py, "is_arena_full", |endpoint, _| Ok(endpoint.is_arena_full()))
    }

    /// Slots of an outbox for each reader; 0 where there are none.
    fn outbox_slots(&self, py: Python<'_>) -> PyResult<u32> {
        self.call(py, "outbox_slots", |endpoint, _| {
            let settings = *endpoint.layout().settings();
            let own = settings.outboxes().unwrap_or(settings.rings());
            Ok(if settings.has_outboxes() { own.near.slots } else { 0 })
        })
    }

    /// Bytes of memory of this rank's window.
    fn window_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, "window_bytes", |endpoint, _| {
            let layout = endpoint.layout();
            Ok(layout.window_bytes() - layout.arena().len + endpoint.arena_bytes())
        })
    }

    /// The stream that calls enqueue to; 0 on CPUs.
    fn stream(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, "stream", |endpoint, _| Ok(endpoint.stream()))
    }

    /// See `moexpress.Communicator.trim`.
    fn trim(&self, py: Python<'_>, order: Order) -> PyResult<()> {
        self.call_on(py, "trim", order, |rank, _| Ok(rank.trim()?))
    }

    /// `stream` lives as long as the process: memory that outlives this endpoint may go when what it holds then has ended.
    fn lasts(&self, py: Python<'_>, stream: usize) -> PyResult<()> {
        self.call(py, "lasts", |rank, _| {
            // SAFETY: this package's Python names streams that torch never destroys.
            unsafe { rank.lasts(stream) };
            Ok(())
        })
    }

    /// Ends the call under way, which raises `Closed`, and frees windows and lanes; within that call, once it has ended. Tensors that lie
    /// in the arena stay readable. `stream`: one that may read results that are gone, beside those that calls were made on, which are waited for; without
    /// one their memory goes later.
    #[pyo3(signature = (stream = None))]
    fn close(&self, py: Python<'_>, stream: Option<usize>) -> PyResult<()> {
        let rank = self.rank.get(py)?;
        let mut patience = None;
        let mut go_on = || patience.get_or_insert_with(Patience::new).go_on();
        let last = |rank: &mut Box<dyn Calls>| {
            // SAFETY: the caller's current stream.
            let waited = stream.map_or(Ok(()), |stream| unsafe { rank.ends_behind(stream) });
            // Nothing more can be done about it, and the end goes on.
            if let Err(error) = waited {
                tracing::warn!(%error, "what may read results of this communicator is not known: its memory may stay");
            }
        };
        let closed = py.detach(|| rank.close(&mut go_on, last));
        closed.map_err(|refused| refusal(py, patience, refused))
    }
}

impl Drop for Endpoint {
    /// What is freed may wait for peers, with whom other threads of this process may have to speak first: not with the interpreter's lock.
    fn drop(&mut self) {
        let Some(rank) = self.rank.here() else { return };
        // Nobody else has it: no call is under way. Without an interpreter, or while it collects garbage, it is dropped behind this.
        let _ = Python::try_attach(|py| py.detach(|| rank.close(&mut || true, |_| ())));
    }
}

impl Endpoint {
    /// Receives what was sent. It stays to be received when that fails.
    fn take<T: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        order: Order,
        sent: &Pending,
        receive: impl FnOnce(&mut dyn Calls, &dyn Any, GoOn<'_>) -> Answer<T> + Send,
    ) -> PyResult<T> {
        self.check(py, "operation", sent.endpoint)?;
        let sent = sent.inner.get(py)?;
        let received = self.call_on(py, name, order, |rank, go_on| {
            // Nobody else has it: calls of its endpoint are made one at a time.
            let Ok(mut place) = sent.try_lock() else { return Ok(None) };
            let Some(held) = place.as_deref() else { return Ok(None) };
            let value = receive(rank, held, go_on)?;
            *place = None;
            Ok(Some(value))
        })?;
        received.ok_or_else(|| invalid(py, "the operation has been received, allowed: one that has not"))
    }
}
