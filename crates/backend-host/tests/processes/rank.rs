//! What a rank's process does.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::{Environment, Member, Secret};
use ep_conformance::drive;
use ep_conformance::processes::plans::{Apart, Haunted, Layer, endure, go_on, haunted, pulling, verified};
use ep_conformance::processes::started::{PLAN, say};
use ep_core::engine::Engine;
use ep_core::transport::{AnyLanes, AnyTransport, NoTransport, Transport};
use ep_core::{Error, Nanos, Placement, RankSet, Settings, Topology};
use ep_host::{Cluster, Machine, block_on};

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
    let within = if plan == "meet" { SHORT * factor() } else { LONG };
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

fn act<T: Transport<Lanes: 'static> + Clone + 'static>(
    plan: &str,
    member: &Arc<Member>,
    topology: Topology,
    transport: &T,
) {
    match plan {
        "work" => work(member, topology, transport),
        "persist" => persist(member, topology, transport),
        "endure" | "meet" => endure(&Cpus::new(transport.clone()), member, topology, DEADLINE),
        "haunted" => beside(member, topology, transport, Haunted::LowLatency),
        "haunted throughput" => beside(member, topology, transport, Haunted::Throughput),
        "short" => short(member, topology, transport),
        _ => differ(member, topology, transport),
    }
}

/// CPU ranks, with a transport between nodes.
struct Cpus<T> {
    transport: T,
    slots: u32,
    placement: Placement,
}

impl<T: Transport<Lanes: 'static> + Clone + 'static> Cpus<T> {
    const fn new(transport: T) -> Self {
        Self { transport, slots: 3, placement: Placement::Direct }
    }
}

impl<T: Transport<Lanes: 'static> + Clone + 'static> Apart for Cpus<T> {
    type Endpoint = Engine<Machine<AnyLanes>>;

    fn join(&self, layer: &Layer, member: &Arc<Member>, deadline: Nanos) -> Result<Self::Endpoint, Error> {
        let (shape, topology) = (*layer.world.shape(), *layer.world.topology());
        let settings =
            Settings::builder(&shape, &topology).slots(self.slots).low_latency(true).placement(self.placement);
        let settings = settings.deadline(deadline).build()?;
        Cluster::builder(topology).settings(settings).far(AnyTransport::new(self.transport.clone())).join(shape, member)
    }

    fn block_on<R>(&self, work: impl Future<Output = R>) -> R {
        block_on(work)
    }
}

/// For operations that nothing ends but their deadline.
const DEADLINE: Nanos = Nanos::from_secs(20);

/// Works with rings and with direct placement.
fn work<T: Transport<Lanes: 'static> + Clone + 'static>(member: &Arc<Member>, topology: Topology, transport: &T) {
    let layer = Layer::new(topology, RankSet::new());
    let mut rows = 0;
    for placement in [Placement::Ring, Placement::Direct] {
        let cpus = Cpus { placement, ..Cpus::new(transport.clone()) };
        let mut ep = cpus.join(&layer, member, DEADLINE).unwrap();
        rows += verified(&cpus, &mut ep, member, &layer, &pulling(0));
        rows += verified(&cpus, &mut ep, member, &layer, &pulling(0));
    }
    member.barrier(LONG).unwrap();
    say(format_args!("verified {rows}"));
    // The meeting place is in rank 0's process, which leaves last.
    let _ = member.barrier(LONG);
}

/// Works until a rank is gone, then without it.
fn persist<T: Transport<Lanes: 'static> + Clone + 'static>(member: &Arc<Member>, topology: Topology, transport: &T) {
    let layer = Layer::new(topology, RankSet::new());
    let cpus = Cpus::new(transport.clone());
    let mut ep = cpus.join(&layer, member, DEADLINE).unwrap();
    let mut rounds = 0;
    let failure = loop {
        match block_on(drive::round(&mut ep, &layer.world, layer.batch(member), &pulling(0))) {
            Ok(_) => rounds += 1,
            Err(error) => break *error.failure().unwrap(),
        }
        if rounds == 5 {
            say("at work");
        }
    };
    go_on(&cpus, ep, member, topology, failure);
}

/// Rounds after the recovery, beside which the zombie goes on.
const BESIDE: u32 = 300;

/// Works beside a rank that was suspended and given up.
fn beside<T: Transport<Lanes: 'static> + Clone + 'static>(
    member: &Arc<Member>,
    topology: Topology,
    transport: &T,
    what: Haunted,
) {
    // Three quarters of it blame whoever stands still: no rank that lives does so long, on a busy machine neither.
    let deadline = Nanos::from_secs(8 * u64::from(factor()));
    haunted(&Cpus::new(transport.clone()), member, topology, what, deadline, BESIDE);
}

/// Ranks that were told different settings.
fn differ<T: Transport<Lanes: 'static> + Clone + 'static>(member: &Arc<Member>, topology: Topology, transport: &T) {
    let layer = Layer::new(topology, RankSet::new());
    let cpus = Cpus { slots: 3 + member.rank().0, placement: Placement::Ring, ..Cpus::new(transport.clone()) };
    say(cpus.join(&layer, member, DEADLINE).unwrap_err());
    let cpus = Cpus { slots: 3, ..cpus };
    say(cpus.join(&layer, member, DEADLINE + Nanos::from_secs(member.rank().0.into())).unwrap_err());
    let _ = member.barrier(LONG);
}

/// Ranks of which the first takes more memory than there is.
fn short<T: Transport<Lanes: 'static> + Clone + 'static>(member: &Arc<Member>, topology: Topology, transport: &T) {
    let shape = *Layer::new(topology, RankSet::new()).world.shape();
    let arena_bytes = if member.rank().0 == 0 { 1 << 44 } else { 1 << 20 };
    let settings = Settings::builder(&shape, &topology).placement(Placement::Direct).arena_bytes(arena_bytes);
    let builder = Cluster::builder(topology).settings(settings.build().unwrap());
    say(builder.far(AnyTransport::new(transport.clone())).join(shape, member).unwrap_err());
    let _ = member.barrier(LONG);
}
