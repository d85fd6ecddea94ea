//! `moexpress run`: make or read a batch, move it, check everything.

use std::path::PathBuf;
use std::time::Instant;

use ep_bootstrap::Environment;
use ep_conformance::workload::{Batch, Workload};
use ep_conformance::{low_latency, verify};
use ep_core::layout::Queues;
use ep_core::layout::{RowFormat, RowHeader};
use ep_core::memory::Estimate;
use ep_core::reference::{Weighing, World};
use ep_core::{Error, Nanos, Rank, RankSet, Settings, Shape, Topology};
use indicatif::ProgressBar;

use crate::args::{Backend, Far, LayerArgs, Mode, ModelName, Results, RunArgs, Schedule, name_of};
use crate::backend::{self, Job, Ran, Timing};
use crate::failure::Failure;
use crate::memory::Needs;
use crate::rank::{Account, Interval, STEPS, Saw};
use crate::report::{Busiest, Details, Measured, Report};
use crate::traffic::Traffic;
use crate::whole::Whole;
use crate::{dump, input, page, show, traces, whole};

pub(crate) fn run(args: &RunArgs) -> Result<String, Failure> {
    let progress = show::progress_bar();
    let outcome = run_shown(args, &progress);
    progress.finish_and_clear();
    outcome
}

fn run_shown(args: &RunArgs, progress: &ProgressBar) -> Result<String, Failure> {
    progress.set_message("batches");
    let launched = args.processes.then(|| launched(args.backend)).transpose()?;
    let task = Task::of(args, launched).map_err(Failure::bad_input)?;
    if task.reports() {
        whole::apart(&files(args, &task.topology))?;
    }
    let outputs = if task.reports() { Outputs::create(args, &task.topology)? } else { Outputs::default() };
    let trace = args.trace.as_deref().map(Whole::create).transpose()?;
    progress.set_length(u64::from(task.topology.ranks()) * STEPS + 1);
    progress.set_message("moving rows");
    let job = task.job(args, trace.is_some());
    let ran = match backend::run(args.backend, &job, &|| progress.inc(1)) {
        Ok(Some(ran)) => ran,
        Ok(None) => return Ok(String::new()),
        Err(failure) => return task.explain(args, failure, outputs.html),
    };
    if let Some(file) = trace {
        traces::write(file, &ran.records)?;
    }
    progress.set_message("verifying");
    task.judge(args, ran, outputs)
}

/// The files that are read and written, by what a user calls them.
fn files(args: &RunArgs, topology: &Topology) -> Vec<(String, PathBuf)> {
    let named = |name: &str, path: &Option<PathBuf>| path.clone().map(|path| (name.to_owned(), path));
    let alone = [named("--input", &args.input), named("--html", &args.html.file), named("--trace", &args.trace)];
    let dumped = args
        .dump
        .iter()
        .flat_map(|dir| topology.all().map(move |rank| (format!("rank {rank} of --dump"), dump::file_of(dir, rank))));
    alone.into_iter().flatten().chain(dumped).collect()
}

/// What the rank that reports writes to files.
#[derive(Default)]
struct Outputs {
    /// `[ranks]`; empty where no dump is asked for.
    dump: Vec<Whole>,
    html: Option<Whole>,
}

impl Outputs {
    fn create(args: &RunArgs, topology: &Topology) -> Result<Self, Failure> {
        let dump = args.dump.as_deref().map(|dir| dump::create(dir, topology.ranks() as usize));
        Ok(Self { dump: dump.transpose()?.unwrap_or_default(), html: args.html.create()? })
    }
}

/// Everything that is known before the run.
struct Task {
    /// The place of this process, where every rank is one.
    launched: Option<Environment>,
    /// Of the layer that ranks see.
    world: World,
    /// The layer that was asked for.
    shape: Shape,
    topology: Topology,
    settings: Settings,
    timing: Option<Timing>,
    low_latency: Option<Weighing>,
    /// What the run takes of this machine's memory.
    memory: Estimate,
    /// `[ranks]`: of the layer that ranks see.
    batches: Vec<Batch>,
}

