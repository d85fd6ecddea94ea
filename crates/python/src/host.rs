//! CPUs: rows are copied in, and leave where they lie.

use std::future::Future;
use std::sync::{Arc, Mutex};

use moexpress::engine::low_latency::{Combining, Dispatching, LowHandle, LowOrder};
use moexpress::engine::{Buffer, Engine, HostRows, Lease, Scalar};
use moexpress::host::{Cluster, Machine, Window, block_on_while};
use moexpress::layout::RowFormat;
use moexpress::port::Span;
use moexpress::room::zeroed;
use moexpress::transport::{AnyLanes, AnyTransport, NoTransport};
use moexpress::{Error, Layout, LowLatency as _, Settings, Shape, Topology};

use crate::backend::{Backend, LowInto, LowTold, RawRows, RawScales, RowsOut, Typed};
use crate::calls::Calls;
use crate::dlpack::{Device, Element, Tensor};
use crate::far::Far;
use crate::handle::slice;
use crate::rank::Rank;
use crate::room::{Given, LowRoom, Owner, Scales};

/// Bytes of a scale, or a pack of them, in a tensor.
const SCALE: usize = 4;

/// Where the parts of an FP8 row are.
#[derive(Clone, Copy, Debug)]
struct Parts {
    hidden: usize,
    row_bytes: usize,
    scales_at: usize,
    /// Bytes of the scales of a row.
    scales: usize,
    /// Scales, or packs of them, in a row of a tensor.
    columns: usize,
}

impl Parts {
    fn of(format: &RowFormat, hidden: u32) -> Self {
        let scales = format.scales_bytes() as usize;
        Self {
            hidden: hidden as usize,
            row_bytes: format.payload_bytes() as usize,
            scales_at: format.scales_offset() as usize,
            scales,
            columns: scales.div_ceil(SCALE),
        }
    }

    /// The bytes of column `column` of a row's scales: fewer than four at the end of UE8M0 scales.
    fn column(&self, column: usize) -> std::ops::Range<usize> {
        let end = self.scales.min((column + 1) * SCALE);
        self.scales_at + column * SCALE..self.scales_at + end
    }

    /// Copies the scales of a row into its bytes.
    ///
    /// # Safety
    /// The scales are there.
    unsafe fn gather(&self, scales: &RawScales, row: usize, bytes: &mut [u8]) {
        for column in 0..self.columns {
            let at = row as i64 * scales.strides[0] + column as i64 * scales.strides[1];
            // SAFETY: as the caller promises. Tensors' elements of four bytes need not be aligned for bytes.
            let value = unsafe { (scales.address as *const [u8; SCALE]).offset(at as isize).read_unaligned() };
            let into = &mut bytes[self.column(column)];
            into.copy_from_slice(&value[..into.len()]);
        }
    }

    /// One column of a row's scales, as tensors have it.
    fn scale(&self, row: &[u8], column: usize) -> [u8; SCALE] {
        let mut value = [0; SCALE];
        let bytes = &row[self.column(column)];
        value[..bytes.len()].copy_from_slice(bytes);
        value
    }
}

/// Makes a rank, with `far` between nodes.
pub(crate) fn join(
    shape: Shape,
    topology: Topology,
    settings: Settings,
    far: Option<Far>,
    member: &Arc<ep_bootstrap::Member>,
) -> Result<Box<dyn Calls>, Error> {
    let network = match far {
        None => AnyTransport::new(NoTransport),
        Some(Far::Loop(network)) => AnyTransport::new(network),
        Some(Far::Roce(network)) => AnyTransport::new(network),
        Some(Far::Ibgda(_)) => {
            return Err(Error::invalid("far", "ibgda", "roce or loop on CPUs: kernels of GPUs post by ibgda"));
        }
    };
    let endpoint = Cluster::builder(topology).settings(settings).far(network).join(shape, member)?;
    let layout = endpoint.layout().clone();
    Ok(Box::new(Rank::new(endpoint, layout)))
}

fn parts(engine: &Engine<Machine<AnyLanes>>) -> Parts {
    Parts::of(engine.layout().row(), engine.layout().shape().hidden())
}

fn dense(rows: &HostRows<Window>, row_bytes: usize) -> Result<&[u8], Error> {
    match rows {
        HostRows::Owned { bytes, .. } => Ok(bytes),
        _ => Err(Error::invalid("rows of low latency", "in an arena", format_args!("of {row_bytes} bytes each"))),
    }
}

impl Backend for Engine<Machine<AnyLanes>> {
    unsafe fn rows_in(&mut self, rows: &RawRows) -> Result<Self::Buf, Error> {
        let count = rows.rows as usize;
        let Some(scales) = &rows.scales else {
            let row_bytes = self.layout().shape().result_bytes() as usize;
            // SAFETY: as the caller promises.
            let bytes = unsafe { slice::<u8>(rows.address, count * row_bytes) }.to_vec();
            return Ok(HostRows::Owned { bytes: bytes.into(), row_bytes });
        };
        let parts = parts(self);
        let mut bytes = vec![0; count * parts.row_bytes];
        // SAFETY: as the caller promises.
        let codes = unsafe { slice::<u8>(rows.address, count * parts.hidden) };
        for (row, into) in bytes.chunks_exact_mut(parts.row_bytes).enumerate() {
            into[..parts.hidden].copy_from_slice(&codes[row * parts.hidden..][..parts.hidden]);
            // SAFETY: as the caller promises.
            unsafe { parts.gather(scales, row, into) };
        }
        Ok(HostRows::Owned { bytes: bytes.into(), row_bytes: parts.row_bytes })
    }

