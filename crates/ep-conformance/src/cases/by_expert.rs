//! Rows by expert: how they stand, what comes back, and what is refused.

use ep_core::engine::{Combine, Dispatch, Routing};
use ep_core::incident::Incident;
use ep_core::reference::World;
use ep_core::ring::Geometry;
use ep_core::{Element, Endpoint, Error, Placement, Rank, RankSet, Rings, Scaling};
use serde::{Deserialize, Serialize};

use super::fixture::{Layer, Verdict, allowed, direct, ensure, finished, layer, placements, pulled, scenario, text};
use crate::arrival::Arrival;
use crate::backend::{Backend, Requirement, Setup};
use crate::by_expert::{How, Seen, cached_round, compare, round};
use crate::drive::{self, Round, bias_rows, upload};
use crate::harness::Case;
use crate::scenario::{Scenario, fill_arena};
use crate::verify::{self, Compared, Observed};
use crate::workload::{Batch, RoutingKind, Workload};
use crate::zombie::{self, Played, Zombie};

const ALIGNMENTS: [u32; 3] = [1, 8, 128];

/// How the rows by expert of a scenario are asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) alignment: u32,
    /// Rows to make room for beyond those that come, whose number stays in the machine's memory; none: the host hears of it.
    pub(super) spare: Option<u32>,
    /// What comes back is what rounding the sums leaves.
    pub(super) remainder: bool,
}

impl From<u32> for Asked {
    fn from(alignment: u32) -> Self {
        Self { alignment, spare: None, remainder: false }
    }
}

impl Asked {
    /// Rows to make room for where `rows` come, of a communicator's setup; 0 for those that come.
    fn worst_rows(self, setup: &Setup, rows: usize) -> u32 {
        let most = setup.topology.ranks().saturating_mul(setup.shape.max_tokens());
        self.spare.map_or(0, |spare| (rows as u32).saturating_add(spare).clamp(1, most))
    }
}

pub(super) fn cases<B: Backend>() -> Vec<Case<B>> {
    let case = |name, needs, body| Case { name, needs, body };
    let own: &[Requirement] = &[Requirement::ByExpert];
    vec![
        case("by_expert_rows_stand_as_the_oracle_says", own, stand::<B> as fn(&B) -> _),
        case("by_expert_topk_from_1_to_32", own, topk_sizes::<B>),
        case("by_expert_every_placement", own, every_placement::<B>),
        case("by_expert_rows_of_several_channels", own, several_channels::<B>),
        case("by_expert_no_tokens_and_experts_without_tokens", own, without_tokens::<B>),
        case("by_expert_all_tokens_to_one_expert", own, one_expert::<B>),
        case("by_expert_thousands_of_experts_at_a_rank", own, many_experts::<B>),
        case("by_expert_fp8_rows_with_their_scales", own, fp8_rows::<B>),
        case("by_expert_int8_rows_with_their_scales", &[Requirement::ByExpert, Requirement::Int8], |backend| {
            coded_rows(backend, Element::Int8)
        }),
        case("by_expert_over_several_nodes", &[Requirement::ByExpert, Requirement::Nodes], nodes::<B>),
        case("by_expert_counts_that_stay_on_the_device", own, uncounted::<B>),
        case("by_expert_every_placement_and_counts_that_stay", own, uncounted_everywhere::<B>),
        case("by_expert_coded_rows_and_counts_that_stay", own, |backend| {
            let coded = Scenario { element: Element::Fp8(Scaling::Exact), hidden: 400, ..scenario(2, 12) };
            check(backend, &coded, Asked { alignment: 8, spare: Some(9), remainder: false })
        }),
        case(
            "by_expert_over_several_nodes_and_counts_that_stay",
            &[Requirement::ByExpert, Requirement::Nodes],
            |backend| check(backend, &between_nodes(), Asked { alignment: 8, spare: Some(6), remainder: false }),
        ),
        case("by_expert_what_rounding_sums_leaves", &[Requirement::ByExpert, Requirement::Remainders], |backend| {
            let asked = |spare| Asked { alignment: 8, spare, remainder: true };
            check(backend, &scenario(3, 14), asked(None))?;
            check(backend, &Scenario { topk: 5, local_experts: 4, ..scenario(2, 15) }, asked(Some(4)))
        }),
        case(
            "by_expert_after_a_rank_has_gone",
            &[Requirement::ByExpert, Requirement::Departures],
            after_a_failure::<B>,
        ),
        case("by_expert_a_token_may_name_an_expert_twice", own, repeats::<B>),
        case("by_expert_more_choices_than_there_is_room_for_fail", own, too_many_choices::<B>),
        case("by_expert_what_cannot_be_is_refused_and_costs_nothing", own, refusals::<B>),
    ]
}

