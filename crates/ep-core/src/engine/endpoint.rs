//! [`Endpoint`]: what users and the shared suite see of a backend.

use std::fmt::Debug;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::buffers::Scales;
use crate::engine::desk::Desk;
use crate::engine::handle::Handle;
use crate::engine::stats::{Stats, Ways};
use crate::error::Error;
use crate::port::Nanos;
use crate::settings::{OutboxUse, Rings, Settings};
use crate::shape::Shape;
use crate::topology::{Rank, RankSet, Topology};

/// A number that arrays of an endpoint hold.
pub trait Scalar: FromBytes + IntoBytes + Immutable + Copy + PartialEq + Debug + Send + Sync + 'static {}

impl Scalar for u8 {}
impl Scalar for u32 {}
impl Scalar for i32 {}
impl Scalar for i64 {}
impl Scalar for f32 {}

/// The moment at which enqueued work is complete.
pub trait Event: Clone + Debug {
    /// Waits for it, at most `timeout`; false when it did not come.
    fn wait(&self, timeout: Nanos) -> bool;
}

/// The event of machines whose calls end when the work is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ready;

impl Event for Ready {
    fn wait(&self, _timeout: Nanos) -> bool {
        true
    }
}

/// Where each token of a batch goes.
#[derive(Clone, Debug)]
pub enum Routing<I, F, B> {
    /// The router's choices.
    TopK {
        /// `[tokens, topk]`: expert of each choice over all ranks, or -1 for a dropped choice. A token names an expert at
        /// most once.
        topk_idx: I,
        /// `[tokens, topk]`: weight of each choice, carried to the receiver. Absent: weights of 1.
        topk_weights: Option<F>,
    },
    /// Membership computed elsewhere; rows carry no choices.
    Membership {
        /// `[tokens, ranks]`: 1 where the token goes to the rank, else 0.
        in_rank: B,
        /// `[experts]`: tokens of this batch for each expert, at most all of them.
        tokens_per_expert: Vec<u32>,
    },
}

/// The routing type of endpoint `E`.
pub type RoutingOf<E> = Routing<<E as Endpoint>::Array<i64>, <E as Endpoint>::Array<f32>, <E as Endpoint>::Array<u8>>;

/// Options of one dispatch.
#[derive(Clone, Debug)]
pub struct Dispatch {
    /// Rings of this call, the same on all ranks; absent: the communicator's.
    pub rings: Option<Rings>,
    /// How much of its outboxes this call uses where its rows go through some. Ranks may differ.
    pub outbox: OutboxUse,
    /// Per-expert counts are rounded up to a multiple of this; at least 1. The rows' layout changes only with [`Dispatch::by_expert`].
    pub expert_alignment: u32,
    /// Rows by expert instead of rows by source, ready for a grouped GEMM: [`Received::x`] has a row for each choice. Those of an expert lie
    /// side by side, ordered by (source rank, token, choice); the first row of each expert is at a multiple of `expert_alignment`; what lies
    /// between is padding. [`Received::by_expert`] says where each stands, and combine takes results in the same layout.
    ///
    /// With `device_counts` there is room for as many rows by expert as `worst_rows` can become: `worst_rows` times the lesser of topk and local
    /// experts (topk with `repeats`), and `expert_alignment - 1` for each local expert, rounded up to the alignment; at most 2^31 - 1. All that is
    /// no row is padding, to the end of the room. Padding is undefined, unless [`Dispatch::zero_spare`] asks for zeros: there may be more of it
    /// than rows.
    ///
    /// Not for [`Routing::Membership`], nor for `worst_rows` without `device_counts`, and with an alignment of at most 2^30 / local experts.
    /// Backends that do not have it refuse it, [`Error::Unsupported`].
    pub by_expert: bool,
    /// Rows to size the results for, instead of the exact number: 0 for exact. Rows beyond the received ones have
    /// `topk_idx` -1 and undefined payload. At most ranks x [`Shape::max_tokens`]. More rows than that are a failure of the
    /// operation, [`crate::Fault::Mismatch`] of `worst-case rows`, and are written nowhere.
    pub worst_rows: u32,
    /// Rows beyond the received ones, and their scales, are zeros instead of undefined: of this dispatch, and of cached ones along its handle; with
    /// `by_expert` all padding. Needs `worst_rows`, or `by_expert`.
    pub zero_spare: bool,
    /// The counts stay in the machine's memory ([`Received::counts`]), so that the host need not wait for them: [`Received::rows`]
    /// and [`Handle::rows`] are then `worst_rows`, which must be given, and [`Received::expert_counts`] is empty. Rows beyond the
    /// received ones have source token and rank -1.
    pub device_counts: bool,
    /// Whether a token may name an expert more than once. Its row then carries that choice as often, with a weight each time, and
    /// each time counts.
    pub repeats: bool,
}

