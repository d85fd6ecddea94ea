//! Rows by expert: behind a dispatch's rows a launch finds the slots of their choices, and one copies each row there; one before a combine sums the
//! results of these.

use std::ops::Range;
use std::sync::Arc;

use ep_core::engine::{ByExpert, ExpertSlots, Handle, Lease};
use ep_core::layout::NO_BASE;
use ep_core::plan::{Exchange, Expansion};
use ep_core::{Endpoint as _, Error, Layout};

use super::{Array, CudaEndpoint, Rows};
use crate::args;
use crate::driver::Stream;
use crate::rank::{Call, DevicePlan};

/// Where the choices of a dispatch's rows stand.
#[derive(Debug)]
pub(super) struct Placed {
    /// Which slots are whose; on the device where a launch tells it, for nobody but the user.
    experts: ExpertSlots<CudaEndpoint>,
    alignment: u32,
    /// Rows received, or made room for.
    rows: u32,
    /// Slots that there is room for.
    room: u32,
    /// `[rows, topk]`: slot of each choice, or -1.
    slots: Array<i32>,
    /// `[ranks, local experts]`: first slot of each source.
    offsets: Array<i32>,
}

impl Placed {
    /// Room for where `rows` rows are to stand, of which the host knows `exchange`. The device finds it.
    pub(super) fn counted(
        stream: &Arc<Stream>,
        layout: &Layout,
        exchange: &Exchange,
        rows: u32,
        alignment: u32,
    ) -> Result<Self, Error> {
        let counts = exchange.expert_counts().to_vec();
        let first = Expansion::first_slots(&counts, alignment)?;
        let room = first.last().copied().unwrap_or(0);
        Self::new(stream, layout, ExpertSlots::OnHost { first, counts }, (rows, room), alignment)
    }

    /// Room for where at most `rows` rows are to stand, in at most `room` slots. The device finds it, and how many there are.
    pub(super) fn uncounted(
        stream: &Arc<Stream>,
        layout: &Layout,
        (rows, room): (u32, u32),
        alignment: u32,
    ) -> Result<Self, Error> {
        let local = layout.local_experts() as usize;
        let (first, counts) = (Array::new(stream, local + 1)?, Array::new(stream, local)?);
        Self::new(stream, layout, ExpertSlots::OnDevice { first, counts }, (rows, room), alignment)
    }

    fn new(
        stream: &Arc<Stream>,
        layout: &Layout,
        experts: ExpertSlots<CudaEndpoint>,
        (rows, room): (u32, u32),
        alignment: u32,
    ) -> Result<Self, Error> {
        let slots = Array::new(stream, rows as usize * layout.shape().topk() as usize)?;
        let offsets = Array::new(stream, layout.shape().experts() as usize)?;
        Ok(Self { experts, alignment, rows, room, slots, offsets })
    }

    /// Slots that there is room for.
    pub(super) const fn room(&self) -> u32 {
        self.room
    }

    /// What the user is told, with the weights of all slots where they have come.
    pub(super) fn told(&self, weights: Option<Array<f32>>) -> ByExpert<CudaEndpoint> {
        ByExpert { experts: self.experts.clone(), slots: self.slots.clone(), offsets: self.offsets.clone(), weights }
    }
}

/// Rows that are to stand by expert.
#[derive(Debug)]
pub(super) struct Spreading<'a> {
    /// Where the received rows lie, or their codes; and their scales.
    pub(super) x: (u64, u64),
    /// Where their choices lie; 0 where the slots are known.
    pub(super) topk_idx: u64,
    /// What brings those from headers, and all else that is learned of rows; none where it has been done.
    pub(super) unpack: Option<args::Unpack>,
    /// Of their dispatch.
    pub(super) plan: &'a DevicePlan,
    /// Where they are to stand.
    pub(super) placed: &'a Placed,
    /// Token and rank of each at its source.
    pub(super) sources: (u64, u64),
    /// Weights of their choices, and room for those of slots; 0 where they do not travel.
    pub(super) weights: (u64, u64),
    /// Whether padding becomes zeros.
    pub(super) zeros: bool,
    /// Room for the rows by expert.
    pub(super) out: &'a Rows,
}

impl CudaEndpoint {
    /// Enqueues, behind the kernels that bring the rows, what orders them by expert.
    pub(super) fn spread(&self, call: Call, spreading: &Spreading<'_>) -> Result<(), Error> {
        self.find_slots(call, spreading)?;
        let lots = self.device.lots();
        self.spread_lots(call, spreading, 0..lots)
    }