/// Rounds of a communicator, and what a rank saw of them: two by expert, the second in memory that the first has left; another batch along its handle;
/// and one by source.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Story {
    before: Seen,
    fresh: Seen,
    cached: Seen,
    plain: Observed,
}

/// A communicator of a scenario, whose rounds are not those of a [`Story`]'s.
struct Stage {
    setup: Setup,
    world: World,
    /// Of each round.
    batches: [Vec<Batch>; 2],
    /// Of each batch, `[ranks]`.
    how: [Vec<How>; 2],
    /// A rank whose arena has no room left.
    full: Option<Rank>,
}

impl Stage {
    /// In which the ranks of `mask` take no part.
    fn new(scenario: &Scenario, asked: Asked, mask: &RankSet) -> Result<Self, Error> {
        let setup = scenario.setup()?;
        let world = World::new(setup.shape, setup.topology, mask.clone())?;
        let drawn = |seed| {
            let workload = Workload::new(setup.shape, scenario.tokens.clone());
            workload.kind(scenario.routing).drop(scenario.drop).seed(seed)
        };
        let (first, second) = (drawn(scenario.seed), drawn(scenario.seed.wrapping_add(77)));
        let (return_weights, bias) = (scenario.seed.is_multiple_of(2), scenario.seed as usize % 3);
        let present = |(rank, batch)| if mask.contains(rank) { Batch::default() } else { batch };
        let batches = [first.batches()?, second.batches()?];
        let batches = batches.map(|batches| setup.topology.all().zip(batches).map(present).collect::<Vec<_>>());
        let how = |batches: &[Batch], zero_spare| -> Result<Vec<How>, Error> {
            let arrivals = setup.topology.all().zip(Arrival::expected(&world, batches));
            let how = arrivals.map(|(rank, arrival)| {
                let worst_rows = asked.worst_rows(&setup, arrival.received.rows());
                let bias = bias_rows(&first, rank, if mask.contains(rank) { 0 } else { bias })?;
                Ok(How {
                    rings: None,
                    alignment: asked.alignment,
                    worst_rows,
                    zero_spare,
                    remainder: asked.remainder,
                    return_weights,
                    bias,
                })
            });
            how.collect()
        };
        // The memory that the first leaves is full of its rows.
        let how = [how(&batches[0], true)?, how(&batches[1], false)?];
        Ok(Self { batches, setup, world, how, full: scenario.full })
    }

    async fn play<E: Endpoint>(&self, ep: &mut E) -> Result<Story, Error> {
        let at = ep.rank().index();
        let [first, second] = [0, 1].map(|round| &self.batches[round][at]);
        let [how, how_before] = [0, 1].map(|round| &self.how[round][at]);
        let _kept = match self.full {
            Some(full) => fill_arena(ep, full).await?,
            None => Vec::new(),
        };
        let (before, _) = round(ep, &self.world, second, how_before).await?;
        let (fresh, handle) = round(ep, &self.world, first, how).await?;
        let cached = cached_round(ep, &self.world, second, &handle, how).await?;
        let plain = Round { return_weights: true, ..Round::default() };
        let (plain, _) = drive::round(ep, &self.world, first, &plain).await?;
        Ok(Story { before, fresh, cached, plain })
    }

    /// Holds what all ranks saw against the oracle.
    fn compare(&self, stories: Vec<Story>, tells_weights: bool) -> Result<Compared, String> {
        let [first, second] = &self.batches;
        let (mut before, mut fresh, mut cached, mut plain) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for story in stories {
            before.push(story.before);
            fresh.push(story.fresh);
            cached.push(story.cached);
            plain.push(story.plain);
        }
        let [how, how_before] = &self.how;
        compare(&self.world, (second, second), how_before, false, &before).map_err(text)?;
        let mut present = self.setup.topology.all().zip(&fresh).filter(|(rank, _)| self.world.takes_part(*rank));
        let told = present.all(|(_, seen)| seen.weights.is_some() == tells_weights);
        ensure(told, || "weights of slots are told where they are not, or not where they are".into())?;
        let compared = compare(&self.world, (first, first), how, false, &fresh).map_err(text)?;
        let has_tokens = first.iter().any(|batch| batch.tokens > 0);
        ensure(!has_tokens || compared.values > 0, || "nothing was compared".into())?;
        compare(&self.world, (first, second), how, true, &cached).map_err(|mismatch| format!("cached: {mismatch}"))?;
        verify::run(&self.world, first, &plain).map_err(|mismatch| format!("by source afterwards: {mismatch}"))
    }
}

