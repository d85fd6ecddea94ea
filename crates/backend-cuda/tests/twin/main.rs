//! The shared suite on GPUs made of software ([`ep_cuda_twin`]): the endpoint as it is, its calls of the driver, and the kernels' own
//! text, on threads of a CPU. Needs g++.
//!
//! `EP_SEEDS` says how many seeds of a case are run, one where it is not set. `EP_TWIN_ALL=1` runs the cases whose limits do not hold where others
//! keep the processor busy, too, all planted faults, and what is run in part otherwise: the whole suite with ranks that are processes, and cases of
//! several nodes over adapters that GPUs play, or with rows staged through memory of the host. A run with neither that nor `EP_THOROUGH=1` takes a share.

#[path = "../common/apart.rs"]
mod apart;
#[path = "../common/broken.rs"]
mod broken;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/early.rs"]
mod early;
#[path = "../common/few_blocks.rs"]
mod few_blocks;
#[path = "../common/growing.rs"]
mod growing;
mod in_turns;
mod leaving;
mod movers;
#[path = "../checks/planted.rs"]
mod planted;
#[path = "../common/played.rs"]
mod played;
#[path = "../common/posted.rs"]
mod posted;
#[path = "../common/recovering.rs"]
mod recovering;
#[path = "../common/slow_reader.rs"]
mod slow_reader;
#[path = "../common/specialised.rs"]
mod specialised;
#[path = "../common/stalled.rs"]
mod stalled;
mod started;
#[path = "../common/striped.rs"]
mod striped;
#[path = "../common/tags.rs"]
mod tags;
mod timed;
#[path = "../common/waiting.rs"]
mod waiting;

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use apart::{Apart, Between};
use common::Cuda;
use ep_conformance::harness::{self, Suite, share};
use ep_conformance::script::{Script, Seen};
use ep_conformance::{Backend, Requirement, Setup, Travels};
use ep_core::{Error, Layout, Nanos};
use ep_cuda::CudaEndpoint;
use ep_cuda::checks::{Checks, Plant};
use ep_cuda::hca::Pace;
use ep_cuda_twin::{BUILT, Twin};
use libtest_mimic::Trial;
use posted::{Cards, Posted};

/// Time allowed to operations of kernels with planted faults: what is planted may let them wait for ever.
const DEADLINE: Nanos = Nanos::from_secs(6);

/// Planted faults that the twin must find, beside those of rows that are placed within nodes: of rings, of counts, of positions, of units, of
/// rows by expert, of who ends a launch, of what goes ahead.
const FOUND: [Plant; 23] = [
    Plant::AheadWithoutRoom,
    Plant::LowToldEarly,
    Plant::LowUnitsTorn,
    Plant::LowResultsTorn,
    Plant::TailBeforeData,
    Plant::CreditEarly,
    Plant::WrongSlot,
    Plant::WrongBank,
    Plant::PositionOffByOne,
    Plant::RoundedTooEarly,
    Plant::SlotOffByOne,
    Plant::ShareEarly,
    Plant::PaddingLeft,
    Plant::LotEarly,
    Plant::FoldToldEarly,
    Plant::RoomLeft,
    Plant::SpareSlotsLeft,
    Plant::ChoiceUntold,
    Plant::ForeignChoice,
    Plant::FoldDescending,
    Plant::FoldRoundedTooEarly,
    Plant::WholeHeads,
    Plant::AllSlotsFilled,
];

/// Cases that ranks run, too, which are processes: they reach each other's memory, meet, and leave. The last ones are left to a thorough run.
const APART: [&str; 6] = [
    "engine_bias_and_weights",
    "bounds_ranks_that_do_different_things_find_out",
    "bounds_what_a_rank_said_before_it_ended_explains_its_end",
    "nodes_two_of_two",
    "nodes_a_rank_that_leaves_after_its_last_operation_fails_nobody",
    "nodes_cached_pulled_and_recut",
];

