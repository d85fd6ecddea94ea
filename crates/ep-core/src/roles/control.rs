//! The control role: exchanges counts and notes through banks, and says `done`. What it has to tell ranks of other
//! nodes it hands to a coordinator, where its lanes to them share a queue.

use zerocopy::{FromZeros, IntoBytes};

use super::{Attended, Operation};
use crate::error::Fault;
use crate::layout::{Block, CountsHeader, Mismatch, NO_BASE, Note};
use crate::machine::Machine;
use crate::plan::{Exchange, Plan};
use crate::plant::Plant;
use crate::port::{Cell, Counter, Duty, LaneId, LaneKind, Mail, Offset, Port, Role, Span, Ticket};
use crate::topology::Rank;

/// The control role of one operation. Owns the control lanes to all neighbours.
///
/// Opened twice: before the rows move and after. The second port is ordered after all that the movers did, as `done`
/// must be.
pub(crate) struct Control<'a, 'o, M: Machine> {
    operation: &'a Operation<'o, M>,
    port: Attended<M::Port>,
    /// `[ranks]`: the last put to each peer.
    sent: Vec<Option<Ticket>>,
}

impl<'a, 'o, M: Machine> Control<'a, 'o, M> {
    pub(crate) fn open(operation: &'a Operation<'o, M>) -> Self {
        let port = operation.port(Role::new(Duty::Control));
        let ranks = operation.layout.topology().ranks() as usize;
        Self { operation, port, sent: vec![None; ranks] }
    }

    /// Waits until the bank of this operation is free at every peer: they are `done` with the operation before last.
    ///
    /// Operations in which every rank hears from every other, as all of throughput mode on one node, imply that: a peer
    /// speaks in the operation before this one only when it is through with the one before. The wait costs a look.
    pub(crate) async fn bank(&mut self) -> Result<(), Fault> {
        if self.operation.plants(Plant::BankReusedWithoutDone) {
            return Ok(());
        }
        let last = self.operation.op.saturating_sub(2);
        if last >= self.operation.first_op {
            self.wait_all(self.operation.near, Counter::Done, last).await?;
            self.wait_all(self.operation.rail, Counter::Done, last).await?;
        }
        Ok(())
    }

    /// Tells every rank this one's counts, and the rows that its arena has room for, and learns theirs; and whether the batch goes
    /// through outboxes, as all ranks find. Along the rail first, then what came along the rail, with
    /// the own counts, to everybody in the node.
    pub(crate) async fn exchange(&mut self, plan: &Plan, room: u32) -> Result<(Exchange, bool), Fault> {
        let Operation { layout, op, me, near, rail, .. } = *self.operation;
        let own = layout.counts(op, me);
        self.write_counts(own.offset, plan, room)?;
        for &peer in rail {
            match self.mailbox(peer) {
                // The coordinator has them flushed before it ends.
                Some(mailbox) => self.hand_over(mailbox, Counter::Counts).await?,
                None => self.send(peer, Counter::Counts, own, own.offset).await?,
            }
        }
        self.wait_all(rail, Counter::Counts, op).await?;
        let came = self.rail_counts();
        for &peer in near {
            for &counts in &came {
                self.put(peer, counts, counts.offset).await?;
            }
            self.publish(peer, Counter::Counts).await?;
        }
        self.wait_all(near, Counter::Counts, op).await?;
        let told = self.read_counts(plan, room)?;
        self.flush().await?;
        Ok(told)
    }

    /// The counts that came along the rail, and the own: side by side, except where a node takes no part. What one that
    /// was given up put there may still be arriving.
    fn rail_counts(&self) -> Vec<Span> {
        let Operation { layout, op, me, rail, .. } = *self.operation;
        let topology = layout.topology();
        let takes_part = |rank: &Rank| *rank == me || rail.contains(rank);
        let ranks = topology.all_nodes().map(|node| topology.rank_at(node, topology.local_of(me))).filter(takes_part);
        let mut pieces: Vec<Span> = Vec::new();
        for counts in ranks.map(|rank| layout.counts(op, rank)) {
            match pieces.last_mut().filter(|piece| piece.end() == counts.offset.0) {
                Some(piece) => piece.len += counts.len,
                None => pieces.push(counts),
            }
        }
        pieces
    }