/// Plays a scenario's communicator by expert, in a setup that may plant something.
pub(super) fn check_in<B: Backend>(
    backend: &B,
    scenario: &Scenario,
    asked: impl Into<Asked>,
    setup: Option<&Setup>,
) -> Verdict {
    let asked = asked.into();
    let stage = Stage::new(scenario, asked, &RankSet::new()).map_err(text)?;
    let tells_weights = backend.lacks(Requirement::SlotWeights).is_none();
    let setup = setup.unwrap_or(&stage.setup);
    let without = |zombie: Zombie| Stage::new(scenario, asked, &zombie.lost(setup));
    let after = scenario.zombie.map(without).transpose().map_err(text)?;
    let stage_of = |mask: &RankSet| after.as_ref().filter(|_| !mask.is_empty()).unwrap_or(&stage);
    let play = async |ep: &mut B::Endpoint, _, seen: &mut Vec<Story>| {
        seen.push(stage_of(ep.mask()).play(ep).await?);
        Ok(())
    };
    let compared = zombie::run(backend, (setup, scenario.zombie), play, |play: Played<Vec<Story>>| {
        let absent = setup.topology.all().filter(|&rank| !play.world.takes_part(rank)).collect();
        let stories = play.seen.into_iter().map(|stories| stories.into_iter().next().unwrap_or_default()).collect();
        if play.whole { stage_of(&absent).compare(stories, tells_weights) } else { Ok(Compared::default()) }
    });
    compared.map(drop)
}

/// Plays it under several seeds.
fn check<B: Backend>(backend: &B, scenario: &Scenario, asked: impl Into<Asked>) -> Verdict {
    let asked = asked.into();
    (0..backend.seeds(3)).try_for_each(|more| {
        let scenario = Scenario { seed: scenario.seed + more, ..scenario.clone() };
        check_in(backend, &scenario, asked, None).map_err(|error| format!("seed {}, {asked:?}: {error}", scenario.seed))
    })
}

fn stand<B: Backend>(backend: &B) -> Verdict {
    for (ranks, local_experts) in [(1, 3), (2, 1), (3, 4)] {
        for alignment in ALIGNMENTS {
            check(
                backend,
                &Scenario { local_experts, topk: 2.min(ranks * local_experts), ..scenario(ranks, 13) },
                alignment,
            )?;
        }
    }
    check(backend, &Scenario { drop: 0.4, hidden: 300, ..scenario(2, 20) }, 8)
}

fn topk_sizes<B: Backend>(backend: &B) -> Verdict {
    [1, 2, 7, 16, 32].into_iter().try_for_each(|topk| {
        check(backend, &Scenario { topk, local_experts: 20, ..scenario(2, 9) }, ALIGNMENTS[topk as usize % 3])
    })
}

fn every_placement<B: Backend>(backend: &B) -> Verdict {
    for placement in placements(backend) {
        let scenario = if placement == Placement::Pulled { pulled(3, 15) } else { direct(3, 15) };
        check(backend, &Scenario { placement, ..scenario }, 8)?;
    }
    Ok(())
}

/// A backend may copy the rows of one channel while those of others come.
fn several_channels<B: Backend>(backend: &B) -> Verdict {
    let rings = Rings::uniform(5, Geometry { slots: 4, chunk: 2, credit: 2 });
    let several = Scenario { rings, tokens: vec![21, 3, 40], ..direct(3, 0) };
    for seed in 5..8 {
        let asked = |spare| Asked { alignment: 8, spare, remainder: false };
        check_in(backend, &Scenario { seed, ..several.clone() }, asked(None), None)?;
        let coded = Scenario { element: Element::Fp8(Scaling::Exact), hidden: 400, drop: 0.3, ..several.clone() };
        check_in(backend, &Scenario { seed, ..coded }, asked(Some(5)), None)?;
    }
    // One rank has no room: what it gets comes through rings, behind what all others are told of.
    let full = Scenario { seed: 7, full: Some(Rank(1)), ..several };
    check_in(backend, &full, Asked { alignment: 8, spare: Some(5), remainder: false }, None)
}

