//! Who is where: ranks, nodes, rails, and how one rank reaches another.

use crate::error::Error;
pub use crate::terms::{Node, Rank};

/// The most ranks one communicator holds.
///
/// An alarm cell names a rank in 16 bits ([`crate::layout::Alarm`]); the rest of the protocol has room for more.
pub const MAX_RANKS: u32 = 1 << 14;

/// How one rank reaches another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Reach {
    /// The rank itself: rows are copied locally.
    Own,
    /// Same node: stores and loads reach the peer's window.
    Near,
    /// Another node: a network carries the puts.
    Far,
}

/// `nodes` near domains of `ranks_per_node` ranks each. Rank `r` is the `r % ranks_per_node`-th of node
/// `r / ranks_per_node`; the ranks of one local index over all nodes form a *rail*.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Topology {
    nodes: u32,
    ranks_per_node: u32,
}

impl Topology {
    /// A topology of `nodes` times `ranks_per_node` ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] when either is zero or the product exceeds [`MAX_RANKS`].
    pub fn new(nodes: u32, ranks_per_node: u32) -> Result<Self, Error> {
        for (what, value) in [("nodes", nodes), ("ranks per node", ranks_per_node)] {
            if value == 0 {
                return Err(Error::invalid(what, value, "at least 1"));
            }
        }
        match nodes.checked_mul(ranks_per_node) {
            Some(ranks) if ranks <= MAX_RANKS => Ok(Self { nodes, ranks_per_node }),
            _ => Err(Error::invalid(
                "ranks in all",
                u64::from(nodes) * u64::from(ranks_per_node),
                format_args!("at most {MAX_RANKS}"),
            )),
        }
    }

    /// Number of nodes.
    pub const fn nodes(&self) -> u32 {
        self.nodes
    }

    /// Number of ranks in each node.
    pub const fn ranks_per_node(&self) -> u32 {
        self.ranks_per_node
    }

    /// Number of ranks in all.
    pub const fn ranks(&self) -> u32 {
        self.nodes * self.ranks_per_node
    }

    /// Roles of a rank in a dispatch on one channel: two of each other rank of the node and of each rail peer, one of each other rank and its own.
    pub(crate) const fn dispatch_roles(&self) -> u32 {
        self.ranks() + (self.ranks_per_node - 1) + (self.nodes - 1)
    }

    /// Every rank, ascending.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = Rank> + ExactSizeIterator + use<> {
        (0..self.ranks()).map(Rank)
    }

    /// The node that holds `rank`.
    #[inline]
    pub const fn node_of(&self, rank: Rank) -> Node {
        Node(rank.0 / self.ranks_per_node)
    }

    /// The index of `rank` within its node: its rail.
    #[inline]
    pub const fn local_of(&self, rank: Rank) -> u32 {
        rank.0 % self.ranks_per_node
    }

    /// The rank of `node` on the rail `local`.
    pub const fn rank_at(&self, node: Node, local: u32) -> Rank {
        Rank(node.0 * self.ranks_per_node + local)
    }

    /// Every node, ascending.
    pub fn all_nodes(&self) -> impl DoubleEndedIterator<Item = Node> + ExactSizeIterator + use<> {
        (0..self.nodes).map(Node)
    }

    /// The ranks of `node`, ascending.
    pub fn ranks_of(&self, node: Node) -> impl DoubleEndedIterator<Item = Rank> + ExactSizeIterator + use<> {
        let first = node.0 * self.ranks_per_node;
        (first..first + self.ranks_per_node).map(Rank)
    }

    /// How `from` reaches `to`.
    #[inline]
    pub fn reach(&self, from: Rank, to: Rank) -> Reach {
        if from == to {
            Reach::Own
        } else if self.node_of(from) == self.node_of(to) {
            Reach::Near
        } else {
            Reach::Far
        }
    }

    /// Whether they have lanes to each other in throughput mode: two ranks of one node, or of one rail.
    pub fn are_neighbours(&self, one: Rank, other: Rank) -> bool {
        one != other && (self.node_of(one) == self.node_of(other) || self.local_of(one) == self.local_of(other))
    }
}

/// A set of ranks, for instance those taken out of the communicator.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RankSet {
    words: Vec<u64>,
}

impl RankSet {
    /// The empty set.
    pub const fn new() -> Self {
        Self { words: Vec::new() }
    }

    /// Whether `rank` is in the set.
    pub fn contains(&self, rank: Rank) -> bool {
        let word = self.words.get(rank.index() / 64).copied().unwrap_or(0);
        word >> (rank.0 % 64) & 1 == 1
    }

    /// Adds `rank`.
    pub fn insert(&mut self, rank: Rank) {
        let at = rank.index() / 64;
        if self.words.len() <= at {
            self.words.resize(at + 1, 0);
        }
        self.words[at] |= 1 << (rank.0 % 64);
    }

    /// Adds every rank of `other`.
    pub fn extend(&mut self, other: &Self) {
        other.iter().for_each(|rank| self.insert(rank));
    }

    /// The ranks of the set, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Rank> + '_ {
        self.words
            .iter()
            .zip(0u32..)
            .flat_map(|(&word, at)| (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| Rank(at * 64 + bit)))
    }

    /// Whether the set holds no rank.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    /// Number of ranks in the set.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }
}

impl FromIterator<Rank> for RankSet {
    fn from_iter<I: IntoIterator<Item = Rank>>(ranks: I) -> Self {
        let mut set = Self::new();
        ranks.into_iter().for_each(|rank| set.insert(rank));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topology_names_value_and_limit() {
        let error = Topology::new(0, 8).unwrap_err().to_string();
        assert_eq!(error, "nodes is 0, allowed: at least 1");
        assert!(Topology::new(1 << 20, 1 << 20).unwrap_err().to_string().contains("16384"));
    }

    #[test]
    fn reach_follows_nodes() {
        let t = Topology::new(2, 4).unwrap();
        assert_eq!(t.reach(Rank(1), Rank(1)), Reach::Own);
        assert_eq!(t.reach(Rank(1), Rank(3)), Reach::Near);
        assert_eq!(t.reach(Rank(1), Rank(5)), Reach::Far);
    }

    #[test]
    fn rank_set_holds_what_was_inserted() {
        let set: RankSet = [Rank(3), Rank(64), Rank(200)].into_iter().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), [Rank(3), Rank(64), Rank(200)]);
        assert_eq!(set.len(), 3);
        assert!(!set.contains(Rank(4)) && !set.contains(Rank(1000)));
        assert!(RankSet::new().is_empty());
    }
}
