//! Dispatch: checks, counts, and the roles that move the rows.

use std::cell::RefCell;
use std::sync::Arc;

use super::by_expert::{self, Order, Spread};
use super::endpoint::{Counts, Dispatch, Ready, Received, Routing, RoutingOf};
use super::handle::{self, Handle, Inner};
use super::movers::Movers;
use super::{Ended, Engine, HostRows, Lease, Links, Started, run};
use crate::buffers::{Arena, Pool};
use crate::error::{Error, Fault};
use crate::layout::{Block, Kind};
use crate::machine::Machine;
use crate::plan::{Exchange, Fanout, Membership, Plan, Repeats, Routed, TopK, align_counts, tokens_by_node};
use crate::plant::Plant;
use crate::roles::{Control, Intake, Operation, Outgoing, Taken, beside, join};
use crate::settings::{OutboxSteps, OutboxUse, Placement, Rings};

/// What a dispatch is made of, checked.
struct Batch<'a, M: Machine> {
    kind: Kind,
    rings: Rings,
    /// How much of its outboxes it uses, if any.
    outbox: OutboxUse,
    /// For the handle; `outgoing` borrows the same.
    plan: Arc<Plan>,
    outgoing: Outgoing<'a, M::Window>,
    /// The dispatch that is replayed, whose counts are known.
    replayed: Option<(&'a Handle, &'a Routed)>,
    worst_rows: u32,
    /// Whether rows beyond those that come become zeros.
    zero_spare: bool,
    /// Whether the counts stay in the machine's memory.
    device_counts: bool,
    alignment: u32,
    /// How the rows are to stand by expert, if they are.
    order: Option<Order<'a>>,
    /// Whether the slots of experts stay in the machine's memory, too.
    places_on_device: bool,
}

/// What a dispatch's roles brought.
struct Arrived<M: Machine> {
    taken: Taken<M::Window>,
    /// The rows by expert, where they were asked for.
    spread: Option<Spread<M::Window>>,
    exchange: Arc<Exchange>,
    by_node: Vec<Vec<u32>>,
    fanout: Vec<Fanout>,
    /// Whether the rows went through outboxes because some arena had no room.
    outboxes: bool,
    /// What the call used of outboxes, where its rows went through some.
    steps: Option<OutboxSteps>,
}

impl<M: Machine> Engine<M> {
    pub(super) async fn dispatch_routing(
        &mut self,
        x: &HostRows<M::Window>,
        routing: &RoutingOf<Self>,
        options: &Dispatch,
    ) -> Result<Received<Self>, Error> {
        self.desk.ready()?;
        let rings = self.desk.check_options(options)?;
        let (plan, choices) = self.plan(routing, options.repeats)?;
        let plan = Arc::new(plan);
        let slots = self.desk.check_by_expert(options, choices.is_some())?;
        self.desk.check_x(x.extent(), plan.tokens())?;
        // What was asked for and is not to be had is refused before anything moves. (What there is, the operation takes from the pool.)
        if options.worst_rows > 0 && self.desk.settings().placement() != Placement::Direct {
            HostRows::<M::Window>::landing(&self.pool, options.worst_rows, self.desk.layout.row())?;
        }
        slots.map(|slots| HostRows::<M::Window>::landing(&self.pool, slots, self.desk.layout.row())).transpose()?;
        let batch = Batch {
            kind: if choices.is_some() { Kind::Dispatch } else { Kind::MembershipDispatch },
            rings,
            outbox: options.outbox,
            plan: Arc::clone(&plan),
            outgoing: Outgoing { x, plan: &plan, choices },
            replayed: None,
            worst_rows: options.worst_rows,
            zero_spare: options.zero_spare,
            device_counts: options.device_counts,
            alignment: options.expert_alignment,
            order: options.by_expert.then_some(Order::Aligned { alignment: options.expert_alignment, room: slots }),
            places_on_device: options.device_counts,
        };
        self.move_batch(batch).await
    }

    pub(super) async fn dispatch_cached(
        &mut self,
        x: &HostRows<M::Window>,
        handle: &Handle,
        outbox: OutboxUse,
    ) -> Result<Received<Self>, Error> {
        self.desk.ready()?;
        self.desk.check_handle(handle)?;
        outbox.check()?;
        let routed = handle.routed()?;
        self.desk.check_x(x.extent(), handle.tokens())?;
        let batch = Batch {
            kind: Kind::CachedDispatch,
            rings: handle.rings(),
            outbox,
            plan: Arc::clone(&routed.plan),
            outgoing: Outgoing { x, plan: &routed.plan, choices: None },
            replayed: Some((handle, routed)),
            worst_rows: handle.rows(),
            zero_spare: routed.zero_spare,
            device_counts: false,
            alignment: 1,
            order: routed.expansion.as_ref().map(Order::Replayed),
            places_on_device: routed.places_on_device,
        };
        self.move_batch(batch).await
    }

