//! What ranks do that a test has started as processes ([`super::started`]), on any backend.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::Member;
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Failure, LowLatency, Nanos, Rank, RankSet, Shape, Topology};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::started::say;
use crate::drive::{self, Round};
use crate::low_latency::{self, Weighing};
use crate::verify;
use crate::workload::{Batch, Workload};

/// How long ranks wait for each other when they tell what they saw.
const LONG: Duration = Duration::from_secs(30);

/// A backend whose ranks are processes.
pub trait Apart {
    /// Its endpoints.
    type Endpoint: LowLatency;

    /// This process's rank of a communicator with both modes, with so much time for each operation.
    ///
    /// # Errors
    /// Why the ranks did not come together.
    fn join(&self, layer: &Layer, member: &Arc<Member>, deadline: Nanos) -> Result<Self::Endpoint, Error>;

    /// Runs a rank's work to its end on this thread.
    fn block_on<T>(&self, work: impl Future<Output = T>) -> T;
}

/// The layer that all ranks have in common, without the ranks of a mask.
#[derive(Debug)]
pub struct Layer {
    /// Its sizes.
    pub world: World,
    /// `[ranks]`
    pub batches: Vec<Batch>,
}

impl Layer {
    /// Of the ranks that are not masked.
    ///
    /// # Panics
    /// For a mask of other ranks.
    #[must_use]
    pub fn new(topology: Topology, mask: RankSet) -> Self {
        let ranks = topology.ranks();
        let shape = Shape::builder().experts(2 * ranks).topk(3).hidden(96).max_tokens(40).build().expect("a shape");
        let tokens = (0..ranks).map(|rank| if mask.contains(Rank(rank)) { 0 } else { 40 - rank }).collect();
        let batches = Workload::new(shape, tokens).seed(9).drop(0.1).batches().expect("batches");
        Self { world: World::new(shape, topology, mask).expect("a world"), batches }
    }

    /// Of a member.
    #[must_use]
    pub fn batch(&self, member: &Member) -> &Batch {
        &self.batches[member.rank().index()]
    }
}

/// What every rank saw; nothing for those that were given up.
fn gather<T: Serialize + DeserializeOwned + Default>(member: &Member, own: &T) -> Vec<T> {
    let own = postcard::to_stdvec(own).expect("what was seen can be sent");
    let all = member.all_gather(&own, LONG).expect("all ranks tell what they saw");
    let read = |bytes: Vec<u8>| postcard::from_bytes(&bytes).expect("what was seen was sent");
    all.into_iter().map(|bytes| bytes.map(read).unwrap_or_default()).collect()
}

/// A round of throughput mode and two of low latency, compared with the oracle on every rank: the rows that were compared.
///
/// # Panics
/// Where an operation fails, or brings anything else.
pub fn verified<A: Apart>(apart: &A, ep: &mut A::Endpoint, member: &Member, layer: &Layer, how: &Round) -> u64 {
    let batch = layer.batch(member);
    let (observed, _) = apart.block_on(drive::round(ep, &layer.world, batch, how)).expect("a round");
    let all = gather(member, &observed);
    let mut rows = verify::run(&layer.world, &layer.batches, &all).expect("what the oracle says").rows;
    for weighing in [Weighing::AtSource, Weighing::AtExperts] {
        let seen = apart.block_on(low_latency::round(ep, &layer.world, batch, weighing)).expect("a round");
        let all = gather(member, &seen);
        let compared = low_latency::verify::run(&layer.world, &layer.batches, weighing, &all);
        rows += compared.expect("what the oracle says").rows;
    }
    rows
}

/// A round whose results are pulled where that can be, every second time.
#[must_use]
pub fn pulling(at: u32) -> Round {
    Round { pull: at.is_multiple_of(2), return_weights: true, ..Round::default() }
}