fn without_tokens<B: Backend>(backend: &B) -> Verdict {
    check(backend, &scenario(3, 0), 8)?;
    check(backend, &Scenario { drop: 1.0, ..scenario(2, 9) }, 8)?;
    // Of 12 experts at each rank, most have none.
    check(backend, &Scenario { local_experts: 12, topk: 1, tokens: vec![3, 0], ..scenario(2, 0) }, 128)
}

fn one_expert<B: Backend>(backend: &B) -> Verdict {
    ALIGNMENTS.into_iter().try_for_each(|alignment| {
        check(backend, &Scenario { routing: RoutingKind::Single, topk: 1, ..scenario(3, 25) }, alignment)
    })
}

/// Tables of so many experts fit into no processor's own memory beside other things.
fn many_experts<B: Backend>(backend: &B) -> Verdict {
    check_in(backend, &Scenario { local_experts: 3500, topk: 5, ..scenario(1, 30) }, 2, None)
}

fn fp8_rows<B: Backend>(backend: &B) -> Verdict {
    let all = [Scaling::Exact, Scaling::PowerOfTwo, Scaling::Ue8m0];
    all.into_iter().try_for_each(|scaling| coded_rows(backend, Element::Fp8(scaling)))
}

fn coded_rows<B: Backend>(backend: &B, element: Element) -> Verdict {
    check(backend, &Scenario { element, hidden: 400, ..scenario(2, 12) }, 8)?;
    check(backend, &Scenario { element, hidden: 48, ..direct(3, 12) }, 1)
}

/// Room for just the rows that come, for some more, and for all that can.
fn uncounted<B: Backend>(backend: &B) -> Verdict {
    for (alignment, spare) in [(1, 0), (3, 4), (8, u32::MAX)] {
        let asked = Asked { alignment, spare: Some(spare), remainder: false };
        check(backend, &Scenario { local_experts: 4, drop: 0.3, ..scenario(3, 11) }, asked)?;
    }
    // Fewer experts than choices of a token.
    let asked = Asked { alignment: 3, spare: Some(2), remainder: false };
    check(backend, &Scenario { local_experts: 2, topk: 4, ..scenario(2, 9) }, asked)?;
    // Some ranks, or all, have nothing to send, or to receive.
    check(backend, &Scenario { tokens: vec![5, 0], ..scenario(2, 0) }, asked)?;
    check(backend, &Scenario { drop: 1.0, ..scenario(2, 9) }, asked)?;
    check(backend, &Scenario { routing: RoutingKind::Single, topk: 1, ..scenario(3, 12) }, asked)
}

fn uncounted_everywhere<B: Backend>(backend: &B) -> Verdict {
    for placement in placements(backend) {
        let scenario = if placement == Placement::Pulled { pulled(3, 15) } else { direct(3, 15) };
        check(backend, &Scenario { placement, ..scenario }, Asked { alignment: 8, spare: Some(5), remainder: false })?;
    }
    Ok(())
}

fn between_nodes() -> Scenario {
    Scenario { nodes: 2, topk: 5, ..scenario(4, 14) }
}

fn nodes<B: Backend>(backend: &B) -> Verdict {
    check(backend, &between_nodes(), 8)?;
    check(backend, &Scenario { nodes: 3, tokens: vec![40, 0, 3], ..scenario(3, 0) }, 128)
}

/// The rank that ends.
const VICTIM: Rank = Rank(1);

/// Who fails is named; without it, rows stand by expert again.
fn after_a_failure<B: Backend>(backend: &B) -> Verdict {
    for seed in 0..backend.seeds(10) {
        let layers = [layer(3, 10, seed, Placement::Ring), by_channels(4 * seed + 3)];
        for layer in layers {
            let mut layer = layer.map_err(text)?;
            layer.setup.settings = layer.setup.settings.with_deadline(allowed(4)).map_err(text)?;
            layer.setup = layer.setup.incident(Incident::Crash { rank: VICTIM, after: 20 + seed * 7, noticed: true });
            survive(backend, &layer).map_err(|error| format!("seed {seed}: {error}"))?;
        }
    }
    Ok(())
}

