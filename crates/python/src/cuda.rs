//! GPUs: what Python has allocated is read and written where it lies, on the endpoint's stream. Results come from the endpoint's pool
//! or arena, which get them back, in the order of that stream, when their tensors are gone.

use std::any::Any;
use std::future::Future;
use std::sync::{Arc, Mutex};

use moexpress::cuda::driver::Scratch;
use moexpress::cuda::{
    Array, Cluster, Combining, CudaEndpoint, Dispatching, Early, Event, LowHandle, LowPlaces, LowPlacesBySource,
    LowPlacesPacked, LowScales, Ready, Rows, ScaleStrides, Signals,
};
use moexpress::engine::Scalar;
use moexpress::engine::low_latency::{LowOrder, LowRoutingOf};
use moexpress::layout::RowFormat;
use moexpress::plan::Expansion;
use moexpress::{Endpoint as _, Error, Layout, LowLatency as _, Settings, Shape, Topology};

use crate::backend::{Backend, LowInto, LowTold, RawRows, RowsOut, Typed, poll};
use crate::calls::Calls;
use crate::dlpack::{Device, Element, Tensor};
use crate::early::{self, EarlyOut, RawReady};
use crate::far;
use crate::guard::Own;
use crate::join::Options;
use crate::rank::Rank;
use crate::room::{Given, LowRoom, Owner, Scales};

/// Rows lie at multiples of this.
const ALIGN: usize = 16;
/// Bytes of a scale, or a pack of them, in a tensor.
const SCALE: usize = 4;

/// Makes a rank.
pub(crate) fn join(
    shape: Shape,
    topology: Topology,
    settings: Settings,
    options: &Options,
    member: &Arc<ep_bootstrap::Member>,
) -> Result<Box<dyn Calls>, Error> {
    let layout = Layout::new(&shape, &topology, &settings)?;
    let mut builder = Cluster::builder(topology).settings(settings).gpus(vec![options.gpu]);
    // 0: the automatic choice.
    if options.multiprocessors > 0 {
        builder = builder.multiprocessors(options.multiprocessors);
    }
    if let Some(bytes) = options.arena_at_first {
        builder = builder.arena_at_first(bytes);
    }
    let builder = far::between_gpus(builder, far::named(options, &topology)?)?;
    let mut endpoint = builder.join(shape, member)?;
    // Which streams read results it is told by its calls.
    endpoint.read_beside(true);
    // A framework asks the driver for what waits there whenever it likes.
    endpoint.wait_for_kernels(options.wait_for_kernels || endpoint.copies_between_nodes());
    Ok(Box::new(Rank::new(endpoint, layout)))
}

fn device(endpoint: &CudaEndpoint) -> Device {
    Device::Cuda(endpoint.stream().device().ordinal() as i32)
}

/// Where the results of a low-latency dispatch go; FP8 rows as they travel to `travelling`, if there is one.
fn places(into: &LowInto, travelling: Option<&Arc<Scratch>>) -> LowPlaces {
    let LowInto {
        x,
        scales,
        expert_counts,
        segments,
        source_token,
        by_source,
        packed,
        most,
        stats,
        owner,
        of_caller,
        ..
    } = into.clone();
    let x = travelling.map_or(x, |memory| memory.address() as usize);
    let scales = scales.filter(|_| travelling.is_none());
    let scales = scales.map(|(address, strides)| {
        let [expert, row, word] = strides.map(|stride| stride as u64 * SCALE as u64);
        LowScales { address: address as u64, expert, row, word }
    });
    let [x, expert_counts, segments, source_token] = [x, expert_counts, segments, source_token].map(|at| at as u64);
    // What of the caller's a graph reads and writes, whoever captures it keeps: a framework has a pool for that, and uses it again.
    let owner = Some(Arc::new(((!of_caller).then_some(owner), travelling.cloned())) as Owner);
    let by_source = by_source.map(|told| LowPlacesBySource {
        first_of: told.first_of as u64,
        topk_idx: told.topk_idx as u64,
        topk_idx_too: told.topk_idx_too as u64,
        topk_weights: told.topk_weights as u64,
        source_rank: told.source_rank as u64,
    });
    let packed = packed.map(|told| LowPlacesPacked {
        first: told.first as u64,
        slots: told.slots as u64,
        weights: told.weights as u64,
    });
    let stats = stats.map_or(0, |at| at as u64);
    LowPlaces { x, scales, expert_counts, segments, source_token, by_source, packed, most_rows: most, stats, owner }
}

