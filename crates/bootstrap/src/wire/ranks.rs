//! Sets of ranks as lists of numbers.

use ep_core::topology::MAX_RANKS;
use ep_core::{Rank, RankSet};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serializer};

pub(crate) fn serialize<S: Serializer>(ranks: &RankSet, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(ranks.iter().map(|rank| rank.0).collect::<Vec<u32>>())
}

/// Refuses ranks that no communicator has: the set is a bitmap, and its size follows the highest.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RankSet, D::Error> {
    let ranks = Vec::<u32>::deserialize(deserializer)?;
    match ranks.iter().find(|&&rank| rank >= MAX_RANKS) {
        Some(rank) => Err(D::Error::custom(format_args!("rank {rank} of a set"))),
        None => Ok(ranks.into_iter().map(Rank).collect()),
    }
}
