//! NPUs: what Python has allocated is read and written where it lies, in the order of the endpoint's stream, which comes behind the caller's.
//! Calls end when their kernels have. Results are copied to memory that torch gives ([`crate::away`]).

use std::env;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use moexpress::ascend::driver::{Device as Npu, Table};
use moexpress::ascend::{
    Array, AscendEndpoint, Builder, Cluster, Combining, Dispatching, LowHandle, LowPlaces, Roles, Rows,
};
use moexpress::engine::Scalar;
use moexpress::engine::low_latency::LowOrder;
use moexpress::layout::RowFormat;
use moexpress::{Element as Travels, Endpoint as _, Error, Layout, LowLatency as _, Settings, Shape, Topology};
use pyo3::prelude::*;

use crate::away::Home;
use crate::backend::{Backend, LowInto, LowTold, RawRows, RowsOut, Typed, poll};
use crate::calls::Calls;
use crate::dlpack::{Device, Element, Tensor};
use crate::error::of;
use crate::guard::Own;
use crate::join::Options;
use crate::rank::Rank;
use crate::room::{Given, LowRoom, Owner, Scales};

/// The file of the kernels that the vendor's compiler has built.
const KERNELS: &str = "EP_ASCEND_KERNELS";
/// Bytes of a scale.
const SCALE: usize = 4;

/// What drives NPUs here, and how their cores are divided, if not as the SoC says.
pub(crate) struct Driver {
    pub(crate) table: Table,
    pub(crate) kernels: PathBuf,
    pub(crate) roles: Option<Roles>,
}

impl Driver {
    /// The vendor's libraries, and the kernels that the user names; or the twin of this process.
    fn found() -> Result<Self, Error> {
        #[cfg(feature = "npu-twin")]
        if let Some(twin) = crate::twin::driver() {
            return Ok(twin);
        }
        let table = Table::open()?;
        let kernels = env::var_os(KERNELS).ok_or_else(|| {
            let needs = "the file of the kernels that CANN's compiler has built (docs/ascend.md)";
            Error::unsupported(format_args!("device npu without {KERNELS}"), needs)
        })?;
        Ok(Self { table, kernels: kernels.into(), roles: None })
    }

    fn builder(self, topology: Topology, settings: Settings, npu: u32) -> (Table, Builder) {
        let builder = Cluster::builder(topology, self.kernels).settings(settings).devices(vec![npu]);
        (self.table, self.roles.into_iter().fold(builder, Builder::roles))
    }
}

/// Why NPUs cannot be used here: what is missing of CANN, of the devices, or of the kernels. None where they can.
#[pyfunction]
pub(crate) fn npu_is_available(py: Python<'_>) -> Option<String> {
    let missing = || match Driver::found().and_then(|driver| Ok(Npu::count(&driver.table)?)) {
        Ok(0) => Some("no NPU is visible (ASCEND_RT_VISIBLE_DEVICES limits them)".to_owned()),
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    };
    py.detach(missing)
}

/// Of INT8 rows of so many elements as NPUs have them: bytes of a row, and where in it the scale lies.
#[pyfunction]
pub(crate) fn int8_row(py: Python<'_>, hidden: u32) -> PyResult<(u64, u64)> {
    let shape = Shape::builder().hidden(hidden).element(Travels::Int8).build().map_err(|error| of(py, &error))?;
    Ok((shape.row_bytes(), RowFormat::new(&shape).scales_offset()))
}

/// Makes a rank.
pub(crate) fn join(
    shape: Shape,
    topology: Topology,
    settings: Settings,
    options: &Options,
    member: &Arc<ep_bootstrap::Member>,
) -> Result<Box<dyn Calls>, Error> {
    if topology.nodes() > 1 && options.far != "roce" {
        let allowed = "roce between NPUs: their kernels post to its queues";
        return Err(Error::invalid("far", &options.far, allowed));
    }
    if let Travels::Fp8(_) = shape.element() {
        return Err(Error::unsupported(format_args!("{} on NPUs", shape.element()), "bf16 or int8: NPUs have no FP8"));
    }
    let layout = Layout::new(&shape, &topology, &settings)?;
    let (table, builder) = Driver::found()?.builder(topology, settings, options.gpu as u32);
    let endpoint = builder.join(&table, shape, member)?;
    Ok(Box::new(Rank::new(endpoint, layout)))
}

/// Where so many bytes that Python names lie on the NPU.
pub(crate) fn place(address: usize, bytes: usize) -> Result<u64, Error> {
    #[cfg(feature = "npu-twin")]
    if let Some(found) = crate::twin::place(address, bytes) {
        return found;
    }
    let _ = bytes;
    Ok(address as u64)
}

/// How memory of an endpoint leaves.
fn device(endpoint: &AscendEndpoint) -> Device {
    // A copy comes behind what the endpoint's stream holds: a call lasts that long at most, and its kernels once more.
    let within = Duration::from_nanos(endpoint.layout().settings().deadline().0).saturating_mul(3);
    Device::Npu(Arc::new(Home { stream: Arc::clone(endpoint.stream()), within }))
}

/// Memory of an endpoint that leaves, `[rows, columns]`.
fn leaves(endpoint: &AscendEndpoint, rows: Rows, columns: usize, element: Element) -> Tensor {
    Tensor {
        address: rows.address() as usize,
        shape: vec![i64::from(rows.rows()), columns as i64],
        strides: None,
        element,
        device: device(endpoint),
        owner: Box::new(Own::new(rows)),
    }
}

