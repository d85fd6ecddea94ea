//! Low latency through endpoints, and the faults that are planted in its kernels.

use std::cell::Cell as Shared;

use ep_ascend::args::Plant;
use ep_ascend::twin::{Host, Machine};
use ep_ascend::{AscendEndpoint, Cluster, Roles};
use ep_conformance::drive;
use ep_conformance::harness::share;
use ep_conformance::low_latency::{Seen, Weighing, results, round, upload, verify, weights};
use ep_conformance::workload::{Batch, Workload};
use ep_core::engine::low_latency::LowRouting;
use ep_core::port::{Cell, Counter, LaneKind};
use ep_core::reference::World;
use ep_core::{Element, Endpoint as _, Error, Fault, LowLatency as _, Nanos, Rank, RankSet, Settings, Shape, Topology};

use crate::{FEW, library};

/// Seeds that are tried until one catches.
pub(crate) const SEEDS: u64 = 8;
pub(crate) const RANKS: u32 = 3;
/// Ticks of a turn in which nothing moves.
const HURRY: u64 = 20;
/// Time allowed to an operation, where waits last.
const ALLOWED: Nanos = Nanos::from_millis(20);

/// What the ranks do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Story {
    /// Rounds of both forms.
    Rounds,
    /// The same, with several cores for each rank.
    Wide,
    /// The same, of rows of several pieces.
    Long,
    /// The same, of INT8 rows with something between codes and scale.
    Int8,
    /// Dispatches, of which the next is sent before the last is received; rank 0 takes its time before each.
    Ahead,
    /// Dispatches of few long rows, each sent right behind another; rank 2's card is slow.
    Close,
    /// Rank 0 dispatches where the others combine.
    OtherKind,
    /// Rank 0 goes on without rank 2, which finds out.
    Masked,
    /// The same when the others have sent: who is masked finds out where it waits for rows.
    MaskedLate,
    /// Rank 0 fails in throughput mode, where the others wait for it in low latency.
    OtherMode,
    /// What rank 2 sends to rank 1 is lost: rank 0 waits for rank 1, which waits for rank 2.
    Chain,
    /// The same where rank 1 begins to wait when rank 0 has waited for more than half of its time.
    LateChain,
    /// Nothing comes of rank 2.
    Absent,
    /// The same, and ranks 0 and 1 wait for each other, too, as what they send each other is lost.
    Mutual,
    /// Rank 2, whose card is slow, ends when all have sent: the others receive what it has sent.
    Ends,
    /// Rank 2 leaves, and rank 1 takes its time: whoever has failed, has masked rank 2 and waits again blames nobody.
    Left,
}

impl Story {
    fn shape(self) -> Shape {
        let hidden = match self {
            Self::Long => 24_000,
            Self::Close => 4_000,
            Self::Int8 => 20,
            _ => 72,
        };
        let element = if self == Self::Int8 { Element::Int8 } else { Element::Bf16 };
        let builder = Shape::builder().experts(2 * RANKS).topk(4).hidden(hidden).max_tokens(9).element(element);
        builder.build().expect("a shape")
    }

    const fn roles(self) -> Roles {
        match self {
            Self::Wide | Self::Left | Self::Mutual => Roles { senders: 4, receivers: 4, ..FEW },
            _ => FEW,
        }
    }
}

/// How it was for a rank: what it saw; or how it failed, as it must.
type Told = Result<Vec<(Weighing, Seen)>, Error>;

/// Lets the other ranks go on meanwhile.
pub(crate) async fn linger() {
    linger_for(60).await;
}

