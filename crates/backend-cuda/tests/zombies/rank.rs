//! What a rank's process does: works until a rank is given up that is suspended, and then beside it. Each round must bring the same as the
//! first, which is compared with the oracle.

use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ep_bootstrap::Member;
use ep_conformance::drive::{self, Round};
use ep_conformance::low_latency::{self, Weighing};
use ep_conformance::workload::{Batch, Workload};
use ep_conformance::{Travels, verify};
use ep_core::engine::low_latency::LowRouting;
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, LowLatency as _, Nanos, Placement, Rank, RankSet, Settings, Shape, Topology};
use ep_cuda::hca::Pace;
use ep_cuda::{Cluster, CudaEndpoint};
use ep_cuda_twin::BUILT;
use ep_loop::Loop;
use futures_executor::block_on;

use crate::played;

/// The variable that says what the rank is to do, and what it may say.
pub(super) const PLAN: &str = "EP_CUDA_TEST_PLAN";
pub(super) const LOW_LATENCY: &str = "low latency";
pub(super) const THROUGHPUT: &str = "throughput";
/// Throughput mode over two nodes.
pub(super) const NODES: &str = "nodes";
/// Low latency over two nodes.
pub(super) const LOW_NODES: &str = "low latency of nodes";
/// Throughput mode over two nodes, between which ranks' GPUs play adapters.
pub(super) const PLAYED: &str = "nodes over adapters";
/// Nobody is lost: a communicator is closed of which all have graphs, or one.
pub(super) const GRAPHS: &str = "graphs";
pub(super) const ONE_GRAPH: &str = "one graph";
/// The variable that says whether calls wait for their kernels: 0 or 1.
pub(super) const WAITS: &str = "EP_CUDA_TEST_WAITS";
/// Stands before what a rank says.
pub(super) const MARK: &str = "rank says: ";

const PLACE: [&str; 3] = ["EP_CUDA_TEST_RANK", "EP_CUDA_TEST_WORLD", "EP_CUDA_TEST_PLACE"];
/// Rounds after the recovery, beside which the zombie goes on; GPUs made of software take their time.
fn beside() -> u32 {
    if std::env::var_os(BUILT).is_some() { 4 } else { 300 }
}

const LONG: Duration = Duration::from_secs(60);

/// Which rank it is, and where it meets the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) address: SocketAddr,
}

