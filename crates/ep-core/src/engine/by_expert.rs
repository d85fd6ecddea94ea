//! Rows by expert: behind a dispatch's last row each is copied to the places of its choices; before a combine's first row the results of
//! these are summed.

use std::sync::Arc;

use super::HostRows;
use super::endpoint::{ByExpert, Endpoint, ExpertSlots};
use crate::buffers::Pool;
use crate::error::Fault;
use crate::layout::{Block, Mismatch, RowFormat};
use crate::machine::{Machine, Window};
use crate::plan::{Expansion, LocalChoices};
use crate::plant::Plant;
use crate::port::{Port, Work};
use crate::roles::{Accumulator, Control, Operation, Taken};
use crate::room::NoMemory;

/// The rows of a dispatch by expert.
pub(super) struct Spread<W: Window> {
    /// `[slots, hidden]`.
    pub(super) x: HostRows<W>,
    pub(super) expansion: Arc<Expansion>,
}

/// How the rows of a dispatch are to stand by expert.
#[derive(Clone, Copy)]
pub(super) enum Order<'a> {
    /// The first row of each expert at a multiple of `alignment`. `room`: slots to make room for; absent: as many as come.
    Aligned { alignment: u32, room: Option<u32> },
    /// As in the dispatch that is replayed.
    Replayed(&'a Arc<Expansion>),
}

impl Order<'_> {
    /// Room for the rows, where each expert has so many choices unless there shall be room for more.
    pub(super) fn room<W: Window>(self, pool: &Pool, format: &RowFormat, counts: &[u32]) -> Result<HostRows<W>, Fault> {
        let slots = match self {
            Self::Replayed(expansion) => Some(expansion.rows()),
            Self::Aligned { room: Some(slots), .. } => Some(slots),
            Self::Aligned { alignment, room: None } => told_slots(counts, alignment),
        };
        // More slots than there can be would need more memory than there is.
        let slots = slots.ok_or(Fault::NoMemory { bytes: format.payload_bytes() << 31 })?;
        Ok(HostRows::landing(pool, slots, format)?)
    }
}

/// Slots of experts that have so many choices; none where they cannot be numbered.
fn told_slots(counts: &[u32], alignment: u32) -> Option<u32> {
    Expansion::first_slots(counts, alignment).ok().and_then(|first| first.last().copied())
}

