//! What keeps lanes from being opened or connected. What breaks one later is an [`ep_core::LaneCause`].

use ep_core::Rank;

/// Why a rank has no lanes that its device drives.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The libraries, the adapter, or another rank's offer of one.
    #[error(transparent)]
    Rdma(#[from] ep_rdma::Error),
    /// This machine has no adapter of that kind.
    #[error(
        "there is no mlx5 adapter here ({found}): a device posts to ConnectX adapters only. `--far roce` takes others"
    )]
    NoDevice {
        /// What was found instead.
        found: String,
    },
    /// No adapter has that name.
    #[error("there is no mlx5 adapter {name}; there are: {found}")]
    NoSuchDevice {
        /// What was asked for.
        name: String,
        /// The names that there are.
        found: String,
    },
    /// No port can be used.
    #[error("no mlx5 adapter can be used: {why}")]
    NoPort {
        /// What is wrong with each.
        why: String,
    },
    /// The adapter's kernel driver takes no commands.
    #[error(
        "{device} takes no DEVX commands ({why}): the kernel needs CONFIG_INFINIBAND_USER_ACCESS and mlx5_ib, and the process CAP_NET_RAW"
    )]
    NoDevx {
        /// The adapter.
        device: String,
        /// What the system said.
        why: String,
    },
    /// The adapter lacks something that nothing can do without.
    #[error("{device} has {what} {value}, needed: {needs}")]
    Capability {
        /// The adapter.
        device: String,
        /// What was looked for.
        what: &'static str,
        /// What it has.
        value: u64,
        /// What is needed, and how to come by it.
        needs: &'static str,
    },
    /// The adapter's firmware refused a command.
    #[error("{command} on {device} failed: status {status:#x}, syndrome {syndrome:#010x} ({why})")]
    Command {
        /// The command.
        command: &'static str,
        /// The adapter.
        device: String,
        /// What the firmware answered; 0: nothing, the system refused.
        status: u8,
        /// Why, as the vendor's support reads it.
        syndrome: u32,
        /// What the system said.
        why: String,
    },
    /// Memory of the device cannot be registered.
    #[error(
        "{what} cannot be registered with {device}: {why}. Load nvidia-peermem, or take a driver with dmabuf (`modinfo nvidia-peermem`)"
    )]
    Memory {
        /// What memory.
        what: &'static str,
        /// The adapter.
        device: String,
        /// What each way said.
        why: String,
    },
    /// The device refused something.
    #[error("{what} failed: {why}")]
    Device {
        /// What.
        what: &'static str,
        /// What the device said.
        why: String,
    },
}

impl Error {
    /// As the machine contract tells it.
    pub(crate) fn on(self, rank: Rank) -> ep_core::Error {
        let what = format_args!("IBGDA on rank {rank}");
        match self {
            Self::Rdma(error) => error.of(what),
            Self::Command { .. } | Self::Device { .. } => {
                ep_core::Error::broken(what, self, "see the system's log (dmesg)")
            }
            _ => ep_core::Error::unsupported(what, self),
        }
    }
}
