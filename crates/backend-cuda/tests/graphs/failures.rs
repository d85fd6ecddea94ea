//! Failures of replays: told by the next call, never a hang, and the communicator recovers.

use std::time::{Duration, Instant};

use ep_conformance::drive::{Round, round};
use ep_conformance::verify::{self, Observed};
use ep_conformance::workload::Batch;
use ep_core::engine::Dispatch;
use ep_core::engine::low_latency::LowRouting;
use ep_core::reference::Weighing;
use ep_core::{Endpoint, Error, Failure, Fault, LowLatency, Placement, RankSet};
use ep_cuda::{CudaEndpoint, LowPlaces};

use super::Verdict;
use super::fixture::{HIDDEN, LOCAL, Layer, TOKENS, Uploaded, deadline, replay, same};
use super::throughput::{WORST, along, fresh};

/// [`WORST`] of three ranks.
const WORST_OF_THREE: Dispatch = Dispatch { worst_rows: 3 * TOKENS, ..WORST };

fn text(error: Error) -> String {
    error.to_string()
}

/// An ordinary round, for the oracle.
async fn healthy(ep: &mut CudaEndpoint, layer: &Layer, batch: &Batch) -> Result<Observed, Error> {
    let how = Round { return_weights: true, ..Round::default() };
    round(ep, &layer.world, batch, &how).await.map(|(observed, _)| observed)
}

/// The failure that the next call tells, once everything enqueued has ended.
pub(crate) async fn next_call(ep: &mut CudaEndpoint, input: &Uploaded) -> Result<Failure, Error> {
    ep.stream().synchronize()?;
    let error = ep.dispatch(&input.x, &input.routing()).await.err();
    let failure = error.as_ref().and_then(Error::failure).copied();
    failure.ok_or_else(|| Error::invalid("the next call", format!("{error:?}"), "a failure"))
}

