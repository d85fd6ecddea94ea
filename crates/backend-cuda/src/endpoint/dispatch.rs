//! Dispatch: checks, counts, and the kernels that move the rows.

use std::sync::Arc;

use ep_core::engine::{Counts, Dispatch, Handle, Lease, Received, Replay, Routing, Scalar};
use ep_core::layout::{Block, KernelRings, Kind, NO_BASE, OPEN_ROOM};
use ep_core::plan::{Exchange, Plan, Repeats, TopK, align_counts};
use ep_core::settings::OutboxSteps;
use ep_core::{Endpoint as _, Error, OutboxUse, Placement, Rank, Rings};

use super::by_expert::{Placed, Spreading};
use super::replayed::{Known, Replayed};
use super::{Array, CudaEndpoint, Rows, report};
use crate::args;
use crate::driver::Capture;
use crate::rank::{Aside, Call, Chosen, Counting, DevicePlan, HostCounts};

type RoutingHere = Routing<Array<i64>, Array<f32>, Array<u8>>;

/// What a dispatch is made of, checked.
struct Batch<'a> {
    call: Call,
    rings: Rings,
    /// What it uses of outboxes, where its rows are pulled from some.
    pulled: Option<OutboxSteps>,
    x: &'a Rows,
    tokens: u32,
    plan: &'a DevicePlan,
    /// Addresses of choices and weights; 0 where there are none.
    choices: (u64, u64),
    /// `[room]`: token and rank of each row at its source. A cached dispatch has those of the first, and leaves them as they are.
    sources: (Array<i32>, Array<i32>),
    /// Rows to make room for.
    room: u32,
    /// Whether fewer may come.
    spare: bool,
    /// Whether rows beyond those that come become zeros.
    zero_spare: bool,
    /// Where they are to stand by expert.
    placed: Option<&'a Placed>,
}

/// Where a dispatch's results go.
struct Landing {
    block: Option<Block>,
    x: Option<Rows>,
    topk_idx: Array<i64>,
    topk_weights: Array<f32>,
    /// Where rows are to stand by expert, and the weights of their choices where these travel.
    by_expert: Option<(Rows, Option<Array<f32>>)>,
}