    unsafe fn array_in<T: Scalar>(&mut self, address: usize, len: usize, _keep: bool) -> Result<Vec<T>, Error> {
        // SAFETY: as the caller promises.
        Ok(unsafe { slice::<T>(address, len) }.to_vec())
    }

    fn choices_of(handle: &LowHandle) -> Vec<i64> {
        handle.topk_idx().to_vec()
    }

    unsafe fn expert_rows_in(&mut self, address: usize, told: &LowTold) -> Result<Self::Buf, Error> {
        let row_bytes = self.layout().shape().result_bytes() as usize;
        let rows = told.order.rows(self.layout())? as usize;
        let mut bytes = zeroed(rows * row_bytes)?;
        let at_once = if told.order.tells_rows() { told.result_rows().map(|rows| vec![rows as i32]) } else { None };
        let counts = at_once.as_ref().unwrap_or(&told.counts);
        let stride = rows / counts.len().max(1);
        for (expert, &count) in counts.iter().enumerate() {
            let (at, len) = (expert * stride * row_bytes, count as usize * row_bytes);
            // SAFETY: as the caller promises; no expert has more rows than its part.
            bytes[at..at + len].copy_from_slice(unsafe { slice::<u8>(address + at, len) });
        }
        Ok(HostRows::Owned { bytes: bytes.into(), row_bytes })
    }

    fn rows_out(&mut self, mut rows: Self::Buf) -> Result<RowsOut, Error> {
        let (format, count) = (*self.layout().row(), rows.rows());
        if format.scales_bytes() == 0 {
            return Ok(RowsOut { x: bf16(rows, format, self.layout().shape().hidden())?, scales: None });
        }
        let places = match &mut rows {
            HostRows::Leased(lease) => {
                let (_, block) = lease.place();
                let [codes, scales] = [block.codes(0), block.scales(0)].map(|first| address(lease, first));
                [codes?, scales?]
            }
            HostRows::Apart { bytes, block } => {
                let first = bytes.as_mut_ptr() as usize;
                [block.codes(0), block.scales(0)].map(|span| first + span.offset.0 as usize)
            }
            HostRows::Owned { .. } => return Err(Error::invalid("received FP8 rows", "in one piece", "apart")),
        };
        Ok(RowsOut::apart(&format, count, places, Device::Cpu, Arc::new(Mutex::new(rows))))
    }

    fn results_out(&mut self, rows: Self::Buf) -> Result<Tensor, Error> {
        let shape = vec![i64::from(rows.rows()), i64::from(self.layout().shape().hidden())];
        match rows {
            HostRows::Owned { bytes, .. } => Ok(of_buffer(bytes, shape)),
            _ => Err(Error::invalid("results", "in an arena", "in memory of their own")),
        }
    }

    fn array_out<T: Typed>(&mut self, array: Vec<T>, shape: Vec<i64>) -> Result<Tensor, Error> {
        Ok(Tensor::of_vec(array, shape, T::ELEMENT))
    }

    fn low_scales(&self) -> Scales {
        Scales::ByColumn
    }

    fn low_room(&mut self, layout: &Layout, order: LowOrder, given: Option<Given>) -> Result<LowRoom, Error> {
        LowRoom::new(layout, &Device::Cpu, self.low_scales(), order, given, |bytes| {
            // Words that are as aligned as any element. They are written through this pointer alone.
            let mut words: Vec<u128> = zeroed(bytes.div_ceil(size_of::<u128>()))?;
            Ok((words.as_mut_ptr() as usize, Arc::new(Mutex::new(words)) as Owner))
        })
    }

