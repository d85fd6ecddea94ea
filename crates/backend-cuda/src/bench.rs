//! Times of the kernels on the GPUs of this host, with device events, and what the links could do.

mod calls;
mod graphs;
mod host;
mod low;
mod nodes;
mod plan;
mod processes;
mod pulled;
mod puts;
mod whole;

use std::fmt::Write as _;
use std::sync::{Arc, Barrier};
use std::thread;

use ep_core::layout::{Block, Kind, SLOT_ALIGN};
use ep_core::port::Offset;
use ep_core::{Element, Error, Layout, Rank};

use crate::args;
use crate::build::Source;
use crate::driver::{Device, Scratch};
pub use graphs::{GraphTimes, Iteration, graphs_table, run_graphs};
pub use host::{HostTimes, host_table, run_host};
pub use low::{Halves, LowPlan, LowTimes, low_table, run_low};
pub use nodes::{NodesCut, NodesTimes, run_nodes};
pub use plan::{Choice, Plan};
use plan::{fill, route};
pub use processes::run_member;
pub use pulled::{Outboxes, PulledTimes, pulled_table, run_pulled};
pub use puts::{PutTimes, run_puts};

use crate::memory;
use crate::node::Node;
use crate::rank::{Call, Chosen, Counting, DevicePlan, Offered, Options, RankDevice};

/// The GPU of each rank: one after the other, from the first again where there are more ranks.
fn devices(ranks: u32) -> Result<Vec<Arc<Device>>, Error> {
    let present = crate::driver::devices()?.max(1);
    Ok((0..ranks as usize).map(|rank| Device::open(rank % present)).collect::<Result<Vec<_>, _>>()?)
}

/// One kind of block.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// Blocks of a kernel: the multiprocessors it occupies.
    pub blocks: u32,
    /// Warps that move payloads.
    pub movers: u32,
    /// Pieces in shared memory for each.
    pub stages: u32,
}

/// Medians of the slowest rank, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    /// What stores of so many multiprocessors carry to all peers at once, in GB/s of a rank; 0 for one rank. Of the slowest.
    pub ceiling: f64,
    /// Positions and counts.
    pub layout: f64,
    /// From the start of the exchange of counts to its end on the device.
    pub counts: f64,
    /// Cached dispatch.
    pub cached: f64,
    /// Fresh dispatch after its counts, with headers and their arrays.
    pub fresh: f64,
    /// Combine of rows in the window.
    pub combine: f64,
    /// Combine of rows anywhere, which are copied into the window meanwhile.
    pub anywhere: f64,
    /// Rows that the slowest rank got.
    pub rows: u32,
    /// Values that came back wrong.
    pub wrong: u64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measures on ranks that are threads of this process.
///
/// # Errors
/// What is missing, or what a kernel reported.
pub fn run(plan: &Plan, shapes: &[Blocks]) -> Result<Vec<Times>, Error> {
    let layout = plan.layout()?;
    let devices = devices(plan.ranks)?;
    memory::admit(&devices, &plan.footprint()?)?;
    let node = Node::here(&devices, &layout, false)?;
    let options = Options::of_bench(1);
    let ranks = (0..plan.ranks)
        .zip(&devices)
        .map(|(rank, device)| RankDevice::new(device, &layout, Rank(rank), &node, options, None, None))
        .collect::<Result<Vec<_>, _>>()?;
    drop(node);
    let results = on_threads(ranks, |rank, me, barrier| one(plan, shapes, rank, me, barrier))?;
    Ok(slowest_of(&results, shapes.len()))
}

/// Of the times of all ranks, for each shape, those of the slowest.
fn slowest_of(results: &[Vec<Times>], shapes: usize) -> Vec<Times> {
    let mut slowest = vec![Times::default(); shapes];
    for times in results {
        for (slowest, times) in slowest.iter_mut().zip(times) {
            for (most, time) in [
                (&mut slowest.layout, times.layout),
                (&mut slowest.counts, times.counts),
                (&mut slowest.cached, times.cached),
                (&mut slowest.fresh, times.fresh),
                (&mut slowest.combine, times.combine),
                (&mut slowest.anywhere, times.anywhere),
            ] {
                *most = most.max(time);
            }
            slowest.ceiling = if slowest.ceiling == 0.0 { times.ceiling } else { slowest.ceiling.min(times.ceiling) };
            slowest.rows = slowest.rows.max(times.rows);
            slowest.wrong += times.wrong;
        }
    }
    slowest
}

/// Where all ranks wait for each other on the host.
trait Gate {
    fn pass(&self) -> Result<(), Error>;
}

impl Gate for Barrier {
    fn pass(&self) -> Result<(), Error> {
        self.wait();
        Ok(())
    }
}