impl CudaEndpoint {
    pub(super) async fn dispatch_routing(
        &mut self,
        x: &Rows,
        routing: &RoutingHere,
        options: &Dispatch,
    ) -> Result<Received<Self>, Error> {
        let capture = self.begin()?;
        let rings = self.desk.check_options(options)?;
        let slots = self.desk.check_by_expert(options, matches!(routing, Routing::TopK { .. }))?;
        let tokens = self.check_routing(routing)?;
        self.desk.check_x(x.extent(), tokens)?;
        self.check_home("x", x)?;
        // Whoever forwards rows has room for so many of each source, where nobody's host hears of the others' batches.
        let most = self.shape().max_tokens();
        if self.far().is_some() && options.device_counts && tokens > most {
            let limit = format_args!("at most {most}, max_tokens, between nodes with counts on the device");
            return Err(Error::invalid("tokens", tokens, limit));
        }
        let membership = matches!(routing, Routing::Membership { .. });
        if capture.is_some() && (membership || !options.device_counts) {
            let what = if membership { "a captured dispatch of a membership" } else { "a captured dispatch" };
            return Err(Error::unsupported(what, "topk_idx, device_counts and worst_rows, or a cached dispatch"));
        }
        let (stream, ranks) = (Arc::clone(self.stream()), self.topology().ranks());
        let mut plan = DevicePlan::new(&stream, tokens, ranks, self.shape().experts())?;
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
            room: match counts {
                // The host does not hear where the batch has room.
                Some(_) => OPEN_ROOM,
                // A rank that was given up, and goes on, stores into its rings here, over which an outbox would lie.
                None if !self.desk.mask().is_empty() => OPEN_ROOM,
                None => self.desk.arena().said_room(self.layout(), options.worst_rows),
            },
        };
        let kind = if membership { Kind::MembershipDispatch } else { Kind::Dispatch };
        let call = self.start(kind, &rings, plan.address(), capture.is_some());
        let told = self.exchange(call, routing, &plan, counting, options.repeats).await?;
        let (told, outboxes) = told.map_or((None, false), |(exchange, outboxes)| (Some(exchange), outboxes));
        if self.far().is_some() {
            // Where the host does not hear of the others' batches, they may be as large as `max_tokens` allows.
            let tokens = |rank| told.as_ref().map_or(most, |exchange: &Exchange| exchange.tokens(rank));
            plan.fan_out(self.topology(), self.desk.rank(), tokens)?;
        }
        let rows = told.as_ref().map_or(options.worst_rows, |exchange| exchange.received(self.desk.rank()));
        let mut expert_counts = Vec::new();
        if let Some(exchange) = &told {
            expert_counts = align_counts(exchange.expert_counts(), options.expert_alignment);
        }
        let (layout, alignment) = (self.layout(), options.expert_alignment);
        let placed = match (&told, slots) {
            (Some(exchange), _) if options.by_expert => {
                Some(Placed::counted(&stream, layout, exchange, rows, alignment)?)
            }
            (None, Some(slots)) => Some(Placed::uncounted(&stream, layout, (rows, slots), alignment)?),
            _ => None,
        };
        let room = if options.worst_rows > 0 { options.worst_rows } else { rows };
        let choices = match routing {
            Routing::TopK { topk_idx, topk_weights } => {
                (topk_idx.address(), topk_weights.as_ref().map_or(0, Array::address))
            }
            Routing::Membership { .. } => (0, 0),
        };
        let sources = (Array::new(&stream, room as usize)?, Array::new(&stream, room as usize)?);
        let spare = told.is_none() || room > rows;
        let (cut, pulled) = self.way(kind, rings, outboxes, options.outbox);
        let batch = Batch {
            call,
            rings: cut,
            pulled,
            x,
            tokens,
            plan: &plan,
            choices,
            sources: sources.clone(),
            room,
            spare,
            zero_spare: options.zero_spare,
            placed: placed.as_ref(),
        };
        let landing = self.landed(&batch, capture.as_ref())?;
        let event = self.end(capture.is_some()).await?;
        let kept = Replayed {
            plan,
            source_token: sources.0.clone(),
            source_rank: sources.1.clone(),
            shape: *self.shape(),
            ranks,
            rows,
            zero_spare: options.zero_spare,
            placed,
            known: match told {
                Some(exchange) => Some(Known::from(exchange)),
                None => capture.is_none().then(Known::default),
            },
        };
        let (mark, op) = (self.desk.mark(), self.last_op());
        let replay = Replay { mark, op, rings, outboxes, tokens, rows, kept: Arc::new(kept) };
        let mut received = self.received(landing, sources, Handle::of_backend(replay), event, capture.as_ref())?;
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

    pub(super) async fn dispatch_cached(
        &mut self,
        x: &Rows,
        handle: &Handle,
        outbox: OutboxUse,
    ) -> Result<Received<Self>, Error> {
        let capture = self.begin()?;
        self.desk.check_handle(handle)?;
        outbox.check()?;
        let kept: &Replayed = handle.kept()?;
        self.desk.check_x(x.extent(), handle.tokens())?;
        self.check_home("x", x)?;
        let call = self.start(Kind::CachedDispatch, &handle.rings(), kept.plan.address(), capture.is_some());
        let (rings, pulled) = self.way(Kind::CachedDispatch, handle.rings(), handle.outboxes(), outbox);
        let batch = Batch {
            call,
            rings,
            pulled,
            x,
            tokens: handle.tokens(),
            plan: &kept.plan,
            choices: (0, 0),
            sources: (kept.source_token.clone(), kept.source_rank.clone()),
            room: handle.rows(),
            spare: false,
            zero_spare: kept.zero_spare,
            placed: kept.placed.as_ref(),
        };
        let landing = self.landed(&batch, capture.as_ref())?;
        let event = self.end(capture.is_some()).await?;
        let sources = batch.sources;
        // A handle of this dispatch replays it as well as that of the first.
        let replay = Replay {
            mark: self.desk.mark(),
            op: self.last_op(),
            rings: handle.rings(),
            outboxes: handle.outboxes(),
            tokens: handle.tokens(),
            rows: handle.rows(),
            kept: handle.shared_kept()?,
        };
        let received = self.received(landing, sources, Handle::of_backend(replay), event, capture.as_ref())?;
        self.keep_received(capture.as_ref(), x, &received)?;
        Ok(received)
    }

