//! Throughput mode: cached and worst-case dispatch, combine, and ordinary calls in between.

use ep_conformance::drive::{Round, round};
use ep_conformance::verify::{bits_of, bytes_of};
use ep_conformance::workload::Batch;
use ep_core::engine::{Combine, Dispatch, ExpertSlots, Handle, Received};
use ep_core::{Endpoint, Error, Placement, Rank};
use ep_cuda::driver::Graph;
use ep_cuda::{CudaEndpoint, Rows};

use super::Verdict;
use super::fixture::{Layer, TOKENS, Uploaded, replay, same, same_rows, same_sums, turns};

/// Replays of each graph.
const REPLAYS: u64 = 100;
/// Rows that a rank may receive.
const BOUND: u32 = 4 * TOKENS;

pub(crate) const WORST: Dispatch = Dispatch {
    rings: None,
    outbox: ep_core::OutboxUse::USUAL,
    expert_alignment: 1,
    by_expert: false,
    worst_rows: BOUND,
    zero_spare: true,
    device_counts: true,
    repeats: false,
};

type Back = ep_core::engine::Combined<CudaEndpoint>;

fn text(error: Error) -> String {
    error.to_string()
}

/// Through rings; placed and pulled; and so but for rank 2, whose arena is full.
const WAYS: [(Placement, Option<Rank>); 3] =
    [(Placement::Ring, None), (Placement::Direct, None), (Placement::Direct, Some(Rank(2)))];

/// Through rings between nodes, and within them as well or to their places.
const WAYS_OVER_NODES: [Placement; 2] = [Placement::Ring, Placement::Direct];

/// Takes all that the arena has left for results of `handle`, where this is the rank that is to have none.
fn fill_arena(ep: &mut CudaEndpoint, handle: &Handle, full: Option<Rank>) -> Vec<Rows> {
    let is_full = full == Some(ep.rank());
    std::iter::from_fn(|| is_full.then(|| ep.output(handle)).flatten()).collect()
}

/// Rows go out along a handle and straight back.
pub(crate) fn cached() -> Verdict {
    WAYS.into_iter().try_for_each(|(placement, full)| cached_on(&Layer::new(placement).map_err(text)?, full))
}

pub(crate) fn cached_over_nodes() -> Verdict {
    let on = |placement| cached_on(&Layer::over_nodes(placement).map_err(text)?, None);
    WAYS_OVER_NODES.into_iter().try_for_each(on)
}

fn cached_on(layer: &Layer, full: Option<Rank>) -> Verdict {
    let (graph_only, first) = (Round::default(), layer.batches(0).map_err(text)?);
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let (_, handle) = round(&mut ep, &layer.world, &first[me], &graph_only).await?;
        let _kept = fill_arena(&mut ep, &handle, full);
        let mut input = Uploaded::new(&mut ep, &first[me])?;
        let (mut graph, got, back) = along(&mut ep, &input.x, &handle).await?;
        layer.meet()?;
        for turn in 1..=turns(REPLAYS, 13) {
            // The routing stays, the rows change.
            let rows = layer.batches(turn)?.into_iter().zip(&first);
            let batches: Vec<_> = rows.map(|(new, first)| Batch { x: new.x, ..first.clone() }).collect();
            let (received, combined) = layer.expected(&batches, None);
            ep.store(&mut input.x, 0, &bytes_of(&batches[me].x))?;
            replay(&ep, &mut graph)?;
            same_rows(&ep, turn, &got, received[me].rows(), &received[me])?;
            same_sums(&ep, turn, &back, &combined[me])?;
            if turn % 10 == 0 {
                let plain = ep.redispatch(&input.x, &handle).await?;
                let sums = ep.combine(&plain.x, &plain.handle, Combine::default()).await?;
                same("bytes of an ordinary call", turn, &ep.bytes(&plain.x)?, &ep.bytes(&got.x)?)?;
                same("sums of an ordinary call", turn, &ep.bytes(&sums.x)?, &ep.bytes(&back.x)?)?;
            }
        }
        Ok(())
    })?;
    Ok(())
}