/// Memory for rows of odd sizes as they travel: kernels write to multiples of 16 bytes, and codes and scales apart where rows are a multiple of 16
/// elements. Tensors have one row right behind the other.
fn travelling(endpoint: &CudaEndpoint, into: &LowInto) -> Result<Option<Arc<Scratch>>, Error> {
    let format = RowFormat::new(endpoint.shape());
    let row_bytes = if into.scales.is_some() { format.codes_bytes() } else { format.payload_bytes() };
    if row_bytes.is_multiple_of(ALIGN as u64) {
        return Ok(None);
    }
    let stride = format.payload_stride() as usize;
    endpoint.bytes_room(into.rows as usize * stride).map(Some)
}

/// Takes them apart.
///
/// # Safety
/// As [`Backend::receive_into`] of `into`.
unsafe fn apart(endpoint: &CudaEndpoint, into: &LowInto, travelling: Option<&Scratch>) -> Result<(), Error> {
    let Some(memory) = travelling else { return Ok(()) };
    let (format, rows) = (RowFormat::new(endpoint.shape()), into.rows);
    let (from, stride) = (memory.address() as usize, format.payload_stride() as usize);
    let width = if into.scales.is_some() { format.codes_bytes() } else { format.payload_bytes() } as usize;
    // SAFETY: as the caller promises; `travelling` has room for so many rows.
    unsafe { copy(endpoint, (into.x, width), (from, stride), width, rows) }?;
    let Some((scales, _)) = into.scales else { return Ok(()) };
    let scales_bytes = (format.scales_bytes() as usize).next_multiple_of(SCALE);
    let from_scales = (from + format.scales_offset() as usize, stride);
    // SAFETY: as above.
    unsafe { copy(endpoint, (scales, scales_bytes), from_scales, scales_bytes, rows) }
}

/// A place in memory: its address, and the bytes from one row to the next.
type Place = (usize, usize);

/// Copies rows of `width` bytes, enqueued.
///
/// # Safety
/// As [`copy_rows`](moexpress::cuda::driver::Stream::copy_rows).
unsafe fn copy(endpoint: &CudaEndpoint, to: Place, from: Place, width: usize, rows: u32) -> Result<(), Error> {
    let place = |(address, stride): Place| (address as u64, stride);
    // SAFETY: as the caller promises.
    Ok(unsafe { endpoint.stream().copy_rows(place(to), place(from), width, rows as usize) }?)
}

/// Rows that leave, bf16: `[rows, hidden]`, with strides.
fn bf16(endpoint: &CudaEndpoint, rows: Rows) -> Tensor {
    let (address, count, stride) = (endpoint.address_of(&rows) as usize, rows.rows(), rows.stride());
    Tensor {
        address,
        shape: vec![i64::from(count), i64::from(endpoint.shape().hidden())],
        strides: Some(vec![stride as i64 / 2, 1]),
        element: Element::Bf16,
        device: device(endpoint),
        owner: Box::new(Own::new(Mutex::new(rows))),
    }
}

/// Whether kernels read rows of so many bytes where they lie.
const fn lies_well(address: usize, row_bytes: usize) -> bool {
    row_bytes.is_multiple_of(ALIGN) && address.is_multiple_of(ALIGN)
}

/// Whether kernels take codes at `address` and scales elsewhere, as they lie.
fn takes_apart(endpoint: &CudaEndpoint, address: usize) -> bool {
    (endpoint.shape().hidden() as usize).is_multiple_of(ALIGN) && address.is_multiple_of(ALIGN)
}

