//! Rows by expert: a launch behind a dispatch's rows copies each to the slots of its choices, and one before a combine sums the results of
//! these.

use std::sync::Arc;

use ep_core::engine::{ByExpert, Handle, Lease};
use ep_core::plan::{Exchange, Expansion};
use ep_core::{Endpoint as _, Error, Layout};

use super::{Array, CudaEndpoint, Rows};
use crate::args;
use crate::driver::Stream;
use crate::rank::{Call, DevicePlan};

/// Where the choices of a dispatch's rows stand.
#[derive(Debug)]
pub(super) struct Placed {
    /// `[local experts + 1]`: first slot of each expert; last, all slots.
    first: Vec<u32>,
    /// `[local experts]`: choices of each.
    counts: Vec<u32>,
    alignment: u32,
    rows: u32,
    /// `[rows, topk]`: slot of each choice, or -1.
    slots: Array<i32>,
    /// `[ranks, local experts]`: first slot of each source.
    offsets: Array<i32>,
}

impl Placed {
    /// Room for where `rows` rows are to stand. The device finds it.
    pub(super) fn new(
        stream: &Arc<Stream>,
        layout: &Layout,
        exchange: &Exchange,
        rows: u32,
        alignment: u32,
    ) -> Result<Self, Error> {
        let counts = exchange.expert_counts().to_vec();
        let first = Expansion::first_slots(&counts, alignment)?;
        let slots = Array::new(stream, rows as usize * layout.shape().topk() as usize)?;
        let offsets = Array::new(stream, layout.shape().experts() as usize)?;
        Ok(Self { first, counts, alignment, rows, slots, offsets })
    }

    /// Slots, padding included.
    pub(super) fn rows(&self) -> u32 {
        self.first.last().copied().unwrap_or(0)
    }

    /// What the user is told.
    pub(super) fn told(&self) -> ByExpert<CudaEndpoint> {
        ByExpert {
            first: self.first.clone(),
            counts: self.counts.clone(),
            slots: self.slots.clone(),
            offsets: self.offsets.clone(),
        }
    }
}

/// Rows that are to stand by expert.
#[derive(Debug)]
pub(super) struct Spreading<'a> {
    /// Where the received rows lie, or their codes; and their scales.
    pub(super) x: (u64, u64),
    /// Where their choices lie; 0 where the slots are known.
    pub(super) topk_idx: u64,
    /// Of their dispatch.
    pub(super) plan: &'a DevicePlan,
    /// Where they are to stand.
    pub(super) placed: &'a Placed,
    /// Room for the rows by expert.
    pub(super) out: &'a Rows,
}

impl CudaEndpoint {
    /// Enqueues, behind the kernels that bring the rows, what orders them by expert.
    pub(super) fn spread(&self, call: Call, spreading: &Spreading<'_>) -> Result<(), Error> {
        let Spreading { x, topk_idx, plan, placed, out } = *spreading;
        let args = args::Spread {
            x: x.0,
            scales: x.1,
            topk_idx,
            first_of: plan.first_of(),
            counts: plan.arrived(),
            slots: placed.slots.address(),
            offsets: placed.offsets.address(),
            out: self.address(out),
            out_scales: self.scales(out).0,
            rows: placed.rows,
            alignment: placed.alignment,
            room: placed.rows(),
            ..args::Spread::default()
        };
        // SAFETY: rows, choices, plan and slots are memory of the own stream's, for as many rows and slots as the struct says.
        Ok(unsafe { self.device.spread(call, &args) }?)
    }

    /// Room for the sums of the results of rows by expert, one for each row received: in a block that peers may pull from, where they do so
    /// and there is room.
    pub(super) fn room_for_sums(&self, handle: &Handle) -> Result<Rows, Error> {
        let (rows, results) = (handle.rows(), self.layout().row().results());
        let is_pulled = self.far().is_none() && !self.is_pulled(handle.outboxes());
        match is_pulled.then(|| self.desk.arena().take(&results, rows)).flatten() {
            Some(block) => Ok(Rows::Leased(Lease::new(self.desk.arena(), block, self.window.clone()))),
            None => Rows::new(self.stream(), rows, self.shape().result_bytes() as usize),
        }
    }

    /// Enqueues, before the kernels of a combine, what sums the results `y` of rows by expert.
    pub(super) fn fold(&self, call: Call, y: &Rows, sums: &Rows, placed: &Placed) -> Result<(), Error> {
        let args = args::Fold {
            y: self.address(y),
            y_stride: y.stride() as u64,
            slots: placed.slots.address(),
            out: self.address(sums),
            out_stride: sums.stride() as u64,
            rows: placed.rows,
            room: placed.rows(),
        };
        // SAFETY: results, slots and sums are memory of the own stream's, for as many rows and slots as the handle says.
        Ok(unsafe { self.device.fold(call, &args) }?)
    }
}
