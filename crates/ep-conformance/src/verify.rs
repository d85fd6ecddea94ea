//! Holds what ranks observed against the oracle, bit for bit (any NaN equals any NaN).

use std::fmt;
use std::ops::AddAssign;

use ep_core::reference::{self, Combined, Received, Returned, World, same_bf16, same_f32};
use ep_core::{Endpoint, Error, Rank, engine};
use half::bf16;

use crate::arrival::Arrival;
use crate::workload::Batch;

/// What one rank saw, on the host. Empty for ranks that took no part.
#[derive(Clone, PartialEq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Observed {
    /// `[rows, row bytes]`: bytes of the received rows as they travelled.
    pub recv_x: Vec<u8>,
    /// `[rows]`: rank each row came from.
    pub source_rank: Vec<i32>,
    /// `[rows]`: token in that rank's batch.
    pub source_token: Vec<i32>,
    /// `[rows, topk]`: expert index on this rank, or -1.
    pub topk_idx: Vec<i64>,
    /// `[rows, topk]`: weights, 0 where `topk_idx` is -1.
    pub topk_weights: Vec<f32>,
    /// `[local experts]`: choices received for each local expert.
    pub expert_counts: Vec<u32>,
    /// `[tokens, hidden]`: bytes of the combined rows, little-endian bf16.
    pub combined_x: Vec<u8>,
    /// `[tokens, topk]`: sums of the returned weights.
    pub combined_topk_weights: Vec<f32>,
}

impl Observed {
    /// Copies what a dispatch gave to the host. The combined fields stay empty.
    ///
    /// # Errors
    /// Those of reading the endpoint's memory.
    pub fn of_dispatch<E: Endpoint>(ep: &E, got: &engine::endpoint::Received<E>) -> Result<Self, Error> {
        Ok(Self {
            recv_x: ep.bytes(&got.x)?,
            source_rank: ep.values(&got.source_rank)?,
            source_token: ep.values(&got.source_token)?,
            topk_idx: ep.values(&got.topk_idx)?,
            topk_weights: ep.values(&got.topk_weights)?,
            expert_counts: match &got.counts {
                Some(counts) => ep.values(&counts.experts)?,
                None => got.expert_counts.clone(),
            },
            ..Self::default()
        })
    }

    /// The received part as the oracle speaks of it, for instance to let the reference experts work on it.
    pub fn received(&self) -> Received {
        Received {
            x: bits_of(&self.recv_x),
            source_rank: self.source_rank.clone(),
            source_token: self.source_token.clone(),
            topk_idx: self.topk_idx.clone(),
            topk_weights: self.topk_weights.clone(),
            expert_counts: self.expert_counts.clone(),
        }
    }
}

/// The bf16 numbers in little-endian bytes.
pub fn bits_of(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect()
}

/// The little-endian bytes of bf16 numbers.
pub fn bytes_of(bits: &[u16]) -> Vec<u8> {
    bits.iter().flat_map(|bits| bits.to_le_bytes()).collect()
}

/// How much was compared and found equal.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Compared {
    /// Received and combined rows.
    pub rows: u64,
    /// Elements of these rows.
    pub values: u64,
    /// Weights, received and combined.
    pub weights: u64,
    /// Source ranks, source tokens, local experts and counts.
    pub indices: u64,
}

impl AddAssign for Compared {
    fn add_assign(&mut self, more: Self) {
        self.rows += more.rows;
        self.values += more.values;
        self.weights += more.weights;
        self.indices += more.indices;
    }
}

/// The first difference found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// On which rank.
    pub rank: Rank,
    /// In which array, or of which array the length.
    pub what: String,
    /// In which row and column of it; none for lengths.
    pub at: Option<(usize, usize)>,
    /// What the rank saw.
    pub got: String,
    /// What the oracle says.
    pub expected: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}: {}", self.rank, self.what)?;
        if let Some((row, column)) = self.at {
            write!(f, " at row {row}, column {column}")?;
        }
        write!(f, " is {}, expected {}", self.got, self.expected)
    }
}

