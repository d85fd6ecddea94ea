//! Who gets which row at which place: pure functions of a routing and the counts of all ranks.
//!
//! A [`Plan`] is what one rank knows before it has talked to anybody: how many rows go to each rank, how many choices
//! to each expert, and each row's *position*, its index among the rows that its source sends to that destination, in
//! token order. After the counts are exchanged, an [`Exchange`] holds the whole matrix: row `(source, token)` lands at
//! `first_row(source, destination) + position`. So received rows are ordered by (source rank, token) whatever the
//! number of channels or the order of arrival. An [`Expansion`] gives each choice of the received rows a place by its expert.

mod exchange;
mod expansion;
mod fanout;
mod routed;
mod routing;
mod targets;

pub use exchange::{Exchange, align_counts};
pub use expansion::{Expansion, LocalChoices};
pub use fanout::Fanout;
pub use routed::Routed;
pub(crate) use routing::first_mention;
pub use routing::{Membership, Plan, Repeats, TopK, tokens_of};

use std::ops::Range;

use crate::topology::Topology;

/// The tokens that `channel` of `channels` serves, of a batch of `tokens`: contiguous, ascending, as even as possible.
pub fn channel_tokens(tokens: u32, channels: u32, channel: u32) -> Range<u32> {
    let cut = |c: u32| (u64::from(tokens) * u64::from(c) / u64::from(channels)) as u32;
    cut(channel)..cut(channel + 1)
}

/// The part of some tokens, ascending, that `channel` of `channels` serves, when their rank's batch has `tokens` tokens:
/// a range of indices.
pub fn channel_share(some: &[u32], tokens: u32, channels: u32, channel: u32) -> Range<u32> {
    let range = channel_tokens(tokens, channels, channel);
    let cut = |token: u32| some.partition_point(|&other| other < token) as u32;
    cut(range.start)..cut(range.end)
}

/// `[nodes]`: the tokens of a plan that go to each node, ascending, however many of its ranks they go to. On one node
/// nothing travels between nodes, and the list is left empty.
pub fn tokens_by_node(plan: &Plan, topology: &Topology) -> Vec<Vec<u32>> {
    if topology.nodes() == 1 {
        return vec![Vec::new()];
    }
    let mut nodes: Vec<_> = topology.all_nodes().map(|_| Vec::with_capacity(plan.tokens() as usize)).collect();
    for token in 0..plan.tokens() {
        for &(rank, _) in plan.reached(token) {
            let tokens: &mut Vec<u32> = &mut nodes[topology.node_of(rank).index()];
            if tokens.last() != Some(&token) {
                tokens.push(token);
            }
        }
    }
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RankSet, Shape};

    /// Four ranks of an expert each, two of a node.
    #[test]
    fn a_token_goes_to_a_node_once() {
        let shape = Shape::builder().experts(4).topk(2).hidden(16).max_tokens(4).build().unwrap();
        let of = |nodes, ranks| {
            let topology = Topology::new(nodes, ranks).unwrap();
            let topk_idx = [0, 1, 2, -1, 3, 0, -1, -1];
            let routing = TopK { topk_idx: &topk_idx };
            let plan = Plan::of_topk(&shape, 4, &RankSet::new(), routing).unwrap();
            tokens_by_node(&plan, &topology)
        };
        assert_eq!(of(2, 2), [vec![0, 2], vec![1, 2]]);
        assert_eq!(of(1, 4), [Vec::<u32>::new()]);
    }
}
