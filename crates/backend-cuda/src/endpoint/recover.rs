//! Going on after a failure: a new generation without the ranks that were given up.

use std::time::{Duration, Instant};

use ep_bootstrap::Peers;
use ep_core::machine::Proposal;
use ep_core::port::Scope;
use ep_core::{Endpoint as _, Error, Failure, Fault, Phase, Rank, RankSet};

use super::CudaEndpoint;
use crate::error::CudaError;
use crate::far::{Given, Step};
use crate::rank::RankDevice;

impl CudaEndpoint {
    pub(super) async fn recover_without(&mut self, mask: &RankSet) -> Result<(), Error> {
        let given_up = self.desk.lost_with(mask)?;
        self.stream().must_run("a recovery")?;
        if let Some(culprit) = self.blamed().filter(|&culprit| given_up.contains(culprit)) {
            // This rank may leave with the culprit's node, and be missed before the culprit is.
            self.device.low_last_words(culprit)?;
        }
        // Whatever still runs ends by its deadline: then nothing of this rank reads or writes a window any more.
        let event = self.device.stream.record(false)?;
        self.until(|_| Ok(event.has_come()?.then_some(()))).await?;
        let proposal = self.desk.propose(mask)?;
        if self.granted_ahead && !self.device.went_ahead()? {
            self.take_back_ahead();
        }
        self.granted_ahead = false;
        self.desk.hold_granted();
        self.suspect_told();
        // Replays are counted there alone.
        let op = proposal.op.max(self.device.ops_done()? + 1);
        // And the next operation's number is more than any tag of a unit that low latency has put.
        let op = op.max(self.device.low_serial()? + 1);
        let allowed = self.settings().deadline();
        let agreement = self.peers.agree(self.desk.rank(), Proposal { op, ..proposal }, allowed).await?;
        if !agreement.mask.is_empty() {
            self.device.node.lose();
            self.keeper.iter().for_each(|keeper| keeper.without(&agreement.mask));
        }
        let lost: Vec<Rank> = agreement.mask.iter().filter(|&rank| !self.desk.mask().contains(rank)).collect();
        // Who is given up and alive may be pulling what lies here, and is to know that it may not be what was offered. (Between nodes nothing is pulled.)
        if self.topology().nodes() == 1 {
            lost.iter().try_for_each(|&rank| self.device.give_up(rank))?;
        }
        if self.settings().low_latency() {
            // Who is given up and alive finds out at once, wherever it waits in the generation that the others leave.
            lost.iter().try_for_each(|&rank| self.device.low_mask(rank))?;
        }
        self.reconnect(&agreement.mask).await?;
        self.device.restart(agreement.generation, agreement.op)?;
        self.device.connect(&agreement.mask)?;
        if let Some(keeper) = &self.keeper {
            // SAFETY: this rank's kernels have ended, and later ones leave these ranks out.
            unsafe { keeper.leave(&agreement.mask) };
        }
        self.low.restart(&agreement.mask);
        self.noticed = RankSet::new();
        self.desk.enter(agreement);
        Ok(())
    }

    /// Whom this rank blames for a failure of which somebody who waits for it may not have heard from it.
    fn blamed(&self) -> Option<Rank> {
        self.low.failed.or_else(|| self.desk.poisoned().map(|failure| failure.culprit))
    }

    /// Connects the lanes to other nodes anew, but not to ranks of `mask`: nothing of the generation before arrives any more. No kernel of this rank runs.
    async fn reconnect(&mut self, mask: &RankSet) -> Result<(), Error> {
        if self.far().is_none() {
            return Ok(());
        }
        let began = Instant::now();
        self.until(|device| {
            let Some(far) = &device.far else { return Ok(Some(())) };
            let mut lanes = far.lanes();
            if began.elapsed() >= far.drains {
                lanes.cut(Scope::All);
            }
            Ok(lanes.drain(Scope::All).then_some(()))
        })
        .await?;
        let offer = self.far().map(|far| far.lanes().offer()).transpose()?.unwrap_or_default();
        let offers = self.gather(Step::Offer, mask, offer).await?;
        self.far().map_or(Ok(()), |far| far.lanes().connect(&offers))?;
        // Nobody posts before all are connected.
        self.gather(Step::Connect, mask, Vec::new()).await.map(drop)
    }

    /// What all ranks but those of `mask` give, behind the agreement that this rank took part in last.
    async fn gather(&mut self, step: Step, mask: &RankSet, own: Vec<u8>) -> Result<Given, Error> {
        let (me, op) = (self.desk.rank(), self.desk.next_op());
        let (began, allowed) = (Instant::now(), Duration::from_nanos(self.settings().deadline().0));
        let agreement = match &self.peers {
            Peers::Processes(member) => return Ok(member.all_gather(&own, allowed).map_err(CudaError::meeting)?),
            Peers::Threads(meeting) => meeting.last_agreement(me),
        };
        self.far().inspect(|far| far.offers.give(agreement, step, me, own));
        let given = |device: &RankDevice| {
            let Some(far) = &device.far else { return Ok(Some(Given::new())) };
            // Before the look at what was given: all that a rank gave before it ended is there then.
            let gone = device.node.gone();
            match far.offers.taken(agreement, step, mask) {
                Ok(given) => Ok(Some(given)),
                Err(missing) if gone.contains(missing) || began.elapsed() > allowed => {
                    let fault = Fault::PeerGone { peer: missing, phase: Phase::Recovery };
                    Err(Failure { op, culprit: missing, reporter: me, fault }.into())
                }
                Err(_) => Ok(None),
            }
        };
        self.until(given).await
    }
}
