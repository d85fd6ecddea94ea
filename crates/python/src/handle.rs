//! What calls leave behind for later ones.

use std::any::Any;
use std::sync::{Arc, Mutex};

use moexpress::engine::low_latency::LowOrder;
use moexpress::plan::{Exchange, Plan, tokens_by_node};
use moexpress::{Rank, Topology, engine};
use pyo3::prelude::*;

use crate::arguments::raw_order;
use crate::backend::LowTold;
use crate::calls::AnyLow;
use crate::error::{invalid, of};
use crate::guard::Own;
use crate::rail::{self, Passed};

/// Replays the routing of a dispatch: for combine, and for cached dispatch.
#[pyclass(frozen, module = "moexpress._native")]
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    pub(crate) inner: engine::Handle,
    /// The endpoint's rank, and where all of them are.
    pub(crate) me: Rank,
    pub(crate) topology: Topology,
}

impl Handle {
    /// Of GPUs it is fetched, which waits for the dispatch: without the interpreter's lock.
    fn exchange(&self, py: Python<'_>) -> PyResult<Arc<Exchange>> {
        let exchange = py.detach(|| self.inner.exchange()).map_err(|error| of(py, &error))?;
        // Counts come before the dispatch finds that it has no room for so many: tensors of its handle have none, either.
        let (came, room) = (exchange.received(self.me), self.inner.rows());
        if came > room {
            let message =
                format!("rows of a handle is {came}, allowed: at most {room}, the bound that its dispatch was given");
            return Err(invalid(py, &message));
        }
        Ok(exchange)
    }

    /// As [`Handle::exchange`].
    fn plan(&self, py: Python<'_>) -> PyResult<Arc<Plan>> {
        py.detach(|| self.inner.plan()).map_err(|error| of(py, &error))
    }

    fn all(&self) -> impl Iterator<Item = Rank> + use<> {
        self.topology.all()
    }

    const fn ranks(&self) -> u32 {
        self.topology.ranks()
    }

    /// What passed through this rank on its way to ranks of its node.
    fn passed(&self, py: Python<'_>) -> PyResult<Passed> {
        let passed = || Passed::of(&self.inner, &self.topology, self.me);
        py.detach(passed).map_err(|error| of(py, &error))
    }
}

/// Refuses room for another number of values than there are: before they are made.
fn check(py: Python<'_>, len: usize, rows: u32, columns: u32) -> PyResult<()> {
    if (rows as usize).checked_mul(columns as usize) == Some(len) {
        return Ok(());
    }
    Err(invalid(py, &format!("room for values is {len}, allowed: {rows} x {columns}")))
}

/// Copies `values` to `address`, which has room for as many.
fn fill(py: Python<'_>, address: usize, values: Vec<i32>) -> PyResult<()> {
    if values.is_empty() {
        return Ok(());
    }
    if address == 0 || !address.is_multiple_of(align_of::<i32>()) {
        return Err(invalid(py, &format!("address of values is {address}, allowed: a multiple of 4, where memory is")));
    }
    // SAFETY: the caller, this package's own Python, names a contiguous int32 tensor of as many elements.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), address as *mut i32, values.len()) };
    Ok(())
}

#[pymethods]
impl Handle {
    /// Rows that this rank received; the bound that was given where their number stays in the machine's memory.
    #[getter]
    fn rows(&self) -> u32 {
        self.inner.rows()
    }

    /// Rows of results that a combine takes: rows by expert, or as many as were received.
    #[getter]
    fn result_rows(&self) -> u32 {
        self.inner.result_rows()
    }

    /// Whether the dispatch brought rows by expert.
    #[getter]
    fn is_by_expert(&self) -> bool {
        self.inner.slots().is_some()
    }

