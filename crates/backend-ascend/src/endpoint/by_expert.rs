//! Rows by expert: a launch behind that of a dispatch's rows copies each to the places of its choices, and one before a combine sums the results
//! of these.

use std::sync::Arc;

use ep_core::engine::{ByExpert, ExpertSlots};
use ep_core::layout::Mismatch;
use ep_core::plan::{Exchange, Expansion};
use ep_core::{Element, Endpoint as _, Error, Failure, Fault, Phase, Shape};

use super::replayed::DevicePlan;
use super::rows::Held;
use super::{Array, AscendEndpoint, Rows};
use crate::args::{Fold, Launch, Spread, SpreadEnd};
use crate::driver::Device;

/// Where the choices of a dispatch's rows stand, on the device.
#[derive(Debug)]
pub(super) struct Placed {
    /// `[local experts + 1]`: first slot of each expert; last, behind all of their slots.
    first: Vec<u32>,
    /// `[local experts]`: choices of each.
    counts: Vec<u32>,
    /// Both for the user, where they are to stay here.
    for_user: Option<[Array<u32>; 2]>,
    /// Slots that there is room for.
    room: u32,
    /// `first`.
    first_on_device: Array<u32>,
    /// `[rows, topk]`: slot of each choice, or -1.
    slots: Array<i32>,
    /// `[ranks, local experts]`: first slot of each source.
    offsets: Array<i32>,
}

impl Placed {
    /// Room for where `rows` rows are to stand. The device finds it. `room`: slots to make room for, where the user is not to be told of them on
    /// the host.
    pub(super) fn new(
        device: &Arc<Device>,
        shape: &Shape,
        exchange: &Exchange,
        (rows, room): (u32, Option<u32>),
        alignment: u32,
    ) -> Result<Self, Error> {
        let counts = exchange.expert_counts().to_vec();
        let first = Expansion::first_slots(&counts, alignment)?;
        let on_device = |values: &[u32]| Array::from_values(device, values);
        Ok(Self {
            for_user: room.map(|_| Ok::<_, Error>([on_device(&first)?, on_device(&counts)?])).transpose()?,
            room: room.unwrap_or_else(|| first.last().copied().unwrap_or(0)),
            first_on_device: Array::from_values(device, &first)?,
            slots: Array::filled(device, rows as usize * shape.topk() as usize, 0xff)?,
            offsets: Array::filled(device, (shape.experts()) as usize, 0xff)?,
            first,
            counts,
        })
    }

    /// Slots that there is room for.
    pub(super) const fn room(&self) -> u32 {
        self.room
    }

    /// Slots that the choices take, up to the last expert's alignment.
    pub(super) fn taken(&self) -> u32 {
        self.first.last().copied().unwrap_or(0)
    }

    /// What the user is told.
    pub(super) fn told(&self) -> ByExpert<AscendEndpoint> {
        let experts = match &self.for_user {
            Some([first, counts]) => ExpertSlots::OnDevice { first: first.clone(), counts: counts.clone() },
            None => ExpertSlots::OnHost { first: self.first.clone(), counts: self.counts.clone() },
        };
        ByExpert { experts, slots: self.slots.clone(), offsets: self.offsets.clone(), weights: None }
    }

    fn memory(&self) -> [Held; 3] {
        [self.first_on_device.memory(), self.slots.memory(), self.offsets.memory()]
    }
}

/// Rows that are to stand by expert.
#[derive(Debug)]
pub(super) struct Spreading<'a> {
    /// Where.
    pub(super) placed: &'a Placed,
    /// Their choices; none where the slots are known.
    pub(super) topk_idx: Option<&'a Array<i64>>,
    /// How many come.
    pub(super) rows: u32,
    /// Room for the rows by expert.
    pub(super) out: Rows,
}

