//! Which ranks and experts a batch goes to, for whoever asks before there is a communicator, on a stream of his own.

use std::sync::Arc;

use ep_core::Error;

use crate::args;
use crate::driver::{Device, Launch, Mode};
use crate::error::CudaError;
use crate::kernels::Kernels;

/// A batch, and where its numbers go: addresses of the GPU's memory.
#[derive(Clone, Copy, Debug)]
pub struct MembersOf {
    /// i64 `[tokens, topk]`, -1 for a dropped choice. Choices that no expert has count nowhere.
    pub topk_idx: u64,
    /// Tokens of the batch.
    pub tokens: u32,
    /// Choices of a token.
    pub topk: u32,
    /// Ranks that the experts are spread over.
    pub ranks: u32,
    /// Experts in all, a multiple of `ranks`.
    pub experts: u32,
    /// To be filled: u32 `[ranks + experts]`, tokens for each rank, counted once a rank, and choices of each expert.
    pub numbers: u64,
    /// To be filled: u8 `[tokens, ranks]`, 1 where the token goes to the rank.
    pub in_rank: u64,
}

impl MembersOf {
    /// Refuses experts that the ranks cannot share evenly.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check(&self) -> Result<(), Error> {
        if self.ranks > 0 && self.experts > 0 && self.experts.is_multiple_of(self.ranks) {
            return Ok(());
        }
        Err(Error::invalid("experts", self.experts, format_args!("a multiple of the {} ranks", self.ranks)))
    }
}

/// Computes them on one GPU.
#[derive(Clone, Debug)]
pub struct Members {
    device: Arc<Device>,
    kernels: Arc<Kernels>,
}

impl Members {
    /// On GPU `ordinal`; kernels are compiled at their first use.
    ///
    /// # Errors
    /// Those of [`Device::open`], and of the compilation.
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        let device = Device::open(ordinal)?;
        let kernels = Kernels::of(&device, false, None, None)?;
        Ok(Self { device, kernels })
    }

    /// Enqueues one to `stream`, by the driver's handle: 0 is the default stream. Can be captured.
    ///
    /// # Errors
    /// Those of [`MembersOf::check`]; where the driver refuses.
    ///
    /// # Safety
    /// `stream` is of this GPU and lives; the addresses have room for what is said beside them until work of the stream that was
    /// enqueued now has ended, and until whatever was made of a capture of it is gone.
    pub unsafe fn enqueue(&self, stream: usize, of: &MembersOf) -> Result<(), Error> {
        let MembersOf { topk_idx, tokens, topk, ranks, experts, numbers, in_rank } = *of;
        of.check()?;
        let args = args::Members { topk_idx, numbers, in_rank, tokens, topk, ranks, experts };
        let blocks = tokens.div_ceil(args::MEMBERS_THREADS).clamp(1, self.device.multiprocessors());
        let shape = Launch { blocks, threads: args::MEMBERS_THREADS, shared_memory: 0, mode: Mode::Plain };
        let enqueued = || -> Result<(), CudaError> {
            // SAFETY: as the caller promises.
            unsafe { self.device.fill_on(stream, numbers, 0, 4 * (ranks as usize + experts as usize)) }?;
            // SAFETY: as the caller promises; the kernel's one parameter is this struct, as ep_args.h declares it.
            unsafe { self.kernels.members.launch_alone(&self.device, stream, shape, &args) }
        };
        Ok(enqueued()?)
    }
}
