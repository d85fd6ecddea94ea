//! Rows by expert: behind a dispatch's last row each is copied to the places of its choices; before a combine's first row the results of
//! these are summed.

use std::sync::Arc;

use super::HostRows;
use super::endpoint::{ByExpert, Endpoint};
use crate::buffers::Pool;
use crate::error::Fault;
use crate::layout::{Block, RowFormat};
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
    /// The first row of each expert at a multiple of this.
    Aligned(u32),
    /// As in the dispatch that is replayed.
    Replayed(&'a Arc<Expansion>),
}

impl Order<'_> {
    /// Room for the rows, where each expert has so many choices.
    pub(super) fn room<W: Window>(self, pool: &Pool, format: &RowFormat, counts: &[u32]) -> Result<HostRows<W>, Fault> {
        let slots = match self {
            Self::Replayed(expansion) => Some(expansion.rows()),
            Self::Aligned(alignment) => {
                Expansion::first_slots(counts, alignment).ok().and_then(|first| first.last().copied())
            }
        };
        // More slots than there can be would need more memory than there is.
        let slots = slots.ok_or(Fault::NoMemory { bytes: format.payload_bytes() << 31 })?;
        Ok(HostRows::landing(pool, slots, format)?)
    }
}

/// Copies each row that came, which lies in `block` or in `taken`, to the slots of its choices in `x`; the others become zeros.
pub(super) fn spread<M: Machine>(
    operation: &Operation<'_, M>,
    port: &impl Port,
    (taken, block): (&Taken<M::Window>, Option<&Block>),
    order: Order<'_>,
    mut x: HostRows<M::Window>,
) -> Result<Spread<M::Window>, Fault> {
    let expansion = match order {
        Order::Replayed(expansion) => Arc::clone(expansion),
        Order::Aligned(alignment) => Arc::new(placed(operation, taken, alignment, x.rows())?),
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
    for slot in expansion.padding().filter(|_| !operation.plants(Plant::PaddingLeft)) {
        port.charge(Work::Row { bytes: payload.len() as u64 });
        x.write(slot, &payload)?;
    }
    Ok(Spread { x, expansion })
}

/// Where the choices of the rows that came stand. `slots`: how many there are by what the ranks told each other.
fn placed<M: Machine>(
    operation: &Operation<'_, M>,
    taken: &Taken<M::Window>,
    alignment: u32,
    slots: u32,
) -> Result<Expansion, Fault> {
    let (local, ranks) = (operation.layout.local_experts(), operation.layout.topology().ranks());
    let choices = LocalChoices { topk_idx: &taken.topk_idx, source_rank: &taken.source_rank };
    let expansion = Expansion::new(choices, ranks, local, alignment).map_err(|_| {
        let last = taken.topk_idx.iter().copied().max().unwrap_or(-1);
        let (mine, theirs) = (local.into(), (last + 1) as u64);
        Fault::Mismatch { field: "local experts of the choices received", mine, theirs, peer: operation.me }
    })?;
    operation.agree("rows by expert", slots, expansion.rows(), operation.me)?;
    Ok(expansion)
}

/// What the user is told of an expansion.
pub(super) fn told<E: Endpoint<Array<i32> = Vec<i32>>>(expansion: &Expansion) -> ByExpert<E> {
    ByExpert {
        first: expansion.first().to_vec(),
        counts: expansion.counts().to_vec(),
        slots: expansion.slots().to_vec(),
        offsets: expansion.offsets().to_vec(),
    }
}

/// Room for the sums of `rows` rows.
pub(super) fn sums<W: Window>(pool: &Pool, rows: u32, row_bytes: usize) -> Result<HostRows<W>, NoMemory> {
    Ok(HostRows::Owned { bytes: pool.take((rows as usize).saturating_mul(row_bytes))?, row_bytes })
}

/// Sums the results `y [slots, hidden]` of each received row's choices, ascending, into `sums [rows, hidden]`.
pub(super) fn reduce<M: Machine>(
    operation: &Operation<'_, M>,
    y: &HostRows<M::Window>,
    expansion: &Expansion,
    sums: &mut HostRows<M::Window>,
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
            sum.finish(into);
            Ok(())
        })?;
    }
    Ok(())
}