/// More rows than the bound: nothing is written, all learn whose bound it was, and a graph from before does nothing afterwards.
pub(crate) fn small_bound() -> Verdict {
    for placement in [Placement::Ring, Placement::Direct] {
        let layer = Layer::new(placement).map_err(text)?;
        let first = layer.batches(0).map_err(text)?;
        let bound = layer.expected(&first, None).0[1].rows() as u32;
        // Every token goes to both experts of rank 1.
        let crowd = |batch: &Batch| Batch { topk_idx: [2, 3, 0].repeat(batch.tokens as usize), ..batch.clone() };
        let crowded: Vec<Batch> = first.iter().map(crowd).collect();
        let rows = layer.expected(&crowded, None).0[1].rows();
        let outcomes = layer.run(async |mut ep| {
            let me = ep.rank().index();
            let mut input = Uploaded::new(&mut ep, &first[me])?;
            let options = if me == 1 { Dispatch { worst_rows: bound, ..WORST } } else { WORST };
            let (mut graph, got, _back) = fresh(&mut ep, &input, &options).await?;
            layer.meet()?;
            replay(&ep, &mut graph)?;
            let before = ep.bytes(&got.x)?;
            input.replace(&mut ep, &crowded[me])?;
            replay(&ep, &mut graph)?;
            let failure = next_call(&mut ep, &input).await?;
            if me == 1 {
                same("rows after a refused replay", 2, &ep.bytes(&got.x)?, &before)?;
            }
            // Replays of a failed communicator do nothing.
            replay(&ep, &mut graph)?;
            ep.stream().synchronize()?;
            layer.meet()?;
            ep.recover(&RankSet::new()).await?;
            let observed = healthy(&mut ep, &layer, &first[me]).await?;
            replay(&ep, &mut graph)?;
            let stale = next_call(&mut ep, &input).await?;
            layer.meet()?;
            ep.recover(&RankSet::new()).await?;
            Ok((failure, stale, observed, healthy(&mut ep, &layer, &first[me]).await?))
        })?;
        let (mut once, mut twice) = (Vec::new(), Vec::new());
        for (rank, (failure, stale, one, two)) in outcomes.into_iter().enumerate() {
            if failure.culprit.0 != 1 {
                return Err(format!("rank {rank}: {failure}, expected rank 1 for the culprit"));
            }
            let told = format!("worst-case rows is {bound} here and {rows} on rank 1");
            if rank == 1 && failure.fault.to_string() != told {
                return Err(format!("rank 1 said `{}`, expected `{told}`", failure.fault));
            }
            let told = "generation of a replayed graph is 2 here and 1";
            if !stale.fault.to_string().starts_with(told) {
                return Err(format!("rank {rank} said `{stale}` of a stale graph, expected `{told}`"));
            }
            once.push(one);
            twice.push(two);
        }
        for observed in [once, twice] {
            verify::run(&layer.world, &first, &observed).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

/// Choices are looked at in every replay: who has bad ones is told which, and tells the others that it takes no part; they do not wait for the deadline.
pub(crate) fn bad_choices() -> Verdict {
    let layer = Layer::sized(Placement::Direct, 3, 1 << 20).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let said = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let mut input = Uploaded::new(&mut ep, &first[me])?;
        let (mut graph, _got, _back) = fresh(&mut ep, &input, &WORST_OF_THREE).await?;
        layer.meet()?;
        replay(&ep, &mut graph)?;
        let mut batch = first[me].clone();
        if me == 0 {
            batch.topk_idx[4] = 99;
        }
        input.replace(&mut ep, &batch)?;
        replay(&ep, &mut graph)?;
        ep.stream().synchronize()?;
        let mut said = Vec::new();
        for _ in 0..2 {
            said.push(ep.dispatch(&input.x, &input.routing()).await.err());
        }
        layer.meet()?;
        ep.recover(&RankSet::new()).await?;
        Ok((said, healthy(&mut ep, &layer, &first[me]).await?))
    })?;
    let mut observed = Vec::new();
    for (rank, (said, saw)) in said.into_iter().enumerate() {
        let right = match (rank, &said[..]) {
            (0, [Some(first), Some(Error::Poisoned { .. })]) => first.to_string().starts_with("topk_idx of token 1 is"),
            // By whomever it was told first.
            (_, [Some(Error::Failed(first)), Some(Error::Poisoned { .. })]) => {
                first.culprit.0 == 0 && matches!(first.fault, Fault::Aborted { .. })
            }
            _ => false,
        };
        if !right {
            return Err(format!("rank {rank} said {said:?}"));
        }
        observed.push(saw);
    }
    verify::run(&layer.world, &first, &observed).map(drop).map_err(|error| error.to_string())
}

/// How long a rank waits for one that does not replay.
fn within_deadline(began: Instant) -> Result<(), Error> {
    let (took, most) = (began.elapsed(), Duration::from_nanos(deadline().0) + Duration::from_secs(4));
    if took > most {
        return Err(Error::invalid("wait for a missing rank", format!("{took:?}"), format!("at most {most:?}")));
    }
    Ok(())
}

/// The last of three ranks does not replay: the others say so, and the three go on together after a recovery.
pub(crate) fn missing(placement: Placement) -> Verdict {
    let layer = Layer::sized(placement, 3, 1 << 20).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let outcomes = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let handle = ep.dispatch(&input.x, &input.routing()).await?.handle;
        let (mut graph, _got, _back) = along(&mut ep, &input.x, &handle).await?;
        layer.meet()?;
        for _ in 0..5 {
            replay(&ep, &mut graph)?;
        }
        ep.stream().synchronize()?;
        layer.meet()?;
        let began = Instant::now();
        let mut failure = None;
        if me != 2 {
            replay(&ep, &mut graph)?;
            failure = Some(next_call(&mut ep, &input).await?);
            within_deadline(began)?;
        }
        layer.meet()?;
        if me == 2 {
            // Its own call finds out at once.
            let late = ep.redispatch(&input.x, &handle).await.err();
            failure = match late.as_ref().and_then(Error::failure) {
                Some(failure) => Some(*failure),
                None => Some(next_call(&mut ep, &input).await?),
            };
        }
        layer.meet()?;
        ep.recover(&RankSet::new()).await?;
        Ok((failure, healthy(&mut ep, &layer, &first[me]).await?))
    })?;
    let mut observed = Vec::new();
    for (rank, (failure, saw)) in outcomes.into_iter().enumerate() {
        let named = failure.is_some_and(|failure| {
            failure.culprit.0 == 2 && matches!(failure.fault, Fault::Timeout { .. } | Fault::Aborted { .. })
        });
        if !named {
            return Err(format!("rank {rank} said {failure:?}, expected rank 2 to be missing"));
        }
        observed.push(saw);
    }
    verify::run(&layer.world, &first, &observed).map(drop).map_err(|error| error.to_string())
}

/// The same in low latency, where the missing rank itself hears of nothing.
pub(crate) fn missing_low() -> Verdict {
    let layer = Layer::sized(Placement::Ring, 3, 1 << 20).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let outcomes = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let routing = LowRouting::new(input.topk_idx.clone(), Some(input.topk_weights.clone()));
        let stream = ep.stream().clone();
        stream.begin_capture()?;
        let got = ep.low_latency_dispatch(&input.x, &routing).await?;
        let _back = ep.low_latency_combine(&got.x, &got.handle, None).await?;
        let mut graph = stream.end_capture()?;
        layer.meet()?;
        for _ in 0..5 {
            replay(&ep, &mut graph)?;
        }
        stream.synchronize()?;
        layer.meet()?;
        let began = Instant::now();
        let mut failure = None;
        if me != 2 {
            replay(&ep, &mut graph)?;
            // What is enqueued behind does nothing.
            replay(&ep, &mut graph)?;
            stream.synchronize()?;
            let error = ep.low_latency_dispatch(&input.x, &routing).await.err();
            failure = error.as_ref().and_then(Error::failure).copied();
            within_deadline(began)?;
        }
        layer.meet()?;
        ep.rejoin().await?;
        let seen = ep_conformance::low_latency::round(&mut ep, &layer.world, &first[me], Weighing::AtExperts).await?;
        Ok((failure, seen))
    })?;
    let mut seen = Vec::new();
    for (rank, (failure, saw)) in outcomes.into_iter().enumerate() {
        let named =
            failure.is_some_and(|failure| failure.culprit.0 == 2 && matches!(failure.fault, Fault::Timeout { .. }));
        if rank != 2 && !named {
            return Err(format!("rank {rank} said {failure:?}, expected rank 2 to be missing"));
        }
        seen.push(saw);
    }
    let verified = ep_conformance::low_latency::verify::run(&layer.world, &first, Weighing::AtExperts, &seen);
    verified.map(drop).map_err(|error| error.to_string())
}

