//! What keeps lanes from being opened or connected. What breaks one later is an [`ep_core::LaneCause`].

use std::io;

use ep_core::Rank;

/// Why a rank has no lanes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library could not be opened.
    #[error("libibverbs cannot be loaded ({why}): install libibverbs1 and ibverbs-providers (Debian) or rdma-core")]
    Library {
        /// What the loader said.
        why: String,
    },
    /// The library lacks a function.
    #[error("libibverbs has no {name}: it is too old")]
    Symbol {
        /// The function.
        name: &'static str,
    },
    /// This machine has no RDMA device.
    #[error(
        "there is no RDMA device here; `rdma link` lists them, and `rdma link add NAME type rxe netdev NETDEV` makes one of any network interface"
    )]
    NoDevice,
    /// No device has that name.
    #[error("there is no RDMA device {name}; there are: {found}")]
    NoSuchDevice {
        /// What was asked for.
        name: String,
        /// The names that there are.
        found: String,
    },
    /// No device has that address.
    #[error("no RDMA device has the address {address}; there are: {found}")]
    NoSuchAddress {
        /// What was asked for.
        address: String,
        /// The addresses that there are.
        found: String,
    },
    /// No port can be used.
    #[error("no RDMA device can be used: {why}")]
    NoPort {
        /// What is wrong with each.
        why: String,
    },
    /// A call of the library failed.
    #[error("{call} on {device} failed: {error} ({hint})")]
    Call {
        /// The call.
        call: &'static str,
        /// The device.
        device: String,
        /// What the system said.
        error: io::Error,
        /// What may help.
        hint: &'static str,
    },
    /// Memory of a GPU could not be registered.
    #[error(
        "{device} cannot register memory of the GPU: {error}; load the module nvidia_peermem (modprobe nvidia_peermem), which comes with \
         NVIDIA's driver, after the adapter's own, or take drivers of GPU and adapter that know dmabuf"
    )]
    DeviceMemory {
        /// The device.
        device: String,
        /// What the system said.
        error: io::Error,
    },
    /// The host has no way to the GPU's memory, which it must write when lanes are connected anew.
    #[error("the window lies in memory of a device whose backend does not let the host write it")]
    NoCopies,
    /// Memory could not be mapped.
    #[error("{what} cannot be mapped: {error}")]
    Map {
        /// What memory.
        what: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// The other end is not what this one needs.
    #[error("rank {rank}: {why}")]
    Peer {
        /// The other end.
        rank: Rank,
        /// What is wrong.
        why: String,
    },
    /// A setting that the device does not allow.
    #[error("{what} is {value}, allowed on {device}: {limit}")]
    Setting {
        /// The setting.
        what: &'static str,
        /// What was asked for.
        value: String,
        /// The device.
        device: String,
        /// What it allows.
        limit: String,
    },
}

impl Error {
    /// The last error of the system, of `call`.
    pub(crate) fn call(call: &'static str, device: &str, error: io::Error) -> Self {
        let hint = match error.raw_os_error() {
            Some(12) => "locked memory may be limited: see `ulimit -l`",
            Some(13 | 1) => "no access to /dev/infiniband: see its permissions",
            Some(110) => "the peer's address could not be resolved: is there a route to it?",
            _ => "see the system's log (dmesg)",
        };
        Self::Call { call, device: device.to_owned(), error, hint }
    }

    /// As the machine contract tells it.
    pub(crate) fn on(self, rank: Rank) -> ep_core::Error {
        let what = format_args!("RoCE on rank {rank}");
        match self {
            Self::Call { call, device, error, hint } => {
                ep_core::Error::broken(what, format_args!("{call} on {device}: {error}"), hint)
            }
            Self::Map { what: memory, error } => {
                let cause = format_args!("{memory} cannot be mapped: {error}");
                ep_core::Error::broken(what, cause, "raise the limit of locked memory (ulimit -l)")
            }
            _ => ep_core::Error::unsupported(what, self),
        }
    }
}