impl Default for Dispatch {
    fn default() -> Self {
        Self {
            rings: None,
            outbox: OutboxUse::default(),
            expert_alignment: 1,
            by_expert: false,
            worst_rows: 0,
            zero_spare: false,
            device_counts: false,
            repeats: false,
        }
    }
}

/// Options of one combine.
#[derive(Debug)]
pub struct Combine<'a, E: Endpoint + ?Sized> {
    /// `[received rows, topk]`: weights that travel back and are summed per token and choice, ranks ascending. Of a dispatch by expert, too. All ranks give
    /// some, or none does.
    pub topk_weights: Option<&'a E::Array<f32>>,
    /// Up to two `[tokens, hidden]` rows to start each token's sum from.
    pub bias: [Option<&'a E::Buf>; 2],
    /// Rings of this call, the same on all ranks; absent: those of the handle's dispatch.
    pub rings: Option<Rings>,
    /// As [`Dispatch::outbox`]; that of the handle's dispatch says nothing of this call.
    pub outbox: OutboxUse,
    /// Of rows by expert: what travels for each received row is not the sum of its results, rounded to bf16, but what that rounding left,
    /// rounded likewise. On one node two combines, one of each, bring a rank's sums home with 16 significant bits; over several, sums are rounded
    /// at each node in any case. All ranks say the same. Only with a handle of a dispatch [by expert](Dispatch::by_expert); backends that do
    /// not have it refuse it, [`Error::Unsupported`].
    pub remainder: bool,
}

impl<E: Endpoint + ?Sized> Default for Combine<'_, E> {
    fn default() -> Self {
        Self { topk_weights: None, bias: [None, None], rings: None, outbox: OutboxUse::default(), remainder: false }
    }
}

impl<E: Endpoint + ?Sized> Combine<'_, E> {
    /// Refuses the remainders of rows that are by source; `by_expert`: the handle's are not.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_remainder(&self, by_expert: bool) -> Result<(), Error> {
        match self.remainder && !by_expert {
            true => Err(Error::invalid("remainder of a combine of rows by source", true, false)),
            false => Ok(()),
        }
    }

    /// A number for what all ranks say alike, but the rings: headers bring it, with [`Layout::hash`](crate::Layout::hash).
    pub fn said_alike(&self) -> u64 {
        u64::from(self.topk_weights.is_some()) << 63 | u64::from(self.remainder) << 62
    }
}

/// The counts of a dispatch, in the machine's memory.
#[derive(Debug)]
pub struct Counts<E: Endpoint + ?Sized> {
    /// `[1]`: rows received.
    pub rows: E::Array<u32>,
    /// `[local experts]`: as [`Received::expert_counts`].
    pub experts: E::Array<u32>,
}

/// The slots of experts: `first` is `[local experts + 1]`, the first slot of each expert, a multiple of the alignment; last, behind all of their slots.
/// `counts` is `[local experts]`: rows of each expert, padding not counted.
#[derive(Debug)]
pub enum ExpertSlots<E: Endpoint + ?Sized> {
    /// The host knows them. There are no slots but these.
    OnHost {
        /// `[local experts + 1]`.
        first: Vec<u32>,
        /// `[local experts]`.
        counts: Vec<u32>,
    },
    /// They stay in the machine's memory ([`Dispatch::device_counts`]). There is room for more slots, which are padding.
    OnDevice {
        /// `[local experts + 1]`.
        first: E::Array<u32>,
        /// `[local experts]`.
        counts: E::Array<u32>,
    },
}

impl<E: Endpoint + ?Sized> Clone for ExpertSlots<E> {
    fn clone(&self) -> Self {
        match self {
            Self::OnHost { first, counts } => Self::OnHost { first: first.clone(), counts: counts.clone() },
            Self::OnDevice { first, counts } => Self::OnDevice { first: first.clone(), counts: counts.clone() },
        }
    }
}

/// Where rows by expert stand ([`Dispatch::by_expert`]). *Slots* are rows of [`Received::x`].
#[derive(Debug)]
pub struct ByExpert<E: Endpoint + ?Sized> {
    /// Which slots are whose.
    pub experts: ExpertSlots<E>,
    /// `[received rows, topk]`, or `[worst_rows, topk]` where counts stay on the device: the slot of each choice, or -1.
    pub slots: E::Array<i32>,
    /// `[ranks, local experts]`: the first slot of each source at each expert. Its rows there end where those of the next source begin; those of
    /// the last source at `first + counts`.
    pub offsets: E::Array<i32>,
    /// `[slots]`: the weight of each slot's choice, 0 where the slot is no choice's, of as many slots as `x` has room for. None along a handle, as
    /// weights do not travel again, and where a backend leaves it to its user.
    pub weights: Option<E::Array<f32>>,
}

