//! How a communicator is made of the names and numbers that Python has.

use std::sync::Arc;

use moexpress::layout::RowFormat;
use moexpress::settings::SettingsBuilder;
use moexpress::{Element, Error, Layout, Nanos, Placement, Scaling, Settings, Shape, Topology};
use pyo3::prelude::*;

use crate::calls::Calls;
use crate::error::of;
use crate::far;
use crate::meeting::within;

/// Of what, and how much of it.
#[derive(Clone, Copy, Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Sizes {
    pub(crate) experts: u32,
    pub(crate) topk: u32,
    pub(crate) hidden: u32,
    pub(crate) max_tokens: u32,
}

impl Sizes {
    fn shape(&self, element: Element) -> Result<Shape, Error> {
        let Self { experts, topk, hidden, max_tokens } = *self;
        Shape::builder().experts(experts).topk(topk).hidden(hidden).max_tokens(max_tokens).element(element).build()
    }
}

/// What has a default, and the names of the rest.
#[derive(Clone, Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Options {
    pub(crate) element: String,
    pub(crate) placement: String,
    pub(crate) arena_bytes: Option<u64>,
    pub(crate) arena_at_first: Option<u64>,
    pub(crate) low_latency: bool,
    pub(crate) low_latency_per_choice: bool,
    pub(crate) seconds: f64,
    pub(crate) channels: Option<u32>,
    pub(crate) slots: Option<u32>,
    pub(crate) outboxes: Option<u32>,
    pub(crate) ranks_per_node: u32,
    pub(crate) far: String,
    pub(crate) far_devices: Option<String>,
    pub(crate) gpu: usize,
    pub(crate) multiprocessors: u32,
    pub(crate) wait_for_kernels: bool,
}

/// How the communicator is made, checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    shape: Shape,
    topology: Topology,
    settings: Settings,
}

impl Plan {
    pub(crate) fn new(backend: &str, sizes: &Sizes, ranks: u32, options: &Options) -> Result<Self, Error> {
        let shape = sizes.shape(element(&options.element)?)?;
        let topology = topology(ranks, options.ranks_per_node)?;
        let nanos = u64::try_from(within(options.seconds).as_nanos()).unwrap_or(u64::MAX);
        let mut settings = automatic(backend, &shape, &topology, options.multiprocessors)
            .placement(placement(&options.placement)?)
            .low_latency(options.low_latency)
            .low_latency_per_choice(options.low_latency_per_choice)
            .deadline(Nanos(nanos));
        if let Some(bytes) = options.arena_bytes {
            settings = settings.arena_bytes(bytes);
        }
        if let Some(channels) = options.channels {
            settings = settings.channels(channels);
        }
        if let Some(slots) = options.slots {
            settings = settings.slots(slots);
        }
        if let Some(channels) = options.outboxes {
            settings = settings.outboxes(channels);
        }
        Ok(Self { shape, topology, settings: settings.build()? })
    }

    pub(crate) const fn topology(&self) -> Topology {
        self.topology
    }
}

/// What the device takes by itself.
fn automatic(backend: &str, shape: &Shape, topology: &Topology, multiprocessors: u32) -> SettingsBuilder {
    if backend == "cuda" {
        let multiprocessors = Some(multiprocessors).filter(|&number| number > 0);
        moexpress::cuda::Cluster::settings(shape, topology, multiprocessors)
    } else {
        Settings::builder(shape, topology)
    }
}

/// Nodes of so many ranks each.
fn topology(ranks: u32, ranks_per_node: u32) -> Result<Topology, Error> {
    if ranks_per_node == 0 || !ranks.is_multiple_of(ranks_per_node) {
        return Err(Error::invalid("ranks_per_node", ranks_per_node, format_args!("a divisor of {ranks}, the ranks")));
    }
    Topology::new(ranks / ranks_per_node, ranks_per_node)
}

