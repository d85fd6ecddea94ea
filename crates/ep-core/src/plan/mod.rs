//! Who gets which row at which place: pure functions of a routing and the counts of all ranks.
//!
//! A [`Plan`] is what one rank knows before it has talked to anybody: how many rows go to each rank, how many choices
//! to each expert, and each row's *position*, its index among the rows that its source sends to that destination, in
//! token order. After the counts are exchanged, an [`Exchange`] holds the whole matrix: row `(source, token)` lands at
//! `first_row(source, destination) + position`. So received rows are ordered by (source rank, token) whatever the
//! number of channels or the order of arrival.

mod exchange;
mod routing;
mod targets;

pub use exchange::{Exchange, align_counts};
pub use routing::{Membership, Plan, TopK};

use std::ops::Range;

/// The tokens that `channel` of `channels` serves, of a batch of `tokens`: contiguous, ascending, as even as possible.
pub fn channel_tokens(tokens: u32, channels: u32, channel: u32) -> Range<u32> {
    let cut = |c: u32| (u64::from(tokens) * u64::from(c) / u64::from(channels)) as u32;
    cut(channel)..cut(channel + 1)
}