impl std::error::Error for Mismatch {}

/// Compares a whole dispatch, the reference experts' work on it, and the combine, with the weights sent back.
///
/// `observed` and `batches` are `[ranks]`.
///
/// # Errors
/// The first [`Mismatch`], dispatch before combine, ranks ascending.
///
/// # Panics
/// When `observed` or `batches` is not one for each rank.
pub fn run(world: &World, batches: &[Batch], observed: &[Observed]) -> Result<Compared, Mismatch> {
    let arrivals = Arrival::expected(world, batches);
    let mut compared = dispatched(world, &arrivals, observed)?;
    let y: Vec<_> = (0..).map(Rank).zip(&arrivals).map(|(rank, got)| got.experts(world, rank)).collect();
    let received: Vec<_> = arrivals.into_iter().map(|arrival| arrival.received).collect();
    let returned: Vec<_> = received
        .iter()
        .zip(&y)
        .zip(batches)
        .map(|((got, y), batch)| Returned {
            y,
            topk_weights: Some(&got.topk_weights),
            tokens: batch.tokens as usize,
            bias: [None; 2],
        })
        .collect();
    compared += combined(world, &reference::combine(world, &received, &returned), observed)?;
    Ok(compared)
}

/// Compares what every rank received.
///
/// # Errors
/// The first [`Mismatch`], ranks ascending.
///
/// # Panics
/// When not as many ranks observed as were expected to: a rank left out would pass unseen.
pub fn dispatched(world: &World, expected: &[Arrival], observed: &[Observed]) -> Result<Compared, Mismatch> {
    assert_eq!(expected.len(), observed.len(), "one observation for each rank");
    let mut compared = Compared::default();
    for ((rank, expected), observed) in (0..).map(Rank).zip(expected).zip(observed) {
        compared += dispatched_to(world, rank, expected, observed)?;
    }
    Ok(compared)
}

/// Compares what `rank` received.
///
/// # Errors
/// The first [`Mismatch`].
pub(crate) fn dispatched_to(
    world: &World,
    rank: Rank,
    expected: &Arrival,
    observed: &Observed,
) -> Result<Compared, Mismatch> {
    let (at, topk) = (Place { rank }, world.shape().topk() as usize);
    let mut compared = Compared::default();
    compared.values += match &expected.coded {
        None => at.rows(world, "recv_x", &observed.recv_x, &expected.received.x)?,
        Some(_) => {
            let columns = world.shape().row_bytes() as usize;
            at.numbers("byte of recv_x", columns, &observed.recv_x, &expected.bytes(world.shape()))?
        }
    };
    let expected = &expected.received;
    compared.indices += at.numbers("recv_src_rank", 1, &observed.source_rank, &expected.source_rank)?;
    compared.indices += at.numbers("recv_src_token", 1, &observed.source_token, &expected.source_token)?;
    compared.indices += at.numbers("recv_topk_idx", topk, &observed.topk_idx, &expected.topk_idx)?;
    compared.indices += at.numbers("recv_counts", 1, &observed.expert_counts, &expected.expert_counts)?;
    compared.weights += at.weights("recv_topk_weights", topk, &observed.topk_weights, &expected.topk_weights)?;
    compared.rows += expected.rows() as u64;
    Ok(compared)
}

/// Compares what every rank got back.
///
/// # Errors
/// The first [`Mismatch`], ranks ascending.
///
/// # Panics
/// As [`dispatched`].
pub fn combined(world: &World, expected: &[Combined], observed: &[Observed]) -> Result<Compared, Mismatch> {
    assert_eq!(expected.len(), observed.len(), "one observation for each rank");
    let mut compared = Compared::default();
    for ((rank, expected), observed) in (0..).map(Rank).zip(expected).zip(observed) {
        compared += combined_by(world, rank, expected, observed)?;
    }
    Ok(compared)
}