    /// Plans a routing, and says which choices its rows carry.
    #[allow(clippy::type_complexity)] // Borrowed choices of one call, named nowhere else.
    fn plan<'a>(
        &self,
        routing: &'a RoutingOf<Self>,
        repeats: bool,
    ) -> Result<(Plan, Option<(&'a [i64], Option<&'a [f32]>)>), Error> {
        let ranks = self.desk.topology().ranks();
        match routing {
            Routing::TopK { topk_idx, topk_weights } => {
                self.desk.check_choices(topk_idx.len(), topk_weights.as_ref().map(Vec::len))?;
                let choices = TopK { topk_idx };
                let plan = Plan::of_choices(
                    self.desk.shape(),
                    ranks,
                    &self.desk.mask,
                    choices,
                    Repeats::Counted.where_allowed(repeats),
                )?;
                Ok((plan, Some((topk_idx, topk_weights.as_deref()))))
            }
            Routing::Membership { in_rank, tokens_per_expert } => {
                self.desk.check_membership(in_rank.len(), tokens_per_expert)?;
                let membership = Membership { in_rank, tokens_per_expert };
                let plan = Plan::of_membership(self.desk.shape(), ranks, self.desk.mask(), membership)?;
                Ok((plan, None))
            }
        }
    }

    async fn move_batch(&mut self, batch: Batch<'_, M>) -> Result<Received<Self>, Error> {
        let op = self.desk.op;
        let ended = {
            let Started { operation, links, vigil, arena, pool, granted } = self.start(
                batch.kind,
                (batch.rings, batch.outbox),
                batch.replayed.map_or(0, |(handle, _)| handle.op()),
            );
            let work = transfer(&operation, links, (arena, pool), &batch, granted);
            run(&operation, vigil, work).await
        };
        self.receive(op, batch, ended)
    }

    /// Makes of what arrived what the user gets.
    fn receive(&mut self, op: u64, batch: Batch<'_, M>, ended: Ended<Arrived<M>>) -> Result<Received<Self>, Error> {
        let Arrived { taken, spread, exchange, by_node, fanout, outboxes, steps } = self.end(ended)?;
        let rows = exchange.received(self.desk.me);
        let mut x = match self.desk.granted.take() {
            Some(block) => {
                if self.desk.settings().plants(Plant::LeaseFreedEarly) {
                    self.desk.arena.give(&block);
                }
                HostRows::Leased(Lease::new(&self.desk.arena, block, self.machine.window()))
            }
            None => taken.x,
        };
        // Of rows by expert spare ones are zeros by now, and these are not the user's.
        if batch.zero_spare && spread.is_none() {
            x.zero_from(rows)?;
        }
        let (mut expert_counts, mut counts) = (Vec::new(), None);
        if batch.kind != Kind::CachedDispatch {
            expert_counts = align_counts(exchange.expert_counts(), batch.alignment);
            for (sum, &count) in self.stats.expert_rows.iter_mut().zip(exchange.expert_counts()) {
                *sum += u64::from(count);
            }
        }
        if batch.device_counts {
            counts = Some(Counts { rows: vec![rows], experts: std::mem::take(&mut expert_counts) });
        }
        // Of cached dispatches of a handle whose rows are a bound, it is that again.
        let known = batch.replayed.map_or(rows, |(handle, _)| handle.rows());
        let bound = if batch.device_counts { batch.worst_rows } else { known };
        let source_token = taken.source_token[..rows as usize].iter().map(|&token| token as u32).collect();
        let (tokens, plan) = (batch.plan.tokens(), batch.plan);
        steps.inspect(|steps| self.desk.ways.in_outboxes(steps));
        self.desk.ways.dispatched(bound, matches!(x, HostRows::Leased(_)));
        let (x, by_expert, expansion) = match spread {
            Some(Spread { x, expansion }) => {
                let fresh = batch.kind != Kind::CachedDispatch;
                let weights = fresh.then_some((&taken.topk_weights[..], x.rows()));
                (x, Some(by_expert::told(&expansion, batch.places_on_device, weights)), Some(expansion))
            }
            None => (x, None, None),
        };
        let Batch { zero_spare, places_on_device, .. } = batch;
        let routed = Routed { plan, exchange, by_node, fanout, source_token, expansion, places_on_device, zero_spare };
        self.count_rows(&routed, true);
        let routing = handle::Routing::Here(routed);
        let inner = Inner { mark: self.desk.mark(), op, rings: batch.rings, outboxes, tokens, rows: bound, routing };
        Ok(Received {
            x,
            by_expert,
            rows: bound,
            topk_idx: taken.topk_idx,
            topk_weights: taken.topk_weights,
            source_token: taken.source_token,
            source_rank: taken.source_rank,
            expert_counts,
            counts,
            handle: Handle { inner: Arc::new(inner) },
            event: Ready,
        })
    }
}

