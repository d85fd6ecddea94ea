//! The calls of one rank, on any backend.

use std::any::Any;

use moexpress::engine::low_latency::{LowOrder, LowRouting, LowRoutingOf};
use moexpress::engine::{Combine, Dispatch, ExpertSlots, Handle, Routing, Stats, Ways};
use moexpress::{Element, Endpoint, Error, Layout, OutboxUse, Rank as Number, RankSet};

use crate::backend::{Backend, LowInto, LowTold, RawBatch, RawRows};
use crate::calls::{
    Answer, AnyLow, ByExpert, Calls, Combined, Dispatched, Ended, Experts, GoOn, RawCombine, RawRouting,
};
use crate::dlpack::Tensor;
use crate::early::{EarlyOut, RawReady};
use crate::room::{self, Given, LowRoom};

/// [`Calls`] of a backend.
pub(crate) struct Rank<E: Endpoint> {
    endpoint: E,
    layout: Layout,
    /// After all work of the call under way, where that is known.
    last: Option<E::Event>,
}

impl<E: Endpoint> Rank<E> {
    pub(crate) const fn new(endpoint: E, layout: Layout) -> Self {
        Self { endpoint, layout, last: None }
    }
}

/// What a low-latency dispatch leaves behind.
struct Low<H> {
    handle: H,
    told: LowTold,
    tokens: u32,
}

fn any_low<H: Send + Sync + 'static>(handle: H, told: LowTold, tokens: u32) -> AnyLow {
    (Box::new(Low { handle, told: told.clone(), tokens }), told)
}

/// A low-latency operation that was sent, and the tokens it was for.
struct Sent<S> {
    sent: S,
    tokens: u32,
}

/// A low-latency dispatch that was sent, and where its results go.
struct SentDispatch<S> {
    sent: Sent<S>,
    into: LowInto,
}

fn wait<E: Backend, T>(call: impl Future<Output = Result<T, Error>>, go_on: GoOn<'_>) -> Answer<T> {
    E::wait(call, go_on).ok_or(Ended::Stopped)?.map_err(Ended::Failed)
}

fn foreign(what: &str) -> Error {
    Error::invalid(what, "of another endpoint", "one of this endpoint")
}

impl<E: Backend> Rank<E> {
    /// Weights, if there are any.
    ///
    /// # Safety
    /// As [`Backend`] says.
    unsafe fn weights(
        &mut self,
        address: Option<usize>,
        rows: u32,
        keep: bool,
    ) -> Result<Option<E::Array<f32>>, Error> {
        let len = rows as usize * self.topk();
        // SAFETY: as the caller promises.
        address.map(|address| unsafe { self.endpoint.array_in(address, len, keep) }).transpose()
    }

    /// Rows and routing of a low-latency dispatch; `along` a handle, whose choices it has.
    ///
    /// # Safety
    /// As [`Backend`] says.
    unsafe fn low_batch(
        &mut self,
        batch: &RawBatch,
        along: Option<&dyn Any>,
    ) -> Result<(E::Buf, LowRoutingOf<E>), Error>
    where
        E::LowHandle: 'static,
    {
        let &RawBatch { x, topk_idx, topk_weights, repeats, order, .. } = batch;
        // SAFETY: as the caller promises, for this and what follows.
        let rows = unsafe { self.endpoint.rows_in(&x) }?;
        let topk_idx = match along {
            Some(handle) => {
                let low: &Low<E::LowHandle> = handle.downcast_ref().ok_or_else(|| foreign("handle"))?;
                self.endpoint.check_low_handle(&low.handle)?;
                E::choices_of(&low.handle)
            }
            None => {
                let choices = x.rows as usize * self.topk();
                // SAFETY: as above.
                unsafe { self.endpoint.array_in(topk_idx, choices, !E::KEEPS_CHOICES) }?
            }
        };
        // SAFETY: as above. The receiving half may read weights, too.
        let topk_weights = unsafe { self.weights(topk_weights, x.rows, true) }?;
        Ok((rows, LowRouting { topk_idx, topk_weights, repeats, order, coded: x.scales.is_some() }))
    }

    fn topk(&self) -> usize {
        self.layout.shape().topk() as usize
    }

    /// Refuses rows with scales where the shape has none, and the reverse.
    fn check_element(&self, x: &RawRows) -> Result<(), Error> {
        let element = self.layout.shape().element();
        if (element == Element::Bf16) == x.scales.is_none() {
            return Ok(());
        }
        let given = if x.scales.is_some() { "rows with scales" } else { "rows without scales" };
        Err(Error::invalid("x", given, format_args!("{element}, as the communicator was made for")))
    }

