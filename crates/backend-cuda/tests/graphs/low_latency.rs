//! Low latency: both halves in a launch, or a launch each, replayed with changing rows and routing.

use ep_conformance::low_latency::{Seen, round};
use ep_conformance::verify::bits_of;
use ep_conformance::workload::Batch;
use ep_core::engine::low_latency::{LowCombined, LowReceived, LowRouting};
use ep_core::reference::{self, Weighing};
use ep_core::{Endpoint, Error, LowLatency, Nanos, Placement};
use ep_cuda::driver::Graph;
use ep_cuda::{Array, Consumed, CudaEndpoint, Ready, Signals};

use super::Verdict;
use super::fixture::{HIDDEN, LOCAL, Layer, TOKENS, Uploaded, replay, same, turns};

fn text(error: Error) -> String {
    error.to_string()
}

type Routing = LowRouting<Array<i64>, Array<f32>>;

fn routing(input: &Uploaded, weighing: Weighing) -> Routing {
    let topk_weights = (weighing == Weighing::AtExperts).then(|| input.topk_weights.clone());
    LowRouting::new(input.topk_idx.clone(), topk_weights)
}

fn weights(input: &Uploaded, weighing: Weighing) -> Option<&Array<f32>> {
    (weighing == Weighing::AtSource).then_some(&input.topk_weights)
}

/// What a captured round writes to.
struct Round {
    got: LowReceived<CudaEndpoint>,
    back: LowCombined<CudaEndpoint>,
}

/// Holds what a replay brought against the oracle: rows go straight back from their experts.
fn compare(
    layer: &Layer,
    ep: &CudaEndpoint,
    turn: u64,
    seen: &Round,
    batches: &[Batch],
    how: Weighing,
) -> Result<(), Error> {
    let me = ep.rank().index();
    let inputs: Vec<_> = batches.iter().map(Batch::reference).collect();
    let received = reference::low_latency_dispatch(&layer.world, &inputs);
    let row = |rank: usize, token: usize| &batches[rank].x[token * HIDDEN as usize..(token + 1) * HIDDEN as usize];
    let got = Seen::of_dispatch(ep, &seen.got)?;
    for (expected, got) in received[me].iter().zip(&got.experts) {
        same("source ranks", turn, &got.source_rank, &expected.source_rank)?;
        same("source tokens", turn, &got.source_token, &expected.source_token)?;
        let sources = expected.source_rank.iter().zip(&expected.source_token);
        let rows: Vec<u16> = sources.flat_map(|(&rank, &token)| row(rank as usize, token as usize)).copied().collect();
        same("rows", turn, &bits_of(&got.x), &rows)?;
    }
    let result = |rank: ep_core::Rank, local: usize, at: usize| {
        let expert = &received[rank.index()][local];
        row(expert.source_rank[at] as usize, expert.source_token[at] as usize)
    };
    let combined = reference::low_latency_combine(&layer.world, &inputs, how, result);
    same("sums", turn, &bits_of(&ep.bytes(&seen.back.x)?), &combined[me])
}

async fn captured(ep: &mut CudaEndpoint, input: &Uploaded, how: Weighing) -> Result<(Graph, Round), Error> {
    let stream = ep.stream().clone();
    stream.begin_capture()?;
    let got = ep.low_latency_dispatch(&input.x, &routing(input, how)).await?;
    let back = ep.low_latency_combine(&got.x, &got.handle, weights(input, how)).await?;
    Ok((stream.end_capture()?, Round { got, back }))
}

/// Replays a graph, each time with another batch, and holds what it brought against the oracle.
fn replay_turns(
    layer: &Layer,
    ep: &mut CudaEndpoint,
    (graph, seen): (&mut Graph, &Round),
    input: &mut Uploaded,
    how: Weighing,
) -> Result<(), Error> {
    for turn in 1..=turns(100, 6) {
        let batches = layer.batches(turn)?;
        input.replace(ep, &batches[ep.rank().index()])?;
        replay(ep, graph)?;
        compare(layer, ep, turn, seen, &batches, how)?;
    }
    Ok(())
}

