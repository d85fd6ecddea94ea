//! Going on after a failure: a new generation without the ranks that were given up.

use super::low_latency::Low;
use super::{Engine, Neighbours};
use crate::error::{Error, Failure, Fault};
use crate::machine::{Agreement, Machine, Opening, Proposal};
use crate::port::{Duty, Nanos, Role};
use crate::roles::Vigil;
use crate::topology::{Rank, RankSet, Topology};

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
        if self.generation == u16::MAX {
            let limit = format_args!("less than {} to recover", u16::MAX);
            return Err(Error::invalid("generation of the communicator", self.generation, limit));
        }
        // An operation whose future was dropped has stopped nothing. (Others have, and what they said last is on its way.)
        if matches!(self.poisoned, Some(Failure { fault: Fault::Abandoned, .. })) {
            self.machine.reset().await;
        }
        if let Some(culprit) = self.low.failed.filter(|&culprit| proposed.contains(culprit)) {
            self.warn(culprit).await;
        }
        self.granted.take().into_iter().for_each(|block| self.arena.hold(block));
        let proposal = Proposal { mask: proposed, generation: self.generation, op: self.op };
        let deadline = self.machine.now() + self.settings().deadline();
        let Agreement { mask, generation, op } = self.machine.bootstrap().agree(proposal, deadline).await?;
        // Low latency may have left something under way, which nobody waits for any more.
        if self.settings().low_latency() {
            self.machine.reset().await;
        }
        let lost = mask.iter().any(|rank| !self.mask.contains(rank));
        self.arena.recovered(lost);
        let ranks = topology.ranks() as usize;
        self.neighbours = Neighbours::of(&topology, self.me, &mask);
        self.mask = mask;
        self.generation = generation;
        self.first_op = op;
        self.op = op;
        self.links = None;
        self.low = Low::new(&self.layout, self.me, &self.mask);
        self.vigil = Vigil::new(ranks);
        self.poisoned = None;
        Ok(())
    }

    /// Low latency failed here, which nobody else need know; but this rank gives up whom it blames, and who waits for it waits in
    /// vain. (To rejoin gives up nobody: all come to that when they are through with what they do.)
    async fn warn(&mut self, culprit: Rank) {
        let deadline = self.machine.now() + Nanos(self.settings().deadline().0 / 32);
        let (op, generation) = (self.op, self.generation);
        let mut port = self.machine.port(Opening { role: Role::new(Duty::Watch), op, generation, deadline });
        let Neighbours { near, rail } = &self.neighbours;
        self.vigil.warn(self.me, near.iter().chain(rail).copied(), &mut port, op, culprit).await;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::loopback::{LoopbackMachine, finish};
    use crate::{Placement, Rank, Settings, Shape, Topology};

    fn engine() -> Engine<LoopbackMachine> {
        let shape = Shape::builder().experts(4).topk(1).hidden(16).max_tokens(8).build().unwrap();
        let topology = Topology::new(1, 4).unwrap();
        let settings = Settings::builder(&shape, &topology).placement(Placement::Direct).build().unwrap();
        Engine::new(LoopbackMachine::with(&shape, &topology, &settings)).unwrap()
    }

    fn recover(engine: &mut Engine<LoopbackMachine>, mask: &[Rank]) -> Result<(), Error> {
        finish(engine.recover_without(&mask.iter().copied().collect()))
    }

    /// A rank that was given up may be alive and still write where it was allowed to, however often the others recover.
    #[test]
    fn what_a_lost_rank_was_granted_is_never_granted_again() {
        let mut engine = engine();
        let format = *engine.layout.row();
        let granted = engine.arena.take(&format, 5).unwrap();
        engine.arena.hold(granted);
        recover(&mut engine, &[Rank(3)]).unwrap();
        recover(&mut engine, &[]).unwrap();
        assert_ne!(engine.arena.take(&format, 5).unwrap().base(), granted.base());
    }

    #[test]
    fn what_only_survivors_were_granted_returns() {
        let mut engine = engine();
        let format = *engine.layout.row();
        let granted = engine.arena.take(&format, 5).unwrap();
        engine.arena.hold(granted);
        recover(&mut engine, &[]).unwrap();
        assert_eq!(engine.arena.take(&format, 5).unwrap().base(), granted.base());
    }

    #[test]
    fn generations_end_with_an_error() {
        let mut engine = engine();
        engine.generation = u16::MAX - 1;
        recover(&mut engine, &[]).unwrap();
        let error = recover(&mut engine, &[]).unwrap_err();
        assert_eq!(error.to_string(), "generation of the communicator is 65535, allowed: less than 65535 to recover");
    }
}