/// Rows are placed by several channels.
fn by_channels(seed: u64) -> Result<Layer, Error> {
    let rings = Rings::uniform(5, Geometry { slots: 4, chunk: 2, credit: 2 });
    let scenario = Scenario { seed, rings, ..direct(3, 21) };
    let setup = scenario.setup()?;
    let batches = Workload::new(setup.shape, scenario.tokens).seed(seed).batches()?;
    Ok(Layer { setup, batches })
}

fn survive<B: Backend>(backend: &B, Layer { setup, batches }: &Layer) -> Verdict {
    let mask: RankSet = [VICTIM].into_iter().collect();
    let whole = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
    let world = World::new(setup.shape, setup.topology, mask.clone()).map_err(text)?;
    let how = How { alignment: 8, return_weights: true, ..How::default() };
    let outcomes = backend.run(setup, async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let failure = loop {
            match round(&mut ep, &whole, batch, &how).await {
                Ok(_) => (),
                Err(Error::Failed(failure)) => break failure,
                Err(error) => return Err(error),
            }
        };
        ep.recover(&[failure.culprit].into_iter().collect()).await?;
        Ok((failure.culprit, round(&mut ep, &world, batch, &how).await?.0))
    })?;
    let (mut batches, mut seen) = (batches.clone(), Vec::new());
    batches[VICTIM.index()] = Batch::default();
    for (rank, outcome) in setup.topology.all().zip(outcomes) {
        if rank == VICTIM {
            seen.push(Seen::default());
            continue;
        }
        let (culprit, after) = outcome.ok_or_else(|| format!("rank {rank} did not finish"))?.map_err(text)?;
        ensure(culprit == VICTIM, || format!("rank {rank} blames rank {culprit}"))?;
        seen.push(after);
    }
    compare(&world, (&batches, &batches), &vec![how; seen.len()], false, &seen).map_err(text).map(drop)
}

/// A token's row then stands twice at the expert.
fn repeats<B: Backend>(backend: &B) -> Verdict {
    let Layer { setup, .. } = layer(2, 1, 3, Placement::Ring).map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let x = ep.rows(&[ep.rank().0 as u8 + 1; 64], 1)?;
        let routing = Routing::TopK { topk_idx: ep.array(&[2i64, 2])?, topk_weights: None };
        let options = Dispatch { by_expert: true, repeats: true, ..Dispatch::default() };
        let got = ep.dispatch_with(&x, &routing, &options).await?;
        let slots = got.by_expert.as_ref().map(|told| ep.values(&told.slots)).transpose()?;
        let bytes = ep.bytes(&got.x)?;
        let one = ep.rows(&[0x80, 0x3f].repeat(32 * got.handle.result_rows() as usize), got.handle.result_rows())?;
        let back = ep.combine(&one, &got.handle, Combine::default()).await?;
        Ok((slots, bytes, ep.bytes(&back.x)?))
    })?;
    let seen = finished(outcomes)?;
    let (none, both) = (&seen[0], &seen[1]);
    ensure(none.0.as_deref() == Some(&[]) && none.1.is_empty(), || format!("rank 0 received {none:?}"))?;
    let rows = [[1u8; 64], [1; 64], [2; 64], [2; 64]].concat();
    ensure(both.0.as_deref() == Some(&[0, 1, 2, 3]) && both.1 == rows, || format!("rank 1 received {both:?}"))?;
    let two = [0x00, 0x40].repeat(32);
    ensure(seen.iter().all(|seen| seen.2 == two), || "a token's two choices are not summed".into())
}

