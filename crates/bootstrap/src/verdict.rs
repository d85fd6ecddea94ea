//! What the meeting place tells a rank when it cannot have what it asked for.

use ep_core::{Rank, RankSet};
use serde::{Deserialize, Serialize};

use crate::wire::ranks;

/// Something that two ranks do not have in common.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{field} is {} on rank {} and {} on rank {}", values[0], ranks[0], values[1], ranks[1])]
pub struct Mismatch {
    /// What differs.
    pub field: String,
    /// The values.
    pub values: [String; 2],
    /// The ranks that said them, in the same order.
    pub ranks: [u32; 2],
}

/// Why the meeting place refused a call. All ranks that took part in the call are told the same.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Verdict {
    /// Two ranks disagree about what all must have in common, or called different things.
    #[error(transparent)]
    Mismatch(Mismatch),
    /// Another process has joined, or had joined, as this rank.
    #[error("another process has already joined as rank {rank}")]
    Duplicate {
        /// The rank.
        rank: u32,
    },
    /// A rank that this job does not have.
    #[error("rank is {rank}, allowed: below the world size, {world}")]
    OutOfRange {
        /// The rank.
        rank: u32,
        /// Ranks of the job.
        world: u32,
    },
    /// The deadline of a rank passed.
    #[error("{} did not come by the deadline{}", listed(ranks), turned_away_text(turned_away))]
    Missing {
        /// Those who had not come.
        #[serde(with = "ranks")]
        ranks: RankSet,
        /// Why the latest connections that were turned away while ranks joined did not become members.
        turned_away: Vec<String>,
    },
    /// Processes ended before they joined, as whoever started them says.
    #[error("{} ended before joining{}", listed(ranks), turned_away_text(turned_away))]
    Ended {
        /// Those that ended.
        #[serde(with = "ranks")]
        ranks: RankSet,
        /// As of [`Missing`](Self::Missing).
        turned_away: Vec<String>,
    },
    /// Processes ended, or their connections broke.
    #[error("the connection to {} is closed", listed(ranks))]
    Lost {
        /// Those who are gone.
        #[serde(with = "ranks")]
        ranks: RankSet,
    },
    /// All contributions together do not fit a message.
    #[error("contributions of {bytes} bytes in all, allowed: {limit}")]
    TooLong {
        /// What they would take.
        bytes: u64,
        /// What a message holds.
        limit: u64,
    },
    /// The other ranks agreed to go on without this one.
    #[error("rank {rank} was masked out by the other ranks")]
    Excluded {
        /// This rank.
        rank: u32,
    },
    /// An agreement ended what was under way.
    #[error("the ranks agreed on how to go on after a failure, and gave up everything before that")]
    Interrupted,
}

/// Ranks as a reader wants them: `rank 3`, or `ranks 0, 4 to 7`.
pub fn listed(ranks: &RankSet) -> String {
    let mut runs: Vec<(Rank, Rank)> = Vec::new();
    for rank in ranks.iter() {
        match runs.last_mut() {
            Some((_, last)) if last.0 + 1 == rank.0 => *last = rank,
            _ => runs.push((rank, rank)),
        }
    }
    let run = |&(first, last): &(Rank, Rank)| match last.0 - first.0 {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first} to {last}"),
    };
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", runs.iter().map(run).collect::<Vec<_>>().join(", "))
}

fn turned_away_text(reasons: &[String]) -> String {
    if reasons.is_empty() { String::new() } else { format!("; turned away meanwhile: {}", reasons.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_in_runs() {
        let set = |ranks: &[u32]| listed(&ranks.iter().copied().map(Rank).collect());
        assert_eq!(set(&[3]), "rank 3");
        assert_eq!(set(&[0, 1, 4, 5, 6, 9]), "ranks 0, 1, 4 to 6, 9");
    }

    #[test]
    fn who_was_turned_away_is_said_where_somebody_is_missing() {
        let missing = Verdict::Missing { ranks: [Rank(2)].into_iter().collect(), turned_away: vec!["x".to_owned()] };
        assert_eq!(missing.to_string(), "rank 2 did not come by the deadline; turned away meanwhile: x");
    }
}
