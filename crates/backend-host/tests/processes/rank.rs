//! What a rank's process does.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Environment, Member, Secret};
use ep_conformance::drive::{self, Round};
use ep_conformance::low_latency::{self, Weighing};
use ep_conformance::verify;
use ep_conformance::workload::{Batch, Workload};
use ep_core::engine::Engine;
use ep_core::reference::World;
use ep_core::transport::{Lanes, NoTransport, Transport};
use ep_core::{Endpoint as _, Error, Failure, Nanos, Placement, Rank, RankSet, Settings, Shape, Topology};
use ep_host::{Cluster, Machine, block_on};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The variable that says what the rank is to do.
pub(super) const PLAN: &str = "EP_HOST_TEST_PLAN";
/// Stands before what a rank says.
pub(super) const MARK: &str = "rank says: ";

const LONG: Duration = Duration::from_secs(30);
/// How long ranks wait for one that may never come.
const SHORT: Duration = Duration::from_secs(3);

fn factor() -> u32 {
    std::env::var("EP_TIME_FACTOR").map_or(1, |factor| factor.parse().unwrap())
}

#[test]
#[ignore = "no test by itself: the body of a rank that another test starts"]
fn a_rank_that_was_started() {
    let plan = std::env::var(PLAN).expect("the test that starts it says what it is to do");
    // Shown when the test fails that started this rank.
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let environment = Environment::detect().unwrap();
    let within = if plan == "endure" { SHORT * factor() } else { LONG };
    let settings = ep_bootstrap::Settings::of(&environment).secret(Secret::detect().unwrap()).within(within);
    let member = match Member::join(settings) {
        Ok(member) => Arc::new(member),
        Err(error) => return say(format_args!("not met: {error}")),
    };
    let topology = environment.topology().unwrap();
    match topology.nodes() {
        1 => act(&plan, &member, topology, &NoTransport),
        _ => act(&plan, &member, topology, &super::roce()),
    }
}

fn act<T: Transport + Clone>(plan: &str, member: &Arc<Member>, topology: Topology, transport: &T) {
    match plan {
        "work" => work(member, topology, transport),
        "persist" => persist(member, topology, transport),
        "endure" => endure(member, topology, transport),
        "haunted" => haunted(member, topology, transport, Haunted::LowLatency),
        "haunted throughput" => haunted(member, topology, transport, Haunted::Throughput),
        _ => differ(member, topology, transport),
    }
}

fn say(what: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    // A parent that is gone hears nothing.
    let _ = writeln!(out, "{MARK}{what}").and_then(|()| out.flush());
}

/// The layer that all ranks have in common, without the ranks of `mask`.
struct Layer {
    world: World,
    batches: Vec<Batch>,
}

impl Layer {
    fn new(topology: Topology, mask: RankSet) -> Self {
        let ranks = topology.ranks();
        let shape = Shape::builder().experts(2 * ranks).topk(3).hidden(96).max_tokens(40).build().unwrap();
        let tokens = (0..ranks).map(|rank| if mask.contains(Rank(rank)) { 0 } else { 40 - rank }).collect();
        let batches = Workload::new(shape, tokens).seed(9).drop(0.1).batches().unwrap();
        Self { world: World::new(shape, topology, mask).unwrap(), batches }
    }

    fn join<T: Transport + Clone>(
        &self,
        member: &Arc<Member>,
        transport: &T,
        slots: u32,
        placement: Placement,
    ) -> Result<Engine<Machine<T::Lanes>>, Error> {
        self.join_within(member, transport, slots, placement, Nanos::from_secs(20))
    }

    /// As [`Layer::join`], with so much time for each operation.
    fn join_within<T: Transport + Clone>(
        &self,
        member: &Arc<Member>,
        transport: &T,
        slots: u32,
        placement: Placement,
        deadline: Nanos,
    ) -> Result<Engine<Machine<T::Lanes>>, Error> {
        let (shape, topology) = (*self.world.shape(), *self.world.topology());
        let settings = Settings::builder(&shape, &topology).slots(slots).low_latency(true).placement(placement);
        let settings = settings.deadline(deadline).build()?;
        Cluster::builder(topology).settings(settings).far(transport.clone()).join(shape, member)
    }

