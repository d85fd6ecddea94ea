//! A rank's own part of the plan.

use super::targets::{Narrow, Targets, Wide, bits, nonzero, unmasked};
use crate::error::Error;
use crate::shape::Shape;
use crate::topology::{Rank, RankSet};

/// The router's choices of one batch: `topk_idx [tokens, topk]`, -1 for dropped.
#[derive(Clone, Copy, Debug)]
pub struct TopK<'a> {
    /// Expert of each choice over all ranks, or -1.
    pub topk_idx: &'a [i64],
}

/// What becomes of a token that names an expert more than once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Repeats {
    /// It is refused.
    Refused,
    /// Each time counts as a choice of the expert.
    Counted,
    /// The first time counts.
    Once,
}

impl Repeats {
    /// This where `allowed`, else [`Repeats::Refused`].
    pub fn where_allowed(self, allowed: bool) -> Self {
        if allowed { self } else { Self::Refused }
    }
}

/// Of a token's choices, the column of the first that names the expert of `column`.
pub(crate) fn first_mention(choices: &[i64], column: usize) -> usize {
    choices.iter().position(|&choice| choice == choices[column]).unwrap_or(column)
}

/// Membership computed elsewhere.
#[derive(Clone, Copy, Debug)]
pub struct Membership<'a> {
    /// `[tokens, ranks]`: not 0 where the token goes to the rank.
    pub in_rank: &'a [u8],
    /// `[experts]`: tokens for each expert.
    pub tokens_per_expert: &'a [u32],
}

/// What one rank sends in one dispatch.
///
/// Tokens are counted once for each rank that they go to, however many of its experts they chose.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Plan {
    tokens: u32,
    /// `[ranks]`: rows to each rank.
    rows: Vec<u32>,
    /// `[experts]`: choices for each expert.
    experts: Vec<u32>,
    /// `[ranks + 1]`: where each rank's list starts in `sent`.
    starts: Vec<u32>,
    /// Tokens that go to rank 0, ascending, then those to rank 1, and so on.
    sent: Vec<u32>,
    /// `[tokens + 1]`: where each token's list starts in `reached`.
    reach_starts: Vec<u32>,
    /// Ranks that token 0 goes to, ascending, each with the row's position there; then those of token 1, and so on.
    reached: Vec<(Rank, u32)>,
}

impl Plan {
    /// Plans the router's choices. Choices of experts on masked ranks are dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming token and value of an expert out of range or chosen twice, or a wrong length.
    pub fn of_topk(shape: &Shape, ranks: u32, mask: &RankSet, routing: TopK<'_>) -> Result<Self, Error> {
        Self::of_choices(shape, ranks, mask, routing, Repeats::Refused)
    }

    /// As [`Plan::of_topk`]; `repeats` says what becomes of a token that names an expert more than once.
    ///
    /// # Errors
    /// Those of [`Plan::of_topk`].
    pub fn of_choices(
        shape: &Shape,
        ranks: u32,
        mask: &RankSet,
        routing: TopK<'_>,
        repeats: Repeats,
    ) -> Result<Self, Error> {
        let local = shape.local_experts(ranks)?;
        let topk = shape.topk() as usize;
        let tokens = tokens_of(routing.topk_idx.len(), topk, "topk_idx", "topk")?;
        let of_rank = |rank| std::iter::repeat_n(Expert { rank, last_token: u32::MAX, count: 0 }, local as usize);
        let mut experts: Vec<_> = (0..ranks).flat_map(of_rank).collect();
        let mut lists = Lists::new(tokens, ranks, mask, routing.topk_idx.len());
        if ranks <= 64 {
            lists.choose(&mut experts, Narrow::default(), topk, routing, repeats)?;
        } else {
            lists.choose(&mut experts, Wide::new(ranks), topk, routing, repeats)?;
        }
        let mut counts: Vec<_> = experts.iter().map(|expert| expert.count).collect();
        clear_masked(&mut counts, local, mask);
        Ok(lists.finish(counts))
    }

