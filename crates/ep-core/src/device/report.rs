//! What a kernel reports when it cannot go on, and the error that the user gets.

use super::far::FarStatus;
use crate::error::{Error, Failure, Fault, LaneCause, Phase};
use crate::layout::Mismatch;
use crate::port::{LaneId, LaneKind, Nanos};
use crate::topology::Rank;
use crate::{c_enum, c_struct};

c_enum! {
    /// What went wrong: EpReport.status. 0 for nothing.
    pub enum Status = "EP_STATUS" {
        /// A wait lasted until the deadline.
        Timeout = 1,
        /// A peer does something else.
        Mismatch = 2,
        /// A peer has given up.
        Aborted = 3,
        /// A token's choices are wrong.
        BadRouting = 4,
        /// Low latency goes on without this rank.
        Masked = 5,
        /// A peer is known to do nothing any more.
        Gone = 6,
        /// A lane to another node does not go on; EpReport.field says how: EP_FAR_...
        Lane = 7,
    }
}

c_enum! {
    /// Which field differed in low latency: EpReport.field of a mismatch.
    pub enum LowMismatch = "EP_LOW_FIELD" {
        /// number of the low-latency operation
        Op = 0,
        /// kind of the low-latency operation
        Kind = 1,
        /// value of an arrival
        Arrival = 2,
        /// operation of a low-latency row
        RowOp = 3,
        /// source of a low-latency row
        RowSource = 4,
        /// token of a low-latency row
        RowToken = 5,
        /// least token of the next row
        LeastToken = 6,
        /// tokens of a source
        Tokens = 7,
        /// rows of a source
        Rows = 8,
        /// results of a rank
        Results = 9,
        /// rows of an expert
        ExpertRows = 10,
        /// generation of a replayed graph
        Generation = 11,
        /// low-latency operations in flight
        InFlight = 12,
        /// last low-latency operation of a generation
        LastOp = 13,
        /// generation of a low-latency row
        RowGeneration = 14,
        /// batch that the readiness of results is of
        ReadyEpoch = 15,
        /// rows by expert
        Slots = 16,
        /// rows of all sources
        RowsInAll = 17,
    }
}

c_struct! {
    /// The first failure of a rank, in host memory that the device writes. The status is written last.
    #[derive(Eq)]
    pub struct Report = "EpReport" {
        /// EP_STATUS_...; 0 for none.
        pub status: u32,
        /// What was waited for: EP_PHASE_...
        pub phase: u32,
        /// From whom, or who has given up.
        pub peer: u32,
        /// Index of the lane.
        pub lane: u32,
        /// The operation.
        pub op: u64,
        /// The value seen; of wrong choices the token.
        pub seen: u64,
        /// The value awaited.
        pub awaited: u64,
        /// Nanoseconds waited.
        pub waited: u64,
        /// Which field differed: EP_FIELD_..., in low latency EP_LOW_FIELD_...
        pub field: u32,
        /// Whom this rank blames.
        pub culprit: u32,
        /// Of low latency: 1 once a launch behind the one that failed has found it so, and done nothing.
        pub behind: u32,
        /// Nothing.
        pub reserved: u32,
    }
}

impl Report {
    /// The error that it is, for rank `me` that has reported it in throughput mode; none where nothing was reported.
    pub fn error(&self, me: Rank) -> Option<Error> {
        self.error_of(me, Mismatch::of(self.field).map(Mismatch::name))
    }

    /// The rank to which a lane broke, or refused what was posted, where the report is of that: whoever holds the lanes knows the
    /// cause ([`DeviceLanes::broken`](crate::transport::DeviceLanes::broken)), and a kernel does not.
    pub fn broken_lane(&self) -> Option<Rank> {
        let is_lane = Status::of(self.status) == Some(Status::Lane);
        let of_lane = matches!(FarStatus::of(self.field), Some(FarStatus::Broken | FarStatus::Refused));
        (is_lane && of_lane).then_some(Rank(self.peer))
    }

    /// The error that it is, for rank `me` that has reported it in low latency; none where nothing was reported.
    pub fn low_error(&self, me: Rank) -> Option<Error> {
        self.error_of(me, LowMismatch::of(self.field).map(LowMismatch::name))
    }

