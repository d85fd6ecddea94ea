//! In which order processes ended, and which of them failed first.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use ep_bootstrap::listed;
use ep_core::{Rank, RankSet};

use super::process::Ending;

/// How much later than one that exited a process may be seen to have been ended by a signal, and still be the first that
/// failed: threads that see ends of about the same time run in any order, late on a busy machine, and who exits has mostly noticed another's end.
pub(super) const TIE: Duration = Duration::from_millis(250);

/// The end of one process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) rank: Rank,
    pub(super) ending: Ending,
    /// When it was seen.
    pub(super) at: Instant,
}

/// The ends that were seen, in their order.
#[derive(Debug, Default)]
pub(super) struct Endings {
    arrivals: Vec<Arrival>,
    /// How many had ended when the others were told to.
    told: Option<usize>,
}

impl Endings {
    pub(super) fn push(&mut self, arrival: Arrival) {
        self.arrivals.push(arrival);
    }

    pub(super) const fn len(&self) -> usize {
        self.arrivals.len()
    }

    /// All that still run are told to end now.
    pub(super) fn told(&mut self) {
        self.told.get_or_insert(self.arrivals.len());
    }

    /// Ranks of a job of `world` that still run.
    pub(super) fn running(&self, world: usize) -> RankSet {
        let ended: RankSet = self.arrivals.iter().map(|arrival| arrival.rank).collect();
        (0..world as u32).map(Rank).filter(|&rank| !ended.contains(rank)).collect()
    }

    /// The first that failed, once no other can come before it.
    pub(super) fn settled_failure(&self, now: Instant) -> Option<Arrival> {
        let first = self.first_failure()?;
        let earliest = self.failures().next()?;
        (first.ending.is_killed() || now >= earliest.at + TIE).then_some(first)
    }

    /// The first that failed by itself, as far as is known.
    pub(super) fn first_failure(&self) -> Option<Arrival> {
        let earliest = self.failures().next()?;
        let tied = self.failures().take_while(|failure| failure.at <= earliest.at + TIE);
        Some(tied.into_iter().find(|failure| failure.ending.is_killed()).unwrap_or(earliest))
    }

    /// Those that failed before they were told to end.
    fn failures(&self) -> impl Iterator<Item = Arrival> + '_ {
        let own = self.told.unwrap_or(self.arrivals.len());
        self.arrivals[..own].iter().copied().filter(|arrival| !arrival.ending.is_success())
    }

    /// All ends in their order, a line for each run of equal ones.
    pub(super) fn list(&self) -> String {
        let mut text = String::from("the processes ended in this order:");
        let own = self.told.unwrap_or(self.arrivals.len());
        for (part, after) in [(&self.arrivals[..own], ""), (&self.arrivals[own..], ", after it was told to end")] {
            for run in part.chunk_by(|a, b| a.ending == b.ending) {
                let ranks: RankSet = run.iter().map(|arrival| arrival.rank).collect();
                // Writing to a string never fails.
                let _ = write!(text, "\n  {}: {}{after}", listed(&ranks), run[0].ending);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ends as (rank, ending, milliseconds).
    fn endings(arrivals: &[(u32, Ending, u64)]) -> (Endings, Instant) {
        let (start, mut endings) = (Instant::now(), Endings::default());
        for &(rank, ending, after) in arrivals {
            endings.push(Arrival { rank: Rank(rank), ending, at: start + Duration::from_millis(after) });
        }
        (endings, start)
    }

    #[test]
    fn the_first_to_end_is_the_first_that_failed_whatever_its_rank() {
        let (endings, start) =
            endings(&[(2, Ending::Exited(0), 0), (3, Ending::Exited(7), 1), (0, Ending::Exited(1), 30)]);
        assert!(endings.settled_failure(start + TIE).is_none(), "another may yet come before it");
        let first = endings.settled_failure(start + TIE * 2).unwrap();
        assert_eq!((first.rank, first.ending), (Rank(3), Ending::Exited(7)));
    }

    #[test]
    fn of_two_at_the_same_time_the_one_that_a_signal_ended_is_the_first() {
        let (endings, start) =
            endings(&[(0, Ending::Exited(1), 0), (3, Ending::Killed(9), 2), (1, Ending::Killed(6), 3)]);
        assert_eq!(endings.settled_failure(start).unwrap().rank, Rank(3));
        let (late, start) = self::endings(&[(0, Ending::Exited(1), 0), (3, Ending::Killed(9), 900)]);
        assert_eq!(late.settled_failure(start + TIE * 20).unwrap().rank, Rank(0));
    }

    #[test]
    fn who_was_told_to_end_has_not_failed() {
        let (mut endings, start) = endings(&[(1, Ending::Exited(0), 0)]);
        endings.told();
        endings.push(Arrival { rank: Rank(0), ending: Ending::Killed(15), at: start });
        assert!(endings.first_failure().is_none());
        assert_eq!(endings.running(3).iter().collect::<Vec<_>>(), [Rank(2)]);
    }

    #[test]
    fn all_ends_are_listed_in_their_order() {
        let (mut endings, start) =
            endings(&[(3, Ending::Killed(9), 0), (0, Ending::Exited(1), 3), (1, Ending::Exited(1), 4)]);
        endings.told();
        endings.push(Arrival { rank: Rank(2), ending: Ending::Exited(1), at: start });
        let lines: Vec<_> = endings.list().lines().map(str::to_owned).collect();
        assert!(lines[1].starts_with("  rank 3: signal 9"), "{lines:?}");
        assert_eq!(lines[2..], ["  ranks 0, 1: exit code 1", "  rank 2: exit code 1, after it was told to end"]);
    }
}
