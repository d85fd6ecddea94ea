//! `--far ibgda`: kernels of GPUs post to mlx5 adapters themselves, or to such that GPUs play.

use ep_bootstrap::Member;
use ep_core::Error;
use ep_core::layout::Queues;
use ep_cuda::Builder;
use ep_ibgda::{Ibgda, Library, Settings, Signal};

use crate::args::FarArgs;

/// In place of adapters' names: the GPUs play them.
const PLAYED: &str = "gpu";

/// With adapters between the nodes of so many ranks, which are threads, or the processes of a member; fails where the libraries are missing, and for values outside their limits.
pub(super) fn over(
    builder: Builder,
    args: &FarArgs,
    far_lanes: Option<Queues>,
    ranks: (u32, Option<&Member>),
) -> Result<Builder, Error> {
    let settings = settings(args, far_lanes)?;
    if args.far_devices.as_deref() == Some(PLAYED) {
        return played(builder, args, settings, ranks);
    }
    let of_played = [
        ("--far-rate", args.far_rate.is_some()),
        ("--far-latency", args.far_latency.is_some()),
        ("--far-movers", args.far_movers.is_some()),
    ];
    for (option, given) in of_played {
        if given {
            return Err(Error::invalid(option, "given with --far ibgda", "with --far loop, or --far-devices gpu"));
        }
    }
    let library = Library::open().map_err(|error| Error::unsupported("--far ibgda", error))?;
    let source = ep_ibgda::source(&settings);
    Ok(builder.posted(source, move |_, gpu| Ibgda::new(library.clone(), gpu, settings.clone())))
}

/// With adapters that the ranks' GPUs play.
#[cfg(feature = "hca")]
fn played(
    builder: Builder,
    args: &FarArgs,
    settings: Settings,
    (ranks, member): (u32, Option<&Member>),
) -> Result<Builder, Error> {
    use ep_core::Rank;
    use ep_cuda::hca::{Hca, Pace};

    let present = ep_cuda::driver::devices()?;
    if present == 0 {
        return Err(Error::unsupported("--far-devices gpu", "a GPU; none is visible"));
    }
    let mut pace = Pace::default();
    if let Some(rate) = args.far_rate {
        pace.gigabits = (8.0 * rate).round() as u32;
    }
    if let Some(latency) = args.far_latency {
        pace.latency = latency;
    }
    if let Some(multiprocessors) = args.far_movers {
        pace.multiprocessors = multiprocessors;
    }
    // Each rank's adapter is played by its own GPU.
    let gpus: Vec<usize> = (0..ranks as usize).map(|rank| rank % present).collect();
    let sharing = ranks.div_ceil(present as u32);
    let (hca, gpus) = match member {
        None => (Hca::new(&gpus, pace)?, gpus),
        Some(member) => {
            let own = gpus[member.rank().index()];
            (Hca::between_processes(own, pace, member)?, vec![own])
        }
    };
    // SAFETY: the cards' functions are those of the interface.
    let library =
        unsafe { Library::from(soft_hca::symbol) }.map_err(|error| Error::unsupported("--far ibgda", error))?;
    let source = ep_ibgda::source(&settings);
    let builder = builder.gpus(gpus).leaves(sharing * pace.multiprocessors);
    Ok(builder.posted(source, move |me: Rank, gpu| {
        let settings = settings.clone().devices([hca.adapter(me.index())]);
        Ibgda::new(library.clone(), gpu.beside(&hca), settings)
    }))
}

#[cfg(not(feature = "hca"))]
fn played(_: Builder, _: &FarArgs, _: Settings, _: (u32, Option<&Member>)) -> Result<Builder, Error> {
    Err(Error::unsupported("--far-devices gpu", "a program that was built with the feature hca"))
}

fn settings(args: &FarArgs, far_lanes: Option<Queues>) -> Result<Settings, Error> {
    let FarArgs { far_devices, far_signal, far_ack_timeout, far_traffic_class, far_service_level, .. } = args;
    let mut settings = Settings::new().traffic_class(far_traffic_class.unwrap_or(0));
    if let Some(queues) = far_lanes {
        settings = settings.far_lanes(queues);
    }
    if let Some(names) = far_devices.as_deref().filter(|names| !["auto", PLAYED].contains(names)) {
        if names.contains(['/', ':']) || names.split(',').any(str::is_empty) {
            return Err(Error::invalid("--far-devices with --far ibgda", names, "auto, gpu, or names: mlx5_0,mlx5_1"));
        }
        settings = settings.devices(names.split(','));
    }
    if let Some(signal) = far_signal {
        settings = settings.signal(match signal.as_str() {
            "fetch-add" => Signal::FetchAdd,
            "ordered-write" => Signal::OrderedWrite,
            other => return Err(Error::invalid("--far-signal with --far ibgda", other, "fetch-add or ordered-write")),
        });
    }
    if let Some(exponent) = *far_ack_timeout {
        settings = settings.ack_timeout(exponent)?;
    }
    if let Some(level) = *far_service_level {
        settings = settings.service_level(level)?;
    }
    Ok(settings)
}
