//! What differs between machines: how Python's memory becomes an endpoint's, and an endpoint's Python's.

use std::any::Any;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use moexpress::engine::Scalar;
use moexpress::engine::low_latency::{LowOrder, LowRoutingOf};
use moexpress::layout::RowFormat;
use moexpress::{Element as Travels, Endpoint, Error, Layout, LowLatency, Scaling};

use crate::dlpack::{Device, Element, Tensor};
use crate::early::{EarlyOut, RawReady, unsupported};
use crate::room::{Given, LowRoom, Scales};

/// Rows in Python's memory, one behind the other: bf16, or codes with their scales elsewhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawRows {
    pub(crate) address: usize,
    pub(crate) rows: u32,
    pub(crate) scales: Option<RawScales>,
}

/// Scales in Python's memory, `[rows, scales]` of four bytes each: f32, or four UE8M0 bytes. Strides in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawScales {
    pub(crate) address: usize,
    pub(crate) strides: [i64; 2],
}

/// A batch of low latency in Python's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawBatch {
    pub(crate) x: RawRows,
    /// i64 `[tokens, topk]`; 0: those of the handle that the call is given.
    pub(crate) topk_idx: usize,
    /// f32 `[tokens, topk]`.
    pub(crate) topk_weights: Option<usize>,
    /// Whether a token may name an expert more than once.
    pub(crate) repeats: bool,
    /// How received rows lie.
    pub(crate) order: LowOrder,
    /// Whether the call waits until the host knows how many rows came.
    pub(crate) waits: bool,
    /// Bound on the rows of results, by source, where the caller knows a smaller one than the communicator's.
    pub(crate) most_rows: Option<u32>,
}

/// What the host knows of the rows that a low-latency dispatch brought.
#[derive(Clone, Debug)]
pub(crate) struct LowTold {
    pub(crate) order: LowOrder,
    /// Of each local expert; empty where it does not know them.
    pub(crate) counts: Vec<i32>,
    /// Received rows, where these are told; none where it does not know them.
    pub(crate) rows: Option<u32>,
    /// Slots that packed rows take, likewise.
    pub(crate) slots: Option<u32>,
    /// Bound on the rows of results, by source and packed.
    pub(crate) most: Option<u32>,
}

impl LowTold {
    /// Nothing is known.
    pub(crate) const fn nothing(order: LowOrder) -> Self {
        Self { order, counts: Vec::new(), rows: None, slots: None, most: None }
    }

    /// Rows of results that there are at least, by source and packed.
    pub(crate) fn result_rows(&self) -> Option<u32> {
        let known = if matches!(self.order, LowOrder::Packed { .. }) { self.slots } else { self.rows };
        known.or(self.most)
    }
}

/// Where it goes which packed rows stand where, of a low-latency dispatch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedInto {
    pub(crate) first: usize,
    pub(crate) slots: usize,
    pub(crate) weights: usize,
}

/// Where what is told of received rows goes, of a low-latency dispatch by source, or packed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BySourceInto {
    pub(crate) first_of: usize,
    pub(crate) topk_idx: usize,
    /// The same once more: callers write to theirs.
    pub(crate) topk_idx_too: usize,
    pub(crate) topk_weights: usize,
    pub(crate) source_rank: usize,
}

/// Where the results of a low-latency dispatch go, with the shapes that
/// [`LowReceived`](moexpress::engine::low_latency::LowReceived) says. Rows beyond each expert's are undefined.
#[derive(Clone, Debug)]
pub(crate) struct LowInto {
    /// bf16 or FP8 codes, contiguous.
    pub(crate) x: usize,
    /// Of `[local experts, ranks * max_tokens, scales]` of FP8 rows; strides in elements.
    pub(crate) scales: Option<(usize, [i64; 3])>,
    pub(crate) expert_counts: usize,
    pub(crate) segments: usize,
    pub(crate) source_token: usize,
    pub(crate) by_source: Option<BySourceInto>,
    pub(crate) packed: Option<PackedInto>,
    /// Rows there is room for.
    pub(crate) rows: u32,
    /// Rows of `x` that may come, where that is less.
    pub(crate) most: Option<u32>,
    /// To which the counts are added. Memory of Python's.
    pub(crate) stats: Option<usize>,
    /// Keeps the rest.
    pub(crate) owner: Arc<dyn Any + Send + Sync>,
    /// Whether the rest is memory of the caller's, which graphs need not keep.
    pub(crate) of_caller: bool,
}