/// Cases that run over adapters, too, which GPUs play: rules of far lanes, rows and results, what breaks, who leaves.
const PLAYED: [&str; 8] = [
    "far_f3_who_sees_the_value_sees_the_puts_before_it",
    "far_f9_a_read_before_credit_is_safe_from_what_follows",
    "nodes_two_of_two",
    "nodes_in_odd_numbers",
    "nodes_cached_pulled_and_recut",
    "nodes_a_rank_that_leaves_after_its_last_operation_fails_nobody",
    "an_error_completion_names_the_peer",
    "rows_stripe_over_as_many_lanes_as_there_are_channels",
];

/// A block of the twin is a thread of the processor, and its warps take turns on that.
const PLAYED_BY: Pace = Pace { gigabits: 400, latency: Duration::from_micros(3), multiprocessors: 1, warps: 3 };

/// Cases that run with rows staged through pinned memory, too.
const STAGED: [&str; 8] = [
    "far_f3_who_sees_the_value_sees_the_puts_before_it",
    "far_f5_a_flushed_source_may_be_overwritten",
    "far_f9_a_read_before_credit_is_safe_from_what_follows",
    "nodes_two_of_two",
    "nodes_in_odd_numbers",
    "nodes_cached_pulled_and_recut",
    "nodes_a_rank_that_leaves_after_its_last_operation_fails_nobody",
    "nodes_a_lost_rank_takes_its_node_along",
];

/// Planted faults that every run plants: of rings, between nodes, of units, of who ends a launch, of what goes ahead. The others are left to a thorough run.
const ALWAYS: [Plant; 5] =
    [Plant::TailBeforeData, Plant::ForwardedEarly, Plant::LowUnitsTorn, Plant::LowToldEarly, Plant::AheadWithoutRoom];

/// Cases on a GPU that runs a block at a time which every run runs: launches of both halves, halves apart, results in both forms, several nodes; and that
/// a fault is found.
const IN_TURNS: [&str; 5] = [
    "low_latency_a_token_that_names_an_expert_twice",
    "low_latency_both_forms",
    "low_latency_over_nodes_is_a_full_mesh",
    "low_latency_results_of_small_and_of_large_batches",
    "shares_of_blocks_that_have_not_begun_are_taken",
];

/// Cases over adapters, or with staged rows, left to a thorough run: they run over other lanes, too.
const AGAIN: [&str; 4] = [
    "nodes_cached_pulled_and_recut",
    "far_f9_a_read_before_credit_is_safe_from_what_follows",
    "nodes_in_odd_numbers",
    "nodes_a_rank_that_leaves_after_its_last_operation_fails_nobody",
];

/// Cases that take longest, left to a thorough run.
const LONG: [&str; 30] = [
    "adapters::a_request_that_the_own_adapter_refuses_names_the_lane",
    "adapters::cards_that_died_are_noticed_and_survivors_go_on",
    "adapters::lanes_that_were_cut_are_noticed_and_all_go_on",
    "disturbed::low_latency_topk_from_1_to_32",
    "early::planted_rows_counted_before_they_are_stored_are_caught",
    "early::results_that_are_never_ready_end_by_the_deadline",
    "early::rows_that_do_not_come_are_said_not_to",
    "played::an_error_completion_names_the_peer",
    "played::rows_stripe_over_as_many_lanes_as_there_are_channels",
    "stalled::a_rank_whose_posts_nobody_takes_is_named_in_low_latency",
    "stalled::a_rank_whose_posts_nobody_takes_is_named_in_throughput_mode",
    "timed::calls_over_nodes_are_timed_and_what_comes_back_is_compared",
    "twin::by_expert_after_a_rank_has_gone",
    "twin::campaign_random_dispatches_by_expert_match_the_oracle",
    "twin::engine_fp8_rows_of_every_scaling",
    "twin::engine_fp8_scales_may_lie_apart",
    "twin::engine_received_fp8_rows_may_be_sent_on",
    "twin::low_packed_over_nodes",
    "twin::nodes_a_batch_of_a_hundred_times_the_rings",
    "twin::nodes_an_arena_too_small_falls_back_to_rings",
    "twin::nodes_counts_that_stay_in_the_machine_change_nothing",
    "twin::nodes_every_chunk_and_credit_of_far_rings",
    "twin::nodes_in_odd_numbers",
    "twin::nodes_with_rings_of_one_slot_everywhere",
    "twin::overflow_of_arenas_of_every_size",
    "twin::overflow_of_one_full_arena_takes_all_ranks_along",
    "twin::overflow_through_outboxes_of_one_to_three_slots",
    "twin::pulled_from_outboxes_of_one_to_three_slots",
    "twin::pulled_hundred_times_the_outbox",
    "twin::pulled_rows_of_every_size",
];

