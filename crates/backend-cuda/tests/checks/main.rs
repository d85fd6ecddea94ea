//! Kernels built for tests, on GPUs: cases of the suite pass with delays and poisoned memory, and fail with each planted fault; the events
//! of rings keep the rules and are those that the plan says.
//!
//! As for the suite: `CUDA_DEVICE_MAX_CONNECTIONS=32`, and `--test-threads=1`.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/early.rs"]
mod early;
#[path = "../common/few_blocks.rs"]
mod few_blocks;
#[path = "../common/growing.rs"]
mod growing;
mod planted;
#[path = "../common/slow_reader.rs"]
mod slow_reader;
#[path = "../common/specialised.rs"]
mod specialised;
#[path = "../common/stalled.rs"]
mod stalled;
mod traces;

use std::process::ExitCode;
use std::sync::Arc;

use common::Cuda;
use ep_conformance::harness;
use ep_core::Nanos;
use ep_cuda::checks::{Checks, Plant};
use libtest_mimic::{Arguments, Trial};

/// Time allowed to operations here: what is planted may let them wait for ever.
const DEADLINE: Nanos = Nanos::from_secs(2);

/// Planted faults of what a rank does beside its kernels, where it has a GPU of its own; the cases have three ranks.
const ASIDE: [Plant; 2] = [Plant::LotEarly, Plant::FoldToldEarly];

/// Why those are not planted where ranks share GPUs.
const FEW: &str = "a GPU for each of three ranks; where they share one, nothing is done beside their kernels";

/// Cases that delays and poison are tried on: every path that rows take.
const DISTURBED: [&str; 11] = [
    "engine_many_operations_with_changing_rings",
    "engine_cached_handles_replay",
    "engine_fp8_rows_of_every_scaling",
    "memory_rings_of_one_slot",
    "memory_some_have_a_block_for_their_rows_and_some_do_not",
    "memory_one_full_arena_among_others",
    "memory_output_is_the_callers_again_when_combine_returns",
    "low_latency_both_forms",
    "low_latency_topk_from_1_to_32",
    "low_latency_two_operations_in_flight",
    "low_latency_beside_throughput_mode",
];

/// Delays of up to 20 us at a quarter of all verbs, and poisoned memory.
fn disturbed() -> Checks {
    Checks { seed: 1, longest: Nanos(20_000), poison: true, ..Checks::default() }
}

/// Runs a case of the suite on kernels that do what `checks` say.
fn run_case(name: &str, checks: Checks) -> Result<(), String> {
    let backend = Cuda { checks: Some(checks), deadline: Some(DEADLINE), ..Cuda::new() };
    harness::run_case(name, backend)
}

fn main() -> ExitCode {
    let absent = common::absent();
    let gpus = ep_cuda::driver::devices().unwrap_or(0);
    let trial_unless =
        |absent: Option<&'static str>, name, run: Box<dyn FnOnce() -> Result<(), String> + Send>| match absent {
            Some(reason) => Trial::test(name, move || Err(reason.into()))
                .with_kind(format!("skipped: {reason}"))
                .with_ignored_flag(true),
            None => Trial::test(name, move || run().map_err(Into::into)),
        };
    let trial = |name: String, run| trial_unless(absent, name, run);
    let mut trials: Vec<Trial> = DISTURBED
        .iter()
        .map(|&name| trial(format!("disturbed::{name}"), Box::new(move || run_case(name, disturbed()))))
        .collect();
    for fault in planted::FAULTS {
        let fault = Arc::new(fault);
        let lacking = absent.or_else(|| (gpus < 3 && ASIDE.contains(&fault.plant)).then_some(FEW));
        trials.push(trial_unless(lacking, fault.name(), Box::new(move || fault.is_caught())));
    }
    trials.push(trial("rings_keep_the_rules_and_carry_what_the_plan_says".into(), Box::new(traces::rings)));
    trials.extend(early::trials(absent));
    trials.extend(few_blocks::one(few_blocks::ranks(absent, 1)));
    trials.push(few_blocks::waves(absent, gpus, |cuda| cuda));
    trials.extend(growing::trials(absent));
    trials.extend(specialised::trials(absent));
    trials.push(slow_reader::trial(absent));
    trials.extend(stalled::trials(absent));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
