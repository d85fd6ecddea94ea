//! What cases share: communicators, batches by number, what the oracle says of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use ep_conformance::drive::all_of;
use ep_conformance::harness::share;
use ep_conformance::verify::{bits_of, bytes_of};
use ep_conformance::workload::{Batch, Workload};
use ep_core::engine::{Received, Routing};
use ep_core::reference::{self, Combined, Returned, World};
use ep_core::settings::SettingsBuilder;
use ep_core::{Endpoint, Error, Nanos, Placement, RankSet, Settings, Shape, Topology};
use ep_cuda::driver::Graph;
use ep_cuda::{Array, Cluster, CudaEndpoint, Rows};
use ep_loop::Loop;

/// Elements of a row.
pub(crate) const HIDDEN: u32 = 64;
/// Choices of a token.
pub(crate) const TOPK: u32 = 3;
/// Experts of a rank.
pub(crate) const LOCAL: u32 = 2;
/// The largest batch of any rank.
pub(crate) const TOKENS: u32 = 12;
/// Whether GPUs are made of software.
static ON_TWIN: AtomicBool = AtomicBool::new(false);

/// Says so, before the first case.
pub(crate) fn on_twin(is: bool) {
    ON_TWIN.store(is, Ordering::Relaxed);
}

/// The deadline. Software is slower, and others may keep its processor busy.
pub(crate) fn deadline() -> Nanos {
    Nanos::from_secs(if ON_TWIN.load(Ordering::Relaxed) { 16 } else { 2 })
}

/// How many replays there are: on a GPU, and on one made of software, where a run that is not thorough has a part of them.
pub(crate) fn turns(gpu: u64, twin: u64) -> u64 {
    if ON_TWIN.load(Ordering::Relaxed) { share(twin, twin.div_ceil(2)) } else { gpu }
}

/// A communicator and how its ranks come together on the host.
pub(crate) struct Layer {
    pub(crate) world: World,
    shape: Shape,
    settings: Settings,
    /// `[ranks]`: tokens of each rank.
    tokens: Vec<u32>,
    meeting: Meeting,
}

impl Layer {
    /// Of four ranks, one of which brings fewer tokens.
    pub(crate) fn new(placement: Placement) -> Result<Self, Error> {
        Self::sized(placement, 4, 1 << 20)
    }

    /// Of `ranks` ranks with `arena_bytes` bytes for blocks.
    pub(crate) fn sized(placement: Placement, ranks: u32, arena_bytes: u64) -> Result<Self, Error> {
        Self::of(Topology::new(1, ranks)?, |settings| settings.slots(4).placement(placement).arena_bytes(arena_bytes))
    }

    /// Of `ranks` ranks with outboxes for batches that the arena has no room for.
    pub(crate) fn with_outboxes(ranks: u32) -> Result<Self, Error> {
        let cut = |settings: SettingsBuilder| settings.channels(1).slots(3).chunk(2).credit(2);
        Self::of(Topology::new(1, ranks)?, |settings| {
            cut(settings.placement(Placement::Direct)).arena_bytes(1 << 20).outboxes(2).outbox_slots(8)
        })
    }

    /// Of two nodes of two ranks, over the loop.
    pub(crate) fn over_nodes(placement: Placement) -> Result<Self, Error> {
        Self::of(Topology::new(2, 2)?, |settings| settings.slots(4).placement(placement).arena_bytes(1 << 20))
    }

    fn of(topology: Topology, cut: impl FnOnce(SettingsBuilder) -> SettingsBuilder) -> Result<Self, Error> {
        let ranks = topology.ranks();
        let shape = Shape::builder().experts(LOCAL * ranks).topk(TOPK).hidden(HIDDEN).max_tokens(TOKENS).build()?;
        let settings = cut(Settings::builder(&shape, &topology)).low_latency(true).deadline(deadline()).build()?;
        let tokens = (0..ranks).map(|rank| if rank == 1 { 5 } else { TOKENS }).collect();
        let world = World::new(shape, topology, RankSet::new())?;
        Ok(Self { world, shape, settings, tokens, meeting: Meeting::new(ranks) })
    }

    /// Runs `user` on every rank.
    pub(crate) fn run<T: Send>(
        &self,
        user: impl AsyncFn(CudaEndpoint) -> Result<T, Error> + Send + Sync,
    ) -> Result<Vec<T>, String> {
        let cluster =
            Cluster::builder(*self.world.topology()).settings(self.settings).multiprocessors(2).specialise(false);
        let cluster = if self.world.topology().nodes() > 1 { cluster.far(Loop::new()) } else { cluster };
        let outcomes =
            cluster.build(self.shape).and_then(|cluster| cluster.run(user)).map_err(|error| error.to_string())?;
        all_of(outcomes)
    }

    /// The batches of all ranks, of turn `turn`.
    pub(crate) fn batches(&self, turn: u64) -> Result<Vec<Batch>, Error> {
        Workload::new(self.shape, self.tokens.clone()).seed(turn).batches()
    }

    /// Waits until all ranks have come here: nobody takes memory while another's kernels wait for it.
    pub(crate) fn meet(&self) -> Result<(), Error> {
        self.meeting.meet()
    }

    /// What ranks receive of `batches`, and get back where each row goes straight back with its weights, and with `bias`.
    pub(crate) fn expected(
        &self,
        batches: &[Batch],
        bias: Option<&[Batch]>,
    ) -> (Vec<reference::Received>, Vec<Combined>) {
        let inputs: Vec<_> = batches.iter().map(Batch::reference).collect();
        let received = reference::dispatch(&self.world, &inputs);
        let returned = received.iter().zip(batches).enumerate().map(|(rank, (got, batch))| Returned {
            y: &got.x,
            topk_weights: Some(&got.topk_weights),
            tokens: batch.tokens as usize,
            bias: [bias.map(|bias| &bias[rank].x[..]), None],
        });
        let combined = reference::combine(&self.world, &received, &returned.collect::<Vec<_>>());
        (received, combined)
    }
}

