//! Ranks of which one has not what it needs to start: the others hear what, and nobody waits for anybody.

use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ep_bootstrap::{Identity, Member, Settings as Meeting};
use ep_conformance::Setup;
use ep_core::layout::Queues;
use ep_core::transport::{DevicePlace, Place, Transport};
use ep_core::{Error, Rank, Shape, Topology};
use ep_loop::{Loop, LoopLanes};
use libtest_mimic::Trial;

use crate::common;

const RANKS: u32 = 3;
/// The rank that lacks something.
const POOR: Rank = Rank(1);
/// Longer than all of it takes, and shorter than a deadline.
const LONG: Duration = Duration::from_secs(50);

/// The loop, which one rank cannot open.
#[derive(Clone, Debug)]
struct Closed(Loop);

impl Transport for Closed {
    type Lanes = LoopLanes;

    fn far_lanes(&self) -> Queues {
        self.0.far_lanes()
    }

    fn open(&self, place: Place<'_>) -> Result<LoopLanes, Error> {
        self.0.open(place)
    }

    fn open_for_device(&self, place: DevicePlace<'_>) -> Result<LoopLanes, Error> {
        if place.me == POOR {
            Err(Error::broken("the card", "is not there", "add one"))
        } else {
            self.0.open_for_device(place)
        }
    }
}

/// What each rank says of its start, where `with_gpu` says whether the poor one has a GPU.
fn start(with_gpu: bool) -> Result<Vec<String>, Error> {
    let shape = Shape::builder().experts(RANKS * 2).topk(2).hidden(32).max_tokens(8).build()?;
    let setup = Setup::new(shape, Topology::new(RANKS, 1)?, 1)?;
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let join = |rank: Rank, listener: Option<TcpListener>| {
        let meeting = Meeting::new(rank, RANKS, &address).identity(Identity::new()).within(LONG);
        let member = match listener {
            Some(listener) => Member::host(listener, meeting),
            None => Member::join(meeting),
        };
        let member = Arc::new(member.expect("all have joined"));
        let builder = common::builder(&setup, None, None).expect("a builder").far(Closed(Loop::new()));
        let builder = if rank == POOR && !with_gpu { builder.gpus(vec![77]) } else { builder };
        let said = builder.join(shape, &member).map(drop).expect_err("one rank lacks something").to_string();
        // Rank 0 leaves last.
        let _ = member.barrier(LONG);
        said
    };
    let join = &join;
    Ok(thread::scope(|scope| {
        let ranks: Vec<_> =
            (0..RANKS).zip(std::iter::once(Some(listener)).chain(std::iter::repeat_with(|| None))).collect();
        let ranks: Vec<_> =
            ranks.into_iter().map(|(rank, listener)| scope.spawn(move || join(Rank(rank), listener))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank that does not panic")).collect()
    }))
}

fn is_told() -> Result<(), String> {
    for with_gpu in [false, true] {
        let began = Instant::now();
        let said = start(with_gpu).map_err(|error| error.to_string())?;
        let own = &said[POOR.index()];
        let lacks = if with_gpu { "the card failed: is not there; add one" } else { "77" };
        let others = format!("the start of rank {POOR} failed: {own}; mend that there, and start again, on all ranks");
        if !own.contains(lacks) || said[0] != others || said[2] != others || began.elapsed() > LONG {
            return Err(format!("{said:?} after {:?}", began.elapsed()));
        }
    }
    Ok(())
}

pub(crate) fn trial(absent: Option<&'static str>) -> Trial {
    let name = "started::what_one_rank_lacks_is_told_to_all";
    Trial::test(name, || is_told().map_err(Into::into)).with_ignored_flag(absent.is_some())
}