/// Runs `work` on a thread for each rank, with its number and a barrier for all of them.
fn on_threads<T: Send>(
    ranks: Vec<RankDevice>,
    work: impl Fn(RankDevice, u32, &Barrier) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    ranks.iter().try_for_each(|rank| rank.prepare(&[Source::Meet, Source::Ceiling]))?;
    let (barrier, work) = (Barrier::new(ranks.len()), &work);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..)
            .zip(ranks)
            .map(|(me, rank)| {
                scope.spawn({
                    let barrier = &barrier;
                    move || work(rank, me, barrier)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank's thread does not panic")).collect()
    })
}

/// Nanoseconds in which everything that is measured is enqueued.
const PAUSE: u64 = 100_000;

/// What a rank measures with.
struct Bench<'a> {
    rank: RankDevice,
    barrier: &'a dyn Gate,
    meetings: u64,
    repetitions: u32,
}

impl Bench<'_> {
    /// The median time of `work`, after all ranks have met on their devices.
    fn time(&mut self, mut work: impl FnMut(&RankDevice) -> Result<(), Error>) -> Result<f64, Error> {
        let mut times = Vec::new();
        for repetition in 0..self.repetitions + 5 {
            self.meetings += 1;
            self.rank.stream.synchronize()?;
            self.barrier.pass()?;
            self.rank.meet(self.meetings, PAUSE)?;
            let began = self.rank.stream.record(true)?;
            work(&self.rank)?;
            let ended = self.rank.stream.record(true)?;
            self.rank.stream.synchronize()?;
            if repetition >= 5 {
                times.push(ended.since(&began)?);
            }
            let reported = Some(&self.rank.report).filter(|report| report.word(0) != 0).or(self.rank.low_report());
            if let Some(report) = reported {
                let report: Vec<u32> = (0..14).map(|word| report.word(4 * word)).collect();
                return Err(Error::broken("a kernel", format!("it reported {report:?}"), "run ep-cuda's checks"));
            }
        }
        Ok(median(times))
    }
}