impl Backend for CudaEndpoint {
    unsafe fn rows_in(&mut self, rows: &RawRows) -> Result<Rows, Error> {
        let shape = *self.shape();
        let hidden = shape.hidden() as usize;
        let row_bytes = if rows.scales.is_some() { shape.row_bytes() } else { shape.result_bytes() } as usize;
        if rows.scales.is_none() && lies_well(rows.address, row_bytes) && rows.rows > 0 {
            // SAFETY: as the caller promises.
            return Ok(unsafe { self.foreign_rows(rows.address as u64, rows.rows, row_bytes) });
        }
        if let Some(scales) = rows.scales.filter(|_| takes_apart(self, rows.address) && rows.rows > 0) {
            let [row, word] = scales.strides.map(|stride| stride as u64 * SCALE as u64);
            let (codes, scales) = (rows.address as u64, scales.address as u64);
            // SAFETY: as the caller promises.
            return unsafe { self.foreign_rows_apart(codes, scales, ScaleStrides { row, word }, rows.rows) };
        }
        let own = self.room(rows.rows, row_bytes)?;
        if rows.rows == 0 {
            return Ok(own);
        }
        let (to, stride) = (self.address_of(&own) as usize, own.stride());
        let Some(scales) = &rows.scales else {
            // SAFETY: as the caller promises; there is room for so many rows.
            unsafe { copy(self, (to, stride), (rows.address, row_bytes), row_bytes, rows.rows) }?;
            return Ok(own);
        };
        let format = RowFormat::new(&shape);
        // SAFETY: as above.
        unsafe { copy(self, (to, stride), (rows.address, hidden), hidden, rows.rows) }?;
        if scales.strides[1] != 1 {
            return Err(Error::invalid("stride of a row's scales", scales.strides[1], "1 on GPUs"));
        }
        let to = (to + format.scales_offset() as usize, stride);
        let from = (scales.address, scales.strides[0] as usize * SCALE);
        // SAFETY: as above.
        unsafe { copy(self, to, from, format.scales_bytes() as usize, rows.rows) }?;
        Ok(own)
    }

    unsafe fn array_in<T: Scalar>(&mut self, address: usize, len: usize, keep: bool) -> Result<Array<T>, Error> {
        if !keep && len > 0 {
            // SAFETY: as the caller promises.
            return Ok(unsafe { self.foreign_array(address as u64, len) });
        }
        // Of no numbers, too: an address of 0 would say that there is no array.
        let own = self.array_room(len)?;
        let bytes = len * size_of::<T>();
        // SAFETY: as the caller promises; there is room for so many numbers.
        unsafe { copy(self, (own.address() as usize, bytes), (address, bytes), bytes, 1) }?;
        Ok(own)
    }

    fn choices_of(handle: &LowHandle) -> Array<i64> {
        handle.topk_idx().clone()
    }

    unsafe fn expert_rows_in(&mut self, address: usize, told: &LowTold) -> Result<Rows, Error> {
        let (room, row_bytes) = (told.order.rows(self.layout())?, self.shape().result_bytes() as usize);
        if lies_well(address, row_bytes) {
            // SAFETY: as the caller promises; kernels read the rows that came, and no others.
            return Ok(unsafe { self.foreign_rows(address as u64, room, row_bytes) });
        }
        let (own, rows) = (self.room(room, row_bytes)?, told.result_rows().unwrap_or(room));
        if rows > 0 {
            // SAFETY: as the caller promises: so many are there, and there is room for them.
            unsafe {
                copy(self, (self.address_of(&own) as usize, own.stride()), (address, row_bytes), row_bytes, rows)
            }?;
        }
        Ok(own)
    }

    fn rows_out(&mut self, rows: Rows) -> Result<RowsOut, Error> {
        let format = RowFormat::new(self.shape());
        if format.scales_bytes() == 0 {
            return Ok(RowsOut { x: bf16(self, rows), scales: None });
        }
        let (count, places) = (rows.rows(), [self.address_of(&rows), self.scales_of(&rows).0].map(|at| at as usize));
        Ok(RowsOut::apart(&format, count, places, device(self), Arc::new(Own::new(Mutex::new(rows)))))
    }

    fn results_out(&mut self, rows: Rows) -> Result<Tensor, Error> {
        Ok(bf16(self, rows))
    }

    fn array_out<T: Typed>(&mut self, array: Array<T>, shape: Vec<i64>) -> Result<Tensor, Error> {
        let (address, device) = (array.address() as usize, device(self));
        Ok(Tensor { address, shape, strides: None, element: T::ELEMENT, device, owner: Box::new(Own::new(array)) })
    }