/// A barrier that gives up.
struct Meeting {
    ranks: u32,
    state: Mutex<(u32, u64)>,
    changed: Condvar,
}

impl Meeting {
    const fn new(ranks: u32) -> Self {
        Self { ranks, state: Mutex::new((0, 0)), changed: Condvar::new() }
    }

    fn meet(&self) -> Result<(), Error> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = state.1;
        state.0 += 1;
        if state.0 == self.ranks {
            *state = (0, turn + 1);
            self.changed.notify_all();
            return Ok(());
        }
        let within = 10 * Duration::from_nanos(deadline().0);
        let waiting = self.changed.wait_timeout_while(state, within, |state| state.1 == turn);
        let timed_out =
            waiting.map_or_else(|poisoned| poisoned.into_inner().1, |(_state, timeout)| timeout).timed_out();
        if timed_out {
            return Err(Error::unsupported("this case", "all ranks at the same place: another has failed"));
        }
        Ok(())
    }
}

/// A batch in the endpoint's memory, where a later one can take its place.
pub(crate) struct Uploaded {
    pub(crate) x: Rows,
    pub(crate) topk_idx: Array<i64>,
    pub(crate) topk_weights: Array<f32>,
}

impl Uploaded {
    pub(crate) fn new(ep: &mut CudaEndpoint, batch: &Batch) -> Result<Self, Error> {
        Ok(Self {
            x: ep.rows(&bytes_of(&batch.x), batch.tokens)?,
            topk_idx: ep.array(&batch.topk_idx)?,
            topk_weights: ep.array(&batch.topk_weights)?,
        })
    }

    /// One whose choices are refused: those of token 1.
    pub(crate) fn bad(ep: &mut CudaEndpoint, batch: &Batch) -> Result<Self, Error> {
        let mut batch = batch.clone();
        batch.topk_idx[TOPK as usize + 1] = 99;
        Self::new(ep, &batch)
    }

    pub(crate) fn routing(&self) -> Routing<Array<i64>, Array<f32>, Array<u8>> {
        Routing::TopK { topk_idx: self.topk_idx.clone(), topk_weights: Some(self.topk_weights.clone()) }
    }

    /// Writes `batch` over it.
    pub(crate) fn replace(&mut self, ep: &mut CudaEndpoint, batch: &Batch) -> Result<(), Error> {
        ep.store(&mut self.x, 0, &bytes_of(&batch.x))?;
        self.topk_idx.write(&batch.topk_idx)?;
        self.topk_weights.write(&batch.topk_weights)
    }
}

/// Runs a graph once, on the endpoint's stream.
pub(crate) fn replay(ep: &CudaEndpoint, graph: &mut Graph) -> Result<(), Error> {
    Ok(graph.launch(ep.stream())?)
}

/// A difference, as an error.
pub(crate) fn same<T: PartialEq + std::fmt::Debug>(
    what: &str,
    turn: u64,
    got: &[T],
    expected: &[T],
) -> Result<(), Error> {
    if got.len() != expected.len() {
        return Err(Error::invalid(format_args!("length of {what} in turn {turn}"), got.len(), expected.len()));
    }
    match got.iter().zip(expected).position(|(got, expected)| got != expected) {
        None => Ok(()),
        Some(at) => {
            let what = format_args!("{what}[{at}] in turn {turn}");
            Err(Error::invalid(what, format_args!("{:?}", got[at]), format_args!("{:?}", expected[at])))
        }
    }
}

/// Holds received rows against the oracle; `rows`: those that came, of the room there is.
pub(crate) fn same_rows(
    ep: &CudaEndpoint,
    turn: u64,
    got: &Received<CudaEndpoint>,
    rows: usize,
    expected: &reference::Received,
) -> Result<(), Error> {
    let mut x = bits_of(&ep.bytes(&got.x)?);
    x.truncate(rows * HIDDEN as usize);
    same("recv_x", turn, &x, &expected.x)?;
    let sources = [(&got.source_rank, &expected.source_rank), (&got.source_token, &expected.source_token)];
    for (got, expected) in sources {
        let got = ep.values(got)?;
        same("recv_source", turn, &got[..rows], expected)?;
        same("recv_source beyond the rows", turn, &got[rows..], &vec![-1; got.len() - rows])?;
    }
    if got.topk_idx.is_empty() {
        return Ok(());
    }
    let (idx, weights) = (ep.values(&got.topk_idx)?, ep.values(&got.topk_weights)?);
    let cut = rows * TOPK as usize;
    same("recv_topk_idx", turn, &idx[..cut], &expected.topk_idx)?;
    same("recv_topk_idx beyond the rows", turn, &idx[cut..], &vec![-1; idx.len() - cut])?;
    same("recv_topk_weights", turn, &weights[..cut], &expected.topk_weights)
}

/// Holds combined rows against the oracle.
pub(crate) fn same_sums(
    ep: &CudaEndpoint,
    turn: u64,
    got: &ep_core::engine::Combined<CudaEndpoint>,
    expected: &Combined,
) -> Result<(), Error> {
    same("combined_x", turn, &bits_of(&ep.bytes(&got.x)?), &expected.x)?;
    if got.topk_weights.is_empty() {
        return Ok(());
    }
    same("combined_topk_weights", turn, &ep.values(&got.topk_weights)?, &expected.topk_weights)
}