fn one(plan: &Plan, shapes: &[Blocks], rank: RankDevice, me: u32, barrier: &dyn Gate) -> Result<Vec<Times>, Error> {
    let stream = Arc::clone(&rank.stream);
    let layout = rank.layout.clone();
    let row = *layout.row();
    let stride = row.payload_stride() as usize;
    let x = Scratch::from_bytes(&stream, &fill(plan, me, stride))?;
    let chosen: Vec<u8> = route(plan, me).iter().flat_map(|expert| expert.to_le_bytes()).collect();
    let topk_idx = Scratch::from_bytes(&stream, &chosen)?;
    let device_plan = DevicePlan::new(&stream, plan.tokens, plan.ranks, plan.experts)?;
    let most = plan.ranks * plan.tokens;
    let arrays = Scratch::new(&stream, most as usize * (plan.topk as usize * 12 + 8))?;
    let out = Scratch::new(&stream, plan.tokens as usize * row.results().payload_stride() as usize)?;
    let block = row.block(Offset(layout.arena().offset.0.next_multiple_of(SLOT_ALIGN)), most);
    let results = row.results().block(Offset(block.span().end().next_multiple_of(SLOT_ALIGN)), most);
    let anywhere = Scratch::new(&stream, most as usize * row.results().payload_stride() as usize)?;
    let call = |kind| Call { kind, settings: 7, plan: device_plan.address(), is_aside: false };
    let mut bench = Bench { rank, barrier, meetings: 0, repetitions: plan.repetitions };
    let window = bench.rank.window();

    let dispatch = |rank: &RankDevice, kind: Kind| {
        let fresh = kind == Kind::Dispatch;
        let args = args::Dispatch {
            ring: args::DispatchRing {
                x: x.address(),
                x_stride: stride as u64,
                scales: x.address() + row.scales_offset(),
                scales_token: stride as u64,
                scales_word: 4,
                position: device_plan.position.address(),
                topk_idx: if fresh { topk_idx.address() } else { 0 },
                tokens: plan.tokens,
                ..args::DispatchRing::default()
            },
            first_at: device_plan.first_at(),
            base: block.base().0,
            base_rows: block.room(),
            headers: fresh.into(),
            lots: rank.lots(),
            end_lot: rank.lots(),
            ..args::Dispatch::default()
        };
        // SAFETY: memory of this function's, with room for all rows; the blocks lie in the arena.
        unsafe { rank.dispatch(call(kind), &args) }
    };
    let unpack = |rank: &RankDevice| {
        let (indices, weights) = (arrays.address(), arrays.address() + u64::from(most * plan.topk) * 8);
        let tokens = weights + u64::from(most * plan.topk) * 4;
        let args = args::Unpack {
            base: block.base().0,
            first_of: device_plan.first_of(),
            topk_idx: indices,
            topk_weights: weights,
            source_token: tokens,
            source_rank: tokens + u64::from(most) * 4,
            rows: block.rows(),
            ahead: 0,
        };
        // SAFETY: as in `dispatch`.
        unsafe { rank.unpack(call(Kind::Dispatch), &args) }
    };
    // Of rows at `y` that peers pull from `block`.
    let combine = |rank: &RankDevice, y: u64, block: &Block| {
        let args = args::CombineRing {
            combine: args::Combine {
                y,
                y_stride: row.results().payload_stride(),
                position: device_plan.position.address(),
                first_at: device_plan.first_at(),
                matrix: device_plan.matrix(),
                out: out.address(),
                out_stride: row.results().payload_stride(),
                base: block.base().0,
                first_of: device_plan.first_of(),
                base_rows: block.room(),
                tokens: plan.tokens,
                ..args::Combine::default()
            },
            ..args::CombineRing::default()
        };
        let offered = if y == window + block.codes(0).offset.0 { Offered::Whole } else { Offered::Copied };
        // SAFETY: as in `dispatch`; `y` is where the results lie.
        unsafe { rank.combine(call(Kind::Combine), &args, offered) }
    };
    let mut all = Vec::new();
    for shape in shapes {
        bench.rank.blocks = shape.blocks;
        (bench.rank.movers, bench.rank.stages) = (shape.movers, shape.stages);
        let ceiling = ceiling(&mut bench, &layout, &anywhere)?;
        let mut times = Times { ceiling, ..Times::default() };
        let counting = Counting { tokens: plan.tokens, ticket: Some(1), ..Counting::default() };
        // Layout and counts belong to a dispatch, which must follow for the count of operations.
        let (mut layout_times, mut counts_times, mut fresh_times) = (Vec::new(), Vec::new(), Vec::new());
        let mut stages = [const { None }; 4];
        bench.time(|rank| {
            stages[0] = Some(rank.stream.record(true)?);
            let chosen = Chosen { topk_idx: topk_idx.address(), in_rank: 0, repeats: false };
            // SAFETY: as many choices as tokens have.
            unsafe { rank.plan(call(Kind::Dispatch), chosen, plan.tokens, &device_plan) }?;
            stages[1] = Some(rank.stream.record(true)?);
            // SAFETY: counts go nowhere else.
            unsafe { rank.exchange(call(Kind::Dispatch), &device_plan, counting) }?;
            stages[2] = Some(rank.stream.record(true)?);
            dispatch(rank, Kind::Dispatch)?;
            unpack(rank)?;
            stages[3] = Some(rank.stream.record(true)?);
            rank.stream.synchronize()?;
            let since = |from: usize, to: usize| match (&stages[from], &stages[to]) {
                (Some(from), Some(to)) => to.since(from),
                _ => Ok(0.0),
            };
            layout_times.push(since(0, 1)?);
            counts_times.push(since(1, 2)?);
            fresh_times.push(since(2, 3)?);
            Ok(())
        })?;
        times.layout = median(layout_times.split_off(5));
        times.counts = median(counts_times.split_off(5));
        times.fresh = median(fresh_times.split_off(5));
        times.cached = bench.time(|rank| Ok(dispatch(rank, Kind::CachedDispatch)?))?;
        times.rows = device_plan.words(device_plan.first_of() + 4 * u64::from(plan.ranks), 1)?[0];
        let bf16 = plan.element == Element::Bf16;
        let y = if bf16 { &block } else { &results };
        times.combine = bench.time(|rank| Ok(combine(rank, window + y.codes(0).offset.0, y)?))?;
        if bf16 {
            times.wrong = check(plan, me, &out, &device_plan, stride)?;
        }
        let width = row.results().payload_stride();
        if bf16 {
            let rows = window + block.codes(0).offset.0;
            let (from, to) = ((rows, width as usize), (anywhere.address(), width as usize));
            // SAFETY: a dispatch has placed so many rows in the window, and there is as much room elsewhere.
            unsafe { stream.copy_rows(to, from, width as usize, times.rows as usize) }?;
        }
        times.anywhere = bench.time(|rank| Ok(combine(rank, anywhere.address(), &results)?))?;
        if bf16 {
            times.wrong += check(plan, me, &out, &device_plan, stride)?;
        }
        all.push(times);
    }
    Ok(all)
}

