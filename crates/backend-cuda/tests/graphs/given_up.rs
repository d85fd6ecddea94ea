//! A rank that was given up goes on and launches what it had not launched: what it stores lies nowhere that the others use again.

use std::thread::sleep;
use std::time::Duration;

use ep_conformance::verify::bytes_of;
use ep_core::{Endpoint, Error, Placement, Rank, RankSet};
use ep_cuda::Rows;

use super::Verdict;
use super::failures::next_call;
use super::fixture::{Layer, Uploaded, replay, same, turns};
use super::throughput::along;

/// When the rows of the failed operation are dropped, and what the operation was.
#[derive(Clone, Copy, Debug)]
enum Drops {
    /// As soon as the call has returned.
    AtOnce,
    /// When the failure was told.
    WhenTold,
    /// When the others have recovered.
    Recovered,
    /// Never: the rank does store there.
    Never,
    /// With the graph that the call was captured into, before anybody asked how it ended.
    WithGraph,
}

/// The rank that is stopped.
const ZOMBIE: Rank = Rank(2);

/// Placed rows, of calls that waited for no kernel and whose rows are dropped.
pub(crate) fn stores() -> Verdict {
    // Each waits for a deadline: a run that is not thorough has the first ones.
    [Drops::AtOnce, Drops::WithGraph, Drops::Never, Drops::WhenTold, Drops::Recovered]
        .into_iter()
        .take(turns(5, 5) as usize)
        .try_for_each(|drops| stores_where(drops).map_err(|problem| format!("{drops:?}: {problem}")))
}

fn stores_where(drops: Drops) -> Verdict {
    let text = |error: Error| error.to_string();
    let layer = Layer::sized(Placement::Direct, 3, 1 << 20).map_err(text)?;
    let (first, others) = (layer.batches(0).map_err(text)?, layer.batches(1).map_err(text)?);
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let handle = ep.dispatch(&input.x, &input.routing()).await?.handle;
        layer.meet()?;
        if ep.rank() == ZOMBIE {
            // The others give it up.
            layer.meet()?;
            let ones = ep.rows(&bytes_of(&vec![0x3f80u16; first[me].x.len()]), first[me].tokens)?;
            let late = ep.redispatch(&ones, &handle).await;
            ep.stream().synchronize()?;
            layer.meet()?;
            let failure = match late {
                Err(error) => Some(error),
                Ok(_) => ep.redispatch(&ones, &handle).await.err(),
            };
            return same("failures of a rank that was given up", 1, &[failure.is_some()], &[true]);
        }
        let mut held: Option<Rows> = None;
        if let Drops::WithGraph = drops {
            let (mut graph, got, back) = along(&mut ep, &input.x, &handle).await?;
            replay(&ep, &mut graph)?;
            ep.stream().synchronize()?;
            drop((graph, got, back));
            // The driver says when a graph is gone; that takes a moment.
            sleep(Duration::from_millis(100));
        } else {
            held = Some(ep.redispatch(&input.x, &handle).await?.x);
        }
        same("leases", 1, &[held.as_ref().is_none_or(|rows| matches!(rows, Rows::Leased(_)))], &[true])?;
        if let Drops::AtOnce = drops {
            held = None;
        }
        let failure = next_call(&mut ep, &input).await?;
        same("culprits", 1, &[failure.culprit], &[ZOMBIE])?;
        if let Drops::WhenTold = drops {
            held = None;
        }
        ep.recover(&RankSet::from_iter([ZOMBIE])).await?;
        if let Drops::Recovered = drops {
            held = None;
        }
        let input = Uploaded::new(&mut ep, &others[me])?;
        let mut got = Vec::new();
        for _ in 0..2 {
            got.push(ep.dispatch(&input.x, &input.routing()).await?);
        }
        let seen = |ep: &ep_cuda::CudaEndpoint| -> Result<Vec<Vec<u8>>, Error> {
            let own = got.iter().map(|got| &got.x).chain(&held);
            own.map(|rows| ep.bytes(rows)).collect()
        };
        let before = seen(&ep)?;
        layer.meet()?;
        layer.meet()?;
        let after = seen(&ep)?;
        for (at, (before, after)) in before.iter().zip(&after).enumerate() {
            if at < got.len() {
                same("rows after the other went on", at as u64, after, before)?;
            } else {
                same("whether it stored where it was let", 1, &[before == after], &[false])?;
            }
        }
        Ok(())
    })?;
    Ok(())
}

/// It stores into its rings, where an outbox would lie: who has lost a rank has no outboxes any more, and what the arena has no room for goes through rings.
pub(crate) fn outboxes() -> Verdict {
    let text = |error: Error| error.to_string();
    let layer = Layer::with_outboxes(3).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let all = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let mut ways = Vec::new();
        for recovers in [false, true] {
            layer.meet()?;
            if recovers && ep.rank() == ZOMBIE {
                break;
            }
            if recovers {
                ep.recover(&RankSet::from_iter([ZOMBIE])).await?;
            }
            let placed = ep.dispatch(&input.x, &input.routing()).await?;
            let full: Vec<_> = std::iter::from_fn(|| ep.output(&placed.handle)).collect();
            let beyond = ep.dispatch(&input.x, &input.routing()).await?;
            same("rows without room", 1, &ep.bytes(&beyond.x)?, &ep.bytes(&placed.x)?)?;
            ways.push([placed.handle.outboxes(), beyond.handle.outboxes()]);
            drop(full);
        }
        layer.meet()?;
        Ok(ways)
    })?;
    for (rank, ways) in all.into_iter().enumerate() {
        let expected = &[[false, true], [false, false]][..if rank == ZOMBIE.index() { 1 } else { 2 }];
        same("through outboxes", rank as u64, &ways, expected).map_err(text)?;
    }
    Ok(())
}