impl Task {
    fn of(args: &RunArgs, launched: Option<Environment>) -> Result<Self, Error> {
        let topology = launched.as_ref().map_or_else(|| args.topology.topology(), Environment::topology)?;
        let (timing, low_latency) = (timing(args)?, low_latency(args)?);
        check_far(args, &topology)?;
        let settled = |shape: &Shape| -> Result<(Settings, Shape), Error> {
            let automatic = backend::automatic(args.backend, shape, &topology);
            let settings = args.settings.settings(automatic, args.mode == Mode::LowLatency)?;
            Ok((settings, backend::seen_shape(shape, &topology, &settings, timing)?))
        };
        let needs = |shape, seen, settings, tokens| {
            let (topology, backend) = (&topology, args.backend);
            let processes = launched.as_ref().map_or(1, |launched| launched.local_world);
            Needs { backend, shape, seen, topology, settings, timing, tokens, processes }.admit()
        };
        let (shape, settings, seen, memory, batches) = match &args.input {
            None => {
                let tokens = tokens(args, &topology)?;
                let shape = args.layer.shape(tokens.iter().copied().max().unwrap_or(0).max(1))?;
                shape.local_experts(topology.ranks())?;
                let (settings, seen) = settled(&shape)?;
                let memory = needs(&shape, &seen, &settings, tokens.iter().map(|&tokens| u64::from(tokens)).sum())?;
                let work = Workload::new(seen, tokens).kind(args.routing).drop(args.drop).seed(args.seed);
                (shape, settings, seen, memory, work.batches()?)
            }
            Some(path) => {
                let mut input = input::read(path, topology.ranks(), args.layer.experts)?;
                let layer = LayerArgs { hidden: input.hidden, topk: input.topk, ..args.layer };
                let most = input.batches.iter().map(|batch| batch.tokens).max().unwrap_or(0);
                for (rank, batch) in (0..).map(Rank).zip(&mut input.batches) {
                    batch.drop_choices(args.drop, args.seed, rank)?;
                }
                let shape = layer.shape(most.max(1))?;
                let (settings, seen) = settled(&shape)?;
                let tokens = input.batches.iter().map(|batch| u64::from(batch.tokens)).sum();
                let memory = needs(&shape, &seen, &settings, tokens)?;
                input.batches.iter_mut().for_each(|batch| shorten(batch, &shape, &seen));
                (shape, settings, seen, memory, input.batches)
            }
        };
        let world = World::new(seen, topology, RankSet::new())?;
        Ok(Self { launched, world, shape, topology, settings, timing, low_latency, memory, batches })
    }

    fn job<'a>(&'a self, args: &'a RunArgs, record: bool) -> Job<'a> {
        Job {
            backend: args.backend,
            shape: self.shape,
            world: &self.world,
            topology: self.topology,
            settings: self.settings,
            seed: args.seed,
            twin: args.twin,
            low_latency: self.low_latency,
            timing: self.timing,
            launched: self.launched.as_ref(),
            began: Instant::now(),
            far_lanes: args.far_lanes.map_or(Queues::PER_ROLE, Queues::from),
            asked_far_lanes: args.far_lanes.map(Queues::from),
            far: args.far.far.is_some().then_some(&args.far),
            record,
            batches: &self.batches,
        }
    }

    /// Holds what came against the oracle, writes the dump, and reports.
    fn judge(&self, args: &RunArgs, ran: Ran, outputs: Outputs) -> Result<String, Failure> {
        let Outputs { dump, html } = outputs;
        let events = ran.events;
        let accounts = match whole(ran) {
            Ok(accounts) => accounts,
            Err(error) => return publish(&self.report(args, events, None, Err(error)), html),
        };
        let measured = self.measure(&accounts);
        let saw: Vec<Saw> = accounts.into_iter().map(|account| account.saw).collect();
        for (file, (batch, saw)) in dump.into_iter().zip(self.batches.iter().zip(&saw)) {
            dump::write(file, &self.shape, &self.topology, batch, saw)?;
        }
        let verdict = self.verify(saw).map_err(|mismatch| format!("not verified: {mismatch}"));
        publish(&self.report(args, events, Some(measured), verdict), html)
    }

    fn verify(&self, saw: Vec<Saw>) -> Result<verify::Compared, verify::Mismatch> {
        let (mut observed, mut seen) = (Vec::new(), Vec::new());
        for saw in saw {
            match saw {
                Saw::Throughput(rank) => observed.push(rank),
                Saw::LowLatency(rank) => seen.push(rank),
            }
        }
        match self.low_latency {
            None => verify::run(&self.world, &self.batches, &observed),
            Some(weighing) => low_latency::verify::run(&self.world, &self.batches, weighing, &seen),
        }
    }