    /// Enqueues, behind the kernels that bring the choices, what finds their slots, unless these are known.
    pub(super) fn find_slots(&self, call: Call, spreading: &Spreading<'_>) -> Result<(), Error> {
        let Spreading { topk_idx, unpack, plan, placed, weights, .. } = *spreading;
        if topk_idx == 0 {
            return Ok(());
        }
        let (out_first, out_counts) = match &placed.experts {
            ExpertSlots::OnDevice { first, counts } => (first.address(), counts.address()),
            ExpertSlots::OnHost { .. } => (0, 0),
        };
        let args = args::Slots {
            unpack: unpack.unwrap_or(args::Unpack { base: NO_BASE, ..args::Unpack::default() }),
            topk_idx,
            first_of: plan.first_of(),
            counts: plan.arrived(),
            out_first,
            out_counts,
            slots: placed.slots.address(),
            offsets: placed.offsets.address(),
            out_weights: weights.1,
            rows: placed.rows,
            alignment: placed.alignment,
            room: placed.room,
            ..args::Slots::default()
        };
        // SAFETY: headers, choices, plan, slots and what is told of experts are memory of the own stream's, for as many rows, slots and experts as the
        // struct and the layout say.
        Ok(unsafe { self.device.slots(call, &args) }?)
    }

    /// Enqueues, behind the kernels that bring the rows of these lots, what copies them to their slots; with the last one padding becomes zeros, if it is to.
    pub(super) fn spread_lots(&self, call: Call, spreading: &Spreading<'_>, lots: Range<u32>) -> Result<(), Error> {
        let Spreading { x, plan, placed, sources, weights, zeros, out, .. } = *spreading;
        let all = self.device.lots();
        let args = args::Spread {
            x: x.0,
            scales: x.1,
            first_of: plan.first_of(),
            counts: plan.arrived(),
            slots: placed.slots.address(),
            offsets: placed.offsets.address(),
            source_token: sources.0,
            source_rank: sources.1,
            tokens_of: plan.tokens_of(),
            out: self.address(out),
            out_scales: self.scales(out).0,
            weights: weights.0,
            out_weights: weights.1,
            rows: placed.rows,
            room: placed.room,
            zeros: (zeros && lots.end == all).into(),
            lots: all,
            lot: lots.start,
            end_lot: lots.end,
        };
        // SAFETY: as above, and rows by source and by expert for as many rows and slots.
        Ok(unsafe { self.device.spread(call, &args) }?)
    }

    /// Room for the sums of the results of rows by expert, one for each row received: in a block that peers may pull from, where they do so
    /// and there is room.
    pub(super) fn room_for_sums(&self, handle: &Handle) -> Result<Rows, Error> {
        let (rows, results) = (handle.rows(), self.layout().row().results());
        let is_pulled = self.far().is_none() && !self.is_pulled(handle.outboxes());
        match is_pulled.then(|| self.desk.arena().take(&results, rows)).flatten() {
            Some(block) => Ok(Rows::Leased(Lease::new(self.desk.arena(), block, self.window.of(&block)))),
            None => Rows::new(self.stream(), rows, self.shape().result_bytes() as usize),
        }
    }

    /// Whether peers may pull sums of rows by expert while others are made: from a block, where it is worth it.
    pub(super) fn folds_beside(&self, tokens: u32, sums: &Rows) -> bool {
        let results = u64::from(tokens) * u64::from(self.shape().topk()) * self.shape().result_bytes();
        sums.lease().is_some() && !self.stream().is_capturing() && self.device.folds_beside(results)
    }

    /// Enqueues, before the kernels of a combine, or aside for them to wait for, what sums the results `y` of rows by expert.
    pub(super) fn fold(
        &self,
        call: Call,
        y: &Rows,
        sums: &Rows,
        (plan, placed): (&DevicePlan, &Placed),
        remainder: bool,
    ) -> Result<(), Error> {
        let args = args::Fold {
            y: self.address(y),
            y_stride: y.stride() as u64,
            slots: placed.slots.address(),
            first_of: plan.first_of(),
            out: self.address(sums),
            out_stride: sums.stride() as u64,
            rows: placed.rows,
            room: placed.room,
            remainder: remainder.into(),
            ..args::Fold::default()
        };
        // SAFETY: results, plan, slots and sums are memory of the own stream's, for as many rows and slots as the handle says.
        Ok(unsafe { self.device.fold(call, &args) }?)
    }
}