impl AscendEndpoint {
    /// Room for so many rows by expert.
    pub(super) fn room_by_expert(&self, slots: u32) -> Result<Rows, Error> {
        let is_coded = self.shape().element() != Element::Bf16;
        Rows::landing(self.device.device(), slots, self.shape().row_bytes() as usize, is_coded)
    }

    /// Launches, behind a dispatch, what orders its rows `x` by expert.
    pub(super) fn spread(
        &mut self,
        launch: Launch,
        x: &Rows,
        on_device: &DevicePlan,
        spreading: &Spreading<'_>,
    ) -> Result<(), Error> {
        let Spreading { placed, topk_idx, rows, ref out } = *spreading;
        let args = Spread {
            launch: Launch { follows: 1, ..launch },
            x: x.address(),
            topk_idx: topk_idx.map_or(0, Array::address),
            first_of: on_device.first_of.address(),
            first: placed.first_on_device.address(),
            counts: on_device.arrived.address(),
            slots: placed.slots.address(),
            offsets: placed.offsets.address(),
            out: out.address(),
            rows,
            known: topk_idx.is_none().into(),
            ..Spread::default()
        };
        self.keep([x.memory(), out.memory()].into_iter().chain(placed.memory()));
        self.keep(topk_idx.map(Array::memory));
        // SAFETY: rows, plan and slots are of this device, as many and as long as the struct says, kept until the launch has ended. Of this rank nothing
        // else runs but the dispatch.
        Ok(unsafe { self.device.spread(args) }?)
    }

    /// There are more choices of the rows that came than there is room for: some rank's tokens name an expert more than once.
    pub(super) fn refuse_choices(&mut self, placed: &Placed) -> Error {
        let (mine, theirs) = (placed.room.into(), placed.taken().into());
        self.refuse_rows(Fault::Mismatch { field: Mismatch::Slots.name(), mine, theirs, peer: self.desk.rank() })
    }

    /// How what [`AscendEndpoint::spread`] launched has ended.
    pub(super) fn check_spread(&mut self, placed: &Placed) -> Result<(), Error> {
        let me = self.desk.rank();
        let fault = match self.device.spread_end()? {
            SpreadEnd::Well => return Ok(()),
            // A core of this rank is nobody's fault but the device's.
            SpreadEnd::Late => Fault::PeerGone { peer: me, phase: Phase::Rows },
            SpreadEnd::OtherChoices => {
                let told = placed.counts.iter().map(|&count| u64::from(count)).sum();
                Fault::Mismatch { field: "choices of the rows received", mine: told, theirs: told + 1, peer: me }
            }
        };
        Err(self.refuse_rows(fault))
    }

    /// What came is of no use.
    fn refuse_rows(&mut self, fault: Fault) -> Error {
        let me = self.desk.rank();
        let failure = Failure { op: self.desk.next_op().saturating_sub(1), culprit: me, reporter: me, fault };
        tracing::error!(%failure, "operation failed");
        self.desk.set_poisoned(Some(failure));
        Error::Failed(failure)
    }

    /// Launches, before a combine, what sums the results `y` of rows by expert. The sums, one for each received row.
    pub(super) fn fold(&mut self, launch: Launch, y: &Rows, rows: u32, placed: &Placed) -> Result<Rows, Error> {
        let sums = Rows::new(self.device.device(), rows, self.shape().result_bytes() as usize)?;
        let args = Fold {
            launch: Launch { follows: 1, ..launch },
            y: y.address(),
            y_stride: y.row_bytes() as u64,
            slots: placed.slots.address(),
            out: sums.address(),
            out_stride: sums.row_bytes() as u64,
            rows,
            reserved: 0,
        };
        self.keep([y.memory(), sums.memory()].into_iter().chain(placed.memory()));
        self.launched();
        // SAFETY: rows and slots are of this device, as many and as long as the struct says, kept until the launch has ended. What this rank launched
        // before has ended.
        unsafe { self.device.fold(&args) }?;
        Ok(sums)
    }
}