    fn write_counts(&mut self, at: Offset, plan: &Plan, room: u32) -> Result<(), Fault> {
        let opening = self.operation.header(0, 0);
        let header = CountsHeader { opening, tokens: plan.tokens(), room, reserved: [0; 2] };
        let rows = at.plus(size_of::<CountsHeader>() as u64);
        self.port.write(at, header.as_bytes())?;
        self.port.write(rows, plan.rows().as_bytes())?;
        self.port.write(rows.plus(4 * plan.rows().len() as u64), plan.experts().as_bytes())
    }

    fn read_counts(&self, plan: &Plan, room: u32) -> Result<(Exchange, bool), Fault> {
        let Operation { layout, me, .. } = *self.operation;
        let ranks = layout.topology().ranks() as usize;
        let local = layout.local_experts() as usize;
        let mut rows = vec![0u32; ranks * ranks];
        let (mut tokens, mut rooms) = (vec![0u32; ranks], vec![0u32; ranks]);
        let own = me.index() * local..(me.index() + 1) * local;
        let mut experts = plan.experts()[own.clone()].to_vec();
        rows[me.index() * ranks..(me.index() + 1) * ranks].copy_from_slice(plan.rows());
        (tokens[me.index()], rooms[me.index()]) = (plan.tokens(), room);
        let mut theirs = vec![0u32; local];
        for source in self.operation.others() {
            let at = layout.counts(self.operation.op, source).offset;
            let mut header = CountsHeader::new_zeroed();
            self.port.read(at, header.as_mut_bytes())?;
            self.operation.check(&header.opening, source)?;
            (tokens[source.index()], rooms[source.index()]) = (header.tokens, header.room);
            let numbers = at.plus(size_of::<CountsHeader>() as u64);
            let line = &mut rows[source.index() * ranks..(source.index() + 1) * ranks];
            self.port.read(numbers, line.as_mut_bytes())?;
            self.port.read(numbers.plus(4 * (ranks + own.start) as u64), theirs.as_mut_bytes())?;
            for (sum, theirs) in experts.iter_mut().zip(&theirs) {
                *sum = sum.saturating_add(*theirs);
            }
        }
        let field = "rows to one rank, as a power of two";
        let too_many = |_| Fault::Mismatch { field, mine: 31, theirs: 32, peer: me };
        let exchange = Exchange::new(rows, tokens, experts).map_err(too_many)?;
        let overflows = layout.settings().outboxes().is_some() && exchange.overflows(&rooms);
        Ok((exchange, overflows))
    }

    /// Tells every rank of the node where rows for this one are to be placed, or where the rows from here lie: in
    /// `block`. No block: through the ring.
    pub(crate) async fn notes(&mut self, block: Option<&Block>) -> Result<(), Fault> {
        let Operation { layout, op, me, near, .. } = *self.operation;
        for &peer in near {
            let note = Note {
                opening: self.operation.header(block.map_or(0, Block::room), 0),
                base: block.map_or(NO_BASE, |block| block.base().0),
            };
            let outbox = layout.note_outbox(peer);
            self.port.write(outbox.offset, note.as_bytes())?;
            let from = outbox.offset.span(size_of::<Note>() as u64);
            self.send(peer, Counter::Note, from, layout.note(op, me).offset).await?;
        }
        self.flush().await
    }

    /// Tells every peer that this rank has read everything it was given for this operation.
    pub(crate) async fn done(&mut self) -> Result<(), Fault> {
        for peer in self.operation.neighbours() {
            match self.mailbox(peer) {
                Some(mailbox) => self.hand_over(mailbox, Counter::Done).await?,
                None => self.publish(peer, Counter::Done).await?,
            }
        }
        Ok(())
    }

    /// Waits until the peers that `pulled` says have pulled are done.
    pub(crate) async fn wait_pulled(&mut self, pulled: impl Fn(Rank) -> bool) -> Result<(), Fault> {
        if self.operation.plants(Plant::BankReusedWithoutDone) {
            return Ok(());
        }
        for &peer in self.operation.near {
            if pulled(peer) {
                let cell = Cell::new(peer, LaneKind::Control, Counter::Done);
                self.port.wait(cell, self.operation.op).await?;
            }
        }
        Ok(())
    }

