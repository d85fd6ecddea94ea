//! Ranks that share a thread: no call holds it up while it waits for another rank's kernels.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use ep_core::engine::{Combine, Routing};
use ep_core::{Endpoint, Error, Nanos, Settings, Shape, Topology};
use ep_cuda::{Cluster, CudaEndpoint};

use super::Verdict;

/// What a rank does, and the rows that came.
type Rank = Pin<Box<dyn Future<Output = Result<(CudaEndpoint, u32), Error>>>>;

/// A membership is dispatched behind a combine.
async fn calls(mut ep: CudaEndpoint) -> Result<(CudaEndpoint, u32), Error> {
    let x = ep.rows(&vec![1; 4 * 128], 4)?;
    let topk_idx = ep.array(&[0i64, 2, 0, 2, 0, 2, 0, 2])?;
    let in_rank = ep.array(&[1u8; 8])?;
    let y = ep.rows(&vec![1; 8 * 128], 8)?;
    let received = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await?;
    let _sums = ep.combine(&y, &received.handle, Combine::default()).await?;
    let routing = Routing::Membership { in_rank, tokens_per_expert: vec![4, 0, 4, 0] };
    let rows = ep.dispatch(&x, &routing).await?.rows;
    Ok((ep, rows))
}

pub(crate) fn membership() -> Verdict {
    let text = |error: Error| error.to_string();
    let topology = Topology::new(1, 2).map_err(text)?;
    let shape = Shape::builder().experts(4).topk(2).hidden(64).max_tokens(8).build().map_err(text)?;
    let settings = Settings::builder(&shape, &topology).deadline(Nanos::from_secs(10)).build().map_err(text)?;
    let cluster = Cluster::builder(topology).settings(settings).multiprocessors(2).specialise(false);
    let endpoints = cluster.build(shape).map_err(text)?.into_endpoints();
    let mut ranks: Vec<Rank> = endpoints.into_iter().map(|ep| Box::pin(calls(ep)) as Rank).collect();
    let mut context = Context::from_waker(Waker::noop());
    // An endpoint lives until all are done.
    let mut done = Vec::new();
    while !ranks.is_empty() {
        let mut at = 0;
        while let Some(rank) = ranks.get_mut(at) {
            match rank.as_mut().poll(&mut context) {
                Poll::Ready(ended) => {
                    done.push(ended);
                    drop(ranks.swap_remove(at));
                }
                Poll::Pending => at += 1,
            }
        }
    }
    done.into_iter().try_for_each(|ended| match ended.map_err(text)? {
        (_, 8) => Ok(()),
        (_, rows) => Err(format!("{rows} rows came, expected 8")),
    })
}
