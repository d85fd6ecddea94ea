//! Low latency: dispatch and both forms of combine, in one launch and in two.

use std::fmt::Write as _;
use std::sync::{Arc, Barrier};

use ep_core::layout::LowKind;
use ep_core::{Element, Error, Layout, Nanos, Rank, Settings, Shape, Topology};

use super::{Bench, Choice, Plan, fill, median, on_threads, route};
use crate::args;
use crate::driver::{Device, Scratch};
use crate::node::Node;
use crate::rank::{LOW_RECEIVE, LOW_SEND, Options, RankDevice, check_low};

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct LowPlan {
    /// Ranks, one a GPU as far as these go.
    pub ranks: u32,
    /// The limit that slots are cut for.
    pub max_tokens: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// Choices of a token.
    pub topk: u32,
    /// Experts in all.
    pub experts: u32,
    /// How rows travel to the experts.
    pub element: Element,
    /// Multiprocessors; 0 for all of a GPU, or a rank's share.
    pub blocks: u32,
    /// Repetitions; the median is told.
    pub repetitions: u32,
}

/// One kind of operation: medians of the slowest rank, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Halves {
    /// Both halves in one launch.
    pub one: f64,
    /// Both halves, a launch each.
    pub two: f64,
    /// The sending half alone.
    pub send: f64,
    /// A launch that neither sends nor receives: what a launch costs.
    pub none: f64,
}

/// Times with so many tokens a rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct LowTimes {
    /// Tokens of each rank.
    pub tokens: u32,
    /// Dispatch.
    pub dispatch: Halves,
    /// Combine with a row for each choice.
    pub per_choice: Halves,
    /// Combine with a row for each rank.
    pub per_rank: Halves,
    /// Values that came back wrong; told for bf16.
    pub wrong: u64,
}

/// Measures on ranks that are threads of this process.
///
/// # Errors
/// What is missing, or what a kernel reported.
pub fn run_low(plan: &LowPlan, tokens: &[u32]) -> Result<Vec<LowTimes>, Error> {
    let gpus = crate::driver::devices()? as u32;
    let topology = Topology::new(1, plan.ranks)?;
    let shape = Shape::builder()
        .experts(plan.experts)
        .topk(plan.topk)
        .hidden(plan.hidden)
        .max_tokens(plan.max_tokens)
        .element(plan.element)
        .build()?;
    let settings =
        Settings::builder(&shape, &topology).slots(1).low_latency(true).deadline(Nanos::from_secs(2)).build()?;
    let layout = Layout::new(&shape, &topology, &settings)?;
    let devices = (0..plan.ranks).map(|rank| Device::open((rank % gpus) as usize)).collect::<Result<Vec<_>, _>>()?;
    let node = Node::here(&devices, &layout, false)?;
    let sharing = plan.ranks.div_ceil(gpus);
    let ranks = (0..plan.ranks)
        .zip(&devices)
        .map(|(rank, device)| {
            check_low(device, &layout)?;
            let most = device.multiprocessors() / sharing;
            let low_blocks = if plan.blocks == 0 { most } else { plan.blocks.min(most) };
            let options = Options { blocks: 1, low_blocks, priority: 0 };
            Ok(RankDevice::new(device, &layout, Rank(rank), &node, options, None)?)
        })
        .collect::<Result<Vec<_>, Error>>()?;
    drop(node);
    let results = on_threads(ranks, |rank, me, barrier| one(plan, tokens, rank, me, barrier))?;
    let mut slowest = vec![LowTimes::default(); tokens.len()];
    for times in results {
        for (slowest, times) in slowest.iter_mut().zip(times) {
            slowest.tokens = times.tokens;
            slowest.wrong += times.wrong;
            for (most, halves) in [
                (&mut slowest.dispatch, times.dispatch),
                (&mut slowest.per_choice, times.per_choice),
                (&mut slowest.per_rank, times.per_rank),
            ] {
                *most = Halves {
                    one: most.one.max(halves.one),
                    two: most.two.max(halves.two),
                    send: most.send.max(halves.send),
                    none: most.none.max(halves.none),
                };
            }
        }
    }
    Ok(slowest)
}

/// Operations that were sent and not received before such a launch: a half that only receives follows one that sent.
const fn in_flight(phases: u32) -> u32 {
    (phases == LOW_RECEIVE) as u32
}

/// Times `launch`, which is given the phases, in one launch and in two.
fn halves(
    bench: &mut Bench<'_>,
    launch: impl Fn(&RankDevice, u32) -> Result<(), crate::CudaError>,
) -> Result<Halves, Error> {
    let one = bench.time(|rank| Ok(launch(rank, LOW_SEND | LOW_RECEIVE)?))?;
    let none = bench.time(|rank| Ok(launch(rank, 0)?))?;
    let (mut sends, mut both) = (Vec::new(), Vec::new());
    bench.time(|rank| {
        let began = rank.stream.record(true)?;
        launch(rank, LOW_SEND)?;
        let sent = rank.stream.record(true)?;
        launch(rank, LOW_RECEIVE)?;
        let ended = rank.stream.record(true)?;
        rank.stream.synchronize()?;
        sends.push(sent.since(&began)?);
        both.push(ended.since(&began)?);
        Ok(())
    })?;
    // The first few warm up.
    Ok(Halves { one, two: median(both.split_off(5)), send: median(sends.split_off(5)), none })
}

