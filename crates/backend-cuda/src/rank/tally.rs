//! What a rank has moved, as its kernels count it.

use crate::driver::{DeviceMemory, Stream};
use crate::error::CudaError;

/// What was moved since the communicator was made.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Tally {
    /// `[ranks]`: rows sent and received in dispatches.
    pub(crate) dispatched: Vec<(u64, u64)>,
    /// `[ranks]`: rows sent and received in combines.
    pub(crate) combined: Vec<(u64, u64)>,
    /// `[local experts]`.
    pub(crate) expert_rows: Vec<u64>,
    pub(crate) operations: u64,
}

impl Tally {
    /// Bytes that it has on the device: u64, as the fields are ordered here, sent before received.
    pub(super) const fn bytes(ranks: usize, local_experts: usize) -> usize {
        8 * (4 * ranks + local_experts + 1)
    }

    /// Reads it. Waits.
    pub(super) fn read(stream: &Stream, memory: &DeviceMemory, ranks: usize) -> Result<Self, CudaError> {
        let mut bytes = vec![0; memory.bytes()];
        memory.read(stream, 0, &mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        let mut words: Vec<u64> = words.iter().map(|&word| u64::from_le_bytes(word)).collect();
        let pairs = |at: usize| (at..at + ranks).map(|rank| (words[rank], words[ranks + rank])).collect();
        let (dispatched, combined) = (pairs(0), pairs(2 * ranks));
        let operations = words.pop().unwrap_or(0);
        Ok(Self { dispatched, combined, expert_rows: words.split_off(4 * ranks), operations })
    }
}
