//! Random communicators, batches and settings: the campaign's cases, drawn by proptest so that they shrink.

use ep_core::reference::{self, Returned, World};
use ep_core::ring::Geometry;
use ep_core::{Element, Error, OutboxUse, Placement, Rank, RankSet, Rings, Settings, Shape, Topology};
use proptest::prelude::*;

use crate::arrival::Arrival;
use crate::backend::{Backend, Setup};
use crate::drive::{Round, bias_rows, noted_cached_round, noted_round, upload};
use crate::verify::{self, Compared, Observed};
use crate::workload::{Batch, RoutingKind, Workload};
use crate::zombie::{self, Played, Zombie, plays, zombies};

/// A communicator, what it carries and how, all drawn at random.
#[derive(Clone, PartialEq, Debug)]
pub struct Scenario {
    /// Batches and the backend's own freedom are drawn from this.
    pub seed: u64,
    /// Nodes; they divide the ranks.
    pub nodes: u32,
    /// Experts of each rank.
    pub local_experts: u32,
    /// Choices per token.
    pub topk: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// How rows travel.
    pub element: Element,
    /// `[ranks]`: tokens of each rank.
    pub tokens: Vec<u32>,
    /// How tokens choose experts.
    pub routing: RoutingKind,
    /// Each choice is dropped with this probability.
    pub drop: f64,
    /// Rings.
    pub rings: Rings,
    /// Where rows land.
    pub placement: Placement,
    /// Bytes of the arena with direct placement: 0, too small for some blocks, or ample.
    pub arena_bytes: u64,
    /// Channels and slots of the outboxes for batches without room, with direct placement.
    pub outboxes: Option<(u32, u32)>,
    /// How much of their outboxes ranks use: in round `r` rank `n` the use number `n + r`, modulo how many there are. None: what is usual.
    pub uses: Vec<OutboxUse>,
    /// Before the rounds this rank takes as much of its arena as it can, and keeps it; where the machine has memory that combine can
    /// pull from.
    pub full: Option<Rank>,
    /// What the rounds do, one after the other.
    pub rounds: Vec<Turn>,
    /// A rank that is suspended, given up, and goes on.
    pub zombie: Option<Zombie>,
}

/// One round of a scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Along the handle of the round before.
    pub cached: bool,
    /// Experts write where combine can pull.
    pub pull: bool,
    /// Weights travel back.
    pub return_weights: bool,
    /// Rows of bias, 0 to 2.
    pub bias: u8,
    /// Channels of this round's calls, at most the communicator's.
    pub channels: u32,
}

/// Ranks that most random communicators have at most: large ones take long.
pub const USUAL: u32 = 16;

/// Nodes and ranks of each node.
pub(crate) fn topologies(nodes: u32, per_node: u32) -> impl Strategy<Value = (u32, u32)> {
    let usual = (1..=nodes).prop_flat_map(move |nodes| (Just(nodes), 1..=per_node.min((USUAL / nodes).max(1))));
    prop_oneof![99 => usual, 1 => (1..=nodes, 1..=per_node)]
}

