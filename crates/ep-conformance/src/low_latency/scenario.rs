//! Random low-latency communicators, batches and turns, drawn by proptest so that they shrink.

use ep_core::reference::{Weighing, World};
use ep_core::{Element, Error, LowLatency, Rank, RankSet, Settings, Shape, Topology};
use proptest::prelude::*;

use super::{Seen, results, upload, verify, weights};
use crate::backend::{Backend, Setup};
use crate::scenario::topologies;
use crate::verify::Compared;
use crate::workload::{Batch, RoutingKind, Workload};
use crate::zombie::{self, Played, Zombie, plays, zombies};

/// A communicator, what it carries in low latency and how, all drawn at random.
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
    /// The shape's limit, at least the largest of `tokens`.
    pub max_tokens: u32,
    /// `[ranks]`: tokens of each rank.
    pub tokens: Vec<u32>,
    /// How tokens choose experts.
    pub routing: RoutingKind,
    /// Each choice is dropped with this probability.
    pub drop: f64,
    /// One dispatch and combine each, one after the other.
    pub turns: Vec<Turn>,
    /// A rank that is suspended, given up, and goes on.
    pub zombie: Option<Zombie>,
}

/// One dispatch and combine of a scenario.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// The weights are given at dispatch: each rank weighs and sums its own results.
    pub at_experts: bool,
    /// The next turn's dispatch is sent before this turn's combine is received: two operations in flight.
    pub ahead: bool,
    /// The results are combined twice, along one handle.
    pub twice: bool,
    /// Of each rank's tokens it takes so many quarters, rounded up: so batches of a bank differ in size.
    pub quarters: u32,
    /// It is given up once, when so much of it was sent and nothing of that received: all rejoin, and it begins anew.
    pub anew: Option<Sent>,
}

/// How much of a turn was sent before it is given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sent {
    /// The dispatch.
    Dispatch,
    /// The combine; the dispatch was received.
    Combine,
}

impl Turn {
    /// Whole batches, one operation after the other, weighed at their source.
    pub const PLAIN: Self = Self { at_experts: false, ahead: false, twice: false, quarters: 4, anew: None };

    fn weighing(self) -> Weighing {
        if self.at_experts { Weighing::AtExperts } else { Weighing::AtSource }
    }
}

/// Any scenario of at most `nodes` nodes of `per_node` ranks; mostly of at most [`USUAL`](crate::scenario::USUAL) ranks in all.
/// `haunted`: with zombies, too.
pub fn scenarios(nodes: u32, per_node: u32, haunted: bool) -> impl Strategy<Value = Scenario> {
    let topology = topologies(nodes, per_node);
    let hidden = prop_oneof![6 => 16u32..64, 1 => 1u32..16, 1 => 64u32..400];
    let sizes = (topology, 1u32..=4, 1u32..=16, hidden, any::<u64>());
    sizes.prop_flat_map(move |((nodes, per_node), local_experts, topk, hidden, seed)| {
        let ranks = nodes * per_node;
        let topk = topk.min(ranks * local_experts);
        let most = (64 / ranks).max(1);
        let tokens = prop_oneof![
            8 => prop::collection::vec(0..=most, ranks as usize),
            1 => Just(vec![0; ranks as usize]),
        ];
        let routing = prop_oneof![
            4 => Just(RoutingKind::Uniform),
            2 => (0.5f64..3.0).prop_map(|exponent| RoutingKind::Skewed { exponent }),
            1 => Just(RoutingKind::Single),
        ];
        let drop = prop_oneof![3 => Just(0.0), 1 => Just(0.3), 1 => Just(1.0)];
        let element = prop_oneof![2 => Just(Element::Bf16), 3 => prop::sample::select(Element::ALL.to_vec())];
        let turns = prop::collection::vec(turn(), 1..=5);
        (element, tokens, 0u32..3, routing, drop, turns, zombies(ranks, haunted)).prop_map(
            move |(element, tokens, spare, routing, drop, turns, zombie)| Scenario {
                // Where a rank is lost, all recover in any case, and who does not come is to blame alone.
                turns: turns
                    .into_iter()
                    .map(|turn| Turn { anew: turn.anew.filter(|_| zombie.is_none()), ..turn })
                    .collect(),
                seed,
                nodes,
                local_experts,
                topk,
                hidden,
                element,
                max_tokens: tokens.iter().copied().max().unwrap_or(0).max(1) + spare,
                tokens,
                routing,
                drop,
                zombie,
            },
        )
    })
}

