//! What a kernel of low latency reported, as the error that the user gets.

use ep_core::port::{LaneId, LaneKind, Nanos};
use ep_core::{Error, Failure, Fault, Phase, Rank};

use crate::driver::Mapped;

/// `EP_STATUS_...`.
const TIMEOUT: u32 = 1;
const MISMATCH: u32 = 2;
const BAD_ROUTING: u32 = 4;
const MASKED: u32 = 5;

/// What `EP_LOW_FIELD_...` are called.
const FIELDS: [&str; 14] = [
    "number of the low-latency operation",
    "kind of the low-latency operation",
    "value of an arrival",
    "operation of a low-latency row",
    "source of a low-latency row",
    "token of a low-latency row",
    "least token of the next row",
    "tokens of a source",
    "rows of a source",
    "results of a rank",
    "rows of an expert",
    "generation of a replayed graph",
    "low-latency operations in flight",
    "last low-latency operation of a generation",
];

/// The failure in a report (`EpReport`) of rank `me` that has one.
pub(super) fn of(report: &Mapped, me: Rank) -> Error {
    let (phase, peer, op) = (report.word(4), Rank(report.word(8)), report.long(16));
    let (seen, awaited, waited) = (report.long(24), report.long(32), Nanos(report.long(40)));
    let (field, culprit) = (report.word(48), Rank(report.word(52)));
    let fault = match report.word(0) {
        TIMEOUT => {
            let phase = if phase == 0 { Phase::Bank } else { Phase::Rows };
            let kind = LaneKind::from_index(report.word(12) as usize);
            Fault::Timeout { phase, peer, lane: LaneId { peer, kind }, seen, awaited, waited }
        }
        MISMATCH => {
            let field = FIELDS.get(field as usize).copied().unwrap_or("something");
            Fault::Mismatch { field, mine: awaited, theirs: seen, peer }
        }
        MASKED => Fault::MaskedBy { peer },
        BAD_ROUTING => {
            let limit = "-1 or an expert, every expert at most once per token";
            return Error::invalid(format_args!("topk_idx of token {seen}"), "something else", limit);
        }
        _ => Fault::Abandoned,
    };
    Error::Failed(Failure { op, culprit, reporter: me, fault })
}
