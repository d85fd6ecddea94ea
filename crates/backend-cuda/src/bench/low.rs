//! Low latency: dispatch and both forms of combine, in one launch and in two.

use std::fmt::Write as _;
use std::sync::{Arc, Barrier};

use ep_core::layout::LowKind;
use ep_core::memory::Estimate;
use ep_core::{Element, Error, Layout, Nanos, Rank, Settings, Shape, Topology};

use super::{Bench, Choice, Plan, devices, fill, median, on_threads, route};
use crate::args::{self, LOW_RECEIVE, LOW_SEND};
use crate::driver::Scratch;
use crate::memory;
use crate::node::Node;
use crate::rank::{Options, RankDevice, check_low, layout_of};

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
    /// Blocks of a launch; 0 for as many as a GPU has multiprocessors, or a rank's share of them.
    pub blocks: u32,
    /// Repetitions; the median is told.
    pub repetitions: u32,
    /// Bytes of results that come as units, if other than what is chosen by itself.
    pub unit_bytes: Option<u64>,
}

impl LowPlan {
    fn layout(&self) -> Result<Layout, Error> {
        let Self { experts, topk, hidden, max_tokens, element, .. } = *self;
        let shape = Shape::builder().experts(experts).topk(topk).hidden(hidden).max_tokens(max_tokens).element(element);
        let (shape, topology) = (shape.build()?, Topology::new(1, self.ranks)?);
        let settings = Settings::builder(&shape, &topology).slots(1).low_latency(true);
        let settings =
            self.unit_bytes.into_iter().fold(settings, |settings, bytes| settings.low_latency_unit_bytes(bytes));
        layout_of(&shape, &topology, &settings.deadline(Nanos::from_secs(2)).build()?)
    }

    /// About what one rank takes of its GPU. No GPU is needed.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes.
    pub fn footprint(&self) -> Result<Estimate, Error> {
        let layout = self.layout()?;
        let (row, result) = (layout.row().payload_stride(), layout.row().results().payload_stride());
        let (tokens, topk) = (u64::from(self.max_tokens), u64::from(self.topk));
        let wide = u64::from(self.ranks).saturating_mul(tokens);
        // Of received rows; their results lie in their place where they are as long.
        let apart = if self.element == Element::Bf16 { 0 } else { result };
        let local = u64::from(layout.local_experts()).saturating_mul(row + apart + 4);
        Ok(memory::of_window(&layout)
            .with("batch", tokens.saturating_mul(2 * result + 12 * topk))
            .with("rows of the experts", wide.saturating_mul(local.saturating_add(8 * (1 + topk)))))
    }

    /// Refuses what its GPUs have no room for, before anything is taken.
    ///
    /// # Errors
    /// [`Error::Invalid`] for sizes and memory; what is missing.
    pub fn admit(&self) -> Result<(), Error> {
        let footprint = self.footprint()?;
        memory::admit(&devices(self.ranks)?, &footprint)
    }
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
    if let Some(tokens) = tokens.iter().find(|tokens| **tokens > plan.max_tokens) {
        return Err(Error::invalid("tokens of a rank", tokens, format_args!("at most {}", plan.max_tokens)));
    }
    let layout = plan.layout()?;
    let devices = devices(plan.ranks)?;
    memory::admit(&devices, &plan.footprint()?)?;
    let node = Node::here(&devices, &layout, false)?;
    let sharing = plan.ranks.div_ceil(crate::driver::devices()?.max(1) as u32);
    let ranks = (0..plan.ranks)
        .zip(&devices)
        .map(|(rank, device)| {
            check_low(device, &layout)?;
            let most = device.multiprocessors() / sharing;
            // More than run at a time, where that is asked for.
            let low_blocks = if plan.blocks == 0 { most } else { plan.blocks };
            let options = Options::of_bench(low_blocks);
            RankDevice::new(device, &layout, Rank(rank), &node, options, None, None)
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
    let records = scratch(16 * ranks + wide * 8 * (1 + plan.topk as usize))?;
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
            // SAFETY: memory of this function's, for the batch and for all that may come.
            unsafe { rank.low_dispatch(args::LowDispatch { phases, in_flight: in_flight(phases), ..dispatch }, None) }
        })?;
        for (kind, into) in [(LowKind::PerChoice, &mut times.per_choice), (LowKind::PerRank, &mut times.per_rank)] {
            // SAFETY: nothing is captured.
            unsafe { sums.fill(0xff) }?;
            let kind = kind as u32;
            *into = halves(&mut bench, |rank, phases| {
                // SAFETY: as above.
                unsafe {
                    rank.low_combine(args::LowCombine { phases, in_flight: in_flight(phases), kind, ..combine }, None)
                }
            })?;
            if y.is_none() {
                times.wrong += check(plan, &sums, &sent)?;
            }
        }
        all.push(times);
    }
    Ok(all)
}

/// Rows that went to their experts and straight back, with weights of 1, are as many times what they were as there are choices.
fn check(plan: &LowPlan, sums: &Scratch, sent: &[u8]) -> Result<u64, Error> {
    let mut back = vec![0; sent.len()];
    sums.read(0, &mut back)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_takes_is_known_without_a_gpu() {
        let (hidden, topk, experts, repetitions) = (7168, 8, 256, 1);
        let plan = |element| LowPlan {
            ranks: 8,
            max_tokens: 128,
            hidden,
            topk,
            experts,
            element,
            blocks: 0,
            repetitions,
            unit_bytes: None,
        };
        let [bf16, fp8] = [Element::Bf16, Element::Fp8(ep_core::quant::Scaling::Exact)]
            .map(|element| plan(element).footprint().unwrap());
        // A place for each expert of 32 and each token of 8 ranks.
        let places = 32 * 8 * 128;
        assert_eq!(bf16.parts()[2], ("rows of the experts", places * (7168 * 2 + 4) + 8 * 128 * 8 * 9));
        assert_eq!(bf16.parts()[1], ("batch", 128 * (2 * 7168 * 2 + 12 * 8)));
        // Codes, scales, and results beside them.
        assert!(fp8.parts()[2].1 > places * (7168 + 4 * 56 + 7168 * 2), "{fp8}");
        assert!(plan(Element::Bf16).layout().unwrap().window_bytes() == bf16.parts()[0].1);
    }

    #[test]
    fn more_tokens_than_there_is_room_for_are_refused() {
        let element = Element::Bf16;
        let plan = LowPlan {
            ranks: 1,
            max_tokens: 4,
            hidden: 16,
            topk: 1,
            experts: 1,
            element,
            blocks: 1,
            repetitions: 1,
            unit_bytes: None,
        };
        let error = run_low(&plan, &[1, 5]).unwrap_err();
        assert_eq!(error.to_string(), "tokens of a rank is 5, allowed: at most 4");
    }
}
