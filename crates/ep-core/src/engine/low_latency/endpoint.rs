//! [`LowLatency`]: what users and the shared suite see of low latency.

use std::fmt::Debug;

use crate::engine::endpoint::Endpoint;
use crate::error::Error;
use crate::layout::{Layout, LowKind};
use crate::plan::Expansion;
use crate::topology::{Rank, RankSet};

/// How the rows lie that a low-latency dispatch brings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LowOrder {
    /// `[local experts, ranks * max_tokens]`: a row for each choice, packed for each expert, in order of source rank and token.
    #[default]
    ByExpert,
    /// `[ranks * max_tokens]`: each row once, in order of source rank and token, as a dispatch of throughput mode brings them.
    BySource,
    /// `[slots]`: a row for each choice, those of an expert side by side in order of source rank and token, as a dispatch of throughput mode
    /// [by expert](crate::engine::Dispatch::by_expert) brings them. The first of each expert is at a multiple of `alignment`, at least 1; what
    /// lies between, and behind the last, is padding: undefined, or zeros where `zero_spare`.
    Packed {
        /// Of the first row of each expert.
        alignment: u32,
        /// Padding is zeros.
        zero_spare: bool,
    },
}

impl LowOrder {
    /// Rows there is room for.
    ///
    /// # Errors
    /// As [`Layout::check_low_latency`]; [`Error::Invalid`] for an alignment of 0, or that would need 2^31 rows.
    pub fn rows(self, layout: &Layout) -> Result<u32, Error> {
        let (of_experts, local) = (layout.low_expert_rows()?, layout.local_experts());
        let received = of_experts / local;
        Ok(match self {
            Self::ByExpert => of_experts,
            Self::BySource => received,
            Self::Packed { alignment, .. } => {
                Expansion::most_slots(received, layout.shape().topk().min(local), local, alignment)?
            }
        })
    }

    /// Received rows there is room for, where these are told; else as [`LowOrder::rows`].
    ///
    /// # Errors
    /// As [`LowOrder::rows`].
    pub fn told_rows(self, layout: &Layout) -> Result<u32, Error> {
        if self.tells_rows() { Self::BySource.rows(layout) } else { self.rows(layout) }
    }

    /// Whether it is told of each received row what it is ([`LowBySource`]).
    pub const fn tells_rows(self) -> bool {
        matches!(self, Self::BySource | Self::Packed { .. })
    }

    /// What a combine of them is, by where the weights were given.
    ///
    /// # Errors
    /// [`Error::Invalid`] for weights that are given twice, or nowhere, or with a combine by source. [`Error::Unsupported`] where its results have
    /// no room.
    pub fn combine(self, layout: &Layout, with_dispatch: bool, with_combine: bool) -> Result<LowKind, Error> {
        let kind = match (self, with_combine) {
            (Self::ByExpert, _) => LowKind::of_weights(with_dispatch, with_combine)?,
            (Self::BySource | Self::Packed { .. }, false) => LowKind::PerRank,
            (Self::Packed { .. }, true) => LowKind::PerChoice,
            (Self::BySource, true) => {
                return Err(Error::invalid("topk_weights of a combine by source", "given", "absent"));
            }
        };
        layout.check_low_kind(kind).map(|()| kind)
    }
}

/// Where each token of a low-latency batch goes, and how its rows lie there. All ranks name the same order.
#[derive(Clone, Debug)]
pub struct LowRouting<I, F> {
    /// `[tokens, topk]`: expert of each choice over all ranks, or -1 for a dropped choice. A token names an expert at most
    /// once, or `repeats` is set.
    pub topk_idx: I,
    /// `[tokens, topk]`: weight of each choice. Where they are given, each rank weighs and sums its experts' results, and
    /// one row a rank comes back; where not, one row a choice comes back, and combine is given the weights. By source, and packed, they
    /// are brought to whoever gets the row, and weigh nothing.
    pub topk_weights: Option<F>,
    /// Whether a token may name an expert more than once. The expert gets the token's row once, and its result counts each time, with
    /// each time's weight. Only without `topk_weights`, and [by expert](LowOrder::ByExpert).
    pub repeats: bool,
    /// How received rows lie.
    pub order: LowOrder,
    /// Whether `x` is given as it travels, as throughput mode takes it; else bf16, and cast where the shape says so.
    pub coded: bool,
}

impl<I, F> LowRouting<I, F> {
    /// By expert, without repeats.
    pub fn new(topk_idx: I, topk_weights: Option<F>) -> Self {
        Self { topk_idx, topk_weights, repeats: false, order: LowOrder::default(), coded: false }
    }

    /// Refuses repeats where each rank weighs and sums, or rows do not lie [by expert](LowOrder::ByExpert).
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_repeats(&self) -> Result<(), Error> {
        let refused = |with: &str| Err(Error::invalid(with, true, false));
        match self {
            Self { repeats: true, order: LowOrder::BySource, .. } => {
                refused("repeats of a low-latency dispatch by source")
            }
            Self { repeats: true, order: LowOrder::Packed { .. }, .. } => {
                refused("repeats of a low-latency dispatch whose rows are packed")
            }
            Self { repeats: true, topk_weights: Some(_), .. } => {
                refused("repeats with topk_weights of a low-latency dispatch")
            }
            _ => Ok(()),
        }
    }
}

