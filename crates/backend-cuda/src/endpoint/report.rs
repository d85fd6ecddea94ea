//! What a kernel reported, as the error that the user gets.

use ep_core::port::{LaneId, LaneKind, Nanos};
use ep_core::{Error, Failure, Fault, Phase, Rank};

use crate::driver::Mapped;

/// `EP_STATUS_...`.
const TIMEOUT: u32 = 1;
const MISMATCH: u32 = 2;
const ABORTED: u32 = 3;
const BAD_ROUTING: u32 = 4;

/// What `EP_FIELD_...` are called.
const FIELDS: [&str; 14] = [
    "number of the operation",
    "kind of the operation",
    "hash of shape, settings and replayed dispatch",
    "rows sent",
    "operation of a row",
    "source of a row",
    "position of a row",
    "rows to one rank, as a power of two",
    "end of a block in the window",
    "head of the ring",
    "tail of the ring",
    "token of a row",
    "worst-case rows",
    "generation of a replayed graph",
];

const fn phase(number: u32) -> Phase {
    match number {
        0 => Phase::Bank,
        1 => Phase::Counts,
        2 => Phase::Note,
        3 => Phase::Rows,
        4 => Phase::Credit,
        5 => Phase::Pulled,
        6 => Phase::Alarm,
        7 => Phase::Recovery,
        _ => Phase::Probe,
    }
}

/// The failure in a report (`EpReport`), if there is one. `me`: whose report it is.
pub(crate) fn failure(report: &Mapped, me: Rank) -> Option<Error> {
    let status = report.word(0);
    if status == 0 {
        return None;
    }
    let peer = Rank(report.word(8));
    let (op, seen, awaited, waited) = (report.long(16), report.long(24), report.long(32), Nanos(report.long(40)));
    let (field, culprit) = (report.word(48), Rank(report.word(52)));
    let (fault, reporter) = match status {
        TIMEOUT => {
            let lane = LaneId { peer, kind: LaneKind::from_index(report.word(12) as usize) };
            (Fault::Timeout { phase: phase(report.word(4)), peer, lane, seen, awaited, waited }, me)
        }
        MISMATCH => {
            let field = FIELDS.get(field as usize).copied().unwrap_or("something");
            (Fault::Mismatch { field, mine: awaited, theirs: seen, peer }, me)
        }
        ABORTED => (Fault::Aborted { reporter: peer, culprit }, peer),
        BAD_ROUTING => {
            let what = format_args!("topk_idx of token {seen}");
            let limit = "-1 or an expert, every expert at most once per token";
            return Some(Error::invalid(what, "something else", limit));
        }
        _ => (Fault::Abandoned, me),
    };
    Some(Error::Failed(Failure { op, culprit, reporter, fault }))
}
