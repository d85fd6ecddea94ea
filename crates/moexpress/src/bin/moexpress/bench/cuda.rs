//! Kernels on the GPUs of this host, by device events.

use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Identity, Member, Secret, Settings};
use ep_core::{Element, Rank};
use ep_cuda::bench::{Blocks, Choice, Halves, LowPlan, LowTimes, Plan, Times, run, run_low, run_member};
use serde_json::json;

use super::table::{ELEMENTS, Table};
use crate::args::{BenchArgs, Mode};
use crate::failure::Failure;
use crate::run::launched;
use crate::{memory, show};

/// Warps and stages of a block that kernels take by themselves: as many as fit.
const FITTING: (u32, u32) = (24, 0);

pub(super) fn bench(args: &BenchArgs) -> Result<String, Failure> {
    if args.nodes > 1 {
        return super::nodes::bench(args, ep_cuda::driver::devices().map_err(Failure::bad_input)?);
    }
    let member = args.processes.then(|| meet(args)).transpose()?;
    let reports = member.as_ref().is_none_or(|member| member.rank() == Rank(0));
    let html = if reports { args.html.create()? } else { None };
    let gpus = ep_cuda::driver::devices().map_err(Failure::bad_input)?;
    let ranks = match member.as_ref().map(|member| member.world()).or(args.ranks) {
        Some(ranks) => ranks,
        None if gpus > 0 => gpus as u32,
        None => return Err(Failure::bad_input("no GPU is visible (CUDA_VISIBLE_DEVICES limits them)")),
    };
    let mut report = Report { args, ranks, gpus, member, table: Table::default() };
    report.admit()?;
    report.describe();
    if args.mode != Some(Mode::LowLatency) {
        report.throughput()?;
    }
    if args.mode != Some(Mode::Throughput) {
        report.low_latency()?;
    }
    if reports { report.table.print(args, html) } else { Ok(String::new()) }
}

/// How long the other processes may take to come.
const PATIENCE: Duration = Duration::from_secs(120);

/// Meets the other processes, which are to measure the same.
fn meet(args: &BenchArgs) -> Result<Arc<Member>, Failure> {
    let environment = launched(args.backend)?;
    let numbers =
        [("hidden", args.hidden), ("experts", args.experts), ("topk", args.topk), ("repetitions", args.repetitions)];
    let identity =
        numbers.iter().fold(Identity::new(), |identity, &(name, number)| identity.number(name, number.into()));
    let lists = format!("{:?} {:?}", args.tokens(), args.multiprocessors());
    let identity = identity.text("tokens and multiprocessors", lists);
    let secret = Secret::detect().map_err(Failure::bad_input)?;
    let settings = Settings::of(&environment).secret(secret).identity(identity).within(PATIENCE);
    Ok(Arc::new(Member::join(settings).map_err(Failure::failed)?))
}

struct Report<'a> {
    args: &'a BenchArgs,
    ranks: u32,
    gpus: usize,
    /// Of this process, where each rank has one.
    member: Option<Arc<Member>>,
    table: Table,
}