    fn batch(&self, member: &Member) -> &Batch {
        &self.batches[member.rank().index()]
    }
}

/// What every rank saw; nothing for those that were given up.
fn gather<T: Serialize + DeserializeOwned + Default>(member: &Member, own: &T) -> Vec<T> {
    let all = member.all_gather(&postcard::to_stdvec(own).unwrap(), LONG).unwrap();
    let read = |bytes: Option<Vec<u8>>| bytes.map(|bytes| postcard::from_bytes(&bytes).unwrap()).unwrap_or_default();
    all.into_iter().map(read).collect()
}

/// A round of throughput mode and one of low latency, compared with the oracle on every rank: the rows that were compared.
fn verified<L: Lanes>(ep: &mut Engine<Machine<L>>, member: &Member, layer: &Layer, how: &Round) -> u64 {
    let batch = layer.batch(member);
    let (observed, _) = block_on(drive::round(ep, &layer.world, batch, how)).unwrap();
    let mut rows = verify::run(&layer.world, &layer.batches, &gather(member, &observed)).unwrap().rows;
    for weighing in [Weighing::AtSource, Weighing::AtExperts] {
        let seen = block_on(low_latency::round(ep, &layer.world, batch, weighing)).unwrap();
        let all = gather(member, &seen);
        rows += low_latency::verify::run(&layer.world, &layer.batches, weighing, &all).unwrap().rows;
    }
    rows
}

/// Works with rings and with direct placement.
fn work<T: Transport + Clone>(member: &Arc<Member>, topology: Topology, transport: &T) {
    let layer = Layer::new(topology, RankSet::new());
    let how = Round { pull: true, return_weights: true, ..Round::default() };
    let mut rows = 0;
    for placement in [Placement::Ring, Placement::Direct] {
        let mut ep = layer.join(member, transport, 3, placement).unwrap();
        rows += verified(&mut ep, member, &layer, &how);
        rows += verified(&mut ep, member, &layer, &how);
    }
    member.barrier(LONG).unwrap();
    say(format_args!("verified {rows}"));
    // The meeting place is in rank 0's process, which leaves last.
    let _ = member.barrier(LONG);
}

/// Works until a rank is gone, then without it.
fn persist<T: Transport + Clone>(member: &Arc<Member>, topology: Topology, transport: &T) {
    let layer = Layer::new(topology, RankSet::new());
    let how = Round { pull: true, return_weights: true, ..Round::default() };
    let mut ep = layer.join(member, transport, 3, Placement::Direct).unwrap();
    let mut rounds = 0;
    let failure = loop {
        match block_on(drive::round(&mut ep, &layer.world, layer.batch(member), &how)) {
            Ok(_) => rounds += 1,
            Err(error) => break *error.failure().unwrap(),
        }
        if rounds == 5 {
            say("at work");
        }
    };
    go_on(ep, member, topology, failure);
}

/// Works in both modes, in turn, until a rank is gone, then without it.
fn endure<T: Transport + Clone>(member: &Arc<Member>, topology: Topology, transport: &T) {
    let layer = Layer::new(topology, RankSet::new());
    let mut ep = match layer.join(member, transport, 3, Placement::Direct) {
        Ok(ep) => ep,
        Err(error) => return say(format_args!("not met: {error}")),
    };
    let batch = layer.batch(member);
    let mut rounds = 0u32;
    let failure = loop {
        let how = Round { pull: rounds.is_multiple_of(2), return_weights: true, ..Round::default() };
        let round = block_on(async {
            drive::round(&mut ep, &layer.world, batch, &how).await?;
            low_latency::round(&mut ep, &layer.world, batch, Weighing::AtExperts).await
        });
        match round {
            Ok(_) => rounds += 1,
            Err(error) => break *error.failure().unwrap(),
        }
        if rounds == 1 {
            say("at work");
        }
    };
    go_on(ep, member, topology, failure);
}

