//! Going on after a failure: a new generation without the ranks that were given up.

use super::{Engine, Links};
use crate::error::Error;
use crate::machine::{Agreement, Machine, Proposal};
use crate::roles::Vigil;
use crate::topology::RankSet;

impl<M: Machine> Engine<M> {
    pub(super) async fn recover_without(&mut self, mask: &RankSet) -> Result<(), Error> {
        let topology = *self.topology();
        if let Some(rank) = mask.iter().find(|rank| rank.0 >= topology.ranks()) {
            return Err(Error::invalid("rank of the mask", rank, format_args!("0 to {}", topology.ranks() - 1)));
        }
        if mask.contains(self.me) {
            return Err(Error::Excluded { rank: self.me });
        }
        // An operation whose future was dropped has stopped nothing.
        self.machine.reset().await;
        self.stuck.extend(self.granted.take());
        let mut proposed = self.mask.clone();
        proposed.extend(mask);
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
        self.peers = topology.all().filter(|&rank| rank != self.me && !mask.contains(rank)).collect();
        self.mask = mask;
        self.generation = generation;
        self.first_op = op;
        self.op = op;
        self.links = Links::new(self.settings().rings(), ranks);
        self.vigil = Vigil::new(ranks);
        self.poisoned = None;
        Ok(())
    }
}
