//! Kernels on the GPUs of this host, by device events: cached dispatch, combine, and both kinds of operation of low latency.
//!
//! A sample of n iterations runs a communicator of its own, in which every operation is repeated n times after all ranks have met on
//! their devices; the sample is n times the median of the slowest rank. Without a GPU it says what is missing and measures nothing.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ep_core::{Element, Error, Scaling};
use ep_cuda::bench::{Blocks, Choice, LowPlan, LowTimes, Plan, Times, run, run_low};

const HIDDEN: u32 = 7168;
const TOKENS: u32 = 4096;
const MULTIPROCESSORS: [u32; 2] = [8, 24];
const ELEMENTS: [(&str, Element); 2] = [("bf16", Element::Bf16), ("fp8", Element::Fp8(Scaling::Exact))];

/// Its name, and its time in microseconds among those measured.
type Operation<T> = (&'static str, fn(&T) -> f64);

/// The GPUs that are visible, or why nothing can be measured.
fn gpus() -> Result<u32, String> {
    match ep_cuda::driver::devices() {
        Ok(0) => Err("no GPU is visible".to_owned()),
        Ok(gpus) => Ok(gpus as u32),
        Err(error) => Err(error.to_string()),
    }
}

fn sample(iterations: u64, microseconds: Result<f64, Error>) -> Duration {
    let each = microseconds.unwrap_or_else(|error| panic!("{error}"));
    Duration::from_secs_f64(each * 1e-6 * iterations as f64)
}

fn repetitions(iterations: u64) -> u32 {
    u32::try_from(iterations).unwrap_or(u32::MAX)
}

fn throughput(c: &mut Criterion) {
    let ranks = match gpus() {
        Ok(ranks) => ranks,
        Err(reason) => return eprintln!("cuda: skipped: {reason}"),
    };
    let operations: [Operation<Times>; 3] = [
        ("dispatch", |times| times.cached),
        ("combine", |times| times.combine),
        ("combine_anywhere", |times| times.anywhere),
    ];
    for (operation, of) in operations {
        let mut group = c.benchmark_group(format!("cuda/{operation}"));
        group.sample_size(10);
        for (name, element) in ELEMENTS {
            for blocks in MULTIPROCESSORS {
                let shape = Blocks { blocks, movers: 24, stages: 0 };
                group.throughput(Throughput::Elements(TOKENS.into()));
                group.bench_function(BenchmarkId::new(name, format!("{blocks} multiprocessors")), |bencher| {
                    bencher.iter_custom(|iterations| {
                        let repetitions = repetitions(iterations);
                        let plan = Plan {
                            ranks,
                            tokens: TOKENS,
                            hidden: HIDDEN,
                            topk: 8,
                            experts: 256,
                            element,
                            choice: Choice::Any,
                            repetitions,
                        };
                        sample(iterations, run(&plan, &[shape]).map(|times| of(black_box(&times[0]))))
                    });
                });
            }
        }
        group.finish();
    }
}

fn low_latency(c: &mut Criterion) {
    let Ok(ranks) = gpus() else { return };
    let operations: [Operation<LowTimes>; 3] = [
        ("dispatch", |times| times.dispatch.one),
        ("combine_per_choice", |times| times.per_choice.one),
        ("combine_per_rank", |times| times.per_rank.one),
    ];
    for (operation, of) in operations {
        let mut group = c.benchmark_group(format!("cuda/low_latency/{operation}"));
        group.sample_size(10);
        for (name, element) in ELEMENTS {
            for tokens in [1, 128] {
                group.throughput(Throughput::Elements(tokens.into()));
                group.bench_function(BenchmarkId::new(name, format!("{tokens} tokens")), |bencher| {
                    bencher.iter_custom(|iterations| {
                        let plan = LowPlan {
                            ranks,
                            max_tokens: 128,
                            hidden: HIDDEN,
                            topk: 8,
                            experts: 256,
                            element,
                            blocks: 0,
                            repetitions: repetitions(iterations),
                            unit_bytes: None,
                        };
                        sample(iterations, run_low(&plan, &[tokens]).map(|times| of(black_box(&times[0]))))
                    });
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, throughput, low_latency);
criterion_main!(benches);