/// Gives up `culprit`, recovers with the others, and works once more in both modes.
fn go_on<L: Lanes>(mut ep: Engine<Machine<L>>, member: &Member, topology: Topology, failure: Failure) {
    let how = Round { pull: true, return_weights: true, ..Round::default() };
    say(format_args!("lost {}", failure.culprit));
    // For whoever looks for the cause: shown when a test fails.
    eprintln!("rank {}: {failure}", member.rank());
    let mask: RankSet = [failure.culprit].into_iter().collect();
    match block_on(ep.recover(&mask)) {
        Ok(()) => {}
        Err(Error::Failed(failure)) => return say(failure.fault),
        Err(error) => return say(error),
    }
    let layer = Layer::new(topology, ep.mask().clone());
    say(format_args!("verified {}", verified(&mut ep, member, &layer, &how)));
    let _ = member.barrier(LONG);
}

/// What ranks do in which one is suspended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Haunted {
    LowLatency,
    Throughput,
}

/// What a round brought.
#[derive(Clone, PartialEq, Debug)]
enum Brought {
    Low(low_latency::Seen),
    High(Box<verify::Observed>),
}

/// Rounds after the recovery, beside which the zombie goes on.
const BESIDE: u32 = 300;

/// Works until a rank is given up that is suspended, and then beside it: each round must bring the same as the first, which is compared
/// with the oracle.
fn haunted<T: Transport + Clone>(member: &Arc<Member>, topology: Topology, transport: &T, what: Haunted) {
    let layer = Layer::new(topology, RankSet::new());
    let deadline = Nanos::from_millis(800 * u64::from(factor()));
    let mut ep = match layer.join_within(member, transport, 3, Placement::Direct, deadline) {
        Ok(ep) => ep,
        Err(error) => return say(format_args!("not met: {error}")),
    };
    let how = |at: u32| Round { pull: at.is_multiple_of(2), return_weights: true, ..Round::default() };
    let weighing = |at: u32| if at.is_multiple_of(2) { Weighing::AtSource } else { Weighing::AtExperts };
    let round = |ep: &mut Engine<Machine<T::Lanes>>, layer: &Layer, at: u32| {
        let batch = layer.batch(member);
        block_on(async {
            Ok(match what {
                Haunted::LowLatency => Brought::Low(low_latency::round(ep, &layer.world, batch, weighing(at)).await?),
                Haunted::Throughput => {
                    Brought::High(Box::new(drive::round(ep, &layer.world, batch, &how(at)).await?.0))
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
    if let Err(error) = block_on(ep.recover(&[failure.culprit].into_iter().collect())) {
        return say(error);
    }
    let layer = Layer::new(topology, ep.mask().clone());
    let mut rows = verified(&mut ep, member, &layer, &how(0));
    let right = [0, 1].map(|at| round(&mut ep, &layer, at).unwrap());
    // From now on the zombie may go on at any time.
    say("recovered");
    for at in 0..BESIDE {
        match round(&mut ep, &layer, at) {
            Ok(seen) if seen == right[at as usize % 2] => {}
            Ok(_) => return say(format_args!("wrong rows in round {at} after the recovery")),
            Err(error) => return say(format_args!("round {at} after the recovery: {error}")),
        }
    }
    rows += verified(&mut ep, member, &layer, &how(0));
    say(format_args!("verified {rows}"));
    let _ = member.barrier(LONG);
}

/// Ranks that were told different settings.
fn differ<T: Transport + Clone>(member: &Arc<Member>, topology: Topology, transport: &T) {
    let layer = Layer::new(topology, RankSet::new());
    say(layer.join(member, transport, 3 + member.rank().0, Placement::Ring).unwrap_err());
    let _ = member.barrier(LONG);
}