/// The work of a dispatch, and the coordinators that post for it.
async fn transfer<M: Machine>(
    operation: &Operation<'_, M>,
    links: &mut Links,
    memory: (&Arena, &Pool),
    batch: &Batch<'_, M>,
    granted: &mut Option<Block>,
) -> Result<Arrived<M>, Fault> {
    links.cut(operation).await?;
    let coordinators = links.coordinators(operation);
    beside(coordinators, exchange_rows(operation, links, memory, batch, granted)).await
}

/// Control first and last, all movers in between.
async fn exchange_rows<M: Machine>(
    operation: &Operation<'_, M>,
    links: &mut Links,
    (arena, pool): (&Arena, &Pool),
    batch: &Batch<'_, M>,
    granted: &mut Option<Block>,
) -> Result<Arrived<M>, Fault> {
    let mut control = Control::open(operation);
    control.bank().await?;
    let (exchange, outboxes) = match batch.replayed {
        Some((handle, routed)) => (Arc::clone(&routed.exchange), handle.outboxes()),
        None => {
            let room = arena.said_room(operation.layout, batch.worst_rows);
            let (exchange, overflows) = control.exchange(batch.outgoing.plan, room).await?;
            (Arc::new(exchange), overflows)
        }
    };
    let pulled;
    let (operation, mut control) = if outboxes {
        // Cutting is the control role's, too, which has one port at a time.
        drop(control);
        pulled = operation.in_outboxes();
        links.cut(&pulled).await?;
        (&pulled, Control::open(&pulled))
    } else {
        (operation, control)
    };
    let rows = room_for(operation, batch, exchange.received(operation.me))?;
    let room = match batch.order {
        Some(order) => Some((order, order.room(pool, operation.layout.row(), exchange.expert_counts())?)),
        None => None,
    };
    if operation.pulled {
        control.notes(None).await?;
    } else if operation.layout.settings().placement() == Placement::Direct {
        *granted = arena.take(operation.layout.row(), rows);
        control.notes(granted.as_ref()).await?;
    }
    let topk = if batch.kind == Kind::Dispatch { operation.layout.row().topk() } else { 0 };
    let x = HostRows::landing(pool, if granted.is_some() { 0 } else { rows }, operation.layout.row())?;
    let intake = Intake::new(x, rows, topk)?;
    let by_node = tokens_by_node(batch.outgoing.plan, operation.layout.topology());
    let slots = operation.layout.topology().nodes() * operation.rings.channels;
    let fanout: Vec<_> = (0..slots).map(|_| RefCell::default()).collect();
    let movers = Movers {
        operation,
        outgoing: &batch.outgoing,
        intake: &intake,
        exchange: &exchange,
        block: granted.as_ref(),
        by_node: &by_node,
        fanout: &fanout,
    };
    drop(control);
    join(movers.roles(links)).await?;
    let taken = intake.into_inner();
    operation.agree("rows received in all", exchange.received(operation.me), taken.arrived, operation.me)?;
    let mut control = Control::open(operation);
    control.done().await?;
    let spread = match room {
        Some((order, x)) => {
            let (arrived, counts) = ((&taken, granted.as_ref()), exchange.expert_counts());
            Some(by_expert::spread(operation, control.port(), arrived, counts, (order, batch.zero_spare), x)?)
        }
        None => None,
    };
    let fanout = fanout.chunks(operation.rings.channels as usize).map(merged).collect();
    Ok(Arrived { taken, spread, exchange, by_node, fanout, outboxes, steps: operation.outbox_steps() })
}

/// The rows of all channels from one node.
fn merged(channels: &[RefCell<Fanout>]) -> Fanout {
    let mut all = Fanout::default();
    channels.iter().for_each(|rows| all.append(&rows.borrow()));
    all
}

/// Rows to make room for: those that come, or the worst case that the caller asked for.
fn room_for<M: Machine>(operation: &Operation<'_, M>, batch: &Batch<'_, M>, rows: u32) -> Result<u32, Fault> {
    if batch.worst_rows == 0 {
        return Ok(rows);
    }
    if rows > batch.worst_rows {
        let (mine, theirs) = (batch.worst_rows.into(), rows.into());
        return Err(Fault::Mismatch { field: "worst-case rows", mine, theirs, peer: operation.me });
    }
    Ok(batch.worst_rows)
}
