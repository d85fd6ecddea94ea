//! Whole calls by device events: a dispatch, cached in throughput mode, and a combine of what came.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use ep_core::engine::low_latency::{LowOrder, LowRouting, LowRoutingOf};
use ep_core::engine::{Combine, Handle, Routing};
use ep_core::{Element, Endpoint as _, Error, LowLatency as _, OutboxUse};

use super::{Gate, PAUSE, Plan, fill, median, route};
use crate::build::Source;
use crate::{Cluster, CudaEndpoint, LowHandle, Rows};

/// Calls before those that are measured.
const WARM_UP: usize = 5;
/// How long ranks wait for each other on the host.
const WITHIN: Duration = Duration::from_secs(60);

/// Medians of the slowest rank, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WholeTimes {
    /// Bytes of a rank's window.
    pub(super) window: u64,
    pub(super) dispatch: f64,
    pub(super) combine: f64,
    /// Values that came back wrong.
    pub(super) wrong: u64,
}

/// Where threads wait for each other; who waits for one that failed gives up.
struct Together {
    ranks: u32,
    /// Passes so far, and who has come since.
    passed: Mutex<(u64, u32)>,
    all: Condvar,
}

impl Gate for Together {
    fn pass(&self) -> Result<(), Error> {
        let mut state = self.passed.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = state.0;
        state.1 += 1;
        if state.1 == self.ranks {
            *state = (turn + 1, 0);
            self.all.notify_all();
            return Ok(());
        }
        let waited = self.all.wait_timeout_while(state, WITHIN, |state| state.0 == turn);
        let (state, ended) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        if ended.timed_out() {
            return Err(Error::broken("a measurement", "another rank did not come", "see what that rank says"));
        }
        Ok(())
    }
}

/// Which calls are measured.
#[derive(Clone, Copy, Debug)]
pub(super) enum Calls {
    /// Of throughput mode, which use their outboxes like that, where they have some.
    Throughput(OutboxUse),
    /// Of low latency, by source.
    LowLatency,
}

/// Measures calls on all ranks of a cluster.
pub(super) fn measure(plan: &Plan, cluster: Cluster, calls: Calls) -> Result<WholeTimes, Error> {
    let gate = &Together { ranks: plan.ranks, passed: Mutex::default(), all: Condvar::new() };
    let told = cluster.run(async |ep| of_rank(plan, ep, calls, gate).await)?;
    // Who failed by itself says more than who waited for it.
    let (times, mut errors): (Vec<_>, Vec<_>) = told.into_iter().partition(Result::is_ok);
    errors.sort_by_key(|told| matches!(told, Err(Error::Broken { .. })));
    errors.into_iter().chain(times).try_fold(WholeTimes::default(), |slowest, times| {
        let times = times?;
        Ok(WholeTimes {
            window: times.window,
            dispatch: slowest.dispatch.max(times.dispatch),
            combine: slowest.combine.max(times.combine),
            wrong: slowest.wrong + times.wrong,
        })
    })
}

