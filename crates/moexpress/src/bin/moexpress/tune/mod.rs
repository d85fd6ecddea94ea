//! `moexpress tune`: settings for a layer on a machine, found by timed runs.
//!
//! From the automatic settings on, one value after the other is varied while all others stay as they are; what is best so
//! far goes on. That is repeated until a round finds nothing better, or until the budget of events is spent.

mod candidate;

use std::fmt::Write;

use ep_conformance::workload::{Batch, Workload};
use ep_core::{Error, Nanos, Settings, Shape, Topology};
use serde_json::{Value, json};

use self::candidate::{Candidate, Knob, bytes};
use crate::args::{TuneArgs, name_of};
use crate::failure::Failure;
use crate::layer::{Layer, Stopped, Times};
use crate::{memory, page, show};

/// Times this close count as equal: then the smaller window is better.
const EQUAL: f64 = 0.005;

/// Settings that were timed.
#[derive(Clone, Copy, Debug)]
struct Tried {
    candidate: Candidate,
    automatic: bool,
    times: Times,
    window_bytes: u64,
    ring_bytes: u64,
}

impl Tried {
    /// Of the slowest ranks.
    fn together(&self) -> Nanos {
        self.times.slowest[0] + self.times.slowest[1]
    }

    fn beats(&self, other: &Self) -> bool {
        let (mine, theirs) = (self.together().0 as f64, other.together().0 as f64);
        if (mine - theirs).abs() <= EQUAL * theirs { self.window_bytes < other.window_bytes } else { mine < theirs }
    }
}

/// The search.
struct Search<'a> {
    args: &'a TuneArgs,
    shape: Shape,
    topology: Topology,
    batches: Vec<Batch>,
    tried: Vec<Tried>,
    /// Events that are left.
    budget: u64,
}

pub(crate) fn tune(args: &TuneArgs) -> Result<String, Failure> {
    let html = args.html.create()?;
    let progress = show::progress_bar();
    let mut search = Search::new(args).map_err(Failure::bad_input)?;
    let outcome = search.run(&|tried: usize| progress.set_message(format!("{tried} tried")));
    progress.finish_and_clear();
    let (best, done) = outcome?;
    let object = search.object(&best, done);
    if let Some(file) = html {
        file.write(page::tune(&object).as_bytes())?;
    }
    Ok(if args.json { format!("{object}\n") } else { search.text(&best, done) })
}

/// Whether the search came to its end before its budget was spent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Done {
    Ended,
    BudgetSpent,
}

impl<'a> Search<'a> {
    fn new(args: &'a TuneArgs) -> Result<Self, Error> {
        let topology = args.topology.topology()?;
        let shape = args.layer.shape(args.tokens)?;
        shape.local_experts(topology.ranks())?;
        let all = u64::from(args.tokens) * u64::from(topology.ranks());
        memory::admit_tuning(&shape, &topology, all, args.model)?;
        // Only choices are wanted: rows of one element.
        let thin =
            Shape::builder().experts(shape.experts()).topk(shape.topk()).hidden(1).max_tokens(args.tokens).build()?;
        let tokens = vec![args.tokens; topology.ranks() as usize];
        let batches = Workload::new(thin, tokens).kind(args.routing).seed(args.seed).batches()?;
        Ok(Self { args, shape, topology, batches, tried: Vec::new(), budget: args.budget })
    }

    fn run(&mut self, told: &dyn Fn(usize)) -> Result<(Tried, Done), Failure> {
        let automatic = Candidate::of(&Settings::auto(&self.shape, &self.topology));
        let Some(mut best) = self.time(automatic)? else { return Err(self.too_little()) };
        loop {
            let before = best;
            for &knob in Knob::all(self.topology.nodes()) {
                for candidate in best.candidate.variants(knob) {
                    if self.tried.iter().any(|tried| tried.candidate == candidate) {
                        continue;
                    }
                    told(self.tried.len());
                    let tried = match self.time(candidate)? {
                        Some(tried) => tried,
                        None if self.budget == 0 => return self.admitted(best, Done::BudgetSpent),
                        None => continue,
                    };
                    if self.admits(&tried) && (!self.admits(&best) || tried.beats(&best)) {
                        best = tried;
                    }
                }
            }
            if best.candidate == before.candidate {
                return self.admitted(best, Done::Ended);
            }
        }
    }

    /// Times settings; none when they take more events than are left, which spends the budget, or cannot be run.
    fn time(&mut self, candidate: Candidate) -> Result<Option<Tried>, Failure> {
        let settings = candidate.settings(&self.shape, &self.topology).map_err(Failure::failed)?;
        let Ok((window_bytes, ring_bytes)) = bytes(&self.shape, &self.topology, &settings) else { return Ok(None) };
        let layer = Layer {
            shape: self.shape,
            topology: self.topology,
            settings,
            model: self.args.model.model(),
            before: Nanos(0),
            batches: &self.batches,
            max_events: self.budget,
            threads: self.args.threads.get(),
        };
        match layer.time() {
            Ok(times) => {
                self.budget -= times.events;
                let automatic = self.tried.is_empty();
                let tried = Tried { candidate, automatic, times, window_bytes, ring_bytes };
                self.tried.push(tried);
                Ok(Some(tried))
            }
            Err(Stopped::Events) => {
                self.budget = 0;
                Ok(None)
            }
            // Others may fit.
            Err(Stopped::Memory(error)) if !self.tried.is_empty() => {
                eprintln!("left out, {}: {error}", candidate.flags(2));
                Ok(None)
            }
            Err(Stopped::Memory(error)) => Err(Failure::bad_input(error)),
            Err(Stopped::Failed(error)) => Err(Failure::failed(format_args!("{}: {error}", candidate.flags(2)))),
        }
    }