    fn error_of(&self, me: Rank, field: Option<&'static str>) -> Option<Error> {
        if self.status == 0 {
            return None;
        }
        let Self { op, seen, awaited, .. } = *self;
        let (phase, peer, culprit) = (Phase::of(self.phase), Rank(self.peer), Rank(self.culprit));
        let (fault, reporter) = match Status::of(self.status) {
            Some(Status::Timeout) => {
                let lane = LaneId { peer, kind: LaneKind::from_index(self.lane as usize) };
                (Fault::Timeout { phase, peer, lane, seen, awaited, waited: Nanos(self.waited) }, me)
            }
            Some(Status::Mismatch) => {
                let field = field.unwrap_or("a field that no kernel names");
                (Fault::Mismatch { field, mine: awaited, theirs: seen, peer }, me)
            }
            Some(Status::Gone) => (Fault::PeerGone { peer, phase }, me),
            Some(Status::Aborted) => (Fault::Aborted { reporter: peer, culprit }, peer),
            Some(Status::Lane) => (self.lane_fault(phase, peer), me),
            Some(Status::Masked) => (Fault::MaskedBy { peer }, me),
            Some(Status::BadRouting) => {
                let limit = "-1 or an expert, every expert at most once per token";
                return Some(Error::invalid(format_args!("topk_idx of token {seen}"), "something else", limit));
            }
            None => (Fault::Abandoned, me),
        };
        Some(Error::Failed(Failure { op, culprit, reporter, fault }))
    }
}

impl Report {
    /// What became of a lane to another node, as far as a kernel is told: whoever holds the lanes knows more.
    fn lane_fault(&self, phase: Phase, peer: Rank) -> Fault {
        let Self { seen, awaited, .. } = *self;
        let lane = LaneId { peer, kind: LaneKind::from_index(self.lane as usize) };
        let broken = |cause| Fault::LaneBroken { lane, cause };
        match FarStatus::of(self.field) {
            Some(FarStatus::Broken) => broken(LaneCause::Flushed),
            Some(FarStatus::Gone) => broken(LaneCause::NoPoster),
            Some(FarStatus::Stalled) => broken(LaneCause::PosterStalled),
            Some(FarStatus::Refused) => broken(LaneCause::LocalRequest),
            _ => Fault::Timeout { phase, peer, lane, seen, awaited, waited: Nanos(self.waited) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(status: u32) -> Report {
        let phase = Phase::Rows as u32;
        Report {
            status,
            phase,
            peer: 2,
            lane: 1,
            op: 9,
            seen: 5,
            awaited: 7,
            waited: 11,
            field: 1,
            culprit: 4,
            ..Report::default()
        }
    }

    fn failure(status: Status, low: bool) -> Failure {
        let report = report(status as u32);
        let error = if low { report.low_error(Rank(1)) } else { report.error(Rank(1)) };
        match error {
            Some(Error::Failed(failure)) => failure,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_report_says_what_its_fields_say() {
        assert_eq!(report(0).error(Rank(1)), None);
        let timeout = failure(Status::Timeout, false);
        let lane = LaneId { peer: Rank(2), kind: LaneKind::Control };
        let fault = Fault::Timeout { phase: Phase::Rows, peer: Rank(2), lane, seen: 5, awaited: 7, waited: Nanos(11) };
        assert_eq!(timeout, Failure { op: 9, culprit: Rank(4), reporter: Rank(1), fault });
        assert_eq!(failure(Status::Aborted, false).reporter, Rank(2), "the peer that has given up");
        assert_eq!(failure(Status::Masked, true).fault, Fault::MaskedBy { peer: Rank(2) });
        assert!(report(Status::BadRouting as u32).error(Rank(1)).is_some_and(|e| e.to_string().contains("token 5")));
    }

    #[test]
    fn a_lane_between_nodes_fails_by_its_status() {
        let lane = LaneId { peer: Rank(2), kind: LaneKind::Control };
        let of = |status: FarStatus| {
            let report = Report { field: status as u32, ..report(Status::Lane as u32) };
            match report.error(Rank(1)) {
                Some(Error::Failed(failure)) => (failure.culprit, failure.fault),
                other => panic!("{other:?}"),
            }
        };
        for (status, cause) in [
            (FarStatus::Broken, LaneCause::Flushed),
            (FarStatus::Gone, LaneCause::NoPoster),
            (FarStatus::Stalled, LaneCause::PosterStalled),
            (FarStatus::Refused, LaneCause::LocalRequest),
        ] {
            assert_eq!(of(status), (Rank(4), Fault::LaneBroken { lane, cause }));
        }
        assert!(matches!(of(FarStatus::Timeout).1, Fault::Timeout { phase: Phase::Rows, awaited: 7, .. }));
    }

    #[test]
    fn who_holds_lanes_is_asked_of_those_that_broke() {
        let of =
            |status: Status, field: FarStatus| Report { field: field as u32, ..report(status as u32) }.broken_lane();
        assert_eq!(of(Status::Lane, FarStatus::Broken), Some(Rank(2)));
        assert_eq!(of(Status::Lane, FarStatus::Refused), Some(Rank(2)));
        assert_eq!(of(Status::Lane, FarStatus::Gone), None);
        assert_eq!(of(Status::Mismatch, FarStatus::Broken), None);
    }

    #[test]
    fn the_modes_have_fields_of_their_own() {
        let field = |low| match failure(Status::Mismatch, low).fault {
            Fault::Mismatch { field, mine: 7, theirs: 5, peer: Rank(2) } => field,
            other => panic!("{other}"),
        };
        assert_eq!([field(false), field(true)], ["kind of the operation", "kind of the low-latency operation"]);
    }
}
