//! One round of a layer on one rank: dispatch, experts, combine. What the main job, the suite and benches all run.

use ep_core::engine::{Combine, Dispatch, Handle, Routing};
use ep_core::reference::World;
use ep_core::{Endpoint, Error, OutboxUse, Rank, Rings};

use crate::arrival::{Arrival, travelling};
use crate::verify::{Observed, bytes_of};
use crate::workload::Batch;

/// How a round is run.
#[derive(Clone, Debug, Default)]
pub struct Round {
    /// Rings of its calls; absent: the communicator's.
    pub rings: Option<Rings>,
    /// How much of its outboxes its calls use.
    pub outbox: OutboxUse,
    /// Rows to size the results for; 0 for exact.
    pub worst_rows: u32,
    /// The counts stay in the machine's memory until all is over.
    pub device_counts: bool,
    /// The experts write into memory that combine can pull from, where the machine offers it.
    pub pull: bool,
    /// The received weights travel back.
    pub return_weights: bool,
    /// `[tokens, hidden]` bits of bf16 each: rows to start the sums from.
    pub bias: Vec<Vec<u16>>,
}

impl Round {
    /// Results lie where combine can pull them from, and weights travel back.
    pub const PULLING: Self = Self {
        rings: None,
        outbox: OutboxUse::USUAL,
        worst_rows: 0,
        device_counts: false,
        pull: true,
        return_weights: true,
        bias: Vec::new(),
    };
}

/// A batch in an endpoint's memory, as dispatch takes it.
///
/// # Errors
/// Those of [`Endpoint::rows`] and [`Endpoint::array`].
#[allow(clippy::type_complexity)] // The endpoint's own types.
pub fn upload<E: Endpoint>(
    ep: &mut E,
    batch: &Batch,
) -> Result<(E::Buf, Routing<E::Array<i64>, E::Array<f32>, E::Array<u8>>), Error> {
    let bytes = travelling(ep.shape(), &batch.x)?;
    let x = ep.rows(&bytes, batch.tokens)?;
    let topk_idx = ep.array(&batch.topk_idx)?;
    let topk_weights = Some(ep.array(&batch.topk_weights)?);
    Ok((x, Routing::TopK { topk_idx, topk_weights }))
}

/// What all ranks gave; else the errors of all: one rank's makes the others fail, too.
///
/// # Errors
/// These, as one text.
pub fn all_of<T>(outcomes: Vec<Result<T, Error>>) -> Result<Vec<T>, String> {
    let (mut values, mut errors) = (Vec::new(), Vec::new());
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(value) => values.push(value),
            Err(error) => errors.push(format!("rank {rank}: {error}")),
        }
    }
    if errors.is_empty() { Ok(values) } else { Err(errors.join("; ")) }
}

/// Dispatches `batch`, lets the reference experts work, combines, and tells what this rank saw and its handle.
///
/// # Errors
/// Those of the endpoint.
pub async fn round<E: Endpoint>(
    ep: &mut E,
    world: &World,
    batch: &Batch,
    how: &Round,
) -> Result<(Observed, Handle), Error> {
    let mut seen = Vec::new();
    let handle = noted_round(ep, world, batch, how, &mut seen).await?;
    Ok((seen.pop().unwrap_or_default(), handle))
}

/// [`round`], which notes what this rank saw when the dispatch has ended, and completes it when the combine has.
///
/// # Errors
/// Those of the endpoint.
pub(crate) async fn noted_round<E: Endpoint>(
    ep: &mut E,
    world: &World,
    batch: &Batch,
    how: &Round,
    seen: &mut Vec<Observed>,
) -> Result<Handle, Error> {
    let (x, routing) = upload(ep, batch)?;
    let options = Dispatch {
        rings: how.rings,
        outbox: how.outbox,
        worst_rows: how.worst_rows,
        device_counts: how.device_counts,
        ..Dispatch::default()
    };
    let got = ep.dispatch_with(&x, &routing, &options).await?;
    let mut observed = Observed::of_dispatch(ep, &got)?;
    let rows = match &got.counts {
        Some(counts) => ep.values(&counts.rows)?.first().copied().unwrap_or(0),
        None => got.rows,
    };
    trim(&mut observed, rows, world)?;
    let y = Arrival::observed(world.shape(), &observed).experts(world, ep.rank());
    let weights = how.return_weights.then(|| got.topk_weights.clone());
    let handle = got.handle.clone();
    drop(got);
    give_back(ep, &y, &handle, weights.as_ref(), how, noted(seen, observed)).await?;
    Ok(handle)
}

