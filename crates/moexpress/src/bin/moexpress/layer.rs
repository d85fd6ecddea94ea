//! A dispatch and a combine of the real engine in virtual time, without payload.

use std::num::NonZeroUsize;

use ep_conformance::workload::Batch;
use ep_core::engine::{Combine, Engine, Routing};
use ep_core::machine::{Machine as _, Proposal};
use ep_core::{Endpoint, Error, Nanos, Settings, Shape, Topology};
use ep_sim::{Machine, Model, Violation};

use crate::backend::timed;

/// What is to be timed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer<'a> {
    pub(crate) shape: Shape,
    pub(crate) topology: Topology,
    pub(crate) settings: Settings,
    pub(crate) model: Model,
    /// What each operation takes on every rank before it begins.
    pub(crate) before: Nanos,
    /// `[ranks]`: whose choices count, and weights.
    pub(crate) batches: &'a [Batch],
    pub(crate) max_events: u64,
    pub(crate) threads: NonZeroUsize,
}

/// When a dispatch and a combine ended, counted from when all ranks had begun them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Times {
    /// Of the ranks.
    pub(crate) mean: [Nanos; 2],
    pub(crate) slowest: [Nanos; 2],
    /// Taken from the scheduler's heap.
    pub(crate) events: u64,
}

/// Why there are no times.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// It takes more events than allowed.
    Events,
    /// It takes more memory than this machine has.
    Memory(String),
    /// It cannot be run, or failed.
    Failed(String),
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl Stopped {
    /// Why a cluster cannot be built whose settings fit the layer: what is left to refuse is their memory.
    pub(crate) fn of_build(error: Error) -> Self {
        match error {
            Error::Invalid { .. } => Self::Memory(error.to_string()),
            other => other.into(),
        }
    }
}

impl Times {
    pub(crate) fn of(ranks: &[[Nanos; 2]], events: u64) -> Self {
        let each = |at: usize| ranks.iter().map(move |times| times[at].0);
        let mean = |at| Nanos(each(at).sum::<u64>() / ranks.len().max(1) as u64);
        let slowest = |at| Nanos(each(at).max().unwrap_or(0));
        Self { mean: [mean(0), mean(1)], slowest: [slowest(0), slowest(1)], events }
    }
}

impl Layer<'_> {
    pub(crate) fn time(&self) -> Result<Times, Stopped> {
        let builder = timed::cluster(&self.shape, &self.topology, &self.settings, self.model)?;
        let cluster = builder.max_events(self.max_events).build(self.shape).map_err(Stopped::of_build)?;
        let run =
            cluster.run_on(self.threads, async |ep| self.rank(ep).await).map_err(|violation| match violation {
                Violation::Livelock(_) => Stopped::Events,
                other => Stopped::Failed(other.to_string()),
            })?;
        let events = run.events;
        let ranks: Result<Vec<_>, Error> = run.finished().into_iter().collect();
        Ok(Times::of(&ranks?, events))
    }

    async fn rank(&self, mut ep: Engine<Machine>) -> Result<[Nanos; 2], Error> {
        let batch = &self.batches[ep.rank().index()];
        let (row, result) = (ep.shape().row_bytes() as usize, ep.shape().result_bytes() as usize);
        let x = ep.rows(&vec![0; batch.tokens as usize * row], batch.tokens)?;
        let weights = Some(batch.topk_weights.clone());
        let routing = Routing::TopK { topk_idx: batch.topk_idx.clone(), topk_weights: weights };
        let begun = self.begin(&ep).await?;
        let got = ep.dispatch(&x, &routing).await?;
        let dispatched = ep.now() - begun;
        let (rows, handle, weights) = (got.rows, got.handle.clone(), got.topk_weights.clone());
        // The received rows make room in the arena for the results.
        drop(got);
        let y = match ep.output(&handle) {
            Some(output) => output,
            None => ep.rows(&vec![0; rows as usize * result], rows)?,
        };
        let begun = self.begin(&ep).await?;
        ep.combine(&y, &handle, Combine { topk_weights: Some(&weights), ..Combine::default() }).await?;
        Ok([dispatched, ep.now() - begun])
    }

    /// All ranks begin an operation at one time.
    async fn begin(&self, ep: &Engine<Machine>) -> Result<Nanos, Error> {
        meet(ep.machine()).await?;
        let begun = ep.now();
        ep.machine().spend(self.before);
        Ok(begun)
    }
}

/// Waits until all ranks have come here.
pub(crate) async fn meet(machine: &Machine) -> Result<(), Error> {
    let proposal = Proposal { mask: Default::default(), generation: 1, op: 1 };
    machine.bootstrap().agree(proposal, Nanos(u64::MAX)).await.map(|_| ())
}