    /// Plans a membership. Masked ranks get nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] for wrong lengths.
    pub fn of_membership(shape: &Shape, ranks: u32, mask: &RankSet, routing: Membership<'_>) -> Result<Self, Error> {
        let local = shape.local_experts(ranks)?;
        let tokens = tokens_of(routing.in_rank.len(), ranks as usize, "in_rank", "ranks")?;
        if routing.tokens_per_expert.len() != shape.experts() as usize {
            return Err(Error::invalid(
                "length of tokens_per_expert",
                routing.tokens_per_expert.len(),
                format_args!("{} experts", shape.experts()),
            ));
        }
        let mut experts = routing.tokens_per_expert.to_vec();
        clear_masked(&mut experts, local, mask);
        let mut lists = Lists::new(tokens, ranks, mask, routing.in_rank.len().min(8 * tokens as usize));
        for row in routing.in_rank.chunks_exact(ranks as usize) {
            row.chunks(64).zip((0..).step_by(64)).for_each(|(bytes, first)| lists.reach(first, nonzero(bytes)));
            lists.end_token();
        }
        Ok(lists.finish(experts))
    }

    /// Tokens of the batch.
    pub const fn tokens(&self) -> u32 {
        self.tokens
    }

    /// `[ranks]`: rows to each rank.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// `[experts]`: choices for each expert.
    pub fn experts(&self) -> &[u32] {
        &self.experts
    }

    /// The tokens that go to `rank`, ascending: the row at index `i` has position `i`.
    pub fn sent_to(&self, rank: Rank) -> &[u32] {
        let at = rank.index();
        &self.sent[self.starts[at] as usize..self.starts[at + 1] as usize]
    }

    /// The ranks that `token` goes to, ascending, each with the row's position there.
    pub fn reached(&self, token: u32) -> &[(Rank, u32)] {
        let at = token as usize;
        &self.reached[self.reach_starts[at] as usize..self.reach_starts[at + 1] as usize]
    }
}

/// An expert while a router's choices are counted.
#[derive(Clone, Copy)]
struct Expert {
    rank: u32,
    /// The last token that chose it, to find choices made twice.
    last_token: u32,
    count: u32,
}

/// The lists of a plan while its tokens are added one by one.
struct Lists {
    /// `[ranks / 64]`: bits of the ranks that get anything.
    unmasked: Vec<u64>,
    rows: Vec<u32>,
    reach_starts: Vec<u32>,
    reached: Vec<(Rank, u32)>,
}

impl Lists {
    /// Empty lists, with room for `rows` rows; more are possible.
    fn new(tokens: u32, ranks: u32, mask: &RankSet, rows: usize) -> Self {
        let mut reach_starts = Vec::with_capacity(tokens as usize + 1);
        reach_starts.push(0);
        let unmasked = unmasked(ranks, mask);
        Self { unmasked, rows: vec![0; ranks as usize], reach_starts, reached: Vec::with_capacity(rows) }
    }

    /// Adds the tokens of a routing.
    fn choose(
        &mut self,
        experts: &mut [Expert],
        mut targets: impl Targets,
        topk: usize,
        routing: TopK<'_>,
        repeats: Repeats,
    ) -> Result<(), Error> {
        let limit = experts.len();
        for (token, choices) in (0u32..).zip(routing.topk_idx.chunks_exact(topk)) {
            for &choice in choices {
                let Some(expert) = usize::try_from(choice).ok().and_then(|at| experts.get_mut(at)) else {
                    if choice == -1 {
                        continue;
                    }
                    return Err(out_of_range(token, choice, limit));
                };
                if expert.last_token == token {
                    match repeats {
                        Repeats::Refused => return Err(chosen_twice(token, choice)),
                        Repeats::Counted => {}
                        Repeats::Once => continue,
                    }
                }
                expert.last_token = token;
                expert.count += 1;
                targets.insert(expert.rank);
            }
            targets.drain(|first, word| self.reach(first, word));
            self.end_token();
        }
        Ok(())
    }