    /// Whether this process is the one that reports.
    fn reports(&self) -> bool {
        self.launched.as_ref().is_none_or(|launched| launched.rank == Rank(0))
    }

    /// A failure of the backend, with a report where the run itself failed: one, however many processes it has.
    fn explain(&self, args: &RunArgs, failure: Failure, html: Option<Whole>) -> Result<String, Failure> {
        if failure.is_bad_input() || !self.reports() {
            return Err(failure);
        }
        publish(&self.report(args, None, None, Err(failure.text)), html)
    }

    fn report<'a>(
        &'a self,
        args: &'a RunArgs,
        events: Option<u64>,
        measured: Option<Measured>,
        verdict: Result<verify::Compared, String>,
    ) -> Report<'a> {
        let Self { shape, topology, settings, timing, .. } = *self;
        let (seen, memory) = (*self.world.shape(), self.memory.bytes());
        Report {
            args,
            shape,
            seen,
            topology,
            settings,
            timing,
            batches: &self.batches,
            memory,
            events,
            measured,
            verdict,
        }
    }

    fn measure(&self, accounts: &[Account]) -> Measured {
        let dispatch = Traffic::of(&self.topology, accounts.iter().map(|account| &account.after_dispatch));
        let both = Traffic::of(&self.topology, accounts.iter().map(|account| &account.after_combine));
        let combine = both.since(&dispatch);
        let row = RowFormat::new(&self.shape);
        let (there, back) = match self.low_latency {
            None => (row.wire_bytes(), row.results().wire_bytes()),
            Some(_) => low_row_bytes(&row),
        };
        let time = |of: fn(&Account) -> Interval| {
            let intervals = accounts.iter().map(of);
            match (self.timing, &self.launched) {
                (None, None) => Interval::hull(intervals).map_or(Nanos(0), Interval::length),
                // In virtual time ranks start together; clocks of processes cannot be compared.
                _ => intervals.map(Interval::length).max().unwrap_or_default(),
            }
        };
        let elided = self.timing.is_some_and(|timing| timing.elide_payload);
        Measured {
            dispatch: if elided { dispatch.weighed(there) } else { dispatch },
            combine: if elided { combine.weighed(back) } else { combine },
            dispatch_time: time(|account| account.dispatch),
            combine_time: time(|account| account.combine),
            busiest: busiest(accounts),
            details: Details::of(&self.topology, accounts, self.launched.is_none()),
        }
    }
}

/// Prints a report as its arguments ask for it, on a page, too, and fails if the run did.
fn publish(report: &Report<'_>, html: Option<Whole>) -> Result<String, Failure> {
    if let Some(file) = html {
        file.write(page::run(&report.object()).as_bytes())?;
    }
    let text = if report.args.json { report.json() } else { report.text() };
    let Err(error) = &report.verdict else { return Ok(text) };
    let again = match report.args.backend {
        Backend::Sim => format!("\n(seed {}: the same arguments repeat this run exactly)", report.args.seed),
        // Processes have each their own schedule, and real time.
        Backend::Ascend if report.args.twin && !report.args.processes => {
            format!("\n(seed {}: the same arguments repeat this run exactly)", report.args.seed)
        }
        Backend::Host | Backend::Cuda | Backend::Ascend => String::new(),
    };
    Err(Failure::failed(format_args!("{error}{again}")).with_report(text))
}

/// Where a launcher has put this process.
pub(crate) fn launched(backend: Backend) -> Result<Environment, Failure> {
    Environment::detect().map_err(|error| {
        let backend = name_of(if backend == Backend::Sim { Backend::Host } else { backend });
        let how = format_args!("moexpress launch -n 4 -- moexpress run --backend {backend} --processes");
        Failure::bad_input(format_args!("--processes: {error}; for instance: {how}"))
    })
}

