//! Dispatches whose kernels are enqueued before their counts are known: what they bring, and what becomes of those that have no room for it.

use ep_conformance::workload::Batch;
use ep_core::engine::{Combine, Dispatch, Received};
use ep_core::layout::RowFormat;
use ep_core::{Endpoint, Error, Placement, Rank, RankSet, Shape};
use ep_cuda::{CudaEndpoint, Rows};

use super::Verdict;
use super::failures::next_call;
use super::fixture::{HIDDEN, LOCAL, Layer, TOKENS, TOPK, Uploaded, same, same_rows, same_sums, turns};

fn text(error: Error) -> String {
    error.to_string()
}

/// How the rows of a turn spread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Spread {
    /// As the workload has it.
    Even,
    /// None to rank 0.
    NoneToFirst,
    /// All to rank 0.
    AllToFirst,
}

fn batches(layer: &Layer, turn: u64, spread: Spread) -> Result<Vec<Batch>, Error> {
    let mut batches = layer.batches(turn)?;
    for batch in &mut batches {
        for (token, choices) in batch.topk_idx.chunks_mut(TOPK as usize).enumerate() {
            match spread {
                Spread::Even => {}
                Spread::NoneToFirst => {
                    choices.iter_mut().filter(|choice| **choice < i64::from(LOCAL)).for_each(|choice| *choice = -1);
                }
                Spread::AllToFirst => {
                    choices.fill(-1);
                    choices[0] = token as i64 % i64::from(LOCAL);
                }
            }
        }
    }
    Ok(batches)
}

/// A turn's rows, dispatched, and sent straight back.
async fn turn_of(
    ep: &mut CudaEndpoint,
    layer: &Layer,
    turn: u64,
    all: &[Batch],
    options: &Dispatch,
) -> Result<(Received<CudaEndpoint>, ep_core::reference::Received), Error> {
    let me = ep.rank().index();
    let input = Uploaded::new(ep, &all[me])?;
    let got = ep.dispatch_with(&input.x, &input.routing(), options).await?;
    let (mut received, combined) = layer.expected(all, None);
    let expected = received.swap_remove(me);
    same("rows", turn, &[got.rows], &[expected.rows() as u32])?;
    same("recv_counts", turn, &got.expert_counts, &expected.expert_counts)?;
    same_rows(ep, turn, &got, expected.rows(), &expected)?;
    let weights = Some(&got.topk_weights);
    let sums = ep.combine(&got.x, &got.handle, Combine { topk_weights: weights, ..Combine::default() }).await?;
    same_sums(ep, turn, &sums, &combined[me])?;
    Ok((got, expected))
}

/// Turns of these spreads in a row, whose results are all kept and looked at again at the end. Returns of each rank how many dispatches went ahead, and how
/// many had no room.
fn kept(layer: &Layer, spreads: &[Spread], options: &Dispatch) -> Result<Vec<(u64, u64)>, String> {
    let all = (0..).zip(spreads).map(|(turn, spread)| batches(layer, turn, *spread));
    let all = all.collect::<Result<Vec<_>, _>>().map_err(text)?;
    layer.run(async |mut ep| {
        let mut kept = Vec::new();
        for (turn, batches) in (0..).zip(&all) {
            kept.push(turn_of(&mut ep, layer, turn, batches, options).await?);
        }
        for (turn, (got, expected)) in (0..).zip(&kept) {
            same_rows(&ep, turn, got, expected.rows(), expected)?;
        }
        layer.meet()?;
        Ok(ep.gone_ahead())
    })
}

/// Batches that bring about as many rows as those before go ahead, each to a place of its own.
pub(crate) fn go_ahead() -> Verdict {
    let count = turns(40, 12);
    let layer = Layer::sized(Placement::Direct, 4, 16 << 20).map_err(text)?;
    let went = kept(&layer, &vec![Spread::Even; count as usize], &Dispatch::default())?;
    for (ahead, in_vain) in went {
        if ahead + in_vain != count - 1 || ahead < count / 2 {
            return Err(format!("{ahead} of {count} dispatches went ahead, and {in_vain} had no room"));
        }
    }
    let bound = Dispatch { worst_rows: 4 * TOKENS, ..Dispatch::default() };
    let all = batches(&layer, 0, Spread::Even).map_err(text)?;
    let went = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &all[me])?;
        let got = ep.dispatch_with(&input.x, &input.routing(), &bound).await?;
        let expected = layer.expected(&all, None).0.swap_remove(me);
        same("rows with room for all", 0, &[got.rows, got.x.rows()], &[expected.rows() as u32, 4 * TOKENS])?;
        same_rows(&ep, 0, &got, expected.rows(), &expected)?;
        layer.meet()?;
        Ok(ep.gone_ahead())
    })?;
    same("dispatches with room for all", 0, &went, &[(1, 0); 4]).map_err(text)
}

