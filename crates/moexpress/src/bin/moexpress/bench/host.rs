//! CPU ranks of this host, each a thread, by its clock; beside them threads that copy memory.

use std::hint::black_box;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ep_conformance::drive::upload;
use ep_conformance::low_latency::{self, Weighing};
use ep_conformance::workload::Workload;
use ep_core::engine::{Combine, Engine};
use ep_core::machine::{Counts, Decorated, LaneClass};
use ep_core::settings::SettingsBuilder;
use ep_core::{Element, Endpoint, Error, LowLatency, Placement, Settings, Shape, Topology};
use ep_host::{Cluster, Machine};
use serde_json::json;

use super::table::{ELEMENTS, Table};
use crate::args::{BenchArgs, Mode};
use crate::failure::Failure;
use crate::{memory, show};

/// Rows go through rings and come back so, or are placed and pulled.
const PLACEMENTS: [(&str, Placement); 2] = [("rings", Placement::Ring), ("placed", Placement::Direct)];
/// Calls before those that are measured: memory is taken at its first use.
const WARM_UP: u32 = 2;

/// A rank's machine with its copies counted.
type Ranked = Engine<Decorated<Machine, Counts>>;

/// As many ranks as there are cores, or less where they could not share the experts evenly.
fn even(cores: u32, experts: u32) -> u32 {
    (1..=cores).rev().find(|&ranks| experts.is_multiple_of(ranks)).unwrap_or(1)
}

pub(super) fn bench(args: &BenchArgs) -> Result<String, Failure> {
    let html = args.html.create()?;
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let ranks = args.ranks.unwrap_or_else(|| even(cores, args.experts));
    let topology = Topology::new(1, ranks).map_err(Failure::bad_input)?;
    let mut report = Report { args, topology, table: Table::default() };
    report.table.line(format_args!(
        "{} on {}, hidden {}, top-{} of {} experts chosen at random\nmicroseconds of the slowest rank after all have met, median \
         of {}; GB/s of the bytes that its verbs copied,\nand their share of what as many threads copy in this run that do \
         nothing else",
        show::plural(ranks.into(), "rank"),
        show::plural(cores.into(), "core"),
        args.hidden,
        args.topk,
        args.experts,
        args.repetitions,
    ));
    if args.mode != Some(Mode::LowLatency) {
        report.throughput()?;
    }
    if args.mode != Some(Mode::Throughput) {
        report.low_latency()?;
    }
    report.table.print(args, html)
}

struct Report<'a> {
    args: &'a BenchArgs,
    topology: Topology,
    table: Table,
}

