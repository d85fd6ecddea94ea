//! What went wrong with whom while sending, and what could not be sent yet.

use super::{Call, Notice, Outbox, Place};
use crate::error::{Fault, Phase};
use crate::machine::Machine;
use crate::port::{Duty, Port};
use crate::topology::{Rank, RankSet};

/// Rows for a peer whose bank was not free in time.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Where each row goes, and its bytes.
    pub(super) rows: Vec<(Place, Vec<u8>)>,
    pub(super) notice: Notice,
}

#[derive(Debug)]
struct Trouble {
    peer: Rank,
    fault: Fault,
    held: Option<Held>,
}

/// The peers that something went wrong with, and what.
#[derive(Debug, Default)]
pub(crate) struct Faults(Vec<Trouble>);

impl Faults {
    /// Takes note of a fault that concerns `peer`; any other is returned.
    pub(super) fn note(&mut self, peer: Rank, fault: Fault) -> Result<(), Fault> {
        if fault.peer() != Some(peer) {
            return Err(fault);
        }
        if !self.involve(peer) {
            self.0.push(Trouble { peer, fault, held: None });
        }
        Ok(())
    }

    pub(super) fn involve(&self, peer: Rank) -> bool {
        self.0.iter().any(|trouble| trouble.peer == peer)
    }

    /// The peers that nothing was sent to because their banks were not free in time.
    pub(super) fn late(&self) -> Vec<Rank> {
        let late = |trouble: &&Trouble| matches!(trouble.fault, Fault::Timeout { phase: Phase::Bank, .. });
        self.0.iter().filter(late).map(|trouble| trouble.peer).collect()
    }

    /// Keeps what `peer` is still to be sent.
    pub(super) fn hold(&mut self, peer: Rank, held: Held) {
        if let Some(trouble) = self.0.iter_mut().find(|trouble| trouble.peer == peer) {
            trouble.held = Some(held);
        }
    }

    /// The first fault with a rank that is not in `mask`.
    pub(crate) fn unmasked(&self, mask: &RankSet) -> Option<Fault> {
        self.0.iter().find(|trouble| !mask.contains(trouble.peer)).map(|trouble| trouble.fault)
    }
}

/// Tries again to send what is held.
pub(crate) async fn deliver<M: Machine>(
    call: &Call<'_, M>,
    outbox: &mut Outbox,
    faults: &mut Faults,
) -> Result<(), Fault> {
    let mut port = call.port(Duty::Sender);
    while let Some(at) = faults.0.iter().position(|trouble| !call.mask.contains(trouble.peer) && trouble.held.is_some())
    {
        let peer = faults.0[at].peer;
        call.bank(&mut port, peer).await?;
        // From here on it is being sent: what fails now is not tried again.
        let Some(Held { rows, notice }) = faults.0[at].held.take() else { break };
        let mut troubles = Faults::default();
        if notice.form.says_ahead() {
            call.announce(&mut port, outbox, &mut troubles, peer, &notice).await?;
        }
        for (place, bytes) in &rows {
            let slot = outbox.slot(call, &mut port, &mut troubles).await?;
            let from = call.layout.low_staging(slot).offset;
            port.write(from, bytes)?;
            outbox.sent(call.put_row(&mut port, peer, from, (call.op, *place, notice.form)).await?);
        }
        if !notice.form.says_ahead() {
            call.announce(&mut port, outbox, &mut troubles, peer, &notice).await?;
        }
        faults.0.remove(at);
        faults.0.extend(troubles.0);
    }
    Ok(())
}
