//! Whom to blame when a wait has lasted too long: pure, the same rule for roles and kernels.

use crate::error::Phase;
use crate::topology::Rank;

/// A wait for a peer. Ordered by how near it is to the cause: earlier operations and phases first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Wait {
    /// Number of the operation.
    pub op: u64,
    /// What is awaited.
    pub phase: Phase,
    /// Whether it is known of the peer that it waits itself, for what leads back here: so not the peer is where the wait comes from.
    pub in_circle: bool,
    /// From whom.
    pub peer: Rank,
}

impl Wait {
    /// A wait of which no more is known.
    pub const fn new(op: u64, phase: Phase, peer: Rank) -> Self {
        Self { op, phase, in_circle: false, peer }
    }
}

/// Whom to blame, of what each rank has said that it waits for; `timeout` is the wait whose time is up. `hears(rank, peer)` tells whether
/// the words of `peer` come to `rank`, or to the rank that asks.
///
/// A rank that waits itself is explained by what it waits for. So first come the waits for ranks that wait for nobody, as told by ranks
/// that would have heard it. Next come the waits in a circle (a lane that lost what it carried; the circle may be one that is not heard here), and
/// hearsay: waits for ranks that are heard neither by who says so nor here, and may wait as well. Of several it is the one nearest to the cause. All ranks that have heard the
/// same come to the same verdict.
pub fn culprit(waits: &[(Rank, Wait)], hears: impl Fn(Rank, Rank) -> bool, timeout: Wait) -> Rank {
    let next = |rank: Rank| waits.iter().find(|&&(reporter, _)| reporter == rank).map(|&(_, wait)| wait.peer);
    let roots = || waits.iter().copied().filter(|(_, wait)| next(wait.peer).is_none());
    let circle = |reporter: Rank| {
        let chain = std::iter::successors(next(reporter), |&rank| next(rank));
        chain.take(waits.len()).any(|rank| rank == reporter)
    };
    let circles = waits.iter().copied().filter(|&(reporter, _)| circle(reporter));
    let heard =
        roots().filter(|&(reporter, wait)| !wait.in_circle && hears(reporter, wait.peer)).map(|(_, wait)| wait).min();
    let any = || roots().chain(circles).map(|(_, wait)| wait).min();
    heard.or_else(any).map_or(timeout.peer, |wait| wait.peer)
}

/// Where not everybody hears everybody: what `wait` of rank `me` comes from, of what the others have said that they wait for. That is the
/// wait at the end of those that explain it; itself, as one in a circle, where they come back to where they began.
pub fn origin(waits: &[(Rank, Wait)], me: Rank, wait: Wait) -> Wait {
    let of = |rank: Rank| waits.iter().find(|&&(reporter, _)| reporter == rank).map(|&(_, wait)| wait);
    let mut last = wait;
    for _ in 0..=waits.len() {
        match of(last.peer) {
            Some(next) if next.peer == me => break,
            Some(next) => last = next,
            None => return last,
        }
    }
    Wait { in_circle: true, ..wait }
}
