//! What keeps an adapter from being used. What breaks a lane later is an [`ep_core::LaneCause`].

use std::fmt;
use std::io;

use ep_core::Rank;

/// Why an adapter, its memory or another rank's offer cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library could not be opened.
    #[error("{name} cannot be loaded ({why}): install {packages} (Debian) or rdma-core")]
    Library {
        /// The library.
        name: &'static str,
        /// The packages that have it.
        packages: &'static str,
        /// What the loader said.
        why: String,
    },
    /// The libraries lack a function.
    #[error("libibverbs and the libraries beside it have no {name}: they are too old, install rdma-core 28 or later")]
    Symbol {
        /// The function.
        name: &'static str,
    },
    /// A call of the libraries failed.
    #[error("{call} on {device} failed: {why} ({hint})")]
    Call {
        /// The call.
        call: &'static str,
        /// The adapter.
        device: String,
        /// What the system said.
        why: String,
        /// What may help.
        hint: &'static str,
    },
    /// The other end is not what this one needs.
    #[error("rank {rank}: {why}")]
    Peer {
        /// The other end.
        rank: Rank,
        /// What is wrong.
        why: String,
    },
    /// A setting that the adapter does not allow.
    #[error("{what} is {value}, allowed on {device}: {limit}")]
    Setting {
        /// The setting.
        what: &'static str,
        /// What was asked for.
        value: String,
        /// The adapter.
        device: String,
        /// What it allows.
        limit: String,
    },
}

impl Error {
    /// What the system said of `call`.
    pub fn call(call: &'static str, device: &str, error: io::Error) -> Self {
        let hint = match error.raw_os_error() {
            Some(12) => "locked memory may be limited: see `ulimit -l`",
            Some(13 | 1) => "no access to /dev/infiniband: see its permissions",
            Some(14) => "the memory is a device's, and nvidia-peermem is not loaded",
            Some(110) => "the peer's address could not be resolved: is there a route to it?",
            _ => "see the system's log (dmesg)",
        };
        Self::Call { call, device: device.to_owned(), why: error.to_string(), hint }
    }

    /// As the machine contract tells it, of `what`: a transport on a rank.
    pub fn of(self, what: fmt::Arguments<'_>) -> ep_core::Error {
        match self {
            Self::Call { call, device, why, hint } => {
                ep_core::Error::broken(what, format_args!("{call} on {device}: {why}"), hint)
            }
            _ => ep_core::Error::unsupported(what, self),
        }
    }
}
