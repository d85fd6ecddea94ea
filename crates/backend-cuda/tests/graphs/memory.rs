//! What a capture refuses, and what a graph keeps and gives back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use ep_conformance::drive::{Round, round};
use ep_conformance::verify::{bits_of, bytes_of};
use ep_core::engine::{Combine, Dispatch, Routing};
use ep_core::layout::RowFormat;
use ep_core::{Endpoint, Error, LowLatency, Placement, Rank, RankSet, Shape};
use ep_cuda::Rows;
use ep_cuda::driver::{Device, Scratch, Stream};

use super::Verdict;
use super::fixture::{HIDDEN, LOCAL, Layer, TOKENS, TOPK, Uploaded, replay, same, same_rows, same_sums};
use super::throughput::along;

fn text(error: Error) -> String {
    error.to_string()
}

/// What waits for the device is refused by name, and the capture goes on.
pub(crate) fn refused() -> Verdict {
    let layer = Layer::new(Placement::Direct).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let said = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let (_, handle) = round(&mut ep, &layer.world, &first[me], &Round::default()).await?;
        let in_rank = ep.array(&vec![1u8; first[me].tokens as usize * 4])?;
        let stream = ep.stream().clone();
        stream.begin_capture()?;
        let membership = Routing::Membership { in_rank, tokens_per_expert: vec![0; 8] };
        let options = Dispatch { worst_rows: 48, device_counts: true, ..Dispatch::default() };
        let said = [
            ep.dispatch(&input.x, &input.routing()).await.err(),
            ep.dispatch_with(&input.x, &membership, &options).await.err(),
            ep.bytes(&input.x).err(),
            ep.values(&input.topk_idx).err(),
            ep.array(&[1i64]).err(),
            ep.recover(&RankSet::new()).await.err(),
            ep.mask_rank(Rank((me as u32 + 1) % 4)).await.err(),
            stream.synchronize().err().map(Error::from),
        ]
        .map(|error| error.map(|error| error.to_string()).unwrap_or_default());
        let got = ep.redispatch(&input.x, &handle).await?;
        let waits = ep_core::engine::Event::wait(&got.event, ep_core::Nanos::from_secs(1));
        let back = ep.combine(&got.x, &got.handle, Combine::default()).await?;
        let mut graph = stream.end_capture()?;
        layer.meet()?;
        replay(&ep, &mut graph)?;
        let (received, combined) = layer.expected(&first, None);
        same_rows(&ep, 1, &got, received[me].rows(), &received[me])?;
        same_sums(&ep, 1, &back, &combined[me])?;
        same("events that come in a capture", 1, &[waits], &[false])?;
        Ok(said)
    })?;
    let expected = [
        "a captured dispatch is not supported",
        "a captured dispatch of a membership is not supported",
        "a copy to the host cannot be captured",
        "a copy to the host cannot be captured",
        "a copy from the host cannot be captured",
        "a recovery cannot be captured",
        "a mask cannot be captured",
        "a wait for the stream cannot be captured",
    ];
    for (said, expected) in said.iter().flat_map(|said| said.iter().zip(expected)) {
        if !said.contains(expected) {
            return Err(format!("said `{said}`, expected `{expected}`"));
        }
    }
    Ok(())
}

