//! Dispatch: checks, counts, and the kernels that move the rows.

use std::sync::Arc;

use ep_core::engine::{Counts, Dispatch, Handle, Lease, Received, Replay, Routing, Scalar};
use ep_core::layout::{Block, KernelRings, Kind, NO_BASE};
use ep_core::plan::{Exchange, Plan, TopK, align_counts, tokens_of};
use ep_core::{Endpoint as _, Error, Placement, Rank, Rings};

use super::replayed::{Known, Replayed, foreign, replayed};
use super::{Array, CudaEndpoint, Rows, report};
use crate::args;
use crate::driver::Capture;
use crate::rank::{Call, Counting, DevicePlan, HostCounts};

type RoutingHere = Routing<Array<i64>, Array<f32>, Array<u8>>;

/// What a dispatch is made of, checked.
struct Batch<'a> {
    call: Call,
    rings: Rings,
    x: &'a Rows,
    tokens: u32,
    plan: &'a DevicePlan,
    /// Addresses of choices and weights; 0 where there are none.
    choices: (u64, u64),
    /// Rows to make room for.
    room: u32,
    /// Whether fewer may come.
    spare: bool,
}

/// Where a dispatch's results go.
struct Landing {
    block: Option<Block>,
    x: Option<Rows>,
    topk_idx: Array<i64>,
    topk_weights: Array<f32>,
    /// None in a cached dispatch, whose rows come from where they came from before.
    sources: Option<(Array<i32>, Array<i32>)>,
}

impl CudaEndpoint {
    pub(super) async fn dispatch_routing(
        &mut self,
        x: &Rows,
        routing: &RoutingHere,
        options: &Dispatch,
    ) -> Result<Received<Self>, Error> {
        let capture = self.begin()?;
        let rings = options.rings.unwrap_or(self.settings().rings());
        self.check_options(options, &rings)?;
        let tokens = self.check_routing(routing)?;
        self.check_rows("x", x, self.shape().row_bytes(), tokens)?;
        let membership = matches!(routing, Routing::Membership { .. });
        if capture.is_some() && (membership || !options.device_counts) {
            let what = if membership { "a captured dispatch of a membership" } else { "a captured dispatch" };
            return Err(Error::unsupported(what, "topk_idx, device_counts and worst_rows, or a cached dispatch"));
        }
        let (stream, ranks) = (Arc::clone(self.stream()), self.topology().ranks());
        let plan = DevicePlan::new(&stream, tokens, ranks, self.shape().experts())?;
        let counts = match options.device_counts {
            true => Some(Counts::<Self> {
                rows: Array::new(&stream, 1)?,
                experts: Array::new(&stream, self.layout().local_experts() as usize)?,
            }),
            false => None,
        };
        let counting = Counting {
            tokens,
            ticket: None,
            received: counts.as_ref().map_or(0, |counts| counts.rows.address()),
            of_expert: counts.as_ref().map_or(0, |counts| counts.experts.address()),
            alignment: options.expert_alignment,
            bound: options.worst_rows,
        };
        let kind = if membership { Kind::MembershipDispatch } else { Kind::Dispatch };
        let call = self.start(kind, &rings, plan.address(), capture.is_some());
        let told = self.exchange(call, routing, &plan, counting).await?;
        let rows = told.as_ref().map_or(options.worst_rows, |exchange| exchange.received(self.me));
        let mut expert_counts = Vec::new();
        if let Some(exchange) = &told {
            expert_counts = align_counts(exchange.expert_counts(), options.expert_alignment);
        }
        let room = if options.worst_rows > 0 { options.worst_rows } else { rows };
        let choices = match routing {
            Routing::TopK { topk_idx, topk_weights } => {
                (topk_idx.address(), topk_weights.as_ref().map_or(0, Array::address))
            }
            Routing::Membership { .. } => (0, 0),
        };
        let batch = Batch { call, rings, x, tokens, plan: &plan, choices, room, spare: told.is_none() || room > rows };
        let landing = self.landed(&batch, capture.as_ref())?;
        let event = self.end(capture.is_some()).await?;
        let sources = landing.sources.clone().ok_or_else(foreign)?;
        let kept = Replayed {
            plan,
            source_token: sources.0.clone(),
            source_rank: sources.1.clone(),
            shape: *self.shape(),
            ranks,
            stream,
            known: match told {
                Some(exchange) => Some(Known::from(exchange)),
                None => capture.is_none().then(Known::default),
            },
        };
        let replay = Replay { mark: self.mark(), op: self.last_op(), rings, tokens, rows, kept: Arc::new(kept) };
        let mut received = self.received(landing, sources, Handle::of_backend(replay), event);
        (received.expert_counts, received.counts) = (expert_counts, counts);
        self.keep_received(capture.as_ref(), x, &received)?;
        self.keep_for(capture.as_ref(), || match routing {
            Routing::TopK { topk_idx, topk_weights } => {
                topk_weights.iter().map(Array::memory).chain([topk_idx.memory()]).collect()
            }
            Routing::Membership { in_rank, .. } => vec![in_rank.memory()],
        })?;
        Ok(received)
    }

