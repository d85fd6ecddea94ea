//! Calls captured into CUDA graphs and replayed, held against the oracle after every replay.
//!
//! Ranks are threads of this process, as in the suite: set `CUDA_DEVICE_MAX_CONNECTIONS=32` where they share a GPU, and
//! `--test-threads=1`. Where no GPU is visible they run on GPUs made of software ([`ep_cuda_twin`]), with fewer replays. That needs g++.

mod ahead;
mod early_use;
mod failures;
mod fixture;
mod given_up;
mod low_latency;
mod memory;
mod misuse;
mod one_thread;
mod throughput;

use std::env;
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use ep_conformance::harness::thorough;
use ep_core::Placement;
use ep_cuda_twin::Twin;
use libtest_mimic::{Arguments, Trial};

/// What a case returns: what was wrong.
type Verdict = Result<(), String>;

/// Its name, after the rule that it proves, and what it does.
type Case = (&'static str, fn() -> Verdict);

const CASES: &[Case] = &[
    ("graphs_cached_dispatch_and_combine_replay", throughput::cached),
    ("graphs_rows_by_expert_replay", throughput::by_expert),
    ("graphs_worst_case_rows_by_expert_follow_the_routing", throughput::by_expert_worst_case),
    ("graphs_combine_of_rows_from_anywhere_replays", throughput::from_anywhere),
    ("graphs_worst_case_dispatch_follows_the_routing", throughput::worst_case),
    ("graphs_replays_and_calls_mix", throughput::mixed),
    ("graphs_over_nodes_cached_dispatch_and_combine_replay", throughput::cached_over_nodes),
    ("graphs_over_nodes_worst_case_dispatch_follows_the_routing", throughput::worst_case_over_nodes),
    ("graphs_over_nodes_replays_and_calls_mix", throughput::mixed_over_nodes),
    ("graphs_low_latency_replays", low_latency::replays),
    ("graphs_low_latency_in_halves_replays", low_latency::halves),
    ("graphs_low_latency_replays_and_calls_mix", low_latency::mixed),
    ("graphs_low_latency_early_consumers_replay", low_latency::early),
    ("graphs_low_latency_over_nodes_replays", low_latency::replays_over_nodes),
    ("graphs_low_latency_over_nodes_in_halves_replays", low_latency::halves_over_nodes),
    ("graphs_low_latency_over_nodes_replays_and_calls_mix", low_latency::mixed_over_nodes),
    ("graphs_low_latency_replay_between_halves_is_refused", low_latency::between_halves),
    ("graphs_statistics_count_replays", throughput::statistics),
    ("graphs_what_waits_is_refused_in_a_capture", memory::refused),
    ("graphs_keep_what_they_use", memory::kept),
    ("graphs_outlive_their_endpoints", memory::outlived),
    ("graphs_give_back_what_they_used", memory::given_back),
    ("graphs_give_back_what_they_used_while_another_is_captured", memory::let_go_in_another_capture),
    ("graphs_a_global_capture_hinders_nobody", memory::global),
    ("graphs_handles_before_their_graph_has_run_are_of_no_rows", early_use::direct),
    ("graphs_handles_before_their_graph_has_run_are_of_no_rows_of_rings", early_use::rings),
    ("graphs_low_latency_handles_before_their_graph_has_run_are_of_no_rows", early_use::low_latency),
    ("graphs_keep_the_arenas_rows_of_low_latency", early_use::leased),
    ("low_latency_choices_that_were_written_over_reach_nothing_else", early_use::written_over),
    ("a_membership_holds_up_no_other_rank_of_its_thread", one_thread::membership),
    ("graphs_windows_of_ranks_that_nobody_could_wait_for_go_to_nobody", memory::windows_of_a_capture),
    ("graphs_receive_what_their_capture_dropped", misuse::dropped_in_a_capture),
    ("graphs_memory_of_a_call_that_failed_is_nobodys", misuse::failed_in_a_capture),
    ("low_latency_sums_go_only_where_they_fit", misuse::sums_into_too_little),
    ("batches_over_nodes_that_forwarders_have_no_room_for_are_refused", misuse::too_many_tokens),
    ("batches_over_nodes_that_others_have_no_room_for_are_named", misuse::too_many_tokens_of_others),
    ("what_another_endpoint_made_is_refused", misuse::of_another_endpoint),
    ("dispatches_go_ahead_of_their_counts", ahead::go_ahead),
    ("dispatches_that_bring_more_than_was_expected_are_enqueued_again", ahead::more_than_expected),
    ("dispatches_stay_where_another_rank_has_no_room", ahead::no_room_elsewhere),
    ("dispatches_with_bad_choices_are_refused_behind_kernels_ahead", ahead::refused),
    ("dispatches_ahead_hold_back_nothing_for_a_rank_that_is_lost_before_its_counts", ahead::lost_before_its_counts),
    ("graphs_a_bound_that_is_too_small_is_told", failures::small_bound),
    ("graphs_bad_choices_in_a_replay_are_told", failures::bad_choices),
    ("a_dispatch_that_waits_behind_another_s_failure_is_poisoned", failures::not_its_own),
    ("a_dispatch_with_counts_behind_another_s_bad_choices_is_poisoned", failures::not_its_own_choices),
    ("a_rank_that_was_given_up_stores_nowhere_that_is_used_again", given_up::stores),
    ("a_rank_that_was_given_up_stores_into_no_outbox", given_up::outboxes),
    ("graphs_a_missing_rank_ends_by_deadline_through_rings", || failures::missing(Placement::Ring)),
    ("graphs_a_missing_rank_ends_by_deadline_where_rows_are_placed", || failures::missing(Placement::Direct)),
    ("graphs_a_missing_rank_ends_low_latency_by_deadline", failures::missing_low),
];

/// Cases that on GPUs made of software only a thorough run runs: of each, another goes the same ways.
const LEFT: [&str; 11] = [
    "a_rank_that_was_given_up_stores_nowhere_that_is_used_again",
    "graphs_combine_of_rows_from_anywhere_replays",
    "graphs_over_nodes_cached_dispatch_and_combine_replay",
    "graphs_over_nodes_worst_case_dispatch_follows_the_routing",
    "graphs_low_latency_replays",
    "graphs_low_latency_in_halves_replays",
    "graphs_low_latency_over_nodes_replays",
    "graphs_low_latency_over_nodes_replays_and_calls_mix",
    "graphs_outlive_their_endpoints",
    "graphs_a_missing_rank_ends_by_deadline_through_rings",
    "graphs_a_missing_rank_ends_low_latency_by_deadline",
];

/// How long a case may take: on GPUs, and on those made of software, where others may keep the processor busy.
const LIMITS: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(400)];