    /// Whether rows may be placed where they are to lie.
    fn places(&self) -> bool {
        self.settings().placement() == Placement::Direct
    }

    /// Whether an operation's rows lie in outboxes: always, or since its dispatch found no room.
    pub(super) fn is_pulled(&self, outboxes: bool) -> bool {
        self.settings().placement() == Placement::Pulled || (outboxes && self.settings().outboxes().is_some())
    }

    /// How the memory is cut that an operation moves its rows through, and if that is outboxes, what it uses of them: where its dispatch went
    /// through those for lack of room, they are the communicator's own.
    pub(super) fn way(
        &mut self,
        kind: Kind,
        rings: Rings,
        outboxes: bool,
        used: OutboxUse,
    ) -> (Rings, Option<OutboxSteps>) {
        let cut = self.settings().outboxes().filter(|_| outboxes).unwrap_or(rings);
        if !self.is_pulled(outboxes) {
            return (cut, None);
        }
        let steps = self.layout().outbox_steps(kind, &cut, used);
        self.desk.ways.in_outboxes(&steps);
        (cut, Some(steps))
    }

    /// Tokens of a routing whose arrays have the right lengths. Choices are looked at by the kernel of positions.
    fn check_routing(&self, routing: &RoutingHere) -> Result<u32, Error> {
        match routing {
            Routing::TopK { topk_idx, topk_weights } => {
                topk_idx.check_home("topk_idx", self.stream())?;
                topk_weights.iter().try_for_each(|weights| weights.check_home("topk_weights", self.stream()))?;
                self.desk.check_choices(topk_idx.len(), topk_weights.as_ref().map(Array::len))
            }
            Routing::Membership { in_rank, tokens_per_expert } => {
                in_rank.check_home("in_rank", self.stream())?;
                self.desk.check_membership(in_rank.len(), tokens_per_expert)
            }
        }
    }

    /// Plans on the device and exchanges counts; waits for them, unless they stay there: and whether the batch goes through outboxes, because
    /// some arena has no room.
    async fn exchange(
        &mut self,
        call: Call,
        routing: &RoutingHere,
        plan: &DevicePlan,
        counting: Counting,
        repeats: bool,
    ) -> Result<Option<(Exchange, bool)>, Error> {
        let tokens = counting.tokens;
        match routing {
            Routing::TopK { topk_idx, .. } => {
                let chosen = Chosen { topk_idx: topk_idx.address(), in_rank: 0, repeats };
                // SAFETY: an array of the own stream's memory, for so many tokens.
                unsafe { self.device.plan(call, chosen, tokens, plan) }?;
            }
            Routing::Membership { in_rank, tokens_per_expert } => {
                let chosen = Chosen { topk_idx: 0, in_rank: in_rank.address(), repeats: false };
                // SAFETY: as above.
                unsafe { self.device.plan(call, chosen, tokens, plan) }?;
                let mut choices = tokens_per_expert.clone();
                let local = self.layout().local_experts() as usize;
                for (rank, choices) in (0..).map(Rank).zip(choices.chunks_exact_mut(local)) {
                    if self.desk.mask().contains(rank) {
                        choices.fill(0);
                    }
                }
                self.device.set_choices(&choices)?;
            }
        }
        if counting.received != 0 {
            // SAFETY: counts go to arrays of the own stream's memory.
            unsafe { self.device.exchange(call, plan, counting) }?;
            return Ok(None);
        }
        self.tickets += 1;
        let (ticket, me) = (self.tickets, self.desk.rank());
        // SAFETY: as above.
        unsafe { self.device.exchange(call, plan, Counting { ticket: Some(ticket), ..counting }) }?;
        let answer = self.until(|device| match report::read(&device.report).error(me) {
            Some(error) => Err(error),
            None => Ok(device.host_counts(ticket)),
        });
        let HostCounts { op, rows, tokens, experts, rooms } = match answer.await {
            Ok(counts) => counts,
            Err(error @ Error::Invalid { .. }) => return Err(self.refuse(routing, repeats, error)),
            Err(error) => return Err(error),
        };
        self.desk.has_started(op);
        let exchange = Exchange::new(rows, tokens, experts)?;
        let outboxes = self.settings().outboxes().is_some() && exchange.overflows(&rooms);
        Ok(Some((exchange, outboxes)))
    }