    fn low_scales(&self) -> Scales {
        if self.shape().hidden().is_multiple_of(ALIGN as u32) { Scales::ByColumn } else { Scales::ByRow }
    }

    fn low_room(&mut self, layout: &Layout, order: LowOrder, given: Option<Given>) -> Result<LowRoom, Error> {
        LowRoom::new(layout, &device(self), self.low_scales(), order, given, |bytes| {
            let memory = self.bytes_room(bytes)?;
            Ok((memory.address() as usize, Arc::new(Own::new(memory)) as Owner))
        })
    }

    fn early(&mut self, rows: u32, multiprocessors: Option<u32>) -> Result<EarlyOut, Error> {
        let made = CudaEndpoint::early(self, rows, multiprocessors)?;
        let (all, device) = (early::shape(self.layout(), made.blocks()), device(self));
        let tensor = |address: u64, shape: &[i64]| Tensor {
            address: address as usize,
            shape: shape.to_vec(),
            strides: None,
            element: Element::I64,
            device: device.clone(),
            owner: Box::new(made.memory()),
        };
        Ok(EarlyOut {
            epoch: tensor(made.address(), &[1]),
            stopped: tensor(made.stopped(), &[1]),
            arrived: tensor(made.arrived(), &all),
            expected: tensor(made.expected(), &all),
            ready: tensor(made.ready(), &all),
            early: Box::new(made),
        })
    }

    async fn send_dispatch_early(
        &mut self,
        x: &Rows,
        routing: &LowRoutingOf<Self>,
        early: &(dyn Any + Send + Sync),
    ) -> Result<Dispatching, Error> {
        let Some(early) = early.downcast_ref::<Early>() else { return Err(early::unsupported()) };
        // Such rows are taken apart behind the receiving half.
        let hidden = self.shape().hidden() as usize;
        if matches!(self.shape().element(), moexpress::Element::Fp8(_)) && !hidden.is_multiple_of(ALIGN) {
            return Err(Error::unsupported("early consumers", format!("FP8 rows of a multiple of {ALIGN} elements")));
        }
        CudaEndpoint::send_dispatch_early(self, x, routing, early).await
    }

    async unsafe fn send_combine_ready(
        &mut self,
        y: usize,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
        ready: &RawReady,
    ) -> Result<Combining, Error> {
        let row_bytes = self.shape().result_bytes();
        // Others would be copied, before they are there.
        for (what, value) in [("bytes of a row of y", row_bytes), ("address of y", y as u64)] {
            if !value.is_multiple_of(ALIGN as u64) {
                let limit = format_args!("a multiple of {ALIGN}, for results that are still to be made");
                return Err(Error::invalid(what, value, limit));
            }
        }
        // SAFETY: as the caller promises, for this and what follows.
        let rows = unsafe { self.expert_rows_in(y, &LowTold::nothing(handle.order())) }?;
        let signals = match ready.signals {
            None => Signals::Early,
            Some((address, words)) => {
                // SAFETY: as above.
                let signals = unsafe { self.foreign_array(address as u64, words) };
                if ready.rows == 0 { Signals::Experts(signals) } else { Signals::Blocks { signals, rows: ready.rows } }
            }
        };
        let ready = Ready { signals, due: ready.due, multiprocessors: ready.multiprocessors };
        CudaEndpoint::send_combine_ready(self, &rows, handle, topk_weights, &ready).await
    }

    async unsafe fn receive_into(&mut self, sent: &Dispatching, into: &LowInto) -> Result<(LowHandle, LowTold), Error> {
        let travelling = travelling(self, into)?;
        let places = places(into, travelling.as_ref());
        // SAFETY: as the caller promises.
        let received = unsafe { self.receive_dispatch_into(sent, &places) }.await?;
        // SAFETY: as the caller promises.
        unsafe { apart(self, into, travelling.as_deref()) }?;
        let told = LowTold::nothing(received.handle.order());
        Ok((received.handle, told))
    }

