//! What lies between nodes, as the arguments say.

use ep_core::Error;
use ep_core::layout::Queues;
use ep_loop::Loop;
#[cfg(feature = "roce")]
use ep_roce::{Roce, Settings};

use crate::args::FarArgs;

/// A network made of software, between threads or `processes`; fails for values outside their limits.
pub(super) fn looped(args: &FarArgs, far_lanes: Option<Queues>, processes: bool) -> Result<Loop, Error> {
    let mut network = if processes { Loop::new().between_processes() } else { Loop::new() };
    if let Some(queues) = far_lanes {
        network = network.queues(queues);
    }
    if let Some(rate) = args.far_rate {
        // A rate that is no number, or none, is no number of bytes either.
        if !(rate.is_finite() && rate * 1e9 >= 1.0) {
            return Err(Error::invalid("--far-rate", rate, "more than 0, in GB/s"));
        }
        network = network.bytes_per_second((rate * 1e9) as u64)?;
    }
    network.latency(args.far_latency.unwrap_or_default())
}

/// RoCE; fails for values outside their limits.
#[cfg(feature = "roce")]
pub(super) fn roce(args: &FarArgs, far_lanes: Option<Queues>) -> Result<Roce, Error> {
    let FarArgs { far_devices, far_signal, far_ack_timeout, far_mtu, far_traffic_class, far_service_level, .. } = args;
    let mut settings = Settings::new();
    if let Some(queues) = far_lanes {
        settings = settings.far_lanes(queues);
    }
    if let Some(devices) = far_devices {
        settings = settings.devices(devices.parse()?);
    }
    if let Some(signal) = far_signal {
        settings = settings.signal(signal.parse()?);
    }
    if let Some(exponent) = *far_ack_timeout {
        settings = settings.ack_timeout(exponent)?;
    }
    if let Some(bytes) = *far_mtu {
        settings = settings.mtu(bytes)?;
    }
    if let Some(level) = *far_service_level {
        settings = settings.service_level(level)?;
    }
    Ok(Roce::new(settings.traffic_class(far_traffic_class.unwrap_or(0))))
}
