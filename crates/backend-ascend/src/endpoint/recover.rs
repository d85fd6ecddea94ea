//! Going on after a failure: a new generation without the ranks that were given up.

use ep_core::machine::Proposal;
use ep_core::{Error, Nanos, RankSet};

use super::AscendEndpoint;

impl AscendEndpoint {
    pub(super) async fn recover_without(&mut self, mask: &RankSet) -> Result<(), Error> {
        let proposal = self.desk.propose(mask)?;
        // Whatever still runs ends by its deadline: then nothing of this rank reads or writes a window any more.
        self.ended().await?;
        self.device.disconnect()?;
        let op = proposal.op.max(self.device.ops_done()? + 1);
        // Who comes last has waited for its launches.
        let allowed = Nanos(self.patience() - (self.table().clock)());
        let agreement = self.peers.agree(self.desk.rank(), Proposal { op, ..proposal }, allowed).await?;
        self.device.restart(agreement.generation, agreement.op, &agreement.mask)?;
        self.noticed = RankSet::new();
        self.counted.fill([0; 2]);
        self.desk.enter(agreement);
        Ok(())
    }
}