    fn admits(&self, tried: &Tried) -> bool {
        self.args.max_window.is_none_or(|most| tried.window_bytes <= most)
    }

    fn admitted(&self, best: Tried, done: Done) -> Result<(Tried, Done), Failure> {
        if self.admits(&best) {
            return Ok((best, done));
        }
        let least = self.tried.iter().map(|tried| tried.window_bytes).min().unwrap_or(0);
        let limit = format_args!("at least {least}, the smallest window of all settings tried");
        Err(Failure::bad_input(Error::invalid("--max-window", self.args.max_window.unwrap_or(0), limit)))
    }

    fn too_little(&self) -> Failure {
        let limit = "more: the automatic settings alone take as many";
        Failure::bad_input(Error::invalid("--budget", self.args.budget, limit))
    }

    /// Best first.
    fn sorted(&self) -> Vec<Tried> {
        let mut sorted = self.tried.clone();
        sorted.sort_by_key(|tried| (tried.together(), tried.window_bytes));
        sorted
    }

    fn text(&self, best: &Tried, done: Done) -> String {
        let mut out = String::new();
        self.describe(&mut out, best, done).expect("writing to a string does not fail");
        out
    }

    fn describe(&self, out: &mut String, best: &Tried, done: Done) -> std::fmt::Result {
        let (args, nodes) = (self.args, self.topology.nodes());
        writeln!(
            out,
            "{} on {}, timed on {}; {} each, hidden {} {}, top-{} of {} experts, {}, seed {}",
            show::plural(self.topology.ranks().into(), "rank"),
            show::plural(nodes.into(), "node"),
            name_of(args.model),
            show::plural(args.tokens.into(), "token"),
            self.shape.hidden(),
            name_of(args.layer.dtype),
            self.shape.topk(),
            self.shape.experts(),
            args.routing,
            args.seed,
        )?;
        let how = match done {
            Done::Ended => "until nothing was better",
            Done::BudgetSpent => "until the budget was spent: a larger --budget may find better ones",
        };
        let spent = show::count(args.budget - self.budget);
        writeln!(out, "{} settings tried in {spent} events, {how}\n", self.tried.len())?;
        let names: Vec<&str> = best.candidate.values(nodes).into_iter().map(|(name, _)| name).collect();
        write!(out, "  {:<9}", "placement")?;
        names.iter().try_for_each(|name| write!(out, "{:>11}", name.replace('_', " ")))?;
        writeln!(out, "{:>11}{:>11}{:>11}{:>12}{:>12}", "dispatch", "combine", "together", "window", "rings")?;
        for tried in self.sorted() {
            let mark = if tried.candidate == best.candidate { '>' } else { ' ' };
            write!(out, "{mark} {:<9}", tried.candidate.placement_name())?;
            tried.candidate.values(nodes).iter().try_for_each(|(_, value)| write!(out, "{value:>11}"))?;
            let [dispatch, combine] = tried.times.slowest.map(|time| time.to_string());
            write!(out, "{dispatch:>11}{combine:>11}{:>11}", tried.together().to_string())?;
            write!(out, "{:>12}{:>12}", show::bytes(tried.window_bytes), show::bytes(tried.ring_bytes))?;
            writeln!(out, "{}", if tried.automatic { "  automatic" } else { "" })?;
        }
        writeln!(
            out,
            "\nTimes are virtual, of the slowest rank; window and rings (with staging) are bytes of each rank. Of times within \
             {} %\nthe smaller window is proposed. Nothing was verified: payload was elided.\n",
            100.0 * EQUAL
        )?;
        writeln!(out, "in Rust   {}", best.candidate.calls(nodes))?;
        writeln!(out, "options   {}", best.candidate.flags(nodes))
    }

    fn object(&self, best: &Tried, done: Done) -> Value {
        let nodes = self.topology.nodes();
        let row = |tried: &Tried| -> Value {
            let mut row = json!({
                "automatic": tried.automatic,
                "placement": tried.candidate.placement_name(),
                "dispatch_ns": tried.times.slowest[0].0,
                "combine_ns": tried.times.slowest[1].0,
                "together_ns": tried.together().0,
                "window_bytes": tried.window_bytes,
                "ring_bytes": tried.ring_bytes,
            });
            for (name, value) in tried.candidate.values(nodes) {
                row[name] = value.into();
            }
            row
        };
        json!({
            "model": name_of(self.args.model),
            "nodes": nodes,
            "ranks": self.topology.ranks(),
            "tokens_per_rank": self.args.tokens,
            "budget_spent": done == Done::BudgetSpent,
            "events": self.args.budget - self.budget,
            "proposal": row(best),
            "calls": best.candidate.calls(nodes),
            "options": best.candidate.flags(nodes),
            "tried": self.sorted().iter().map(row).collect::<Vec<_>>(),
        })
    }
}