/// The same for so many turns.
async fn linger_for(turns: u32) {
    let mut left = turns;
    std::future::poll_fn(|context| {
        left -= 1;
        context.waker().wake_by_ref();
        if left == 0 { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// `have_sent`: ranks of [`Story::Ends`] whose sending halves have ended.
async fn live(ep: &mut AscendEndpoint, world: &World, batch: &Batch, story: Story, have_sent: &Shared<u32>) -> Told {
    let me = ep.rank().0;
    let both = [Weighing::AtSource, Weighing::AtExperts];
    let (x, routing) = upload(ep, batch, Weighing::AtSource)?;
    match story {
        Story::Rounds | Story::Wide | Story::Long | Story::Int8 => {
            let mut seen = Vec::new();
            for weighing in both.into_iter().cycle().take(if story == Story::Long { 2 } else { 4 }) {
                seen.push((weighing, round(ep, world, batch, weighing).await?));
            }
            return Ok(seen);
        }
        Story::Ahead => {
            let mut sent = vec![ep.send_dispatch(&x, &routing).await?];
            let mut seen = Vec::new();
            for at in 0..4 {
                if at < 3 {
                    sent.push(ep.send_dispatch(&x, &routing).await?);
                }
                if me == 0 {
                    linger().await;
                }
                let got = ep.receive_dispatch(&sent[at]).await?;
                seen.push(Seen::of_dispatch(ep, &got)?);
            }
            // One of them is combined, so that there is a result.
            let mut last = round(ep, world, batch, Weighing::AtSource).await?;
            if let Some(other) = seen.into_iter().find(|seen| seen.experts != last.experts) {
                last.experts = other.experts;
            }
            return Ok(vec![(Weighing::AtSource, last)]);
        }
        Story::Close => {
            for _ in 0..2 {
                let sent = [ep.send_dispatch(&x, &routing).await?, ep.send_dispatch(&x, &routing).await?];
                for sent in &sent {
                    ep.receive_dispatch(sent).await?;
                }
            }
            return Ok(vec![(Weighing::AtSource, round(ep, world, batch, Weighing::AtSource).await?)]);
        }
        Story::OtherKind => {
            let got = ep.low_latency_dispatch(&x, &routing).await?;
            if me == 0 {
                ep.low_latency_dispatch(&x, &routing).await?;
            } else {
                let seen = Seen::of_dispatch(ep, &got)?;
                let y = results(ep, world, &seen)?;
                let weights = weights(ep, batch, Weighing::AtSource)?;
                ep.low_latency_combine(&y, &got.handle, weights.as_ref()).await?;
            }
        }
        Story::Masked | Story::MaskedLate => {
            round(ep, world, batch, Weighing::AtSource).await?;
            if me == 0 {
                if story == Story::MaskedLate {
                    linger_for(20).await;
                }
                ep.mask_rank(Rank(2)).await?;
            }
            ep.low_latency_dispatch(&x, &routing).await?;
        }
        Story::OtherMode if me == 0 => {
            drive::round(ep, world, batch, &drive::Round::default()).await?;
        }
        Story::Chain | Story::LateChain => {
            let late = story == Story::LateChain && me == 1;
            for _ in 0..2 {
                let sent = ep.send_dispatch(&x, &routing).await?;
                let until = ep.now() + Nanos(ALLOWED.0 / 8 * 5);
                while late && ep.now() < until {
                    linger_for(2).await;
                }
                ep.receive_dispatch(&sent).await?;
            }
        }
        Story::Absent | Story::Mutual | Story::Left if me == 2 => {}
        Story::Ends => {
            let sent = ep.send_dispatch(&x, &routing).await;
            have_sent.set(have_sent.get() + 1);
            if me != 2 {
                ep.receive_dispatch(&sent?).await?;
            }
            // Who has not sent yet may find that it is gone.
            while me == 2 && have_sent.get() < RANKS {
                linger_for(2).await;
            }
        }
        Story::Left => {
            if me == 1 {
                linger().await;
            }
            let sent = ep.send_dispatch(&x, &routing).await?;
            let failed = ep.receive_dispatch(&sent).await.map(drop);
            let blamed = failed.err().and_then(|error| error.failure().map(|failure| failure.culprit));
            if blamed != Some(Rank(2)) {
                return Err(Error::invalid("whom a rank blames", format!("{blamed:?}"), "rank 2"));
            }
            ep.mask_rank(Rank(2)).await?;
            ep.receive_dispatch(&sent).await?;
            for _ in 0..4 {
                if me == 1 {
                    linger().await;
                }
                ep.low_latency_dispatch(&x, &routing).await?;
            }
        }
        Story::OtherMode | Story::Absent | Story::Mutual => {
            let sent = ep.send_dispatch(&x, &routing).await?;
            ep.receive_dispatch(&sent).await?;
        }
    }
    Ok(Vec::new())
}

/// What the failure of a rank tells.
fn said(rank: usize, error: &Error) -> String {
    let kind = match error.failure().map(|failure| failure.fault) {
        Some(Fault::Timeout { .. }) => "deadline",
        Some(Fault::Mismatch { .. }) => "refused",
        Some(Fault::PeerGone { .. }) => "gone",
        Some(Fault::Aborted { .. }) => "aborted",
        _ => "error",
    };
    format!("{kind}: rank {rank}: {error}")
}

/// Whether ranks failed as they must.
fn is_as_told(story: Story, told: &[Told]) -> bool {
    let failure = |rank: usize| told[rank].as_ref().err().and_then(|error| error.failure().copied());
    let fault = |rank| failure(rank).map(|failure| failure.fault);
    let culprit = |rank| failure(rank).map(|failure| failure.culprit);
    match story {
        Story::OtherKind => {
            (0..3).all(|rank| {
                matches!(fault(rank), Some(Fault::Mismatch { field: "kind of the low-latency operation", .. }))
                    || matches!(fault(rank), Some(Fault::Timeout { .. } | Fault::PeerGone { .. }))
            }) && matches!(fault(1), Some(Fault::Mismatch { field: "kind of the low-latency operation", .. }))
        }
        Story::Masked | Story::MaskedLate => told[0].is_ok() && fault(2) == Some(Fault::MaskedBy { peer: Rank(0) }),
        Story::OtherMode => (1..3).all(|rank| matches!(fault(rank), Some(Fault::Aborted { reporter: Rank(0), .. }))),
        Story::Left | Story::Ends => told.iter().all(Result::is_ok),
        Story::Chain | Story::LateChain | Story::Mutual => culprit(0) == Some(Rank(2)) && culprit(1) == Some(Rank(2)),
        Story::Absent => (0..2).all(|rank| match fault(rank) {
            Some(Fault::Timeout { waited, .. }) => {
                culprit(rank) == Some(Rank(2)) && waited < Nanos(ALLOWED.0 / 16 * 17)
            }
            _ => false,
        }),
        _ => true,
    }
}

/// What was wrong with what ranks of one server did; nothing where all is as it must be.
fn found(story: Story, seed: u64, plant: u32) -> Option<String> {
    found_over(Topology::new(1, RANKS).expect("a topology"), story.roles(), story, seed, plant)
}

/// The same of three ranks of any servers, with these cores.
pub(crate) fn found_over(topology: Topology, roles: Roles, story: Story, seed: u64, plant: u32) -> Option<String> {
    let shape = story.shape();
    let allowed =
        if matches!(story, Story::Long | Story::Ahead | Story::Left) { Nanos(10 * ALLOWED.0) } else { ALLOWED };
    let settings = Settings::builder(&shape, &topology).low_latency(true).deadline(allowed).build();
    let settings = settings.expect("settings");
    // Few rows leave room in the queues: a half ends before the card has done them.
    let tokens = if matches!(story, Story::Close | Story::Ends) { 2 } else { 9 };
    let batches = Workload::new(shape, vec![tokens; RANKS as usize]).seed(seed).batches().expect("batches");
    let world = World::new(shape, topology, RankSet::new()).expect("a world");
    let machine = Machine::new(library(), seed, RANKS, topology.ranks_per_node()).expect("a machine");
    let session = Host::install(machine, "Ascend910B3").expect("the thread's only twin");
    let layout = ep_core::Layout::new(&shape, &topology, &settings).expect("a layout");
    let befalls = session.befall(|machine| {
        machine.hurry(HURRY);
        match story {
            Story::Chain | Story::LateChain => machine.block((2, 1), 0..layout.window_bytes(), 0, None),
            Story::Mutual => [(0, 1), (1, 0)].into_iter().try_for_each(|(from, to)| {
                let cell = layout.cell(Cell::new(Rank(from), LaneKind::LowRows, Counter::Tail), 1).0;
                machine.block((from, to), cell / 64 * 64..cell / 64 * 64 + 64, 0, None)
            }),
            Story::Ends | Story::Close => machine.starve_card(2),
            _ => Ok(()),
        }
    });
    befalls.expect("a rank of the machine");
    let builder = Cluster::builder(topology, library().path()).settings(settings).roles(roles).plant(plant);
    let cluster = builder.build(&session.table(), shape).expect("a cluster");
    let have_sent = Shared::new(0);
    // Nobody else leaves before all have ended.
    let ran = cluster.run(async |mut ep| {
        let batch = &batches[ep.rank().index()];
        let told = live(&mut ep, &world, batch, story, &have_sent).await;
        (told, Some(ep).filter(|ep| !matches!(story, Story::Left | Story::Ends) || ep.rank() != Rank(2)))
    });
    let told: Vec<Told> = ran.into_iter().map(|(told, _)| told).collect();
    if let Some(fault) = session.fault() {
        return Some(fault);
    }
    if !matches!(story, Story::Rounds | Story::Wide | Story::Long | Story::Int8 | Story::Ahead | Story::Close) {
        return (!is_as_told(story, &told)).then(|| format!("failure: {told:?}"));
    }
    let mut errors: Vec<String> =
        told.iter().enumerate().filter_map(|(rank, told)| Some(said(rank, told.as_ref().err()?))).collect();
    errors.sort_by_key(|said| !said.starts_with("refused: "));
    if !errors.is_empty() {
        return Some(errors.swap_remove(0));
    }
    let told: Vec<_> = told.into_iter().flatten().collect();
    (0..told[0].len()).find_map(|turn| {
        let seen: Vec<Seen> = told.iter().map(|turns| turns[turn].1.clone()).collect();
        let wrong = verify::run(&world, &batches, told[0][turn].0, &seen).err()?;
        Some(format!("oracle: turn {turn}: {wrong}"))
    })
}

/// A planted fault, the story that shows it, and what must be said of it.
pub(crate) type Planted = (Plant, Story, &'static [&'static str]);

pub(crate) const PLANTED: &[Planted] = &[
    (Plant::LowBankUnasked, Story::Ahead, &["oracle: ", "refused: "]),
    (Plant::LowReceivedEarly, Story::Ahead, &["oracle: ", "refused: "]),
    (Plant::LowWrongBank, Story::Rounds, &["refused: "]),
    (Plant::LowToldEarly, Story::Rounds, &["oracle: ", "refused: "]),
    (Plant::LowHelpersUnawaited, Story::Wide, &["oracle: ", "refused: "]),
    (Plant::LowStaleWord, Story::Wide, &["deadline: "]),
    (Plant::LowCountsEarly, Story::Rounds, &["oracle: ", "refused: "]),
    (Plant::LowSharesUnawaited, Story::Rounds, &["oracle: "]),
    (Plant::LowNoGeneration, Story::Rounds, &["refused: "]),
    (Plant::LowArrivalUnawaited, Story::Rounds, &["oracle: ", "refused: "]),
    (Plant::LowOneMore, Story::Rounds, &["refused: "]),
    (Plant::LowKindUnchecked, Story::OtherKind, &["failure: "]),
    (Plant::LowMaskUnheard, Story::MaskedLate, &["failure: "]),
    (Plant::LowVerdictUnheard, Story::OtherMode, &["failure: "]),
    (Plant::LowSilent, Story::Chain, &["failure: "]),
    (Plant::LowAskedTooEarly, Story::LateChain, &["failure: "]),
    (Plant::LowExplainedFirst, Story::Mutual, &["failure: "]),
    (Plant::LowNoDeadline, Story::Absent, &["failure: "]),
    (Plant::LowWholeBlocks, Story::Rounds, &["floor: "]),
    (Plant::LowFirstPiece, Story::Long, &["oracle: "]),
    (Plant::LowPadLeft, Story::Int8, &["oracle: "]),
    (Plant::LowResultHeaderFlag, Story::Rounds, &["order: "]),
    (Plant::LowOneColumn, Story::Rounds, &["oracle: ", "refused: "]),
    (Plant::LowWeightsLost, Story::Rounds, &["oracle: "]),
    (Plant::LowAddendReused, Story::Long, &["order: "]),
    (Plant::LowAddendFlag, Story::Rounds, &["order: "]),
    (Plant::LowStepBarrier, Story::Rounds, &["order: "]),
    (Plant::LowSumFlag, Story::Rounds, &["order: "]),
];

#[test]
fn each_fault_in_low_latency_is_caught_by_what_it_breaks() {
    for (plant, story, said) in PLANTED {
        let caught = (1..=SEEDS).find_map(|seed| found(*story, seed, *plant as u32));
        let caught = caught.unwrap_or_else(|| panic!("{plant:?} is not caught in {SEEDS} seeds"));
        assert!(said.iter().any(|said| caught.starts_with(said)), "{plant:?} is caught as {caught}, expected {said:?}");
    }
}

#[test]
fn low_latency_without_a_plant_does_as_it_must() {
    let some =
        [Story::Rounds, Story::Wide, Story::Int8, Story::Ahead, Story::OtherKind, Story::Masked, Story::MaskedLate];
    for story in some.into_iter().chain([
        Story::OtherMode,
        Story::Chain,
        Story::LateChain,
        Story::Absent,
        Story::Left,
        Story::Ends,
        Story::Mutual,
    ]) {
        for seed in 1..=share(SEEDS / 2, 1) {
            assert_eq!(found(story, seed, 0), None, "{story:?}, seed {seed}");
        }
    }
    assert_eq!(found(Story::Long, 1, 0), None, "long rows");
}

/// Bits of bf16, and the weight, of each choice of the one token.
type Terms = Vec<(u16, f32)>;

/// What one rank makes of the results of one token's choices, in every element, with the weights given here or there.
fn summed(terms: &[Terms], plant: u32) -> [Vec<u16>; 2] {
    let (topk, hidden) = (terms[0].len() as u32, terms.len() as u32);
    let topology = Topology::new(1, 1).expect("a topology");
    let shape = Shape::builder().experts(topk).topk(topk).hidden(hidden).max_tokens(1).build().expect("a shape");
    let settings = Settings::builder(&shape, &topology).low_latency(true).build().expect("settings");
    let session = Host::install(Machine::new(library(), 1, 1, 1).expect("a machine"), "Ascend910B3").expect("a twin");
    let builder = Cluster::builder(topology, library().path()).settings(settings).roles(FEW).plant(plant);
    let cluster = builder.build(&session.table(), shape).expect("a cluster");
    let experts: Vec<i64> = (0..i64::from(topk)).collect();
    // Weights are the token's: elements that want others are rounds of their own.
    let weights: Vec<f32> = terms[0].iter().map(|(_, weight)| *weight).collect();
    let ran = cluster.run(async |mut ep| {
        let x = ep.rows(&vec![0; 2 * hidden as usize], 1)?;
        let rows: Vec<u8> = (0..topk as usize)
            .flat_map(|k| terms.iter().flat_map(move |terms| terms[k].0.to_le_bytes()).collect::<Vec<u8>>())
            .collect();
        let y = ep.rows(&rows, topk)?;
        let mut all = Vec::new();
        for at_experts in [false, true] {
            let given = ep.array(&weights)?;
            let (here, there) = if at_experts { (Some(given), None) } else { (None, Some(given)) };
            let topk_idx = ep.array(&experts)?;
            let got = ep.low_latency_dispatch(&x, &LowRouting::new(topk_idx, here)).await?;
            let back = ep.low_latency_combine(&y, &got.handle, there.as_ref()).await?;
            all.push(ep.bytes(&back.x)?.as_chunks::<2>().0.iter().map(|&bits| u16::from_le_bytes(bits)).collect());
        }
        Ok::<_, Error>(all)
    });
    assert_eq!(session.fault(), None);
    let all = ran.into_iter().next().expect("a rank").unwrap_or_else(|error| panic!("{error}"));
    all.try_into().expect("two forms")
}

/// The nearest bf16, ties to even; one for all that are no numbers.
fn rounded(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() { 0x7fff } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
}

/// The same by a fused multiply-add.
fn fused(terms: &[Terms]) -> Vec<u16> {
    let wide = |bits: u16| f32::from_bits(u32::from(bits) << 16);
    let sum = |terms: &Terms| terms.iter().fold(0.0f32, |acc, &(y, weight)| weight.mul_add(wide(y), acc));
    terms.iter().map(|terms| rounded(sum(terms))).collect()
}

/// Weights and results whose sum lies beside the middle between two numbers: by so little that only one rounding of all sees it.
fn beside_the_middle() -> [Vec<Terms>; 2] {
    let (one, over, half_over) = (0x3f80, 0x3f81, 0x3fc0);
    [
        vec![vec![(one, 0.5), (over, f32::from_bits(0x3f00_0001))]],
        vec![vec![(one, f32::from_bits((127 - 60) << 23)), (half_over, 5_614_251.0 / 8_388_608.0)]],
    ]
}

fn infinite() -> Vec<Terms> {
    [0x7f80, 0xff80, 0x3f80, 0x0000].map(|bits| vec![(0x4000, 0.25), (bits, 1.0), (0x3f80, 0.5)]).to_vec()
}

#[test]
fn weighted_sums_are_rounded_once_a_step() {
    let mut state = 88_172_645_463_325_252u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let weights: Vec<f32> = (0..6)
        .map(|_| f32::from_bits(0x3d00_0000 | (next() as u32 & 0x8200_0000 | next() as u32 & 0x00ff_ffff)))
        .collect();
    let bits = |next: &mut dyn FnMut() -> u64| 0x3e00 | (next() as u16 & 0x81ff);
    let random: Vec<Terms> =
        (0..2500).map(|_| weights.iter().map(|&weight| (bits(&mut next), weight)).collect()).collect();
    let [tie, odd] = beside_the_middle();
    for terms in [random, tie, odd, infinite()] {
        let expected = fused(&terms);
        assert_eq!(summed(&terms, 0), [expected.clone(), expected], "{:?}", terms[0]);
    }
}

pub(crate) const ROUNDED: &[Plant] = &[Plant::LowRoundedTwice, Plant::LowNotOdd, Plant::LowInfinitiesLost];

#[test]
fn each_fault_in_sums_is_caught_by_a_number() {
    let [tie, odd] = beside_the_middle();
    for (plant, terms) in ROUNDED.iter().zip([tie, odd, infinite()]) {
        let expected = fused(&terms);
        assert!(summed(&terms, *plant as u32).iter().all(|sums| *sums != expected), "{plant:?} is not caught");
    }
}
