//! What a kernel reported.

use std::mem::offset_of;

use ep_core::device::Report;
use zerocopy::{FromBytes, IntoBytes};

use crate::driver::Mapped;

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