impl Place {
    pub(super) fn variables(&self) -> [(&'static str, String); 3] {
        let [rank, world, address] = PLACE;
        [(rank, self.rank.to_string()), (world, self.world.to_string()), (address, self.address.to_string())]
    }

    fn told() -> Self {
        let [rank, world, address] = PLACE.map(|name| std::env::var(name).expect("the test that starts it says where"));
        let number = |text: String| text.parse().expect("a number");
        Self { rank: number(rank), world: number(world), address: address.parse().expect("an address") }
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
    fn new(topology: Topology, mask: RankSet) -> Result<Self, Error> {
        let ranks = topology.ranks();
        let shape = Shape::builder().experts(2 * ranks).topk(3).hidden(128).max_tokens(40).build()?;
        let tokens = (0..ranks).map(|rank| if mask.contains(Rank(rank)) { 0 } else { 40 - rank }).collect();
        let batches = Workload::new(shape, tokens).seed(9).drop(0.1).batches()?;
        Ok(Self { world: World::new(shape, topology, mask)?, batches })
    }

    fn join(&self, plan: &str, member: &Arc<Member>) -> Result<CudaEndpoint, Error> {
        let (shape, topology) = (*self.world.shape(), *self.world.topology());
        let settings = Settings::builder(&shape, &topology).slots(4);
        let settings = match topology.nodes() {
            1 => settings.low_latency(true).placement(Placement::Direct),
            _ => settings.low_latency(plan == LOW_NODES),
        };
        // Where the processor does what GPUs do, ranks wait for each other longer.
        let times = u64::from(super::factor()) * if std::env::var_os(BUILT).is_some() { 10 } else { 1 };
        let settings = settings.deadline(Nanos::from_millis(1500 * times)).build()?;
        let builder = Cluster::builder(topology).settings(settings).multiprocessors(2).specialise(false);
        let builder = builder.wait_for_kernels(super::number(WAITS, 1) > 0);
        let builder = if plan == PLAYED {
            // A warp of a GPU made of software is a thread of the processor.
            let warps = if std::env::var_os(BUILT).is_some() { 3 } else { Pace::default().warps };
            played::apart(builder, Pace { warps, ..Pace::default() }, member)?
        } else {
            builder.far(Loop::new().between_processes())
        };
        builder.join(shape, member)
    }
}

/// What a round brought.
#[derive(PartialEq)]
enum Brought {
    Low(low_latency::Seen),
    High(Box<verify::Observed>),
}

impl Brought {
    /// Runs the `at`-th round; every other one along another path.
    fn by(ep: &mut CudaEndpoint, layer: &Layer, plan: &str, at: u32) -> Result<Self, Error> {
        let (batch, even) = (&layer.batches[ep.rank().index()], at.is_multiple_of(2));
        block_on(async {
            if [LOW_LATENCY, LOW_NODES].contains(&plan) {
                let weighing = if even { Weighing::AtSource } else { Weighing::AtExperts };
                return Ok(Self::Low(low_latency::round(ep, &layer.world, batch, weighing).await?));
            }
            let how = Round { pull: even, return_weights: true, ..Round::default() };
            Ok(Self::High(Box::new(drive::round(ep, &layer.world, batch, &how).await?.0)))
        })
    }

    /// Compares what all ranks saw in such a round with the oracle.
    fn is_right(&self, member: &Member, layer: &Layer, at: u32) -> Result<(), String> {
        let Layer { world, batches } = layer;
        match self {
            Self::Low(seen) => {
                let weighing = if at.is_multiple_of(2) { Weighing::AtSource } else { Weighing::AtExperts };
                let compared = low_latency::verify::run(world, batches, weighing, &gather(member, seen)?);
                compared.map(drop).map_err(|mismatch| mismatch.to_string())
            }
            Self::High(seen) => verify::run(world, batches, &gather(member, &**seen)?)
                .map(drop)
                .map_err(|mismatch| mismatch.to_string()),
        }
    }
}

/// What every rank saw; nothing for those that were given up.
fn gather<T: Travels + Default>(member: &Member, own: &T) -> Result<Vec<T>, String> {
    let own = postcard::to_stdvec(own).map_err(|error| error.to_string())?;
    let all = member.all_gather(&own, LONG).map_err(|error| error.to_string())?;
    let read = |bytes: Option<Vec<u8>>| bytes.map_or(Ok(T::default()), |bytes| postcard::from_bytes(&bytes));
    all.into_iter().map(read).collect::<Result<_, _>>().map_err(|error: postcard::Error| error.to_string())
}

/// The body of a rank.
pub(super) fn act(plan: &str) {
    let place = Place::told();
    let settings = ep_bootstrap::Settings::new(Rank(place.rank), place.world, place.address.to_string());
    // The test holds the meeting place: whichever rank is stopped, the others can agree.
    let ended = match Member::join(settings.held_elsewhere(true).within(LONG * super::factor())) {
        Ok(member) => work(plan, &Arc::new(member)),
        Err(error) => Err(error.to_string()),
    };
    if let Err(problem) = ended {
        say(problem);
    }
}

/// Captures a call, closes the communicator and makes another.
fn close_with_graphs(plan: &str, member: &Arc<Member>) -> Result<(), String> {
    let text = |error: Error| error.to_string();
    let layer = Layer::new(Topology::new(1, member.world()).map_err(text)?, RankSet::new()).map_err(text)?;
    let mut ep = layer.join(LOW_LATENCY, member).map_err(text)?;
    let batch = &layer.batches[ep.rank().index()];
    let stream = ep.stream().clone();
    let graph = block_on(async {
        let x = ep.rows(&verify::bytes_of(&batch.x), batch.tokens)?;
        let routing = LowRouting::new(ep.array(&batch.topk_idx)?, None);
        stream.begin_capture()?;
        let received = ep.low_latency_dispatch(&x, &routing).await?;
        let graph = stream.end_capture()?;
        drop(received);
        Ok::<_, Error>(graph)
    });
    let mut graph = Some(graph.map_err(text)?);
    say("at work");
    if plan == ONE_GRAPH && member.rank() != Rank(0) {
        drop(graph.take());
        // Whoever buries it does so beside this thread.
        thread::sleep(Duration::from_millis(300));
    }
    drop(ep);
    say("closed it");
    if plan == GRAPHS {
        drop(graph.take());
    }
    if member.rank() == Rank(0) {
        thread::sleep(Duration::from_millis(300));
    }
    let another = layer.join(LOW_LATENCY, member).map_err(text)?;
    say("made another");
    drop(graph);
    let _ = member.barrier(LONG);
    drop(another);
    Ok(())
}

fn work(plan: &str, member: &Arc<Member>) -> Result<(), String> {
    if [GRAPHS, ONE_GRAPH].contains(&plan) {
        return close_with_graphs(plan, member);
    }
    let text = |error: Error| error.to_string();
    let nodes = if [NODES, LOW_NODES, PLAYED].contains(&plan) { 2 } else { 1 };
    let topology = Topology::new(nodes, member.world() / nodes).map_err(text)?;
    let layer = Layer::new(topology, RankSet::new()).map_err(text)?;
    let mut ep = layer.join(plan, member).map_err(text)?;
    let mut rounds = 0;
    let error = loop {
        match Brought::by(&mut ep, &layer, plan, rounds) {
            Ok(_) => rounds += 1,
            Err(error) => break error,
        }
        if rounds == 2 {
            say("at work");
        }
    };
    let Error::Failed(failure) = error else { return Err(text(error)) };
    say(format_args!("lost {}", failure.culprit));
    eprintln!("rank {}: {failure}", member.rank());
    block_on(ep.recover(&[failure.culprit].into_iter().collect())).map_err(text)?;
    let layer = Layer::new(topology, ep.mask().clone()).map_err(text)?;
    let mut right = Vec::new();
    for at in 0..2 {
        let brought = Brought::by(&mut ep, &layer, plan, at).map_err(text)?;
        brought.is_right(member, &layer, at)?;
        right.push(brought);
    }
    // From now on the zombie may go on at any time.
    say("recovered");
    for at in 0..beside() {
        match Brought::by(&mut ep, &layer, plan, at) {
            Ok(brought) if brought == right[at as usize % 2] => {}
            Ok(_) => return Err(format!("wrong rows in round {at} after the recovery")),
            Err(error) => return Err(format!("round {at} after the recovery: {error}")),
        }
    }
    say("verified");
    // Nobody leaves while another still works.
    let _ = member.barrier(LONG);
    // The rank that was given up may have this window mapped: it is not kept for the next communicator.
    let (device, window) = (Arc::clone(ep.stream().device()), ep.layout().window_bytes());
    drop(right);
    let kept = || device.kept_of(usize::try_from(window).unwrap_or(usize::MAX));
    let before = kept();
    drop(ep);
    say(if kept() == before { "left its window" } else { "kept its window" });
    Ok(())
}
