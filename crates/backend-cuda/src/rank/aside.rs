//! What a rank launches aside, while its stream brings more: rows in lots, and what is done with those that have come.

use super::RankDevice;
use crate::driver::{Device, Launch, Stream};
use crate::error::CudaError;

/// Bytes of copies by expert, and launches that they are worth from there on: one more takes 10 to 20 us.
const BYTES_OF_LAUNCHES: [(u64, u32); 2] = [(96 << 20, 2), (384 << 20, 4)];
/// Lots that a batch of placed rows is cut into at most, so that rows are known to be there before all are. All ranks cut alike: each lot has a track,
/// whose Placed cell tells of it.
pub(crate) const LOTS: u32 = 4;

/// Ranks from which on sums are pulled while others are made: with two the link is done before the sums are, which take longer beside. Three were not timed.
const RANKS_THAT_PULL: u32 = 4;

/// Multiprocessors for what runs beside kernels that bring rows, every second one: more take the memory's bandwidth from these, and the places of the next
/// ones.
pub(super) fn multiprocessors_beside(device: &Device) -> u32 {
    (device.multiprocessors() / 2).max(1)
}

/// Launches that so many bytes of copies are worth.
fn launches_of(bytes: u64) -> u32 {
    BYTES_OF_LAUNCHES.iter().rev().find(|(least, _)| bytes >= *least).map_or(1, |(_, launches)| *launches)
}

impl RankDevice {
    /// Lots that a batch is cut into.
    pub(crate) fn lots(&self) -> u32 {
        LOTS.min(self.layout.tracks())
    }

    /// Launches that place a batch by expert whose copies have so many bytes.
    pub(crate) fn launches(&self, bytes: u64) -> u32 {
        let wanted = self.launches.unwrap_or_else(|| launches_of(bytes)).min(self.lots());
        let beside = self.aside.is_some() && !self.shares.needs_tables(&self.stream, self.view.w.local_experts);
        if beside { wanted } else { 1 }
    }

    /// [Kernels that move memory of this GPU alone](RankDevice::local), beside those that bring rows.
    pub(super) fn beside(&self, rows: u32) -> Launch {
        let local = self.local(rows);
        Launch { blocks: local.blocks.min(multiprocessors_beside(self.stream.device())), ..local }
    }

    /// Whether a combine pulls sums of `bytes` bytes of results by expert while others are made.
    pub(crate) fn folds_beside(&self, bytes: u64) -> bool {
        self.launches(bytes) > 1 && (self.launches.is_some() || self.ranks() >= RANKS_THAT_PULL)
    }

    /// What is launched aside from here on follows what the stream has now; none where there is no stream aside.
    pub(crate) fn fork(&self) -> Result<Option<Aside<'_>>, CudaError> {
        let aside = self.aside.as_deref().map(|aside| Aside { aside, stream: &self.stream });
        aside.as_ref().map_or(Ok(()), Aside::follow)?;
        Ok(aside)
    }
}

/// What is launched aside. Whatever becomes of the call, the stream waits for it before memory is given back.
#[must_use]
pub(crate) struct Aside<'a> {
    aside: &'a Stream,
    stream: &'a Stream,
}

impl Aside<'_> {
    /// What is launched aside from here on follows what the stream has now.
    pub(crate) fn follow(&self) -> Result<(), CudaError> {
        // SAFETY: both streams live.
        unsafe { self.aside.follow(self.stream.raw() as usize) }
    }

    /// What the stream is given from here on follows what was launched aside.
    pub(crate) fn join(self) -> Result<(), CudaError> {
        let joined = self.lead();
        std::mem::forget(self);
        joined
    }

    fn lead(&self) -> Result<(), CudaError> {
        // SAFETY: as above.
        unsafe { self.aside.lead(self.stream.raw() as usize) }
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        // A driver that refuses this runs nothing any more.
        let _ = self.lead();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of what was timed, top-8 rows of 7168 elements: more launches took longer where there are few.
    #[test]
    fn large_batches_have_several_launches() {
        let of = |tokens: u64, row: u64| launches_of(tokens * 8 * row);
        assert_eq!([512, 1024, 2048, 4096].map(|tokens| of(tokens, 14336)), [1, 2, 2, 4]);
        assert_eq!([512, 1024, 2048, 4096].map(|tokens| of(tokens, 7168 + 224)), [1, 1, 2, 2]);
        assert!(BYTES_OF_LAUNCHES.iter().all(|(_, launches)| *launches <= LOTS));
    }
}