    async unsafe fn receive_into(&mut self, sent: &Dispatching, into: &LowInto) -> Result<(LowHandle, LowTold), Error> {
        let received = self.receive_dispatch(sent).await?;
        let parts = parts(self);
        let bytes = dense(&received.x, parts.row_bytes)?;
        let codes = if into.scales.is_some() { parts.hidden } else { parts.row_bytes };
        let counts = &received.expert_counts;
        let (order, stride) = (received.handle.order(), LowOrder::BySource.rows(self.layout())? as usize);
        // By source, and packed, all that is defined leaves, as if it were one expert's.
        let at_once = match (order, &received.packed) {
            (LowOrder::ByExpert, _) => None,
            (LowOrder::Packed { zero_spare: false, .. }, Some(told)) => {
                Some(vec![told.first.last().copied().unwrap_or(0)])
            }
            _ => Some(vec![order.rows(self.layout())? as i32]),
        };
        for (expert, &count) in at_once.as_ref().unwrap_or(counts).iter().enumerate() {
            for index in 0..count as usize {
                let row = expert * stride + index;
                let from = &bytes[row * parts.row_bytes..][..parts.row_bytes];
                // SAFETY: the caller promises room for all rows of all local experts.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), (into.x as *mut u8).add(row * codes), codes) };
                let Some((scales, strides)) = into.scales else { continue };
                for column in 0..parts.columns {
                    let at = [expert, index, column]
                        .iter()
                        .zip(strides)
                        .map(|(&at, stride)| at as i64 * stride)
                        .sum::<i64>();
                    let value = parts.scale(from, column);
                    // SAFETY: as above.
                    unsafe { (scales as *mut [u8; SCALE]).offset(at as isize).write_unaligned(value) };
                }
            }
            let tokens = if order.tells_rows() { stride } else { count as usize };
            // SAFETY: as above.
            unsafe {
                copy_out(&received.source_token[expert * stride..][..tokens], into.source_token, expert * stride);
            }
        }
        // SAFETY: as above.
        unsafe { copy_out(counts, into.expert_counts, 0) };
        if let Some(stats) = into.stats {
            for (expert, &count) in counts.iter().enumerate() {
                // SAFETY: as above, and nobody else uses the numbers before the call returns.
                unsafe { *(stats as *mut i32).add(expert) = (*(stats as *mut i32).add(expert)).wrapping_add(count) };
            }
        }
        // SAFETY: as above.
        unsafe { copy_out(&received.segments, into.segments, 0) };
        let mut rows = None;
        if let (Some(told), Some(into)) = (&received.by_source, into.by_source) {
            // SAFETY: as above.
            unsafe {
                copy_out(&told.first_of, into.first_of, 0);
                copy_out(&told.topk_idx, into.topk_idx, 0);
                copy_out(&told.topk_idx, into.topk_idx_too, 0);
                copy_out(&told.topk_weights, into.topk_weights, 0);
                copy_out(&told.source_rank, into.source_rank, 0);
            }
            rows = told.first_of.last().map(|&rows| rows as u32);
        }
        let mut slots = None;
        if let (Some(told), Some(into)) = (&received.packed, into.packed) {
            // SAFETY: as above.
            unsafe {
                copy_out(&told.first, into.first, 0);
                copy_out(&told.slots, into.slots, 0);
                copy_out(&told.weights, into.weights, 0);
            }
            slots = told.first.last().map(|&slots| slots as u32);
        }
        let told = LowTold { counts: received.expert_counts, rows, slots, ..LowTold::nothing(order) };
        Ok((received.handle, told))
    }

    async unsafe fn receive_sums_into(&mut self, sent: &Combining, into: usize, _tokens: u32) -> Result<(), Error> {
        let rows = self.receive_combine(sent).await?.x;
        // SAFETY: as the caller promises.
        unsafe { copy_out(dense(&rows, rows.row_bytes())?, into, 0) };
        Ok(())
    }

    fn wait<T>(call: impl Future<Output = T>, go_on: &mut dyn FnMut() -> bool) -> Option<T> {
        block_on_while(call, go_on)
    }

    fn stream(&self) -> usize {
        0
    }
}

/// Copies numbers to the `at`-th of `address`.
///
/// # Safety
/// There is room.
unsafe fn copy_out<T>(values: &[T], address: usize, at: usize) {
    // SAFETY: as the caller promises.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), (address as *mut T).add(at), values.len()) };
}

/// Where a lease's rows lie, the first of which `first` is; 0 where there are none.
fn address(lease: &Lease<Window>, first: Span) -> Result<usize, Error> {
    if lease.rows() == 0 {
        return Ok(0);
    }
    let address = lease.place().0.address(first.offset.span(u64::from(lease.rows()) * first.len));
    Ok(address.map_err(|fault| Error::invalid("rows of a lease", lease.rows(), fault))?.as_ptr() as usize)
}

/// bf16 rows of a dispatch.
fn bf16(rows: HostRows<Window>, format: RowFormat, hidden: u32) -> Result<Tensor, Error> {
    let shape = vec![i64::from(rows.rows()), i64::from(hidden)];
    let lease = match rows {
        HostRows::Owned { bytes, .. } => return Ok(of_buffer(bytes, shape)),
        HostRows::Apart { .. } => return Err(Error::invalid("received bf16 rows", "apart", "in one piece")),
        HostRows::Leased(lease) => lease,
    };
    let address = address(&lease, lease.place().1.codes(0))?;
    let strides = Some(vec![format.codes_stride() as i64 / 2, 1]);
    Ok(Tensor { address, shape, strides, element: Element::Bf16, device: Device::Cpu, owner: Box::new(lease) })
}

/// bf16 rows as they lie. Their memory goes back to the engine when nobody uses the tensor any more.
fn of_buffer(mut rows: Buffer, shape: Vec<i64>) -> Tensor {
    let address = rows.as_mut_ptr() as usize;
    Tensor { address, shape, strides: None, element: Element::Bf16, device: Device::Cpu, owner: Box::new(rows) }
}
