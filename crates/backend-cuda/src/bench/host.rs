//! What calls cost the host: enqueued behind a kernel that pauses, so that none of their own runs meanwhile.

use std::fmt::Write as _;
use std::time::Instant;

use ep_core::engine::Combine;
use ep_core::{Endpoint as _, Error};

use super::Plan;
use super::calls::{Calls, on_ranks};
use crate::build::Source;
use crate::rank::Call;
use crate::{CudaEndpoint, args};

/// Calls that are enqueued behind one pause.
const CALLS: u32 = 20;
/// Nanoseconds of the pause, in which they are enqueued.
const PAUSE: u64 = 3_000_000;

/// Microseconds of the host by what it does: of the fastest mean of 20 calls, of the slowest rank.
pub type HostTimes = Vec<(&'static str, f64)>;

/// Measures on ranks that are threads of this process; those that share a GPU also wait for each other in the driver. Rows are bf16,
/// and go straight back.
///
/// # Errors
/// What is missing, or what a call reported.
pub fn run_host(plan: &Plan) -> Result<HostTimes, Error> {
    let ranks = on_ranks(plan, async |ep| measure(plan, ep).await)?;
    let slower = |mut all: HostTimes, rank: HostTimes| {
        all.iter_mut().zip(rank).for_each(|((_, all), (_, time))| *all = all.max(time));
        all
    };
    ranks.into_iter().reduce(slower).ok_or_else(|| Error::invalid("ranks", 0, "at least 1"))
}

/// One kind of call, on the rank of a bench.
struct Host {
    ep: CudaEndpoint,
    repetitions: u32,
    meetings: u64,
    times: HostTimes,
}

impl Host {
    async fn time(
        &mut self,
        what: &'static str,
        mut call: impl AsyncFnMut(&mut CudaEndpoint) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut best = f64::INFINITY;
        for _ in 0..self.repetitions {
            self.ep.stream().synchronize()?;
            self.meetings += 1;
            self.ep.device().meet(self.meetings, PAUSE)?;
            let began = Instant::now();
            for _ in 0..CALLS {
                call(&mut self.ep).await?;
            }
            best = best.min(began.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS));
        }
        self.ep.stream().synchronize()?;
        self.times.push((what, best));
        Ok(())
    }
}

async fn measure(plan: &Plan, mut ep: CudaEndpoint) -> Result<HostTimes, Error> {
    ep.device().prepare(&[Source::Meet])?;
    let calls = Calls::new(plan, &mut ep).await?;
    let (x, handle) = (&calls.x, &calls.handle);
    let y = ep.redispatch(x, handle).await?.x;
    let mut host = Host { ep, repetitions: plan.repetitions, meetings: 0, times: Vec::new() };
    host.time("context made current", async |ep| Ok(ep.stream().device().bind()?)).await?;
    host.time("asking for a capture", async |ep| Ok(ep.stream().capture().map(drop)?)).await?;
    host.time("event recorded", async |ep| Ok(ep.stream().record(false).map(drop)?)).await?;
    let nothing = args::Offer::default();
    host.time("plain launch", async |ep| {
        // SAFETY: of no rows nothing is read.
        Ok(unsafe { ep.device().offer(Call::none(), &nothing) }?)
    })
    .await?;
    host.time("cached dispatch", async |ep| ep.redispatch(x, handle).await.map(drop)).await?;
    host.time("combine", async |ep| ep.combine(&y, handle, Combine::default()).await.map(drop)).await?;
    host.time("low-latency dispatch and combine", async |ep| calls.low(ep).await).await?;
    Ok(host.times)
}

/// The times as a table.
pub fn host_table(plan: &Plan, times: &HostTimes) -> String {
    let mut text = format!("{plan:?}\n");
    for (what, time) in times {
        let _ = writeln!(text, "{what:40} {time:8.2} us");
    }
    text
}
