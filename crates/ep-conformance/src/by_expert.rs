//! A round of a dispatch by expert: what the ranks see, and what the oracle says of it.

use std::ops::AddAssign;

use ep_core::engine::{Combine, Dispatch, ExpertSlots, Handle, Received};
use ep_core::reference::{self, Expanded, Pick, Returned, World, choice_scale, expert_factor};
use ep_core::{Element, Endpoint, Error, Rank, Rings};
use half::bf16;

use crate::arrival::{Arrival, split, travelling};
use crate::drive::upload;
use crate::verify::{Compared, Mismatch, Observed, Place, bytes_of};
use crate::workload::Batch;

/// How a round is run.
#[derive(Clone, Debug, Default)]
pub struct How {
    /// Rings of its calls; absent: the communicator's.
    pub rings: Option<Rings>,
    /// The first row of each expert stands at a multiple of it.
    pub alignment: u32,
    /// Rows to make room for, where their number is to stay in the machine's memory; 0: the host hears how many come.
    pub worst_rows: u32,
    /// Padding is to be zeros.
    pub zero_spare: bool,
    /// What comes back is what rounding the sums leaves.
    pub remainder: bool,
    /// The received weights travel back.
    pub return_weights: bool,
    /// `[tokens, hidden]` bits of bf16 each: rows to start the sums from.
    pub bias: Vec<Vec<u16>>,
}

/// What one rank saw. Empty for ranks that took no part.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Seen {
    /// What is told by received row, and what came back; its rows are those by expert.
    pub observed: Observed,
    /// How many rows came; of a cached dispatch those that there is room for.
    pub rows: u32,
    /// Whether it stayed in the machine's memory which rows by expert are whose.
    pub stays: bool,
    /// `[local experts + 1]`: first row of each expert.
    pub first: Vec<u32>,
    /// `[local experts]`: rows of each expert.
    pub counts: Vec<u32>,
    /// `[rows, topk]`: where each choice stands.
    pub slots: Vec<i32>,
    /// `[ranks, local experts]`: first row of each source at each expert.
    pub offsets: Vec<i32>,
    /// `[slots]`: weight of each slot's choice, where it was told.
    pub weights: Option<Vec<f32>>,
}

impl Seen {
    fn of_dispatch<E: Endpoint>(ep: &E, got: &Received<E>) -> Result<Self, Error> {
        let observed = Observed::of_dispatch(ep, got)?;
        let missing = || Error::invalid("rows by expert", "nowhere told", "told by a dispatch by expert");
        let told = got.by_expert.as_ref().ok_or_else(missing)?;
        let (slots, offsets) = (ep.values(&told.slots)?, ep.values(&told.offsets)?);
        let (stays, first, counts) = match &told.experts {
            ExpertSlots::OnHost { first, counts } => (false, first.clone(), counts.clone()),
            ExpertSlots::OnDevice { first, counts } => (true, ep.values(first)?, ep.values(counts)?),
        };
        let rows = match &got.counts {
            Some(counts) => ep.values(&counts.rows)?.first().copied().unwrap_or(0),
            None => got.rows,
        };
        let weights = told.weights.as_ref().map(|weights| ep.values(weights)).transpose()?;
        Ok(Self { observed, rows, stays, first, counts, slots, offsets, weights })
    }

    /// What an expert of `rank` multiplies the row of a choice by.
    fn scale(&self, world: &World, rank: Rank, choice: usize, local: u32) -> f32 {
        let (row, column) = (choice / world.shape().topk() as usize, choice % world.shape().topk() as usize);
        let weighted = self.observed.topk_weights[choice] * expert_factor(rank.0 * world.local_experts() + local);
        choice_scale(self.observed.source_token[row], column).unwrap_or(weighted)
    }

