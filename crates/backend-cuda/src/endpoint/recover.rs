//! Going on after a failure: a new generation without the ranks that were given up.

use ep_core::machine::Proposal;
use ep_core::{Endpoint as _, Error, RankSet};

use super::CudaEndpoint;

impl CudaEndpoint {
    pub(super) async fn recover_without(&mut self, mask: &RankSet) -> Result<(), Error> {
        let proposal = self.desk.propose(mask)?;
        self.stream().must_run("a recovery")?;
        // Whatever still runs ends by its deadline: then nothing of this rank reads or writes a window any more.
        let event = self.device.stream.record(false)?;
        self.until(|_| Ok(event.has_come()?.then_some(()))).await?;
        self.desk.hold_granted();
        self.pinned.drain(..).filter_map(|pinned| pinned.upgrade()).for_each(|held| held.offer());
        // Replays are counted there alone.
        let op = proposal.op.max(self.device.ops_done()? + 1);
        let allowed = self.settings().deadline();
        let agreement = self.peers.agree(self.desk.rank(), Proposal { op, ..proposal }, allowed).await?;
        if self.settings().low_latency() {
            // Who is given up and alive finds out at once, wherever it waits in the generation that the others leave.
            agreement
                .mask
                .iter()
                .filter(|&rank| !self.desk.mask().contains(rank))
                .try_for_each(|rank| self.device.low_mask(rank))?;
        }
        self.device.restart(agreement.generation, agreement.op)?;
        self.device.connect(&agreement.mask)?;
        self.low.restart(&agreement.mask);
        self.noticed = RankSet::new();
        self.desk.enter(agreement);
        Ok(())
    }
}