    async unsafe fn dispatch_into(
        &mut self,
        x: &Rows,
        routing: &LowRoutingOf<Self>,
        into: &LowInto,
        waits: bool,
    ) -> Result<(LowHandle, LowTold), Error> {
        let travelling = travelling(self, into)?;
        let places = places(into, travelling.as_ref());
        // SAFETY: as the caller promises.
        let call = unsafe { self.low_latency_dispatch_into(x, routing, &places, waits) };
        let received = call.await?;
        // SAFETY: as the caller promises.
        unsafe { apart(self, into, travelling.as_deref()) }?;
        let mut told = LowTold::nothing(received.handle.order());
        if waits {
            told.counts = self.values(&received.expert_counts)?;
            let first_of = received.by_source.as_ref().map(|told| self.values(&told.first_of)).transpose()?;
            told.rows = first_of.and_then(|first| first.last().map(|&rows| rows as u32));
            if let LowOrder::Packed { alignment, .. } = told.order {
                let counts: Vec<u32> = told.counts.iter().map(|&count| count as u32).collect();
                told.slots = Expansion::first_slots(&counts, alignment)?.last().copied();
            }
        }
        Ok((received.handle, told))
    }

    async unsafe fn combine_into(
        &mut self,
        y: &Rows,
        handle: &LowHandle,
        topk_weights: Option<&Array<f32>>,
        into: usize,
        tokens: u32,
    ) -> Result<(), Error> {
        let row_bytes = self.shape().result_bytes() as usize;
        if row_bytes.is_multiple_of(ALIGN) && into.is_multiple_of(ALIGN) && tokens > 0 {
            // SAFETY: as the caller promises.
            let rows = unsafe { self.foreign_rows(into as u64, tokens, row_bytes) };
            return self.low_latency_combine_into(y, handle, topk_weights, rows).await.map(drop);
        }
        self.check_at_once()?;
        let sent = self.send_combine(y, handle, topk_weights).await?;
        // SAFETY: as the caller promises.
        unsafe { self.receive_sums_into(&sent, into, tokens) }.await
    }

    async unsafe fn receive_sums_into(&mut self, sent: &Combining, into: usize, tokens: u32) -> Result<(), Error> {
        let row_bytes = self.shape().result_bytes() as usize;
        if row_bytes.is_multiple_of(ALIGN) && into.is_multiple_of(ALIGN) && tokens > 0 {
            // SAFETY: as the caller promises.
            let rows = unsafe { self.foreign_rows(into as u64, tokens, row_bytes) };
            return self.receive_combine_into(sent, rows).await.map(drop);
        }
        let own = self.room(tokens, row_bytes)?;
        let from = (self.address_of(&own) as usize, own.stride());
        let received = self.receive_combine_into(sent, own).await?;
        // SAFETY: as the caller promises; the rows were made for as many tokens.
        unsafe { copy(self, (into, row_bytes), from, row_bytes, tokens) }?;
        drop(received);
        Ok(())
    }

    fn wait<T>(call: impl Future<Output = T>, go_on: &mut dyn FnMut() -> bool) -> Option<T> {
        poll(call, go_on, std::hint::spin_loop)
    }

    fn is_arena_full(&self) -> bool {
        CudaEndpoint::is_arena_full(self)
    }

    fn arena_bytes(&self) -> Option<u64> {
        Some(CudaEndpoint::arena_bytes(self))
    }

    fn stream(&self) -> usize {
        CudaEndpoint::stream(self).lend() as usize
    }

    unsafe fn ends_behind(&mut self, stream: usize) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { CudaEndpoint::ends_behind(self, stream) }
    }

    fn trim(&mut self) -> Result<(), Error> {
        CudaEndpoint::trim(self)
    }

    unsafe fn lasts(&mut self, stream: usize) {
        // SAFETY: as the caller promises.
        unsafe { CudaEndpoint::lasts(self, stream) };
    }

    unsafe fn follow(&mut self, stream: usize) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { CudaEndpoint::follow(self, stream) }
    }

    unsafe fn precede(event: &Event, stream: usize) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        unsafe { event.precede(stream) }
    }

    unsafe fn lead(&mut self, stream: usize) -> Result<(), Error> {
        // SAFETY: as the caller promises.
        Ok(unsafe { CudaEndpoint::stream(self).lead(stream) }?)
    }
}