    /// The kernels have found bad choices: nothing has moved, and the operation's number is free.
    fn refuse(&mut self, routing: &RoutingHere, repeats: bool, error: Error) -> Error {
        self.device.report.clear();
        self.desk.take_back();
        let Routing::TopK { topk_idx, .. } = routing else { return error };
        let Ok(topk_idx) = topk_idx.to_vec() else { return error };
        // Named as on the host.
        let choices = TopK { topk_idx: &topk_idx };
        let repeats = Repeats::Counted.where_allowed(repeats);
        let planned = Plan::of_choices(self.shape(), self.topology().ranks(), self.desk.mask(), choices, repeats);
        planned.err().unwrap_or(error)
    }

    /// Takes memory for what comes, and enqueues the kernels that bring it.
    fn landed(&mut self, batch: &Batch<'_>, capture: Option<&Capture>) -> Result<Landing, Error> {
        let landing = self.landing(batch);
        let moved = landing.and_then(|landing| self.move_rows(batch, &landing).map(|()| landing));
        if moved.is_err() && capture.is_some() {
            // Peers were told nothing.
            self.desk.granted().take().into_iter().for_each(|block| self.desk.arena().give(&block));
        }
        moved
    }

    /// Lets a graph keep what a dispatch of `x` uses and gives.
    fn keep_received(&mut self, capture: Option<&Capture>, x: &Rows, received: &Received<Self>) -> Result<(), Error> {
        self.keep_leased(capture, &received.x);
        self.keep_for(capture, || {
            let counts = received.counts.iter().flat_map(|counts| [counts.rows.memory(), counts.experts.memory()]);
            let arrays = [received.topk_idx.memory(), received.topk_weights.memory()];
            let of_slots = received.by_expert.as_ref().and_then(|told| told.weights.as_ref().map(Array::memory));
            let all = [x.memory(), received.x.memory(), Arc::new(received.handle.clone()) as _];
            all.into_iter().chain(arrays).chain(of_slots).chain(counts).collect()
        })
    }

    /// Room for `len` numbers, undefined; of none it costs nothing.
    pub(super) fn room_for<T: Scalar>(&self, len: usize) -> Result<Array<T>, Error> {
        match len {
            0 => Ok(Array::of_memory(Arc::clone(&self.device.nothing), 0)),
            _ => Array::new(self.stream(), len),
        }
    }

    /// Weights of so many slots that are no choice's.
    fn no_weights(&self, slots: u32) -> Result<Array<f32>, Error> {
        let weights = Array::new(self.stream(), slots as usize)?;
        // SAFETY: where the call is captured, its results are kept by the graph (`keep_received`).
        unsafe { weights.fill(0) }?;
        Ok(weights)
    }