    /// Results for the rows by expert, `[slots, hidden]` bits of bf16: of each choice what its expert makes of its row. A cached dispatch, whose
    /// rows carry no choices, returns twice each value. Padding, which nobody may look at, becomes NaN.
    pub(crate) fn experts(&self, world: &World, rank: Rank) -> Vec<u16> {
        let x = elements(world, &self.observed.recv_x);
        let hidden = world.shape().hidden() as usize;
        let mut y = vec![0x7fc0; x.len()];
        for (choice, slot) in self.slots.iter().enumerate() {
            let Ok(slot) = usize::try_from(*slot) else { continue };
            let scale = match self.observed.topk_idx.get(choice) {
                Some(&local) => self.scale(world, rank, choice, local.max(0) as u32),
                None => 2.0,
            };
            // A slot that there is not is found by the comparison.
            let row = slot * hidden..(slot + 1) * hidden;
            let (Some(y), Some(x)) = (y.get_mut(row.clone()), x.get(row)) else { continue };
            for (y, x) in y.iter_mut().zip(x) {
                *y = bf16::from_f32(scale * x).to_bits();
            }
        }
        y
    }
}

/// The elements of rows as they travel.
fn elements(world: &World, bytes: &[u8]) -> Vec<f32> {
    match world.shape().element() {
        Element::Bf16 => bytes.chunks_exact(2).map(|x| bf16::from_le_bytes([x[0], x[1]]).to_f32()).collect(),
        _ => reference::dequantize(world, &split(world.shape(), bytes)),
    }
}

/// Dispatches `batch` by expert, lets the experts work on their rows, combines, and tells what this rank saw and its handle.
///
/// # Errors
/// Those of the endpoint.
pub async fn round<E: Endpoint>(ep: &mut E, world: &World, batch: &Batch, how: &How) -> Result<(Seen, Handle), Error> {
    let (x, routing) = upload(ep, batch)?;
    let options = Dispatch {
        rings: how.rings,
        expert_alignment: how.alignment,
        by_expert: true,
        worst_rows: how.worst_rows,
        device_counts: how.worst_rows > 0,
        zero_spare: how.zero_spare,
        ..Dispatch::default()
    };
    let got = ep.dispatch_with(&x, &routing, &options).await?;
    let seen = Seen::of_dispatch(ep, &got)?;
    give_back(ep, world, got, seen, how).await
}

/// Dispatches another batch's rows along `handle`, and brings back twice what arrived.
///
/// # Errors
/// Those of the endpoint.
pub async fn cached_round<E: Endpoint>(
    ep: &mut E,
    world: &World,
    batch: &Batch,
    handle: &Handle,
    how: &How,
) -> Result<Seen, Error> {
    let x = ep.rows(&travelling(ep.shape(), &batch.x)?, batch.tokens)?;
    let got = ep.redispatch(&x, handle).await?;
    let seen = Seen::of_dispatch(ep, &got)?;
    let how = How { return_weights: false, ..how.clone() };
    Ok(give_back(ep, world, got, seen, &how).await?.0)
}

async fn give_back<E: Endpoint>(
    ep: &mut E,
    world: &World,
    got: Received<E>,
    mut seen: Seen,
    how: &How,
) -> Result<(Seen, Handle), Error> {
    let y = bytes_of(&seen.experts(world, ep.rank()));
    let (handle, weights) = (got.handle.clone(), how.return_weights.then(|| got.topk_weights.clone()));
    drop(got);
    let y = ep.rows(&y, handle.result_rows())?;
    let mut bias = Vec::new();
    for rows in &how.bias {
        bias.push(ep.rows(&bytes_of(rows), handle.tokens())?);
    }
    let options = Combine {
        topk_weights: weights.as_ref(),
        bias: [bias.first(), bias.get(1)],
        rings: how.rings,
        remainder: how.remainder,
        ..Combine::default()
    };
    let combined = ep.combine(&y, &handle, options).await?;
    seen.observed.combined_x = ep.bytes(&combined.x)?;
    seen.observed.combined_topk_weights = ep.values(&combined.topk_weights)?;
    Ok((seen, handle))
}

/// What the oracle says of a rank's rows by expert.
pub(crate) struct Expected {
    /// Rows that there is room for.
    rows_in_all: usize,
    /// Rows by expert that there is room for.
    room: usize,
    /// Whether the host is not told which are whose.
    stays: bool,
    /// Whether padding is zeros.
    zero_spare: bool,
    pub(crate) arrival: Arrival,
    pub(crate) expanded: Expanded,
    /// `[rows by expert, hidden]`: results.
    #[cfg_attr(not(feature = "suite"), expect(dead_code))] // Of low latency that is packed.
    pub(crate) y: Vec<u16>,
    /// `[rows, hidden]`: those of the received rows.
    rows: Vec<u16>,
}

