//! Going on after a failure: a new generation without the ranks that were given up.

use ep_core::machine::{Agreement, Proposal};
use ep_core::{Endpoint as _, Error, RankSet};

use super::CudaEndpoint;

impl CudaEndpoint {
    pub(super) async fn recover_without(&mut self, mask: &RankSet) -> Result<(), Error> {
        let ranks = self.topology().ranks();
        if let Some(rank) = mask.iter().find(|rank| rank.0 >= ranks) {
            return Err(Error::invalid("rank of the mask", rank, format_args!("0 to {}", ranks - 1)));
        }
        let mut proposed = self.mask.clone();
        proposed.extend(mask);
        if proposed.contains(self.me) {
            return Err(Error::Excluded { rank: self.me });
        }
        if self.generation == u16::MAX {
            let limit = format_args!("less than {} to recover", u16::MAX);
            return Err(Error::invalid("generation of the communicator", self.generation, limit));
        }
        self.stream().must_run("a recovery")?;
        // Whatever still runs ends by its deadline: then nothing of this rank reads or writes a window any more.
        let event = self.device.stream.record(false)?;
        self.until(|_| Ok(event.has_come()?.then_some(()))).await?;
        self.granted.take().into_iter().for_each(|block| self.arena.hold(block));
        self.pinned.drain(..).filter_map(|pinned| pinned.upgrade()).for_each(|held| held.offer());
        // Replays are counted there alone.
        self.op = self.op.max(self.device.ops_done()? + 1);
        let proposal = Proposal { mask: proposed, generation: self.generation, op: self.op };
        let allowed = self.settings().deadline();
        let Agreement { mask, generation, op } = self.peers.agree(self.me, proposal, allowed).await?;
        self.arena.recovered(mask.iter().any(|rank| !self.mask.contains(rank)));
        self.device.restart(generation, op)?;
        self.device.connect(&mask)?;
        self.low.restart(&mask);
        self.mask = mask;
        self.generation = generation;
        self.op = op;
        self.poisoned = None;
        Ok(())
    }
}