/// Any scenario of at most `nodes` nodes of `per_node` ranks; mostly of at most [`USUAL`] ranks in all. `haunted`: with zombies, too.
pub fn scenarios(nodes: u32, per_node: u32, haunted: bool) -> impl Strategy<Value = Scenario> {
    let topology = topologies(nodes, per_node);
    let sizes = (topology, 1u32..=4, 1u32..=16, hidden(), any::<u64>());
    sizes.prop_flat_map(move |((nodes, per_node), local_experts, topk, hidden, seed)| {
        let ranks = nodes * per_node;
        let topk = topk.min(ranks * local_experts);
        let most = (96 / ranks).max(1);
        // In one scenario of a hundred a rank brings a thousand tokens: with rings of one slot, a thousand times what they hold.
        let one_busy = prop_oneof![9 => 1..=1000 / ranks, 1 => Just(1000)];
        let tokens = prop_oneof![
            8 => prop::collection::vec(0..=most, ranks as usize),
            1 => Just(vec![0; ranks as usize]),
            1 => (0..ranks, one_busy).prop_map(move |(busy, tokens)| {
                (0..ranks).map(|rank| if rank == busy { tokens } else { 0 }).collect()
            }),
        ];
        // As many groups as ranks always divide the experts; the limit is the least that holds topk experts.
        let grouped = RoutingKind::Grouped { groups: ranks, limit: topk.div_ceil(local_experts) };
        let routing = prop_oneof![
            4 => Just(RoutingKind::Uniform),
            1 => Just(grouped),
            2 => (0.5f64..3.0).prop_map(|exponent| RoutingKind::Skewed { exponent }),
            1 => Just(RoutingKind::Single),
        ];
        let drop = prop_oneof![3 => Just(0.0), 1 => Just(0.3), 1 => Just(1.0)];
        // Rows are pulled within one node.
        let third = if nodes == 1 { Placement::Pulled } else { Placement::Ring };
        let placement = prop_oneof![Just(Placement::Ring), Just(Placement::Direct), Just(third)];
        let arena = prop_oneof![1 => Just(0u64), 2 => 64u64..20_000, 3 => Just(8u64 << 20)];
        let rounds = prop::collection::vec(turn(), 1..=3);
        let element = prop_oneof![2 => Just(Element::Bf16), 1 => prop::sample::select(Element::ALL.to_vec())];
        let zombie = zombies(ranks, haunted);
        let tokens = (tokens, zombie);
        let placement = (placement, prop::option::of((1u32..=4, 1u32..=5)), prop::collection::vec(outbox_use(), 0..=3));
        (element, tokens, routing, drop, rings(), placement, arena, rounds).prop_map(
            move |(
                element,
                (tokens, zombie),
                routing,
                drop,
                rings,
                (placement, outboxes, uses),
                arena_bytes,
                rounds,
            )| {
                Scenario {
                    seed,
                    nodes,
                    local_experts,
                    topk,
                    hidden,
                    element,
                    tokens,
                    routing,
                    drop,
                    rings,
                    placement,
                    arena_bytes,
                    outboxes: outboxes.filter(|_| nodes == 1 && placement == Placement::Direct),
                    uses,
                    full: None,
                    rounds,
                    zombie,
                }
            },
        )
    })
}

fn hidden() -> impl Strategy<Value = u32> {
    prop_oneof![6 => 16u32..64, 1 => Just(16u32), 1 => 64u32..600]
}

/// Every chunk and credit up to slots; rings of one slot often.
fn rings() -> impl Strategy<Value = Rings> {
    (1u32..=3, geometry(), geometry()).prop_map(|(channels, near, far)| Rings { channels, near, far })
}

fn geometry() -> impl Strategy<Value = Geometry> {
    let slots = prop_oneof![2 => Just(1u32), 4 => 2u32..=6, 1 => 7u32..=32];
    slots.prop_flat_map(|slots| {
        (1..=slots, 1..=slots).prop_map(move |(chunk, credit)| Geometry { slots, chunk, credit })
    })
}

/// Steps and windows below, at and beyond what rings hold.
fn outbox_use() -> impl Strategy<Value = OutboxUse> {
    let some = || prop::option::of(prop_oneof![1u32..=9, 10u32..=50]);
    (some(), some()).prop_map(|(piece, slots)| OutboxUse { piece, slots })
}

fn turn() -> impl Strategy<Value = Turn> {
    (any::<bool>(), any::<bool>(), any::<bool>(), 0u8..=2, 1u32..=3).prop_map(
        |(cached, pull, return_weights, bias, channels)| Turn { cached, pull, return_weights, bias, channels },
    )
}

/// What the oracle says about one round.
struct Expected {
    arrivals: Vec<Arrival>,
    combined: Vec<reference::Combined>,
}