/// Whether time is virtual, and that the arguments which need it have it.
fn timing(args: &RunArgs) -> Result<Option<Timing>, Error> {
    if args.backend == Backend::Sim && args.processes {
        return Err(Error::invalid("--backend with --processes", "sim", "host, cuda or ascend"));
    }
    if args.twin && args.backend != Backend::Ascend {
        return Err(Error::invalid("--backend with --twin", name_of(args.backend), "ascend"));
    }
    if args.backend != Backend::Sim {
        let given = [
            ("--schedule", args.schedule.is_some()),
            ("--trace", args.trace.is_some()),
            ("--far-lanes", args.far_lanes.is_some() && args.far.far.is_none()),
            ("--model", args.model.is_some()),
            ("--elide-payload", args.elide_payload),
            ("--threads", args.threads.given()),
        ];
        if let Some((option, _)) = given.iter().find(|(_, given)| *given) {
            return Err(Error::invalid(format_args!("--backend with {option}"), name_of(args.backend), "sim"));
        }
    }
    if args.far.far.is_some() && !matches!(args.backend, Backend::Host | Backend::Cuda) {
        return Err(Error::invalid("--backend with --far", name_of(args.backend), "host or cuda"));
    }
    if args.far.far == Some(Far::Ibgda) && args.backend != Backend::Cuda {
        return Err(Error::invalid("--backend with --far ibgda", name_of(args.backend), "cuda: kernels post"));
    }
    if let (Some(far), Some((option, of))) = (args.far.far, args.far.misplaced()) {
        let allowed: Vec<String> = of.iter().copied().map(name_of).collect();
        return Err(Error::invalid(format_args!("--far with {option}"), name_of(far), allowed.join(" or ")));
    }
    if args.schedule == Some(Schedule::Timed) {
        if args.elide_payload && args.dump.is_some() {
            return Err(Error::invalid(
                "--dump with --elide-payload",
                "given",
                "one of them: there is no payload to write",
            ));
        }
        let model = args.model.unwrap_or(ModelName::H800Cx7);
        return Ok(Some(Timing { model, elide_payload: args.elide_payload, threads: args.threads.get() }));
    }
    let needs = |option: &str| Error::invalid(format_args!("--schedule with {option}"), "explore", "timed");
    match args.model {
        Some(_) => Err(needs("--model")),
        None if args.elide_payload => Err(needs("--elide-payload")),
        None if args.threads.given() => Err(needs("--threads")),
        None => Ok(None),
    }
}

/// Whether what is said of lanes between nodes has a meaning, and what carries rows there is named where it must be.
fn check_far(args: &RunArgs, topology: &Topology) -> Result<(), Error> {
    let option = [("--far", args.far.far.is_some()), ("--far-lanes", args.far_lanes.is_some())];
    let option = option.into_iter().find(|(_, given)| *given).map(|(name, _)| name).or_else(|| args.settings.far());
    match (topology.nodes(), option) {
        (1, Some(option)) => {
            Err(Error::invalid(format_args!("nodes with {option}"), 1, "2 or more: nothing is far on one node"))
        }
        (nodes @ 2.., _) if args.backend == Backend::Host && args.far.far.is_none() => Err(Error::invalid(
            "nodes with --backend host",
            nodes,
            "1; more with --far roce, which carries rows between them, or --far loop, which pretends to be a network",
        )),
        (nodes @ 2.., _) if args.backend == Backend::Cuda && args.far.far.is_none() => Err(Error::invalid(
            "nodes with --backend cuda",
            nodes,
            "1; more with --far roce, which carries rows between them, --far ibgda, where kernels post to mlx5 adapters, or --far loop, which pretends to be a network",
        )),
        _ => Ok(()),
    }
}

/// What comes back in low latency, if it is that, and that the argument for it goes with it.
fn low_latency(args: &RunArgs) -> Result<Option<Weighing>, Error> {
    if let (Mode::LowLatency, Some(option)) = (args.mode, args.settings.of_throughput()) {
        return Err(Error::invalid(format_args!("--mode with {option}"), "low-latency", "throughput"));
    }
    match (args.mode, args.results) {
        (Mode::Throughput, None) => Ok(None),
        (Mode::Throughput, Some(_)) => Err(Error::invalid("--mode with --results", "throughput", "low-latency")),
        (Mode::LowLatency, Some(Results::PerRank)) => Ok(Some(Weighing::AtExperts)),
        (Mode::LowLatency, Some(Results::PerChoice) | None) => Ok(Some(Weighing::AtSource)),
    }
}

/// Bytes of a low-latency row and of its result as they travel.
fn low_row_bytes(row: &RowFormat) -> (u64, u64) {
    let header = size_of::<RowHeader>() as u64;
    (row.header_bytes() + row.payload_bytes(), header + row.results().payload_bytes())
}

