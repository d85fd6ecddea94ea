//! `--far ibgda`: kernels of GPUs post to mlx5 adapters themselves.

use ep_core::Error;
use ep_core::layout::Queues;
use ep_cuda::Builder;
use ep_ibgda::{Ibgda, Library, Settings};

use crate::args::FarArgs;

/// With adapters between nodes; fails where the libraries are missing, and for values outside their limits.
pub(super) fn over(builder: Builder, args: &FarArgs, far_lanes: Option<Queues>) -> Result<Builder, Error> {
    let settings = settings(args, far_lanes)?;
    let library = Library::open().map_err(|error| Error::unsupported("--far ibgda", error))?;
    let source = ep_ibgda::source(&settings);
    Ok(builder.posted(source, move |_, gpu| Ibgda::new(library.clone(), gpu, settings.clone())))
}

fn settings(args: &FarArgs, far_lanes: Option<Queues>) -> Result<Settings, Error> {
    let FarArgs { far_devices, far_ack_timeout, far_traffic_class, far_service_level, .. } = args;
    let mut settings = Settings::new().traffic_class(far_traffic_class.unwrap_or(0));
    if let Some(queues) = far_lanes {
        settings = settings.far_lanes(queues);
    }
    if let Some(names) = far_devices.as_deref().filter(|names| *names != "auto") {
        if names.contains(['/', ':']) || names.split(',').any(str::is_empty) {
            return Err(Error::invalid("--far-devices with --far ibgda", names, "auto, or names: mlx5_0,mlx5_1"));
        }
        settings = settings.devices(names.split(','));
    }
    if let Some(exponent) = *far_ack_timeout {
        settings = settings.ack_timeout(exponent)?;
    }
    if let Some(level) = *far_service_level {
        settings = settings.service_level(level)?;
    }
    Ok(settings)
}
