//! The arguments of what carries rows between nodes.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{number, parse_duration};

/// What lies between nodes, with `--backend host` or `cuda`.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct FarArgs {
    /// With --backend host or cuda: what carries rows between nodes
    #[arg(long, value_enum, value_name = "TRANSPORT")]
    pub(crate) far: Option<Far>,
    /// With --far roce or ibgda: the devices of a node's ranks: auto, mlx5_0,mlx5_1; with roce those of different nodes
    /// with / between: mlx5_0:2, 10.9.0.1/10.9.0.2; with ibgda also gpu: adapters that the GPUs play, for tests on
    /// hosts without any [default: auto]
    #[arg(long, value_name = "LIST", requires = "far")]
    pub(crate) far_devices: Option<String>,
    /// With --far roce or ibgda: how the other end learns that rows have come: ordered-write, fetch-add; with roce also
    /// counting [default: as the device can; with ibgda fetch-add]
    #[arg(long, value_name = "HOW", requires = "far")]
    pub(crate) far_signal: Option<String>,
    /// With --far roce or ibgda: an adapter repeats what is not answered after 4.096 us x 2^N [default: 14]
    #[arg(long, value_name = "N", requires = "far")]
    pub(crate) far_ack_timeout: Option<u32>,
    /// With --far roce: bytes of a packet's payload, at most [default: the ports']
    #[arg(long, value_name = "BYTES", requires = "far")]
    pub(crate) far_mtu: Option<u32>,
    /// With --far roce or ibgda: DSCP and ECN of all packets, as one byte [default: 0]
    #[arg(long, value_name = "BYTE", requires = "far")]
    pub(crate) far_traffic_class: Option<u8>,
    /// With --far roce or ibgda: service level of all packets, 0 to 15 [default: 0]
    #[arg(long, value_name = "N", requires = "far")]
    pub(crate) far_service_level: Option<u32>,
    /// With --far loop, or --far-devices gpu: GB/s of each rank's card, in and out [default: as fast as cores copy; with
    /// gpu 50]
    #[arg(long, value_name = "GB_S", value_parser = number::<f64>("a number more than 0, in GB/s"), requires = "far")]
    pub(crate) far_rate: Option<f64>,
    /// With --far loop, or --far-devices gpu: how long a byte is on its way: 2us, 1ms, ... [default: 0s; with gpu 3us]
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, requires = "far")]
    pub(crate) far_latency: Option<Duration>,
    /// With --backend cuda and --far loop: multiprocessors of a rank's GPU on which a kernel moves what comes for it, many
    /// copies by one launch [default: none, the driver's copy engines]; with --far-devices gpu: those that play its
    /// adapter, 1 or 2 [default: 1]
    #[arg(long, value_name = "N", requires = "far", conflicts_with = "far_staged")]
    pub(crate) far_movers: Option<u32>,
    /// With --backend cuda and --far roce or loop: all rows travel by way of pinned memory of the host, whatever the
    /// network reaches; on all ranks [default: where it does not reach a GPU's memory]
    #[arg(long, requires = "far")]
    pub(crate) far_staged: bool,
}

impl FarArgs {
    /// An option that was given and belongs to other transports, and these.
    pub(crate) fn misplaced(&self) -> Option<(&'static str, &'static [Far])> {
        const ROCE: &[Far] = &[Far::Roce];
        const RDMA: &[Far] = &[Far::Roce, Far::Ibgda];
        const MADE: &[Far] = &[Far::Loop, Far::Ibgda];
        const PROXIED: &[Far] = &[Far::Roce, Far::Loop];
        let given = [
            ("--far-devices", RDMA, self.far_devices.is_some()),
            ("--far-signal", RDMA, self.far_signal.is_some()),
            ("--far-ack-timeout", RDMA, self.far_ack_timeout.is_some()),
            ("--far-mtu", ROCE, self.far_mtu.is_some()),
            ("--far-traffic-class", RDMA, self.far_traffic_class.is_some()),
            ("--far-service-level", RDMA, self.far_service_level.is_some()),
            ("--far-rate", MADE, self.far_rate.is_some()),
            ("--far-latency", MADE, self.far_latency.is_some()),
            ("--far-movers", MADE, self.far_movers.is_some()),
            ("--far-staged", PROXIED, self.far_staged),
        ];
        let misplaced =
            given.into_iter().find(|&(_, of, given)| given && !self.far.is_some_and(|far| of.contains(&far)));
        misplaced.map(|(option, of, _)| (option, of))
    }
}

/// Transports between nodes.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Far {
    /// RDMA over Ethernet or InfiniBand
    Roce,
    /// RDMA that kernels of GPUs post to mlx5 adapters themselves
    Ibgda,
    /// None: copies between threads of this process, or processes of this host, at a set rate and latency, for tests
    Loop,
}