/// Compares what `rank` got back.
///
/// # Errors
/// The first [`Mismatch`].
pub(crate) fn combined_by(
    world: &World,
    rank: Rank,
    expected: &Combined,
    observed: &Observed,
) -> Result<Compared, Mismatch> {
    let (at, topk) = (Place { rank }, world.shape().topk() as usize);
    let mut compared = Compared::default();
    let values = at.rows(world, "combined_x", &observed.combined_x, &expected.x)?;
    compared.values += values;
    compared.rows += values / u64::from(world.shape().hidden());
    compared.weights +=
        at.weights("combined_topk_weights", topk, &observed.combined_topk_weights, &expected.topk_weights)?;
    Ok(compared)
}

/// Where a comparison takes place.
pub(crate) struct Place {
    pub(crate) rank: Rank,
}

impl Place {
    pub(crate) fn numbers<T: PartialEq + Copy + fmt::Display>(
        &self,
        what: &str,
        columns: usize,
        got: &[T],
        expected: &[T],
    ) -> Result<u64, Mismatch> {
        self.each(what, columns, got, expected, |a, b| a == b, T::to_string)
    }

    pub(crate) fn weights(&self, what: &str, columns: usize, got: &[f32], expected: &[f32]) -> Result<u64, Mismatch> {
        let show = |weight: &f32| format!("{weight} ({:#010x})", weight.to_bits());
        self.each(what, columns, got, expected, |a, b| same_f32(*a, *b), show)
    }

    pub(crate) fn rows(&self, world: &World, what: &str, got: &[u8], expected: &[u16]) -> Result<u64, Mismatch> {
        let show = |bits: &u16| format!("{} ({bits:#06x})", bf16::from_bits(*bits));
        self.length(format_args!("bytes of {what}"), got.len(), expected.len() * 2)?;
        self.each(what, world.shape().hidden() as usize, &bits_of(got), expected, |a, b| same_bf16(*a, *b), show)
    }

    fn each<T>(
        &self,
        what: &str,
        columns: usize,
        got: &[T],
        expected: &[T],
        same: impl Fn(&T, &T) -> bool,
        show: impl Fn(&T) -> String,
    ) -> Result<u64, Mismatch> {
        self.length(format_args!("length of {what}"), got.len(), expected.len())?;
        match got.iter().zip(expected).position(|(got, expected)| !same(got, expected)) {
            None => Ok(expected.len() as u64),
            Some(index) => Err(Mismatch {
                rank: self.rank,
                what: what.to_owned(),
                at: Some((index / columns, index % columns)),
                got: show(&got[index]),
                expected: show(&expected[index]),
            }),
        }
    }

