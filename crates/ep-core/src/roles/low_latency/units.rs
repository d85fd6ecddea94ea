//! Low latency as units: rows, and how many there are, announce themselves (rule F11).
//!
//! Every rank puts one unit to every peer in every operation, which says what comes and how many rows, and the rows beside it, in the
//! order in which they leave. The peer waits for that unit, then for each row, and lays the rows out where they would lie had they been put.
//! From there on all is as without units.
//!
//! The tag counts on through generations: what a failed one has left never passes for what is new.

use zerocopy::{FromZeros, IntoBytes};

use super::{Call, Faults, Outbox};
use crate::error::Fault;
use crate::layout::{LowKind, MASKED, RESULT_HEADER, RowHeader};
use crate::machine::Machine;
use crate::plant::Plant;
use crate::port::{Need, Offset, Port, Span, Tag, Ticket, UNIT_DATA, Units};
use crate::roles::Attended;
use crate::topology::Rank;

/// Bytes of what says how many rows come: an arrival's value.
const HEAD: u64 = size_of::<u64>() as u64;

impl<M: Machine> Call<'_, M> {
    /// Whether this communicator's low latency travels as units.
    pub(super) fn as_units(&self) -> bool {
        self.layout.settings().low_latency_units()
    }

    /// The operation's number among all of the communicator.
    const fn serial(&self) -> u64 {
        self.serials + self.op
    }

    /// Bytes of a row of this operation as it is put.
    fn row_bytes(&self) -> u64 {
        let row = self.layout.row();
        match self.kind {
            LowKind::Dispatch => row.header_bytes() + row.payload_bytes(),
            LowKind::PerChoice | LowKind::PerRank => RESULT_HEADER + row.results().payload_bytes(),
        }
    }

    /// Puts a row to `peer`: into its slot there in the bank of `op`; or as units, as number `at` of those to this peer.
    pub(super) async fn put_row(
        &self,
        port: &mut Attended<M::Port>,
        peer: Rank,
        from: Span,
        (op, slot, at): (u64, Offset, u32),
    ) -> Result<Ticket, Fault> {
        if !self.as_units() {
            return port.put(Self::rows_lane(peer), from, slot).await;
        }
        let to = self.layout.low_unit_row(op, self.me, from.len, at);
        port.put_units(Self::rows_lane(peer), from, to, Tag::of(self.serial())).await
    }

    /// Puts the unit that says what comes.
    pub(super) async fn put_head(
        &self,
        port: &mut Attended<M::Port>,
        outbox: &mut Outbox,
        faults: &mut Faults,
        peer: Rank,
        value: u64,
    ) -> Result<(), Fault> {
        let slot = outbox.slot(self, port, faults).await?;
        let from = self.layout.low_staging(slot).offset;
        port.write(from, &value.to_le_bytes())?;
        let to = self.layout.low_unit_head(self.op, self.me);
        let ticket = port.put_units(Self::rows_lane(peer), from.span(HEAD), to, Tag::of(self.serial())).await?;
        outbox.sent(peer, ticket);
        Ok(())
    }

    /// Waits for that unit of `peer`, and returns what it says; [`MASKED`] when the peer goes on without this rank.
    pub(super) async fn take_head(&self, port: &mut Attended<M::Port>, peer: Rank) -> Result<u64, Fault> {
        let mut value = [0; HEAD as usize];
        let at = self.layout.low_unit_head(self.op, peer);
        let come = self.take_units(port, peer, at, &mut value, Tag::of(self.serial())).await?;
        Ok(if come { u64::from_le_bytes(value) } else { MASKED })
    }

    /// Waits for all rows of `peer`, and lays them out in its slots.
    pub(super) async fn take_rows(&self, port: &mut Attended<M::Port>, peer: Rank, rows: u32) -> Result<(), Fault> {
        let (tokens, columns) = (self.layout.shape().max_tokens(), self.layout.low_columns());
        let most = if self.kind == LowKind::Dispatch { tokens } else { tokens * columns };
        let mismatch =
            |field, mine: u32, theirs: u32| Fault::Mismatch { field, mine: mine.into(), theirs: theirs.into(), peer };
        if rows > most {
            return Err(mismatch("rows of a source", most, rows));
        }
        let before = self.op > 2 && self.plants(Plant::TagOfBefore);
        let tag = Tag::of(self.serial() - if before { 2 } else { 0 });
        let mut row = vec![0; self.row_bytes() as usize];
        for at in 0..rows {
            let from = self.layout.low_unit_row(self.op, peer, self.row_bytes(), at);
            if !self.take_units(port, peer, from, &mut row, tag).await? {
                return Err(Fault::MaskedBy { peer });
            }
            let slot = match self.kind {
                LowKind::Dispatch => self.layout.low_row(self.op, peer, at),
                LowKind::PerChoice | LowKind::PerRank => {
                    let mut header = RowHeader::new_zeroed();
                    header.as_mut_bytes().copy_from_slice(&row[..size_of::<RowHeader>()]);
                    let RowHeader { source_token, position, .. } = header;
                    self.check(&header, peer, None)?;
                    if source_token >= tokens {
                        return Err(mismatch("tokens of a rank", tokens, source_token));
                    }
                    if position >= columns {
                        return Err(mismatch("results of a token", columns, position));
                    }
                    self.layout.low_result(self.op, peer, source_token, position)
                }
            };
            port.write(slot.offset, &row)?;
        }
        Ok(())
    }

    /// Waits for a payload of `peer`; false when the peer goes on without this rank.
    async fn take_units(
        &self,
        port: &mut Attended<M::Port>,
        peer: Rank,
        at: Offset,
        into: &mut [u8],
        tag: Tag,
    ) -> Result<bool, Fault> {
        let units = Units { lane: Self::rows_lane(peer), at, len: into.len() as u64, tag };
        let masked = Need { cell: self.arrival_cell(peer), at_least: MASKED };
        let first = Units { len: units.len.min(UNIT_DATA), ..units };
        let awaited = if self.plants(Plant::FirstUnitOnly) { first } else { units };
        // Of many payloads most have come while this rank waited for another.
        while !port.poll_units(&units, into)? {
            if port.wait_units(&[awaited], &[masked]).await? > 0 {
                return Ok(false);
            }
            if self.plants(Plant::FirstUnitOnly) {
                port.poll_units(&units, into)?;
                break;
            }
        }
        Ok(true)
    }

    /// Clears this operation's bank, once in each stretch of tags: in the first operation that fills it. Peers fill it again after they
    /// have seen the publish that follows.
    pub(super) fn clear_units(&self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        let before = if self.op > 2 { self.serial() - 2 } else { self.last };
        if !self.as_units() || Tag::era(self.serial()) == Tag::era(before) {
            return Ok(());
        }
        for &peer in self.peers {
            let Span { offset, len } = self.layout.low_unit_part(self.op, peer);
            let zeros = [0; 4096];
            for at in (0..len).step_by(zeros.len()) {
                port.write(offset.plus(at), &zeros[..(len - at).min(zeros.len() as u64) as usize])?;
            }
        }
        Ok(())
    }
}