/// What stores of the kernels' multiprocessors carry to all peers at once, in GB/s.
fn ceiling(bench: &mut Bench<'_>, layout: &Layout, source: &Scratch) -> Result<f64, Error> {
    let (ranks, arena) = (u64::from(layout.topology().ranks()), layout.arena());
    let base = arena.offset.0.next_multiple_of(SLOT_ALIGN);
    let bytes = ((arena.end() - base) / ranks).min(source.bytes() as u64).min(64 << 20) / 16 * 16;
    let args = args::Ceiling { source: source.address(), base, bytes };
    // SAFETY: `source` has so many bytes, and so has every peer's arena.
    let microseconds = bench.time(|rank| Ok(unsafe { rank.ceiling(&args) }?))?;
    Ok((ranks - 1) as f64 * bytes as f64 / microseconds / 1e3)
}

/// Rows that went to k ranks and straight back are k times what they were.
fn check(plan: &Plan, me: u32, out: &Scratch, device_plan: &DevicePlan, stride: usize) -> Result<u64, Error> {
    let mut sums = vec![0; out.bytes()];
    out.read(0, &mut sums)?;
    let mut positions = vec![0; device_plan.position.bytes()];
    device_plan.position.read(0, &mut positions)?;
    let sent = fill(plan, me, stride);
    let mut wrong = 0;
    for token in 0..plan.tokens as usize {
        let line = &positions[token * plan.ranks as usize * 4..(token + 1) * plan.ranks as usize * 4];
        let ranks = line
            .chunks_exact(4)
            .filter(|position| i32::from_le_bytes([position[0], position[1], position[2], position[3]]) >= 0)
            .count();
        let value = |bytes: &[u8]| half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        for (sum, x) in
            sums[token * stride..(token + 1) * stride].chunks_exact(2).zip(sent[token * stride..].chunks_exact(2))
        {
            wrong += u64::from(value(sum) != half::bf16::from_f32(value(x) * ranks as f32).to_f32());
        }
    }
    Ok(wrong)
}

impl Times {
    /// GB/s on the links from the rank with the most rows, in a cached dispatch and in a combine of rows in the window.
    pub fn rates(&self, plan: &Plan) -> [f64; 2] {
        let there = plan.element.row_bytes(plan.hidden) as f64 / f64::from(plan.hidden);
        let from_peers = match plan.choice {
            Choice::Any => f64::from(plan.ranks - 1) / f64::from(plan.ranks),
            Choice::Peers => 1.0,
        };
        let rows = f64::from(self.rows) * from_peers;
        let values = rows * f64::from(plan.hidden);
        [values * there / self.cached / 1e3, values * 2.0 / self.combine / 1e3]
    }
}

/// The times as a table.
pub fn table(plan: &Plan, shapes: &[Blocks], times: &[Times]) -> String {
    let mut text = format!("{plan:?}\n");
    text += " SMs movers stages | layout counts  fresh cached combine anywhere us | GB/s on the link: ceiling dispatch combine | rows \
             wrong\n";
    for (shape, times) in shapes.iter().zip(times) {
        let Blocks { blocks, movers, stages } = shape;
        let Times { ceiling, layout, counts, cached, fresh, combine, anywhere, rows, wrong } = times;
        let [there, back] = times.rates(plan);
        let _ = writeln!(
            text,
            "{blocks:4} {movers:6} {stages:6} | {layout:6.1} {counts:6.1} {fresh:6.1} {cached:6.1} {combine:7.1} {anywhere:8.1}    \
             | {ceiling:25.1} {there:8.1} {back:7.1} | {rows} {wrong}"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan {
        ranks: 8,
        tokens: 4096,
        hidden: 7168,
        topk: 8,
        experts: 256,
        element: Element::Bf16,
        choice: Choice::Any,
        repetitions: 1,
    };

    #[test]
    fn what_a_rank_takes_is_known_without_a_gpu() {
        let footprint = PLAN.footprint().unwrap();
        // Three blocks of all ranks' rows in the arena, a fourth beside it, and little else.
        let rows = 8 * 4096 * 7168 * 2;
        assert!((4 * rows..5 * rows).contains(&footprint.bytes()), "{footprint}");
        let window = PLAN.layout().unwrap().window_bytes();
        assert_eq!(footprint.parts()[0], ("windows", window));
        // As `one` asks for: x, choices, positions and sums of its own batch; arrays and rows of all.
        let own = 4096 * (2 * 7168 * 2 + 8 * 8 + 8 * 4);
        assert_eq!(footprint.parts()[1..], [("batch", own), ("rows of other ranks", rows + 8 * 4096 * (8 * 12 + 8))]);
    }

    #[test]
    fn sizes_that_no_gpu_has_do_not_wrap_around() {
        assert!(Plan { tokens: 1 << 22, ..PLAN }.footprint().unwrap().bytes() > 1 << 40);
        assert!(Plan { tokens: u32::MAX, ..PLAN }.footprint().unwrap_err().to_string().contains("allowed: "));
        assert!(Plan { experts: 255, ..PLAN }.footprint().is_err());
    }
}
