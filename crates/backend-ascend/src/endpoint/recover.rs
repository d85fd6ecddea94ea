//! Going on after a failure: a new generation without the ranks that were given up.

use ep_core::machine::Proposal;
use ep_core::{Endpoint as _, Error, Nanos, RankSet};

use super::{AscendEndpoint, LowHalves};

impl AscendEndpoint {
    pub(super) async fn recover_without(&mut self, mask: &RankSet) -> Result<(), Error> {
        let given_up = self.desk.lost_with(mask)?;
        // Whatever still runs ends by its deadline: then nothing of this rank reads or writes a window any more.
        self.ended().await?;
        // Low latency failed here, which nobody else need know; but this rank gives up whom it blames, and who waits for it waits in vain.
        // It may leave with the culprit's server, and be missed before the culprit is.
        if let Some(culprit) = self.low.failed.filter(|&culprit| given_up.contains(culprit)) {
            self.low_tell(&RankSet::new(), Some(culprit)).await?;
        }
        self.low_drain()?;
        self.ended().await?;
        let proposal = self.desk.propose(mask)?;
        self.device.disconnect()?;
        let op = proposal.op.max(self.device.ops_done()? + 1);
        // Who comes last has waited for its launches.
        let allowed = Nanos(self.patience() - (self.table().clock)());
        let agreement = self.peers.agree(self.desk.rank(), Proposal { op, ..proposal }, allowed).await?;
        // Who is given up and alive finds out at once, wherever it waits in the generation that the others leave.
        let lost: RankSet = agreement.mask.iter().filter(|&rank| !self.desk.mask().contains(rank)).collect();
        if self.layout().settings().low_latency() && !lost.is_empty() {
            self.device.connect_lost(&lost)?;
            self.low_tell(&lost, None).await?;
            self.device.disconnect()?;
        }
        self.device.restart(agreement.generation, agreement.op, &agreement.mask)?;
        self.low = LowHalves::new(self.topology().ranks(), &agreement.mask);
        self.noticed = RankSet::new();
        self.counted.fill([0; 2]);
        self.desk.enter(agreement);
        Ok(())
    }
}