    pub(super) async fn dispatch_cached(&mut self, x: &Rows, handle: &Handle) -> Result<Received<Self>, Error> {
        let capture = self.begin()?;
        self.check_handle(handle)?;
        let kept = replayed(handle)?;
        self.check_rows("x", x, self.shape().row_bytes(), handle.tokens())?;
        let call = self.start(Kind::CachedDispatch, &handle.rings(), kept.plan.address(), capture.is_some());
        let batch = Batch {
            call,
            rings: handle.rings(),
            x,
            tokens: handle.tokens(),
            plan: &kept.plan,
            choices: (0, 0),
            room: handle.rows(),
            spare: false,
        };
        let landing = self.landed(&batch, capture.as_ref())?;
        let event = self.end(capture.is_some()).await?;
        let sources = (kept.source_token.clone(), kept.source_rank.clone());
        // A handle of this dispatch replays it as well as that of the first.
        let replay = Replay {
            mark: self.mark(),
            op: self.last_op(),
            rings: handle.rings(),
            tokens: handle.tokens(),
            rows: handle.rows(),
            kept: handle.shared_kept().ok_or_else(foreign)?,
        };
        let received = self.received(landing, sources, Handle::of_backend(replay), event);
        self.keep_received(capture.as_ref(), x, &received)?;
        Ok(received)
    }

    /// The number of the operation just started.
    const fn last_op(&self) -> u64 {
        self.op.saturating_sub(1)
    }

    fn check_options(&self, options: &Dispatch, rings: &Rings) -> Result<(), Error> {
        self.layout().check_rings(rings)?;
        if options.expert_alignment == 0 {
            return Err(Error::invalid("expert alignment", 0, "at least 1"));
        }
        let (ranks, tokens) = (self.topology().ranks(), self.shape().max_tokens());
        let most = u64::from(ranks) * u64::from(tokens);
        if u64::from(options.worst_rows) > most {
            let limit = format_args!("at most {most}, of {ranks} ranks with {tokens} tokens");
            return Err(Error::invalid("worst-case rows", options.worst_rows, limit));
        }
        options.check_counts()
    }

    /// Tokens of a routing whose arrays have the right lengths. Choices are looked at by the layout kernel.
    fn check_routing(&self, routing: &RoutingHere) -> Result<u32, Error> {
        match routing {
            Routing::TopK { topk_idx, topk_weights } => {
                if let Some(weights) = topk_weights.as_ref().filter(|weights| weights.len() != topk_idx.len()) {
                    let limit = format_args!("{}, that of topk_idx", topk_idx.len());
                    return Err(Error::invalid("length of topk_weights", weights.len(), limit));
                }
                tokens_of(topk_idx.len(), self.shape().topk() as usize, "topk_idx", "topk")
            }
            Routing::Membership { in_rank, tokens_per_expert } => {
                let tokens = tokens_of(in_rank.len(), self.topology().ranks() as usize, "in_rank", "ranks")?;
                let experts = self.shape().experts();
                if tokens_per_expert.len() != experts as usize {
                    let limit = format_args!("{experts} experts");
                    return Err(Error::invalid("length of tokens_per_expert", tokens_per_expert.len(), limit));
                }
                match tokens_per_expert.iter().position(|&count| count > tokens) {
                    None => Ok(tokens),
                    Some(expert) => {
                        let what = format_args!("tokens of expert {expert}");
                        let limit = format_args!("at most the {tokens} tokens");
                        Err(Error::invalid(what, tokens_per_expert[expert], limit))
                    }
                }
            }
        }
    }