impl Report<'_> {
    fn shape(&self, element: Element, max_tokens: u32) -> Result<Shape, Failure> {
        let BenchArgs { hidden, topk, experts, .. } = *self.args;
        let shape = Shape::builder().experts(experts).topk(topk).hidden(hidden);
        shape.max_tokens(max_tokens).element(element).build().map_err(Failure::bad_input)
    }

    /// Refuses what takes more memory than there is.
    fn admit(&self, shape: &Shape, settings: SettingsBuilder, tokens: u32) -> Result<(), Failure> {
        let settings = settings.build().map_err(Failure::bad_input)?;
        let all = u64::from(tokens) * u64::from(self.topology.ranks());
        memory::admit_bench(shape, &self.topology, &settings, all).map_err(Failure::bad_input)
    }

    fn throughput(&mut self) -> Result<(), Failure> {
        self.table.line("\nthroughput\n\n       tokens           dispatch     GB/s  share    combine     GB/s  share   copying GB/s");
        for (name, element) in ELEMENTS {
            for &tokens in self.args.tokens() {
                let shape = self.shape(element, tokens)?;
                self.admit(&shape, Settings::builder(&shape, &self.topology).placement(Placement::Direct), tokens)?;
                let row_bytes = shape.row_bytes() as usize;
                let copying =
                    copying(self.topology.ranks(), tokens as usize * row_bytes, row_bytes, self.args.repetitions)
                        .map_err(Failure::failed)?;
                for (how, placement) in PLACEMENTS {
                    let settings = Settings::builder(&shape, &self.topology).placement(placement).build();
                    let settings = settings.map_err(Failure::bad_input)?;
                    let work = async |ep: Ranked, meter: &Meter<'_>| throughput(ep, meter, tokens).await;
                    let [dispatch, combine] = self.measure(shape, settings, work)?;
                    self.throughput_row((name, how, tokens), [dispatch, combine], copying);
                }
            }
        }
        Ok(())
    }

    fn throughput_row(
        &mut self,
        (name, how, tokens): (&str, &str, u32),
        [dispatch, combine]: [Measured; 2],
        copying: f64,
    ) {
        let part = |Measured { took, .. }: Measured, rate: f64| {
            format!("{:>9.0} {rate:>8.2} {:>6.2}", micros(took), rate / copying)
        };
        let [there, back] = [dispatch, combine].map(Measured::rate);
        self.table.line(format_args!(
            "{name:<5} {tokens:>7}  {how:<7} {}  {}       {copying:>8.2}",
            part(dispatch, there),
            part(combine, back)
        ));
        self.table.row(json!({
            "mode": "throughput", "dtype": name, "ranks": self.topology.ranks(), "tokens": tokens, "placement": how,
            "hidden": self.args.hidden, "topk": self.args.topk, "experts": self.args.experts,
            "dispatch_us": micros(dispatch.took), "dispatch_copied_gb_s": there,
            "combine_us": micros(combine.took), "combine_copied_gb_s": back, "copying_gb_s": copying,
        }));
    }

    fn low_latency(&mut self) -> Result<(), Failure> {
        self.table.line("\nlow latency: combine with a row a choice, and a row a rank\n\n       tokens   dispatch   per choice   per rank");
        let max_tokens = self.args.low_latency_tokens().iter().copied().max().unwrap_or(1);
        for (name, element) in ELEMENTS {
            let shape = self.shape(element, max_tokens)?;
            self.admit(&shape, Settings::builder(&shape, &self.topology).slots(1).low_latency(true), max_tokens)?;
            let settings = Settings::builder(&shape, &self.topology).slots(1).low_latency(true).build();
            let settings = settings.map_err(Failure::bad_input)?;
            for &tokens in self.args.low_latency_tokens() {
                let work = async |ep: Ranked, meter: &Meter<'_>| low_latency(ep, meter, tokens).await;
                let [dispatch, per_choice, per_rank] =
                    self.measure(shape, settings, work)?.map(|measured| micros(measured.took));
                self.table
                    .line(format_args!("{name:<5} {tokens:>7} {dispatch:>10.0} {per_choice:>12.0} {per_rank:>10.0}"));
                self.table.row(json!({
                    "mode": "low-latency", "dtype": name, "ranks": self.topology.ranks(), "tokens": tokens,
                    "hidden": self.args.hidden, "topk": self.args.topk, "experts": self.args.experts,
                    "dispatch_us": dispatch, "combine_per_choice_us": per_choice, "combine_per_rank_us": per_rank,
                }));
            }
        }
        Ok(())
    }

    /// Runs `work` on all ranks; of each of its calls, what the slowest rank took.
    fn measure<const CALLS: usize>(
        &self,
        shape: Shape,
        settings: Settings,
        work: impl AsyncFn(Ranked, &Meter<'_>) -> Result<[Measured; CALLS], Error> + Sync,
    ) -> Result<[Measured; CALLS], Failure> {
        let cluster = Cluster::builder(self.topology).settings(settings).build(shape).map_err(Failure::bad_input)?;
        let counts = Counts::new();
        let there = Gathering::new(self.topology.ranks());
        let meter = Meter { there: &there, counts: &counts, repetitions: self.args.repetitions };
        let ran = cluster.run_machines(async |machine| {
            let engine = Engine::new(Decorated::new(machine, counts.clone()));
            let done = match engine {
                Ok(engine) => work(engine, &meter).await,
                Err(error) => Err(error),
            };
            // The others are not to wait for a rank that does not come.
            done.inspect_err(|_| there.leave())
        });
        let ran = ran.map_err(Failure::failed)?;
        let own = |error: &&Error| !matches!(error, Error::Broken { what, .. } if what == MEASUREMENT);
        if let Some(error) = ran.iter().filter_map(|done| done.as_ref().err()).find(own) {
            return Err(Failure::failed(error));
        }
        let ranks = ran.into_iter().collect::<Result<Vec<_>, _>>().map_err(Failure::failed)?;
        let slowest = |call: usize| ranks.iter().map(|calls| calls[call]).max_by_key(|measured| measured.took);
        Ok(std::array::from_fn(|call| slowest(call).unwrap_or_default()))
    }
}