/// Inputs, handles and leases may be dropped before a replay: nothing else gets their memory.
pub(crate) fn kept() -> Verdict {
    for placement in [Placement::Direct, Placement::Ring] {
        let layer = Layer::new(placement).map_err(text)?;
        let (first, others) = (layer.batches(0).map_err(text)?, layer.batches(1).map_err(text)?);
        layer.run(async |mut ep| {
            let me = ep.rank().index();
            let input = Uploaded::new(&mut ep, &first[me])?;
            let handle = ep.dispatch(&input.x, &input.routing()).await?.handle;
            let (mut graph, got, back) = along(&mut ep, &input.x, &handle).await?;
            drop((input, handle, got));
            layer.meet()?;
            let (received, _) = layer.expected(&others, None);
            let (_, combined) = layer.expected(&first, None);
            let mut held = Vec::new();
            for turn in 1..=10 {
                let other = Uploaded::new(&mut ep, &others[me])?;
                held.push(ep.dispatch(&other.x, &other.routing()).await?);
                replay(&ep, &mut graph)?;
                same_sums(&ep, turn, &back, &combined[me])?;
                for got in &held {
                    same("rows of a call", turn, &bits_of(&ep.bytes(&got.x)?), &received[me].x)?;
                }
                if turn % 4 == 0 {
                    held.clear();
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Endpoints are gone, and their graphs still do what they did.
pub(crate) fn outlived() -> Verdict {
    let layer = Layer::new(Placement::Direct).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let left = layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let handle = ep.dispatch(&input.x, &input.routing()).await?.handle;
        let (graph, _, back) = along(&mut ep, &input.x, &handle).await?;
        layer.meet()?;
        Ok((graph, ep.stream().clone(), back.x))
    })?;
    // Other communicators take memory meanwhile.
    let other = Layer::new(Placement::Direct).map_err(text)?;
    let _held = other.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let got = ep.dispatch(&input.x, &input.routing()).await?;
        Ok((got.x, input.x))
    })?;
    let (_, combined) = layer.expected(&first, None);
    let mut left = left;
    for (graph, stream, _) in &mut left {
        graph.launch(stream).map_err(|error| error.to_string())?;
    }
    for ((_, _, x), expected) in left.iter().zip(&combined) {
        let Rows::Owned(rows) = x else { return Err("sums lie in the window".into()) };
        let mut bytes = vec![0; expected.x.len() * 2];
        rows.memory().read(0, &mut bytes).map_err(|error| error.to_string())?;
        same("sums", 1, &bytes, &bytes_of(&expected.x)).map_err(text)?;
    }
    Ok(())
}

/// Blocks that a graph granted are grantable again once it is gone: an arena with room for one serves graph after graph.
pub(crate) fn given_back() -> Verdict {
    let shape = Shape::builder().experts(4 * LOCAL).topk(TOPK).hidden(HIDDEN).max_tokens(TOKENS);
    let format = RowFormat::new(&shape.build().map_err(text)?);
    let layer = Layer::new(Placement::Direct).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let most = layer.expected(&first, None).0.iter().map(|got| got.rows() as u64).max().unwrap_or(0);
    let layer = Layer::sized(Placement::Direct, 4, format.block_bytes(most) + 128).map_err(text)?;
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let handle = ep.dispatch(&input.x, &input.routing()).await?.handle;
        for turn in 1..=5 {
            let began = Instant::now();
            loop {
                let (graph, got, _) = along(&mut ep, &input.x, &handle).await?;
                if matches!(got.x, Rows::Leased(_)) {
                    let second = along(&mut ep, &input.x, &handle).await?;
                    same("a second block", turn, &[matches!(second.1.x, Rows::Leased(_))], &[false])?;
                    drop((graph, got));
                    break;
                }
                // The driver says when a graph is gone; that takes a moment.
                if began.elapsed() > Duration::from_secs(60) {
                    return Err(Error::invalid("the arena", "full", "empty, as the graphs are gone"));
                }
                drop((graph, got));
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        layer.meet()
    })?;

    Ok(())
}

/// What a graph used is used again, also where it is let go of while another graph is captured: nothing of it is in that one.
pub(crate) fn let_go_in_another_capture() -> Verdict {
    let text = |error: ep_cuda::CudaError| error.to_string();
    let device = Device::open(0).map_err(text)?;
    let stream = Stream::new(&device, 0).map_err(text)?;
    stream.begin_capture().map_err(text)?;
    let taken = Scratch::new(&stream, 4096).map_err(text)?;
    // SAFETY: it lives until the graph is gone.
    unsafe { taken.fill(7) }.map_err(text)?;
    let mut graph = stream.end_capture().map_err(text)?;
    graph.launch(&stream).map_err(text)?;
    stream.synchronize().map_err(text)?;
    drop(graph);
    let other = Scratch::new(&stream, 64).map_err(text)?;
    stream.begin_capture().map_err(text)?;
    // SAFETY: it lives until the graph is gone.
    unsafe { other.fill(3) }.map_err(text)?;
    let address = taken.address();
    drop(taken);
    let graph = stream.end_capture().map_err(text)?;
    let again = Scratch::new(&stream, 4096).map_err(text)?;
    drop(graph);
    same("addresses", 1, &[again.address()], &[address]).map_err(|error| error.to_string())
}

/// While a framework captures in global mode, memory and events of other streams are used, taken and given back, by any thread, and
/// the capture goes on.
pub(crate) fn global() -> Verdict {
    let text = |error: ep_cuda::CudaError| error.to_string();
    let device = Device::open(0).map_err(text)?;
    let streams = [Stream::new(&device, 0).map_err(text)?, Stream::new(&device, 0).map_err(text)?];
    let [captured, other] = &streams;
    let written = Scratch::from_bytes(captured, &[7; 64]).map_err(text)?;
    let use_other = || {
        let memory = Scratch::from_bytes(other, &[1; 64])?;
        let event = other.record(false)?;
        drop(memory);
        let came = event.wait(Duration::from_secs(5))?;
        other.synchronize()?;
        Ok::<_, ep_cuda::CudaError>(came)
    };
    let before = Scratch::from_bytes(other, &[2; 64]).map_err(text)?;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: the stream lives and is not captured.
    let began = unsafe { sys::cuStreamBeginCapture_v2(captured.raw(), mode) };
    if began != sys::CUresult::CUDA_SUCCESS {
        return Err(format!("the capture did not begin: {began:?}"));
    }
    drop(before);
    let here = use_other();
    let there = std::thread::scope(|scope| scope.spawn(use_other).join());
    // SAFETY: it lives until the graph has run for the last time.
    unsafe { written.fill(3) }.map_err(text)?;
    let mut graph = captured.end_capture().map_err(text)?;
    let there = there.map_err(|_| "a thread panicked")?;
    if !here.map_err(text)? || !there.map_err(text)? {
        return Err("an event did not come".into());
    }
    graph.launch(captured).map_err(text)?;
    let mut bytes = [0; 64];
    written.read(0, &mut bytes).map_err(text)?;
    same("what the graph wrote", 1, &bytes, &[3; 64]).map_err(|error| error.to_string())
}

/// An endpoint is dropped while its stream is captured: nobody can wait for its kernels, so its window is not kept for the next communicator.
pub(crate) fn windows_of_a_capture() -> Verdict {
    // No other case has windows of about this size: what they give back meanwhile is not counted.
    let layer = Layer::sized(Placement::Ring, 4, 23 << 20).map_err(text)?;
    let kept = layer.run(async |ep| {
        let stream = ep.stream().clone();
        let (device, window) = (Arc::clone(stream.device()), ep.layout().window_bytes() as usize);
        layer.meet()?;
        let before = device.kept_of(window);
        layer.meet()?;
        stream.begin_capture()?;
        drop(ep);
        let _ = stream.end_capture();
        layer.meet()?;
        Ok(device.kept_of(window) - before)
    });
    match kept?.iter().sum::<usize>() {
        0 => Ok(()),
        windows => Err(format!("{windows} windows were kept")),
    }
}
