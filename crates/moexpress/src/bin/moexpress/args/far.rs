//! The arguments of what carries rows between nodes.

use clap::{Args, ValueEnum};

/// What lies between nodes, with `--backend host`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct FarArgs {
    /// With --backend host: what carries rows between nodes
    #[arg(long, value_enum, value_name = "TRANSPORT")]
    pub(crate) far: Option<Far>,
    /// With --far roce: the devices of a node's ranks, those of different nodes with / between: auto, mlx5_0,mlx5_1,
    /// mlx5_0:2, 10.9.0.1/10.9.0.2 [default: auto]
    #[arg(long, value_name = "LIST", requires = "far")]
    pub(crate) far_devices: Option<String>,
    /// With --far roce: how the other end learns that rows have come: ordered-write, fetch-add, counting [default: as the
    /// device can]
    #[arg(long, value_name = "HOW", requires = "far")]
    pub(crate) far_signal: Option<String>,
    /// With --far roce: an adapter repeats what is not answered after 4.096 us x 2^N [default: 14]
    #[arg(long, value_name = "N", requires = "far")]
    pub(crate) far_ack_timeout: Option<u32>,
    /// With --far roce: bytes of a packet's payload, at most [default: the ports']
    #[arg(long, value_name = "BYTES", requires = "far")]
    pub(crate) far_mtu: Option<u32>,
    /// With --far roce: DSCP and ECN of all packets, as one byte [default: 0]
    #[arg(long, value_name = "BYTE", requires = "far")]
    pub(crate) far_traffic_class: Option<u8>,
    /// With --far roce: service level of all packets, 0 to 15 [default: 0]
    #[arg(long, value_name = "N", requires = "far")]
    pub(crate) far_service_level: Option<u32>,
}

/// Transports between nodes.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Far {
    /// RDMA over Ethernet or InfiniBand
    Roce,
}
