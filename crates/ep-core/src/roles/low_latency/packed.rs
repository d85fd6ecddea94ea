//! Dispatch: received rows, each of which lies once, to the slots of their choices.

use super::Call;
use super::receiver::{Intake, Pick};
use crate::buffers::HostRows;
use crate::device::LowMismatch;
use crate::error::Fault;
use crate::machine::{Machine, Window};
use crate::plan::{Expansion, LocalChoices};
use crate::plant::Plant;
use crate::port::{Duty, Port as _, Work};
use crate::room::zeroed;

/// How rows are packed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    /// Of the first slot of each expert.
    pub(crate) alignment: u32,
    /// Slots that there is room for.
    pub(crate) room: u32,
}

/// What is told of packed rows.
pub(crate) struct Packed {
    /// `[local experts + 1]`: first slot of each expert; last, behind all of their slots.
    pub(crate) first: Vec<i32>,
    /// `[ranks * max_tokens, topk]`: slot of each choice, or -1.
    pub(crate) slots: Vec<i32>,
    /// `[slots]`: weight of the choice that stands there; 0 where there is none.
    pub(crate) weights: Vec<f32>,
}

/// Rows that lie by source go to the slots of their choices. Results are those of the slots then, each with a weight of 1.
pub(crate) fn pack<M: Machine, W: Window>(
    call: &Call<'_, M>,
    intake: &mut Intake<W>,
    Packing { alignment, room }: Packing,
) -> Result<Packed, Fault> {
    let Intake { x, by_source, rows, picks, .. } = intake;
    let topk = call.layout.shape().topk();
    let Some(told) = by_source else { return Ok(Packed { first: Vec::new(), slots: Vec::new(), weights: Vec::new() }) };
    let all = told.source_rank.len() as u32;
    let came = rows.len();
    let choices =
        LocalChoices { topk_idx: &told.topk_idx[..came * topk as usize], source_rank: &told.source_rank[..came] };
    let (ranks, local) = (call.layout.topology().ranks(), call.layout.local_experts());
    let misfit = |theirs: u32| {
        let (mine, theirs) = (room.into(), theirs.into());
        Fault::Mismatch { field: LowMismatch::Slots.name(), mine, theirs, peer: call.me }
    };
    let expansion = Expansion::new(choices, ranks, local, alignment).map_err(|_| misfit(u32::MAX))?;
    let taken = expansion.rows();
    let expansion = expansion.in_room(topk, all, room).map_err(|_| misfit(taken))?;
    let row_bytes = x.row_bytes();
    let mut packed = HostRows::zeroed(room, row_bytes)?;
    let mut weights = zeroed(room as usize)?;
    let port = call.port(Duty::Receiver);
    let off = u32::from(call.plants(Plant::SlotOffByOne));
    let mut payload = vec![0; row_bytes];
    picks.clear();
    for (row, kept) in rows.iter_mut().enumerate() {
        x.read(row as u32, &mut payload)?;
        let first = picks.len() as u32;
        for choice in row * topk as usize..(row + 1) * topk as usize {
            let Ok(slot) = u32::try_from(expansion.slots()[choice]) else { continue };
            port.charge(Work::Row { bytes: row_bytes as u64 });
            packed.write((slot + off) % room, &payload)?;
            weights[slot as usize] = told.topk_weights[choice];
            picks.push(Pick { row: slot, weight: 1.0 });
        }
        kept.picks = first..picks.len() as u32;
    }
    *x = packed;
    Ok(Packed {
        first: expansion.first().iter().map(|&first| first as i32).collect(),
        slots: expansion.slots().to_vec(),
        weights,
    })
}
