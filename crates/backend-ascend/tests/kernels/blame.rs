//! Who is named over several servers, where ranks hear those of their server and of their rail only: what a wait comes from is relayed.

use ep_ascend::args::Plant;
use ep_ascend::twin::{Host, Machine, TwinError};
use ep_ascend::{AscendEndpoint, Cluster};
use ep_conformance::drive::{Round, round, upload};
use ep_conformance::harness::share;
use ep_conformance::workload::{Batch, Workload};
use ep_core::engine::Dispatch;
use ep_core::port::{Cell, Counter, LaneKind};
use ep_core::reference::World;
use ep_core::{Endpoint as _, Error, Layout, Nanos, Rank, RankSet, Settings, Shape, Topology};

use crate::common::befall;
use crate::library;
use crate::servers::FEW;

/// Seeds that are tried until one catches.
const SEEDS: u64 = 8;
/// Seeds without a plant.
const CLEAN: u64 = 4;
const DEADLINE: Nanos = Nanos::from_millis(1000);

/// What goes wrong on servers of two ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Story {
    /// The last rank of three servers crashes, and no host notices. It is named, and nobody that only passes its rows on.
    LostRank,
    /// Both ranks of the second of two servers crash. One of them is named, though the others also wait for each other.
    LostNode,
    /// Two servers: the rows from rank 0 to rank 2 are lost. One of the two is named, though whoever knows leaves at once.
    LostLane,
    /// Two servers, the cards of the first slow: rank 1 makes room for one row. It is named long before the deadline, though whoever fails ends its
    /// queues at once.
    NoRoom,
}

impl Story {
    const ALL: [Self; 4] = [Self::LostRank, Self::LostNode, Self::LostLane, Self::NoRoom];

    const fn servers(self) -> u32 {
        if matches!(self, Self::LostRank) { 3 } else { 2 }
    }

    /// Those of whom one is to be named, by all others.
    fn culprits(self) -> Vec<Rank> {
        match self {
            Self::LostRank => vec![Rank(5)],
            Self::LostNode => vec![Rank(2), Rank(3)],
            Self::LostLane => vec![Rank(0), Rank(2)],
            Self::NoRoom => vec![Rank(1)],
        }
    }

    /// Ranks that crash.
    fn crashed(self) -> Vec<Rank> {
        if matches!(self, Self::LostRank | Self::LostNode) { self.culprits() } else { Vec::new() }
    }

    /// Lets it befall the machine.
    fn strike(self, machine: &mut Machine, layout: &Layout, seed: u64) -> Result<(), TwinError> {
        machine.hurry(500);
        if self == Self::NoRoom {
            // Their verdicts have not travelled yet when the hosts hear that they have failed.
            [0, 1].into_iter().try_for_each(|rank| machine.starve_card(rank))?;
        }
        self.crashed().into_iter().try_for_each(|rank| machine.crash(rank.0, 40 + 23 * seed))?;
        if self != Self::LostLane {
            return Ok(());
        }
        let lane = LaneKind::Data(layout.far_track(0));
        let line = layout.cell(Cell::new(Rank(0), lane, Counter::Tail), 1).0 / 64 * 64;
        machine.block((0, 2), line..line + 64, seed, None)
    }
}

/// How a rank fared: whom it names, and how long it took.
type Fate = (Option<Rank>, Nanos);

/// What was wrong; nothing where all is as it must be.
fn found(story: Story, seed: u64, plant: u32) -> Option<String> {
    let topology = Topology::new(story.servers(), 2).expect("a topology");
    let ranks = topology.ranks();
    let shape = Shape::builder().experts(2 * ranks).topk(4).hidden(32).max_tokens(16).build().expect("a shape");
    let settings = Settings::builder(&shape, &topology).slots(2).low_latency(false).deadline(DEADLINE);
    let settings = settings.build().expect("settings");
    let layout = Layout::new(&shape, &topology, &settings).expect("a layout");
    let batches = Workload::new(shape, vec![9; ranks as usize]).seed(seed).batches().expect("batches");
    let world = World::new(shape, topology, RankSet::new()).expect("a world");
    let machine = Machine::new(library(), seed, ranks, 2).expect("a machine");
    let session = Host::install(machine, "Ascend910B3").expect("the thread's only twin");
    session.befall(|machine| story.strike(machine, &layout, seed)).expect("ranks of the machine");
    session.silence();
    let builder = Cluster::builder(topology, library().path()).settings(settings).roles(FEW).plant(plant);
    let cluster = builder.build(&session.table(), shape).expect("a cluster");
    let fates = cluster.run(async |ep| {
        let (rank, batch) = (ep.rank(), &batches[ep.rank().index()]);
        befall(live(ep, &world, batch, story), || session.has_crashed(rank.0), false).await
    });
    if let Some(fault) = session.fault() {
        return Some(fault);
    }
    let survivors: Vec<Fate> = topology
        .all()
        .zip(fates)
        .filter(|(rank, _)| !story.crashed().contains(rank))
        .filter_map(|(_, fate)| fate)
        .collect();
    if survivors.len() + story.crashed().len() != ranks as usize {
        return Some(format!("failure: of some ranks nothing was heard: {survivors:?}"));
    }
    let culprit = survivors[0].0;
    let is_named = culprit.is_some_and(|culprit| story.culprits().contains(&culprit));
    let alike = survivors.iter().all(|fate| fate.0 == culprit);
    // Of the others nobody knows before the deadline.
    let is_late = survivors.iter().any(|fate| (fate.1.0 > DEADLINE.0 / 2) == (story == Story::NoRoom));
    if is_named && alike && !is_late { None } else { Some(format!("failure: {survivors:?}")) }
}

async fn live(mut ep: AscendEndpoint, world: &World, batch: &Batch, story: Story) -> Fate {
    loop {
        let began = ep.now();
        let ended = match story {
            Story::NoRoom => without_room(&mut ep, batch).await,
            _ => round(&mut ep, world, batch, &Round::default()).await.map(drop),
        };
        let Err(error) = ended else { continue };
        let fate = (error.failure().map(|failure| failure.culprit), ep.now() - began);
        if story == Story::NoRoom {
            ep.recover(&RankSet::new()).await.expect("nobody is lost");
        }
        return fate;
    }
}

/// A dispatch for which rank 1 has too little room.
async fn without_room(ep: &mut AscendEndpoint, batch: &Batch) -> Result<(), Error> {
    let (x, routing) = upload(ep, batch)?;
    let worst_rows = u32::from(ep.rank() == Rank(1));
    ep.dispatch_with(&x, &routing, &Dispatch { worst_rows, ..Dispatch::default() }).await.map(drop)
}

/// A planted fault, and the story that shows it.
pub(crate) const PLANTED: &[(Plant, Story)] = &[
    (Plant::NotRelayed, Story::LostRank),
    (Plant::ExplainedFirst, Story::LostNode),
    (Plant::VerdictUnposted, Story::NoRoom),
];

#[test]
fn each_fault_of_blame_is_caught() {
    for (plant, story) in PLANTED {
        let caught = (1..=SEEDS).find_map(|seed| found(*story, seed, *plant as u32));
        let caught = caught.unwrap_or_else(|| panic!("{plant:?} is not caught in {SEEDS} seeds"));
        assert!(caught.starts_with("failure: "), "{plant:?} is caught as {caught}");
    }
}

#[test]
fn without_a_plant_all_name_the_same_rank() {
    for story in Story::ALL {
        for seed in 1..=share(CLEAN, 1) {
            assert_eq!(found(story, seed, 0), None, "{story:?}, seed {seed}");
        }
    }
}