    /// Plans on the device and exchanges counts; waits for them, unless they stay there.
    async fn exchange(
        &mut self,
        call: Call,
        routing: &RoutingHere,
        plan: &DevicePlan,
        counting: Counting,
    ) -> Result<Option<Exchange>, Error> {
        let tokens = counting.tokens;
        match routing {
            Routing::TopK { topk_idx, .. } => self.device.plan(call, topk_idx.address(), 0, tokens, plan)?,
            Routing::Membership { in_rank, tokens_per_expert } => {
                self.device.plan(call, 0, in_rank.address(), tokens, plan)?;
                let mut choices = tokens_per_expert.clone();
                let local = self.layout().local_experts() as usize;
                for (rank, choices) in (0..).map(Rank).zip(choices.chunks_exact_mut(local)) {
                    if self.mask.contains(rank) {
                        choices.fill(0);
                    }
                }
                self.device.set_choices(&choices)?;
            }
        }
        if counting.received != 0 {
            self.device.exchange(call, plan, counting)?;
            return Ok(None);
        }
        self.tickets += 1;
        let (ticket, me) = (self.tickets, self.me);
        self.device.exchange(call, plan, Counting { ticket: Some(ticket), ..counting })?;
        let answer = self.until(|device| match report::failure(&device.report, me) {
            Some(error) => Err(error),
            None => Ok(device.host_counts(ticket)),
        });
        let HostCounts { op, rows, tokens, experts } = match answer.await {
            Ok(counts) => counts,
            Err(error @ Error::Invalid { .. }) => return Err(self.refuse(routing, error)),
            Err(error) => return Err(error),
        };
        self.op = op + 1;
        Exchange::new(rows, tokens, experts).map(Some)
    }

    /// The kernels have found bad choices: nothing has moved, and the operation's number is free.
    fn refuse(&mut self, routing: &RoutingHere, error: Error) -> Error {
        self.device.report.clear();
        self.poisoned = None;
        self.op -= 1;
        let Routing::TopK { topk_idx, .. } = routing else { return error };
        let Ok(topk_idx) = topk_idx.to_vec(self.stream()) else { return error };
        // Named as on the host.
        let planned = Plan::of_topk(self.shape(), self.topology().ranks(), &self.mask, TopK { topk_idx: &topk_idx });
        planned.err().unwrap_or(error)
    }

    /// Takes memory for what comes, and enqueues the kernels that bring it.
    fn landed(&mut self, batch: &Batch<'_>, capture: Option<&Capture>) -> Result<Landing, Error> {
        let landing = self.landing(batch);
        let moved = landing.and_then(|landing| self.move_rows(batch, &landing).map(|()| landing));
        if moved.is_err() && capture.is_some() {
            // Peers were told nothing.
            self.granted.take().into_iter().for_each(|block| self.arena.give(&block));
        }
        moved
    }

    /// Lets a graph keep what a dispatch of `x` uses and gives.
    fn keep_received(&mut self, capture: Option<&Capture>, x: &Rows, received: &Received<Self>) -> Result<(), Error> {
        if let Some(lease) = received.x.lease().filter(|_| capture.is_some()) {
            self.pin(lease.held());
        }
        self.keep_for(capture, || {
            let counts = received.counts.iter().flat_map(|counts| [counts.rows.memory(), counts.experts.memory()]);
            let arrays = [received.topk_idx.memory(), received.topk_weights.memory()];
            let all = [x.memory(), received.x.memory(), Arc::new(received.handle.clone()) as _];
            all.into_iter().chain(arrays).chain(counts).collect()
        })
    }