    /// The most rows that any rank received: the same on all ranks. Waits for the dispatch where counts stay in the machine's memory.
    fn most_rows(&self, py: Python<'_>) -> PyResult<u32> {
        let exchange = self.exchange(py)?;
        Ok(self.all().map(|rank| exchange.received(rank)).max().unwrap_or(0))
    }

    /// Tokens of this rank's batch.
    #[getter]
    fn tokens(&self) -> u32 {
        self.inner.tokens()
    }

    /// Generation of the communicator that it belongs to.
    #[getter]
    fn generation(&self) -> u16 {
        self.inner.generation()
    }

    /// Writes int32 `[ranks, ranks]`: rows that rank `column` gets from ranks 0 to `row`.
    fn rank_prefix(&self, py: Python<'_>, address: usize, len: usize) -> PyResult<()> {
        check(py, len, self.ranks(), self.ranks())?;
        let exchange = self.exchange(py)?;
        let upto = |source: Rank, to: Rank| (exchange.first_row(source, to) + exchange.rows(source, to)) as i32;
        let all = self.all().flat_map(|source| self.all().map(move |to| upto(source, to))).collect();
        fill(py, address, all)
    }

    /// Writes int32 `[ranks, channels]`: rows of channels 0 to `column` to rank `row`, each channel a share of the tokens.
    fn channel_prefix(&self, py: Python<'_>, channels: u32, address: usize, len: usize) -> PyResult<()> {
        check(py, len, self.ranks(), channels)?;
        let share = share(self.inner.tokens(), channels);
        let plan = self.plan(py)?;
        let upto = |to: Rank, channel: u32| {
            plan.sent_to(to).partition_point(|&token| u64::from(token) < share * u64::from(channel + 1)) as i32
        };
        fill(py, address, self.all().flat_map(|to| (0..channels).map(move |c| upto(to, c))).collect())
    }

    /// Writes int32 `[ranks, channels]`: where, among the rows of rank `row`, those of channel `column` begin.
    /// `source_token`: int32 `[rows]` in host memory.
    fn source_channel_prefix(
        &self,
        py: Python<'_>,
        channels: u32,
        source_token: usize,
        address: usize,
        len: usize,
    ) -> PyResult<()> {
        check(py, len, self.ranks(), channels)?;
        let (exchange, me) = (self.exchange(py)?, self.me);
        // SAFETY: the caller names a contiguous int32 tensor of the received rows.
        let tokens = unsafe { slice::<i32>(source_token, exchange.received(me) as usize) };
        let before = |source: Rank, channel: u32| {
            let first = exchange.first_row(source, me) as usize;
            let rows = &tokens[first..first + exchange.rows(source, me) as usize];
            let share = share(exchange.tokens(source), channels);
            rows.partition_point(|&token| (token as u64) < share * u64::from(channel)) as i32
        };
        fill(py, address, self.all().flat_map(|source| (0..channels).map(move |c| before(source, c))).collect())
    }

    /// Writes int32 `[tokens, ranks]`: the row's number among those of its channel to the rank, -1 where the token does not go.
    fn send_head(&self, py: Python<'_>, channels: u32, address: usize, len: usize) -> PyResult<()> {
        check(py, len, self.inner.tokens(), self.ranks())?;
        let share = share(self.inner.tokens(), channels).max(1);
        let plan = self.plan(py)?;
        let mut heads = vec![-1; self.inner.tokens() as usize * self.ranks() as usize];
        for to in self.all() {
            let (mut channel, mut number) = (0, 0);
            for &token in plan.sent_to(to) {
                let of = u64::from(token) / share;
                number = if of == channel { number } else { 0 };
                channel = of;
                heads[token as usize * self.ranks() as usize + to.index()] = number;
                number += 1;
            }
        }
        fill(py, address, heads)
    }