fn main() -> ExitCode {
    // Lives as long as kernels are compiled.
    let twin = ep_cuda::driver::devices().is_err().then(Twin::start);
    fixture::on_twin(twin.is_some());
    let absent = match (&twin, ep_cuda::driver::devices()) {
        (Some(Err(problem)), _) => Some(problem.to_string()),
        (_, Ok(0)) => Some("a GPU; none is visible".to_owned()),
        (_, Ok(_)) => ep_cuda::build::version().err().map(|error| error.to_string()),
        (_, Err(error)) => Some(error.to_string()),
    };
    assert!(twin.is_none() || absent.is_none() || env::var_os("CI").is_none(), "the twin of a GPU: {absent:?}");
    let limit = LIMITS[usize::from(twin.is_some())];
    let left =
        |name| (!thorough() && twin.is_some() && LEFT.contains(&name)).then(|| "EP_THOROUGH=1 runs it".to_owned());
    let trial = |&(name, body): &Case| match absent.clone().or_else(|| left(name)) {
        Some(reason) => {
            let kind = format!("skipped: {reason}");
            Trial::test(name, move || Err(reason.into())).with_kind(kind).with_ignored_flag(true)
        }
        None => Trial::test(name, move || {
            let (done, result) = mpsc::channel();
            thread::spawn(move || done.send(body()));
            match result.recv_timeout(limit) {
                Ok(verdict) => Ok(verdict?),
                Err(problem) => Err(format!("no result within {limit:?}: {problem}").into()),
            }
        }),
    };
    libtest_mimic::run(&Arguments::from_args(), CASES.iter().map(trial).collect()).exit_code()
}