/// Works in both modes, in turn, until a rank is gone, then without it.
///
/// # Panics
/// Where an operation fails without a culprit, or brings anything else than the oracle.
pub fn endure<A: Apart>(apart: &A, member: &Arc<Member>, topology: Topology, deadline: Nanos) {
    let layer = Layer::new(topology, RankSet::new());
    let mut ep = match apart.join(&layer, member, deadline) {
        Ok(ep) => ep,
        Err(error) => return say(format_args!("not met: {error}")),
    };
    let batch = layer.batch(member);
    let mut rounds = 0u32;
    let failure = loop {
        let how = pulling(rounds);
        let round = apart.block_on(async {
            drive::round(&mut ep, &layer.world, batch, &how).await?;
            low_latency::round(&mut ep, &layer.world, batch, Weighing::AtExperts).await
        });
        match round {
            Ok(_) => rounds += 1,
            Err(error) => break *error.failure().expect("a failure with a culprit"),
        }
        if rounds == 1 {
            say("at work");
        }
    };
    go_on(apart, ep, member, topology, failure);
}

/// Gives up the culprit, recovers with the others, and works once more in both modes.
///
/// # Panics
/// Where what comes is anything else than the oracle's.
pub fn go_on<A: Apart>(apart: &A, mut ep: A::Endpoint, member: &Member, topology: Topology, failure: Failure) {
    say(format_args!("lost {}", failure.culprit));
    // For whoever looks for the cause: shown when a test fails.
    eprintln!("rank {}: {failure}", member.rank());
    let mask: RankSet = [failure.culprit].into_iter().collect();
    match apart.block_on(ep.recover(&mask)) {
        Ok(()) => {}
        Err(Error::Failed(failure)) => return say(failure.fault),
        Err(error) => return say(error),
    }
    let layer = Layer::new(topology, ep.mask().clone());
    say(format_args!("verified {}", verified(apart, &mut ep, member, &layer, &pulling(0))));
    let _ = member.barrier(LONG);
}

/// What ranks do in which one is suspended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Haunted {
    /// Rounds of low latency.
    LowLatency,
    /// Rounds of throughput mode.
    Throughput,
}

/// What a round brought.
#[derive(Clone, PartialEq, Debug)]
enum Brought {
    Low(low_latency::Seen),
    High(Box<verify::Observed>),
}

/// Works until a rank is given up that is suspended, and then `beside` it for so many rounds: each must bring the same as the first, which is
/// compared with the oracle.
///
/// # Panics
/// Where what is compared is anything else than the oracle's.
pub fn haunted<A: Apart>(
    apart: &A,
    member: &Arc<Member>,
    topology: Topology,
    what: Haunted,
    deadline: Nanos,
    beside: u32,
) {
    let layer = Layer::new(topology, RankSet::new());
    let mut ep = match apart.join(&layer, member, deadline) {
        Ok(ep) => ep,
        Err(error) => return say(format_args!("not met: {error}")),
    };
    let weighing = |at: u32| if at.is_multiple_of(2) { Weighing::AtSource } else { Weighing::AtExperts };
    let round = |ep: &mut A::Endpoint, layer: &Layer, at: u32| {
        let batch = layer.batch(member);
        apart.block_on(async {
            Ok(match what {
                Haunted::LowLatency => Brought::Low(low_latency::round(ep, &layer.world, batch, weighing(at)).await?),
                Haunted::Throughput => {
                    Brought::High(Box::new(drive::round(ep, &layer.world, batch, &pulling(at)).await?.0))
                }
            })
        })
    };
    let mut rounds = 0;
    let error: Error = loop {
        match round(&mut ep, &layer, rounds) {
            Ok(_) => rounds += 1,
            Err(error) => break error,
        }
        if rounds == 2 {
            say("at work");
        }
    };
    let Error::Failed(failure) = error else { return say(error) };
    say(format_args!("lost {}", failure.culprit));
    eprintln!("rank {}: {failure}", member.rank());
    if let Err(error) = apart.block_on(ep.recover(&[failure.culprit].into_iter().collect())) {
        return say(error);
    }
    let layer = Layer::new(topology, ep.mask().clone());
    let mut rows = verified(apart, &mut ep, member, &layer, &pulling(0));
    let right = [0, 1].map(|at| round(&mut ep, &layer, at).expect("a round"));
    // From now on the zombie may go on at any time.
    say("recovered");
    for at in 0..beside {
        match round(&mut ep, &layer, at) {
            Ok(seen) if seen == right[at as usize % 2] => {}
            Ok(_) => return say(format_args!("wrong rows in round {at} after the recovery")),
            Err(error) => return say(format_args!("round {at} after the recovery: {error}")),
        }
    }
    rows += verified(apart, &mut ep, member, &layer, &pulling(0));
    say(format_args!("verified {rows}"));
    let _ = member.barrier(LONG);
}