/// Whether a run that is not thorough runs the case. Over adapters made of software it runs what it runs over adapters that GPUs play, and most of what breaks.
fn takes(name: &str) -> bool {
    if let Some(fault) = name.strip_prefix("planted::") {
        return ALWAYS.iter().any(|plant| fault.starts_with(&format!("{plant:?}_is_caught_by")));
    }
    if AGAIN.iter().any(|case| name.strip_suffix(case).is_some_and(|lanes| lanes != "twin::")) {
        return false;
    }
    if let Some(case) = name.strip_prefix("specialised::") {
        return case == specialised::SHORT;
    }
    if let Some(case) = name.strip_prefix("one_at_a_time::") {
        return IN_TURNS.contains(&case);
    }
    if LONG.contains(&name) || ["three_at_a_time::", "waves::"].iter().any(|long| name.starts_with(long)) {
        return false;
    }
    let suite = |case: &str| ["far_", "nodes_", "by_expert_"].iter().any(|family| case.starts_with(family));
    name.strip_prefix("adapters::").is_none_or(|case| !suite(case) || PLAYED.contains(&case))
}

/// Whether all is run.
fn all() -> bool {
    env::var_os("EP_TWIN_ALL").is_some()
}

/// Ranks that are threads, on the twin.
struct OnTwin(Cuda);

impl Backend for OnTwin {
    type Endpoint = CudaEndpoint;

    fn absent(&self) -> Option<&'static str> {
        self.0.absent
    }

    fn lacks(&self, what: Requirement) -> Option<&'static str> {
        match what {
            Requirement::Incidents if !all() => {
                Some("lost and late messages are told from a busy processor by time alone: EP_TWIN_ALL=1 runs them")
            }
            Requirement::LowLatency if !all() && self.0.deadline.is_none() => {
                Some("its cases allow an operation a second, too little on a busy processor: EP_TWIN_ALL=1 runs them")
            }
            _ => common::lacks(what),
        }
    }

    fn window(&self, layout: Layout) -> Result<Layout, Error> {
        self.0.window(layout)
    }

    fn campaign(&self) -> u32 {
        share(3, 1)
    }

    fn seeds(&self, most: u64) -> u64 {
        if env::var_os("EP_SEEDS").is_some() { common::seeds(most) } else { 1 }
    }

    fn persists(&self) -> bool {
        false
    }

    fn run<T, F>(&self, setup: &Setup, user: F) -> Result<Vec<Option<T>>, String>
    where
        T: Travels,
        F: AsyncFn(CudaEndpoint) -> T + Send + Sync,
    {
        self.0.run(setup, user)
    }

    fn probe(&self, setup: &Setup, scripts: &[Script]) -> Result<Vec<Option<Vec<Seen>>>, String> {
        self.0.probe(setup, scripts)
    }
}

/// Delays of up to 20 us at a quarter of all verbs, and poisoned memory.
fn disturbed() -> Checks {
    Checks { seed: 1, longest: Nanos(20_000), poison: true, ..Checks::default() }
}

