//! Holds what ranks saw of low latency against the oracle, bit for bit (any NaN equals any NaN).

use ep_core::Rank;
use ep_core::reference::{self, ExpertRows, Weighing, World};

use super::{Seen, apply_expert, travelled};
use crate::verify::{Compared, Mismatch, Place};
use crate::workload::Batch;

/// Compares a whole round: what each expert received, the reference experts' work on it, and the sums.
///
/// `batches` and `seen` are `[ranks]`.
///
/// # Errors
/// The first [`Mismatch`], dispatch before combine, ranks ascending.
///
/// # Panics
/// When there is not one batch and one entry for each rank.
pub fn run(world: &World, batches: &[Batch], weighing: Weighing, seen: &[Seen]) -> Result<Compared, Mismatch> {
    assert_eq!(seen.len(), batches.len(), "one entry for each rank");
    let seen: Vec<_> = seen.iter().map(Some).collect();
    what_was_seen(world, batches, weighing, &seen, true)
}

/// Compares what ranks saw of a round. Of one that did not end well everywhere, some saw nothing, or have no sums.
pub(super) fn what_was_seen(
    world: &World,
    batches: &[Batch],
    weighing: Weighing,
    seen: &[Option<&Seen>],
    whole: bool,
) -> Result<Compared, Mismatch> {
    let inputs: Vec<_> = batches.iter().map(Batch::reference).collect();
    let received = reference::low_latency_dispatch(world, &inputs);
    let rows: Vec<Vec<Vec<u8>>> = batches.iter().map(|batch| travelled(world, batch)).collect();
    let mut compared = Compared::default();
    // `[ranks][local experts]`: what the experts make of what they must have received.
    let mut y: Vec<Vec<Vec<u16>>> = Vec::new();
    for ((rank, expected), seen) in (0..).map(Rank).zip(&received).zip(seen) {
        if let Some(seen) = seen.filter(|_| world.takes_part(rank)) {
            compared += dispatched(world, rank, expected, &rows, seen)?;
        }
        let bytes = expected.iter().map(|expert| bytes_of_expert(&rows, expert));
        y.push(bytes.enumerate().map(|(local, bytes)| apply_expert(world, rank, local, &bytes)).collect());
    }
    let hidden = world.shape().hidden() as usize;
    let result = |rank: Rank, local: usize, row: usize| &y[rank.index()][local][row * hidden..(row + 1) * hidden];
    let combined = reference::low_latency_combine(world, &inputs, weighing, result);
    for ((rank, expected), seen) in (0..).map(Rank).zip(&combined).zip(seen) {
        let is_complete = |seen: &&Seen| world.takes_part(rank) && (whole || !seen.combined_x.is_empty());
        if let Some(seen) = seen.filter(is_complete) {
            let values = Place { rank }.rows(world, "combined_x", &seen.combined_x, expected)?;
            compared.values += values;
            compared.rows += values / u64::from(world.shape().hidden());
        }
    }
    Ok(compared)
}

fn bytes_of_expert(rows: &[Vec<Vec<u8>>], expert: &ExpertRows) -> Vec<u8> {
    let of = |(&rank, &token): (&i32, &i32)| &rows[rank as usize][token as usize];
    expert.source_rank.iter().zip(&expert.source_token).flat_map(of).copied().collect()
}

fn dispatched(
    world: &World,
    rank: Rank,
    expected: &[ExpertRows],
    rows: &[Vec<Vec<u8>>],
    seen: &Seen,
) -> Result<Compared, Mismatch> {
    let place = Place { rank };
    let mut compared = Compared::default();
    place.numbers("local experts", 1, &[seen.experts.len()], &[expected.len()])?;
    for (local, (expected, seen)) in expected.iter().zip(&seen.experts).enumerate() {
        let of = |what: &str| format!("{what} of local expert {local}");
        compared.indices += place.numbers(&of("recv_src_rank"), 1, &seen.source_rank, &expected.source_rank)?;
        compared.indices += place.numbers(&of("recv_src_token"), 1, &seen.source_token, &expected.source_token)?;
        let columns = world.shape().row_bytes() as usize;
        let bytes = bytes_of_expert(rows, expected);
        place.numbers(&of("byte of recv_x"), columns, &seen.x, &bytes)?;
        let values = expected.source_token.len() as u64;
        compared.rows += values;
        compared.values += values * u64::from(world.shape().hidden());
    }
    Ok(compared)
}

