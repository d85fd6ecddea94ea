//! Going on after a failure: a new generation without the ranks that were given up.

use super::low_latency::Low;
use super::{Engine, Neighbours};
use crate::error::{Error, Failure, Fault};
use crate::layout::{Alarm, CELL_BYTES, LowKind, value_in};
use crate::machine::{Machine, Opening};
use crate::plant::Plant;
use crate::port::{Cell, Counter, Duty, LaneId, LaneKind, Nanos, Port as _, Role, Scope};
use crate::roles::Vigil;
use crate::topology::{Rank, RankSet, Reach};

impl<M: Machine> Engine<M> {
    pub(super) async fn recover_without(&mut self, mask: &RankSet) -> Result<(), Error> {
        let lost = self.desk.lost_with(mask)?;
        // An operation whose future was dropped has stopped nothing. (Others have, and what they said last is on its way.)
        if matches!(self.desk.poisoned, Some(Failure { fault: Fault::Abandoned, .. })) {
            self.machine.reset(Scope::All).await;
        }
        if let Some(culprit) = self.blamed().filter(|&culprit| lost.contains(culprit)) {
            // This rank may leave with the culprit's node, and be missed before the culprit is.
            self.warn(culprit).await;
        }
        let mut proposal = self.desk.propose(mask)?;
        if self.desk.settings().low_latency_units() {
            // The next operation's number is more than any rank's tags so far: those of a half that failed or was dropped, too.
            proposal.op = proposal.op.max(self.low.serial() + 1);
        }
        self.desk.hold_granted();
        let deadline = self.machine.now() + self.desk.settings().deadline();
        let agreement = self.machine.bootstrap().agree(proposal, deadline).await?;
        let lost: Vec<Rank> = agreement.mask.iter().filter(|&rank| !self.desk.mask().contains(rank)).collect();
        if self.machine.capabilities().get {
            // Who is given up and alive may be pulling what lies here, and is to know that it may not be what was offered.
            for &rank in &lost {
                self.let_know(rank).await;
            }
        }
        // What operations that ended well have left under way must not fall upon what comes now. (Who was given up may still have use
        // for it.)
        let stay =
            self.neighbours.near.iter().chain(&self.neighbours.rail).filter(|&&peer| !agreement.mask.contains(peer));
        for &peer in stay {
            self.machine.reset(Scope::Peer(peer)).await;
        }
        // Low latency may have left something under way to anybody, from memory that it uses again.
        if self.desk.settings().low_latency() {
            self.machine.reset(Scope::All).await;
            // Who is given up and alive finds out at once, wherever it waits in the generation that the others leave.
            for rank in lost {
                self.call(self.low.next(), LowKind::Dispatch).mask(rank).await;
            }
        }
        let again = self.desk.settings().plants(Plant::TagsStartAgain);
        let serials = if again { 0 } else { agreement.op };
        self.desk.enter(agreement);
        let (layout, mask) = (self.desk.layout(), self.desk.mask());
        self.neighbours = Neighbours::of(layout.topology(), self.desk.rank(), mask);
        self.links = None;
        self.low = Low::new(layout, self.desk.rank(), mask, [serials, self.low.cleared()]);
        self.vigil = Vigil::new(layout.topology().ranks() as usize);
        Ok(())
    }

    /// Tells `rank` of this node, which was given up, that it was, in the generation that the others leave; and returns when that lies in its window, or
    /// cannot come there. What this rank writes afterwards `rank` may pull, but knows not to use: it looks once more when it has pulled.
    async fn let_know(&mut self, rank: Rank) {
        let layout = self.machine.layout();
        if layout.topology().reach(self.desk.me, rank) != Reach::Near {
            return;
        }
        let (generation, me) = (self.desk.generation, self.desk.me);
        // The first operation that this rank did not come through.
        let op = self.desk.poisoned.map_or(self.desk.op, |failure| failure.op);
        let deadline = self.machine.now() + self.a_moment();
        let mut port = self.machine.port(Opening { role: Role::new(Duty::Watch), op, generation, deadline });
        self.vigil.leave(me, rank, &mut port, op).await;
        let lane = LaneId { peer: rank, kind: LaneKind::Watch };
        let at = layout.cell(Cell::new(me, LaneKind::Watch, Counter::Alarm), generation);
        let landing = layout.pull_slot(layout.near_track(layout.topology().node_of(me), 0), rank, 0).offset;
        while port.now() < deadline {
            let Ok(ticket) = port.get(lane, at.span(CELL_BYTES), landing).await else { return };
            let mut bits = [0; CELL_BYTES as usize];
            if port.flush(lane, ticket).await.is_err() || port.read(landing, &mut bits).is_err() {
                return;
            }
            let alarm = Alarm::decode(value_in(generation, u64::from_ne_bytes(bits)));
            if alarm.is_some_and(|alarm| alarm.verdict && alarm.peer == rank) {
                return;
            }
        }
    }

    /// How long what is told to ranks that may be gone may take.
    fn a_moment(&self) -> Nanos {
        Nanos(self.desk.settings().deadline().0 / 32)
    }

    /// Whom this rank blames for a failure of which somebody who waits for it has not heard from it: one of low latency, or any where
    /// low latency reaches more ranks than throughput mode's verdicts do.
    fn blamed(&self) -> Option<Rank> {
        let anywhere = || self.desk.poisoned.filter(|_| self.desk.settings().low_latency());
        self.low.failed.or_else(|| anywhere().map(|failure| failure.culprit))
    }

    /// Low latency failed here, which nobody else need know; but this rank gives up whom it blames, and who waits for it waits in
    /// vain. (To rejoin gives up nobody: all come to that when they are through with what they do.)
    async fn warn(&mut self, culprit: Rank) {
        let deadline = self.machine.now() + self.a_moment();
        let (op, generation) = (self.desk.op, self.desk.generation);
        let mut port = self.machine.port(Opening { role: Role::new(Duty::Watch), op, generation, deadline });
        self.vigil.warn(self.desk.me, &self.low.peers, &mut port, op, culprit).await;
    }
}