/// What a rank received from a dispatch. Rows are ordered by source rank, then by token.
#[derive(Debug)]
pub struct Received<E: Endpoint + ?Sized> {
    /// `[rows, hidden]`: the rows. In the arena when placed directly: dropping it makes the memory grantable again. With
    /// [`Dispatch::by_expert`] `[slots, hidden]`, one row a choice; all else here stays by received row.
    pub x: E::Buf,
    /// Where the rows of `x` stand, for a dispatch by expert and the cached ones along its handle; else none.
    pub by_expert: Option<ByExpert<E>>,
    /// Rows received; the buffers may be longer (worst-case sizing). With [`Dispatch::device_counts`] the bound.
    pub rows: u32,
    /// `[rows, topk]`: expert index on this rank, or -1. Empty for [`Routing::Membership`] and cached dispatch.
    pub topk_idx: E::Array<i64>,
    /// `[rows, topk]`: weight of each choice, 0 where `topk_idx` is -1. Empty as above.
    pub topk_weights: E::Array<f32>,
    /// `[rows]`: token index in its rank's batch.
    pub source_token: E::Array<i32>,
    /// `[rows]`: rank the row came from.
    pub source_rank: E::Array<i32>,
    /// `[local experts]`: received choices of each local expert, rounded up to the alignment. Empty for cached dispatch.
    pub expert_counts: Vec<u32>,
    /// The counts where they stayed in the machine's memory ([`Dispatch::device_counts`]); none otherwise.
    pub counts: Option<Counts<E>>,
    /// Replays the routing for combine and cached dispatch.
    pub handle: Handle,
    /// When the buffers are filled.
    pub event: E::Event,
}

/// What a combine gave back.
#[derive(Debug)]
pub struct Combined<E: Endpoint + ?Sized> {
    /// `[tokens, hidden]`: bias plus the sum over the ranks that got the token.
    pub x: E::Buf,
    /// `[tokens, topk]`: sums of the returned weights; empty when none were given.
    pub topk_weights: E::Array<f32>,
    /// When the buffers are filled.
    pub event: E::Event,
}

/// One rank of a communicator: throughput-mode dispatch and combine.
///
/// All ranks make the same calls in the same order. A call that fails poisons the communicator: every later one returns
/// [`Error::Poisoned`] until [`Endpoint::recover`]; so does a call whose future is dropped before it has ended. Bad input is refused before anything moves and poisons nothing,
/// but the other ranks then wait for this one.
#[allow(async_fn_in_trait)] // Endpoints stay on the thread of their rank.
pub trait Endpoint {
    /// Rows in this machine's memory.
    type Buf: Debug;
    /// Numbers in this machine's memory.
    type Array<T: Scalar>: Debug + Clone;
    /// What orders enqueued work.
    type Stream;
    /// When enqueued work is complete.
    type Event: Event;

    /// Who this endpoint is, and how it stands.
    fn desk(&self) -> &Desk;
    /// The time on this rank's clock, which deadlines refer to.
    fn now(&self) -> Nanos;

    /// The rank this endpoint is.
    fn rank(&self) -> Rank {
        self.desk().rank()
    }
    /// Sizes of the layer.
    fn shape(&self) -> &Shape {
        self.desk().shape()
    }
    /// All ranks.
    fn topology(&self) -> &Topology {
        self.desk().topology()
    }
    /// Settings of the communicator.
    fn settings(&self) -> &Settings {
        self.desk().settings()
    }
    /// The ranks taken out of the communicator.
    fn mask(&self) -> &RankSet {
        self.desk().mask()
    }

    /// Brings `rows` dense rows into this machine's memory: tokens as they travel ([`Shape::row_bytes`]), or experts'
    /// results and bias ([`Shape::result_bytes`]).
    ///
    /// # Errors
    /// [`Error::Invalid`] when `bytes` are not `rows` times one of these sizes.
    fn rows(&mut self, bytes: &[u8], rows: u32) -> Result<Self::Buf, Error>;

