//! Dispatch: checks, positions, the exchange of counts, and the kernel that moves the rows.

use std::sync::{Arc, OnceLock};

use ep_core::engine::{Counts, Dispatch, Handle, Ready, Received, Replay, Routing};
use ep_core::layout::Kind;
use ep_core::plan::{Exchange, Membership, Plan, Repeats, TopK, align_counts};
use ep_core::{Element, Endpoint as _, Error};

use super::by_expert::{Placed, Spreading};
use super::replayed::{DevicePlan, Replayed, first_rows};
use super::{Array, AscendEndpoint, Rows};
use crate::args;
use crate::rank::{Call, OpEnd};

type RoutingHere = Routing<Array<i64>, Array<f32>, Array<u8>>;

/// Choices of a batch, where it has some.
#[derive(Clone, Copy)]
struct Choices<'a> {
    topk_idx: &'a Array<i64>,
    topk_weights: Option<&'a Array<f32>>,
}

/// Where a dispatch's results go.
struct Landing {
    x: Rows,
    topk_idx: Array<i64>,
    topk_weights: Array<f32>,
}

impl AscendEndpoint {
    pub(super) async fn dispatch_routing(
        &mut self,
        x: &Rows,
        routing: &RoutingHere,
        options: &Dispatch,
    ) -> Result<Received<Self>, Error> {
        self.desk.ready()?;
        let rings = self.desk.check_options(options)?;
        if matches!(routing, Routing::Membership { .. }) {
            // The host reads it: what a user has enqueued may still write it.
            self.ended().await?;
        }
        let (tokens, choices, plan) = self.routed(routing)?;
        let slots = self.desk.check_by_expert(options, choices.is_some())?;
        self.desk.check_x(x.extent(), tokens)?;
        let device = Arc::clone(self.device.device());
        x.check_home("x", &device)?;
        // What is asked for and not to be had is refused before anything moves.
        let early =
            (options.worst_rows > 0).then(|| self.landing(options.worst_rows, choices.is_some())).transpose()?;
        let early_by_expert = slots.map(|slots| self.room_by_expert(slots)).transpose()?;
        let ranks = self.topology().ranks();
        let mut on_device = match &plan {
            Some(plan) => DevicePlan::of(&device, plan, ranks, self.shape())?,
            None => DevicePlan::new(&device, tokens, ranks, self.shape())?,
        };
        let kind = if choices.is_some() { Kind::Dispatch } else { Kind::MembershipDispatch };
        let call = Call { kind, rings, alike: 0 };

        self.unused().await?;
        let op = self.desk.start();
        if let Some(Choices { topk_idx, .. }) = choices {
            self.find_positions(&call, topk_idx, &on_device, options.repeats)?;
        }
        let exchange = match self.exchange(&call, &on_device, options.worst_rows).await? {
            Some(exchange) => exchange,
            None => return Err(self.refuse(choices, options.repeats)),
        };
        let me = self.desk.rank();
        let received = exchange.received(me);
        let room = if options.worst_rows > 0 { options.worst_rows } else { received };
        on_device.expect(&device, self.topology(), me, &exchange)?;
        on_device.first_of.write(&first_rows(&exchange, ranks, me))?;
        let landing = match early {
            Some(landing) => landing,
            None => self.landing(room, choices.is_some())?,
        };
        let placed = match options.by_expert {
            true => Some(Placed::new(&device, self.shape(), &exchange, (room, slots), options.expert_alignment)?),
            false => None,
        };
        // Rows that do not come name nobody.
        let source = || Array::<i32>::filled(&device, room as usize, 0xff);
        let (source_token, source_rank) = (source()?, source()?);
        let counts = match options.device_counts {
            true => Some(counted(&exchange, received, options.expert_alignment, &device)?),
            false => None,
        };
        let args = args::Dispatch {
            topk_idx: choices.map_or(0, |choices| choices.topk_idx.address()),
            topk_weights: choices.and_then(|choices| choices.topk_weights).map_or(0, Array::address),
            out_idx: if choices.is_some() { landing.topk_idx.address() } else { 0 },
            out_weights: if choices.is_some() { landing.topk_weights.address() } else { 0 },
            out_token: source_token.address(),
            out_rank: source_rank.address(),
            fanout: on_device.fanout(),
            ..self.moved(&call, x, tokens, &on_device, &landing)
        };
        self.keep([source_token.memory(), source_rank.memory()]);
        let memory = choices.map(|choices| (choices.topk_idx.memory(), choices.topk_weights.map(Array::memory)));
        self.keep(memory.into_iter().flat_map(|(idx, weights)| [idx].into_iter().chain(weights)));
        let topk_idx = Some(&landing.topk_idx);
        let spreading = match &placed {
            Some(placed) => {
                let out = early_by_expert.map_or_else(|| self.room_by_expert(placed.room()), Ok)?;
                Some(Spreading { placed, topk_idx, rows: received, out })
            }
            None => None,
        };
        let by_expert = self.move_rows(x, &on_device, &landing, &args, spreading).await?;
        if options.zero_spare && by_expert.is_none() {
            landing.x.zero_from(received)?;
        }

        self.desk.set_poisoned(None);
        self.count(&exchange, &rings, true)?;
        for (sum, &choices) in self.stats.expert_rows.iter_mut().zip(exchange.expert_counts()) {
            *sum += u64::from(choices);
        }
        let rows = if options.device_counts { options.worst_rows } else { received };
        self.desk.ways.dispatched(rows, false);
        let expert_counts = match counts {
            Some(_) => Vec::new(),
            None => align_counts(exchange.expert_counts(), options.expert_alignment),
        };
        let kept = Replayed {
            on_device,
            shape: *self.shape(),
            plan: plan.map_or_else(OnceLock::new, |plan| Arc::new(plan).into()),
            exchange: Arc::new(exchange),
            source_token: source_token.clone(),
            source_rank: source_rank.clone(),
            placed,
            rows,
            zero_spare: options.zero_spare,
        };
        let mark = self.desk.mark();
        let told = kept.placed.as_ref().map(Placed::told);
        let replay = Replay { mark, op, rings, outboxes: false, tokens, rows, kept: Arc::new(kept) };
        let (handle, event) = (Handle::of_backend(replay), Ready);
        let Landing { x, topk_idx, topk_weights } = landing;
        Ok(Received {
            x: by_expert.unwrap_or(x),
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

    pub(super) async fn dispatch_cached(&mut self, x: &Rows, handle: &Handle) -> Result<Received<Self>, Error> {
        self.desk.ready()?;
        self.desk.check_handle(handle)?;
        let kept: &Replayed = handle.kept()?;
        self.desk.check_x(x.extent(), handle.tokens())?;
        x.check_home("x", self.device.device())?;
        let landing = self.landing(handle.rows(), false)?;
        let by_expert = kept.placed.as_ref().map(|placed| self.room_by_expert(placed.room())).transpose()?;
        let call = Call { kind: Kind::CachedDispatch, rings: handle.rings(), alike: handle.op() };
        self.unused().await?;
        let op = self.desk.start();
        let args = self.moved(&call, x, handle.tokens(), &kept.on_device, &landing);
        let rows = kept.exchange.received(self.desk.rank());
        let spreading = match (&kept.placed, by_expert) {
            (Some(placed), Some(out)) => Some(Spreading { placed, topk_idx: None, rows, out }),
            _ => None,
        };
        let by_expert = self.move_rows(x, &kept.on_device, &landing, &args, spreading).await?;
        if kept.zero_spare && by_expert.is_none() {
            landing.x.zero_from(rows)?;
        }
        self.desk.set_poisoned(None);
        self.count(&kept.exchange, &call.rings, true)?;
        self.desk.ways.dispatched(handle.rows(), false);
        // A handle of this dispatch replays it as well as that of the first.
        let replay = Replay {
            mark: self.desk.mark(),
            op,
            rings: handle.rings(),
            outboxes: false,
            tokens: handle.tokens(),
            rows: handle.rows(),
            kept: handle.shared_kept()?,
        };
        Ok(Received {
            x: by_expert.unwrap_or(landing.x),
            by_expert: kept.placed.as_ref().map(Placed::told),
            rows: handle.rows(),
            topk_idx: landing.topk_idx,
            topk_weights: landing.topk_weights,
            source_token: kept.source_token.clone(),
            source_rank: kept.source_rank.clone(),
            expert_counts: Vec::new(),
            counts: None,
            handle: Handle::of_backend(replay),
            event: Ready,
        })
    }

    /// Tokens of a batch; its choices, of which the device finds the plan, or the plan that a membership is.
    #[allow(clippy::type_complexity)] // Three things that belong to no type.
    fn routed<'a>(&self, routing: &'a RoutingHere) -> Result<(u32, Option<Choices<'a>>, Option<Plan>), Error> {
        let device = self.device.device();
        match routing {
            Routing::TopK { topk_idx, topk_weights } => {
                topk_idx.check_home("topk_idx", device)?;
                topk_weights.iter().try_for_each(|weights| weights.check_home("topk_weights", device))?;
                let tokens = self.desk.check_choices(topk_idx.len(), topk_weights.as_ref().map(Array::len))?;
                Ok((tokens, Some(Choices { topk_idx, topk_weights: topk_weights.as_ref() }), None))
            }
            Routing::Membership { in_rank, tokens_per_expert } => {
                in_rank.check_home("in_rank", device)?;
                self.desk.check_membership(in_rank.len(), tokens_per_expert)?;
                let in_rank = in_rank.to_vec()?;
                let membership = Membership { in_rank: &in_rank, tokens_per_expert };
                let plan = Plan::of_membership(self.shape(), self.topology().ranks(), self.mask(), membership)?;
                Ok((plan.tokens(), None, Some(plan)))
            }
        }
    }

    /// Lets the device find positions and counts, and look at the choices.
    fn find_positions(
        &mut self,
        call: &Call,
        topk_idx: &Array<i64>,
        on_device: &DevicePlan,
        repeats: bool,
    ) -> Result<(), Error> {
        let args = args::Positions {
            launch: self.device.prepared(call, true),
            topk_idx: topk_idx.address(),
            position: on_device.position.address(),
            numbers: on_device.numbers.address(),
            tokens: on_device.tokens,
            repeats: repeats.into(),
            ..args::Positions::default()
        };
        self.keep([topk_idx.memory()]);
        self.keep(on_device.memory());
        self.launched();
        // SAFETY: arrays of this device, of the lengths that the struct says, kept until the launch has ended. The operation has just begun, so
        // nothing of this rank runs.
        Ok(unsafe { self.device.positions(args) }?)
    }

    /// The device has found bad choices: nothing has moved, and the operation's number is free. They are named as on the host.
    fn refuse(&mut self, choices: Option<Choices<'_>>, repeats: bool) -> Error {
        self.desk.take_back();
        let chosen = choices.map_or_else(|| Ok(Vec::new()), |choices| choices.topk_idx.to_vec());
        let planned = chosen.and_then(|chosen| {
            let (repeats, chosen) = (Repeats::Counted.where_allowed(repeats), TopK { topk_idx: &chosen });
            Plan::of_choices(self.shape(), self.topology().ranks(), self.mask(), chosen, repeats)
        });
        let changed =
            || Error::invalid("topk_idx", "changed while it was dispatched", "the same until the call has ended");
        planned.err().unwrap_or_else(changed)
    }

    /// Room for what comes. Rows that do not come have no choices.
    fn landing(&self, room: u32, has_choices: bool) -> Result<Landing, Error> {
        let device = self.device.device();
        let is_coded = self.shape().element() != Element::Bf16;
        let choices = if has_choices { room as usize * self.shape().topk() as usize } else { 0 };
        Ok(Landing {
            x: Rows::landing(device, room, self.shape().row_bytes() as usize, is_coded)?,
            topk_idx: Array::filled(device, choices, 0xff)?,
            topk_weights: Array::filled(device, choices, 0)?,
        })
    }

    /// Tells all ranks what this one sends, and learns what they do. None where the choices are wrong: nobody was told anything.
    async fn exchange(&mut self, call: &Call, on_device: &DevicePlan, bound: u32) -> Result<Option<Exchange>, Error> {
        let args = args::Counts {
            launch: self.device.prepared(call, true),
            numbers: on_device.numbers.address(),
            matrix: on_device.matrix.address(),
            tokens_of: on_device.tokens_of.address(),
            arrived: on_device.arrived.address(),
            tokens: on_device.tokens,
            bound,
        };
        self.keep(on_device.memory());
        self.launched();
        // SAFETY: arrays of this device, of the lengths that the struct says, kept until the launch has ended. Of this rank nothing else runs but
        // the launch that finds its positions.
        unsafe { self.device.counts(&args) }?;
        self.finish().await?;
        match self.device.bad_token()? {
            Some(_) => Ok(None),
            None => {
                self.check_done(OpEnd::Followed)?;
                on_device.exchanged().map(Some)
            }
        }
    }

    /// Parameters of the kernel that moves rows, without what a fresh dispatch tells besides.
    fn moved(&self, call: &Call, x: &Rows, tokens: u32, on_device: &DevicePlan, landing: &Landing) -> args::Dispatch {
        args::Dispatch {
            launch: self.device.prepared(call, false),
            x: x.address(),
            x_stride: x.row_bytes() as u64,
            position: on_device.position.address(),
            first_of: on_device.first_of.address(),
            out: landing.x.address(),
            tokens,
            ..args::Dispatch::default()
        }
    }

    /// Moves the rows; then, where they are to stand by expert, orders them so. The rows by expert, where they are.
    async fn move_rows(
        &mut self,
        x: &Rows,
        on_device: &DevicePlan,
        landing: &Landing,
        args: &args::Dispatch,
        spreading: Option<Spreading<'_>>,
    ) -> Result<Option<Rows>, Error> {
        self.keep([x.memory(), landing.x.memory(), landing.topk_idx.memory(), landing.topk_weights.memory()]);
        self.keep(on_device.memory());
        self.launched();
        // SAFETY: rows, plan and results are of this device, with room for the tokens and rows that the plan has, and kept until the launch has
        // ended. What this rank launched before has ended.
        unsafe { self.device.dispatch(args) }?;
        let Some(spreading) = spreading else {
            self.finish_last().await?;
            return Ok(None);
        };
        let (taken, room) = (spreading.placed.taken(), spreading.placed.room());
        if taken > room {
            self.finish().await?;
            return Err(self.refuse_choices(spreading.placed));
        }
        self.spread(args.launch, &landing.x, on_device, &spreading)?;
        self.finish_last().await?;
        self.check_spread(spreading.placed)?;
        if taken < room {
            spreading.out.zero_from(taken)?;
        }
        Ok(Some(spreading.out))
    }
}

/// The counts, in the device's memory.
fn counted(
    exchange: &Exchange,
    rows: u32,
    alignment: u32,
    device: &Arc<crate::driver::Device>,
) -> Result<Counts<AscendEndpoint>, Error> {
    Ok(Counts {
        rows: Array::from_values(device, &[rows])?,
        experts: Array::from_values(device, &align_counts(exchange.expert_counts(), alignment))?,
    })
}