fn element(name: &str) -> Result<Element, Error> {
    Ok(match name {
        "bf16" => Element::Bf16,
        "fp8" => Element::Fp8(Scaling::Exact),
        "fp8-pow2" => Element::Fp8(Scaling::PowerOfTwo),
        "fp8-ue8m0" => Element::Fp8(Scaling::Ue8m0),
        "int8" => Element::Int8,
        _ => return Err(Error::invalid("element", name, "bf16, fp8, fp8-pow2, fp8-ue8m0, int8")),
    })
}

fn placement(name: &str) -> Result<Placement, Error> {
    match name {
        "direct" => Ok(Placement::Direct),
        "ring" => Ok(Placement::Ring),
        "pulled" => Ok(Placement::Pulled),
        _ => Err(Error::invalid("placement", name, "direct, ring, pulled")),
    }
}

/// Makes a rank of a backend.
pub(crate) fn join(
    backend: &str,
    plan: Plan,
    options: &Options,
    member: Arc<ep_bootstrap::Member>,
) -> Result<Box<dyn Calls>, Error> {
    let Plan { shape, topology, settings } = plan;
    if options.arena_at_first.is_some() && backend != "cuda" {
        return Err(Error::unsupported(format_args!("arena_at_first on backend {backend}"), "GPUs"));
    }
    match backend {
        "host" => crate::host::join(shape, topology, settings, far::named(options, &topology)?, &member),
        "cuda" => crate::cuda::join(shape, topology, settings, options, &member),
        "npu" => crate::npu::join(shape, topology, settings, options, &member),
        _ => Err(Error::invalid("backend", backend, "host, cuda, npu")),
    }
}

/// Bytes that low latency takes of each window, for sizes that an endpoint takes.
#[pyfunction]
pub(crate) fn low_latency_bytes(
    py: Python<'_>,
    experts: u32,
    topk: u32,
    hidden: u32,
    max_tokens: u32,
    ranks: u32,
) -> PyResult<u64> {
    let bytes = || -> Result<u64, Error> {
        let shape = Sizes { experts, topk, hidden, max_tokens }.shape(Element::Bf16)?;
        let topology = Topology::new(1, ranks)?;
        let window = |on| {
            let settings = Settings::builder(&shape, &topology).low_latency(on).build()?;
            Ok::<_, Error>(Layout::new(&shape, &topology, &settings)?.window_bytes())
        };
        Ok(window(true)? - window(false)?)
    };
    bytes().map_err(|error| of(py, &error))
}

/// Bytes that `rows` rows take of an arena: dispatched ones, and results.
#[pyfunction]
pub(crate) fn block_bytes(
    py: Python<'_>,
    experts: u32,
    topk: u32,
    hidden: u32,
    element: &str,
    rows: u64,
) -> PyResult<(u64, u64)> {
    let bytes = || -> Result<(u64, u64), Error> {
        let shape = Sizes { experts, topk, hidden, max_tokens: 1 }.shape(self::element(element)?)?;
        let row = RowFormat::new(&shape);
        // A row is far shorter than 16 MiB: the product has room in 64 bits.
        if rows >= 1 << 40 {
            return Err(Error::invalid("rows", rows, format_args!("less than {}", 1u64 << 40)));
        }
        Ok((row.block_bytes(rows), row.results().block_bytes(rows)))
    };
    bytes().map_err(|error| of(py, &error))
}

/// Names the folder of the kernels that came with the wheel. The first call counts.
#[pyfunction]
pub(crate) fn kernels_come_from(folder: std::path::PathBuf) {
    moexpress::cuda::kernels_come_from(folder);
}

/// Kernels that a GPU of an architecture would look for in a folder and not find: absent, damaged, or made of another text.
#[pyfunction]
pub(crate) fn kernels_absent(folder: std::path::PathBuf, arch: &str) -> Vec<&'static str> {
    moexpress::cuda::kernels_absent(&folder, arch)
}

/// Why the CUDA backend cannot run here; None where it can.
#[pyfunction]
pub(crate) fn cuda_is_available() -> Option<String> {
    match moexpress::cuda::driver::devices() {
        Ok(0) => Some("no GPU is visible (CUDA_VISIBLE_DEVICES limits them)".to_owned()),
        Ok(_) => None,
        Err(error) => Some(Error::from(error).to_string()),
    }
}