    /// Brings `rows` FP8 rows into this machine's memory, to be dispatched: dense codes `[rows, hidden]`, and scales in a tensor of
    /// their own, whatever its strides. Machines that can take them as they lie do; what arrives is the same.
    ///
    /// # Errors
    /// [`Error::Invalid`] where rows of the shape have no scales, or there are too few.
    fn rows_apart(&mut self, codes: &[u8], scales: &Scales<'_>, rows: u32) -> Result<Self::Buf, Error> {
        let joined = scales.joined(self.shape(), codes, rows)?;
        self.rows(&joined, rows)
    }

    /// The dense bytes of rows in this machine's memory.
    ///
    /// # Errors
    /// [`Error::Failed`] when the memory is gone.
    fn bytes(&self, rows: &Self::Buf) -> Result<Vec<u8>, Error>;

    /// Brings numbers into this machine's memory.
    ///
    /// # Errors
    /// When the memory is not to be had.
    fn array<T: Scalar>(&mut self, values: &[T]) -> Result<Self::Array<T>, Error>;

    /// The numbers of an array.
    ///
    /// # Errors
    /// [`Error::Failed`] when the memory is gone.
    fn values<T: Scalar>(&self, array: &Self::Array<T>) -> Result<Vec<T>, Error>;

    /// Memory for the experts' output that combine may pull from without a copy: `[rows of handle, hidden]` in the
    /// window. None where the machine cannot pull, the arena has no room, or the handle's dispatch was by expert: then any buffer serves.
    fn output(&mut self, handle: &Handle) -> Option<Self::Buf>;

    /// Writes dense rows into a buffer, starting at row `first`.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the rows leave the buffer.
    fn store(&mut self, buf: &mut Self::Buf, first: u32, bytes: &[u8]) -> Result<(), Error>;

    /// Sends each row of `x [tokens, hidden]` to the ranks that hold its experts.
    ///
    /// # Errors
    /// [`Error::Invalid`] for bad input (nothing moved), [`Error::Failed`], [`Error::Poisoned`].
    async fn dispatch(&mut self, x: &Self::Buf, routing: &RoutingOf<Self>) -> Result<Received<Self>, Error> {
        self.dispatch_with(x, routing, &Dispatch::default()).await
    }

    /// [`Endpoint::dispatch`] with options.
    ///
    /// # Errors
    /// As [`Endpoint::dispatch`].
    async fn dispatch_with(
        &mut self,
        x: &Self::Buf,
        routing: &RoutingOf<Self>,
        options: &Dispatch,
    ) -> Result<Received<Self>, Error>;

    /// Dispatches another batch along the routing of an earlier one, without exchanging counts: a *cached* dispatch.
    ///
    /// # Errors
    /// As [`Endpoint::dispatch`], and [`Error::Invalid`] for a handle of an earlier generation.
    async fn redispatch(&mut self, x: &Self::Buf, handle: &Handle) -> Result<Received<Self>, Error> {
        self.redispatch_with(x, handle, OutboxUse::default()).await
    }

    /// [`Endpoint::redispatch`] that uses its outboxes as [`Dispatch::outbox`] says; its rings are those of the handle's dispatch.
    ///
    /// # Errors
    /// As [`Endpoint::redispatch`].
    async fn redispatch_with(
        &mut self,
        x: &Self::Buf,
        handle: &Handle,
        outbox: OutboxUse,
    ) -> Result<Received<Self>, Error>;

    /// Brings `y [received rows, hidden]` back to the tokens' ranks and sums it there, ranks ascending, in f32.
    ///
    /// Along a handle of a dispatch by expert `y` is `[slots, hidden]`. The results of a received row are summed at this rank first, choices
    /// ascending, in f32, and rounded once; padding is not looked at. One row travels back, as otherwise.
    ///
    /// # Errors
    /// As [`Endpoint::redispatch`].
    async fn combine(
        &mut self,
        y: &Self::Buf,
        handle: &Handle,
        options: Combine<'_, Self>,
    ) -> Result<Combined<Self>, Error>;

    /// Goes on without the ranks of `mask`, after a failure or before one: agrees with the other survivors on a new
    /// generation. Tokens for experts of masked ranks are dropped from then on. Handles of earlier
    /// generations are refused. Leases stay readable, and their memory returns when they are dropped, unless a rank that
    /// was given up may still touch it.
    ///
    /// # Errors
    /// [`Error::Excluded`] when the others gave up on this rank; [`Error::Failed`] when a survivor did not come.
    async fn recover(&mut self, mask: &RankSet) -> Result<(), Error>;

    /// What this rank sent, received and waited for, per peer and expert, since the communicator was made.
    fn stats(&self) -> Stats;

    /// [`Stats::ways`] alone, which costs nothing.
    fn ways(&self) -> Ways {
        self.desk().ways
    }
}
