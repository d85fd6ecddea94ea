//! Python's view of one rank of a communicator. Everything is checked for meaning in Python (dtypes, shapes, devices) and for limits in
//! the protocol.

use std::any::Any;
use std::sync::{Mutex, MutexGuard, PoisonError};

use moexpress::engine::Dispatch;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::backend::{LowInto, RawRows, RawScales};
use crate::error::{closed, invalid, of};
use crate::guard::{Own, Patience, aside};
use crate::handle::{Handle, LowHandle, Pending};
use crate::join::{Options, Plan, Sizes, join};
use crate::meeting::Meeting;
use crate::rank::{Answer, Calls, Ended, GoOn, RawCombine, RawRouting};
use crate::results::{Dispatched, LowDispatched};

/// One rank of a communicator. All ranks make the same calls in the same order. Addresses are of contiguous tensors that live until the
/// call returns; None where there is none.
#[pyclass(frozen, module = "moexpress._native")]
pub(crate) struct Endpoint {
    rank: Own<Mutex<Option<Box<dyn Calls>>>>,
    me: u32,
    ranks: u32,
}

/// The caller's stream, which work of a call comes behind; and whether he waits for it himself: else that stream does. Nothing on CPUs.
type Order = (usize, bool);

impl Endpoint {
    /// Makes a call, without the interpreter's lock.
    fn call<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut dyn Calls, GoOn<'_>) -> Answer<T> + Send,
    ) -> PyResult<T> {
        let rank = self.rank.get(py)?;
        // Most calls wait for nothing.
        let mut patience = None;
        let ended = py.detach(|| {
            // Locked only here: who waits for it must not hold the interpreter's lock, which the holder asks for.
            let mut rank = lock(rank);
            rank.as_mut().map(|rank| work(&mut **rank, &mut || patience.get_or_insert_with(Patience::new).go_on()))
        });
        match ended {
            None => Err(closed(py, "endpoint")),
            Some(Ok(value)) => Ok(value),
            Some(Err(Ended::Failed(error))) => Err(of(py, &error)),
            Some(Err(Ended::Stopped)) => Err(patience.unwrap_or_else(Patience::new).into_error()),
        }
    }

    /// Makes a call whose work is ordered with the caller's.
    fn call_on<T: Send>(
        &self,
        py: Python<'_>,
        (stream, defers): Order,
        work: impl FnOnce(&mut dyn Calls, GoOn<'_>) -> Answer<T> + Send,
    ) -> PyResult<T> {
        self.call(py, |rank, go_on| {
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

    fn sent(&self, sent: Box<dyn Any + Send>) -> Pending {
        Pending { inner: Own::new(Mutex::new(Some(sent))) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn rows(address: usize, rows: u32, scales: Option<(usize, i64, i64)>) -> RawRows {
    let scales = scales.map(|(address, row, column)| RawScales { address, strides: [row, column] });
    RawRows { address, rows, scales }
}

#[pymethods]
impl Endpoint {
    /// Joins the other ranks of the meeting, all of which make one with the same arguments.
    #[new]
    #[pyo3(signature = (
        meeting, backend, experts, topk, hidden, max_tokens, element, placement, arena_bytes, low_latency, seconds, channels=None,
        slots=None, gpu=0, multiprocessors=0
    ))]
    #[allow(clippy::too_many_arguments)] // One home for them: the typed communicator above has names and defaults.
    fn new(
        py: Python<'_>,
        meeting: &Meeting,
        backend: String,
        experts: u32,
        topk: u32,
        hidden: u32,
        max_tokens: u32,
        element: &str,
        placement: &str,
        arena_bytes: Option<u64>,
        low_latency: bool,
        seconds: f64,
        channels: Option<u32>,
        slots: Option<u32>,
        gpu: usize,
        multiprocessors: u32,
    ) -> PyResult<Self> {
        let member = meeting.member(py)?;
        let (me, ranks) = (member.rank().0, member.world());
        let sizes = Sizes { experts, topk, hidden, max_tokens };
        let options = Options { element, placement, arena_bytes, low_latency, seconds, channels, slots };
        let plan = Plan::new(&sizes, ranks, &options).map_err(|error| of(py, &error))?;
        let joined = aside(py, move || join(&backend, plan, gpu, multiprocessors, member))?;
        let rank = joined.map_err(|error| of(py, &error))?;
        Ok(Self { rank: Own::new(Mutex::new(Some(rank))), me, ranks })
    }

    /// See `moexpress.Communicator.dispatch`. `scales`: address and strides.
    #[pyo3(signature = (
        stream, defers, x, tokens, scales, topk_idx, topk_weights, in_rank, tokens_per_expert, alignment, worst_rows, device_counts
    ))]
    #[allow(clippy::too_many_arguments)] // As above.
    fn dispatch(
        &self,
        py: Python<'_>,
        stream: usize,
        defers: bool,
        x: usize,
        tokens: u32,
        scales: Option<(usize, i64, i64)>,
        topk_idx: Option<usize>,
        topk_weights: Option<usize>,
        in_rank: usize,
        tokens_per_expert: Vec<u32>,
        alignment: u32,
        worst_rows: u32,
        device_counts: bool,
    ) -> PyResult<Dispatched> {
        let x = rows(x, tokens, scales);
        let routing = match topk_idx {
            Some(topk_idx) => RawRouting::TopK { topk_idx, topk_weights },
            None => RawRouting::Membership { in_rank, tokens_per_expert },
        };
        let options = Dispatch { expert_alignment: alignment, worst_rows, device_counts, ..Dispatch::default() };
        // SAFETY: this package's Python names contiguous tensors of these sizes, which it holds until this returns.
        let dispatched =
            self.call_on(py, (stream, defers), |rank, go_on| unsafe { rank.dispatch(&x, &routing, &options, go_on) })?;
        Ok(Dispatched::new(dispatched, self.me, self.ranks))
    }

    /// See `moexpress.Communicator.redispatch`.
    #[allow(clippy::too_many_arguments)] // As above.
    fn redispatch(
        &self,
        py: Python<'_>,
        stream: usize,
        defers: bool,
        x: usize,
        tokens: u32,
        scales: Option<(usize, i64, i64)>,
        handle: &Handle,
    ) -> PyResult<Dispatched> {
        let (x, handle) = (rows(x, tokens, scales), handle.inner.clone());
        // SAFETY: as in `dispatch`.
        let dispatched =
            self.call_on(py, (stream, defers), |rank, go_on| unsafe { rank.redispatch(&x, &handle, go_on) })?;
        Ok(Dispatched::new(dispatched, self.me, self.ranks))
    }

    /// See `moexpress.Communicator.combine`. `y` has at least the handle's rows; `bias` at most two addresses.
    #[allow(clippy::too_many_arguments)] // As above.
    fn combine<'py>(
        &self,
        py: Python<'py>,
        stream: usize,
        defers: bool,
        y: usize,
        handle: &Handle,
        topk_weights: Option<usize>,
        bias: Vec<usize>,
    ) -> PyResult<(Bound<'py, PyAny>, Option<Bound<'py, PyAny>>)> {
        let handle = handle.inner.clone();
        let bias = [bias.first().copied(), bias.get(1).copied()];
        let (y, with) = (rows(y, handle.rows(), None), RawCombine { topk_weights, bias });
        // SAFETY: as in `dispatch`.
        let combined =
            self.call_on(py, (stream, defers), |rank, go_on| unsafe { rank.combine(&y, &handle, &with, go_on) })?;
        let topk_weights = combined.topk_weights.map(|weights| weights.into_capsule(py)).transpose()?;
        Ok((combined.x.into_capsule(py)?, topk_weights))
    }

    /// The sending half of a low-latency dispatch; beside it where the receiving half will write.
    #[allow(clippy::too_many_arguments)] // As above.
    fn send_dispatch(
        &self,
        py: Python<'_>,
        stream: usize,
        defers: bool,
        x: usize,
        tokens: u32,
        topk_idx: usize,
        topk_weights: Option<usize>,
    ) -> PyResult<(Pending, LowDispatched)> {
        let x = rows(x, tokens, None);
        // SAFETY: as in `dispatch`.
        let (sent, room) = self.call_on(py, (stream, defers), |rank, go_on| unsafe {
            rank.send_dispatch(&x, topk_idx, topk_weights, go_on)
        })?;
        Ok((self.sent(sent), LowDispatched::new(room)))
    }

    /// The receiving half. `stats`: int32 `[local experts]`, to which counts are added.
    #[allow(clippy::too_many_arguments)] // As above.
    fn receive_dispatch(
        &self,
        py: Python<'_>,
        stream: usize,
        defers: bool,
        sent: &Pending,
        into: &LowDispatched,
        stats: Option<usize>,
        tokens: u32,
    ) -> PyResult<LowHandle> {
        let into = LowInto { stats, ..into.into.clone() };
        let inner = self.take(py, (stream, defers), sent, |rank, sent, go_on| {
            // SAFETY: as in `dispatch`; the room was made for this.
            unsafe { rank.receive_dispatch(sent, &into, go_on) }
        })?;
        Ok(LowHandle { inner, tokens })
    }

    /// Both halves of a low-latency dispatch. `stats` as of `receive_dispatch`.
    #[allow(clippy::too_many_arguments)] // As above.
    fn low_dispatch(
        &self,
        py: Python<'_>,
        stream: usize,
        defers: bool,
        x: usize,
        tokens: u32,
        topk_idx: usize,
        topk_weights: Option<usize>,
        stats: Option<usize>,
    ) -> PyResult<(LowHandle, LowDispatched)> {
        let x = rows(x, tokens, None);
        // SAFETY: as in `dispatch`.
        let (inner, room) = self.call_on(py, (stream, defers), |rank, go_on| unsafe {
            rank.low_dispatch(&x, topk_idx, topk_weights, stats, go_on)
        })?;
        Ok((LowHandle { inner, tokens }, LowDispatched::new(room)))
    }

    /// Both halves of a low-latency combine: writes bf16 `[tokens, hidden]`.
    #[allow(clippy::too_many_arguments)] // As above.
    fn low_combine(
        &self,
        py: Python<'_>,
        stream: usize,
        defers: bool,
        y: usize,
        handle: &LowHandle,
        topk_weights: Option<usize>,
        into: usize,
    ) -> PyResult<()> {
        // SAFETY: as in `dispatch`.
        self.call_on(py, (stream, defers), |rank, go_on| unsafe {
            rank.low_combine(y, &*handle.inner, topk_weights, into, go_on)
        })
    }

    /// The sending half of a low-latency combine.
    #[allow(clippy::too_many_arguments)] // As above.
    fn send_combine(
        &self,
        py: Python<'_>,
        stream: usize,
        defers: bool,
        y: usize,
        handle: &LowHandle,
        topk_weights: Option<usize>,
    ) -> PyResult<Pending> {
        // SAFETY: as in `dispatch`.
        let sent = self.call_on(py, (stream, defers), |rank, go_on| unsafe {
            rank.send_combine(y, &*handle.inner, topk_weights, go_on)
        })?;
        Ok(self.sent(sent))
    }

    /// The receiving half: writes bf16 `[tokens, hidden]`.
    fn receive_combine(
        &self,
        py: Python<'_>,
        stream: usize,
        defers: bool,
        sent: &Pending,
        into: usize,
    ) -> PyResult<()> {
        self.take(py, (stream, defers), sent, |rank, sent, go_on| {
            // SAFETY: as in `dispatch`.
            unsafe { rank.receive_combine(sent, into, go_on) }
        })
    }

    /// Goes on without `rank` in low latency.
    fn mask_rank(&self, py: Python<'_>, rank: u32) -> PyResult<()> {
        self.call(py, |endpoint, go_on| endpoint.mask_rank(rank, go_on))
    }

    /// Goes on without the ranks of `mask`, or after a failure; rejoins in low latency.
    fn recover(&self, py: Python<'_>, mask: Vec<u32>) -> PyResult<()> {
        self.call(py, |endpoint, go_on| endpoint.recover(&mask, go_on))
    }

    /// The ranks given up by recover.
    fn mask(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.call(py, |endpoint, _| Ok(endpoint.mask()))
    }

    /// The ranks left out of low latency.
    fn low_latency_mask(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.call(py, |endpoint, _| Ok(endpoint.low_mask()))
    }

    /// Per peer: rows and bytes there and back, nanoseconds waited; rows of each local expert; operations.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.call(py, |endpoint, _| Ok(endpoint.stats()))?;
        let all = PyDict::new(py);
        let of = |get: fn(&moexpress::engine::PeerStats) -> u64| stats.peers.iter().map(get).collect::<Vec<_>>();
        all.set_item("rows_sent", of(|peer| peer.rows_sent))?;
        all.set_item("rows_received", of(|peer| peer.rows_received))?;
        all.set_item("bytes_sent", of(|peer| peer.bytes_sent))?;
        all.set_item("bytes_received", of(|peer| peer.bytes_received))?;
        all.set_item("waited_ns", of(|peer| peer.waited.0))?;
        all.set_item("expert_rows", &stats.expert_rows)?;
        all.set_item("operations", stats.operations)?;
        Ok(all)
    }

    /// Bytes of this rank's window.
    fn window_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.call(py, |endpoint, _| Ok(endpoint.layout().window_bytes()))
    }

    /// The stream that calls enqueue to; 0 on CPUs.
    fn stream(&self, py: Python<'_>) -> PyResult<usize> {
        self.call(py, |endpoint, _| Ok(endpoint.stream()))
    }

    /// Frees windows and lanes. Tensors that lie in the arena stay readable.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let rank = self.rank.get(py)?;
        py.detach(|| drop(lock(rank).take()));
        Ok(())
    }
}

impl Endpoint {
    /// Receives what was sent. It stays to be received when that fails.
    fn take<T: Send>(
        &self,
        py: Python<'_>,
        order: Order,
        sent: &Pending,
        receive: impl FnOnce(&mut dyn Calls, &dyn Any, GoOn<'_>) -> Answer<T> + Send,
    ) -> PyResult<T> {
        let sent = sent.inner.get(py)?;
        let received = self.call_on(py, order, |rank, go_on| {
            let mut place = lock(sent);
            let Some(held) = place.as_deref() else { return Ok(None) };
            let value = receive(rank, held, go_on)?;
            *place = None;
            Ok(Some(value))
        })?;
        received.ok_or_else(|| invalid(py, "the operation has been received already"))
    }
}
