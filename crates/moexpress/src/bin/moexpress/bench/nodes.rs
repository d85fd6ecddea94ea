//! Calls over several nodes of GPUs, whose ranks are threads of this process, over a network that is made of software or played by the GPUs.

use ep_core::layout::Queues;
use ep_core::{Element, Placement};
use ep_cuda::bench::{Choice, NodesCut, NodesTimes, Plan, PutTimes, run_nodes, run_puts};
use serde_json::json;

use super::table::{ELEMENTS, Table};
use crate::args::{BenchArgs, Mode, name_of};
use crate::backend::cuda::Between;
use crate::failure::Failure;
use crate::show;

/// How rows travel within a node.
const PLACEMENTS: [(&str, Placement); 2] = [("rings", Placement::Ring), ("placed", Placement::Direct)];

pub(super) fn bench(args: &BenchArgs, gpus: usize) -> Result<String, Failure> {
    let html = args.html.create()?;
    let ranks = args.ranks.unwrap_or(args.nodes);
    let mut table = Table::default();
    let rate = args.far.far_rate.map_or_else(|| "unthrottled".to_owned(), |rate| format!("{rate} GB/s a rank"));
    table.line(format_args!(
        "{} of {} on {}, hidden {}, top-{} of {} experts chosen at random, over {}, {rate}\nmicroseconds of the slowest rank by device \
         events, median of {}; GB/s of rows between nodes, out of or into the rank with most of them, and their share of the rate\n",
        show::plural(u64::from(ranks), "rank"),
        show::plural(u64::from(args.nodes), "node"),
        show::plural(gpus as u64, "GPU"),
        args.hidden,
        args.topk,
        args.experts,
        args.far.far.map_or_else(String::new, name_of),
        args.repetitions,
    ));
    puts(args, &mut table)?;
    table.line("       tokens  SMs          channels    MiB  dispatch   GB/s  share   combine   GB/s  share");
    let low_latency = args.mode == Some(Mode::LowLatency);
    for (name, element) in ELEMENTS {
        for &tokens in args.low_latency_tokens().iter().filter(|_| low_latency) {
            let (nodes, placement) = (args.nodes, Placement::Ring);
            for &blocks in args.low_multiprocessors() {
                let cut = NodesCut { nodes, low_latency, blocks, placement, channels: None, slots: None };
                row(args, &mut table, &plan(args, ranks, tokens, element), &cut, (name, "slots"))?;
            }
        }
        for &tokens in args.tokens().iter().filter(|_| !low_latency) {
            for &blocks in args.multiprocessors() {
                for (how, placement) in PLACEMENTS {
                    for channels in args.channels() {
                        let (nodes, slots) = (args.nodes, args.slots);
                        let cut = NodesCut { nodes, low_latency: false, blocks, placement, channels, slots };
                        row(args, &mut table, &plan(args, ranks, tokens, element), &cut, (name, how))?;
                    }
                }
            }
        }
    }
    table.print(args, html)
}

/// Bytes of a put that is timed by itself: a row of low latency.
const PUT: u64 = 14336;

/// What one put and its publish take.
fn puts(args: &BenchArgs, table: &mut Table) -> Result<(), Failure> {
    let network = Between { args: &args.far, far_lanes: args.far_lanes.map(Queues::from), ranks: 2 };
    let times = run_puts(PUT, |builder| network.over(builder, None)).map_err(Failure::failed)?;
    let PutTimes { one_way, slow, posted } = times;
    table.line(format_args!(
        "a put of {PUT} bytes and its publish arrive within {one_way:.1} us, nine of ten within {slow:.1}; posted in {posted:.1}\n"
    ));
    table.row(json!({
        "mode": "put", "bytes": PUT, "far": args.far.far.map(name_of), "far_rate_gb_s": args.far.far_rate,
        "one_way_us": one_way, "one_way_p90_us": slow, "posted_us": posted,
    }));
    Ok(())
}

fn plan(args: &BenchArgs, ranks: u32, tokens: u32, element: Element) -> Plan {
    let BenchArgs { hidden, topk, experts, repetitions, .. } = *args;
    Plan { ranks, tokens, hidden, topk, experts, element, choice: Choice::Any, repetitions }
}

fn row(
    args: &BenchArgs,
    table: &mut Table,
    plan: &Plan,
    cut: &NodesCut,
    (name, how): (&str, &str),
) -> Result<(), Failure> {
    let network = Between { args: &args.far, far_lanes: args.far_lanes.map(Queues::from), ranks: plan.ranks };
    cut.admit(plan).map_err(Failure::bad_input)?;
    let times = run_nodes(plan, cut, |builder| network.over(builder, None)).map_err(Failure::failed)?;
    let NodesTimes { window, dispatch, combine, far_bytes, wrong } = times;
    if wrong > 0 {
        return Err(Failure::failed(format_args!("{wrong} values came back wrong, {name}, {plan:?}, {cut:?}")));
    }
    let channels = cut.settings(plan).map_err(Failure::bad_input)?.rings().channels;
    let [there, back] = [(dispatch, far_bytes[0]), (combine, far_bytes[1])].map(|(us, bytes)| bytes as f64 / us / 1e3);
    let share = |rate: f64| args.far.far_rate.map_or_else(|| "-".to_owned(), |all| format!("{:.2}", rate / all));
    table.line(format_args!(
        "{name:<5} {:>7} {:>4}  {how:<7} {:>8} {:>6} {dispatch:>9.1} {there:>6.1} {:>6} {combine:>9.1} {back:>6.1} {:>6}",
        plan.tokens,
        if cut.blocks == 0 { "all".to_owned() } else { cut.blocks.to_string() },
        if cut.low_latency { "-".to_owned() } else { channels.to_string() },
        window >> 20,
        share(there),
        share(back),
    ));
    table.row(json!({
        "mode": if cut.low_latency { "low-latency" } else { "throughput" }, "dtype": name, "ranks": plan.ranks, "nodes": cut.nodes, "tokens": plan.tokens, "placement": how,
        "hidden": plan.hidden, "topk": plan.topk, "experts": plan.experts, "multiprocessors": cut.blocks,
        "far": args.far.far.map(name_of), "channels": channels, "window_bytes": window, "far_rate_gb_s": args.far.far_rate,
        "dispatch_us": dispatch, "dispatch_far_gb_s": there, "combine_us": combine, "combine_far_gb_s": back,
    }));
    Ok(())
}
