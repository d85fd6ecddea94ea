//! What keeps lanes from being opened or connected. What breaks one later is an [`ep_core::LaneCause`].

use std::io;

use ep_core::Rank;

/// Why a rank has no lanes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The adapter, or another rank's offer of one.
    #[error(transparent)]
    Rdma(#[from] ep_rdma::Error),
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
    /// Memory of a GPU could not be registered.
    #[error(
        "{device} cannot register memory of the GPU: {why}; load the module nvidia_peermem (modprobe nvidia_peermem), which comes with \
         NVIDIA's driver, after the adapter's own, or take drivers of GPU and adapter that know dmabuf"
    )]
    DeviceMemory {
        /// The device.
        device: String,
        /// What the system said.
        why: String,
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
}

impl Error {
    /// As the machine contract tells it.
    pub(crate) fn on(self, rank: Rank) -> ep_core::Error {
        let what = format_args!("RoCE on rank {rank}");
        match self {
            Self::Rdma(error) => error.of(what),
            Self::Map { what: memory, error } => {
                let cause = format_args!("{memory} cannot be mapped: {error}");
                ep_core::Error::broken(what, cause, "raise the limit of locked memory (ulimit -l)")
            }
            _ => ep_core::Error::unsupported(what, self),
        }
    }
}