/// Rows by expert: a graph brings what ordinary calls bring, which the suite holds against the oracle.
pub(crate) fn by_expert() -> Verdict {
    [Placement::Ring, Placement::Direct].into_iter().try_for_each(|placement| {
        let layer = Layer::new(placement).map_err(text)?;
        let first = layer.batches(0).map_err(text)?;
        layer.run(async |mut ep| {
            let me = ep.rank().index();
            let mut input = Uploaded::new(&mut ep, &first[me])?;
            let options = Dispatch { by_expert: true, expert_alignment: 4, zero_spare: true, ..Dispatch::default() };
            let handle = ep.dispatch_with(&input.x, &input.routing(), &options).await?.handle;
            let (mut graph, got, back) = along(&mut ep, &input.x, &handle).await?;
            layer.meet()?;
            for turn in 1..=turns(REPLAYS, 13) {
                let new = layer.batches(turn)?;
                ep.store(&mut input.x, 0, &bytes_of(&new[me].x))?;
                replay(&ep, &mut graph)?;
                let plain = ep.redispatch(&input.x, &handle).await?;
                let sums = ep.combine(&plain.x, &plain.handle, Combine::default()).await?;
                same("slots", turn, &[got.x.rows()], &[handle.slots().unwrap_or_default()])?;
                same("bytes of an ordinary call", turn, &ep.bytes(&got.x)?, &ep.bytes(&plain.x)?)?;
                same("sums of an ordinary call", turn, &ep.bytes(&back.x)?, &ep.bytes(&sums.x)?)?;
            }
            Ok(())
        })?;
        Ok(())
    })
}

/// Rows by expert whose number stays on the device: where they stand follows the routing of each replay. Ordinary calls, whose counts come to the
/// host, say where that is.
pub(crate) fn by_expert_worst_case() -> Verdict {
    let ways = [Placement::Ring, Placement::Direct].into_iter().map(Layer::new);
    let nodes = [Placement::Direct].into_iter().map(Layer::over_nodes);
    ways.chain(nodes).try_for_each(|layer| by_expert_worst_case_on(&layer.map_err(text)?))
}

fn by_expert_worst_case_on(layer: &Layer) -> Verdict {
    let first = layer.batches(0).map_err(text)?;
    let known = Dispatch { by_expert: true, expert_alignment: 4, zero_spare: true, ..Dispatch::default() };
    let sizes = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let mut input = Uploaded::new(&mut ep, &first[me])?;
        let options = Dispatch { by_expert: true, expert_alignment: 4, ..WORST };
        let (mut graph, got, back) = fresh(&mut ep, &input, &options).await?;
        layer.meet()?;
        let mut sizes = std::collections::BTreeSet::new();
        for turn in 1..=turns(REPLAYS, 9) {
            let mut batch = layer.batches(turn)?.swap_remove(me);
            batch.drop_choices((turn % 4) as f64 / 4.0, turn, ep.rank())?;
            input.replace(&mut ep, &batch)?;
            replay(&ep, &mut graph)?;
            let plain = ep.dispatch_with(&input.x, &input.routing(), &known).await?;
            let weights = Combine { topk_weights: Some(&plain.topk_weights), ..Combine::default() };
            let sums = ep.combine(&plain.x, &plain.handle, weights).await?;
            same_places(&ep, turn, &got, &plain)?;
            same("sums of an ordinary call", turn, &ep.bytes(&back.x)?, &ep.bytes(&sums.x)?)?;
            let [mine, theirs] = [&back.topk_weights, &sums.topk_weights].map(|sums| ep.values(sums));
            same("weights of an ordinary call", turn, &mine?, &theirs?)?;
            sizes.insert(plain.x.rows());
            if turn % 4 == 0 {
                let cached = ep.redispatch(&input.x, &got.handle).await?;
                same_places(&ep, turn, &cached, &plain)?;
                let sums = ep.combine(&cached.x, &cached.handle, Combine::default()).await?;
                same("sums of a cached call", turn, &ep.bytes(&sums.x)?, &ep.bytes(&back.x)?)?;
            }
        }
        Ok(sizes.len())
    })?;
    if sizes.iter().any(|&sizes| sizes < 3) {
        return Err(format!("{sizes:?} different numbers of rows came: the routing did not change"));
    }
    Ok(())
}

/// Rows by expert in room for more than come stand where those stand whose number the host knows, with zeros behind them.
fn same_places(
    ep: &CudaEndpoint,
    turn: u64,
    got: &Received<CudaEndpoint>,
    plain: &Received<CudaEndpoint>,
) -> Result<(), Error> {
    let missing = || Error::invalid("rows by expert", "told otherwise", "as they were asked for");
    let (roomy, exact) = (got.by_expert.as_ref().ok_or_else(missing)?, plain.by_expert.as_ref().ok_or_else(missing)?);
    let ExpertSlots::OnDevice { first, counts } = &roomy.experts else { return Err(missing()) };
    let ExpertSlots::OnHost { first: known_first, counts: known_counts } = &exact.experts else {
        return Err(missing());
    };
    same("first slots", turn, &ep.values(first)?, known_first)?;
    same("rows of experts", turn, &ep.values(counts)?, known_counts)?;
    let mut slots = ep.values(&exact.slots)?;
    slots.resize(roomy.slots.len(), -1);
    same("slots", turn, &ep.values(&roomy.slots)?, &slots)?;
    same("offsets", turn, &ep.values(&roomy.offsets)?, &ep.values(&exact.offsets)?)?;
    let mut bytes = ep.bytes(&plain.x)?;
    bytes.resize(got.handle.result_rows() as usize * ep.shape().row_bytes() as usize, 0);
    same("bytes", turn, &ep.bytes(&got.x)?, &bytes)
}

