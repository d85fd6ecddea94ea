//! What a kernel reported.

use std::mem::offset_of;

use ep_core::device::Report;
use ep_core::{Error, Failure, Rank};
use zerocopy::{FromBytes, IntoBytes};

use crate::driver::Mapped;
use crate::rank::RankDevice;

/// What kernels have written to `report`, which is an `EpReport`; its status is 0 where that is nothing. The status is read first, as it is
/// written last.
pub(super) fn read(report: &Mapped) -> Report {
    if report.word(offset_of!(Report, status)) == 0 {
        return Report::default();
    }
    let mut words = [0u32; size_of::<Report>() / 4];
    for (at, word) in words.iter_mut().enumerate() {
        *word = report.word(4 * at);
    }
    Report::read_from_bytes(words.as_bytes()).unwrap_or_default()
}

impl RankDevice {
    /// Whether kernels of throughput mode have reported a failure.
    pub(crate) fn has_failed(&self) -> bool {
        read(&self.report).status != 0
    }

    /// What kernels of throughput mode have reported, as an error of rank `me`.
    pub(super) fn reported(&self, me: Rank) -> Option<Error> {
        let report = read(&self.report);
        report.error(me).map(|error| self.with_cause(&report, error))
    }

    /// What kernels of low latency have reported, as an error of rank `me`.
    pub(super) fn low_reported(&self, me: Rank) -> Option<Error> {
        let report = read(self.low_report()?);
        report.low_error(me).map(|error| self.with_cause(&report, error))
    }

    /// The error with the cause of a broken lane, which its holder knows and kernels do not.
    fn with_cause(&self, report: &Report, error: Error) -> Error {
        let known = || self.far.as_ref()?.lanes().broken(report.broken_lane()?);
        match error {
            Error::Failed(failure) => Error::Failed(Failure { fault: known().unwrap_or(failure.fault), ..failure }),
            other => other,
        }
    }
}