    /// The port, for work on the own rows between two exchanges.
    pub(crate) const fn port(&mut self) -> &mut Attended<M::Port> {
        &mut self.port
    }

    /// By which what this role has to say to `peer` reaches a coordinator; none where it posts itself.
    fn mailbox(&self, peer: Rank) -> Option<u16> {
        if self.operation.plants(Plant::SecondPosterOfControl) {
            return None;
        }
        self.operation.mailbox(LaneId { peer, kind: LaneKind::Control })
    }

    /// Tells the coordinator what to post for this operation.
    async fn hand_over(&mut self, mailbox: u16, counter: Counter) -> Result<(), Fault> {
        let (lane, cell) = self.operation.mail(Mail::Control, mailbox, counter);
        self.port.publish(lane, cell, self.operation.op).await
    }

    async fn send(&mut self, peer: Rank, counter: Counter, from: Span, to: Offset) -> Result<(), Fault> {
        self.put(peer, from, to).await?;
        self.publish(peer, counter).await
    }

    async fn put(&mut self, peer: Rank, from: Span, to: Offset) -> Result<(), Fault> {
        let lane = LaneId { peer, kind: LaneKind::Control };
        self.sent[peer.index()] = Some(self.port.put(lane, from, to).await?);
        Ok(())
    }

    async fn publish(&mut self, peer: Rank, counter: Counter) -> Result<(), Fault> {
        let lane = LaneId { peer, kind: LaneKind::Control };
        let cell = Cell::new(self.operation.me, LaneKind::Control, counter);
        self.port.publish(lane, cell, self.operation.op).await
    }

    async fn wait_all(&mut self, peers: &[Rank], counter: Counter, op: u64) -> Result<(), Fault> {
        for &peer in peers {
            self.port.wait(Cell::new(peer, LaneKind::Control, counter), op).await?;
        }
        Ok(())
    }

    /// The outboxes may be written again.
    async fn flush(&mut self) -> Result<(), Fault> {
        for peer in self.operation.neighbours() {
            if let Some(ticket) = self.sent[peer.index()].take() {
                self.port.flush(LaneId { peer, kind: LaneKind::Control }, ticket).await?;
            }
        }
        Ok(())
    }
}

impl<M: Machine> Operation<'_, M> {
    /// Waits for `peer`'s note of this operation, on the port of the role that needs it: where its block lies; none: use
    /// the ring.
    pub(crate) async fn note_of(&self, port: &mut Attended<M::Port>, peer: Rank) -> Result<Option<Block>, Fault> {
        port.wait(Cell::new(peer, LaneKind::Control, Counter::Note), self.op).await?;
        let mut note = Note::new_zeroed();
        port.read(self.layout.note(self.op, peer).offset, note.as_mut_bytes())?;
        self.check(&note.opening, peer)?;
        if note.base == NO_BASE {
            return Ok(None);
        }
        let bytes = self.row().block_bytes(note.opening.rows.into());
        check_block(note.base, bytes, self.layout.window_bytes(), peer)?;
        Ok(Some(self.row().block(Offset(note.base), note.opening.rows)))
    }
}

/// Refuses a block that leaves the window of its owner (F8): a note is input.
fn check_block(base: u64, bytes: u64, window: u64, peer: Rank) -> Result<(), Fault> {
    let end = base.saturating_add(bytes);
    if end <= window {
        return Ok(());
    }
    Err(Fault::Mismatch { field: Mismatch::Block.name(), mine: window, theirs: end, peer })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_nonsense_is_refused_and_its_owner_named() {
        let check =
            |base, bytes| check_block(base, bytes, 4096, Rank(3)).map_err(|fault| (fault.peer(), fault.to_string()));
        assert_eq!(check(4096 - 64, 64), Ok(()));
        for (base, bytes) in [(4096 - 64, 65), (4096, 1), (u64::MAX - 2, 64), (0, u64::MAX)] {
            let (peer, said) = check(base, bytes).unwrap_err();
            assert!(peer == Some(Rank(3)) && said.contains("end of a block in the window"), "{said}");
        }
    }
}