/// Copies each row that came, which lies in `block` or in `taken`, to the slots of its choices in `x`; the others become zeros where `zero_spare`.
/// `counts`: choices of each expert by what the ranks told each other.
pub(super) fn spread<M: Machine>(
    operation: &Operation<'_, M>,
    port: &impl Port,
    (taken, block): (&Taken<M::Window>, Option<&Block>),
    counts: &[u32],
    (order, zero_spare): (Order<'_>, bool),
    mut x: HostRows<M::Window>,
) -> Result<Spread<M::Window>, Fault> {
    let expansion = match order {
        Order::Replayed(expansion) => Arc::clone(expansion),
        Order::Aligned { alignment, .. } => Arc::new(placed(operation, taken, counts, alignment, x.rows())?),
    };
    let mut payload = vec![0; operation.layout.row().payload_bytes() as usize];
    let off = u32::from(operation.plants(Plant::SlotOffByOne));
    for row in 0..taken.arrived {
        match block {
            Some(block) => block.gather(row, &mut payload, |from, into| port.read(from, into))?,
            None => taken.x.read(row, &mut payload)?,
        }
        for slot in expansion.slots_of(row) {
            port.charge(Work::Row { bytes: payload.len() as u64 });
            x.write((slot + off) % x.rows(), &payload)?;
        }
    }
    payload.fill(0);
    let used = expansion.first().last().copied().unwrap_or(0);
    let is_left = |slot| operation.plants(if slot < used { Plant::PaddingLeft } else { Plant::RoomLeft });
    for slot in expansion.padding().filter(|&slot| zero_spare && !is_left(slot)) {
        port.charge(Work::Row { bytes: payload.len() as u64 });
        x.write(slot, &payload)?;
    }
    Ok(Spread { x, expansion })
}

/// Where the choices of the rows that came stand, in room for `slots`.
fn placed<M: Machine>(
    operation: &Operation<'_, M>,
    taken: &Taken<M::Window>,
    counts: &[u32],
    alignment: u32,
    slots: u32,
) -> Result<Expansion, Fault> {
    let (local, ranks) = (operation.layout.local_experts(), operation.layout.topology().ranks());
    let (topk, rows) = (operation.layout.row().topk(), taken.source_rank.len());
    // Behind them there may be room for rows that did not come.
    let arrived = taken.arrived as usize;
    let topk_idx = &taken.topk_idx[..arrived * topk as usize];
    let choices = LocalChoices { topk_idx, source_rank: &taken.source_rank[..arrived] };
    let expansion = Expansion::new(choices, ranks, local, alignment).map_err(|_| {
        let last = topk_idx.iter().copied().max().unwrap_or(-1);
        let (mine, theirs) = (local.into(), (last + 1) as u64);
        Fault::Mismatch { field: "local experts of the choices received", mine, theirs, peer: operation.me }
    })?;
    let (told, found) = (told_slots(counts, alignment).unwrap_or(u32::MAX), expansion.rows());
    operation.agree("rows by expert", told, found, operation.me)?;
    let (mine, theirs) = (slots.into(), found.into());
    let too_many = |_| Fault::Mismatch { field: Mismatch::Slots.name(), mine, theirs, peer: operation.me };
    expansion.in_room(topk, rows as u32, slots).map_err(too_many)
}

/// What the user is told of an expansion; `on_device`: not on the host. `weights`: of the choices of the rows that came, and room for so many slots.
pub(super) fn told<E>(expansion: &Expansion, on_device: bool, weights: Option<(&[f32], u32)>) -> ByExpert<E>
where
    E: Endpoint<Array<i32> = Vec<i32>, Array<u32> = Vec<u32>, Array<f32> = Vec<f32>>,
{
    let (first, counts) = (expansion.first().to_vec(), expansion.counts().to_vec());
    ByExpert {
        experts: match on_device {
            true => ExpertSlots::OnDevice { first, counts },
            false => ExpertSlots::OnHost { first, counts },
        },
        slots: expansion.slots().to_vec(),
        offsets: expansion.offsets().to_vec(),
        weights: weights.map(|(weights, room)| {
            let mut of_slots = vec![0.0; room as usize];
            for (&slot, &weight) in expansion.slots().iter().zip(weights) {
                if let Some(of_slot) = usize::try_from(slot).ok().and_then(|slot| of_slots.get_mut(slot)) {
                    *of_slot = weight;
                }
            }
            of_slots
        }),
    }
}

/// Room for the sums of `rows` rows.
pub(super) fn sums<W: Window>(pool: &Pool, rows: u32, row_bytes: usize) -> Result<HostRows<W>, NoMemory> {
    Ok(HostRows::Owned { bytes: pool.take((rows as usize).saturating_mul(row_bytes))?, row_bytes })
}

/// Sums the results `y [slots, hidden]` of each received row's choices, ascending, into `sums [rows, hidden]`; `remainder`: what rounding these leaves.
pub(super) fn reduce<M: Machine>(
    operation: &Operation<'_, M>,
    y: &HostRows<M::Window>,
    expansion: &Expansion,
    sums: &mut HostRows<M::Window>,
    remainder: bool,
) -> Result<(), Fault> {
    let mut control = Control::open(operation);
    let port = control.port();
    let mut sum = Accumulator::new(operation.layout.shape().hidden(), 0);
    let mut scratch = vec![0; y.row_bytes()];
    for row in 0..sums.rows() {
        sum.clear();
        let mut add = |slot| -> Result<(), Fault> {
            port.charge(Work::Reduce { bytes: y.row_bytes() as u64 });
            sum.add(y.borrow(slot, &mut scratch)?);
            Ok(())
        };
        match operation.plants(Plant::ChoicesDescending) {
            true => expansion.slots_of(row).rev().try_for_each(&mut add)?,
            false => expansion.slots_of(row).try_for_each(&mut add)?,
        }
        sums.fill(row, |_, into| {
            match remainder {
                true => sum.finish_remainder(into),
                false => sum.finish(into),
            }
            Ok(())
        })?;
    }
    Ok(())
}