    fn dispatched(&mut self, received: moexpress::engine::Received<E>, carries: bool) -> Answer<Dispatched> {
        let moexpress::engine::Received {
            x,
            by_expert,
            rows,
            topk_idx,
            topk_weights,
            source_token,
            source_rank,
            expert_counts,
            counts,
            handle,
            event,
        } = received;
        // Nothing below enqueues.
        self.last = Some(event);
        let local = i64::from(self.layout.local_experts());
        let counts = match counts {
            Some(counts) => {
                let rows = self.endpoint.array_out(counts.rows, vec![1])?;
                Some((rows, self.endpoint.array_out(counts.experts, vec![local])?))
            }
            None => None,
        };
        let out = self.endpoint.rows_out(x)?;
        let topk = self.topk() as i64;
        // By received row there are as many as these say; rows by expert are others.
        let room = if by_expert.is_some() { i64::from(rows) } else { out.x.shape[0] };
        let by_expert = match by_expert {
            Some(told) => Some(ByExpert {
                experts: match told.experts {
                    ExpertSlots::OnHost { first, counts } => Experts::OnHost(first, counts),
                    ExpertSlots::OnDevice { first, counts } => Experts::OnDevice(
                        self.endpoint.array_out(first, vec![local + 1])?,
                        self.endpoint.array_out(counts, vec![local])?,
                    ),
                },
                slots: self.endpoint.array_out(told.slots, vec![room, topk])?,
                offsets: self.endpoint.array_out(told.offsets, vec![self.layout.topology().ranks().into(), local])?,
                weights: match told.weights {
                    Some(weights) => Some(self.endpoint.array_out(weights, vec![out.x.shape[0]])?),
                    None => None,
                },
            }),
            None => None,
        };
        let choices = if carries {
            let topk_idx = self.endpoint.array_out(topk_idx, vec![room, topk])?;
            Some((topk_idx, self.endpoint.array_out(topk_weights, vec![room, topk])?))
        } else {
            None
        };
        let source_token = self.endpoint.array_out(source_token, vec![room])?;
        let source_rank = self.endpoint.array_out(source_rank, vec![room])?;
        Ok(Dispatched {
            x: out.x,
            scales: out.scales,
            rows,
            choices,
            source_token,
            source_rank,
            expert_counts,
            counts,
            by_expert,
            handle,
        })
    }
}

