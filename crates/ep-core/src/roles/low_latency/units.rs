//! Low latency as units: rows, and how many there are, announce themselves (rule F11).
//!
//! Every rank puts one unit to every peer in every operation, which says what comes and how many rows, and beside it the rows. Of a dispatch it says
//! how many rows each expert gets; a row is a header ([`UnitRow`], [`UnitChoice`]), at its position among those to this peer, and a payload, at the
//! place of its token. A result is a payload, at the place of its token and column. The peer waits for that unit, then for what it says, or for
//! the results that it has asked for, and lays the rows out where they would lie had they been put. From there on all is as without units. In
//! which order units are put is free: kernels put all headers ahead.
//!
//! The tag counts on through generations: what a failed one has left never passes for what is new.

use zerocopy::{FromBytes, IntoBytes};

use super::{Call, Faults, Outbox, Place};
use crate::error::Fault;
use crate::layout::{Choice, MASKED, RESULT_HEADER, RowHeader, UnitChoice, UnitRow};
use crate::machine::Machine;
use crate::plant::Plant;
use crate::port::{Need, Offset, Port, Span, Tag, Ticket, UNIT_DATA, Units};
use crate::roles::{Attended, HeaderBytes};
use crate::topology::Rank;

/// Bytes of what says how many rows come: an arrival's value.
const HEAD: u64 = size_of::<u64>() as u64;

fn mismatch(field: &'static str, mine: u32, theirs: u32, peer: Rank) -> Fault {
    Fault::Mismatch { field, mine: mine.into(), theirs: theirs.into(), peer }
}