/// Captures a cached dispatch of `x` and a combine of what it brings.
pub(crate) async fn along(
    ep: &mut CudaEndpoint,
    x: &Rows,
    handle: &Handle,
) -> Result<(Graph, Received<CudaEndpoint>, Back), Error> {
    let stream = ep.stream().clone();
    stream.begin_capture()?;
    let got = ep.redispatch(x, handle).await?;
    let back = ep.combine(&got.x, &got.handle, Combine::default()).await?;
    Ok((stream.end_capture()?, got, back))
}

/// Captures a dispatch whose counts stay on the device, and a combine with weights of what it brings.
pub(crate) async fn fresh(
    ep: &mut CudaEndpoint,
    input: &Uploaded,
    options: &Dispatch,
) -> Result<(Graph, Received<CudaEndpoint>, Back), Error> {
    let stream = ep.stream().clone();
    stream.begin_capture()?;
    let got = ep.dispatch_with(&input.x, &input.routing(), options).await?;
    let weights = Combine { topk_weights: Some(&got.topk_weights), ..Combine::default() };
    let back = ep.combine(&got.x, &got.handle, weights).await?;
    Ok((stream.end_capture()?, got, back))
}

/// Results in ordinary memory, copied to where peers pull from, with weights and bias.
pub(crate) fn from_anywhere() -> Verdict {
    for (placement, arena) in [(Placement::Direct, 1 << 20), (Placement::Direct, 0), (Placement::Ring, 1 << 20)] {
        let layer = Layer::sized(placement, 3, arena).map_err(text)?;
        let first = layer.batches(0).map_err(text)?;
        layer.run(async |mut ep| {
            let me = ep.rank().index();
            let input = Uploaded::new(&mut ep, &first[me])?;
            let handle = ep.dispatch(&input.x, &input.routing()).await?.handle;
            let (received, _) = layer.expected(&first, None);
            let mut y = ep.rows(&bytes_of(&received[me].x), handle.rows())?;
            let mut bias = ep.rows(&bytes_of(&first[me].x), first[me].tokens)?;
            let weights = ep.array(&received[me].topk_weights)?;
            let stream = ep.stream().clone();
            stream.begin_capture()?;
            let options = Combine { topk_weights: Some(&weights), bias: [Some(&bias), None], ..Combine::default() };
            let back = ep.combine(&y, &handle, options).await?;
            let mut graph = stream.end_capture()?;
            layer.meet()?;
            for turn in 1..=turns(30, 4) {
                let new = layer.batches(turn)?;
                let batches: Vec<_> =
                    new.iter().zip(&first).map(|(new, first)| Batch { x: new.x.clone(), ..first.clone() }).collect();
                let (received, combined) = layer.expected(&batches, Some(&new));
                ep.store(&mut y, 0, &bytes_of(&received[me].x))?;
                ep.store(&mut bias, 0, &bytes_of(&new[me].x))?;
                replay(&ep, &mut graph)?;
                same_sums(&ep, turn, &back, &combined[me])?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Rows, choices and weights change from replay to replay, and with them how many rows come.
pub(crate) fn worst_case() -> Verdict {
    WAYS.into_iter().try_for_each(|(placement, full)| worst_case_on(&Layer::new(placement).map_err(text)?, full))
}

pub(crate) fn worst_case_over_nodes() -> Verdict {
    let on = |placement| worst_case_on(&Layer::over_nodes(placement).map_err(text)?, None);
    WAYS_OVER_NODES.into_iter().try_for_each(on)
}

fn worst_case_on(layer: &Layer, full: Option<Rank>) -> Verdict {
    let first = layer.batches(0).map_err(text)?;
    let sizes = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let mut input = Uploaded::new(&mut ep, &first[me])?;
        let handle = ep.dispatch(&input.x, &input.routing()).await?.handle;
        let _kept = fill_arena(&mut ep, &handle, full);
        let (mut graph, got, back) = fresh(&mut ep, &input, &WORST).await?;
        let counts = got.counts.as_ref().ok_or_else(|| Error::invalid("counts", "none", "on the device"))?;
        layer.meet()?;
        let mut sizes = std::collections::BTreeSet::new();
        for turn in 1..=turns(REPLAYS, 13) {
            let mut batches = layer.batches(turn)?;
            for (rank, batch) in (0..).map(Rank).zip(&mut batches) {
                batch.drop_choices((turn % 4) as f64 / 4.0, turn, rank)?;
            }
            let (received, combined) = layer.expected(&batches, None);
            input.replace(&mut ep, &batches[me])?;
            replay(&ep, &mut graph)?;
            let rows = ep.values(&counts.rows)?[0] as usize;
            same("rows", turn, &[rows], &[received[me].rows()])?;
            same("expert counts", turn, &ep.values(&counts.experts)?, &received[me].expert_counts)?;
            same_rows(&ep, turn, &got, rows, &received[me])?;
            same_sums(&ep, turn, &back, &combined[me])?;
            sizes.insert(rows);
            if turn % 12 == 0 {
                // What the host is told on request is that of the last replay.
                let exchange = got.handle.exchange()?;
                same("rows told", turn, &[exchange.received(ep.rank()) as usize], &[rows])?;
                let exact = ep.dispatch(&input.x, &input.routing()).await?;
                same("plan", turn, &[got.handle.plan()?], &[exact.handle.plan()?])?;
            }
        }
        Ok(sizes.len())
    })?;
    if sizes.iter().any(|&sizes| sizes < 3) {
        return Err(format!("{sizes:?} different numbers of rows came: the routing did not change"));
    }
    Ok(())
}

/// Two graphs and ordinary calls of all kinds, in changing order.
pub(crate) fn mixed() -> Verdict {
    let both = [Placement::Ring, Placement::Direct].into_iter();
    both.map(Layer::new).try_for_each(|layer| mixed_on(&layer.map_err(text)?))
}

pub(crate) fn mixed_over_nodes() -> Verdict {
    WAYS_OVER_NODES.into_iter().map(Layer::over_nodes).try_for_each(|layer| mixed_on(&layer.map_err(text)?))
}

fn mixed_on(layer: &Layer) -> Verdict {
    let first = layer.batches(0).map_err(text)?;
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let mut input = Uploaded::new(&mut ep, &first[me])?;
        let exact = ep.dispatch(&input.x, &input.routing()).await?.handle;
        let (mut one, one_got, one_back) = along(&mut ep, &input.x, &exact).await?;
        let (mut two, two_got, two_back) = fresh(&mut ep, &input, &WORST).await?;
        layer.meet()?;
        let (received, combined) = layer.expected(&first, None);
        for turn in 1..=turns(20, 3) {
            replay(&ep, &mut one)?;
            replay(&ep, &mut two)?;
            if turn % 2 == 0 {
                replay(&ep, &mut one)?;
            }
            same_rows(&ep, turn, &one_got, received[me].rows(), &received[me])
                .map_err(|error| Error::unsupported("the first graph", error))?;
            same_sums(&ep, turn, &one_back, &combined[me])?;
            same_rows(&ep, turn, &two_got, received[me].rows(), &received[me])
                .map_err(|error| Error::unsupported("the second graph", error))?;
            same_sums(&ep, turn, &two_back, &combined[me])?;
            // Ordinary calls: along the handle that the last replay left, and fresh ones.
            let got = ep.redispatch(&input.x, &two_got.handle).await?;
            let rows = received[me].rows() * super::fixture::HIDDEN as usize;
            same("rows along the graph's handle", turn, &bits_of(&ep.bytes(&got.x)?)[..rows], &received[me].x)?;
            let how = Round { return_weights: true, pull: turn % 3 == 0, ..Round::default() };
            let (observed, _) = round(&mut ep, &layer.world, &first[me], &how).await?;
            same("rows of a call", turn, &bits_of(&observed.recv_x), &received[me].x)?;
            input.replace(&mut ep, &first[me])?;
        }
        Ok(())
    })?;
    Ok(())
}

/// Statistics count what replays moved.
pub(crate) fn statistics() -> Verdict {
    let layer = Layer::new(Placement::Direct).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let (mut graph, got, _back) = fresh(&mut ep, &input, &WORST).await?;
        layer.meet()?;
        same("operations before", 0, &[ep.stats().operations], &[0])?;
        for _ in 0..7 {
            replay(&ep, &mut graph)?;
        }
        let (stats, exchange) = (ep.stats(), got.handle.exchange()?);
        same("operations", 7, &[stats.operations], &[14])?;
        for (rank, peer) in (0..).map(Rank).zip(&stats.peers) {
            let moved = u64::from(exchange.rows(ep.rank(), rank)) + u64::from(exchange.rows(rank, ep.rank()));
            same("rows", 7, &[peer.rows_sent, peer.rows_received], &[7 * moved, 7 * moved])?;
        }
        let experts: Vec<u64> = exchange.expert_counts().iter().map(|&count| 7 * u64::from(count)).collect();
        same("rows of experts", 7, &stats.expert_rows, &experts)
    })?;
    Ok(())
}
