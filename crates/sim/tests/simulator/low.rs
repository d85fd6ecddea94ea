//! Batches of low latency on two ranks, and whether a run of them ends as it shall.

use ep_core::engine::Engine;
use ep_core::engine::low_latency::LowRouting;
use ep_core::layout::LowKind;
use ep_core::{Endpoint, Error, LowLatency, Shape};
use ep_sim::{Builder, Machine};

pub(crate) const RANKS: u32 = 2;
pub(crate) const MAX: u32 = 5;
pub(crate) const HIDDEN: u32 = 32;
pub(crate) const KINDS: [LowKind; 2] = [LowKind::PerChoice, LowKind::PerRank];

pub(crate) fn shape() -> Shape {
    Shape::builder().experts(RANKS).topk(RANKS).hidden(HIDDEN).max_tokens(MAX).build().unwrap()
}

pub(crate) type Buf = <Engine<Machine> as Endpoint>::Buf;
pub(crate) type Handle = <Engine<Machine> as LowLatency>::LowHandle;

/// The bytes of a small number as bf16.
pub(crate) fn bf16(number: u32) -> [u8; 2] {
    (((number as f32).to_bits() >> 16) as u16).to_le_bytes()
}

/// Tokens that hold `fill`, each for all experts.
pub(crate) fn batch(
    ep: &mut Engine<Machine>,
    (tokens, fill, kind): (u32, u8, LowKind),
) -> (Buf, LowRouting<Vec<i64>, Vec<f32>>) {
    let bytes = bf16(fill.into()).repeat((tokens * HIDDEN) as usize);
    let topk_idx = (0..tokens).flat_map(|_| 0..i64::from(RANKS)).collect();
    let topk_weights = (kind == LowKind::PerRank).then(|| weights(tokens));
    (ep.rows(&bytes, tokens).unwrap(), LowRouting::new(topk_idx, topk_weights))
}

pub(crate) fn weights(tokens: u32) -> Vec<f32> {
    vec![1.0; (tokens * RANKS) as usize]
}

/// Sends such a batch and receives what comes.
pub(crate) async fn dispatch(ep: &mut Engine<Machine>, what: (u32, u8, LowKind)) -> Result<(Buf, Handle), Error> {
    let (x, routing) = batch(ep, what);
    let got = ep.low_latency_dispatch(&x, &routing).await?;
    Ok((got.x, got.handle))
}

/// The experts give rows back as they are. Whether each token has come back from all ranks.
pub(crate) async fn layer(ep: &mut Engine<Machine>, what: (u32, u8, LowKind)) -> Result<bool, Error> {
    let (tokens, fill, kind) = what;
    let (y, handle) = dispatch(ep, what).await?;
    let late = (kind == LowKind::PerChoice).then(|| weights(tokens));
    let back = ep.low_latency_combine(&y, &handle, late.as_ref()).await?;
    let sum = bf16(u32::from(fill) * RANKS);
    Ok(ep.bytes(&back.x)? == sum.repeat((tokens * HIDDEN) as usize))
}

/// What is wrong with a run, if anything is: a broken rule, what ranks were told, or a wrong result.
pub(crate) fn wrong(
    builder: &Builder,
    seed: u64,
    play: impl AsyncFn(&mut Engine<Machine>) -> Result<bool, Error>,
) -> Option<String> {
    let run = builder.clone().seed(seed).build(shape()).unwrap().run(async |mut ep| play(&mut ep).await);
    let outcomes = match run {
        Ok(run) => run.finished(),
        Err(violation) => return Some(violation.to_string()),
    };
    let told = outcomes.into_iter().filter_map(|outcome| match outcome {
        Ok(true) => None,
        Ok(false) => Some("a wrong result".to_owned()),
        Err(error) => Some(error.to_string()),
    });
    let told: Vec<String> = told.collect();
    (!told.is_empty()).then(|| told.join("; "))
}

/// Layers of these many tokens, `[layers][ranks]`, in both kinds.
pub(crate) async fn layers(ep: &mut Engine<Machine>, tokens: &[[u32; 2]]) -> Result<bool, Error> {
    let me = ep.rank().index();
    for kind in KINDS {
        for (fill, tokens) in (1..).zip(tokens) {
            if !layer(ep, (tokens[me], fill, kind)).await? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Tries to receive until it can: a peer that is late may be waited for longer than one time allowed.
pub(crate) async fn persist<T>(mut receive: impl AsyncFnMut() -> Result<T, Error>) -> Result<T, Error> {
    for _ in 0..3 {
        if let Ok(received) = receive().await {
            return Ok(received);
        }
    }
    receive().await
}