/// Received rows as they leave: bf16, or codes and their scales; of INT8 on NPUs bytes in which both lie.
pub(crate) struct RowsOut {
    pub(crate) x: Tensor,
    pub(crate) scales: Option<Tensor>,
}

impl RowsOut {
    /// `rows` rows whose codes and scales begin at `codes` and `scales`, as blocks of `format` have them. Both tensors keep `owner`.
    pub(crate) fn apart(
        format: &RowFormat,
        rows: u32,
        [codes, scales]: [usize; 2],
        device: Device,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        let packed = format.element() == Travels::Fp8(Scaling::Ue8m0);
        let words = format.scales_stride() as i64 / 4;
        let tensor = |address, columns, stride, element, owner| Tensor {
            address,
            shape: vec![i64::from(rows), columns],
            strides: Some(vec![stride, 1]),
            element,
            device: device.clone(),
            owner: Box::new(owner),
        };
        let (width, stride) = (format.codes_bytes() as i64, format.codes_stride() as i64);
        let code = if format.element() == Travels::Int8 { Element::I8 } else { Element::E4m3 };
        let x = tensor(codes, width, stride, code, Arc::clone(&owner));
        let scale = if packed { Element::I32 } else { Element::F32 };
        Self { x, scales: Some(tensor(scales, words, words, scale, owner)) }
    }
}

/// A number that leaves as a tensor's element.
pub(crate) trait Typed: Scalar {
    const ELEMENT: Element;
}

impl Typed for i32 {
    const ELEMENT: Element = Element::I32;
}

/// Counts, which are below 2^31.
impl Typed for u32 {
    const ELEMENT: Element = Element::I32;
}

impl Typed for i64 {
    const ELEMENT: Element = Element::I64;
}

impl Typed for f32 {
    const ELEMENT: Element = Element::F32;
}

/// An endpoint whose memory Python shares.
///
/// # Safety of its methods
/// Addresses name memory of the machine's kind with room for what is said beside them. It keeps its contents until the call returns,
/// or, where calls only enqueue, until work of the endpoint's stream that was enqueued then has ended.
pub(crate) trait Backend: Endpoint + LowLatency + Send {
    /// Whether an operation of low latency keeps the choices that it was given, else what they lie in.
    const KEEPS_CHOICES: bool = true;

    /// Rows of tokens (as the shape's element says where scales are given, else bf16), or of results.
    unsafe fn rows_in(&mut self, rows: &RawRows) -> Result<Self::Buf, Error>;

    /// Numbers. `keep`: later calls read them, too.
    unsafe fn array_in<T: Scalar>(&mut self, address: usize, len: usize, keep: bool) -> Result<Self::Array<T>, Error>;

    /// Experts' results, bf16, as the dispatch's rows lie. Of rows by source no more are there than `told` knows to come.
    unsafe fn expert_rows_in(&mut self, address: usize, told: &LowTold) -> Result<Self::Buf, Error>;

    /// The choices of the batch that a handle is of.
    fn choices_of(handle: &Self::LowHandle) -> Self::Array<i64>;

    /// INT8 rows of bf16 rows, where this machine makes them by itself.
    async fn quantized(&mut self, _x: &Self::Buf) -> Result<Self::Buf, Error> {
        Err(Error::unsupported("making INT8 rows here", "NPUs; elsewhere torch"))
    }

    /// Rows that leave, whose memory is given back when the tensor is gone.
    fn rows_out(&mut self, rows: Self::Buf) -> Result<RowsOut, Error>;

    /// Rows of results that leave, bf16.
    fn results_out(&mut self, rows: Self::Buf) -> Result<Tensor, Error>;

    /// Numbers that leave.
    fn array_out<T: Typed>(&mut self, array: Self::Array<T>, shape: Vec<i64>) -> Result<Tensor, Error>;

    /// How scales lie in what a low-latency dispatch brings.
    fn low_scales(&self) -> Scales;

    /// Memory for what a low-latency dispatch brings, of blocks of the caller's where they are given.
    fn low_room(&mut self, layout: &Layout, order: LowOrder, given: Option<Given>) -> Result<LowRoom, Error>;

    /// Receives a low-latency dispatch. Returns its handle, and what the host knows of its rows.
    async unsafe fn receive_into(
        &mut self,
        sent: &Self::Dispatching,
        into: &LowInto,
    ) -> Result<(Self::LowHandle, LowTold), Error>;

    /// Counters of early consumers, by blocks of `rows` rows, whose dispatches are received on so many multiprocessors at most.
    fn early(&mut self, _rows: u32, _multiprocessors: Option<u32>) -> Result<EarlyOut, Error> {
        Err(unsupported())
    }