impl Scenario {
    fn ranks(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// The communicator.
    ///
    /// # Errors
    /// When the sizes do not fit; a scenario of [`scenarios`] fits.
    pub fn setup(&self) -> Result<Setup, Error> {
        let topology = Topology::new(self.nodes, self.ranks() / self.nodes)?;
        let shape = Shape::builder()
            .experts(self.ranks() * self.local_experts)
            .topk(self.topk)
            .hidden(self.hidden)
            .max_tokens(1024)
            .element(self.element)
            .build()?;
        let Rings { channels, near, far } = self.rings;
        let settings = Settings::builder(&shape, &topology)
            .channels(channels)
            .slots(near.slots)
            .chunk(near.chunk)
            .credit(near.credit)
            .far_slots(far.slots)
            .far_chunk(far.chunk)
            .far_credit(far.credit)
            .placement(self.placement)
            .arena_bytes(self.arena_bytes);
        let settings = match self.outboxes {
            Some((channels, slots)) => settings.outboxes(channels).outbox_slots(slots),
            None => settings,
        };
        Ok(Setup::new(shape, topology, self.seed)?.settings(settings.build()?))
    }

    /// What ranks bring to a round, the first of each play the number `play * rounds`.
    fn workload(&self, shape: Shape, round: usize) -> Workload {
        let seed = self.seed.wrapping_add(round as u64);
        Workload::new(shape, self.tokens.clone()).kind(self.routing).drop(self.drop).seed(seed)
    }

    /// The batches of all rounds of a play.
    fn batches(&self, shape: Shape, play: usize) -> Result<Vec<Vec<Batch>>, Error> {
        let rounds = self.rounds.len();
        (play * rounds..(play + 1) * rounds).map(|round| self.workload(shape, round).batches()).collect()
    }

    fn round(&self, at: usize, workload: &Workload, rank: Rank) -> Result<Round, Error> {
        let turn = &self.rounds[at];
        let rings = Rings { channels: turn.channels.min(self.rings.channels), ..self.rings };
        Ok(Round {
            rings: Some(rings),
            outbox: self.outbox_use(at, rank),
            worst_rows: 0,
            device_counts: false,
            pull: turn.pull,
            return_weights: turn.return_weights && !self.is_cached(at),
            bias: bias_rows(workload, rank, turn.bias.into())?,
        })
    }

    fn outbox_use(&self, round: usize, rank: Rank) -> OutboxUse {
        match self.uses.len() {
            0 => OutboxUse::default(),
            uses => self.uses[(rank.index() + round) % uses],
        }
    }

    /// Whether round `at` goes along the handle of the one before; the first never does.
    fn is_cached(&self, at: usize) -> bool {
        at > 0 && self.rounds[at].cached
    }

    /// Runs it on `backend` and compares everything with the oracle.
    ///
    /// # Errors
    /// What the backend or the comparison found.
    pub fn check<B: Backend>(&self, backend: &B) -> Result<Compared, String> {
        self.check_in(backend, &self.setup().map_err(|error| error.to_string())?)
    }

    /// [`Scenario::check`] in a communicator that differs from [`Scenario::setup`] in settings, seed or incidents.
    ///
    /// # Errors
    /// As [`Scenario::check`].
    pub fn check_in<B: Backend>(&self, backend: &B, setup: &Setup) -> Result<Compared, String> {
        let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(|error| error.to_string())?;
        let batches =
            (0..plays(self.zombie)).map(|play| self.batches(setup.shape, play)).collect::<Result<Vec<_>, _>>();
        let batches = batches.map_err(|error| error.to_string())?;
        let play = async |ep: &mut B::Endpoint, number: usize, seen: &mut Vec<Observed>| {
            self.play(ep, &world, (number, &batches[number]), seen).await
        };
        zombie::run(backend, (setup, self.zombie), play, |play| {
            let batches: Vec<_> = batches[play.number].iter().map(|batches| play.batches(batches)).collect();
            self.compare(&play, &batches)
        })
    }

    /// Compares all rounds of a play; what ranks saw is `[ranks][rounds]`. Of a play that did not end well, the rounds that a rank came through,
    /// and of the last one the dispatch at least.
    fn compare(&self, play: &Played<Vec<Observed>>, batches: &[Vec<Batch>]) -> Result<Compared, String> {
        let (world, mut compared, mut fresh) = (&play.world, Compared::default(), 0);
        for at in 0..self.rounds.len() {
            if !self.is_cached(at) {
                fresh = at;
            }
            let of_round = |error: &dyn std::fmt::Display| format!("round {at}: {error}");
            let expected = self.expect(play, batches, fresh, at).map_err(|error| of_round(&error))?;
            let seen = || (0..).map(Rank).zip(&play.seen).filter(|(rank, _)| world.takes_part(*rank));
            if let Some((rank, _)) = seen().find(|(_, seen)| play.whole && seen.len() <= at) {
                return Err(of_round(&format_args!("rank {rank} saw nothing of it")));
            }
            // Of all ranks what came: what comes back of it is wrong elsewhere.
            for (rank, observed) in seen().filter_map(|(rank, seen)| Some((rank, seen.get(at)?))) {
                let arrival = &expected.arrivals[rank.index()];
                compared += verify::dispatched_to(world, rank, arrival, observed).map_err(|error| of_round(&error))?;
            }
            for (rank, seen) in seen() {
                let is_complete =
                    |observed: &&Observed| play.whole || at + 1 < seen.len() || !observed.combined_x.is_empty();
                let Some(observed) = seen.get(at).filter(is_complete) else { continue };
                let combined = &expected.combined[rank.index()];
                compared += verify::combined_by(world, rank, combined, observed).map_err(|error| of_round(&error))?;
            }
        }
        Ok(compared)
    }

    /// What one rank does in a play, and sees.
    async fn play<E: ep_core::Endpoint>(
        &self,
        ep: &mut E,
        world: &World,
        (number, batches): (usize, &[Vec<Batch>]),
        seen: &mut Vec<Observed>,
    ) -> Result<(), Error> {
        let _kept = match self.full {
            Some(full) => fill_arena(ep, full).await?,
            None => Vec::new(),
        };
        let mut last = None;
        for (at, batches) in batches.iter().enumerate() {
            let rank = ep.rank();
            let batch = &batches[rank.index()];
            let workload = self.workload(*world.shape(), number * self.rounds.len() + at);
            let how = self.round(at, &workload, rank)?;
            match last.as_ref().filter(|_| self.is_cached(at)) {
                Some(handle) => noted_cached_round(ep, world, (batch, handle), &how, seen).await?,
                None => last = Some(noted_round(ep, world, batch, &how, seen).await?),
            }
        }
        Ok(())
    }

    /// The oracle's word on round `at`, which goes along the routing of round `fresh`.
    fn expect(
        &self,
        play: &Played<Vec<Observed>>,
        batches: &[Vec<Batch>],
        fresh: usize,
        at: usize,
    ) -> Result<Expected, Error> {
        let world = &play.world;
        let cached = self.is_cached(at);
        let moved: Vec<Batch> = batches[fresh]
            .iter()
            .zip(&batches[at])
            .map(|(routing, rows)| Batch { x: rows.x.clone(), ..routing.clone() })
            .collect();
        let mut arrivals = Arrival::expected(world, &moved);
        let turn = &self.rounds[at];
        let workload = self.workload(*world.shape(), play.number * self.rounds.len() + at);
        let mut y = Vec::new();
        let mut bias = Vec::new();
        for (rank, got) in (0u32..).map(Rank).zip(&arrivals) {
            y.push(if cached { got.doubled(world) } else { got.experts(world, rank) });
            let rows = if world.takes_part(rank) { turn.bias } else { 0 };
            bias.push(bias_rows(&workload, rank, rows.into())?);
        }
        let received: Vec<reference::Received> = arrivals.iter().map(|got| got.received.clone()).collect();
        let returned: Vec<Returned<'_>> = received
            .iter()
            .zip(&y)
            .zip(&bias)
            .zip(&moved)
            .map(|(((got, y), bias), batch)| Returned {
                y,
                topk_weights: (turn.return_weights && !cached).then_some(got.topk_weights.as_slice()),
                tokens: batch.tokens as usize,
                bias: [bias.first().map(Vec::as_slice), bias.get(1).map(Vec::as_slice)],
            })
            .collect();
        let combined = reference::combine(world, &received, &returned);
        drop(returned);
        if cached {
            for got in &mut arrivals {
                got.received.topk_idx.clear();
                got.received.topk_weights.clear();
                got.received.expert_counts.clear();
            }
        }
        Ok(Expected { arrivals, combined })
    }
}

/// Lets the arena of rank `full` have no room left for more than a few rows: what it holds from then on. All ranks take part.
pub(crate) async fn fill_arena<E: ep_core::Endpoint>(ep: &mut E, full: Rank) -> Result<Vec<E::Buf>, Error> {
    let (hidden, topk) = (ep.shape().hidden() as usize, ep.shape().topk() as usize);
    let mut batch = Batch { tokens: 1, x: vec![0; hidden], topk_idx: vec![-1; topk], topk_weights: vec![0.0; topk] };
    // One row of every rank, so that little memory is taken at once.
    batch.topk_idx[0] = i64::from(full.0 * ep.shape().experts() / ep.topology().ranks());
    let (x, routing) = upload(ep, &batch)?;
    let handle = ep.dispatch(&x, &routing).await?.handle;
    if ep.rank() != full {
        return Ok(Vec::new());
    }
    Ok(std::iter::from_fn(|| ep.output(&handle)).collect())
}