fn turn() -> impl Strategy<Value = Turn> {
    let quarters = prop_oneof![3 => Just(4u32), 4 => 0u32..4];
    let anew = prop_oneof![8 => Just(None), 1 => Just(Some(Sent::Dispatch)), 1 => Just(Some(Sent::Combine))];
    let all = (any::<bool>(), any::<bool>(), prop::bool::weighted(0.2), quarters, anew);
    all.prop_map(|(at_experts, ahead, twice, quarters, anew)| Turn { at_experts, ahead, twice, quarters, anew })
}

impl Scenario {
    /// The communicator.
    ///
    /// # Errors
    /// When the sizes do not fit; a scenario of [`scenarios`] fits.
    pub fn setup(&self) -> Result<Setup, Error> {
        let ranks = self.tokens.len() as u32;
        let topology = Topology::new(self.nodes, ranks / self.nodes)?;
        let shape = Shape::builder()
            .experts(ranks * self.local_experts)
            .topk(self.topk)
            .hidden(self.hidden)
            .max_tokens(self.max_tokens)
            .element(self.element)
            .build()?;
        // Where results travel as units: none, those of small batches, or all.
        let any = 1 + (self.seed / 4 % u64::from(self.max_tokens)) as u32;
        let most = [any, u32::MAX, self.max_tokens / 2, 0][(self.seed % 4) as usize];
        let settings = Settings::builder(&shape, &topology).slots(4).low_latency(true);
        let settings = settings.low_latency_unit_bytes(self.unit_bytes(most)).build()?;
        Ok(Setup::new(shape, topology, self.seed)?.settings(settings))
    }

    /// What the settings say where the results for batches of so many tokens, and of no more, travel as units, a row a choice. (A row a rank, they do
    /// for as many tokens or more.)
    pub fn unit_bytes(&self, tokens: u32) -> u64 {
        let ranks = self.tokens.len() as u64;
        let all = u64::from(tokens) * u64::from(self.topk) * (ranks - 1) * 2 * u64::from(self.hidden);
        all.div_ceil(ranks)
    }

    /// The batches of turn `at`, `[ranks]`.
    ///
    /// # Errors
    /// Those of [`Workload::batches`].
    pub fn batches(&self, shape: Shape, at: usize) -> Result<Vec<Batch>, Error> {
        let seed = self.seed.wrapping_add(at as u64);
        let quarters = self.turns.get(at).map_or(4, |turn| turn.quarters);
        let tokens = self.tokens.iter().map(|tokens| (tokens * quarters).div_ceil(4)).collect();
        Workload::new(shape, tokens).kind(self.routing).drop(self.drop).seed(seed).batches()
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
            (0..plays(self.zombie)).map(|play| self.play_batches(setup.shape, play)).collect::<Result<Vec<_>, _>>();
        let batches = batches.map_err(|error| error.to_string())?;
        let play = async |ep: &mut B::Endpoint, number: usize, seen: &mut Vec<Seen>| {
            self.play(ep, &world, &batches[number], seen).await
        };
        zombie::run(backend, (setup, self.zombie), play, |play| {
            let batches: Vec<_> = batches[play.number].iter().map(|batches| play.batches(batches)).collect();
            self.compare(&play, &batches)
        })
    }

    /// The batches of all turns of a play, other rows in each.
    pub(super) fn play_batches(&self, shape: Shape, play: usize) -> Result<Vec<Vec<Batch>>, Error> {
        let other = Self { seed: self.seed.wrapping_add((play * self.turns.len()) as u64), ..self.clone() };
        (0..self.turns.len()).map(|at| other.batches(shape, at)).collect()
    }

