//! Low latency: one round of a layer on one rank, what it saw, and the comparison with the oracle.

#[cfg(feature = "suite")]
pub mod by_source;
#[cfg(feature = "suite")]
pub mod packed;
#[cfg(feature = "suite")]
pub mod scenario;
#[cfg(feature = "suite")]
mod turns;
pub mod verify;

use ep_core::engine::low_latency::{LowReceived, LowRouting, LowRoutingOf};
use ep_core::layout::RowFormat;
use ep_core::reference::{World, dequantize, expert_factor};
use ep_core::{Element, Endpoint, Error, LowLatency, Rank};
use half::bf16;

pub use ep_core::reference::Weighing;

use crate::arrival::split;
use crate::verify::{bits_of, bytes_of};
use crate::workload::Batch;

/// The rows of one local expert.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct SeenExpert {
    /// `[rows, row bytes]`: rows as they travelled.
    pub x: Vec<u8>,
    /// `[rows]`: rank each row came from.
    pub source_rank: Vec<i32>,
    /// `[rows]`: token in that rank's batch.
    pub source_token: Vec<i32>,
}

/// What one rank saw of a low-latency round, on the host. Empty for ranks that took no part.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Seen {
    /// `[local experts]`.
    pub experts: Vec<SeenExpert>,
    /// `[tokens, hidden]`: bytes of the combined rows, little-endian bf16.
    pub combined_x: Vec<u8>,
}

impl Seen {
    /// Copies what a dispatch gave to the host. The combined rows stay empty.
    ///
    /// # Errors
    /// Those of reading the endpoint's memory; [`Error::Invalid`] when segments do not follow one another or do not add up
    /// to the counts.
    pub fn of_dispatch<E: LowLatency>(ep: &E, got: &LowReceived<E>) -> Result<Self, Error> {
        let (ranks, tokens) = (ep.topology().ranks() as usize, ep.shape().max_tokens() as usize);
        let (stride, row_bytes) = (ranks * tokens, ep.shape().row_bytes() as usize);
        let bytes = ep.bytes(&got.x)?;
        let counts = ep.values(&got.expert_counts)?;
        let segments = ep.values(&got.segments)?;
        let source_token = ep.values(&got.source_token)?;
        let mut seen = Self::default();
        for (expert, &count) in counts.iter().enumerate() {
            let mut source_rank = Vec::new();
            for (rank, segment) in (0..).zip(&segments[expert * ranks..(expert + 1) * ranks]) {
                let (first, rows) = (segment >> 32, segment & 0xffff_ffff);
                if first != source_rank.len() as i64 {
                    let what = format_args!("first row of rank {rank} at local expert {expert}");
                    return Err(Error::invalid(what, first, format_args!("{}", source_rank.len())));
                }
                source_rank.extend((0..rows).map(|_| rank));
            }
            if source_rank.len() != count as usize {
                let what = format_args!("rows of local expert {expert}");
                return Err(Error::invalid(
                    what,
                    count,
                    format_args!("{}, the sum of its segments", source_rank.len()),
                ));
            }
            let first = expert * stride;
            let rows = first..first + count as usize;
            seen.experts.push(SeenExpert {
                x: bytes[rows.start * row_bytes..rows.end * row_bytes].to_vec(),
                source_rank,
                source_token: source_token[rows].to_vec(),
            });
        }
        Ok(seen)
    }
}

/// What local expert `local` of `rank` makes of its rows, given as they travelled: `bf16(factor * f32(row))`,
/// `[rows, hidden]` bits of bf16.
pub fn apply_expert(world: &World, rank: Rank, local: usize, rows: &[u8]) -> Vec<u16> {
    let experts = world.local_experts();
    let factor = expert_factor(rank.0 * experts + local as u32);
    let scaled = |x: f32| bf16::from_f32(factor * x).to_bits();
    if world.shape().element() == Element::Bf16 {
        return bits_of(rows).into_iter().map(|bits| scaled(bf16::from_bits(bits).to_f32())).collect();
    }
    dequantize(world, &split(world.shape(), rows)).into_iter().map(scaled).collect()
}

/// A batch in an endpoint's memory, as a low-latency dispatch takes it: bf16 rows, with the weights where each rank is to
/// weigh its own results.
///
/// # Errors
/// Those of [`Endpoint::rows`] and [`Endpoint::array`].
pub fn upload<E: Endpoint>(ep: &mut E, batch: &Batch, weighing: Weighing) -> Result<(E::Buf, LowRoutingOf<E>), Error> {
    let x = ep.rows(&bytes_of(&batch.x), batch.tokens)?;
    let topk_idx = ep.array(&batch.topk_idx)?;
    let topk_weights = match weighing {
        Weighing::AtSource => None,
        Weighing::AtExperts => Some(ep.array(&batch.topk_weights)?),
    };
    Ok((x, LowRouting::new(topk_idx, topk_weights)))
}

/// The experts' results for what a rank saw, in an endpoint's memory: `[local experts, ranks * max_tokens, hidden]` bf16.
///
/// # Errors
/// Those of [`Endpoint::rows`] and [`Endpoint::store`].
pub fn results<E: Endpoint>(ep: &mut E, world: &World, seen: &Seen) -> Result<E::Buf, Error> {
    let stride = ep.topology().ranks() * ep.shape().max_tokens();
    let rows = stride * world.local_experts();
    let row_bytes = ep.shape().result_bytes() as usize;
    let mut bytes = vec![0; rows as usize * row_bytes];
    for (local, expert) in seen.experts.iter().enumerate() {
        let y = bytes_of(&apply_expert(world, ep.rank(), local, &expert.x));
        bytes[local * stride as usize * row_bytes..][..y.len()].copy_from_slice(&y);
    }
    ep.rows(&bytes, rows)
}

/// The weights that a combine is given.
///
/// # Errors
/// Those of [`Endpoint::array`].
pub fn weights<E: Endpoint>(ep: &mut E, batch: &Batch, weighing: Weighing) -> Result<Option<E::Array<f32>>, Error> {
    match weighing {
        Weighing::AtSource => ep.array(&batch.topk_weights).map(Some),
        Weighing::AtExperts => Ok(None),
    }
}

/// Dispatches `batch`, lets the reference experts work, combines, and tells what this rank saw.
///
/// # Errors
/// Those of the endpoint.
pub async fn round<E: LowLatency>(ep: &mut E, world: &World, batch: &Batch, weighing: Weighing) -> Result<Seen, Error> {
    let (x, routing) = upload(ep, batch, weighing)?;
    let got = ep.low_latency_dispatch(&x, &routing).await?;
    let mut seen = Seen::of_dispatch(ep, &got)?;
    let y = results(ep, world, &seen)?;
    let weights = weights(ep, batch, weighing)?;
    let back = ep.low_latency_combine(&y, &got.handle, weights.as_ref()).await?;
    seen.combined_x = ep.bytes(&back.x)?;
    Ok(seen)
}

/// The bytes of a batch's rows as they travel, by the oracle: `[tokens]` rows.
pub(crate) fn travelled(world: &World, batch: &Batch) -> Vec<Vec<u8>> {
    let row_bytes = RowFormat::new(world.shape()).payload_bytes() as usize;
    crate::arrival::quantised(world, &batch.x).chunks_exact(row_bytes).map(<[u8]>::to_vec).collect()
}
