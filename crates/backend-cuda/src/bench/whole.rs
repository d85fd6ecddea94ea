//! Whole calls of throughput mode by device events: a cached dispatch, and a combine of what came.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use ep_core::engine::{Combine, Routing};
use ep_core::{Element, Endpoint as _, Error, OutboxUse};

use super::{Gate, PAUSE, Plan, fill, median, route};
use crate::build::Source;
use crate::{Cluster, CudaEndpoint};

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

/// Measures on all ranks of a cluster calls that use their outboxes like that, where they have some.
pub(super) fn measure(plan: &Plan, cluster: Cluster, outbox: OutboxUse) -> Result<WholeTimes, Error> {
    let gate = &Together { ranks: plan.ranks, passed: Mutex::default(), all: Condvar::new() };
    let told = cluster.run(async |ep| of_rank(plan, ep, outbox, gate).await)?;
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

async fn of_rank(plan: &Plan, mut ep: CudaEndpoint, outbox: OutboxUse, gate: &Together) -> Result<WholeTimes, Error> {
    ep.device().prepare(&[Source::Meet])?;
    let me = ep.rank().0;
    let row_bytes = ep.shape().row_bytes() as usize;
    let sent = match plan.element {
        Element::Bf16 => fill(plan, me, row_bytes),
        _ => vec![0; plan.tokens as usize * row_bytes],
    };
    let x = ep.rows(&sent, plan.tokens)?;
    let chosen = route(plan, me);
    let routing = Routing::TopK { topk_idx: ep.array(&chosen)?, topk_weights: None };
    gate.pass()?;
    let handle = ep.dispatch(&x, &routing).await?.handle;
    let result = vec![0; handle.rows() as usize * ep.shape().result_bytes() as usize];
    let zeros = ep.rows(&result, handle.rows())?;
    let (mut dispatches, mut combines, mut wrong) = (Vec::new(), Vec::new(), 0);
    for turn in 0..u64::from(plan.repetitions) + WARM_UP as u64 {
        let meet = |ep: &CudaEndpoint, number| {
            ep.stream().synchronize()?;
            gate.pass()?;
            ep.device().meet(number, PAUSE)?;
            Ok::<_, Error>(ep.stream().record(true)?)
        };
        let began = meet(&ep, 2 * turn + 1)?;
        let got = ep.redispatch_with(&x, &handle, outbox).await?;
        let ended = ep.stream().record(true)?;
        ep.stream().synchronize()?;
        dispatches.push(ended.since(&began)?);
        let y = if plan.element == Element::Bf16 { &got.x } else { &zeros };
        let began = meet(&ep, 2 * turn + 2)?;
        let sums = ep.combine(y, &handle, Combine { outbox, ..Combine::default() }).await?;
        let ended = ep.stream().record(true)?;
        ep.stream().synchronize()?;
        combines.push(ended.since(&began)?);
        if plan.element == Element::Bf16 && turn == 0 {
            wrong = differences(plan, &chosen, &sent, &ep.bytes(&sums.x)?);
        }
    }
    let window = ep.layout().window_bytes();
    let [dispatch, combine] = [dispatches, combines].map(|mut times| median(times.split_off(WARM_UP)));
    Ok(WholeTimes { window, dispatch, combine, wrong })
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
