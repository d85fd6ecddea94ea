//! What can go wrong with a GPU, its driver, or the compilation of kernels.

use std::path::PathBuf;

/// Why something of the CUDA layer did not work.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library that is opened at run time is not there.
    #[error("{library} is missing: {install}")]
    LibraryMissing {
        /// Its file name.
        library: &'static str,
        /// What to install.
        install: &'static str,
    },
    /// A GPU that does not exist was asked for.
    #[error("GPU {ordinal} was asked for, {present} are visible (CUDA_VISIBLE_DEVICES limits them)")]
    NoSuchDevice {
        /// The ordinal asked for.
        ordinal: usize,
        /// GPUs that the driver shows.
        present: usize,
    },
    /// The GPU is older than the kernels.
    #[error("GPU {ordinal} has compute capability {major}.{minor}, the kernels need 8.0 or later")]
    TooOld {
        /// Its ordinal.
        ordinal: usize,
        /// Of its compute capability.
        major: u32,
        /// Of its compute capability.
        minor: u32,
    },
    /// One GPU cannot reach another's memory.
    #[error("GPU {from} cannot reach the memory of GPU {to}: they need NVLink or PCIe peer access")]
    NoPeerAccess {
        /// The GPU that would read and write.
        from: usize,
        /// The GPU whose memory it is.
        to: usize,
    },
    /// Something that waits for the GPU was asked for while its stream was captured into a graph.
    #[error("{what} cannot be captured into a CUDA graph")]
    Capturing {
        /// What was asked for.
        what: &'static str,
    },
    /// More memory than there are addresses for.
    #[error("{what} of {bytes} bytes: no memory has that size")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// As it was asked for: a product, for one.
        bytes: String,
    },
    /// A call that the settings have left out, or that these ranks have no kernel for.
    #[error("{what} needs {needs}")]
    LeftOut {
        /// The call.
        what: &'static str,
        /// What it needs.
        needs: &'static str,
    },
    /// A call of the driver failed for want of memory.
    #[error("{call} failed: {code}")]
    OutOfMemory {
        /// The function.
        call: &'static str,
        /// The driver's name for the error.
        code: String,
    },
    /// A call of the driver failed.
    #[error("{call} failed: {code}")]
    Driver {
        /// The function.
        call: &'static str,
        /// The driver's name for the error.
        code: String,
    },
    /// The driver does not let kernels reach an adapter's registers.
    #[error(
        "the driver maps no adapter's registers for kernels (error 800): load it with NVreg_RegistryDwords=\"PeerMappingOverride=1;\""
    )]
    Register,
    /// Bytes outside of a block of memory; nothing was touched.
    #[error("{len} bytes from byte {at} on lie outside of memory of {bytes} bytes")]
    Beyond {
        /// The first.
        at: usize,
        /// How many.
        len: usize,
        /// Of the block.
        bytes: usize,
    },
    /// The processes of the ranks did not come together.
    #[error("the ranks have not met: {problem}")]
    Meeting {
        /// Which rank, and what it did.
        problem: String,
    },
    /// An arena cannot grow here.
    #[error("an arena cannot grow: {problem}")]
    NoGrowth {
        /// What is missing.
        problem: String,
    },
    /// A kernel does not compile.
    #[error("{kernel} does not compile for {arch}:\n{log}")]
    Compile {
        /// Its file.
        kernel: &'static str,
        /// The architecture.
        arch: String,
        /// What the compiler said.
        log: String,
    },
    /// A file of the kernel cache could not be written.
    #[error("{path}: {problem}")]
    Cache {
        /// The file.
        path: PathBuf,
        /// What the system said.
        problem: String,
    },
}

impl CudaError {
    /// What the driver refuses is a way that a system has not.
    pub(crate) fn into_no_growth(self) -> Self {
        match self {
            Self::Driver { .. } | Self::OutOfMemory { .. } => Self::NoGrowth { problem: self.to_string() },
            other => other,
        }
    }

    /// The same, but for want of memory.
    pub(crate) fn unless_for_memory(self) -> Self {
        if matches!(self, Self::OutOfMemory { .. }) { self } else { self.into_no_growth() }
    }

    pub(crate) fn meeting(error: ep_bootstrap::Error) -> Self {
        Self::Meeting { problem: error.to_string() }
    }
}

impl From<CudaError> for ep_core::Error {
    fn from(error: CudaError) -> Self {
        const ANEW: &str = "what has failed on a GPU lasts: end the process, and start it anew";
        match &error {
            CudaError::OutOfMemory { call, code } => {
                Self::broken(call, code, "free memory of the GPU, or ask for less: smaller arena, fewer tokens")
            }
            CudaError::Driver { call, code } => Self::broken(call, code, ANEW),
            CudaError::TooLarge { what, bytes } => {
                Self::invalid(format_args!("bytes of {what}"), bytes, "what a GPU may have")
            }
            CudaError::LeftOut { what, needs } => Self::unsupported(what, needs),
            CudaError::Beyond { at, len, bytes } => {
                let what = format_args!("end of {len} bytes from byte {at} on");
                Self::invalid(what, at.saturating_add(*len), format_args!("at most {bytes}, that of the memory"))
            }
            CudaError::Meeting { problem } => {
                Self::broken("the ranks' meeting", problem, "start all ranks, of one version, with the same settings")
            }
            CudaError::Compile { kernel, arch, log } => {
                let what = format_args!("the compilation of {kernel} for {arch}");
                Self::broken(what, log, "take NVRTC 13.0, or another version that compiles it")
            }
            CudaError::Cache { path, problem } => {
                Self::broken(path.display(), problem, "name another folder by EP_CUDA_CACHE")
            }
            CudaError::LibraryMissing { .. }
            | CudaError::NoSuchDevice { .. }
            | CudaError::TooOld { .. }
            | CudaError::NoPeerAccess { .. }
            | CudaError::Register
            | CudaError::NoGrowth { .. }
            | CudaError::Capturing { .. } => Self::unsupported("the CUDA backend", error),
        }
    }
}
