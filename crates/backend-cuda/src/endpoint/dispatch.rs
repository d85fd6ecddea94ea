//! Dispatch: checks, counts, and the kernels that move the rows.

use std::sync::Arc;

use ep_core::engine::{Dispatch, Handle, Lease, Received, Replay, Routing};
use ep_core::layout::{Block, KernelRings, Kind, NO_BASE};
use ep_core::plan::{Exchange, Membership, Plan, TopK, align_counts};
use ep_core::{Endpoint as _, Error, Placement, Rings};

use super::{Array, CudaEndpoint, Replayed, Rows, report};
use crate::args;
use crate::rank::{Call, DevicePlan};

type RoutingHere = Routing<Array<i64>, Array<f32>, Array<u8>>;

/// What a dispatch is made of, checked.
struct Batch<'a> {
    call: Call,
    rings: Rings,
    x: &'a Rows,
    plan: Arc<Plan>,
    exchange: Exchange,
    device_plan: &'a DevicePlan,
    /// Addresses of choices and weights; 0 where there are none.
    choices: (u64, u64),
    /// Rows to make room for.
    room: u32,
}

/// Where a dispatch's results go.
struct Landing {
    block: Option<Block>,
    x: Option<Rows>,
    topk_idx: Array<i64>,
    topk_weights: Array<f32>,
    source_token: Array<i32>,
    source_rank: Array<i32>,
}

impl CudaEndpoint {
    pub(super) async fn dispatch_routing(
        &mut self,
        x: &Rows,
        routing: &RoutingHere,
        options: &Dispatch,
    ) -> Result<Received<Self>, Error> {
        self.ready()?;
        let rings = options.rings.unwrap_or(self.settings().rings());
        self.layout().check_rings(&rings)?;
        if options.expert_alignment == 0 {
            return Err(Error::invalid("expert alignment", 0, "at least 1"));
        }
        let (ranks, tokens) = (self.topology().ranks(), self.shape().max_tokens());
        let most = u64::from(ranks) * u64::from(tokens);
        if u64::from(options.worst_rows) > most {
            let limit = format_args!("at most {most}, of {ranks} ranks with {tokens} tokens");
            return Err(Error::invalid("worst-case rows", options.worst_rows, limit));
        }
        let plan = Arc::new(self.plan(routing)?);
        self.check_rows("x", x, self.shape().row_bytes(), plan.tokens())?;
        let device_plan = DevicePlan::new(self.stream(), plan.tokens(), ranks)?;
        let kind = if matches!(routing, Routing::TopK { .. }) { Kind::Dispatch } else { Kind::MembershipDispatch };
        let call = self.start(kind, &rings, None);
        let exchange = self.exchange(call, routing, &plan, &device_plan).await?;
        let rows = exchange.received(self.me);
        if options.worst_rows > 0 && rows > options.worst_rows {
            return Err(self.no_room(call, options.worst_rows, rows).await);
        }
        let choices = match routing {
            Routing::TopK { topk_idx, topk_weights } => {
                (topk_idx.address(), topk_weights.as_ref().map_or(0, Array::address))
            }
            Routing::Membership { .. } => (0, 0),
        };
        let room = if options.worst_rows > 0 { options.worst_rows } else { rows };
        let expert_counts = align_counts(exchange.expert_counts(), options.expert_alignment);
        for (sum, &count) in self.stats.expert_rows.iter_mut().zip(exchange.expert_counts()) {
            *sum += u64::from(count);
        }
        let batch = Batch { call, rings, x, plan, exchange, device_plan: &device_plan, choices, room };
        let landing = self.landing(&batch)?;
        self.move_rows(&batch, &landing)?;
        let event = self.end().await?;
        let Batch { plan, exchange, .. } = batch;
        self.count_rows(&exchange, true);
        let kept = Replayed {
            plan: device_plan,
            source_token: landing.source_token.clone(),
            source_rank: landing.source_rank.clone(),
        };
        let replay = Replay { mark: self.mark(), op: self.op - 1, rings, plan, exchange, rows, kept: Arc::new(kept) };
        let handle = Handle::of_backend(replay);
        Ok(self.received(landing, rows, expert_counts, handle, event))
    }