/// Replays of dispatch and combine, in both forms.
pub(crate) fn replays() -> Verdict {
    replays_on(Layer::new)
}

pub(crate) fn replays_over_nodes() -> Verdict {
    replays_on(Layer::over_nodes)
}

/// Makes a layer.
type Make = fn(Placement) -> Result<Layer, Error>;

fn replays_on(make: Make) -> Verdict {
    for how in [Weighing::AtSource, Weighing::AtExperts] {
        let layer = make(Placement::Ring).map_err(text)?;
        let first = layer.batches(0).map_err(text)?;
        layer.run(async |mut ep| {
            let me = ep.rank().index();
            let mut input = Uploaded::new(&mut ep, &first[me])?;
            let (mut graph, seen) = captured(&mut ep, &input, how).await?;
            layer.meet()?;
            replay_turns(&layer, &mut ep, (&mut graph, &seen), &mut input, how)
        })?;
    }
    Ok(())
}

/// Rows are consumed, and results read, by counters that nobody clears: each replay is the next batch of them.
pub(crate) fn early() -> Verdict {
    let how = Weighing::AtExperts;
    let layer = Layer::new(Placement::Ring).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let mut input = Uploaded::new(&mut ep, &first[me])?;
        ep.prepare_to_consume()?;
        let early = ep.early(5, Some(1))?;
        let y = ep.room(LOCAL * ep.topology().ranks() * TOKENS, 2 * HIDDEN as usize)?;
        let out = ep.array(&[0; 2])?;
        let stream = ep.stream().clone();
        stream.begin_capture()?;
        let sent = ep.send_dispatch_early(&input.x, &routing(&input, how), &early).await?;
        let got = ep.receive_dispatch(&sent).await?;
        let consumed = Consumed {
            early: &early,
            expert_counts: &got.expert_counts,
            x: &got.x,
            y: &y,
            signals: None,
            out: &out,
            pause: Nanos(0),
        };
        // SAFETY: all of it outlives the graph.
        unsafe { ep.consume(&stream, 2, &consumed) }?;
        let ready = Ready { signals: Signals::Early, due: 1, multiprocessors: Some(1) };
        let sums = ep.send_combine_ready(&y, &got.handle, None, &ready).await?;
        let back = ep.receive_combine(&sums).await?;
        let (mut graph, seen) = (stream.end_capture()?, Round { got, back });
        layer.meet()?;
        replay_turns(&layer, &mut ep, (&mut graph, &seen), &mut input, how)?;
        same("blocks that did not come", 0, &ep.values(&out)?, &[0, 0])
    })?;
    Ok(())
}

/// Halves apart, two operations in flight.
pub(crate) fn halves() -> Verdict {
    halves_on(Layer::new)
}

pub(crate) fn halves_over_nodes() -> Verdict {
    halves_on(Layer::over_nodes)
}

fn halves_on(make: Make) -> Verdict {
    let how = Weighing::AtExperts;
    let layer = make(Placement::Ring).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let mut one = Uploaded::new(&mut ep, &first[me])?;
        let mut two = Uploaded::new(&mut ep, &first[me])?;
        let stream = ep.stream().clone();
        stream.begin_capture()?;
        let sent_one = ep.send_dispatch(&one.x, &routing(&one, how)).await?;
        let sent_two = ep.send_dispatch(&two.x, &routing(&two, how)).await?;
        let got_one = ep.receive_dispatch(&sent_one).await?;
        let back_one = ep.send_combine(&got_one.x, &got_one.handle, None).await?;
        let got_two = ep.receive_dispatch(&sent_two).await?;
        let back_two = ep.send_combine(&got_two.x, &got_two.handle, None).await?;
        let back_one = ep.receive_combine(&back_one).await?;
        let back_two = ep.receive_combine(&back_two).await?;
        let mut graph = stream.end_capture()?;
        let seen = [Round { got: got_one, back: back_one }, Round { got: got_two, back: back_two }];
        layer.meet()?;
        for turn in 1..=turns(50, 4) {
            let batches = [layer.batches(2 * turn)?, layer.batches(2 * turn + 1)?];
            one.replace(&mut ep, &batches[0][me])?;
            two.replace(&mut ep, &batches[1][me])?;
            replay(&ep, &mut graph)?;
            for (seen, batches) in seen.iter().zip(&batches) {
                compare(&layer, &ep, turn, seen, batches, how)?;
            }
        }
        Ok(())
    })?;
    Ok(())
}

