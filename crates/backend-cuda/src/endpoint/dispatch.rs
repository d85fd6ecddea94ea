//! Dispatch: checks, counts, and what the user gets.

use std::sync::Arc;

use ep_core::engine::{Counts, Dispatch, Handle, Lease, Received, Replay, Routing};
use ep_core::layout::{Kind, OPEN_ROOM};
use ep_core::plan::{Exchange, Plan, Repeats, TopK, align_counts};
use ep_core::settings::OutboxSteps;
use ep_core::{Endpoint as _, Error, OutboxUse, Placement, Rank, Rings};

use super::by_expert::Placed;
use super::landing::{Batch, Landing};
use super::replayed::{Known, Replayed};
use super::{Array, CudaEndpoint, Rows};
use crate::driver::Capture;
use crate::rank::{Call, Chosen, Counting, DevicePlan, HostCounts};

type RoutingHere = Routing<Array<i64>, Array<f32>, Array<u8>>;

/// An exchange of counts that the host waits for.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// By which it knows them.
    ticket: u64,
    /// The call, as [`CudaEndpoint::begins`] numbers them.
    begun: u64,
}

/// What the host hears of a dispatch.
struct Told {
    exchange: Exchange,
    /// Whether the batch goes through outboxes, because some arena has no room.
    outboxes: bool,
    /// Whether the kernels that were enqueued behind the exchange bring it.
    goes_ahead: bool,
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
        let rail_tokens = if self.far().is_some() && options.device_counts { most } else { 0 };
        if rail_tokens > 0 && tokens > most {
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
        self.what_comes().await;
        let room = match counts {
            // The host does not hear where the batch has room.
            Some(_) => OPEN_ROOM,
            // A rank that was given up, and goes on, stores into its rings here, over which an outbox would lie.
            None if !self.desk.mask().is_empty() => OPEN_ROOM,
            None => self.desk.arena().said_room(self.layout(), options.worst_rows),
        };
        let ahead = self.room_ahead(tokens, options, room);
        let counting = Counting {
            tokens,
            ticket: None,
            received: counts.as_ref().map_or(0, |counts| counts.rows.address()),
            of_expert: counts.as_ref().map_or(0, |counts| counts.experts.address()),
            alignment: options.expert_alignment,
            bound: options.worst_rows,
            rail_tokens,
            room,
            ahead: ahead.unwrap_or(0),
        };
        let kind = if membership { Kind::MembershipDispatch } else { Kind::Dispatch };
        let call = self.start(kind, (&rings, 0), plan.address(), capture.is_some());
        let choices = match routing {
            Routing::TopK { topk_idx, topk_weights } => {
                (topk_idx.address(), topk_weights.as_ref().map_or(0, Array::address))
            }
            Routing::Membership { .. } => (0, 0),
        };
        let asked = self.exchange(call, routing, &plan, counting, options.repeats).await?;
        let ahead = match ahead {
            Some(room) => {
                let sources = (Array::new(&stream, room as usize)?, Array::new(&stream, room as usize)?);
                let batch = Batch {
                    call,
                    rings,
                    pulled: None,
                    x,
                    tokens,
                    plan: &plan,
                    choices,
                    sources: sources.clone(),
                    room,
                    spare: true,
                    zero_spare: false,
                    is_ahead: true,
                    placed: None,
                };
                Some((self.enqueued(&batch, None)?, sources))
            }
            None => None,
        };
        let told = match asked {
            Some(asked) => Some(self.hear(asked, routing, options.repeats).await?),
            None => None,
        };
        let (outboxes, goes_ahead) = told.as_ref().map_or((false, false), |told| (told.outboxes, told.goes_ahead));
        self.know_how_it_went(goes_ahead, outboxes);
        let ahead = ahead.filter(|_| goes_ahead);
        let told = told.map(|told| told.exchange);
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
        let (landing, sources) = if let Some((landing, sources)) = ahead {
            self.cut(landing, sources, room)
        } else {
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
                is_ahead: false,
                placed: placed.as_ref(),
            };
            self.make_room_for(&batch).await;
            (self.landed(&batch, capture.as_ref())?, sources)
        };
        if told.is_some() {
            self.expected.came(tokens, room);
        }
        self.look_ahead(room);
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
        let call = self.start(Kind::CachedDispatch, (&handle.rings(), 0), kept.plan.address(), capture.is_some());
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
            is_ahead: false,
            placed: kept.placed.as_ref(),
        };
        self.make_room_for(&batch).await;
        let landing = self.landed(&batch, capture.as_ref())?;
        self.look_ahead(batch.room);
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
    pub(super) fn places(&self) -> bool {
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

    /// Plans on the device and exchanges counts. Of counts that do not stay there: what they are told by.
    async fn exchange(
        &mut self,
        call: Call,
        routing: &RoutingHere,
        plan: &DevicePlan,
        counting: Counting,
        repeats: bool,
    ) -> Result<Option<Asked>, Error> {
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
                // The copy waits for the stream, and would hold up the thread, which other ranks may share.
                let before = super::Event(Arc::new(self.device.stream.record(false)?));
                self.ended(&before).await?;
                self.device.set_choices(&choices)?;
            }
        }
        if counting.received != 0 {
            // SAFETY: counts go to arrays of the own stream's memory.
            unsafe { self.device.exchange(call, plan, counting) }?;
            return Ok(None);
        }
        self.tickets += 1;
        let asked = Asked { ticket: self.tickets, begun: self.begins() };
        // SAFETY: as above.
        unsafe { self.device.exchange(call, plan, Counting { ticket: Some(asked.ticket), ..counting }) }?;
        Ok(Some(asked))
    }

    /// Waits for counts.
    async fn hear(&mut self, asked: Asked, routing: &RoutingHere, repeats: bool) -> Result<Told, Error> {
        let (Asked { ticket, begun }, me) = (asked, self.desk.rank());
        let answer = self.until(|device| match device.reported(me) {
            Some(error) => Err(error),
            None => Ok(device.host_counts(ticket)),
        });
        let HostCounts { op, rows, tokens, experts, rooms, goes_ahead } = match answer.await {
            Ok(counts) => counts,
            Err(error @ Error::Invalid { .. }) => {
                // Of this call, or of one before that did not wait: then its kernels have ended, and counts never come.
                let behind = super::Event(Arc::new(self.device.stream.record(false)?));
                self.ended(&behind).await?;
                // Either way nothing of this call has moved.
                self.take_back_ahead();
                let error =
                    if self.device.is_closed()? { self.told_late(error) } else { self.refuse(routing, repeats, error) };
                return Err(error);
            }
            Err(error) => return Err(error),
        };
        self.desk.has_started(op);
        self.has_heard(begun);
        let exchange = Exchange::new(rows, tokens, experts)?;
        let outboxes = self.settings().outboxes().is_some() && exchange.overflows(&rooms);
        Ok(Told { exchange, outboxes, goes_ahead })
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
                Rows::Leased(Lease::new(self.desk.arena(), block, self.window.of(&block)))
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
