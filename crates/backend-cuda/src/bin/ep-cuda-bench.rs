//! Times of the kernels: `ep-cuda-bench [ranks] [tokens] [SMs,SMs,...]`.

use std::process::ExitCode;

use ep_core::{Element, Scaling};
use ep_cuda::bench::{Blocks, Plan, run, table};

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let mut number = |default: u32| words.next().and_then(|word| word.parse().ok()).unwrap_or(default);
    let ranks = number(4);
    let tokens = number(4096);
    let list = words.next().unwrap_or_else(|| "8,12,16,24,48".into());
    let sms: Vec<u32> = list.split(',').filter_map(|word| word.parse().ok()).collect();
    for element in [Element::Bf16, Element::Fp8(Scaling::Exact)] {
        let plan = Plan { ranks, tokens, hidden: 7168, topk: 8, experts: 256, element, repetitions: 50 };
        let kinds: &[(u32, u32)] = if element == Element::Bf16 { &[(5, 3), (7, 2)] } else { &[(9, 3), (15, 2)] };
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
