//! Where rows are between two nodes, as DeepEP's handles tell it: each rank sends a row once to the rank of another node that has its own
//! place there, which passes it on to ranks of that node.

use moexpress::engine::Handle;
use moexpress::{Error, Node, Rank, Topology};

use crate::handle::share;

/// int32 `[nodes, channels]`: how many of each node's tokens are of channels 0 to `column`; `batch` says how many tokens are shared by channels.
pub(crate) fn prefix(nodes: &[Vec<u32>], batch: impl Fn(Node) -> u32, channels: u32) -> Vec<i32> {
    let upto = |(node, tokens): (u32, &Vec<u32>), channel: u32| {
        let share = share(batch(Node(node)), channels);
        tokens.partition_point(|&token| u64::from(token) < share * u64::from(channel + 1)) as i32
    };
    (0..).zip(nodes).flat_map(|node| (0..channels).map(move |channel| upto(node, channel))).collect()
}

/// int32 `[tokens, nodes]`: each token's number among those of its channel to the node, or -1.
pub(crate) fn heads(nodes: &[Vec<u32>], batch: u32, channels: u32) -> Vec<i32> {
    let mut heads = vec![-1; batch as usize * nodes.len()];
    for (node, tokens) in nodes.iter().enumerate() {
        let mut numbers = Numbers::new(batch, channels);
        for &token in tokens {
            heads[token as usize * nodes.len() + node] = numbers.next(token);
        }
    }
    heads
}

/// Numbers tokens, which ascend, within their channels.
struct Numbers {
    share: u64,
    channel: u64,
    next: i32,
}

impl Numbers {
    fn new(batch: u32, channels: u32) -> Self {
        Self { share: share(batch, channels).max(1), channel: 0, next: 0 }
    }

    fn next(&mut self, token: u32) -> i32 {
        let channel = u64::from(token) / self.share;
        if channel != self.channel {
            (self.channel, self.next) = (channel, 0);
        }
        self.next += 1;
        self.next - 1
    }
}

/// The rows that passed through a rank on their way to ranks of its node.
pub(crate) struct Passed {
    /// `[nodes]`: tokens of the rank of each node on this one's rail, ascending.
    tokens: Vec<Vec<u32>>,
    /// `[nodes]`: and for each the ranks of this node that it went to, ascending.
    reached: Vec<Vec<Vec<Rank>>>,
    /// `[nodes]`: tokens of each of these batches.
    batches: Vec<u32>,
    topology: Topology,
}

impl Passed {
    pub(crate) fn of(handle: &Handle, topology: &Topology, me: Rank) -> Result<Self, Error> {
        let (plan, exchange, fanout) = (handle.plan()?, handle.exchange()?, handle.fanout()?);
        let (here, local) = (topology.node_of(me), topology.local_of(me));
        let ranks = |reached: &[(Rank, u32)]| -> Vec<Rank> {
            reached.iter().map(|&(rank, _)| rank).filter(|&rank| topology.node_of(rank) == here).collect()
        };
        let mut passed = Self { tokens: Vec::new(), reached: Vec::new(), batches: Vec::new(), topology: *topology };
        for (node, fanout) in topology.all_nodes().zip(fanout.iter()) {
            let (tokens, reached) = if node == here {
                let all = (0..plan.tokens()).map(|token| (token, ranks(plan.reached(token))));
                all.filter(|(_, ranks)| !ranks.is_empty()).unzip()
            } else {
                (0..).zip(fanout.tokens()).map(|(row, &token)| (token, ranks(fanout.reached(row)))).unzip()
            };
            passed.tokens.push(tokens);
            passed.reached.push(reached);
            passed.batches.push(exchange.tokens(topology.rank_at(node, local)));
        }
        Ok(passed)
    }

    pub(crate) fn rows(&self) -> usize {
        self.tokens.iter().map(Vec::len).sum()
    }

    pub(crate) fn prefix(&self, channels: u32) -> Vec<i32> {
        prefix(&self.tokens, |node| self.batches[node.index()], channels)
    }

    /// int32 `[rows, ranks of a node]`: each row's number among those of its node and channel to the rank, or -1.
    pub(crate) fn heads(&self, channels: u32) -> Vec<i32> {
        let width = self.topology.ranks_per_node() as usize;
        let mut heads = vec![-1; self.rows() * width];
        let mut rows = heads.chunks_exact_mut(width);
        for ((tokens, reached), &batch) in self.tokens.iter().zip(&self.reached).zip(&self.batches) {
            let mut numbers: Vec<Numbers> = (0..width).map(|_| Numbers::new(batch, channels)).collect();
            for ((&token, ranks), row) in tokens.iter().zip(reached).zip(rows.by_ref()) {
                for &rank in ranks {
                    let local = self.topology.local_of(rank) as usize;
                    row[local] = numbers[local].next(token);
                }
            }
        }
        heads
    }
}