/// More rows come than were expected: they are placed where there is room, and nothing that is kept is written over.
pub(crate) fn more_than_expected() -> Verdict {
    let layer = Layer::sized(Placement::Direct, 4, 16 << 20).map_err(text)?;
    let spreads = [Spread::NoneToFirst, Spread::NoneToFirst, Spread::AllToFirst, Spread::Even, Spread::AllToFirst];
    let went = kept(&layer, &spreads, &Dispatch::default())?;
    // Rank 0 had no room in the third turn; the others had.
    match (went[0], went[2]) {
        ((3, 1), (4, 0)) => Ok(()),
        _ => Err(format!("{went:?} went ahead, and in vain")),
    }
}

/// A rank has no room at all, and the batch goes through outboxes: what the others have enqueued stays.
pub(crate) fn no_room_elsewhere() -> Verdict {
    let layer = Layer::with_outboxes(4).map_err(text)?;
    let all = (0..4).map(|turn| batches(&layer, turn, Spread::Even)).collect::<Result<Vec<_>, _>>().map_err(text)?;
    let went = layer.run(async |mut ep| {
        let (first, _) = turn_of(&mut ep, &layer, 0, &all[0], &Dispatch::default()).await?;
        turn_of(&mut ep, &layer, 1, &all[1], &Dispatch::default()).await?;
        let is_full = ep.rank().index() == 0;
        let full: Vec<Rows> = std::iter::from_fn(|| is_full.then(|| ep.output(&first.handle)).flatten()).collect();
        let before = ep.gone_ahead();
        let (got, expected) = turn_of(&mut ep, &layer, 2, &all[2], &Dispatch::default()).await?;
        same("a lease", 2, &[matches!(got.x, Rows::Leased(_))], &[false])?;
        let after = ep.gone_ahead();
        drop(full);
        turn_of(&mut ep, &layer, 3, &all[3], &Dispatch::default()).await?;
        same_rows(&ep, 3, &got, expected.rows(), &expected)?;
        layer.meet()?;
        Ok((after.0 - before.0, after.1 - before.1))
    })?;
    same("dispatches ahead", 2, &went, &[(0, 0), (0, 1), (0, 1), (0, 1)]).map_err(text)
}

/// Choices that are refused while the kernels behind them are enqueued: nothing has moved, the number is free, and so is the block.
pub(crate) fn refused() -> Verdict {
    let layer = Layer::sized(Placement::Direct, 4, 1 << 20).map_err(text)?;
    let all = batches(&layer, 0, Spread::Even).map_err(text)?;
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let bad = Uploaded::bad(&mut ep, &all[me])?;
        for turn in 0..turns(40, 10) {
            if turn > 0 && ep.rank().index() == 2 {
                let said = ep.dispatch(&bad.x, &bad.routing()).await.map(drop).map_err(|error| error.to_string());
                let is_named = said.as_ref().is_err_and(|said| said.contains("topk_idx of token 1"));
                same("bad choices that are named", turn, &[is_named], &[true])?;
            }
            let (got, _) = turn_of(&mut ep, &layer, turn, &all, &Dispatch::default()).await?;
            same("a lease", turn, &[matches!(got.x, Rows::Leased(_))], &[true])?;
        }
        layer.meet()?;
        let (ahead, in_vain) = ep.gone_ahead();
        same("dispatches without room", 0, &[in_vain, u64::from(ahead > 0)], &[0, 1])
    })?;
    Ok(())
}

/// A rank leaves, and the others fail in counts behind which they have granted nothing yet: the block that was taken ahead is not held back for it.
pub(crate) fn lost_before_its_counts() -> Verdict {
    let shape =
        Shape::builder().experts(3 * LOCAL).topk(TOPK).hidden(HIDDEN).max_tokens(TOKENS).build().map_err(text)?;
    let format = RowFormat::new(&shape);
    // Little more than what is taken ahead of a batch that brings the most rows.
    let arena = 2 * format.block_bytes(u64::from(3 * TOKENS + 16));
    let layer = Layer::sized(Placement::Direct, 3, arena).map_err(text)?;
    let all = batches(&layer, 0, Spread::Even).map_err(text)?;
    let leaver = Rank(2);
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &all[me])?;
        for _ in 0..2 {
            drop(ep.dispatch(&input.x, &input.routing()).await?);
        }
        layer.meet()?;
        if ep.rank() == leaver {
            return Ok(());
        }
        let failure = next_call(&mut ep, &input).await?;
        same("culprits", 1, &[failure.culprit], &[leaver])?;
        ep.recover(&RankSet::from_iter([leaver])).await?;
        let handle = ep.dispatch(&input.x, &input.routing()).await?.handle;
        let all: Vec<Rows> = std::iter::from_fn(|| ep.output(&handle)).collect();
        let each = format.results().block_bytes(handle.rows().into());
        let left = arena.saturating_sub(all.len() as u64 * each);
        same("whether the arena is all there", 2, &[left < 2 * each], &[true])
    })?;
    Ok(())
}
