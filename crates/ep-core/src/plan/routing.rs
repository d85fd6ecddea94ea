//! A rank's own part of the plan.

use crate::error::Error;
use crate::shape::Shape;
use crate::topology::{Rank, RankSet};

/// The router's choices of one batch: `topk_idx [tokens, topk]`, -1 for dropped.
#[derive(Clone, Copy, Debug)]
pub struct TopK<'a> {
    /// Expert of each choice over all ranks, or -1.
    pub topk_idx: &'a [i64],
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
#[derive(Clone, PartialEq, Eq, Debug)]
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
        let local = shape.local_experts(ranks)?;
        let topk = shape.topk() as usize;
        let tokens = tokens_of(routing.topk_idx.len(), topk, "topk_idx", "topk")?;
        let mut experts = vec![0u32; shape.experts() as usize];
        let mut last_token_of_expert = vec![u32::MAX; shape.experts() as usize];
        let masked: Vec<bool> = (0..ranks).map(|rank| mask.contains(Rank(rank))).collect();
        let mut lists = Lists::new(tokens, ranks, routing.topk_idx.len());
        let mut targets = [0u32; crate::shape::MAX_TOPK as usize];
        for (token, choices) in (0..tokens).zip(routing.topk_idx.chunks_exact(topk)) {
            let mut found = 0;
            for &choice in choices {
                if choice == -1 {
                    continue;
                }
                let expert = u32::try_from(choice).ok().filter(|&e| e < shape.experts()).ok_or_else(|| {
                    Error::invalid(
                        format_args!("topk_idx of token {token}"),
                        choice,
                        format_args!("-1 or 0 to {}", shape.experts() - 1),
                    )
                })?;
                let seen = &mut last_token_of_expert[expert as usize];
                if *seen == token {
                    return Err(Error::invalid(
                        format_args!("topk_idx of token {token}"),
                        format_args!("{choice} twice"),
                        "every expert at most once per token",
                    ));
                }
                *seen = token;
                let rank = expert / local;
                if masked[rank as usize] {
                    continue;
                }
                experts[expert as usize] += 1;
                if !targets[..found].contains(&rank) {
                    targets[found] = rank;
                    found += 1;
                }
            }
            targets[..found].sort_unstable();
            lists.token(&targets[..found]);
        }
        Ok(lists.finish(experts))
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
        for rank in mask.iter() {
            experts[(rank.0 * local) as usize..((rank.0 + 1) * local) as usize].fill(0);
        }
        let mut lists = Lists::new(tokens, ranks, routing.in_rank.len());
        let mut targets = Vec::with_capacity(ranks as usize);
        for row in routing.in_rank.chunks_exact(ranks as usize) {
            targets.clear();
            targets.extend((0..ranks).filter(|&rank| row[rank as usize] != 0 && !mask.contains(Rank(rank))));
            lists.token(&targets);
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

/// The lists of a plan while its tokens are added one by one.
struct Lists {
    rows: Vec<u32>,
    reach_starts: Vec<u32>,
    reached: Vec<(Rank, u32)>,
}

impl Lists {
    fn new(tokens: u32, ranks: u32, most: usize) -> Self {
        let mut reach_starts = Vec::with_capacity(tokens as usize + 1);
        reach_starts.push(0);
        Self { rows: vec![0; ranks as usize], reach_starts, reached: Vec::with_capacity(most) }
    }

    /// Adds the next token, which goes to `targets`, ascending.
    fn token(&mut self, targets: &[u32]) {
        for &rank in targets {
            let position = &mut self.rows[rank as usize];
            self.reached.push((Rank(rank), *position));
            *position += 1;
        }
        self.reach_starts.push(self.reached.len() as u32);
    }

    fn finish(self, experts: Vec<u32>) -> Plan {
        let Self { rows, reach_starts, reached } = self;
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

fn tokens_of(len: usize, columns: usize, what: &str, column: &str) -> Result<u32, Error> {
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