    /// Writes int32 `[nodes, channels]`: tokens of channels 0 to `column` that go to node `row`.
    fn node_prefix(&self, py: Python<'_>, channels: u32, address: usize, len: usize) -> PyResult<()> {
        check(py, len, self.topology.nodes(), channels)?;
        let plan = self.plan(py)?;
        fill(py, address, rail::prefix(&tokens_by_node(&plan, &self.topology), |_| plan.tokens(), channels))
    }

    /// Writes int32 `[tokens, nodes]`: the token's number among those of its channel to the node, -1 where it does not go there.
    fn node_head(&self, py: Python<'_>, channels: u32, address: usize, len: usize) -> PyResult<()> {
        check(py, len, self.inner.tokens(), self.topology.nodes())?;
        let plan = self.plan(py)?;
        fill(py, address, rail::heads(&tokens_by_node(&plan, &self.topology), plan.tokens(), channels))
    }

    /// Rows that passed through this rank on their way to ranks of its node, those of its own batch among them.
    fn rail_rows(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.passed(py)?.rows())
    }

    /// Writes int32 `[nodes, channels]`: of these rows, those that came from node `row` by channels 0 to `column`.
    fn rail_prefix(&self, py: Python<'_>, channels: u32, address: usize, len: usize) -> PyResult<()> {
        check(py, len, self.topology.nodes(), channels)?;
        fill(py, address, self.passed(py)?.prefix(channels))
    }

    /// Writes int32 `[rows, ranks of a node]`: the row's number among those of its node and channel to the rank, -1 where it does not go.
    fn rail_head(&self, py: Python<'_>, channels: u32, address: usize, len: usize) -> PyResult<()> {
        let passed = self.passed(py)?;
        check(py, len, passed.rows() as u32, self.topology.ranks_per_node())?;
        fill(py, address, passed.heads(channels))
    }
}

/// Tokens of each channel but the last.
pub(crate) fn share(tokens: u32, channels: u32) -> u64 {
    u64::from(tokens.div_ceil(channels.max(1)))
}

/// `len` numbers at `address`.
///
/// # Safety
/// They are there, aligned, and nobody writes to them as long as the slice lives.
pub(crate) unsafe fn slice<'a, T>(address: usize, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(address as *const T, len) }
}

/// Says a low-latency combine where the rows came from.
#[pyclass(frozen, module = "moexpress._native")]
pub(crate) struct LowHandle {
    pub(crate) inner: Box<dyn Any + Send + Sync>,
    /// Tokens of this rank's batch.
    #[pyo3(get)]
    pub(crate) tokens: u32,
    /// Of each local expert, where the host knows them; else empty.
    #[pyo3(get)]
    pub(crate) expert_counts: Vec<i32>,
    /// Received rows, where they are told, and the host knows them.
    #[pyo3(get)]
    pub(crate) rows: Option<u32>,
    /// Rows of results that a combine needs, by source and packed.
    #[pyo3(get)]
    pub(crate) result_rows: Option<u32>,
    pub(crate) order: LowOrder,
    /// That made it.
    pub(crate) endpoint: u64,
}

impl LowHandle {
    pub(crate) fn new((inner, told): AnyLow, tokens: u32, endpoint: u64) -> Self {
        let result_rows = told.result_rows();
        let LowTold { order, counts, rows, .. } = told;
        Self { inner, tokens, expert_counts: counts, rows, result_rows, order, endpoint }
    }
}

#[pymethods]
impl LowHandle {
    /// How its rows lie: None by expert, `(0, False)` by source, `(alignment, zero_spare)` packed.
    #[getter]
    fn order(&self) -> Option<(u32, bool)> {
        raw_order(self.order)
    }
}

/// A low-latency operation that was sent and is to be received.
#[pyclass(frozen, module = "moexpress._native")]
pub(crate) struct Pending {
    pub(crate) inner: Own<Mutex<Option<Box<dyn Any + Send>>>>,
    /// Tokens of this rank's batch, as they were when it was sent.
    pub(crate) tokens: u32,
    /// That sent it.
    pub(crate) endpoint: u64,
}
