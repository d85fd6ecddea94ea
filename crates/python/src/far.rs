//! What carries rows between nodes, by its name.

use moexpress::cuda::Builder;
use moexpress::far_loop::Loop;
use moexpress::ibgda::{self, Ibgda, Library};
use moexpress::roce::{self, Roce};
use moexpress::{Error, Topology};

use crate::join::Options;

/// A transport, with its settings.
#[derive(Debug)]
pub(crate) enum Far {
    /// Between processes of one host: a network made of software.
    Loop(Loop),
    /// RDMA that a host posts.
    Roce(Roce),
    /// RDMA that kernels post.
    Ibgda(ibgda::Settings),
}

/// What was asked for; nothing where there is one node.
pub(crate) fn named(options: &Options, topology: &Topology) -> Result<Option<Far>, Error> {
    if topology.nodes() == 1 {
        return Ok(None);
    }
    let devices = options.far_devices.as_deref();
    let far = match options.far.as_str() {
        "loop" => Far::Loop(Loop::new().between_processes()),
        "roce" => Far::Roce(roce(devices)?),
        "ibgda" => Far::Ibgda(posted(devices)?),
        name => return Err(Error::invalid("far", name, "loop, roce, ibgda")),
    };
    match (&far, devices) {
        (Far::Loop(_), Some(devices)) => Err(Error::invalid("far_devices", devices, "none with far loop")),
        _ => Ok(Some(far)),
    }
}

fn roce(devices: Option<&str>) -> Result<Roce, Error> {
    let settings = roce::Settings::new();
    Ok(Roce::new(match devices {
        Some(devices) => settings.devices(devices.parse()?),
        None => settings,
    }))
}

fn posted(devices: Option<&str>) -> Result<ibgda::Settings, Error> {
    let settings = ibgda::Settings::new();
    match devices {
        None | Some("auto") => Ok(settings),
        Some(names) if names.contains(['/', ':']) || names.split(',').any(str::is_empty) => {
            Err(Error::invalid("far_devices with far ibgda", names, "auto, or names: mlx5_0,mlx5_1"))
        }
        Some(names) => Ok(settings.devices(names.split(','))),
    }
}

/// GPUs with it between their nodes.
pub(crate) fn between_gpus(builder: Builder, far: Option<Far>) -> Result<Builder, Error> {
    Ok(match far {
        None => builder,
        Some(Far::Loop(network)) => builder.far(network),
        Some(Far::Roce(network)) => builder.far(network),
        Some(Far::Ibgda(settings)) => {
            let library = Library::open().map_err(|error| Error::unsupported("far ibgda", error))?;
            let source = ibgda::source(&settings);
            builder.posted(source, move |_, gpu| Ibgda::new(library.clone(), gpu, settings.clone()))
        }
    })
}
