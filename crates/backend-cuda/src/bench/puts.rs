//! How long a put and its publish take to another node: a message goes to and fro between two ranks, posted and awaited by kernels.

use ep_core::device::probe::{Ended, Script, Step, Verb};
use ep_core::port::{LaneKind, Nanos};
use ep_core::{Error, Placement, Rank, Shape, Topology};

use crate::rank::layout_of;
use crate::{Builder, Cluster};

/// Turns there and back; the first ones are not counted.
const TURNS: u64 = 300;
const COLD: u64 = 50;

/// What one way takes, in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct PutTimes {
    /// From before a put until its publish is seen at the other rank: half of a turn, the median.
    pub one_way: f64,
    /// The same of the turn that nine of ten are shorter than.
    pub slow: f64,
    /// Until the kernel that posts has posted both, the median.
    pub posted: f64,
}

/// Measures with puts of `bytes` bytes on ranks that are threads of this process, a node each; `over` gives their cluster its network.
///
/// # Errors
/// [`Error::Invalid`] for bytes; what is missing; [`Error::Broken`] where a message does not come.
pub fn run_puts(bytes: u64, over: impl FnOnce(Builder) -> Result<Builder, Error>) -> Result<PutTimes, Error> {
    if !(1..=1 << 20).contains(&bytes) {
        return Err(Error::invalid("bytes of a put", bytes, format_args!("1 to {}", 1 << 20)));
    }
    let (room, topology) = (bytes.next_multiple_of(1 << 12), Topology::new(2, 1)?);
    let shape = Shape::builder().experts(2).topk(1).hidden(128).max_tokens(16).build()?;
    let settings = Cluster::settings(&shape, &topology, Some(1)).placement(Placement::Direct).arena_bytes(2 * room);
    let settings = settings.build()?;
    let layout = layout_of(&shape, &topology, &settings)?;
    let cluster = over(Cluster::builder(topology).settings(settings).multiprocessors(1))?.build(shape)?;
    let (from, lane) = (layout.arena().offset.0, LaneKind::Data(layout.far_track(0)).index() as u32);
    let script = |me: u32| {
        let of_peer = |verb| Step { peer: 1 - me, lane, ..Step::new(verb) };
        let send = |turn: u64| {
            let put = Step { from, to: from + room, len: bytes, ..of_peer(Verb::Put) };
            [put, Step { value: turn, ..of_peer(Verb::Publish) }]
        };
        let wait = |turn: u64| Step { value: turn, ..of_peer(Verb::Wait) };
        let steps = (1..=TURNS).flat_map(|turn| {
            let [put, publish] = send(turn);
            if me == 0 { [put, publish, wait(turn)] } else { [wait(turn), put, publish] }
        });
        Script { rank: Rank(me), allowed: Nanos::from_secs(20), steps: steps.collect() }
    };
    let seen = cluster.probe(&[script(0), script(1)])?;
    if let Some(saw) = seen.iter().flatten().find(|saw| saw.ended != Ended::Done) {
        let why = format!("a step ended as {:?} after {:?}", saw.ended, saw.waited);
        return Err(Error::broken("a message between two nodes", why, "look at the network"));
    }
    // A turn is what rank 0 took for all three steps: two ways.
    let turns = |steps: std::ops::Range<usize>| {
        let of_turn = move |turn: &[ep_core::device::probe::Saw]| {
            turn[steps.clone()].iter().map(|saw| saw.waited.0 as f64 / 1e3).sum::<f64>()
        };
        let mut all: Vec<f64> = seen[0].chunks(3).skip(COLD as usize).map(of_turn).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let (whole, posted) = (turns(0..3), turns(0..2));
    let at = |all: &[f64], share: f64| all[((all.len() - 1) as f64 * share) as usize];
    Ok(PutTimes { one_way: at(&whole, 0.5) / 2.0, slow: at(&whole, 0.9) / 2.0, posted: at(&posted, 0.5) })
}