    /// The sending half of a low-latency dispatch whose rows are counted in `early`, which [`early`](Self::early) gave.
    async fn send_dispatch_early(
        &mut self,
        _x: &Self::Buf,
        _routing: &LowRoutingOf<Self>,
        _early: &(dyn Any + Send + Sync),
    ) -> Result<Self::Dispatching, Error> {
        Err(unsupported())
    }

    /// The sending half of a low-latency combine of results at `y`, as [`expert_rows_in`](Self::expert_rows_in) has them, which are read as they are ready.
    async unsafe fn send_combine_ready(
        &mut self,
        _y: usize,
        _handle: &Self::LowHandle,
        _topk_weights: Option<&Self::Array<f32>>,
        _ready: &RawReady,
    ) -> Result<Self::Combining, Error> {
        Err(unsupported())
    }

    /// Both halves of a low-latency dispatch, as [`receive_into`](Self::receive_into) brings it. `waits`: until the host knows how many rows came.
    async unsafe fn dispatch_into(
        &mut self,
        x: &Self::Buf,
        routing: &LowRoutingOf<Self>,
        into: &LowInto,
        _waits: bool,
    ) -> Result<(Self::LowHandle, LowTold), Error> {
        self.check_at_once()?;
        let sent = self.send_dispatch(x, routing).await?;
        // SAFETY: as the caller promises.
        unsafe { self.receive_into(&sent, into) }.await
    }

    /// Both halves of a low-latency combine, as [`receive_sums_into`](Self::receive_sums_into) brings it.
    async unsafe fn combine_into(
        &mut self,
        y: &Self::Buf,
        handle: &Self::LowHandle,
        topk_weights: Option<&Self::Array<f32>>,
        into: usize,
        tokens: u32,
    ) -> Result<(), Error> {
        self.check_at_once()?;
        let sent = self.send_combine(y, handle, topk_weights).await?;
        // SAFETY: as the caller promises.
        unsafe { self.receive_sums_into(&sent, into, tokens) }.await
    }

    /// Receives a low-latency combine into `tokens` rows of bf16.
    async unsafe fn receive_sums_into(&mut self, sent: &Self::Combining, into: usize, tokens: u32)
    -> Result<(), Error>;

    /// Runs a call to its end, as long as `go_on` says so.
    fn wait<T>(call: impl Future<Output = T>, go_on: &mut dyn FnMut() -> bool) -> Option<T>;

    /// Whether the arena has as much as it may.
    fn is_arena_full(&self) -> bool {
        true
    }

    /// Bytes that the arena has now, where it grows.
    fn arena_bytes(&self) -> Option<u64> {
        None
    }

    /// The stream that calls enqueue to; 0 where they do not enqueue.
    fn stream(&self) -> usize;

    /// Nobody reads results that are gone but by what `stream` holds now.
    ///
    /// # Safety
    /// As of [`follow`](Self::follow).
    unsafe fn ends_behind(&mut self, _stream: usize) -> Result<(), Error> {
        Ok(())
    }

    /// Lets memory of results that are gone go, some seconds later, where it comes and goes.
    ///
    /// # Errors
    /// Where the machine refuses.
    fn trim(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// `stream` lives as long as the process, and may be asked what it holds when a call that followed it has ended.
    ///
    /// # Safety
    /// It does, and is one of the machine's.
    unsafe fn lasts(&mut self, _stream: usize) {}

    /// Makes calls from now on wait for what the caller's stream holds, where they enqueue.
    ///
    /// # Safety
    /// `stream` is one of the machine's, and lives.
    unsafe fn follow(&mut self, _stream: usize) -> Result<(), Error> {
        Ok(())
    }

    /// Makes the caller's stream wait for what `event` is after.
    ///
    /// # Safety
    /// As [`follow`](Self::follow).
    unsafe fn precede(_event: &Self::Event, _stream: usize) -> Result<(), Error> {
        Ok(())
    }

    /// Makes the caller's stream wait for the calls made so far, where they enqueue.
    ///
    /// # Safety
    /// As [`follow`](Self::follow).
    unsafe fn lead(&mut self, _stream: usize) -> Result<(), Error> {
        Ok(())
    }
}

/// [`Backend::wait`] by asking again and again, with a `rest` in between.
pub(crate) fn poll<T>(call: impl Future<Output = T>, go_on: &mut dyn FnMut() -> bool, rest: fn()) -> Option<T> {
    let mut call = pin!(call);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = call.as_mut().poll(&mut context) {
            return Some(value);
        }
        if !go_on() {
            return None;
        }
        rest();
    }
}