    /// Adds the ranks of the bits of `word`, where `first` is the lowest's, to the ranks of the token.
    fn reach(&mut self, first: u32, word: u64) {
        let unmasked = self.unmasked[(first / 64) as usize];
        for rank in bits(word & unmasked).map(|bit| first + bit) {
            let position = &mut self.rows[rank as usize];
            self.reached.push((Rank(rank), *position));
            *position += 1;
        }
    }

    /// Ends the token's list.
    fn end_token(&mut self) {
        self.reach_starts.push(self.reached.len() as u32);
    }

    fn finish(self, experts: Vec<u32>) -> Plan {
        let Self { rows, reach_starts, reached, .. } = self;
        let mut starts = Vec::with_capacity(rows.len() + 1);
        let mut sum = 0;
        starts.push(0);
        starts.extend(rows.iter().map(|&rows| {
            sum += rows;
            sum
        }));
        let mut sent = vec![0; reached.len()];
        let tokens = (reach_starts.len() - 1) as u32;
        for (token, ends) in (0..tokens).zip(reach_starts.windows(2)) {
            for &(rank, position) in &reached[ends[0] as usize..ends[1] as usize] {
                sent[(starts[rank.index()] + position) as usize] = token;
            }
        }
        Plan { tokens, rows, experts, starts, sent, reach_starts, reached }
    }
}

/// Nobody gets the choices of experts on masked ranks.
fn clear_masked(counts: &mut [u32], local: u32, mask: &RankSet) {
    for (counts, rank) in counts.chunks_exact_mut(local as usize).zip((0..).map(Rank)) {
        if mask.contains(rank) {
            counts.fill(0);
        }
    }
}

#[cold]
fn out_of_range(token: u32, choice: i64, experts: usize) -> Error {
    let limit = format_args!("-1 or 0 to {}", experts - 1);
    Error::invalid(format_args!("topk_idx of token {token}"), choice, limit)
}

#[cold]
fn chosen_twice(token: u32, choice: i64) -> Error {
    let limit = "every expert at most once per token";
    Error::invalid(format_args!("topk_idx of token {token}"), format_args!("{choice} twice"), limit)
}

/// Tokens of a batch whose array `what` has `len` entries, `columns` for each token; `column` says what these are.
///
/// # Errors
/// [`Error::Invalid`] when that is no whole number, or more than any batch may have.
pub fn tokens_of(len: usize, columns: usize, what: &str, column: &str) -> Result<u32, Error> {
    if !len.is_multiple_of(columns) {
        return Err(Error::invalid(
            format_args!("length of {what}"),
            len,
            format_args!("a multiple of the {columns} {column}"),
        ));
    }
    let tokens = len / columns;
    if tokens > crate::shape::MAX_TOKENS as usize {
        return Err(Error::invalid("tokens", tokens, format_args!("at most {}", crate::shape::MAX_TOKENS)));
    }
    Ok(tokens as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_that_repeats_is_that_of_the_first() {
        let choices = [5, -1, 3, 5, 3, -1];
        let first: Vec<_> = (0..choices.len()).map(|at| first_mention(&choices, at)).collect();
        assert_eq!(first, [0, 1, 2, 0, 2, 1]);
    }

    #[test]
    fn tokens_are_whole_and_no_more_than_a_batch_may_have() {
        let most = crate::shape::MAX_TOKENS as usize;
        let tokens = |len, columns| tokens_of(len, columns, "topk_idx", "topk").map_err(|error| error.to_string());
        assert_eq!(
            [tokens(0, 8), tokens(24, 8), tokens(most, 1), tokens(2 * most, 2)],
            [Ok(0), Ok(3), Ok(most as u32), Ok(most as u32)]
        );
        let few = format!("tokens is {}, allowed: at most {most}", most + 1);
        assert_eq!(tokens(2 * (most + 1), 2), Err(few));
        assert_eq!(tokens(7, 2).unwrap_err(), "length of topk_idx is 7, allowed: a multiple of the 2 topk");
    }
}