    /// Takes memory for what comes.
    fn landing(&mut self, batch: &Batch<'_>) -> Result<Landing, Error> {
        let row = *self.layout().row();
        if self.places() && batch.pulled.is_none() {
            *self.desk.granted() = self.desk.arena().take(&row, batch.room);
        }
        let stream = Arc::clone(self.stream());
        let block = *self.desk.granted();
        let x = match block {
            Some(_) => None,
            None => Some(Rows::landing(&stream, batch.room, &row)?),
        };
        let choices = if batch.choices.0 != 0 { batch.room as usize * row.topk() as usize } else { 0 };
        let by_expert = match batch.placed {
            Some(placed) => {
                let weights = if choices > 0 { Some(self.no_weights(placed.room())?) } else { None };
                Some((Rows::landing(&stream, placed.room(), &row)?, weights))
            }
            None => None,
        };
        let (topk_idx, topk_weights) = (self.room_for(choices)?, self.room_for(choices)?);
        let landing = Landing { block, x, topk_idx, topk_weights, by_expert };
        if landing.block.is_none() && batch.spare {
            // Rows beyond those that come name no expert, token or rank; received ones are written over it.
            // SAFETY: where the call is captured, its results are kept by the graph (`keep_received`).
            unsafe {
                landing.topk_idx.fill(0xff)?;
                landing.topk_weights.fill(0)?;
                batch.sources.0.fill(0xff)?;
                batch.sources.1.fill(0xff)?;
            }
        }
        Ok(landing)
    }

