//! Going on after a failure: a new generation without the ranks that were given up.

use super::{Engine, Links, Neighbours};
use crate::error::Error;
use crate::machine::{Agreement, Machine, Proposal};
use crate::roles::Vigil;
use crate::topology::{RankSet, Topology};

impl<M: Machine> Engine<M> {
    pub(super) async fn recover_without(&mut self, mask: &RankSet) -> Result<(), Error> {
        let topology = *self.topology();
        if let Some(rank) = mask.iter().find(|rank| rank.0 >= topology.ranks()) {
            return Err(Error::invalid("rank of the mask", rank, format_args!("0 to {}", topology.ranks() - 1)));
        }
        let mut proposed = self.mask.clone();
        proposed.extend(&whole_nodes(&topology, mask));
        if proposed.contains(self.me) {
            return Err(Error::Excluded { rank: self.me });
        }
        let proposal = Proposal { mask: proposed, generation: self.generation, op: self.op };
        let deadline = self.machine.now() + self.settings().deadline();
        let Agreement { mask, generation, op } = self.machine.bootstrap().agree(proposal, deadline).await?;
        // Everybody has stopped what it did in the old generation, except ranks newly given up: what these were granted
        // in a failed operation is never handed out again.
        let lost = mask.iter().any(|rank| !self.mask.contains(rank));
        if !lost {
            self.stuck.drain(..).for_each(|block| self.arena.give(&block));
        }
        let ranks = topology.ranks() as usize;
        self.neighbours = Neighbours::of(&topology, self.me, &mask);
        self.mask = mask;
        self.generation = generation;
        self.first_op = op;
        self.op = op;
        self.links = Links::new(&self.layout, self.me);
        self.vigil = Vigil::new(ranks);
        self.poisoned = None;
        Ok(())
    }
}

/// The ranks to give up with those of `mask`: where there are several nodes, all ranks of theirs. A node that lost a rank
/// has lost a rail, and what the others would send along it.
fn whole_nodes(topology: &Topology, mask: &RankSet) -> RankSet {
    if topology.nodes() == 1 {
        return mask.clone();
    }
    mask.iter().flat_map(|rank| topology.ranks_of(topology.node_of(rank))).collect()
}