/// What fails at the ranks that wait for one that has failed.
const MEASUREMENT: &str = "a measurement";

/// Where ranks wait for each other, until one leaves: a rank that has failed does not come.
struct Gathering {
    ranks: u32,
    state: Mutex<Gathered>,
    changed: Condvar,
}

#[derive(Default)]
struct Gathered {
    here: u32,
    turn: u64,
    left: bool,
}

impl Gathering {
    fn new(ranks: u32) -> Self {
        Self { ranks, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Gathered> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all ranks are here.
    fn wait(&self) -> Result<(), Error> {
        let mut state = self.lock();
        let turn = state.turn;
        state.here += 1;
        if state.here == self.ranks {
            (state.here, state.turn) = (0, turn + 1);
            self.changed.notify_all();
        }
        let waiting = |state: &mut Gathered| state.turn == turn && !state.left;
        let state = self.changed.wait_while(state, waiting).unwrap_or_else(PoisonError::into_inner);
        if state.turn == turn {
            let (what, cause) = (MEASUREMENT.to_owned(), "another rank has failed".to_owned());
            return Err(Error::Broken { what, cause, remedy: "see what that rank said".into() });
        }
        Ok(())
    }

    /// Lets all go that wait, or will.
    fn leave(&self) {
        self.lock().left = true;
        self.changed.notify_all();
    }
}

/// One kind of call: the median time, and the bytes that all ranks copied in one.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    took: Duration,
    copied: u64,
}

impl Measured {
    fn rate(self) -> f64 {
        self.copied as f64 / self.took.as_secs_f64().max(1e-9) / 1e9
    }
}

/// How calls are timed.
struct Meter<'a> {
    there: &'a Gathering,
    counts: &'a Counts,
    repetitions: u32,
}

impl Meter<'_> {
    /// The median of `call`, which begins on all ranks at about the same time.
    async fn time(&self, mut call: impl AsyncFnMut() -> Result<(), Error>) -> Result<Measured, Error> {
        let (mut times, mut before) = (Vec::new(), 0);
        for repetition in 0..WARM_UP + self.repetitions {
            if repetition == WARM_UP {
                self.there.wait()?;
                before = self.copied();
            }
            self.there.wait()?;
            let began = Instant::now();
            call().await?;
            if repetition >= WARM_UP {
                times.push(began.elapsed());
            }
        }
        self.there.wait()?;
        let copied = (self.copied() - before) / u64::from(self.repetitions);
        self.there.wait()?;
        times.sort_unstable();
        Ok(Measured { took: times[times.len() / 2], copied })
    }

    /// Bytes copied by all verbs of all ranks so far.
    fn copied(&self) -> u64 {
        let lanes = LaneClass::ALL.iter().map(|&class| self.counts.lanes(class));
        let lanes: u64 = lanes.map(|lane| lane.put_bytes + lane.got_bytes).sum();
        self.counts.read_bytes() + self.counts.written_bytes() + lanes
    }
}

async fn throughput(mut ep: Ranked, meter: &Meter<'_>, tokens: u32) -> Result<[Measured; 2], Error> {
    let batch = Workload::new(*ep.shape(), vec![tokens; ep.topology().ranks() as usize]).batch(ep.rank())?;
    let (x, routing) = upload(&mut ep, &batch)?;
    let handle = ep.dispatch(&x, &routing).await?.handle;
    let dispatch = meter.time(async || ep.dispatch(&x, &routing).await.map(|got| drop(black_box(got)))).await?;
    let rows = vec![0x3f; handle.rows() as usize * ep.shape().result_bytes() as usize];
    let y = match ep.output(&handle) {
        Some(mut output) => {
            ep.store(&mut output, 0, &rows)?;
            output
        }
        None => ep.rows(&rows, handle.rows())?,
    };
    let combine = async || ep.combine(&y, &handle, Combine::default()).await.map(|back| drop(black_box(back)));
    Ok([dispatch, meter.time(combine).await?])
}