/// A rank makes room for one choice of a row, as its tokens name an expert once. Another's names it twice.
fn too_many_choices<B: Backend>(backend: &B) -> Verdict {
    let scenario = Scenario { local_experts: 1, topk: 2, ..scenario(2, 1) };
    let Stage { setup, world, batches: [batches, _], how: [how, _], .. } =
        Stage::new(&scenario, Asked { alignment: 1, spare: Some(0), remainder: false }, &RankSet::new())
            .map_err(text)?;
    let outcomes = backend.run(&setup, async |mut ep| {
        let me = ep.rank().index();
        let (x, _) = upload(&mut ep, &batches[me])?;
        let topk_idx = ep.array(if me == 0 { &[1i64, 1] } else { &[-1i64, -1] })?;
        let routing = Routing::TopK { topk_idx, topk_weights: None };
        let one = Dispatch { by_expert: true, worst_rows: 1, device_counts: true, ..Dispatch::default() };
        let said = match ep.dispatch_with(&x, &routing, &Dispatch { repeats: me == 0, ..one }).await {
            // Where the host does not wait, the next call tells. The other rank had nothing to wait for.
            Ok(got) if me == 1 => {
                let y = ep.rows(&vec![0; ep.shape().result_bytes() as usize], 1)?;
                ep.combine(&y, &got.handle, Combine::default()).await.err()
            }
            outcome => outcome.err(),
        };
        ep.recover(&RankSet::new()).await?;
        let said = said.and_then(|error| error.failure().map(|failure| failure.fault.to_string()));
        Ok((said, round(&mut ep, &world, &batches[me], &how[me]).await?.0))
    })?;
    let (said, seen): (Vec<_>, Vec<_>) = finished(outcomes)?.into_iter().unzip();
    let expected = "rows by expert is 1 here and 2 on rank 1";
    ensure(said[1].as_deref() == Some(expected), || format!("rank 1 said {:?}, expected {expected}", said[1]))?;
    compare(&world, (&batches, &batches), &how, false, &seen).map_err(text).map(drop)
}

fn refusals<B: Backend>(backend: &B) -> Verdict {
    let Layer { setup, batches } = layer(2, 4, 1, Placement::Ring).map_err(text)?;
    let world = World::new(setup.shape, setup.topology, RankSet::new()).map_err(text)?;
    let how = How { alignment: 8, return_weights: true, ..How::default() };
    let outcomes = backend.run(&setup, async |mut ep| {
        let mut said = Vec::new();
        let batch = &batches[ep.rank().index()];
        let (x, routing) = upload(&mut ep, batch)?;
        let membership = Routing::Membership { in_rank: ep.array(&[1u8; 8])?, tokens_per_expert: vec![1, 1, 1, 1] };
        let by_expert = Dispatch { by_expert: true, ..Dispatch::default() };
        let cases = [
            (&membership, by_expert.clone()),
            (&routing, Dispatch { worst_rows: 8, ..by_expert.clone() }),
            (&routing, Dispatch { device_counts: true, ..by_expert.clone() }),
            (&routing, Dispatch { expert_alignment: 0, ..by_expert.clone() }),
            (&routing, Dispatch { expert_alignment: (1 << 29) + 1, ..by_expert }),
        ];
        for (routing, options) in cases {
            let refused = ep.dispatch_with(&x, routing, &options).await;
            said.push(refused.map_or_else(|error| error.to_string(), |_| "it was accepted".into()));
        }
        let (seen, handle) = round(&mut ep, &world, batch, &how).await?;
        let few = ep.rows(&vec![0; 64 * (handle.result_rows() as usize - 1)], handle.result_rows() - 1)?;
        let refused = ep.combine(&few, &handle, Combine::default()).await;
        said.push(refused.map_or_else(|error| error.to_string(), |_| "it was accepted".into()));
        ensure_none(ep.output(&handle).is_some())?;
        Ok((said, handle.result_rows(), seen))
    })?;
    let mut seen = Vec::new();
    for (said, rows, saw) in finished(outcomes)? {
        let expected = [
            "routing of a dispatch by expert is a membership, allowed: choices, topk_idx".to_owned(),
            "worst-case rows of a dispatch by expert is 8, allowed: 0, or with device counts: where the host knows them, \
             rows by expert are as many as come"
                .to_owned(),
            "worst-case rows of a dispatch with device counts is 0, allowed: at least 1".to_owned(),
            "expert alignment is 0, allowed: at least 1".to_owned(),
            "expert alignment of a dispatch by expert is 536870913, allowed: at most 536870912, for 2 local experts"
                .to_owned(),
            format!("rows of y is {}, allowed: at least {rows}", rows - 1),
        ];
        ensure(said == expected, || format!("said {said:?}, expected {expected:?}"))?;
        seen.push(saw);
    }
    compare(&world, (&batches, &batches), &[how.clone(), how], false, &seen).map_err(text).map(drop)
}

/// Results of rows by expert are summed before they are offered: there is no memory of theirs that peers could pull from.
fn ensure_none(offered: bool) -> Result<(), Error> {
    if offered { Err(Error::invalid("output of a dispatch by expert", "offered", "none")) } else { Ok(()) }
}