    /// Room for `len` numbers, undefined; of none it costs nothing.
    pub(super) fn room_for<T: Scalar>(&self, len: usize) -> Result<Array<T>, Error> {
        match len {
            0 => Ok(Array::of_memory(Arc::clone(&self.device.nothing), 0)),
            _ => Array::new(self.stream(), len),
        }
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
            None => Some(Rows::landing(&stream, batch.room, &row)?),
        };
        let choices = if batch.choices.0 != 0 { batch.room as usize * row.topk() as usize } else { 0 };
        let sources = match batch.call.kind {
            Kind::CachedDispatch => None,
            _ => Some((Array::new(&stream, batch.room as usize)?, Array::new(&stream, batch.room as usize)?)),
        };
        let landing = Landing {
            block: self.granted,
            x,
            topk_idx: self.room_for(choices)?,
            topk_weights: self.room_for(choices)?,
            sources,
        };
        if landing.block.is_none() && batch.spare {
            // Rows beyond those that come name no expert, token or rank; received ones are written over it.
            stream.fill(landing.topk_idx.address(), 0xff, choices * 8)?;
            stream.fill(landing.topk_weights.address(), 0, choices * 4)?;
            if let Some((tokens, ranks)) = &landing.sources {
                stream.fill(tokens.address(), 0xff, batch.room as usize * 4)?;
                stream.fill(ranks.address(), 0xff, batch.room as usize * 4)?;
            }
        }
        Ok(landing)
    }

    /// Enqueues the kernels of a batch whose counts are known.
    fn move_rows(&mut self, batch: &Batch<'_>, landing: &Landing) -> Result<(), Error> {
        let direct = self.settings().placement() == Placement::Direct;
        let fresh = batch.call.kind != Kind::CachedDispatch;
        let plan = batch.plan;
        let (topk_idx, topk_weights) = batch.choices;
        let (scales, strides) = self.scales(batch.x);
        let (out_token, out_rank) =
            landing.sources.as_ref().map_or((0, 0), |(tokens, ranks)| (tokens.address(), ranks.address()));
        let some = |array: &Array<_>| if topk_idx == 0 { 0 } else { array.address() };
        let idx = some(&landing.topk_idx);
        let weights = if topk_idx == 0 { 0 } else { landing.topk_weights.address() };
        let ring = args::DispatchRing {
            rings: KernelRings::from(&batch.rings),
            x: self.address(batch.x),
            x_stride: batch.x.stride() as u64,
            scales,
            scales_token: strides.row,
            scales_word: strides.word,
            position: plan.position.address(),
            topk_idx,
            topk_weights,
            first_of: plan.first_of(),
            out: landing.x.as_ref().map_or(0, |x| self.address(x)),
            out_scales: landing.x.as_ref().map_or(0, |x| self.scales(x).0),
            out_idx: idx,
            out_weights: weights,
            out_token,
            out_rank,
            tokens: batch.tokens,
            notes: direct.into(),
        };
        if direct {
            let args = args::Dispatch {
                ring,
                first_at: plan.first_at(),
                base: landing.block.as_ref().map_or(NO_BASE, |block| block.base().0),
                base_rows: landing.block.as_ref().map_or(0, Block::rows),
                // Of a cached dispatch everybody knows what headers would say.
                headers: fresh.into(),
                ..args::Dispatch::default()
            };
            self.device.dispatch(batch.call, &args)?;
        } else {
            self.device.dispatch_ring(batch.call, &ring)?;
        }
        if let Some(block) = landing.block.filter(|_| fresh) {
            let args = args::Unpack {
                base: block.base().0,
                first_of: plan.first_of(),
                topk_idx: idx,
                topk_weights: weights,
                source_token: out_token,
                source_rank: out_rank,
                op: 0,
                rows: block.rows(),
                reserved: 0,
            };
            self.device.unpack(batch.call, &args)?;
        }
        Ok(())
    }

    /// What the user gets, without counts.
    fn received(
        &mut self,
        landing: Landing,
        (source_token, source_rank): (Array<i32>, Array<i32>),
        handle: Handle,
        event: super::Event,
    ) -> Received<Self> {
        let Landing { x, topk_idx, topk_weights, .. } = landing;
        let x = match (x, self.granted.take()) {
            (Some(x), _) => x,
            (None, block) => {
                let block = block.unwrap_or_else(|| self.layout().row().block(ep_core::port::Offset(0), 0));
                Rows::Leased(Lease::new(&self.arena, block, self.window.clone()))
            }
        };
        let (rows, expert_counts, counts) = (handle.rows(), Vec::new(), None);
        Received { x, rows, topk_idx, topk_weights, source_token, source_rank, expert_counts, counts, handle, event }
    }
}