    /// Compares all turns of a play; what ranks saw is `[ranks][turns]`. Of a play that did not end well, what the calls that did gave.
    fn compare(&self, play: &Played<Vec<Seen>>, batches: &[Vec<Batch>]) -> Result<Compared, String> {
        let mut compared = Compared::default();
        for (at, turn) in self.turns.iter().enumerate() {
            let of_turn = |mismatch: &dyn std::fmt::Display| format!("turn {at}: {mismatch}");
            let seen: Vec<_> = play.seen.iter().map(|turns| turns.get(at)).collect();
            let missing =
                (0..).map(Rank).zip(&seen).find(|(rank, seen)| play.world.takes_part(*rank) && seen.is_none());
            if let Some((rank, _)) = missing.filter(|_| play.whole) {
                return Err(of_turn(&format_args!("rank {rank} saw nothing of it")));
            }
            compared += verify::what_was_seen(&play.world, &batches[at], turn.weighing(), &seen, play.whole)
                .map_err(|mismatch| of_turn(&mismatch))?;
        }
        Ok(compared)
    }

    /// What one rank does in a play, and sees.
    async fn play<E: LowLatency>(
        &self,
        ep: &mut E,
        world: &World,
        batches: &[Vec<Batch>],
        all: &mut Vec<Seen>,
    ) -> Result<(), Error> {
        let mut sent = None;
        for (at, turn) in self.turns.iter().enumerate() {
            let batch = &batches[at][ep.rank().index()];
            if let Some(half) = turn.anew {
                give_up(ep, world, batch, (*turn, half), sent.take()).await?;
            }
            let dispatch = match sent.take() {
                Some(dispatch) => dispatch,
                None => dispatch(ep, batch, *turn).await?,
            };
            let got = ep.receive_dispatch(&dispatch).await?;
            let number = all.len();
            all.push(Seen::of_dispatch(ep, &got)?);
            let y = results(ep, world, &all[number])?;
            let weights = weights(ep, batch, turn.weighing())?;
            if turn.twice {
                let back = ep.low_latency_combine(&y, &got.handle, weights.as_ref()).await?;
                all[number].combined_x = ep.bytes(&back.x)?;
            }
            let combine = ep.send_combine(&y, &got.handle, weights.as_ref()).await?;
            if let Some(next) = self.turns.get(at + 1).filter(|_| turn.ahead) {
                sent = Some(self::dispatch(ep, &batches[at + 1][ep.rank().index()], *next).await?);
            }
            let back = ep.receive_combine(&combine).await?;
            let back = ep.bytes(&back.x)?;
            if turn.twice && back != all[number].combined_x {
                return Err(Error::invalid("second combine along a handle", "other bytes", "those of the first"));
            }
            all[number].combined_x = back;
        }
        Ok(())
    }
}

/// Sends so much of a turn, of which the dispatch may have been sent, and rejoins.
async fn give_up<E: LowLatency>(
    ep: &mut E,
    world: &World,
    batch: &Batch,
    (turn, half): (Turn, Sent),
    sent: Option<E::Dispatching>,
) -> Result<(), Error> {
    let sent = match sent {
        Some(sent) => sent,
        None => dispatch(ep, batch, turn).await?,
    };
    if half == Sent::Combine {
        let got = ep.receive_dispatch(&sent).await?;
        let seen = Seen::of_dispatch(ep, &got)?;
        let y = results(ep, world, &seen)?;
        let weights = weights(ep, batch, turn.weighing())?;
        ep.send_combine(&y, &got.handle, weights.as_ref()).await?;
    }
    ep.rejoin().await
}

async fn dispatch<E: LowLatency>(ep: &mut E, batch: &Batch, turn: Turn) -> Result<E::Dispatching, Error> {
    let (x, routing) = upload(ep, batch, turn.weighing())?;
    ep.send_dispatch(&x, &routing).await
}