    /// Enqueues the kernels of a batch whose counts are known.
    fn move_rows(&mut self, batch: &Batch<'_>, landing: &Landing) -> Result<(), Error> {
        let direct = self.places();
        let fresh = batch.call.kind != Kind::CachedDispatch;
        let plan = batch.plan;
        let (topk_idx, topk_weights) = batch.choices;
        let (scales, strides) = self.scales(batch.x);
        let (tokens, ranks) = &batch.sources;
        let (out_token, out_rank) = if fresh { (tokens.address(), ranks.address()) } else { (0, 0) };
        let (idx, weights) =
            if topk_idx == 0 { (0, 0) } else { (landing.topk_idx.address(), landing.topk_weights.address()) };
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
            matrix: plan.matrix(),
            tokens_of: plan.tokens_of(),
            fanout: plan.fanout(),
            base: landing.block.as_ref().map_or(NO_BASE, |block| block.base().0),
            base_rows: landing.block.as_ref().map_or(0, Block::rows),
            ..args::DispatchRing::default()
        };
        let unpack = landing.block.filter(|_| fresh).map(|block| args::Unpack {
            base: block.base().0,
            first_of: plan.first_of(),
            topk_idx: idx,
            topk_weights: weights,
            source_token: out_token,
            source_rank: out_rank,
            rows: block.rows(),
            reserved: 0,
        });
        let block = landing.block.map(|block| (block.base(), block.scales(0).offset));
        let block = block.map(|(codes, scales)| (self.window.address(codes), self.window.address(scales)));
        // Where rows come to, and their scales.
        let (x, scales) = block.unwrap_or((ring.out, ring.out_scales));
        let spreading = batch.placed.zip(landing.by_expert.as_ref()).map(|(placed, (out, of_slots))| Spreading {
            x: (x, scales),
            // A cached dispatch brings no choices: their slots are known.
            topk_idx: idx,
            plan,
            placed,
            sources: (tokens.address(), ranks.address()),
            weights: (weights, of_slots.as_ref().map_or(0, Array::address)),
            zeros: batch.zero_spare,
            out,
        });
        if let Some(steps) = &batch.pulled {
            // SAFETY: rows, routing, plan and results are memory of the own stream's, with room for so many rows.
            unsafe { self.device.dispatch_pulled(batch.call, &ring, steps, plan.tokens_of()) }?;
        } else if direct && self.far().is_none() {
            // Of a cached dispatch everybody knows what headers would say.
            let placing = args::Dispatch {
                ring,
                first_at: plan.first_at(),
                base: ring.base,
                base_rows: ring.base_rows,
                headers: fresh.into(),
                lots: self.device.lots(),
                ..args::Dispatch::default()
            };
            if let Some(spreading) = &spreading {
                let launches = self.launches(batch, landing);
                if launches > 1 {
                    return self.move_by_lots(batch.call, &placing, launches, unpack.as_ref(), spreading);
                }
            }
            let args = args::Dispatch { end_lot: placing.lots, ..placing };
            // SAFETY: rows, routing, plan and results are memory of the own stream's, with room for so many rows.
            unsafe { self.device.dispatch(batch.call, &args) }?;
        } else {
            // SAFETY: as above.
            unsafe { self.device.dispatch_ring(batch.call, &ring) }?;
        }
        if let Some(args) = &unpack {
            // SAFETY: as above, and as many rows as the block has.
            unsafe { self.device.unpack(batch.call, args) }?;
        }
        // Of rows by expert those by source are not the user's.
        if batch.zero_spare && batch.placed.is_none() {
            let args = args::Blank { first_of: plan.first_of(), x, scales, rows: batch.room, reserved: 0 };
            // SAFETY: as above, and as much room as the batch was given.
            unsafe { self.device.blank(batch.call, &args) }?;
        }
        spreading.map_or(Ok(()), |spreading| self.spread(batch.call, &spreading))
    }

    /// Launches that place a batch's rows.
    fn launches(&self, batch: &Batch<'_>, landing: &Landing) -> u32 {
        if landing.block.is_none() || self.stream().is_capturing() {
            return 1;
        }
        let copies = u64::from(batch.tokens) * u64::from(self.shape().topk());
        self.device.launches(copies * self.shape().row_bytes())
    }

    /// Enqueues the kernels of a batch that is placed in several launches: while one brings rows, those of the one before are copied to their experts.
    fn move_by_lots(
        &self,
        call: Call,
        placing: &args::Dispatch,
        launches: u32,
        unpack: Option<&args::Unpack>,
        spreading: &Spreading<'_>,
    ) -> Result<(), Error> {
        let beside = Call { is_aside: true, ..call };
        let mut aside = None;
        for launch in 0..launches {
            let [lot, end_lot] = [launch, launch + 1].map(|launch| (placing.lots * launch).div_ceil(launches));
            // Lots that are left over are the first's: what the last brings is copied when nothing comes any more.
            // The first brings all headers, so that slots are found before the rows are there.
            let headers = if launch == 0 { placing.headers } else { 0 };
            // SAFETY: as in `move_rows`.
            unsafe { self.device.dispatch(call, &args::Dispatch { lot, end_lot, headers, ..*placing }) }?;
            match &aside {
                None => {
                    aside = self.device.fork()?;
                    // SAFETY: as above: what the stream had when it forked has happened, and it joins what is launched aside.
                    unpack.map_or(Ok(()), |args| unsafe { self.device.unpack(beside, args) })?;
                    self.find_slots(beside, spreading)?;
                }
                Some(aside) => aside.follow()?,
            }
            self.spread_lots(beside, spreading, lot..end_lot)?;
        }
        Ok(aside.map_or(Ok(()), Aside::join)?)
    }

    /// What the user gets, without counts.
    fn received(
        &mut self,
        landing: Landing,
        (source_token, source_rank): (Array<i32>, Array<i32>),
        handle: Handle,
        event: super::Event,
        capture: Option<&Capture>,
    ) -> Result<Received<Self>, Error> {
        let Landing { x, topk_idx, topk_weights, by_expert, .. } = landing;
        let by_source = match (x, self.desk.granted().take()) {
            (Some(x), _) => x,
            (None, block) => {
                block.filter(|_| capture.is_none()).into_iter().for_each(|block| self.tell(block, &event));
                let block = block.unwrap_or_else(|| self.layout().row().block(ep_core::port::Offset(0), 0));
                Rows::Leased(Lease::new(self.desk.arena(), block, self.window.clone()))
            }
        };
        let (rows, expert_counts, counts) = (handle.rows(), Vec::new(), None);
        self.desk.ways.dispatched(rows, by_source.lease().is_some());
        let placed = handle.kept::<Replayed>()?.placed.as_ref();
        let (x, weights) = match by_expert {
            Some((rows, weights)) => {
                self.keep_by_source(capture, &by_source)?;
                (rows, weights)
            }
            None => (by_source, None),
        };
        let told = placed.map(|placed| placed.told(weights));
        Ok(Received {
            x,
            by_expert: told,
            rows,
            topk_idx,
            topk_weights,
            source_token,
            source_rank,
            expert_counts,
            counts,
            handle,
            event,
        })
    }
}