/// Replays, ordinary low latency and throughput mode in turns.
pub(crate) fn mixed() -> Verdict {
    mixed_on(Layer::new)
}

pub(crate) fn mixed_over_nodes() -> Verdict {
    mixed_on(Layer::over_nodes)
}

fn mixed_on(make: Make) -> Verdict {
    let how = Weighing::AtSource;
    let layer = make(Placement::Direct).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let mut input = Uploaded::new(&mut ep, &first[me])?;
        let (mut graph, seen) = captured(&mut ep, &input, how).await?;
        layer.meet()?;
        for turn in 1..=turns(30, 4) {
            let batches = layer.batches(turn)?;
            input.replace(&mut ep, &batches[me])?;
            for _ in 0..turn % 3 + 1 {
                replay(&ep, &mut graph)?;
            }
            compare(&layer, &ep, turn, &seen, &batches, how)?;
            // Ordinary operations take numbers and banks in between, one or two in flight.
            let got = ep.low_latency_dispatch(&input.x, &routing(&input, how)).await?;
            let back = ep.send_combine(&got.x, &got.handle, weights(&input, how)).await?;
            let ahead = ep.send_dispatch(&input.x, &routing(&input, how)).await?;
            let back = ep.receive_combine(&back).await?;
            let again = ep.receive_dispatch(&ahead).await?;
            same("counts", turn, &ep.values(&again.expert_counts)?, &ep.values(&got.expert_counts)?)?;
            compare(&layer, &ep, turn, &Round { got, back }, &batches, how)?;
            if turn % 5 == 0 {
                let received = ep.dispatch(&input.x, &input.routing()).await?;
                let expected = &layer.expected(&batches, None).0[me];
                super::fixture::same_rows(&ep, turn, &received, received.rows as usize, expected)?;
            }
        }
        Ok(())
    })?;
    Ok(())
}

/// A graph begins with nothing in flight. Between the halves of a call it does nothing, and says so.
pub(crate) fn between_halves() -> Verdict {
    let how = Weighing::AtExperts;
    let layer = Layer::new(Placement::Ring).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let said = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let stream = ep.stream().clone();
        let running = ep.send_dispatch(&input.x, &routing(&input, how)).await?;
        stream.begin_capture()?;
        let foreign = ep.receive_dispatch(&running).await.err().map(|error| error.to_string());
        let got = ep.low_latency_dispatch(&input.x, &routing(&input, how)).await?;
        let mut graph = stream.end_capture()?;
        layer.meet()?;
        replay(&ep, &mut graph)?;
        stream.synchronize()?;
        let told = ep.receive_dispatch(&running).await.err().map(|error| error.to_string());
        layer.meet()?;
        ep.rejoin().await?;
        let seen = round(&mut ep, &layer.world, &first[me], how).await?;
        drop(got);
        Ok((foreign, told, seen))
    })?;
    let mut all = Vec::new();
    for (foreign, told, seen) in said {
        let expected = "low-latency operation to receive is sent by a call that ran, allowed: sent in this capture";
        if foreign.as_deref() != Some(expected) {
            return Err(format!("said {foreign:?}, expected `{expected}`"));
        }
        let told = told.unwrap_or_default();
        if !told.contains("low-latency operations in flight is 1 here and 0") {
            return Err(format!("said `{told}` of a replay between two halves"));
        }
        all.push(seen);
    }
    ep_conformance::low_latency::verify::run(&layer.world, &first, how, &all)
        .map(drop)
        .map_err(|error| error.to_string())
}