async fn of_rank(plan: &Plan, mut ep: CudaEndpoint, calls: Calls, gate: &Together) -> Result<WholeTimes, Error> {
    ep.device().prepare(&[Source::Meet])?;
    let me = ep.rank().0;
    let coded = plan.element != Element::Bf16 && matches!(calls, Calls::Throughput(_));
    let row_bytes = if coded { ep.shape().row_bytes() } else { ep.shape().result_bytes() } as usize;
    let sent = if coded { vec![0; plan.tokens as usize * row_bytes] } else { fill(plan, me, row_bytes) };
    let x = ep.rows(&sent, plan.tokens)?;
    let chosen = route(plan, me);
    let topk_idx = ep.array(&chosen)?;
    gate.pass()?;
    let made = match calls {
        Calls::Throughput(outbox) => {
            let handle = ep.dispatch(&x, &Routing::TopK { topk_idx, topk_weights: None }).await?.handle;
            let rows = handle.rows();
            Made::Throughput(handle, outbox, zeros(&mut ep, rows)?)
        }
        Calls::LowLatency => {
            let routing = LowRouting { order: LowOrder::BySource, ..LowRouting::new(topk_idx, None) };
            let rows = LowOrder::BySource.rows(ep.layout())?;
            Made::LowLatency(routing, zeros(&mut ep, rows)?)
        }
    };
    let (mut dispatches, mut combines, mut wrong) = (Vec::new(), Vec::new(), 0);
    for turn in 0..u64::from(plan.repetitions) + WARM_UP as u64 {
        let meet = |ep: &CudaEndpoint, number| {
            ep.stream().synchronize()?;
            gate.pass()?;
            ep.device().meet(number, PAUSE)?;
            Ok::<_, Error>(ep.stream().record(true)?)
        };
        let began = meet(&ep, 2 * turn + 1)?;
        let came = made.dispatch(&mut ep, &x).await?;
        let ended = ep.stream().record(true)?;
        ep.stream().synchronize()?;
        dispatches.push(ended.since(&began)?);
        let began = meet(&ep, 2 * turn + 2)?;
        let sums = made.combine(&mut ep, &came, plan.element == Element::Bf16).await?;
        let ended = ep.stream().record(true)?;
        ep.stream().synchronize()?;
        combines.push(ended.since(&began)?);
        if plan.element == Element::Bf16 && turn == 0 {
            wrong = differences(plan, &chosen, &sent, &ep.bytes(&sums)?);
        }
    }
    let window = ep.layout().window_bytes();
    let [dispatch, combine] = [dispatches, combines].map(|mut times| median(times.split_off(WARM_UP)));
    Ok(WholeTimes { window, dispatch, combine, wrong })
}

/// Results of nothing, for rows that are no bf16.
fn zeros(ep: &mut CudaEndpoint, rows: u32) -> Result<Rows, Error> {
    ep.rows(&vec![0; rows as usize * ep.shape().result_bytes() as usize], rows)
}

/// What calls are made by.
enum Made {
    Throughput(Handle, OutboxUse, Rows),
    LowLatency(LowRoutingOf<CudaEndpoint>, Rows),
}

/// What a dispatch brought: rows, and the handle of low latency.
struct Came(Rows, Option<LowHandle>);

impl Made {
    async fn dispatch(&self, ep: &mut CudaEndpoint, x: &Rows) -> Result<Came, Error> {
        Ok(match self {
            Self::Throughput(handle, outbox, _) => Came(ep.redispatch_with(x, handle, *outbox).await?.x, None),
            Self::LowLatency(routing, _) => {
                let got = ep.low_latency_dispatch(x, routing).await?;
                Came(got.x, Some(got.handle))
            }
        })
    }

    /// Of what came, if it is bf16.
    async fn combine(&self, ep: &mut CudaEndpoint, Came(rows, low): &Came, plain: bool) -> Result<Rows, Error> {
        let (Self::Throughput(_, _, zeros) | Self::LowLatency(_, zeros)) = self;
        let y = if plain { rows } else { zeros };
        match (self, low) {
            (Self::LowLatency(..), Some(handle)) => Ok(ep.low_latency_combine(y, handle, None).await?.x),
            (Self::LowLatency(..), None) => Err(Error::invalid("handle", "none", "that of a dispatch")),
            (Self::Throughput(handle, outbox, _), _) => {
                let options = Combine { outbox: *outbox, ..Combine::default() };
                Ok(ep.combine(y, handle, options).await?.x)
            }
        }
    }
}

/// Rows that went to k ranks and straight back are k times what they were.
fn differences(plan: &Plan, chosen: &[i64], sent: &[u8], sums: &[u8]) -> u64 {
    let row = 2 * plan.hidden as usize;
    let value = |bytes: &[u8]| half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    let mut wrong = 0;
    for ((choices, sent), sums) in chosen.chunks(plan.topk as usize).zip(sent.chunks(row)).zip(sums.chunks(row)) {
        let ranks = plan.groups(choices, 1).len() as f32;
        for (x, sum) in sent.chunks(2).zip(sums.chunks(2)) {
            wrong += u64::from(value(sum) != half::bf16::from_f32(value(x) * ranks).to_f32());
        }
    }
    wrong
}