/// The low-latency routing of endpoint `E`.
pub type LowRoutingOf<E> = LowRouting<<E as Endpoint>::Array<i64>, <E as Endpoint>::Array<f32>>;

/// What is told of received rows that lie by source, or packed. `rows` is `ranks * max_tokens`.
#[derive(Debug)]
pub struct LowBySource<E: Endpoint + ?Sized> {
    /// `[ranks + 1]`: the first row of each source rank; last, how many there are.
    pub first_of: E::Array<i32>,
    /// `[rows, topk]`: expert of each choice on this rank, or -1 for one of another rank. -1 beyond the rows that came.
    pub topk_idx: E::Array<i64>,
    /// `[rows, topk]`: weight of each choice, 1 where none were given; 0 where `topk_idx` is -1.
    pub topk_weights: E::Array<f32>,
    /// `[rows]`: rank each row came from. Undefined beyond the rows that came.
    pub source_rank: E::Array<i32>,
}

/// Where packed rows stand ([`LowOrder::Packed`]). *Slots* are rows of [`LowReceived::x`].
#[derive(Debug)]
pub struct LowPacked<E: Endpoint + ?Sized> {
    /// `[local experts + 1]`: the first slot of each expert; last, behind all of their slots.
    pub first: E::Array<i32>,
    /// `[ranks * max_tokens, topk]`: the slot of each choice of each received row, or -1.
    pub slots: E::Array<i32>,
    /// `[slots]`: weight of the choice that stands there, 1 where none were given; 0 of padding.
    pub weights: E::Array<f32>,
}

/// What a rank received from a low-latency dispatch.
#[derive(Debug)]
pub struct LowReceived<E: LowLatency + ?Sized> {
    /// `[local experts, ranks * max_tokens, hidden]`: rows as they travelled, for each expert packed from the first on, in order of source rank
    /// and token. Undefined beyond each expert's rows. By source `[ranks * max_tokens, hidden]`, zeros beyond the rows that came. Packed
    /// `[slots, hidden]`.
    pub x: E::Buf,
    /// `[local experts]`: rows of each expert.
    pub expert_counts: E::Array<i32>,
    /// `[local experts, ranks]`: the rows of each source rank, `first << 32 | rows`, counted from the expert's first; also where rows lie by source.
    pub segments: E::Array<i64>,
    /// `[local experts, ranks * max_tokens]`, by source and packed `[ranks * max_tokens]`, of received rows: token at its source. Undefined where there is no row.
    pub source_token: E::Array<i32>,
    /// What is told of received rows that lie by source, or packed.
    pub by_source: Option<LowBySource<E>>,
    /// Where packed rows stand.
    pub packed: Option<LowPacked<E>>,
    /// Says combine where the rows came from.
    pub handle: E::LowHandle,
    /// When the buffers are filled.
    pub event: E::Event,
}

/// What a low-latency combine gave back.
#[derive(Debug)]
pub struct LowCombined<E: Endpoint + ?Sized> {
    /// `[tokens, hidden]` bf16: the weighted sum of each token's results.
    pub x: E::Buf,
    /// When the buffer is filled.
    pub event: E::Event,
}

/// Low latency: dispatch and combine of at most [`crate::Shape::max_tokens`] tokens a rank, over fixed slots and a full
/// mesh of lanes, without an exchange of counts. Needs [`crate::Settings::low_latency`].
///
/// All ranks make the same calls in the same order. Each operation has two halves, so that computation overlaps: `send_...`
/// posts everything and returns; `receive_...` waits for what the others have sent. At most two operations may be sent and
/// not received ([`Error::TooManyInFlight`]); they are received in the order in which they were sent. Both halves at once are for
/// when nothing is in flight ([`LowLatency::check_at_once`]). A call that is refused has sent nothing.
///
/// **What is dropped is skipped.** A rank that drops an operation which it has not received, or whose receiving half failed, still
/// owes its peers that it received it. The next call does that first: waits for what the operation brings and throws it away.
/// So a sending half, too, may return [`Error::Failed`] where a dropped operation cannot be skipped: it has then sent nothing, and may be
/// called again. A rank that ends with operations in flight skips none: for peers that have not sent theirs yet it is gone.
///
/// **Arithmetic**, bit for bit, `y` the experts' results: without weights at dispatch
/// `acc = 0; acc = fma(weight, f32(y), acc)`, choices ascending, rounded to bf16 once. With weights at dispatch each rank
/// does that for its own experts' results and rounds; these are added in f32, ranks ascending, and rounded. By source `y` has one
/// row for each that came: these are added in f32, ranks ascending, and rounded once. Packed, each rank sums its experts' results
/// with weights of 1 and rounds, as with weights at dispatch; or, where combine is given weights, they come back choice by choice, as without.
///
/// **Failures** poison nothing. What went wrong in sending is told by the receiving half. After an error the user may mask
/// the peer that it names ([`LowLatency::mask_rank`]) and receive again: masked ranks are neither sent to nor waited for,
/// and their part of every result is left out. Masks are this rank's own; a masked rank that is alive finds out in its next
/// call ([`crate::Fault::MaskedBy`]). All come together again by [`LowLatency::rejoin`].
#[allow(async_fn_in_trait)] // Endpoints stay on the thread of their rank.
pub trait LowLatency: Endpoint {
    /// Says combine where rows came from. Valid in the generation that made it, for any number of combines.
    type LowHandle: Debug + Clone;
    /// A dispatch that was sent.
    type Dispatching: Debug;
    /// A combine that was sent.
    type Combining: Debug;

