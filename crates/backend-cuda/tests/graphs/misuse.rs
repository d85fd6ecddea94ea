//! Memory that is too small or somebody else's is refused before a kernel sees its address; what a capture drops is skipped.

use ep_conformance::low_latency::{Seen, results};
use ep_conformance::workload::Batch;
use ep_core::engine::Dispatch;
use ep_core::engine::low_latency::LowRouting;
use ep_core::{Endpoint, Error, LowLatency, Placement};
use ep_cuda::driver::{Device, Scratch, Stream};

use super::Verdict;
use super::fixture::{HIDDEN, Layer, TOKENS, TOPK, Uploaded, replay, same};
use super::throughput::WORST;

fn text(error: Error) -> String {
    error.to_string()
}

fn said<T>(result: Result<T, Error>) -> String {
    result.err().map_or_else(|| "nothing was refused".into(), text)
}

fn ensure(said: &str, expected: &str) -> Verdict {
    if said.starts_with(expected) { Ok(()) } else { Err(format!("said `{said}`, expected `{expected}`")) }
}

/// Sums of low latency go only where all of them fit; the operation is received afterwards as if nothing had been.
pub(crate) fn sums_into_too_little() -> Verdict {
    let layer = Layer::new(Placement::Ring).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let all = layer.run(async |mut ep| {
        let batch = &first[ep.rank().index()];
        let input = Uploaded::new(&mut ep, batch)?;
        let routing = LowRouting::new(input.topk_idx.clone(), None);
        let got = ep.low_latency_dispatch(&input.x, &routing).await?;
        let seen = Seen::of_dispatch(&ep, &got)?;
        let y = results(&mut ep, &layer.world, &seen)?;
        let (weights, bytes) = (Some(&input.topk_weights), 2 * HIDDEN as usize);
        let (few, narrow) = (batch.tokens - 1, bytes - 16);
        let combine = ep.send_combine(&y, &got.handle, weights).await?;
        let mut refused = Vec::new();
        let x = ep.room(few, bytes)?;
        refused.push(said(ep.receive_combine_into(&combine, x).await));
        let x = ep.room(batch.tokens, narrow)?;
        refused.push(said(ep.receive_combine_into(&combine, x).await));
        let x = ep.room(batch.tokens, bytes)?;
        let back = ep.receive_combine_into(&combine, x).await?;
        let x = ep.room(few, bytes)?;
        refused.push(said(ep.low_latency_combine_into(&y, &got.handle, weights, x).await));
        let x = ep.room(batch.tokens, bytes)?;
        let again = ep.low_latency_combine_into(&y, &got.handle, weights, x).await?;
        same("sums", 1, &ep.bytes(&again.x)?, &ep.bytes(&back.x)?)?;
        Ok((refused, batch.tokens))
    })?;
    for (refused, tokens) in all {
        let rows = format!("rows of x to write is {}, allowed: at least {tokens}", tokens - 1);
        let width = format!("row size of x to write is {}, allowed: {} bytes", 2 * HIDDEN - 16, 2 * HIDDEN);
        refused.iter().zip([&rows, &width, &rows]).try_for_each(|(said, expected)| ensure(said, expected))?;
    }
    Ok(())
}

/// A batch of more tokens than `max_tokens`, which go nowhere.
fn too_large() -> Batch {
    let tokens = (TOKENS + 1) as usize;
    Batch {
        tokens: TOKENS + 1,
        x: vec![0; tokens * HIDDEN as usize],
        topk_idx: vec![-1; tokens * TOPK as usize],
        topk_weights: vec![0.0; tokens * TOPK as usize],
    }
}

/// Between nodes a rank forwards rows of batches whose sizes its host does not hear, where counts stay on the device: it has room for `max_tokens` of each.
pub(crate) fn too_many_tokens() -> Verdict {
    let layer = Layer::over_nodes(Placement::Ring).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let all = layer.run(async |mut ep| {
        let batch = &first[ep.rank().index()];
        let input = Uploaded::new(&mut ep, batch)?;
        let large = Uploaded::new(&mut ep, &too_large())?;
        let refused = said(ep.dispatch_with(&large.x, &large.routing(), &WORST).await);
        // Nothing moved.
        let got = ep.dispatch_with(&input.x, &input.routing(), &WORST).await?;
        ep.values(&got.topk_idx)?;
        Ok(refused)
    })?;
    let (more, limit) = (TOKENS + 1, "max_tokens, between nodes with counts on the device");
    all.iter().try_for_each(|said| ensure(said, &format!("tokens is {more}, allowed: at most {TOKENS}, {limit}")))
}

/// The same where the ranks whose counts stay on the device are others than those with large batches: these hear of it from them.
pub(crate) fn too_many_tokens_of_others() -> Verdict {
    let layer = Layer::over_nodes(Placement::Ring).map_err(text)?;
    let all = layer.run(async |mut ep| {
        let keeps = ep.rank().0 < 2;
        let options = if keeps { WORST } else { Dispatch::default() };
        let large = Uploaded::new(&mut ep, &too_large())?;
        let small = &layer.batches(0)?[ep.rank().index()];
        let input = if keeps { Uploaded::new(&mut ep, small)? } else { large };
        let got = ep.dispatch_with(&input.x, &input.routing(), &options).await;
        Ok(said(got.and_then(|got| ep.values(&got.topk_idx))))
    })?;
    let (field, more) = ("most tokens of a batch (max_tokens, as counts stay on the device)", TOKENS + 1);
    // Each of the two finds one of the others, unless the other one was faster to find its own and to say so.
    let finds = |rank: usize| all[rank].contains(&format!("{field} is {TOKENS} here and {more} on rank {}", rank + 2));
    let hears = |rank: usize, of: &[usize]| of.iter().any(|of| all[rank].contains(&format!("culprit rank {of}")));
    let well = [finds(0) || (finds(1) && hears(0, &[3])), finds(1) || (finds(0) && hears(1, &[2]))];
    let told = hears(2, &[2, 3]) && hears(3, &[2, 3]);
    if well == [true; 2] && told { Ok(()) } else { Err(format!("said {all:#?}")) }
}