/// Runs a case of the suite on kernels that do what `checks` say.
fn run_case(name: &str, checks: Checks) -> Result<(), String> {
    let backend = OnTwin(Cuda { checks: Some(checks), deadline: Some(DEADLINE), ..Cuda::new() });
    harness::run_case(name, backend)
}

fn main() -> ExitCode {
    // Lives as long as kernels are compiled.
    let twin = Twin::start();
    if let Ok(twin) = &twin {
        // SAFETY: no other thread runs yet.
        unsafe { env::set_var(BUILT, twin.folder()) };
    }
    let absent = twin.as_ref().err().map(|problem| &*problem.to_string().leak());
    assert!(absent.is_none() || env::var_os("CI").is_none(), "the twin of a GPU does not start: {absent:?}");
    let suite = Suite::default().on("twin", OnTwin(Cuda { absent, ..Cuda::new() }));
    let suite = [("adapters", Cards::Soft), ("played", Cards::Played(PLAYED_BY))].into_iter().fold(
        suite,
        |suite, (name, cards)| {
            let suite = suite.on_those(name, Requirement::Nodes, Posted { absent, cards, incidents: all() });
            suite.with(broken::trials(name, cards, absent)).with(vec![striped::trial(name, cards, absent)])
        },
    );
    let suite = suite.on_those("staged", Requirement::Nodes, OnTwin(Cuda { absent, staged: true, ..Cuda::new() }));
    let in_part = [("played::", &PLAYED[..]), ("staged::", &STAGED)];
    let suite = suite.only(|name| {
        let part = in_part.iter().find_map(|(prefix, cases)| Some((name.strip_prefix(prefix)?, cases)));
        all() || part.is_none_or(|(name, cases)| cases.contains(&name))
    });
    // The twin places rows without bulk copies: one fault is planted in those alone.
    let is_found =
        |fault: &planted::Fault| FOUND.contains(&fault.plant) || fault.name().ends_with("::nodes_two_of_two");
    let is_there = |fault: &planted::Fault| if all() { fault.plant != Plant::PlacedOffByOne } else { is_found(fault) };
    let faults = planted::FAULTS.into_iter().filter(is_there);
    let planted = faults.map(|fault| match absent {
        Some(reason) => Trial::test(fault.name(), move || Err(reason.into())).with_ignored_flag(true),
        None => Trial::test(fault.name(), move || fault.is_caught().map_err(Into::into)),
    });
    // Batches whose headers go with several shares; the suite's own cases allow too little time for a busy processor.
    let headers = "low_latency_topk_from_1_to_32";
    let disturbed = Trial::test(format!("disturbed::{headers}"), || run_case(headers, disturbed()).map_err(Into::into));
    let suite = suite.with(vec![disturbed.with_ignored_flag(absent.is_some())]);
    let patient = OnTwin(Cuda { deadline: Some(DEADLINE), ..Cuda::new() });
    let suite = suite.with(planted.collect()).with(vec![
        tags::trial(patient, absent),
        timed::trial(absent),
        started::trial(absent),
        leaving::trial(absent),
    ]);
    let suite = suite
        .with(early::trials(absent))
        .with(few_blocks::one(OnTwin(few_blocks::ranks(absent, 1))))
        .with(growing::trials(absent))
        .with(in_turns::trials(absent))
        .with(movers::trials(absent))
        .with(specialised::trials(absent))
        .with(vec![slow_reader::trial(absent)])
        .with(stalled::trials(absent))
        .with(recovering::trials(absent))
        .with(waiting::trials(absent))
        .share(|name| all() || takes(name));
    let apart = APART.split_at(share(APART.len(), 4)).0;
    let processes = Apart::over(Between::Either((PLAYED_BY, played::apart)));
    suite.run_with_processes_for(processes, |name| all() || apart.contains(&name))
}