    /// Sends each row of `x [tokens, hidden]`, bf16, to the ranks that hold its experts, once to each rank; as FP8 where the
    /// shape says so, and rows that are [coded](LowRouting::coded) as they are.
    ///
    /// # Errors
    /// [`Error::Invalid`] for bad input, [`Error::Unsupported`] without room for low latency, [`Error::TooManyInFlight`],
    /// [`Error::Failed`] for an operation that was dropped and cannot be skipped: nothing moved. [`Error::Poisoned`].
    async fn send_dispatch(&mut self, x: &Self::Buf, routing: &LowRoutingOf<Self>) -> Result<Self::Dispatching, Error>;

    /// Receives what the others sent in that dispatch.
    ///
    /// # Errors
    /// [`Error::Failed`] when a peer that is not masked did not deliver, or could not be sent to: may be called again.
    /// [`Error::Invalid`] out of order, or for a dispatch of an earlier generation.
    async fn receive_dispatch(&mut self, sent: &Self::Dispatching) -> Result<LowReceived<Self>, Error>;

    /// Sends the experts' results `y`, bf16, as the received rows lie (`[local experts, ranks * max_tokens, hidden]`, or by source
    /// `[ranks * max_tokens, hidden]`), back to the tokens' ranks. `topk_weights [tokens, topk]` are those of this rank's own tokens;
    /// given here if and only if they were not given at dispatch, never by source, and packed where each choice is to come back by itself.
    ///
    /// # Errors
    /// As [`LowLatency::send_dispatch`].
    async fn send_combine(
        &mut self,
        y: &Self::Buf,
        handle: &Self::LowHandle,
        topk_weights: Option<&Self::Array<f32>>,
    ) -> Result<Self::Combining, Error>;

    /// Receives and sums the results of this rank's tokens.
    ///
    /// # Errors
    /// As [`LowLatency::receive_dispatch`].
    async fn receive_combine(&mut self, sent: &Self::Combining) -> Result<LowCombined<Self>, Error>;

    /// Both halves of a dispatch.
    ///
    /// # Errors
    /// Those of the halves, and of [`LowLatency::check_at_once`]. Where the receiving half failed, mask the peer, and call what comes
    /// next: that skips this operation.
    async fn low_latency_dispatch(
        &mut self,
        x: &Self::Buf,
        routing: &LowRoutingOf<Self>,
    ) -> Result<LowReceived<Self>, Error> {
        self.check_at_once()?;
        let sent = self.send_dispatch(x, routing).await?;
        self.receive_dispatch(&sent).await
    }

    /// Both halves of a combine.
    ///
    /// # Errors
    /// As [`LowLatency::low_latency_dispatch`].
    async fn low_latency_combine(
        &mut self,
        y: &Self::Buf,
        handle: &Self::LowHandle,
        topk_weights: Option<&Self::Array<f32>>,
    ) -> Result<LowCombined<Self>, Error> {
        self.check_at_once()?;
        let sent = self.send_combine(y, handle, topk_weights).await?;
        self.receive_combine(&sent).await
    }

    /// Refuses both halves at once where an operation is in flight, which must be received first; and whatever a sending half would
    /// refuse of any batch. Sends nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`], and those of [`LowLatency::send_dispatch`].
    fn check_at_once(&mut self) -> Result<(), Error>;

    /// Refuses a handle that a combine would refuse: of another endpoint, or of an earlier generation.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    fn check_low_handle(&self, handle: &Self::LowHandle) -> Result<(), Error>;

    /// The ranks that this rank leaves out of low latency: those that it masked, and those given up by
    /// [`Endpoint::recover`].
    fn low_latency_mask(&self) -> &RankSet;

    /// Goes on without `rank` in low latency, until [`LowLatency::rejoin`]. Stops what is under way to it, and tells it.
    ///
    /// # Errors
    /// [`Error::Invalid`] for this rank itself, or one that does not exist; [`Error::Unsupported`] without room for low latency.
    async fn mask_rank(&mut self, rank: Rank) -> Result<(), Error>;

    /// Brings all ranks together again that were not given up by [`Endpoint::recover`]: all of them call it, the masked
    /// ones too. Afterwards no rank is masked; what was in flight is gone, and handles of before are refused, as by
    /// [`Endpoint::recover`].
    ///
    /// # Errors
    /// As [`Endpoint::recover`].
    async fn rejoin(&mut self) -> Result<(), Error> {
        self.recover(&RankSet::new()).await
    }
}