fn one(plan: &LowPlan, tokens: &[u32], rank: RankDevice, me: u32, barrier: &Barrier) -> Result<Vec<LowTimes>, Error> {
    let stream = Arc::clone(&rank.stream);
    let layout = rank.layout.clone();
    let row = *layout.row();
    let result = row.results().payload_stride();
    let (ranks, local) = (plan.ranks as usize, layout.local_experts() as usize);
    let wide = ranks * plan.max_tokens as usize;
    let scratch = |bytes: usize| Scratch::new(&stream, bytes);
    let out = scratch(local * wide * row.payload_stride() as usize)?;
    let y = if plan.element == Element::Bf16 { None } else { Some(scratch(local * wide * result as usize)?) };
    let (numbers, counts) = (scratch(8 * ranks)?, scratch(4 * local)?);
    let (segments, source_token) = (scratch(8 * local * ranks)?, scratch(4 * local * wide)?);
    let records = scratch(8 * ranks + wide * 8 * (1 + plan.topk as usize))?;
    let sums = scratch(plan.max_tokens as usize * result as usize)?;
    let ones: Vec<u8> = (0..plan.max_tokens * plan.topk).flat_map(|_| 1f32.to_le_bytes()).collect();
    let weights = Scratch::from_bytes(&stream, &ones)?;
    let mut bench = Bench { rank, barrier, meetings: 0, repetitions: plan.repetitions };
    let mut all = Vec::new();
    for &tokens in tokens {
        let batch = Plan {
            ranks: plan.ranks,
            tokens,
            hidden: plan.hidden,
            topk: plan.topk,
            experts: plan.experts,
            element: plan.element,
            choice: Choice::Any,
            repetitions: plan.repetitions,
        };
        let sent = fill(&batch, me, result as usize);
        let x = Scratch::from_bytes(&stream, &sent)?;
        let chosen: Vec<u8> = route(&batch, me).iter().flat_map(|expert| expert.to_le_bytes()).collect();
        let topk_idx = Scratch::from_bytes(&stream, &chosen)?;
        let dispatch = args::LowDispatch {
            x: x.address(),
            x_stride: result,
            topk_idx: topk_idx.address(),
            routed: numbers.address(),
            out: out.address(),
            out_stride: row.payload_stride(),
            expert_counts: counts.address(),
            segments: segments.address(),
            source_token: source_token.address(),
            records: records.address(),
            tokens,
            ..args::LowDispatch::default()
        };
        let combine = args::LowCombine {
            y: y.as_ref().unwrap_or(&out).address(),
            y_stride: result,
            records: records.address(),
            topk_idx: topk_idx.address(),
            topk_weights: weights.address(),
            routed: numbers.address(),
            out: sums.address(),
            out_stride: result,
            tokens,
            ..args::LowCombine::default()
        };
        let mut times = LowTimes { tokens, ..LowTimes::default() };
        times.dispatch = halves(&mut bench, |rank, phases| {
            rank.low_dispatch(args::LowDispatch { phases, in_flight: in_flight(phases), ..dispatch })
        })?;
        for (kind, into) in [(LowKind::PerChoice, &mut times.per_choice), (LowKind::PerRank, &mut times.per_rank)] {
            stream.fill(sums.address(), 0xff, sums.bytes())?;
            let kind = kind as u32;
            *into = halves(&mut bench, |rank, phases| {
                rank.low_combine(args::LowCombine { phases, in_flight: in_flight(phases), kind, ..combine })
            })?;
            if y.is_none() {
                times.wrong += check(plan, &stream, &sums, &sent)?;
            }
        }
        all.push(times);
    }
    Ok(all)
}

/// Rows that went to their experts and straight back, with weights of 1, are as many times what they were as there are choices.
fn check(plan: &LowPlan, stream: &crate::driver::Stream, sums: &Scratch, sent: &[u8]) -> Result<u64, Error> {
    let mut back = vec![0; sent.len()];
    stream.download(sums.address(), &mut back)?;
    let value = |bytes: &[u8]| half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    let pairs = back.chunks_exact(2).zip(sent.chunks_exact(2));
    Ok(pairs.filter(|(sum, x)| value(sum) != value(x) * plan.topk as f32).count() as u64)
}

/// The times as a table.
pub fn low_table(plan: &LowPlan, times: &[LowTimes]) -> String {
    let mut text = format!("{plan:?}\n");
    text += " tokens | dispatch: one launch, two, send, an empty launch | combine per choice | combine per rank us | wrong\n";
    for LowTimes { tokens, dispatch, per_choice, per_rank, wrong } in times {
        let _ = write!(text, "{tokens:7} |");
        for Halves { one, two, send, none } in [dispatch, per_choice, per_rank] {
            let _ = write!(text, " {one:6.1} {two:6.1} {send:6.1} {none:6.1} |");
        }
        let _ = writeln!(text, " {wrong}");
    }
    text
}