/// `[ranks]`: tokens of each.
fn tokens(args: &RunArgs, topology: &Topology) -> Result<Vec<u32>, Error> {
    let ranks = topology.ranks() as usize;
    match args.tokens[..] {
        [each] => Ok(vec![each; ranks]),
        ref list if list.len() == ranks => Ok(list.to_vec()),
        ref list => {
            let allowed = format_args!("one number, or one for each of the {ranks} ranks");
            Err(Error::invalid("number of --tokens", list.len(), allowed))
        }
    }
}

/// Leaves of each row as much as ranks see of it.
fn shorten(batch: &mut Batch, shape: &Shape, seen: &Shape) {
    let (whole, short) = (shape.hidden() as usize, seen.hidden() as usize);
    if short < whole {
        batch.x = batch.x.chunks_exact(whole).flat_map(|row| &row[..short]).copied().collect();
    }
}

/// The accounts of all ranks, or why not all of them finished.
fn whole(ran: Ran) -> Result<Vec<Account>, String> {
    let failed: Vec<String> = (0u32..)
        .zip(&ran.accounts)
        .filter_map(|(rank, account)| account.as_ref().err().map(|error| format!("rank {rank}: {error}")))
        .collect();
    if failed.is_empty() { Ok(ran.accounts.into_iter().flatten().collect()) } else { Err(failed.join("\n       ")) }
}

fn busiest(accounts: &[Account]) -> Busiest {
    let loads: Vec<u64> = accounts.iter().flat_map(|account| account.saw.expert_counts()).collect();
    let received = |account: &Account| account.after_dispatch.peers.iter().map(|peer| peer.rows_received).sum();
    let rows: Vec<u64> = accounts.iter().map(received).collect();
    let (expert, expert_choices) = most(&loads);
    let (rank, rank_rows) = most(&rows);
    Busiest { expert, expert_choices, idle_experts: loads.iter().filter(|&&load| load == 0).count(), rank, rank_rows }
}

/// The first of the largest, and how large it is.
fn most(loads: &[u64]) -> (usize, u64) {
    let first_of_largest = loads.iter().copied().enumerate().rev().max_by_key(|&(_, load)| load);
    first_of_largest.unwrap_or((0, 0))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    /// Runs a small job, lets `spoil` change what came of it, and judges it.
    fn judged(json: bool, spoil: impl FnOnce(&mut Ran)) -> Result<String, Failure> {
        let line = "moexpress run --ranks-per-node 2 --tokens 5 --hidden 8 --experts 4 --topk 2";
        let Command::Run(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!("a run") };
        let args = RunArgs { json, ..*args };
        let task = Task::of(&args, None).unwrap();
        let mut ran = backend::simulated(&task.job(&args, false), &|| ()).unwrap();
        spoil(&mut ran);
        task.judge(&args, ran, Outputs::default())
    }

    #[test]
    fn one_wrong_bit_is_not_verified() {
        assert!(judged(false, |_| ()).unwrap().contains("VERIFIED"));
        let failure = judged(true, |ran| match &mut ran.accounts[1].as_mut().unwrap().saw {
            Saw::Throughput(observed) => observed.combined_x[9] ^= 1,
            Saw::LowLatency(_) => panic!("it was throughput mode"),
        });
        let failure = failure.unwrap_err();
        assert_eq!(failure.code, crate::failure::FAILED);
        assert!(failure.text.contains("rank 1: combined_x at row 0, column 4 is "), "{}", failure.text);
        let object: serde_json::Value = serde_json::from_str(&failure.report).unwrap();
        assert_eq!((&object["verified"], &object["verified_rows"]), (&false.into(), &serde_json::Value::Null));
        assert!(object["error"].as_str().unwrap().contains("combined_x"));
        assert!(object["rows_near"].as_u64().is_some());
    }

    #[test]
    fn a_failed_rank_fails_the_run() {
        let failure = judged(false, |ran| ran.accounts[0] = Err("it broke".to_owned())).unwrap_err();
        assert_eq!(failure.code, crate::failure::FAILED);
        assert!(failure.text.starts_with("rank 0: it broke"), "{}", failure.text);
        assert!(failure.report.contains("NOT VERIFIED"));
    }

    #[test]
    fn the_first_of_the_busiest_is_named() {
        assert_eq!(most(&[1, 7, 3, 7]), (1, 7));
        assert_eq!(most(&[]), (0, 0));
    }
}