async fn low_latency(mut ep: Ranked, meter: &Meter<'_>, tokens: u32) -> Result<[Measured; 3], Error> {
    let ranks = ep.topology().ranks();
    let batch = Workload::new(*ep.shape(), vec![tokens; ranks as usize]).batch(ep.rank())?;
    let wide = ep.shape().experts() / ranks * ranks * ep.shape().max_tokens();
    let rows = vec![0x3f; wide as usize * ep.shape().result_bytes() as usize];
    let y = ep.rows(&rows, wide)?;
    let mut measured = [Measured::default(); 3];
    for (at, weighing) in [(1, Weighing::AtSource), (2, Weighing::AtExperts)] {
        let (x, routing) = low_latency::upload(&mut ep, &batch, weighing)?;
        let mut handle = None;
        measured[0] = meter
            .time(async || {
                handle = Some(ep.low_latency_dispatch(&x, &routing).await?.handle);
                Ok(())
            })
            .await?;
        let weights = low_latency::weights(&mut ep, &batch, weighing)?;
        let Some(handle) = handle else { return Err(Error::invalid("repetitions", 0, "1 or more")) };
        let combine =
            async || ep.low_latency_combine(&y, &handle, weights.as_ref()).await.map(|back| drop(black_box(back)));
        measured[at] = meter.time(combine).await?;
    }
    Ok(measured)
}

/// GB/s of `threads` threads, each of which copies `bytes` bytes in pieces, as often as calls are repeated; median of the slowest.
fn copying(threads: u32, bytes: usize, piece: usize, repetitions: u32) -> Result<f64, Error> {
    let there = Gathering::new(threads);
    let copy = || {
        let (source, mut target) = (vec![1u8; bytes], vec![0u8; bytes]);
        let mut times = Vec::new();
        for repetition in 0..WARM_UP + repetitions {
            there.wait()?;
            let began = Instant::now();
            for (into, from) in target.chunks_exact_mut(piece).zip(source.chunks_exact(piece)) {
                into.copy_from_slice(black_box(from));
            }
            black_box(&mut target);
            if repetition >= WARM_UP {
                times.push(began.elapsed());
            }
        }
        times.sort_unstable();
        Ok(times[times.len() / 2])
    };
    let took = on_threads(&there, |_| thread::Builder::new(), copy)?;
    let slowest = took.into_iter().max().unwrap_or_default();
    Ok(f64::from(threads) * bytes as f64 / slowest.as_secs_f64().max(1e-9) / 1e9)
}

/// Does `work` on as many threads as gather `there`, which `thread` describes. Those that wait are let go where one cannot be started.
fn on_threads<T: Send>(
    there: &Gathering,
    thread: impl Fn(u32) -> thread::Builder,
    work: impl Fn() -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    let (threads, work) = (there.ranks, &work);
    thread::scope(|scope| {
        let start = |number| {
            thread(number).spawn_scoped(scope, work).map_err(|error| {
                there.leave();
                let what = format_args!("the start of thread {number}, one of {threads} that copy memory,");
                Error::broken(what, error, "raise the limit of threads (ulimit -u), or take fewer ranks")
            })
        };
        let all = (0..threads).map(start).collect::<Result<Vec<_>, Error>>()?;
        all.into_iter().map(|thread| thread.join().expect("copying does not panic")).collect()
    })
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_leaves_lets_the_others_go() {
        let there = Gathering::new(3);
        thread::scope(|scope| {
            let two = [0, 1].map(|_| scope.spawn(|| [there.wait(), there.wait()]));
            there.wait().unwrap();
            there.leave();
            for one in two {
                let [met, left] = one.join().unwrap();
                met.unwrap();
                assert_eq!(
                    left.unwrap_err().to_string(),
                    "a measurement failed: another rank has failed; see what that rank said"
                );
            }
        });
    }

    #[test]
    fn where_a_thread_cannot_be_started_the_others_are_let_go() {
        let there = Gathering::new(4);
        // No address space holds such a stack.
        let stack = |number| if number == 2 { 1 << 60 } else { 1 << 20 };
        let ran = on_threads(&there, |number| thread::Builder::new().stack_size(stack(number)), || there.wait());
        let said = ran.unwrap_err().to_string();
        assert!(said.starts_with("the start of thread 2, one of 4 that copy memory, failed: "), "{said}");
        assert!(said.ends_with("raise the limit of threads (ulimit -u), or take fewer ranks"), "{said}");
    }

    #[test]
    fn experts_are_shared_evenly_by_as_many_cores_as_can() {
        let given = [(8, 256), (6, 256), (96, 256), (1, 256), (6, 7), (200, 60)];
        assert_eq!(given.map(|(cores, experts)| even(cores, experts)), [8, 4, 64, 1, 1, 60]);
    }
}
