//! What is measured of each rank and expert.

use ep_core::{Rank, Topology};
use serde_json::{Value, json};

use crate::rank::{Account, Interval};

/// Ranks, or nodes, whose traffic is told of each: the figures grow with their square.
const MOST: u32 = 64;

/// Figures of each rank and expert.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Details {
    /// Whose traffic it is: of ranks, or where there are many, of nodes.
    of: &'static str,
    /// `[from][to]`: rows of the dispatch; none where even the nodes are many.
    rows: Option<Vec<Vec<u64>>>,
    /// `[experts]`
    choices: Vec<u64>,
    /// `[ranks]`: dispatch and combine.
    spans: Vec<[Interval; 2]>,
    /// When times begin.
    from: &'static str,
}

impl Details {
    /// Of what all ranks saw. `one_clock`: whether their times can be compared.
    pub(crate) fn of(topology: &Topology, accounts: &[Account], one_clock: bool) -> Self {
        let by_rank = topology.ranks() <= MOST;
        let place = |rank: Rank| if by_rank { rank.index() } else { topology.node_of(rank).index() };
        let places = if by_rank { topology.ranks() } else { topology.nodes() };
        let rows = (places <= MOST).then(|| {
            let mut rows = vec![vec![0; places as usize]; places as usize];
            for (from, account) in topology.all().zip(accounts) {
                for (to, peer) in topology.all().zip(&account.after_dispatch.peers) {
                    rows[place(from)][place(to)] += peer.rows_sent;
                }
            }
            rows
        });
        let first = accounts.iter().map(|account| account.dispatch.start).min().unwrap_or_default();
        let span = |account: &Account| {
            let begin = if one_clock { first } else { account.dispatch.start };
            [account.dispatch, account.combine]
                .map(|Interval { start, end }| Interval { start: start - begin, end: end - begin })
        };
        Self {
            of: if by_rank { "rank" } else { "node" },
            rows,
            choices: accounts.iter().flat_map(|account| account.saw.expert_counts()).collect(),
            spans: accounts.iter().map(span).collect(),
            from: if one_clock { "first rank's start" } else { "rank's own start" },
        }
    }

    /// What `--json` has of it.
    pub(super) fn keys(&self) -> [(&'static str, Value); 4] {
        let span = |spans: &[Interval; 2]| spans.map(|Interval { start, end }| [start.0, end.0]);
        [
            ("traffic", json!(self.rows.as_ref().map(|rows| json!({ "of": self.of, "dispatch_rows": rows })))),
            ("expert_choices", json!(self.choices)),
            ("rank_spans_ns", json!(self.spans.iter().map(span).collect::<Vec<_>>())),
            ("rank_spans_from", json!(self.from)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_is_of_ranks_or_of_nodes_or_not_told() {
        let told = |nodes, each| {
            let [(_, traffic), ..] = Details::of(&Topology::new(nodes, each).unwrap(), &[], true).keys();
            (traffic["of"].as_str().map(str::to_owned), traffic["dispatch_rows"].as_array().map_or(0, Vec::len))
        };
        assert_eq!(told(8, 8), (Some("rank".to_owned()), 64));
        assert_eq!(told(64, 2), (Some("node".to_owned()), 64));
        assert_eq!(told(65, 1), (None, 0));
    }
}