/// A dispatch that waits, behind one that did not and had bad choices: what it tells is the other's failure, which poisons. Were it taken for its own,
/// its rows would be another operation's at the peers.
pub(crate) fn not_its_own() -> Verdict {
    let layer = Layer::sized(Placement::Ring, 3, 1 << 20).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let said = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let bad = Uploaded::bad(&mut ep, &first[me])?;
        let routing = |input: &Uploaded| LowRouting::new(input.topk_idx.clone(), Some(input.topk_weights.clone()));
        let rows = LOCAL as usize * 3 * TOKENS as usize;
        let [x, counts, segments, tokens] =
            [rows * 2 * HIDDEN as usize, 4 * LOCAL as usize, 8 * 3 * LOCAL as usize, 4 * rows]
                .map(|bytes| ep.bytes_room(bytes));
        let (x, counts, segments, tokens) = (x?, counts?, segments?, tokens?);
        let places = LowPlaces {
            x: x.address(),
            scales: None,
            expert_counts: counts.address(),
            segments: segments.address(),
            source_token: tokens.address(),
            by_source: None,
            packed: None,
            most_rows: None,
            stats: 0,
            owner: None,
        };
        let given = routing(&input);
        layer.meet()?;
        let mut said = Vec::new();
        if me == 0 {
            // Lasts until the others send, so that nothing is reported before all is enqueued.
            let _before = ep.low_latency_dispatch(&input.x, &given).await?;
            let _refused = ep.low_latency_dispatch(&bad.x, &routing(&bad)).await?;
            // SAFETY: there is room for all that comes.
            let waits = unsafe { ep.low_latency_dispatch_into(&input.x, &given, &places, true) }.await;
            said.push(waits.err());
            said.push(ep.low_latency_dispatch(&input.x, &given).await.err());
        } else {
            std::thread::sleep(Duration::from_millis(300));
            let _before = ep.low_latency_dispatch(&input.x, &given).await?;
        }
        layer.meet()?;
        ep.rejoin().await?;
        let seen = ep_conformance::low_latency::round(&mut ep, &layer.world, &first[me], Weighing::AtExperts).await?;
        Ok((said, seen))
    })?;
    let (said, seen): (Vec<_>, Vec<_>) = said.into_iter().unzip();
    let [Some(first_said), Some(Error::Poisoned { .. })] = &said[0][..] else {
        return Err(format!("said {:?}, expected bad choices, then a poisoned communicator", said[0]));
    };
    if !first_said.to_string().starts_with("topk_idx of token 1 is") {
        return Err(format!("said {first_said}, expected the choices of token 1"));
    }
    let verified = ep_conformance::low_latency::verify::run(&layer.world, &first, Weighing::AtExperts, &seen);
    verified.map(drop).map_err(|error| error.to_string())
}

/// The same in throughput mode, of a dispatch whose counts come to the host behind one whose counts do not.
pub(crate) fn not_its_own_choices() -> Verdict {
    let layer = Layer::sized(Placement::Direct, 3, 1 << 20).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let said = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let bad = Uploaded::bad(&mut ep, &first[me])?;
        layer.meet()?;
        let mut said = Vec::new();
        if me == 0 {
            // Lasts until the others dispatch, so that nothing is reported before all is enqueued.
            let _before = ep.dispatch_with(&input.x, &input.routing(), &WORST_OF_THREE).await?;
            let _refused = ep.dispatch_with(&bad.x, &bad.routing(), &WORST_OF_THREE).await?;
            said.push(ep.dispatch(&input.x, &input.routing()).await.err());
            said.push(ep.dispatch(&input.x, &input.routing()).await.err());
        } else {
            std::thread::sleep(Duration::from_millis(300));
            let _before = ep.dispatch_with(&input.x, &input.routing(), &WORST_OF_THREE).await?;
        }
        layer.meet()?;
        ep.recover(&RankSet::new()).await?;
        Ok((said, healthy(&mut ep, &layer, &first[me]).await?))
    })?;
    let (said, seen): (Vec<_>, Vec<_>) = said.into_iter().unzip();
    match &said[0][..] {
        [Some(told), Some(Error::Poisoned { .. })] if told.to_string().starts_with("topk_idx of token 1 is") => {}
        _ => return Err(format!("said {:?}, expected bad choices, then a poisoned communicator", said[0])),
    }
    verify::run(&layer.world, &first, &seen).map(drop).map_err(|error| error.to_string())
}