impl Backend for AscendEndpoint {
    const KEEPS_CHOICES: bool = false;

    unsafe fn rows_in(&mut self, rows: &RawRows) -> Result<Rows, Error> {
        let (shape, count) = (*self.shape(), rows.rows as usize);
        let row_bytes = if rows.scales.is_some() { shape.row_bytes() } else { shape.result_bytes() } as usize;
        if count == 0 {
            return self.rows_room(0, row_bytes);
        }
        if let Some(scales) = &rows.scales {
            let behind = rows.address + RowFormat::new(&shape).scales_offset() as usize;
            let is_packed = scales.address == behind && scales.strides[0] * SCALE as i64 == row_bytes as i64;
            if !is_packed {
                return Err(Error::invalid("scales", "elsewhere", "behind the codes of their rows on NPUs"));
            }
        }
        let address = place(rows.address, count * row_bytes)?;
        // SAFETY: as the caller promises; other streams come behind this rank's kernels, also where a call was left (`lead`).
        Ok(unsafe { self.lent_rows(address, rows.rows, row_bytes) })
    }

    unsafe fn array_in<T: Scalar>(&mut self, address: usize, len: usize, keep: bool) -> Result<Array<T>, Error> {
        if len == 0 {
            return self.array(&[]);
        }
        let address = place(address, len * size_of::<T>())?;
        if keep {
            // SAFETY: as the caller promises.
            return unsafe { self.copied_array(address, len) };
        }
        // SAFETY: as in `rows_in`.
        Ok(unsafe { self.lent_array(address, len) })
    }

    fn choices_of(handle: &LowHandle) -> Array<i64> {
        handle.topk_idx().clone()
    }

    unsafe fn expert_rows_in(&mut self, address: usize, _told: &LowTold) -> Result<Rows, Error> {
        let rows = self.layout().low_expert_rows()?;
        // SAFETY: as the caller promises.
        unsafe { self.rows_in(&RawRows { address, rows, scales: None }) }
    }

    async fn quantized(&mut self, x: &Rows) -> Result<Rows, Error> {
        self.quantize(x).await
    }

    fn rows_out(&mut self, rows: Rows) -> Result<RowsOut, Error> {
        let columns = rows.row_bytes();
        let x = match self.shape().element() {
            Travels::Bf16 => leaves(self, rows, columns / 2, Element::Bf16),
            _ => leaves(self, rows, columns, Element::U8),
        };
        Ok(RowsOut { x, scales: None })
    }

    fn results_out(&mut self, rows: Rows) -> Result<Tensor, Error> {
        let columns = rows.row_bytes() / 2;
        Ok(leaves(self, rows, columns, Element::Bf16))
    }

    fn array_out<T: Typed>(&mut self, array: Array<T>, shape: Vec<i64>) -> Result<Tensor, Error> {
        let (address, device) = (array.address() as usize, device(self));
        Ok(Tensor { address, shape, strides: None, element: T::ELEMENT, device, owner: Box::new(Own::new(array)) })
    }

    fn low_scales(&self) -> Scales {
        Scales::BehindCodes
    }

    fn low_room(&mut self, layout: &Layout, order: LowOrder, given: Option<Given>) -> Result<LowRoom, Error> {
        LowRoom::new(layout, &device(self), self.low_scales(), order, given, |bytes| {
            let memory = self.rows_room(1, bytes)?;
            Ok((memory.address() as usize, Arc::new(Own::new(memory)) as Owner))
        })
    }

    async unsafe fn receive_into(&mut self, sent: &Dispatching, into: &LowInto) -> Result<(LowHandle, LowTold), Error> {
        let places = [into.x, into.expert_counts, into.segments, into.source_token].map(|at| at as u64);
        let [x, expert_counts, segments, source_token] = places;
        let places = LowPlaces { x, expert_counts, segments, source_token };
        // SAFETY: room of this endpoint that was cut for these sizes, which its owner keeps.
        let received = unsafe { self.receive_dispatch_into(sent, places, Arc::clone(&into.owner)) };
        let (handle, counts) = received.await?;
        if let Some(stats) = into.stats {
            let at = place(stats, counts.len() * size_of::<i32>())?;
            // SAFETY: the caller promises so many numbers. What he had enqueued has ended, as the kernels behind it have.
            unsafe { self.add_to(at, &counts) }?;
        }
        Ok((handle, LowTold { counts, ..LowTold::nothing(LowOrder::ByExpert) }))
    }

    async unsafe fn receive_sums_into(&mut self, sent: &Combining, into: usize, tokens: u32) -> Result<(), Error> {
        let bytes = tokens as usize * self.shape().result_bytes() as usize;
        let into = if bytes == 0 { 0 } else { place(into, bytes)? };
        if into == 0 {
            return self.receive_combine(sent).await.map(drop);
        }
        // SAFETY: as in `rows_in`.
        unsafe { self.receive_combine_into(sent, into) }.await
    }

    fn wait<T>(call: impl Future<Output = T>, go_on: &mut dyn FnMut() -> bool) -> Option<T> {
        poll(call, go_on, std::thread::yield_now)
    }

    fn stream(&self) -> usize {
        AscendEndpoint::stream(self).lend() as usize
    }

    unsafe fn follow(&mut self, stream: usize) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { AscendEndpoint::follow(self, stream as u64) }
    }

    unsafe fn lead(&mut self, stream: usize) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { AscendEndpoint::lead(self, stream as u64) }
    }
}
