//! Times of the kernels, and whether what they bring is right (exit code 1 where it is not): `ep-cuda-bench [ranks] [tokens] [SMs,SMs,...] [any|peers] [hidden]`, of low latency: `ep-cuda-bench low [ranks]
//! [SMs,SMs,...] [tokens,tokens,...]`, of calls against their graphs: `ep-cuda-bench graphs [ranks] [tokens]`, and of the host alone: `ep-cuda-bench host [ranks]
//! [tokens]`, and of calls by way of outboxes: `ep-cuda-bench pulled [ranks] [tokens] [SMs,SMs,...] [slots,slots,...] [steps,...] [piece/slots,...]`,
//! the last what calls say, - where they do not. With `peers` no row stays at home.

use std::process::ExitCode;

use ep_core::{Element, Error, OutboxUse, Scaling};
use ep_cuda::bench::{
    Blocks, Choice, LowPlan, Outboxes, Plan, graphs_table, host_table, low_table, pulled_table, run, run_graphs,
    run_host, run_low, run_pulled, table,
};

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1).peekable();
    if words.next_if(|word| word == "low").is_some() {
        return low(words);
    }
    if words.next_if(|word| word == "pulled").is_some() {
        return pulled(words);
    }
    let graphs = words.next_if(|word| word == "graphs").is_some();
    let host = words.next_if(|word| word == "host").is_some();
    let mut number = |default: u32| words.next().and_then(|word| word.parse().ok()).unwrap_or(default);
    if host {
        return of_calls(number(1), number(8), |plan| Ok(host_table(plan, &run_host(plan)?)));
    }
    let ranks = number(4);
    let tokens = number(4096);
    if graphs {
        return of_calls(ranks, tokens, |plan| Ok(graphs_table(plan, &run_graphs(plan)?)));
    }
    let list = words.next().unwrap_or_else(|| "8,12,16,24,48".into());
    let sms: Vec<u32> = list.split(',').filter_map(|word| word.parse().ok()).collect();
    let choice = if words.next().is_some_and(|word| word == "peers") { Choice::Peers } else { Choice::Any };
    let hidden = words.next().and_then(|word| word.parse().ok()).unwrap_or(7168);
    for element in [Element::Bf16, Element::Fp8(Scaling::Exact), Element::Fp8(Scaling::Ue8m0)] {
        let plan = Plan { ranks, tokens, hidden, topk: 8, experts: 256, element, choice, repetitions: 50 };
        let kinds: &[(u32, u32)] = if element == Element::Bf16 { &[(5, 3), (7, 2)] } else { &[(9, 3), (12, 2)] };
        let shapes: Vec<Blocks> = sms
            .iter()
            .flat_map(|&blocks| kinds.iter().map(move |&(movers, stages)| Blocks { blocks, movers, stages }))
            .collect();
        match run(&plan, &shapes) {
            Ok(times) => print!("{}", table(&plan, &shapes, &times)),
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// A table of whole calls.
fn of_calls(ranks: u32, tokens: u32, table: impl Fn(&Plan) -> Result<String, Error>) -> ExitCode {
    // Not so many that a rank's queue of launches fills up.
    let (hidden, topk, experts, repetitions) = (7168, 8, 256, 50);
    let plan = Plan { ranks, tokens, hidden, topk, experts, element: Element::Bf16, choice: Choice::Any, repetitions };
    match table(&plan) {
        Ok(table) => print!("{table}"),
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Outboxes of each size, served by each number of multiprocessors, and used as each call says.
fn pulled(mut words: impl Iterator<Item = String>) -> ExitCode {
    let mut list = |default: &str| words.next().unwrap_or_else(|| default.into());
    let mut numbers =
        |default: &str| -> Vec<u32> { list(default).split(',').filter_map(|word| word.parse().ok()).collect() };
    let (ranks, tokens) = (numbers("4")[0], numbers("4096")[0]);
    let (sms, slots, steps) = (numbers("8,12,16,24,48"), numbers("16,64"), numbers("8"));
    let said = |word: &str| {
        let (piece, slots) = word.split_once('/').unwrap_or((word, "-"));
        OutboxUse { piece: piece.parse().ok(), slots: slots.parse().ok() }
    };
    let uses: Vec<_> = list("-").split(',').map(said).collect();
    let cuts: Vec<_> = sms
        .iter()
        .flat_map(|&blocks| slots.iter().map(move |&slots| (blocks, slots)))
        .flat_map(|(blocks, slots)| steps.iter().map(move |&step| (blocks, slots, step)))
        .flat_map(|(blocks, slots, step)| uses.iter().map(move |&used| Outboxes { blocks, slots, step, used }))
        .collect();
    for element in [Element::Bf16, Element::Fp8(Scaling::Exact)] {
        let (hidden, topk, experts, repetitions, choice) = (7168, 8, 256, 30, Choice::Any);
        let plan = Plan { ranks, tokens, hidden, topk, experts, element, choice, repetitions };
        match run_pulled(&plan, &cuts) {
            Ok(times) => print!("{}", pulled_table(&plan, &cuts, &times)),
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// Low latency; 0 blocks are as many as a GPU has multiprocessors, or a rank's share of them. More do not run all at a time. In the end, how many
/// bytes of results come as units, if other than what is chosen by itself: 0 for none.
fn low(mut words: impl Iterator<Item = String>) -> ExitCode {
    let ranks = words.next().and_then(|word| word.parse().ok()).unwrap_or(4);
    let mut numbers = |default: &str| -> Vec<u32> {
        let list = words.next().unwrap_or_else(|| default.into());
        list.split(',').filter_map(|word| word.parse().ok()).collect()
    };
    let (counts, tokens) = (numbers("0"), numbers("1,128"));
    let unit_bytes = words.next().and_then(|word| word.parse().ok());
    let max_tokens = tokens.iter().copied().max().unwrap_or(1).max(128);
    let mut right = true;
    for blocks in counts {
        for element in [Element::Bf16, Element::Fp8(Scaling::Exact), Element::Fp8(Scaling::Ue8m0)] {
            let (hidden, topk, experts, repetitions) = (7168, 8, 256, 50);
            let plan = LowPlan { ranks, max_tokens, hidden, topk, experts, element, blocks, repetitions, unit_bytes };
            match run_low(&plan, &tokens) {
                Ok(times) => {
                    print!("{}", low_table(&plan, &times));
                    right &= times.iter().all(|times| times.wrong == 0);
                }
                Err(error) => {
                    eprintln!("{error}");
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
