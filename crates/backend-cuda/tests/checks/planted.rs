//! Planted faults: for each the case that must fail with it, and by what it is caught.

use ep_cuda::checks::{Checks, Plant};

use crate::{disturbed, run_case};

/// A planted fault.
pub(crate) struct Fault {
    pub(crate) plant: Plant,
    /// The case of the suite that must fail.
    case: &'static str,
    /// What its error may say.
    signs: &'static [&'static str],
    /// Runs of which one must fail.
    runs: u64,
}

/// One that is wrong whenever it is met.
const fn fault(plant: Plant, case: &'static str, signs: &'static [&'static str]) -> Fault {
    Fault { plant, case, signs, runs: 1 }
}

/// One that is wrong for a moment, in which somebody must look: on a busy processor nobody may.
const fn moment(plant: Plant, case: &'static str, signs: &'static [&'static str]) -> Fault {
    Fault { runs: 4, ..fault(plant, case, signs) }
}

/// Signs of the oracle.
const WRONG_ROWS: &str = "recv_x";

/// Units that a rank waits for were written over by those of a later operation, and whoever sent them has left.
const OVERWRITTEN: &str = "is gone, while waiting for rows from it";

/// Signs of a row of low latency that is not the one due.
const WRONG_LOW_ROW: &[&str] = &[
    "low-latency row",
    "token of the next row",
    "rows of",
    "tokens of a source",
    "expert_counts",
    "recv_x",
    "combined_x",
];

/// Rows that are placed within nodes, of two of two ranks.
const BETWEEN: &str = "nodes_two_of_two";

/// Rows by expert, brought by every way.
const BY_EXPERT: &str = "by_expert_every_placement";

/// Those of several channels.
const CHANNELS: &str = "by_expert_rows_of_several_channels";

/// The same in low latency.
const PACKED: &str = "low_packed_full_batches_and_empty_ones";

/// The same as by every way, in room for more than come.
const UNCOUNTED: &str = "by_expert_every_placement_and_counts_that_stay";

/// Many choices of a token at a rank, whose sum shows in which order they are added.
const MANY_CHOICES: &str = "by_expert_topk_from_1_to_32";

/// Pieces and windows that differ between ranks.
const DIFFERENTLY: &str = "pulled_by_ranks_that_use_their_outboxes_differently";

pub(crate) const FAULTS: [Fault; 43] = [
    moment(Plant::TailBeforeData, "memory_rings_of_one_slot", &["of the operation is", "hash of", "of a row is"]),
    moment(
        Plant::CreditEarly,
        "memory_rings_of_one_slot",
        &["of a row is", "of the operation is", "hash of", "rows sent is"],
    ),
    fault(Plant::WrongSlot, "engine_many_operations_with_changing_rings", &["of the operation is", "of a row is"]),
    fault(Plant::WrongBank, "engine_ranks_that_are_no_power_of_two", &["number of the operation"]),
    fault(Plant::CountOffByOne, "engine_ranks_that_are_no_power_of_two", &["rows", "recv", "waited", "position"]),
    fault(Plant::AheadWithoutRoom, "memory_leases_of_batches_that_bring_ever_more_rows", &["has other rows", "failed"]),
    fault(Plant::PositionOffByOne, "engine_ranks_that_are_no_power_of_two", &["position of a row"]),
    fault(Plant::PlacedOffByOne, "memory_output_in_the_window_is_pulled", &[WRONG_ROWS]),
    // Where ranks share a GPU, of four in a row 2 of 63 went unnoticed.
    Fault {
        runs: 8,
        ..moment(
            Plant::PlacedEarly,
            "memory_output_in_the_window_is_pulled",
            &["operation of a row", "of a row is", "recv"],
        )
    },
    moment(Plant::PlacedEarly, BETWEEN, &["operation of a row"]),
    moment(Plant::ForwardedEarly, BETWEEN, &["operation of a row"]),
    fault(Plant::ForwardedOffByOne, BETWEEN, &["position of a row"]),
    moment(Plant::ClosedEarly, BETWEEN, &["combined_x", "of a row is"]),
    moment(
        Plant::NotWaitingForPulls,
        "memory_output_is_the_callers_again_when_combine_returns",
        &["got back what was written after combine"],
    ),
    moment(Plant::OfferedEarly, "engine_ranks_that_are_no_power_of_two", &["combined_x"]),
    fault(Plant::RoundedTooEarly, "memory_output_in_the_window_is_pulled", &["combined_x"]),
    fault(Plant::SlotOffByOne, BY_EXPERT, &["byte of the rows by expert"]),
    fault(Plant::SlotOffByOne, PACKED, &["byte of the rows by expert", "slots", "weight of slot"]),
    fault(Plant::PaddingLeft, PACKED, &["byte of the rows by expert"]),
    moment(Plant::ShareEarly, BY_EXPERT, &["choices of an expert", "slots", "offsets"]),
    fault(Plant::PaddingLeft, BY_EXPERT, &["byte of the rows by expert"]),
    moment(Plant::FoldToldEarly, CHANNELS, &["combined_x"]),
    moment(Plant::LotEarly, CHANNELS, &["byte of the rows by expert"]),
    fault(Plant::RoomLeft, UNCOUNTED, &["byte of the rows by expert"]),
    fault(Plant::SpareSlotsLeft, UNCOUNTED, &["slots"]),
    fault(Plant::ChoiceUntold, BY_EXPERT, &["choices of an expert"]),
    fault(Plant::ForeignChoice, BY_EXPERT, &["local experts of the choices received"]),
    fault(Plant::FoldDescending, MANY_CHOICES, &["combined_x"]),
    fault(Plant::FoldRoundedTooEarly, MANY_CHOICES, &["combined_x"]),
    fault(Plant::WholeHeads, DIFFERENTLY, &["waited", "gave up on"]),
    fault(Plant::AllSlotsFilled, DIFFERENTLY, &["waited", "gave up on"]),
    fault(Plant::ImpoliteWaiting, "memory_every_chunk_and_credit_up_to_slots", &["waited", "gave up on"]),
    moment(Plant::LowRaisedEarly, "low_latency_both_forms", &["low-latency row", "token of the next row", "rows of"]),
    fault(Plant::LowWrongBank, "low_latency_both_forms", &["waited"]),
    moment(
        Plant::LowUnitsTorn,
        "low_latency_both_forms",
        &["low-latency row", "rows of", "recv_x", "tokens of a source"],
    ),
    moment(
        Plant::LowResultsTorn,
        "low_latency_results_of_small_and_of_large_batches",
        &["combined_x", "second combine along a handle"],
    ),
    moment(
        Plant::LowToldEarly,
        "low_latency_two_operations_in_flight",
        // What a rank reads that was overwritten is of a later operation: its rows, its results, or who said so.
        &["number of the low-latency operation", "operation of a low-latency row", "combined_x", OVERWRITTEN],
    ),
    fault(Plant::LowCountOffByOne, "low_latency_both_forms", &["waited", "rows of a source", "results of a rank"]),
    fault(Plant::LowWrongBank, "low_latency_over_nodes_is_a_full_mesh", WRONG_LOW_ROW),
    moment(Plant::LowFarArrivalFirst, "low_latency_over_nodes_is_a_full_mesh", WRONG_LOW_ROW),
    moment(Plant::LowFarStagingEarly, "low_latency_over_nodes_two_operations_in_flight", WRONG_LOW_ROW),
    moment(
        Plant::LowFarReceivedEarly,
        "low_latency_over_nodes_two_operations_in_flight",
        &["number of the low-latency operation", "low-latency row", "token of the next row", "recv_x", "combined_x"],
    ),
    fault(Plant::LowFarMaskUntold, "low_latency_over_nodes_a_masked_rank_is_told_and_rejoins", &["Timeout", "waited"]),
];

impl Fault {
    pub(crate) fn name(&self) -> String {
        format!("planted::{:?}_is_caught_by::{}", self.plant, self.case)
    }

    /// The case fails with the fault, by one of its signs, and passes without it.
    pub(crate) fn is_caught(&self) -> Result<(), String> {
        run_case(self.case, disturbed()).map_err(|error| format!("without the fault: {error}"))?;
        let run = |seed| run_case(self.case, Checks { plant: Some(self.plant), seed, ..disturbed() }).err();
        match (1..=self.runs).find_map(run) {
            None => Err(format!("{:?} went unnoticed in {} runs", self.plant, self.runs)),
            Some(error) if self.signs.iter().any(|sign| error.contains(sign)) => Ok(()),
            Some(error) => Err(format!("caught by `{error}`, expected one of {:?}", self.signs)),
        }
    }
}