    pub(super) async fn dispatch_cached(&mut self, x: &Rows, handle: &Handle) -> Result<Received<Self>, Error> {
        self.ready()?;
        self.check_handle(handle)?;
        let kept = kept(handle)?;
        self.check_rows("x", x, self.shape().row_bytes(), handle.tokens())?;
        let call = self.start(Kind::CachedDispatch, &handle.rings(), Some(handle));
        let batch = Batch {
            call,
            rings: handle.rings(),
            x,
            plan: handle.shared_plan(),
            exchange: handle.exchange().clone(),
            device_plan: &kept.plan,
            choices: (0, 0),
            room: handle.rows(),
        };
        let landing = self.landing(&batch)?;
        self.move_rows(&batch, &landing)?;
        let event = self.end().await?;
        self.count_rows(handle.exchange(), true);
        // The rows come from where they came from before.
        let landing =
            Landing { source_token: kept.source_token.clone(), source_rank: kept.source_rank.clone(), ..landing };
        // A handle of this dispatch replays it as well as that of the first.
        let replay = Replay {
            mark: self.mark(),
            op: self.op - 1,
            rings: handle.rings(),
            plan: handle.shared_plan(),
            exchange: handle.exchange().clone(),
            rows: handle.rows(),
            kept: handle.shared_kept().ok_or_else(foreign)?,
        };
        let replayed = Handle::of_backend(replay);
        Ok(self.received(landing, handle.rows(), Vec::new(), replayed, event))
    }

    /// Plans a routing on the host: the handle tells the user of it, and bad choices are named before anything moves.
    fn plan(&self, routing: &RoutingHere) -> Result<Plan, Error> {
        let ranks = self.topology().ranks();
        let stream = self.stream();
        match routing {
            Routing::TopK { topk_idx, topk_weights } => {
                if let Some(weights) = topk_weights.as_ref().filter(|weights| weights.len() != topk_idx.len()) {
                    let limit = format_args!("{}, that of topk_idx", topk_idx.len());
                    return Err(Error::invalid("length of topk_weights", weights.len(), limit));
                }
                Plan::of_topk(self.shape(), ranks, &self.mask, TopK { topk_idx: &topk_idx.to_vec(stream)? })
            }
            Routing::Membership { in_rank, tokens_per_expert } => {
                let in_rank = in_rank.to_vec(stream)?;
                let membership = Membership { in_rank: &in_rank, tokens_per_expert };
                let plan = Plan::of_membership(self.shape(), ranks, &self.mask, membership)?;
                match tokens_per_expert.iter().position(|&count| count > plan.tokens()) {
                    None => Ok(plan),
                    Some(expert) => {
                        let what = format_args!("tokens of expert {expert}");
                        let limit = format_args!("at most the {} tokens", plan.tokens());
                        Err(Error::invalid(what, tokens_per_expert[expert], limit))
                    }
                }
            }
        }
    }

    /// Plans on the device, exchanges counts and waits for them.
    async fn exchange(
        &mut self,
        call: Call,
        routing: &RoutingHere,
        plan: &Plan,
        device_plan: &DevicePlan,
    ) -> Result<Exchange, Error> {
        let (topk_idx, in_rank) = match routing {
            Routing::TopK { topk_idx, .. } => (topk_idx.address(), 0),
            Routing::Membership { in_rank, .. } => (0, in_rank.address()),
        };
        self.device.plan(call, topk_idx, in_rank, plan.tokens(), device_plan)?;
        if in_rank != 0 {
            self.device.set_choices(plan.experts())?;
        }
        self.device.exchange(call, plan.tokens(), device_plan)?;
        let (op, me) = (self.op - 1, self.me);
        self.until(|device| {
            if let Some(error) = report::failure(&device.report, me) {
                return Err(error);
            }
            Ok((device.counts.long(0) == op).then_some(()))
        })
        .await?;
        let ranks = self.topology().ranks() as usize;
        let numbers = |first: usize, count: usize| -> Vec<u32> {
            (first..first + count).map(|at| self.device.counts.word(8 + 4 * at)).collect()
        };
        let local = self.layout().local_experts() as usize;
        let (tokens, rows) = (numbers(0, ranks), numbers(ranks, ranks * ranks));
        Exchange::new(rows, tokens, numbers(ranks + ranks * ranks, local))
    }

    /// More rows come than there is room for: tells the others, and what to tell the user.
    async fn no_room(&mut self, call: Call, room: u32, rows: u32) -> Error {
        let told = self.device.fail(call, report::WORST_ROWS, room.into(), rows.into());
        if let Err(error) = told {
            return error.into();
        }
        let me = self.me;
        let told = self.until(|device| Ok(report::failure(&device.report, me))).await;
        let error = told.unwrap_or_else(|error| error);
        self.fail(error)
    }