impl Report<'_> {
    fn plan(&self, element: Element, tokens: u32) -> Plan {
        let BenchArgs { hidden, topk, experts, repetitions, .. } = *self.args;
        Plan { ranks: self.ranks, tokens, hidden, topk, experts, element, choice: Choice::Any, repetitions }
    }

    fn low_plan(&self, element: Element) -> LowPlan {
        let BenchArgs { hidden, topk, experts, repetitions, .. } = *self.args;
        let max_tokens = self.args.low_latency_tokens().iter().copied().max().unwrap_or(1);
        LowPlan {
            ranks: self.ranks,
            max_tokens,
            hidden,
            topk,
            experts,
            element,
            blocks: 0,
            repetitions,
            unit_bytes: None,
        }
    }

    /// Refuses what this machine or its GPUs have no room for, before anything is measured.
    fn admit(&self) -> Result<(), Failure> {
        let BenchArgs { mode, .. } = *self.args;
        for (_, element) in ELEMENTS {
            for &tokens in self.args.tokens().iter().filter(|_| mode != Some(Mode::LowLatency)) {
                let plan = self.plan(element, tokens);
                plan.admit().map_err(Failure::bad_input)?;
                memory::admit_gpu_bench(&plan).map_err(Failure::bad_input)?;
            }
            if mode != Some(Mode::Throughput) {
                self.low_plan(element).admit().map_err(Failure::bad_input)?;
            }
        }
        Ok(())
    }

    fn describe(&mut self) {
        let BenchArgs { hidden, topk, experts, repetitions, .. } = *self.args;
        self.table.line(format_args!(
            "{}{} on {}, hidden {hidden}, top-{topk} of {experts} experts chosen at random\nmicroseconds of the slowest rank by \
             device events after all have met on their devices, median of {repetitions}",
            show::plural(u64::from(self.ranks), "rank"),
            if self.member.is_some() { ", each a process," } else { "" },
            show::plural(self.gpus as u64, "GPU"),
        ));
    }

    fn throughput(&mut self) -> Result<(), Failure> {
        self.table.line(
            "\nthroughput: dispatch cached, and fresh after its counts, with headers; combine of rows in the window, and of rows \
             anywhere\nGB/s on the link, and their share of what stores of the same multiprocessors carry in this run\n",
        );
        self.table.line(
            "       tokens  SMs   layout  counts    fresh   cached  combine  anywhere   ceiling  dispatch  share   combine  share",
        );
        let shapes: Vec<Blocks> = self
            .args
            .multiprocessors()
            .iter()
            .map(|&blocks| Blocks { blocks, movers: FITTING.0, stages: FITTING.1 })
            .collect();
        for (name, element) in ELEMENTS {
            for &tokens in self.args.tokens() {
                let plan = self.plan(element, tokens);
                let all = match &self.member {
                    Some(member) => run_member(&plan, &shapes, member).map_err(Failure::failed)?.unwrap_or_default(),
                    None => run(&plan, &shapes).map_err(Failure::failed)?,
                };
                for (shape, times) in shapes.iter().zip(&all) {
                    self.throughput_row(name, &plan, shape, times)?;
                }
            }
        }
        Ok(())
    }

    fn throughput_row(&mut self, name: &str, plan: &Plan, shape: &Blocks, times: &Times) -> Result<(), Failure> {
        let Times { ceiling, layout, counts, cached, fresh, combine, anywhere, wrong, .. } = *times;
        if wrong > 0 {
            return Err(Failure::failed(format_args!("{wrong} values came back wrong, {name}, {plan:?}, {shape:?}")));
        }
        let [there, back] = times.rates(plan);
        let (tokens, sms) = (plan.tokens, shape.blocks);
        let share = |rate: f64| if ceiling > 0.0 { format!("{:.2}", rate / ceiling) } else { "-".to_owned() };
        self.table.line(format_args!(
            "{name:<5} {tokens:>7} {sms:>4} {layout:>8.1} {counts:>7.1} {fresh:>8.1} {cached:>8.1} {combine:>8.1} {anywhere:>9.1} \
             {ceiling:>9.1} {there:>9.1} {:>6} {back:>9.1} {:>6}",
            share(there),
            share(back),
        ));
        self.table.row(json!({
            "mode": "throughput", "dtype": name, "ranks": plan.ranks, "gpus": self.gpus, "tokens": tokens,
            "hidden": plan.hidden, "topk": plan.topk, "experts": plan.experts, "multiprocessors": sms,
            "processes": self.member.is_some(),
            "layout_us": layout, "counts_us": counts, "fresh_dispatch_us": fresh, "cached_dispatch_us": cached,
            "combine_us": combine, "combine_anywhere_us": anywhere, "ceiling_gb_s": ceiling,
            "dispatch_gb_s": there, "combine_gb_s": back,
        }));
        Ok(())
    }

    fn low_latency(&mut self) -> Result<(), Failure> {
        self.table.line(
            "\nlow latency: both halves in one launch, in two, the sending half alone; combine with a row a choice, and a row a \
             rank\n",
        );
        self.table
            .line("       tokens   dispatch     two    send   per choice     two    send   per rank     two    send");
        for (name, element) in ELEMENTS {
            let plan = self.low_plan(element);
            let all = run_low(&plan, self.args.low_latency_tokens()).map_err(Failure::failed)?;
            for times in &all {
                self.low_latency_row(name, &plan, times)?;
            }
        }
        Ok(())
    }

    fn low_latency_row(&mut self, name: &str, plan: &LowPlan, times: &LowTimes) -> Result<(), Failure> {
        let LowTimes { tokens, dispatch, per_choice, per_rank, wrong } = *times;
        if wrong > 0 {
            return Err(Failure::failed(format_args!(
                "{wrong} values came back wrong, {name}, {tokens} tokens, {plan:?}"
            )));
        }
        let halves = |Halves { one, two, send, .. }: Halves| format!("{one:>10.1} {two:>7.1} {send:>7.1}");
        self.table.line(format_args!(
            "{name:<5} {tokens:>7} {}   {} {}",
            halves(dispatch),
            halves(per_choice),
            halves(per_rank)
        ));
        let object =
            |Halves { one, two, send, .. }: Halves| json!({ "one_launch": one, "two_launches": two, "send": send });
        self.table.row(json!({
            "mode": "low-latency", "dtype": name, "ranks": plan.ranks, "gpus": self.gpus, "tokens": tokens,
            "hidden": plan.hidden, "topk": plan.topk, "experts": plan.experts, "dispatch_us": object(dispatch),
            "combine_per_choice_us": object(per_choice), "combine_per_rank_us": object(per_rank),
        }));
        Ok(())
    }
}