/// The place of what was seen, until it is complete.
fn noted(seen: &mut Vec<Observed>, observed: Observed) -> &mut Observed {
    seen.push(observed);
    let last = seen.len() - 1;
    &mut seen[last]
}

/// Dispatches another batch's rows along `handle` and brings back twice what arrived.
///
/// # Errors
/// Those of the endpoint.
pub async fn cached_round<E: Endpoint>(
    ep: &mut E,
    world: &World,
    batch: &Batch,
    handle: &Handle,
    how: &Round,
) -> Result<Observed, Error> {
    let mut seen = Vec::new();
    noted_cached_round(ep, world, (batch, handle), how, &mut seen).await?;
    Ok(seen.pop().unwrap_or_default())
}

/// [`cached_round`], noted as by [`noted_round`].
///
/// # Errors
/// Those of the endpoint.
pub(crate) async fn noted_cached_round<E: Endpoint>(
    ep: &mut E,
    world: &World,
    (batch, handle): (&Batch, &Handle),
    how: &Round,
    seen: &mut Vec<Observed>,
) -> Result<(), Error> {
    let bytes = travelling(ep.shape(), &batch.x)?;
    let x = ep.rows(&bytes, batch.tokens)?;
    let got = ep.redispatch_with(&x, handle, how.outbox).await?;
    let mut observed = Observed::of_dispatch(ep, &got)?;
    let rows = observed.source_rank.iter().take_while(|&&rank| rank >= 0).count() as u32;
    trim(&mut observed, rows, world)?;
    let y = Arrival::observed(world.shape(), &observed).doubled(world);
    let replayed = got.handle.clone();
    drop(got);
    give_back(ep, &y, &replayed, None, how, noted(seen, observed)).await
}

async fn give_back<E: Endpoint>(
    ep: &mut E,
    y: &[u16],
    handle: &Handle,
    weights: Option<&E::Array<f32>>,
    how: &Round,
    observed: &mut Observed,
) -> Result<(), Error> {
    let bytes = bytes_of(y);
    // A combine takes as many rows as the handle has room for.
    let mut bytes = bytes;
    bytes.resize(bytes.len().max(handle.rows() as usize * ep.shape().result_bytes() as usize), 0xff);
    let y = match how.pull.then(|| ep.output(handle)).flatten() {
        Some(mut output) => {
            ep.store(&mut output, 0, &bytes)?;
            output
        }
        None => ep.rows(&bytes, handle.rows())?,
    };
    let mut bias = Vec::new();
    for rows in &how.bias {
        bias.push(ep.rows(&bytes_of(rows), handle.tokens())?);
    }
    let options = Combine {
        topk_weights: weights,
        bias: [bias.first(), bias.get(1)],
        rings: how.rings,
        outbox: how.outbox,
        ..Combine::default()
    };
    let combined = ep.combine(&y, handle, options).await?;
    observed.combined_x = ep.bytes(&combined.x)?;
    observed.combined_topk_weights = ep.values(&combined.topk_weights)?;
    Ok(())
}

/// Cuts what was sized for the worst case to the `rows` rows that came; what lies behind them names nobody.
fn trim(observed: &mut Observed, rows: u32, world: &World) -> Result<(), Error> {
    let rows = rows as usize;
    if let Some(rank) = observed.source_rank.get(rows..).and_then(|beyond| beyond.iter().find(|&&rank| rank >= 0)) {
        return Err(Error::invalid("source rank of a row that did not come", rank, "-1"));
    }
    observed.recv_x.truncate(rows * world.shape().row_bytes() as usize);
    observed.source_rank.truncate(rows);
    observed.source_token.truncate(rows);
    if !observed.topk_idx.is_empty() {
        observed.topk_idx.truncate(rows * world.shape().topk() as usize);
        observed.topk_weights.truncate(rows * world.shape().topk() as usize);
    }
    Ok(())
}

/// The bias rows of `rank`: `count` of them, drawn like a batch.
///
/// # Errors
/// Those of [`crate::workload::Workload::batch`].
pub fn bias_rows(batch: &crate::workload::Workload, rank: Rank, count: usize) -> Result<Vec<Vec<u16>>, Error> {
    (0..count).map(|at| Ok(batch.clone().seed(0xb1a5 + at as u64).batch(rank)?.x)).collect()
}
