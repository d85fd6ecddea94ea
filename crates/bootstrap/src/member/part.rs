//! What a rank brings to a meeting at which ranks may lack what they were to bring: its part, or why it has none.

use std::time::Duration;

use ep_core::Rank;

use super::Member;
use crate::error::Error;

/// What comes first: of a part, and of the words of a rank that has none.
const PART: u8 = 0;
const WHY: u8 = 1;

/// The most bytes of such words: those of thousands of ranks fit a message.
const MOST_WORDS: usize = 1000;

const REMEDY: &str = "mend that there, and start again, on all ranks";

/// What ranks gave, by rank; none of one that an agreement went on without.
pub type Parts = Vec<Option<Vec<u8>>>;

impl Member {
    /// As [`all_gather`](Self::all_gather), of what ranks may have failed to make: all hear who has failed, and why, instead of waiting for that rank.
    /// `own` is what this rank has made, `told` what the others are given of it, at most [`MAX_CONTRIBUTION`](crate::MAX_CONTRIBUTION) bytes less one.
    /// Returns what this rank has made, and what everybody was given of theirs.
    ///
    /// # Errors
    /// That of `own`, when the others have been told; what another rank failed with, of several the lowest; `not_met` of the errors of
    /// [`all_gather`](Self::all_gather).
    pub fn try_all_gather<T, E: Into<ep_core::Error>>(
        &self,
        own: Result<T, ep_core::Error>,
        told: impl FnOnce(&T) -> Vec<u8>,
        within: Duration,
        not_met: impl FnOnce(Error) -> E,
    ) -> Result<(T, Parts), ep_core::Error> {
        let own = own.inspect_err(|error| self.tell_failed(error, within))?;
        let parts = self.all_gather(&[&[PART], &told(&own)[..]].concat(), within);
        let parts = parts.map_err(|error| not_met(error).into())?;
        let parts =
            (0..).map(Rank).zip(parts).map(|(rank, brought)| brought.map(|bytes| part(rank, bytes)).transpose());
        Ok((own, parts.collect::<Result<_, _>>()?))
    }

    /// Comes to a [`try_all_gather`](Self::try_all_gather) of the others with what has failed here. Returns when they have heard it, or do not come.
    pub fn tell_failed(&self, error: &ep_core::Error, within: Duration) {
        let words = error.to_string();
        let words = &words.as_bytes()[..words.floor_char_boundary(MOST_WORDS)];
        if let Err(unheard) = self.all_gather(&[&[WHY], words].concat(), within) {
            tracing::debug!(%unheard, "the other ranks do not hear what failed here");
        }
    }
}

/// The part that `rank` brought.
fn part(rank: Rank, mut brought: Vec<u8>) -> Result<Vec<u8>, ep_core::Error> {
    match brought.first() {
        Some(&PART) => Ok(brought.split_off(1)),
        Some(&WHY) => {
            let words = String::from_utf8_lossy(&brought[1..]);
            Err(ep_core::Error::broken(format_args!("the start of rank {rank}"), words, REMEDY))
        }
        _ => {
            let why = format_args!("rank {rank} told {} bytes of another kind", brought.len());
            let remedy = format_args!("see what rank {rank} says: it makes another call, or is of another version");
            Err(ep_core::Error::broken("a meeting of all ranks", why, remedy))
        }
    }
}
