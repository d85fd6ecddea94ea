//! Times of the kernels on the GPUs of this host, with device events, and what the links could do.

mod calls;
mod graphs;
mod host;
mod low;

use std::fmt::Write as _;
use std::sync::{Arc, Barrier};
use std::thread;

use ep_core::layout::Kind;
use ep_core::{Element, Error, Layout, Placement, Rank, Settings, Shape, Topology};

use crate::args;
use crate::driver::{Device, Scratch};
pub use graphs::{GraphTimes, Iteration, graphs_table, run_graphs};
pub use host::{HostTimes, host_table, run_host};
pub use low::{Halves, LowPlan, LowTimes, low_table, run_low};

use crate::node::Node;
use crate::rank::{Call, Counting, DevicePlan, Options, RankDevice};

/// Which experts tokens choose; all are equally likely.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// Of all ranks.
    #[default]
    Any,
    /// Of other ranks: no row stays at home, so that with two ranks the links bound what many multiprocessors do.
    Peers,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Ranks, one a GPU as far as these go.
    pub ranks: u32,
    /// Tokens of each rank.
    pub tokens: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// Choices of a token.
    pub topk: u32,
    /// Experts in all.
    pub experts: u32,
    /// How rows travel to the experts.
    pub element: Element,
    /// Which experts are chosen.
    pub choice: Choice,
    /// Repetitions; the median is told.
    pub repetitions: u32,
}

impl Plan {
    fn shape(&self) -> Result<Shape, Error> {
        let Self { experts, topk, hidden, tokens, element, .. } = *self;
        Shape::builder().experts(experts).topk(topk).hidden(hidden).max_tokens(tokens).element(element).build()
    }
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

/// A choice of experts from a counter: distinct experts.
fn route(plan: &Plan, rank: u32) -> Vec<i64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(u64::from(rank) + 1);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    };
    let (local, experts) = (plan.experts / plan.ranks, i64::from(plan.experts));
    let own = i64::from(rank * local)..i64::from((rank + 1) * local);
    let is_meant = |expert: &i64| plan.choice == Choice::Any || plan.ranks == 1 || !own.contains(expert);
    let mut all: Vec<i64> = (0..experts).filter(is_meant).collect();
    let mut chosen = Vec::with_capacity((plan.tokens * plan.topk) as usize);
    for _ in 0..plan.tokens {
        for k in 0..plan.topk as usize {
            let other = k + (next() % (all.len() - k) as u64) as usize;
            all.swap(k, other);
        }
        chosen.extend_from_slice(&all[..plan.topk as usize]);
    }
    chosen
}

/// The rows of a rank: values that differ between tokens, ranks and places, all exact in bf16.
fn fill(plan: &Plan, rank: u32, stride: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; plan.tokens as usize * stride];
    for (token, row) in bytes.chunks_exact_mut(stride).enumerate() {
        for (at, two) in row.chunks_exact_mut(2).enumerate() {
            let value = ((token * 31 + at * 7 + rank as usize * 13) % 61) as f32 - 30.0;
            two.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
        }
    }
    bytes
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
    let gpus = crate::driver::devices()? as u32;
    let topology = Topology::new(1, plan.ranks)?;
    let shape = plan.shape()?;
    let arena = 3u64 * u64::from(plan.ranks * plan.tokens) * (shape.result_bytes().max(shape.row_bytes()) + 160);
    let settings = Settings::builder(&shape, &topology)
        .placement(Placement::Direct)
        .arena_bytes(arena)
        .slots(1)
        .deadline(ep_core::Nanos::from_secs(2))
        .build()?;
    let layout = Layout::new(&shape, &topology, &settings)?;
    let devices = (0..plan.ranks).map(|rank| Device::open((rank % gpus) as usize)).collect::<Result<Vec<_>, _>>()?;
    let node = Node::here(&devices, &layout, false)?;
    let options = Options { blocks: 1, low_blocks: 1, priority: 0 };
    let ranks = (0..plan.ranks)
        .zip(&devices)
        .map(|(rank, device)| RankDevice::new(device, &layout, Rank(rank), &node, options, None))
        .collect::<Result<Vec<_>, _>>()?;
    drop(node);
    let results = on_threads(ranks, |rank, me, barrier| one(plan, shapes, rank, me, barrier))?;
    let mut slowest = vec![Times::default(); shapes.len()];
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
    Ok(slowest)
}

/// Runs `work` on a thread for each rank, with its number and a barrier for all of them.
fn on_threads<T: Send>(
    ranks: Vec<RankDevice>,
    work: impl Fn(RankDevice, u32, &Barrier) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
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
    barrier: &'a Barrier,
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
            self.barrier.wait();
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
                return Err(Error::unsupported("this run", format!("a kernel reported {report:?}")));
            }
        }
        Ok(median(times))
    }
}

