//! Handles of captured dispatches that are used before their graph has run, or written over: nothing outside of what they are of is read or written.

use ep_core::engine::low_latency::LowRouting;
use ep_core::engine::{Combine, Dispatch};
use ep_core::{Endpoint, Error, LowLatency, Placement};
use ep_cuda::Rows;

use super::Verdict;
use super::fixture::{HIDDEN, LOCAL, Layer, TOKENS, Uploaded, replay, same};
use super::throughput::WORST;

const RANKS: u32 = 4;

fn text(error: Error) -> String {
    error.to_string()
}

/// Sums of nothing.
fn are_zeros(all: &[Vec<u8>]) -> Verdict {
    match all.iter().position(|bytes| bytes.iter().any(|&byte| byte != 0)) {
        None => Ok(()),
        Some(rank) => Err(format!("sums of rank {rank} are {:x?}, of no rows", &all[rank][..16])),
    }
}

fn throughput(placement: Placement, options: &Dispatch) -> Verdict {
    let layer = Layer::new(placement).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let all = layer.run(async |mut ep| {
        let batch = &first[ep.rank().index()];
        let input = Uploaded::new(&mut ep, batch)?;
        let y = ep.rows(&vec![0x11; (options.worst_rows * 2 * HIDDEN) as usize], options.worst_rows)?;
        // What the pool gives has been used before.
        for bytes in [256, 512, 1024, 2048, 4096] {
            let used: Vec<_> = (0..40).map(|_| ep.bytes_room(bytes)).collect::<Result<_, _>>()?;
            used.iter().try_for_each(|used| used.write(0, &vec![0x11; bytes]))?;
        }
        let stream = ep.stream().clone();
        stream.begin_capture()?;
        let got = ep.dispatch_with(&input.x, &input.routing(), options).await?;
        let mut graph = stream.end_capture()?;
        layer.meet()?;
        let sums = ep.combine(&y, &got.handle, Combine::default()).await?;
        let before = ep.bytes(&sums.x)?;
        // The graph itself is none the worse for it.
        layer.meet()?;
        replay(&ep, &mut graph)?;
        let sums = ep.combine(&y, &got.handle, Combine::default()).await?;
        assert!(ep.bytes(&sums.x)?.iter().any(|&byte| byte != 0), "sums of the rows that came");
        Ok(before)
    })?;
    are_zeros(&all)
}

pub(crate) fn direct() -> Verdict {
    throughput(Placement::Direct, &WORST)
}

pub(crate) fn rings() -> Verdict {
    throughput(Placement::Ring, &WORST)
}

/// Sums of low latency along a handle: of a dispatch that was captured and has not run, or of one whose choices are written over.
fn low_sums(is_captured: bool) -> Verdict {
    let layer = Layer::new(Placement::Ring).map_err(text)?;
    let first = layer.batches(0).map_err(text)?;
    let all = layer.run(async |mut ep| {
        let batch = &first[ep.rank().index()];
        let input = Uploaded::new(&mut ep, batch)?;
        let routing = LowRouting::new(input.topk_idx.clone(), None);
        let rows = LOCAL * RANKS * TOKENS;
        let y = ep.rows(&vec![0x11; (rows * 2 * HIDDEN) as usize], rows)?;
        let stream = ep.stream().clone();
        if is_captured {
            stream.begin_capture()?;
        }
        let low = ep.low_latency_dispatch(&input.x, &routing).await?;
        let _graph = if is_captured { Some(stream.end_capture()?) } else { None };
        layer.meet()?;
        if !is_captured {
            low.handle.topk_idx().write(&vec![1 << 30; low.handle.topk_idx().len()])?;
        }
        let sums = ep.low_latency_combine(&y, &low.handle, Some(&input.topk_weights)).await?;
        ep.bytes(&sums.x)
    })?;
    are_zeros(&all)
}

pub(crate) fn low_latency() -> Verdict {
    low_sums(true)
}

/// Choices lie in memory that a caller may write: those that are none were dropped.
pub(crate) fn written_over() -> Verdict {
    low_sums(false)
}

/// A graph of low latency keeps rows that lie in the arena: nobody else gets their block.
pub(crate) fn leased() -> Verdict {
    let layer = Layer::new(Placement::Direct).map_err(text)?;
    let (first, others) = (layer.batches(0).map_err(text)?, layer.batches(1).map_err(text)?);
    layer.run(async |mut ep| {
        let me = ep.rank().index();
        let input = Uploaded::new(&mut ep, &first[me])?;
        let got = ep.dispatch(&input.x, &input.routing()).await?;
        assert!(matches!(got.x, Rows::Leased(_)), "rows of the arena");
        let routing = LowRouting::new(input.topk_idx.clone(), None);
        let stream = ep.stream().clone();
        stream.begin_capture()?;
        let low = ep.low_latency_dispatch(&got.x, &routing).await?;
        let mut graph = stream.end_capture()?;
        layer.meet()?;
        replay(&ep, &mut graph)?;
        let before = ep.bytes(&low.x)?;
        drop(got);
        let other = Uploaded::new(&mut ep, &others[me])?;
        let held = ep.dispatch(&other.x, &other.routing()).await?;
        replay(&ep, &mut graph)?;
        let after = ep.bytes(&low.x)?;
        drop(held);
        same("rows of the graph", 1, &after, &before)
    })?;
    Ok(())
}