impl Expected {
    pub(crate) fn new(world: &World, rank: Rank, arrival: Arrival, how: &How, cached: bool) -> Self {
        let alignment = how.alignment as usize;
        let (expanded, worst_rows) = match world.takes_part(rank) {
            true => (reference::expand(world, &arrival.received, alignment), how.worst_rows as usize),
            false => (Expanded::default(), 0),
        };
        let (rows_in_all, room) = match worst_rows {
            0 => (arrival.received.rows(), expanded.picks.len()),
            _ => (worst_rows, reference::room_of_expanded(world, worst_rows, alignment)),
        };
        let x = elements(world, &arrival.bytes(world.shape()));
        let y = match cached {
            true => doubled(world, &x, &expanded),
            false => reference::apply_experts_expanded(world, rank, &arrival.received, &x, &expanded),
        };
        let rows = match how.remainder {
            true => reference::remainders_of_expanded(world, &expanded, &y),
            false => reference::reduce_expanded(world, &expanded, &y),
        };
        Self { rows_in_all, room, stays: worst_rows > 0, zero_spare: how.zero_spare, arrival, expanded, y, rows }
    }

    /// The bytes of the rows by expert, zeros between those of two experts and behind the last.
    fn bytes(&self, world: &World) -> Vec<u8> {
        let row_bytes = world.shape().row_bytes() as usize;
        let rows = self.arrival.bytes(world.shape());
        let bytes = |pick: &Option<Pick>| match pick {
            Some(Pick { row, .. }) => rows[row * row_bytes..(row + 1) * row_bytes].to_vec(),
            None => vec![0; row_bytes],
        };
        let mut all: Vec<u8> = self.expanded.picks.iter().flat_map(bytes).collect();
        all.resize(self.room * row_bytes, 0);
        all
    }

    /// The weights of the rows by expert, 0 where a slot is no choice's.
    fn weights(&self) -> Vec<f32> {
        let topk_weights = &self.arrival.received.topk_weights;
        let mut all = vec![0.0; self.room];
        for (slot, &weight) in self.expanded.slots.iter().zip(topk_weights) {
            if let Ok(slot) = usize::try_from(*slot) {
                all[slot] = weight;
            }
        }
        all
    }

    /// The bytes of the rows by expert that a rank saw, without what lies in padding where that is undefined.
    fn defined(&self, world: &World, mut seen: Vec<u8>) -> Vec<u8> {
        let mut is_row = self.expanded.picks.iter().map(Option::is_some);
        for row in seen.chunks_exact_mut(world.shape().row_bytes() as usize) {
            let is_row = is_row.next().unwrap_or(false);
            if !is_row && !self.zero_spare {
                row.fill(0);
            }
        }
        seen
    }
}

/// Twice each value of the rows by expert.
fn doubled(world: &World, x: &[f32], expanded: &Expanded) -> Vec<u16> {
    let hidden = world.shape().hidden() as usize;
    let twice = |pick: &Option<Pick>| match *pick {
        Some(Pick { row, .. }) => {
            x[row * hidden..(row + 1) * hidden].iter().map(|x| bf16::from_f32(2.0 * x).to_bits()).collect()
        }
        None => vec![0x7fc0; hidden],
    };
    expanded.picks.iter().flat_map(twice).collect()
}