    fn length(&self, what: fmt::Arguments<'_>, got: usize, expected: usize) -> Result<(), Mismatch> {
        if got == expected {
            return Ok(());
        }
        Err(Mismatch {
            rank: self.rank,
            what: what.to_string(),
            at: None,
            got: got.to_string(),
            expected: expected.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use ep_core::{RankSet, Shape, Topology};

    use super::*;
    use crate::workload::Workload;

    fn world() -> (World, Vec<Batch>) {
        let shape = Shape::builder().experts(8).topk(3).hidden(5).max_tokens(8).build().unwrap();
        let batches = Workload::new(shape, vec![6, 0, 8, 3]).drop(0.2).seed(11).batches().unwrap();
        (World::new(shape, Topology::new(1, 4).unwrap(), RankSet::new()).unwrap(), batches)
    }

    /// Ranks that do exactly what the oracle says.
    fn faithful(world: &World, batches: &[Batch]) -> Vec<Observed> {
        let inputs: Vec<_> = batches.iter().map(Batch::reference).collect();
        let received = reference::dispatch(world, &inputs);
        let y: Vec<_> =
            (0..).map(Rank).zip(&received).map(|(rank, got)| reference::apply_experts(world, rank, got)).collect();
        let back = |rank: usize| Returned {
            y: &y[rank],
            topk_weights: Some(&received[rank].topk_weights),
            tokens: batches[rank].tokens as usize,
            bias: [None; 2],
        };
        let combined = reference::combine(world, &received, &(0..received.len()).map(back).collect::<Vec<_>>());
        let observe = |(got, back): (&Received, Combined)| Observed {
            recv_x: bytes_of(&got.x),
            source_rank: got.source_rank.clone(),
            source_token: got.source_token.clone(),
            topk_idx: got.topk_idx.clone(),
            topk_weights: got.topk_weights.clone(),
            expert_counts: got.expert_counts.clone(),
            combined_x: bytes_of(&back.x),
            combined_topk_weights: back.topk_weights,
        };
        received.iter().zip(combined).map(observe).collect()
    }

    fn complaint(spoil: impl FnOnce(&mut [Observed])) -> String {
        let (world, batches) = world();
        let mut observed = faithful(&world, &batches);
        spoil(&mut observed);
        run(&world, &batches, &observed).unwrap_err().to_string()
    }

    #[test]
    fn faithful_ranks_pass_and_everything_is_counted() {
        let (world, batches) = world();
        let observed = faithful(&world, &batches);
        let compared = run(&world, &batches, &observed).unwrap();
        let rows: usize = observed.iter().map(|rank| rank.source_rank.len()).sum();
        assert_eq!(compared.rows, rows as u64 + 17);
        assert_eq!(compared.values, compared.rows * 5);
        assert_eq!(compared.weights, compared.rows * 3);
        assert_eq!(compared.indices, rows as u64 * (1 + 1 + 3) + 8);
    }

    #[test]
    fn weights_of_kept_choices_come_back_exactly() {
        let (world, batches) = world();
        let observed = faithful(&world, &batches);
        for (batch, observed) in batches.iter().zip(&observed) {
            let kept = batch.topk_idx.iter().zip(&batch.topk_weights).map(|(&i, &w)| if i < 0 { 0.0 } else { w });
            assert_eq!(kept.collect::<Vec<_>>(), observed.combined_topk_weights);
        }
    }

    #[test]
    fn the_first_difference_is_named() {
        let wrong = complaint(|ranks| ranks[2].recv_x[2 * (5 + 3)] ^= 1);
        assert!(wrong.starts_with("rank 2: recv_x at row 1, column 3 is "), "{wrong}");
        let wrong = complaint(|ranks| ranks[3].combined_x[1] ^= 0x80);
        assert!(wrong.starts_with("rank 3: combined_x at row 0, column 0 is "), "{wrong}");
        let wrong = complaint(|ranks| ranks[0].combined_topk_weights[4] += 0.5);
        assert!(wrong.starts_with("rank 0: combined_topk_weights at row 1, column 1 is "), "{wrong}");
        let wrong = complaint(|ranks| ranks[1].expert_counts[1] = 99);
        assert!(wrong.starts_with("rank 1: recv_counts at row 1, column 0 is 99, expected "), "{wrong}");
    }

    #[test]
    fn missing_rows_are_named_before_values() {
        let wrong = complaint(|ranks| {
            ranks[1].source_rank.pop();
        });
        assert!(wrong.starts_with("rank 1: length of recv_src_rank is "), "{wrong}");
        let wrong = complaint(|ranks| {
            ranks[0].recv_x.pop();
        });
        assert!(wrong.starts_with("rank 0: bytes of recv_x is "), "{wrong}");
    }

    #[test]
    fn a_row_at_the_wrong_expert_shows_in_the_result() {
        let (world, batches) = world();
        let mut wrong = faithful(&world, &batches)[0].received();
        let right = reference::apply_experts(&world, Rank(0), &wrong);
        let choice = wrong.topk_idx.iter().position(|&expert| expert == 0).unwrap();
        wrong.topk_idx[choice] = 1;
        assert_ne!(reference::apply_experts(&world, Rank(0), &wrong), right);
    }
}