impl<E: Backend> Calls for Rank<E>
where
    E::LowHandle: Send + Sync + 'static,
    E::Dispatching: Send + 'static,
    E::Combining: Send + 'static,
    E::Event: Send,
{
    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn mask(&self) -> Vec<u32> {
        self.endpoint.mask().iter().map(|rank| rank.0).collect()
    }

    fn low_mask(&self) -> Vec<u32> {
        self.endpoint.low_latency_mask().iter().map(|rank| rank.0).collect()
    }

    fn stats(&self) -> Stats {
        self.endpoint.stats()
    }

    fn ways(&self) -> Ways {
        self.endpoint.ways()
    }

    fn is_arena_full(&self) -> bool {
        self.endpoint.is_arena_full()
    }

    fn arena_bytes(&self) -> u64 {
        self.endpoint.arena_bytes().unwrap_or_else(|| self.layout.arena().len)
    }

    fn stream(&self) -> usize {
        self.endpoint.stream()
    }

    unsafe fn ends_behind(&mut self, stream: usize) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { self.endpoint.ends_behind(stream) }
    }

    fn trim(&mut self) -> Result<(), Error> {
        self.endpoint.trim()
    }

    unsafe fn lasts(&mut self, stream: usize) {
        // SAFETY: as the caller promises.
        unsafe { self.endpoint.lasts(stream) };
    }

    unsafe fn follow(&mut self, stream: usize) -> Result<(), Error> {
        self.last = None;
        // SAFETY: as the caller promises.
        unsafe { self.endpoint.follow(stream) }
    }

    unsafe fn lead(&mut self, stream: usize) -> Result<(), Error> {
        match self.last.take() {
            // SAFETY: as the caller promises.
            Some(event) => unsafe { E::precede(&event, stream) },
            // SAFETY: as the caller promises.
            None => unsafe { self.endpoint.lead(stream) },
        }
    }

    unsafe fn dispatch(
        &mut self,
        x: &RawRows,
        routing: &RawRouting,
        options: &Dispatch,
        go_on: GoOn<'_>,
    ) -> Answer<Dispatched> {
        self.check_element(x)?;
        let tokens = x.rows as usize;
        let ranks = self.layout.topology().ranks() as usize;
        let carries = matches!(routing, RawRouting::TopK { .. });
        // SAFETY: as the caller promises, for this and what follows.
        let rows = unsafe { self.endpoint.rows_in(x) }?;
        let routing = match routing {
            RawRouting::TopK { topk_idx, topk_weights } => {
                // SAFETY: as above.
                let topk_idx = unsafe { self.endpoint.array_in(*topk_idx, tokens * self.topk(), false) }?;
                // SAFETY: as above.
                let topk_weights = unsafe { self.weights(*topk_weights, x.rows, false) }?;
                Routing::TopK { topk_idx, topk_weights }
            }
            RawRouting::Membership { in_rank, tokens_per_expert } => {
                // SAFETY: as above.
                let in_rank = unsafe { self.endpoint.array_in(*in_rank, tokens * ranks, false) }?;
                Routing::Membership { in_rank, tokens_per_expert: tokens_per_expert.clone() }
            }
        };
        let received = wait::<E, _>(self.endpoint.dispatch_with(&rows, &routing, options), go_on)?;
        self.dispatched(received, carries)
    }

    unsafe fn redispatch(
        &mut self,
        x: &RawRows,
        handle: &Handle,
        outbox: OutboxUse,
        go_on: GoOn<'_>,
    ) -> Answer<Dispatched> {
        self.check_element(x)?;
        // SAFETY: as the caller promises.
        let rows = unsafe { self.endpoint.rows_in(x) }?;
        let received = wait::<E, _>(self.endpoint.redispatch_with(&rows, handle, outbox), go_on)?;
        self.dispatched(received, false)
    }

    unsafe fn quantize(&mut self, x: &RawRows, go_on: GoOn<'_>) -> Answer<Tensor> {
        // SAFETY: as the caller promises.
        let rows = unsafe { self.endpoint.rows_in(x) }?;
        let quantized = wait::<E, _>(self.endpoint.quantized(&rows), go_on)?;
        Ok(self.endpoint.rows_out(quantized)?.x)
    }

    unsafe fn combine(&mut self, y: &RawRows, handle: &Handle, with: &RawCombine, go_on: GoOn<'_>) -> Answer<Combined> {
        let tokens = handle.tokens();
        // SAFETY: as the caller promises, for this and what follows.
        let rows = unsafe { self.endpoint.rows_in(y) }?;
        // SAFETY: as above.
        let topk_weights = unsafe { self.weights(with.topk_weights, handle.rows(), false) }?;
        let mut bias = [None, None];
        for (into, address) in bias.iter_mut().zip(with.bias) {
            let Some(address) = address else { continue };
            // SAFETY: as above.
            *into = Some(unsafe { self.endpoint.rows_in(&RawRows { address, rows: tokens, scales: None }) }?);
        }
        let options = Combine {
            topk_weights: topk_weights.as_ref(),
            bias: [bias[0].as_ref(), bias[1].as_ref()],
            outbox: with.outbox,
            remainder: with.remainder,
            ..Combine::default()
        };
        let combined = wait::<E, _>(self.endpoint.combine(&rows, handle, options), go_on)?;
        let topk = self.topk() as i64;
        self.last = Some(combined.event);
        let weights = combined.topk_weights;
        let topk_weights = match topk_weights {
            Some(_) => Some(self.endpoint.array_out(weights, vec![tokens.into(), topk])?),
            None => None,
        };
        Ok(Combined { x: self.endpoint.results_out(combined.x)?, topk_weights })
    }

    fn early(&mut self, rows: u32, multiprocessors: Option<u32>) -> Result<EarlyOut, Error> {
        self.endpoint.early(rows, multiprocessors)
    }

    unsafe fn send_dispatch(
        &mut self,
        batch: &RawBatch,
        early: Option<&(dyn Any + Send + Sync)>,
        given: Option<Given>,
        go_on: GoOn<'_>,
    ) -> Answer<(Box<dyn Any + Send>, LowRoom)> {
        // SAFETY: as the caller promises.
        let (rows, routing) = unsafe { self.low_batch(batch, None) }?;
        let room = self.endpoint.low_room(&self.layout, batch.order, given)?;
        let sent = match early {
            None => wait::<E, _>(self.endpoint.send_dispatch(&rows, &routing), go_on)?,
            Some(early) => wait::<E, _>(self.endpoint.send_dispatch_early(&rows, &routing, early), go_on)?,
        };
        let sent = Sent { sent, tokens: batch.x.rows };
        Ok((Box::new(SentDispatch { sent, into: room.into.clone() }), room))
    }

    unsafe fn receive_dispatch(&mut self, sent: &dyn Any, stats: Option<usize>, go_on: GoOn<'_>) -> Answer<AnyLow> {
        let SentDispatch::<E::Dispatching> { sent, into } = sent.downcast_ref().ok_or_else(|| foreign("dispatch"))?;
        let into = LowInto { stats, ..into.clone() };
        // SAFETY: as the caller promises of `stats`; the rest is room that was made for this.
        let (handle, told) = wait::<E, _>(unsafe { self.endpoint.receive_into(&sent.sent, &into) }, go_on)?;
        Ok(any_low(handle, told, sent.tokens))
    }

    unsafe fn send_combine(
        &mut self,
        y: usize,
        handle: &dyn Any,
        topk_weights: Option<usize>,
        ready: Option<&RawReady>,
        go_on: GoOn<'_>,
    ) -> Answer<Box<dyn Any + Send>> {
        let low: &Low<E::LowHandle> = handle.downcast_ref().ok_or_else(|| foreign("handle"))?;
        // Its counts say how much is read.
        self.endpoint.check_low_handle(&low.handle)?;
        if let Some(ready) = ready {
            // SAFETY: as the caller promises, for this and what follows.
            let weights = unsafe { self.weights(topk_weights, low.tokens, true) }?;
            // SAFETY: as above.
            let call = unsafe { self.endpoint.send_combine_ready(y, &low.handle, weights.as_ref(), ready) };
            return Ok(Box::new(Sent { sent: wait::<E, _>(call, go_on)?, tokens: low.tokens }));
        }
        // SAFETY: as the caller promises, for this and what follows.
        let rows = unsafe { self.endpoint.expert_rows_in(y, &low.told) }?;
        // SAFETY: as above.
        let weights = unsafe { self.weights(topk_weights, low.tokens, true) }?;
        let sent = wait::<E, _>(self.endpoint.send_combine(&rows, &low.handle, weights.as_ref()), go_on)?;
        Ok(Box::new(Sent { sent, tokens: low.tokens }))
    }

    unsafe fn receive_combine(&mut self, sent: &dyn Any, into: usize, go_on: GoOn<'_>) -> Answer<()> {
        let sent: &Sent<E::Combining> = sent.downcast_ref().ok_or_else(|| foreign("combine"))?;
        // SAFETY: as the caller promises.
        wait::<E, _>(unsafe { self.endpoint.receive_sums_into(&sent.sent, into, sent.tokens) }, go_on)
    }

    unsafe fn low_dispatch(
        &mut self,
        batch: &RawBatch,
        along: Option<&dyn Any>,
        stats: Option<usize>,
        given: Option<Given>,
        go_on: GoOn<'_>,
    ) -> Answer<(AnyLow, LowRoom)> {
        // SAFETY: as the caller promises, for this and what follows.
        let (rows, routing) = unsafe { self.low_batch(batch, along) }?;
        let mut room = self.endpoint.low_room(&self.layout, batch.order, given)?;
        (room.into.stats, room.into.most) = (stats, batch.most_rows);
        // SAFETY: as above, and the room is kept with what it is in.
        let call = unsafe { self.endpoint.dispatch_into(&rows, &routing, &room.into, batch.waits) };
        let (handle, told) = wait::<E, _>(call, go_on)?;
        let most = if batch.order.tells_rows() {
            Some(batch.most_rows.unwrap_or(batch.order.rows(&self.layout)?))
        } else {
            None
        };
        let told = LowTold { most, ..told };
        Ok((any_low(handle, told, batch.x.rows), room))
    }

    fn low_sizes(&self, order: LowOrder) -> Result<Vec<usize>, Error> {
        room::sizes(&self.layout, self.endpoint.low_scales(), order)
    }

    fn low_choices(&mut self, handle: &dyn Any) -> Answer<Tensor> {
        let low: &Low<E::LowHandle> = handle.downcast_ref().ok_or_else(|| foreign("handle"))?;
        let shape = vec![low.tokens.into(), self.topk() as i64];
        Ok(self.endpoint.array_out(E::choices_of(&low.handle), shape)?)
    }

    unsafe fn low_combine(
        &mut self,
        y: usize,
        handle: &dyn Any,
        topk_weights: Option<usize>,
        into: usize,
        go_on: GoOn<'_>,
    ) -> Answer<()> {
        let low: &Low<E::LowHandle> = handle.downcast_ref().ok_or_else(|| foreign("handle"))?;
        // Its counts say how much is read.
        self.endpoint.check_low_handle(&low.handle)?;
        // SAFETY: as the caller promises, for this and what follows.
        let rows = unsafe { self.endpoint.expert_rows_in(y, &low.told) }?;
        // SAFETY: as above. Both halves are enqueued when this returns: nothing reads the weights later.
        let weights = unsafe { self.weights(topk_weights, low.tokens, false) }?;
        // SAFETY: as above.
        let call = unsafe { self.endpoint.combine_into(&rows, &low.handle, weights.as_ref(), into, low.tokens) };
        wait::<E, _>(call, go_on)
    }

    fn mask_rank(&mut self, rank: u32, go_on: GoOn<'_>) -> Answer<()> {
        wait::<E, _>(self.endpoint.mask_rank(Number(rank)), go_on)
    }

    fn recover(&mut self, mask: &[u32], go_on: GoOn<'_>) -> Answer<()> {
        let mask: RankSet = mask.iter().copied().map(Number).collect();
        wait::<E, _>(self.endpoint.recover(&mask), go_on)
    }
}
