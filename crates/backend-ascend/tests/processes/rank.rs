//! What a rank's process does.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ep_ascend::driver::Table;
use ep_ascend::twin::{Host, Library, Machine, Session};
use ep_ascend::{AscendEndpoint, Cluster, Roles, block_on};
use ep_bootstrap::{Environment, Member, Secret};
use ep_conformance::processes::plans::{Apart, Haunted, Layer, endure, haunted, pulling, verified};
use ep_conformance::processes::started::{PLAN, say};
use ep_core::{Error, Nanos, Rank, RankSet, Settings};

use super::{ALONE, DEADLINE, LIBRARY, STOPPED};

const LONG: Duration = Duration::from_secs(30);
/// Rounds after the recovery, beside which the zombie goes on.
const BESIDE: u32 = 40;

/// The rank that lacks something, where one does.
pub(super) const POOR: Rank = Rank(1);

/// Few cores, so that a round takes milliseconds; of servers, queues and forwarders, too.
const fn roles(nodes: u32) -> Roles {
    let far = if nodes > 1 { 1 } else { 0 };
    Roles { senders: 2, coordinators: 1 + far, forwarders: far, forwarder_coordinators: 0, receivers: 2 }
}

/// A rank on a twin of its own.
struct Twins {
    table: Table,
    kernels: PathBuf,
    slots: u32,
    roles: Roles,
}

impl Apart for Twins {
    type Endpoint = AscendEndpoint;

    fn join(&self, layer: &Layer, member: &Arc<Member>, deadline: Nanos) -> Result<AscendEndpoint, Error> {
        self.join_on(member.rank().0, layer, member, deadline)
    }

    fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        block_on(work)
    }
}

impl Twins {
    /// On this NPU.
    fn join_on(
        &self,
        device: u32,
        layer: &Layer,
        member: &Arc<Member>,
        deadline: Nanos,
    ) -> Result<AscendEndpoint, Error> {
        let (shape, topology) = (*layer.world.shape(), *layer.world.topology());
        let settings = Settings::builder(&shape, &topology).slots(self.slots).low_latency(true).deadline(deadline);
        let builder = Cluster::builder(topology, self.kernels.clone()).settings(settings.build()?).roles(self.roles);
        builder.devices(vec![device]).join(&self.table, shape, member)
    }
}

#[test]
#[ignore = "no test by itself: the body of a rank that another test starts"]
fn a_rank_that_was_started() {
    let plan = std::env::var(PLAN).expect("the test that starts it says what it is to do");
    let environment = Environment::detect().expect("a place");
    let secret = Secret::detect().expect("a secret");
    let within = if plan == "missing" { ALONE } else { DEADLINE };
    let settings = ep_bootstrap::Settings::of(&environment).secret(secret).within(within);
    let member = match Member::join(settings) {
        Ok(member) => Arc::new(member),
        Err(error) => return say(format_args!("not met: {error}")),
    };
    let path = PathBuf::from(std::env::var_os(LIBRARY).expect("where the twin is"));
    // SAFETY: the test program, which is this one, has built it.
    let library = unsafe { Library::open(&path) }.expect("a library");
    let topology = environment.topology().expect("a topology");
    let (ranks, group) = (topology.ranks(), topology.ranks_per_node());
    let machine = Machine::new(&library, u64::from(member.rank().0), ranks, group).expect("a machine");
    let session = Host::install(machine, "Ascend910B1").expect("the only twin");
    session.share();
    let twins = Twins { table: session.table(), kernels: path, slots: 3, roles: roles(topology.nodes()) };
    let [deadline, stopped] = [DEADLINE, STOPPED].map(|time| Nanos::from_secs(time.as_secs()));
    match plan.as_str() {
        "work" | "missing" => work(&twins, &member, &session),
        "endure" => endure(&twins, &member, topology, deadline),
        "haunted" => haunted(&twins, &member, topology, Haunted::LowLatency, stopped, BESIDE),
        "haunted throughput" => haunted(&twins, &member, topology, Haunted::Throughput, stopped, BESIDE),
        "other settings" => differ(&Twins { slots: 3 + member.rank().0, ..twins }, &member),
        "other cores" => {
            let roles = Roles { senders: 2 + member.rank().0, ..twins.roles };
            differ(&Twins { roles, ..twins }, &member);
        }
        "no device" => lack(&twins, if member.rank() == POOR { 77 } else { member.rank().0 }, &member),
        "no kernels" => {
            let kernels = if member.rank() == POOR { PathBuf::from("nowhere.o") } else { twins.kernels.clone() };
            lack(&Twins { kernels, ..twins }, member.rank().0, &member);
        }
        other => panic!("no plan {other}"),
    }
    if let Some(fault) = session.fault() {
        say(format_args!("the twin: {fault}"));
    }
}

/// Works on two communicators, one after the other, and gives all back.
fn work(twins: &Twins, member: &Arc<Member>, session: &Session) {
    let topology = Environment::detect().and_then(|it| it.topology().map_err(|_| unreachable!())).expect("a topology");
    let layer = Layer::new(topology, RankSet::new());
    let mut rows = 0;
    for slots in [1, 3] {
        let twins = Twins { slots, kernels: twins.kernels.clone(), ..*twins };
        let mut ep = twins.join(&layer, member, Nanos::from_secs(20)).expect("a communicator");
        rows += verified(&twins, &mut ep, member, &layer, &pulling(0));
        rows += verified(&twins, &mut ep, member, &layer, &pulling(1));
    }
    assert_eq!((session.fault(), session.left()), (None, [0, 0, 0]), "a fault; blocks of memory, streams, events left");
    member.barrier(LONG).expect("all have verified");
    say(format_args!("verified {rows}"));
    // The meeting place is in rank 0's process, which leaves last.
    let _ = member.barrier(LONG);
}

/// Ranks that were told different things.
fn differ(twins: &Twins, member: &Arc<Member>) {
    let topology = ep_core::Topology::new(1, member.world()).expect("a topology");
    let layer = Layer::new(topology, RankSet::new());
    say(twins.join(&layer, member, Nanos::from_secs(20)).expect_err("others were told other things"));
    let _ = member.barrier(LONG);
}

/// Ranks of which one lacks something, on this device.
fn lack(twins: &Twins, device: u32, member: &Arc<Member>) {
    let topology = ep_core::Topology::new(1, member.world()).expect("a topology");
    let layer = Layer::new(topology, RankSet::new());
    say(twins.join_on(device, &layer, member, Nanos::from_secs(60)).expect_err("a rank lacks something"));
    let _ = member.barrier(LONG);
}