    /// Takes memory for what comes.
    fn landing(&mut self, batch: &Batch<'_>) -> Result<Landing, Error> {
        let row = *self.layout().row();
        if self.settings().placement() == Placement::Direct {
            self.granted = self.arena.take(&row, batch.room);
        }
        let stream = Arc::clone(self.stream());
        let x = match self.granted {
            Some(_) => None,
            None => Some(Rows::new(&stream, batch.room, row.payload_bytes() as usize)?),
        };
        let choices = if batch.choices.0 != 0 { batch.room as usize * row.topk() as usize } else { 0 };
        let landing = Landing {
            block: self.granted,
            x,
            topk_idx: Array::new(&stream, choices)?,
            topk_weights: Array::new(&stream, choices)?,
            source_token: Array::new(&stream, batch.room as usize)?,
            source_rank: Array::new(&stream, batch.room as usize)?,
        };
        if landing.block.is_none() && batch.room > batch.exchange.received(self.me) {
            // Rows beyond those that come name no expert, token or rank; received ones are written over it.
            stream.fill(landing.topk_idx.address(), 0xff, choices * 8)?;
            stream.fill(landing.topk_weights.address(), 0, choices * 4)?;
            stream.fill(landing.source_token.address(), 0xff, batch.room as usize * 4)?;
            stream.fill(landing.source_rank.address(), 0xff, batch.room as usize * 4)?;
        }
        Ok(landing)
    }

    /// Enqueues the kernels of a batch whose counts are known.
    fn move_rows(&mut self, batch: &Batch<'_>, landing: &Landing) -> Result<(), Error> {
        let direct = self.settings().placement() == Placement::Direct;
        let fresh = batch.call.kind != Kind::CachedDispatch;
        let (x, plan) = (self.address(batch.x), batch.device_plan);
        let (topk_idx, topk_weights) = batch.choices;
        let position = plan.position.address();
        let (tokens, x_stride) = (batch.plan.tokens(), batch.x.stride() as u64);
        if direct {
            let args = args::Dispatch {
                x,
                x_stride,
                position,
                topk_idx,
                topk_weights,
                first_at: plan.first_at(),
                base: landing.block.as_ref().map_or(NO_BASE, |block| block.base().0),
                base_rows: landing.block.as_ref().map_or(0, Block::rows),
                tokens,
                // Of a cached dispatch everybody knows what headers would say.
                headers: fresh.into(),
                ..args::Dispatch::default()
            };
            self.device.dispatch(batch.call, args)?;
        }
        let some = |array: &Array<_>| if topk_idx == 0 { 0 } else { array.address() };
        let idx = some(&landing.topk_idx);
        let weights = if topk_idx == 0 { 0 } else { landing.topk_weights.address() };
        let ring = args::DispatchRing {
            rings: KernelRings::from(&batch.rings),
            x,
            x_stride,
            scales: 0,
            scales_token: 0,
            scales_group: 0,
            position,
            topk_idx,
            topk_weights,
            first_of: plan.first_of(),
            out: landing.x.as_ref().map_or(0, |x| self.address(x)),
            out_idx: idx,
            out_weights: weights,
            out_token: landing.source_token.address(),
            out_rank: landing.source_rank.address(),
            tokens,
            notes: direct.into(),
        };
        self.device.dispatch_ring(batch.call, &ring)?;
        if let Some(block) = landing.block.filter(|_| fresh) {
            let args = args::Unpack {
                base: block.base().0,
                first_of: plan.first_of(),
                topk_idx: idx,
                topk_weights: weights,
                source_token: landing.source_token.address(),
                source_rank: landing.source_rank.address(),
                op: 0,
                rows: block.rows(),
                reserved: 0,
            };
            self.device.unpack(batch.call, &args)?;
        }
        Ok(())
    }

    /// What the user gets.
    fn received(
        &mut self,
        landing: Landing,
        rows: u32,
        expert_counts: Vec<u32>,
        handle: Handle,
        event: super::Event,
    ) -> Received<Self> {
        let Landing { x, topk_idx, topk_weights, source_token, source_rank, .. } = landing;
        let bytes = self.shape().row_bytes();
        let x = match (x, self.granted.take()) {
            (Some(x), _) => x,
            (None, block) => {
                let block = block.unwrap_or_else(|| self.layout().row().block(ep_core::port::Offset(0), 0));
                Rows::Leased(Lease::new(&self.arena, block, bytes, self.window.clone()))
            }
        };
        Received { x, rows, topk_idx, topk_weights, source_token, source_rank, expert_counts, handle, event }
    }
}

/// What this backend keeps with its handles.
pub(super) fn kept(handle: &Handle) -> Result<&Replayed, Error> {
    handle.kept().ok_or_else(foreign)
}

fn foreign() -> Error {
    Error::invalid("handle", "of another backend", "one that this endpoint's dispatch gave")
}