/// Compares what all ranks saw with the oracle. `routed` are the batches whose routing was followed, `moved` those whose rows were; a cached round
/// follows the routing of an earlier one. `bias` is `[ranks]`.
///
/// # Errors
/// The first [`Mismatch`], ranks ascending.
///
/// # Panics
/// When there are not as many observations or batches as ranks.
pub fn compare(
    world: &World,
    (routed, moved): (&[Batch], &[Batch]),
    how: &[How],
    cached: bool,
    seen: &[Seen],
) -> Result<Compared, Mismatch> {
    assert_eq!(routed.len(), seen.len(), "one observation for each rank");
    let batches: Vec<Batch> =
        routed.iter().zip(moved).map(|(routing, rows)| Batch { x: rows.x.clone(), ..routing.clone() }).collect();
    let arrivals = (0..).map(Rank).zip(Arrival::expected(world, &batches)).zip(how);
    let expected: Vec<_> =
        arrivals.map(|((rank, arrival), how)| Expected::new(world, rank, arrival, how, cached)).collect();
    let mut compared = Compared::default();
    for ((rank, expected), seen) in (0..).map(Rank).zip(&expected).zip(seen) {
        compared += dispatched(world, rank, expected, cached, seen)?;
    }
    let returned: Vec<_> = expected
        .iter()
        .zip(how)
        .zip(&batches)
        .map(|((expected, how), batch)| Returned {
            y: &expected.rows,
            topk_weights: (how.return_weights && !cached).then_some(&expected.arrival.received.topk_weights[..]),
            tokens: batch.tokens as usize,
            bias: [0, 1].map(|which| how.bias.get(which).map(|bias| &bias[..])),
        })
        .collect();
    let received: Vec<_> = expected.iter().map(|expected| expected.arrival.received.clone()).collect();
    let combined = reference::combine(world, &received, &returned);
    let observed: Vec<_> = seen.iter().map(|seen| seen.observed.clone()).collect();
    compared.add_assign(crate::verify::combined(world, &combined, &observed)?);
    Ok(compared)
}

/// Compares what one rank received.
pub(crate) fn dispatched(
    world: &World,
    rank: Rank,
    expected: &Expected,
    cached: bool,
    seen: &Seen,
) -> Result<Compared, Mismatch> {
    let (at, topk, Expanded { first, slots, offsets, .. }) =
        (Place { rank }, world.shape().topk() as usize, &expected.expanded);
    let got = &seen.observed;
    let received = &expected.arrival.received;
    let mut compared = Compared { rows: received.rows() as u64, ..Compared::default() };
    let rows = if cached { expected.rows_in_all } else { received.rows() };
    compared.indices += at.numbers("rows received", 1, &[seen.rows], &[rows as u32])?;
    compared.indices += at.numbers("whether slots stay on the device", 1, &[seen.stays], &[expected.stays])?;
    compared.indices += at.numbers("first rows of experts", 1, &seen.first, first)?;
    compared.indices += at.numbers("slots", topk, &seen.slots, &up_to(slots, expected.rows_in_all * topk, -1))?;
    compared.indices += at.numbers("offsets", world.local_experts() as usize, &seen.offsets, offsets)?;
    compared.indices += at.numbers("rows of experts", 1, &seen.counts, &received.expert_counts)?;
    let sources = [(&got.source_rank, &received.source_rank), (&got.source_token, &received.source_token)];
    for (name, (got, received)) in ["recv_src_rank", "recv_src_token"].into_iter().zip(sources) {
        compared.indices += at.numbers(name, 1, got, &up_to(received, expected.rows_in_all, -1))?;
    }
    let row_bytes = world.shape().row_bytes() as usize;
    let rows = expected.defined(world, got.recv_x.clone());
    compared.values += at.numbers("byte of the rows by expert", row_bytes, &rows, &expected.bytes(world))?;
    if let Some(weights) = &seen.weights {
        compared.weights += at.weights("weights by expert", 1, weights, &expected.weights())?;
    }
    if !cached {
        let aligned: Vec<u32> = first.windows(2).map(|bounds| bounds[1] - bounds[0]).collect();
        compared.indices += at.numbers("recv_counts", 1, &got.expert_counts, &aligned)?;
        let choices = expected.rows_in_all * topk;
        let (idx, weights) = (up_to(&received.topk_idx, choices, -1), up_to(&received.topk_weights, choices, 0.0));
        compared.indices += at.numbers("recv_topk_idx", topk, &got.topk_idx, &idx)?;
        compared.weights += at.weights("recv_topk_weights", topk, &got.topk_weights, &weights)?;
    }
    Ok(compared)
}

/// `values`, and `spare` up to a length.
fn up_to<T: Copy>(values: &[T], len: usize, spare: T) -> Vec<T> {
    let mut all = values.to_vec();
    all.resize(len.max(all.len()), spare);
    all
}