impl<M: Machine> Call<'_, M> {
    /// Whether this communicator's low latency travels as units.
    pub(super) fn as_units(&self) -> bool {
        self.layout.settings().low_latency_units()
    }

    /// The operation's number among all of the communicator.
    const fn serial(&self) -> u64 {
        self.serials + self.op
    }

    /// Puts a row that lies at `from`, with its header in front, to its place at `peer`, in the bank of `op`.
    pub(super) async fn put_row(
        &self,
        port: &mut Attended<M::Port>,
        peer: Rank,
        from: Offset,
        (op, place): (u64, Place),
    ) -> Result<Ticket, Fault> {
        let (lane, tag, layout) = (Self::rows_lane(peer), Tag::of(self.serial()), self.layout);
        let (row, results) = (layout.row(), layout.row().results());
        match place {
            Place::Row { position, .. } if !self.as_units() => {
                let bytes = row.header_bytes() + row.payload_bytes();
                port.put(lane, from.span(bytes), layout.low_row(op, self.me, position).offset).await
            }
            Place::Result { token, column } if !self.as_units() => {
                let bytes = RESULT_HEADER + results.payload_bytes();
                port.put(lane, from.span(bytes), layout.low_result(op, self.me, token, column).offset).await
            }
            Place::Row { position, token } => {
                let header = from.plus(row.wire_bytes()).span(layout.low_unit_header_bytes());
                port.put_units(lane, header, layout.low_unit_header(op, self.me, position), tag).await?;
                let payload = from.plus(row.header_bytes()).span(row.payload_bytes());
                port.put_units(lane, payload, layout.low_unit_row(op, self.me, token), tag).await
            }
            Place::Result { token, column } => {
                let payload = from.plus(RESULT_HEADER).span(results.payload_bytes());
                port.put_units(lane, payload, layout.low_unit_result(op, self.me, token, column), tag).await
            }
        }
    }

    /// Puts what says how many rows each of `peer`'s experts gets: u32 of `counts`.
    pub(super) async fn put_counts(
        &self,
        port: &mut Attended<M::Port>,
        outbox: &mut Outbox,
        faults: &mut Faults,
        peer: Rank,
        counts: &[u32],
    ) -> Result<(), Fault> {
        let slot = outbox.slot(self, port, faults).await?;
        let from = self.layout.low_staging(slot).offset;
        port.write(from, counts.as_bytes())?;
        let to = self.layout.low_unit_counts(self.op, self.me);
        let counts = from.span(size_of_val(counts) as u64);
        let ticket = port.put_units(Self::rows_lane(peer), counts, to, Tag::of(self.serial())).await?;
        outbox.sent(peer, ticket);
        Ok(())
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

    /// Waits for all rows of `peer`, in order, and lays them out in its slots.
    pub(super) async fn take_rows(&self, port: &mut Attended<M::Port>, peer: Rank, rows: u32) -> Result<(), Fault> {
        let (layout, most) = (self.layout, self.layout.shape().max_tokens());
        let mismatch = |field, mine: u32, theirs: u32| mismatch(field, mine, theirs, peer);
        if rows > most {
            return Err(mismatch("rows of a source", most, rows));
        }
        let mut counts = vec![0u32; layout.local_experts() as usize];
        self.take_due(port, peer, layout.low_unit_counts(self.op, peer), counts.as_mut_bytes()).await?;
        let mut come = vec![0; counts.len()];
        let mut units = vec![0; layout.low_unit_header_bytes() as usize];
        let mut header = HeaderBytes::new(layout.row());
        let mut payload = vec![0; layout.row().payload_bytes() as usize];
        for position in 0..rows {
            let at = layout.low_unit_header(self.op, peer, position);
            self.take_due(port, peer, at, &mut units).await?;
            let token = self.read_header(peer, &units, &mut header, &mut come)?;
            if token >= most {
                return Err(mismatch("tokens of a source", most, token));
            }
            self.take_due(port, peer, layout.low_unit_row(self.op, peer, token), &mut payload).await?;
            let slot = layout.low_row(self.op, peer, position).offset;
            port.write(slot, header.as_bytes())?;
            port.write(slot.plus(layout.row().header_bytes()), &payload)?;
        }
        match come.iter().zip(&counts).find(|(come, said)| come != said) {
            Some((&come, &said)) => Err(mismatch("rows of an expert", come, said)),
            None => Ok(()),
        }
    }

    /// Brings the header of a row of `peer` into the form of rows in slots; returns its token. `come` counts the rows of each own expert.
    fn read_header(&self, peer: Rank, units: &[u8], header: &mut HeaderBytes, come: &mut [u32]) -> Result<u32, Fault> {
        let unreadable = Fault::Mismatch { field: "header of a row", mine: units.len() as u64, theirs: 0, peer };
        let (row, choices) = UnitRow::read_from_prefix(units).map_err(|_| unreadable)?;
        let choices = <[UnitChoice]>::ref_from_bytes(choices).map_err(|_| unreadable)?;
        for choice in choices {
            let local = u32::try_from(choice.expert).ok().filter(|&expert| expert < self.layout.shape().experts());
            let local = local.filter(|&expert| self.layout.rank_of_expert(expert) == self.me);
            let Some(expert) = local else { continue };
            let count = &mut come[(expert % self.layout.local_experts()) as usize];
            if choice.index != *count {
                return Err(mismatch("number of a row of an expert", *count, choice.index, peer));
            }
            *count += 1;
        }
        let UnitRow { source_rank, source_token, op } = row;
        header.set(&RowHeader { source_rank, source_token, position: 0, op }, |at| {
            choices.get(at).map_or(Choice::NONE, |choice| Choice { expert: choice.expert, weight: choice.weight })
        });
        Ok(source_token)
    }

    /// Waits for these results of `peer`, tokens and columns, and lays them out in its slots.
    pub(super) async fn take_results(
        &self,
        port: &mut Attended<M::Port>,
        peer: Rank,
        due: impl Iterator<Item = (u32, u32)>,
    ) -> Result<(), Fault> {
        let layout = self.layout;
        let mut payload = vec![0; layout.row().results().payload_bytes() as usize];
        for (token, column) in due {
            self.take_due(port, peer, layout.low_unit_result(self.op, peer, token, column), &mut payload).await?;
            let slot = layout.low_result(self.op, peer, token, column).offset;
            let header = RowHeader { source_rank: peer.0, source_token: token, position: column, op: self.stamp() };
            port.write(slot, header.as_bytes())?;
            port.write(slot.plus(RESULT_HEADER), &payload)?;
        }
        Ok(())
    }

    /// Waits for a part of a row.
    async fn take_due(
        &self,
        port: &mut Attended<M::Port>,
        peer: Rank,
        at: Offset,
        into: &mut [u8],
    ) -> Result<(), Fault> {
        let before = self.op > 2 && self.plants(Plant::TagOfBefore);
        let tag = Tag::of(self.serial() - if before { 2 } else { 0 });
        if self.take_units(port, peer, at, into, tag).await? { Ok(()) } else { Err(Fault::MaskedBy { peer }) }
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
