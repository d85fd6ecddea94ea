//! What keeps lanes from being opened or connected. What breaks one later is an [`ep_core::LaneCause`].

use std::io;

use ep_core::Rank;

/// Why a rank has no lanes that its device drives.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library could not be opened.
    #[error("{name} cannot be loaded ({why}): install {package} (Debian) or rdma-core")]
    Library {
        /// The library.
        name: &'static str,
        /// The package that has it.
        package: &'static str,
        /// What the loader said.
        why: String,
    },
    /// The libraries lack a function.
    #[error("libibverbs and libmlx5 have no {name}: they are too old, install rdma-core 28 or later")]
    Symbol {
        /// The function.
        name: &'static str,
    },
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
    /// The last error of the system, of `call`.
    pub(crate) fn call(call: &'static str, device: &str, error: io::Error) -> Self {
        let hint = match error.raw_os_error() {
            Some(12) => "locked memory may be limited: see `ulimit -l`",
            Some(13 | 1) => "no access to /dev/infiniband: see its permissions",
            Some(14) => "the memory is the device's, and nvidia-peermem is not loaded",
            Some(110) => "the peer's address could not be resolved: is there a route to it?",
            _ => "see the system's log (dmesg)",
        };
        Self::Call { call, device: device.to_owned(), why: error.to_string(), hint }
    }

    /// As the machine contract tells it.
    pub(crate) fn on(self, rank: Rank) -> ep_core::Error {
        let what = format_args!("IBGDA on rank {rank}");
        match self {
            Self::Call { call, device, why, hint } => {
                ep_core::Error::broken(what, format_args!("{call} on {device}: {why}"), hint)
            }
            Self::Command { .. } | Self::Device { .. } => {
                ep_core::Error::broken(what, self, "see the system's log (dmesg)")
            }
            _ => ep_core::Error::unsupported(what, self),
        }
    }
}