/// What another endpoint made may be gone while kernels of this one still read it.
pub(crate) fn of_another_endpoint() -> Verdict {
    let layer = Layer::new(Placement::Direct).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let strange = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let got = ep.dispatch(&input.x, &input.routing()).await?;
        Ok((input, got.x))
    })?;
    let strange: Vec<_> = strange.into_iter().map(|mine| std::sync::Mutex::new(Some(mine))).collect();
    let other = Layer::new(Placement::Direct).map_err(text)?;
    let all = other.run(async |mut ep| {
        let me = ep.rank().index();
        let taken = strange[me].lock().map_err(|_| Error::invalid("rows", "lost", "one of another endpoint"))?.take();
        let (theirs, leased) = taken.ok_or_else(|| Error::invalid("rows", "none", "one of another endpoint"))?;
        let mine = Uploaded::new(&mut ep, &first[me])?;
        let got = ep.dispatch(&mine.x, &mine.routing()).await?;
        let low = |input: &Uploaded| LowRouting::new(input.topk_idx.clone(), None);
        let refused = [
            said(ep.dispatch(&theirs.x, &mine.routing()).await),
            said(ep.dispatch(&mine.x, &theirs.routing()).await),
            said(ep.redispatch(&theirs.x, &got.handle).await),
            said(ep.combine(&leased, &got.handle, Default::default()).await),
            said(ep.send_dispatch(&theirs.x, &low(&mine)).await),
            said(ep.send_dispatch(&mine.x, &low(&theirs)).await),
            // Sizes that no memory has.
            said(ep.room(u32::MAX, usize::MAX)),
            said(ep.array_room::<i64>(usize::MAX / 4)),
        ];
        // Nothing moved.
        ep.combine(&got.x, &got.handle, Default::default()).await?;
        Ok(refused)
    })?;
    for refused in all {
        let (other, large) = (" is of another endpoint, allowed: one of this endpoint", "bytes of memory is ");
        for (at, said) in refused.iter().enumerate() {
            let found = if at < 6 { said.ends_with(other) } else { said.contains(large) };
            if !found {
                return Err(format!("call {at} said `{said}`"));
            }
        }
    }
    Ok(())
}

/// A graph receives what it sends, also what was dropped in its capture.
pub(crate) fn dropped_in_a_capture() -> Verdict {
    let layer = Layer::new(Placement::Ring).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    layer.run(async |mut ep| {
        let batch = &first[ep.rank().index()];
        let input = Uploaded::new(&mut ep, batch)?;
        let routing = LowRouting::new(input.topk_idx.clone(), None);
        let stream = ep.stream().clone();
        stream.begin_capture()?;
        drop(ep.send_dispatch(&input.x, &routing).await?);
        drop(ep.send_dispatch(&input.x, &routing).await?);
        let got = ep.low_latency_dispatch(&input.x, &routing).await?;
        let mut graph = stream.end_capture()?;
        layer.meet()?;
        for turn in 1..=5 {
            replay(&ep, &mut graph)?;
            let plain = ep.low_latency_dispatch(&input.x, &routing).await?;
            let (seen, expected) = (Seen::of_dispatch(&ep, &got)?, Seen::of_dispatch(&ep, &plain)?);
            same("rows", turn, &[seen.experts == expected.experts], &[true])?;
        }
        layer.meet()
    })?;
    Ok(())
}

/// What a call had enqueued before it failed stays in the capture, and runs with every replay: nobody else gets its memory.
pub(crate) fn failed_in_a_capture() -> Verdict {
    let text = |error: ep_cuda::CudaError| error.to_string();
    let device = Device::open(0).map_err(text)?;
    let stream = Stream::new(&device, 0).map_err(text)?;
    stream.begin_capture().map_err(text)?;
    let taken = Scratch::new(&stream, 4096).map_err(text)?;
    // SAFETY: its memory is never given to anybody else, which is what this is about.
    unsafe { taken.fill(7) }.map_err(text)?;
    let address = taken.address();
    drop(taken);
    let mut graph = stream.end_capture().map_err(text)?;
    let others: Vec<_> =
        (0..12).map(|_| Scratch::from_bytes(&stream, &[1; 4096])).collect::<Result<_, _>>().map_err(text)?;
    graph.launch(&stream).map_err(text)?;
    for other in &others {
        let mut bytes = [0; 4096];
        other.read(0, &mut bytes).map_err(text)?;
        if bytes != [1; 4096] {
            return Err(format!("a replay wrote {} over 1 in memory of others", bytes[0]));
        }
    }
    if others.iter().any(|other| other.address() == address) {
        Err("the memory was handed out again".into())
    } else {
        Ok(())
    }
}
