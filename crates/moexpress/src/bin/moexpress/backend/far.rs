//! RoCE between nodes, as the arguments say.

use ep_core::Error;
use ep_core::layout::Queues;
use ep_roce::{Roce, Settings};

use crate::args::FarArgs;

/// The transport; fails for values outside their limits.
pub(super) fn roce(args: &FarArgs, far_lanes: Option<Queues>) -> Result<Roce, Error> {
    let FarArgs { far: _, far_devices, far_signal, far_ack_timeout, far_mtu, far_traffic_class, far_service_level } =
        args;
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
