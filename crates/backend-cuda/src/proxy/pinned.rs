//! FIFOs for the lanes of a GPU.

use std::ptr::NonNull;
use std::sync::Arc;

use ep_core::Error;
use zerocopy::IntoBytes;

use super::memory::{Reached, STATE_WORDS};
use crate::driver::{DeviceMemory, Mapped, Stream};

/// Commands and answers in pinned memory, which a GPU maps. The states of lanes lie in its own memory: who posts a command reads and writes them, and
/// would wait for the bus each time.
#[derive(Debug)]
pub struct PinnedFifos {
    fifos: Mapped,
    states: DeviceMemory,
    stream: Arc<Stream>,
}

impl PinnedFifos {
    /// So many bytes; states are written by way of `stream`, which is waited for.
    ///
    /// # Errors
    /// [`Error::Broken`] with what the driver refused.
    pub fn new(stream: &Arc<Stream>, bytes: usize) -> Result<Self, Error> {
        let (fifos, states) = (Mapped::zeroed(stream.device(), bytes)?, DeviceMemory::zeroed(stream, bytes)?);
        Ok(Self { fifos, states, stream: Arc::clone(stream) })
    }
}

// SAFETY: pinned memory of that many bytes, page-aligned and zeroed, which stays mapped for host and GPU as long as the process lives (what is
// dropped is kept); its two addresses are of the same bytes.
unsafe impl Reached for PinnedFifos {
    fn host(&self) -> NonNull<u8> {
        NonNull::new(self.fifos.host()).expect("an allocation is not null")
    }

    fn device(&self) -> u64 {
        self.fifos.address()
    }

    fn bytes(&self) -> usize {
        self.fifos.bytes()
    }

    fn state(&self, at: usize) -> u64 {
        self.states.address() + at as u64
    }

    fn write_state(&self, at: usize, words: [u64; STATE_WORDS]) -> Result<(), Error> {
        Ok(self.states.write(&self.stream, at, words.as_bytes())?)
    }
}