fn one(plan: &Plan, shapes: &[Blocks], rank: RankDevice, me: u32, barrier: &Barrier) -> Result<Vec<Times>, Error> {
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
    let block = layout.arena().offset.0.next_multiple_of(64);
    let results = (block + row.block_bytes(most.into())).next_multiple_of(64);
    let anywhere = Scratch::new(&stream, most as usize * row.results().payload_stride() as usize)?;
    let call = |kind| Call { kind, settings: 7, plan: device_plan.address() };
    let mut bench = Bench { rank, barrier, meetings: 0, repetitions: plan.repetitions };
    let window = bench.rank.window();

    let dispatch = |rank: &RankDevice, kind: Kind| {
        let fresh = kind == Kind::Dispatch;
        rank.dispatch(
            call(kind),
            &args::Dispatch {
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
                base: block,
                base_rows: most,
                headers: fresh.into(),
                ..args::Dispatch::default()
            },
        )
    };
    let unpack = |rank: &RankDevice| {
        let (indices, weights) = (arrays.address(), arrays.address() + u64::from(most * plan.topk) * 8);
        let tokens = weights + u64::from(most * plan.topk) * 4;
        rank.unpack(
            call(Kind::Dispatch),
            &args::Unpack {
                base: block,
                first_of: device_plan.first_of(),
                topk_idx: indices,
                topk_weights: weights,
                source_token: tokens,
                source_rank: tokens + u64::from(most) * 4,
                op: 0,
                rows: most,
                reserved: 0,
            },
        )
    };
    // Of rows at `y` that peers pull from the block at `base`.
    let combine = |rank: &RankDevice, y: u64, base: u64| {
        rank.combine(
            call(Kind::Combine),
            &args::CombineRing {
                combine: args::Combine {
                    y,
                    y_stride: row.results().payload_stride(),
                    position: device_plan.position.address(),
                    first_at: device_plan.first_at(),
                    matrix: device_plan.matrix(),
                    out: out.address(),
                    out_stride: row.results().payload_stride(),
                    base,
                    first_of: device_plan.first_of(),
                    base_rows: most,
                    tokens: plan.tokens,
                    ..args::Combine::default()
                },
                ..args::CombineRing::default()
            },
            y != window + base,
        )
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
            rank.plan(call(Kind::Dispatch), topk_idx.address(), 0, plan.tokens, &device_plan)?;
            stages[1] = Some(rank.stream.record(true)?);
            rank.exchange(call(Kind::Dispatch), &device_plan, counting)?;
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
        let mut rows = [0; 4];
        stream.download(device_plan.first_of() + 4 * u64::from(plan.ranks), &mut rows)?;
        times.rows = u32::from_le_bytes(rows);
        let bf16 = plan.element == Element::Bf16;
        let y = if bf16 { block } else { results };
        times.combine = bench.time(|rank| Ok(combine(rank, window + y, y)?))?;
        if bf16 {
            times.wrong = check(plan, me, &stream, &out, &device_plan, stride)?;
        }
        let width = row.results().payload_stride();
        if bf16 {
            let (from, to) = ((window + block, width as usize), (anywhere.address(), width as usize));
            stream.copy_rows(to, from, width as usize, times.rows as usize)?;
        }
        times.anywhere = bench.time(|rank| Ok(combine(rank, anywhere.address(), results)?))?;
        if bf16 {
            times.wrong += check(plan, me, &stream, &out, &device_plan, stride)?;
        }
        all.push(times);
    }
    Ok(all)
}

/// What stores of the kernels' multiprocessors carry to all peers at once, in GB/s.
fn ceiling(bench: &mut Bench<'_>, layout: &Layout, source: &Scratch) -> Result<f64, Error> {
    let (ranks, arena) = (u64::from(layout.topology().ranks()), layout.arena());
    let base = arena.offset.0.next_multiple_of(64);
    let bytes = ((arena.end() - base) / ranks).min(source.bytes() as u64).min(64 << 20) / 16 * 16;
    let args = args::Ceiling { source: source.address(), base, bytes };
    let microseconds = bench.time(|rank| Ok(rank.ceiling(&args)?))?;
    Ok((ranks - 1) as f64 * bytes as f64 / microseconds / 1e3)
}

/// Rows that went to k ranks and straight back are k times what they were.
fn check(
    plan: &Plan,
    me: u32,
    stream: &Arc<crate::driver::Stream>,
    out: &Scratch,
    device_plan: &DevicePlan,
    stride: usize,
) -> Result<u64, Error> {
    let mut sums = vec![0; out.bytes()];
    stream.download(out.address(), &mut sums)?;
    let mut positions = vec![0; device_plan.position.bytes()];
    stream.download(device_plan.position.address(), &mut positions)?;
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