#[cfg(test)]
mod tests {
    use ep_core::{RankSet, Shape, Topology};

    use super::*;
    use crate::low_latency::SeenExpert;
    use crate::workload::Workload;

    /// Ranks that do exactly what the oracle says.
    fn faithful(world: &World, batches: &[Batch]) -> Vec<Seen> {
        let inputs: Vec<_> = batches.iter().map(Batch::reference).collect();
        let rows: Vec<_> = batches.iter().map(|batch| travelled(world, batch)).collect();
        let experts: Vec<Vec<SeenExpert>> = reference::low_latency_dispatch(world, &inputs)
            .iter()
            .map(|experts| {
                let seen = |expert: &ExpertRows| SeenExpert {
                    x: bytes_of_expert(&rows, expert),
                    source_rank: expert.source_rank.clone(),
                    source_token: expert.source_token.clone(),
                };
                experts.iter().map(seen).collect()
            })
            .collect();
        let y: Vec<Vec<Vec<u16>>> = (0..)
            .zip(&experts)
            .map(|(rank, experts)| {
                let results = |(local, expert): (usize, &SeenExpert)| apply_expert(world, Rank(rank), local, &expert.x);
                experts.iter().enumerate().map(results).collect()
            })
            .collect();
        let hidden = world.shape().hidden() as usize;
        let result = |rank: Rank, local: usize, row: usize| &y[rank.index()][local][row * hidden..(row + 1) * hidden];
        let combined = reference::low_latency_combine(world, &inputs, Weighing::AtSource, result);
        let back =
            |(experts, x): (Vec<SeenExpert>, Vec<u16>)| Seen { experts, combined_x: crate::verify::bytes_of(&x) };
        experts.into_iter().zip(combined).map(back).collect()
    }

    #[test]
    fn the_first_difference_is_named() {
        let shape = Shape::builder().experts(8).topk(3).hidden(5).max_tokens(8).build().unwrap();
        let batches = Workload::new(shape, vec![6, 0, 8, 3]).drop(0.2).seed(11).batches().unwrap();
        let world = World::new(shape, Topology::new(1, 4).unwrap(), RankSet::new()).unwrap();
        let right = faithful(&world, &batches);
        let compared = run(&world, &batches, Weighing::AtSource, &right).unwrap();
        let rows: usize = right.iter().flat_map(|seen| &seen.experts).map(|expert| expert.source_token.len()).sum();
        assert_eq!((compared.rows, compared.values), (rows as u64 + 17, (rows as u64 + 17) * 5));
        let complaint = |spoil: &dyn Fn(&mut [Seen])| {
            let mut seen = right.clone();
            spoil(&mut seen);
            run(&world, &batches, Weighing::AtSource, &seen).unwrap_err().to_string()
        };
        let wrong = complaint(&|seen| seen[2].experts[1].x[3] ^= 1);
        assert!(wrong.starts_with("rank 2: byte of recv_x of local expert 1 at row 0, column 3 is "), "{wrong}");
        let wrong = complaint(&|seen| seen[0].experts[0].source_token[0] += 1);
        assert!(wrong.starts_with("rank 0: recv_src_token of local expert 0 at row 0"), "{wrong}");
        let wrong = complaint(&|seen| seen[3].combined_x[1] ^= 0x80);
        assert!(wrong.starts_with("rank 3: combined_x at row 0, column 0 is "), "{wrong}");
        assert!(run(&world, &batches, Weighing::AtExperts, &right).is_err(), "the other form rounds otherwise");
    }
}
