//! Low latency as units: rows, and how many there are, announce themselves (rule F11).
//!
//! A rank puts one unit to every peer in a dispatch, which says how many rows come and how many tokens it has, and beside it the rows. It says how many
//! rows each expert gets; a row is a header ([`UnitRow`], [`UnitChoice`]), at its position among those to this peer, and a payload, at the
//! place of its token. In which order units are put is free: kernels put all headers ahead.
//!
//! **Results** travel as units to a rank whose batch is small ([`Layout::low_unit_tokens`](crate::Layout::low_unit_tokens)), and in slots, behind
//! an arrival, to others. Both sides know which by the tokens that the rank has said in its dispatch. A result is a payload, at the place of its
//! token and column; a unit ahead says how many come, to a rank that is owed any.
//!
//! **Units are read where they lie**, as they are used. Nothing is laid out in the slots of another rank: a result that it put there before a
//! recovery may still be on its way when this rank has agreed to go on, and a unit that comes later does not say that it has landed. So a slot
//! has one writer, whose own lanes order what it puts.
//!
//! The tag counts on through generations: what a failed one has left never passes for what is new.

use zerocopy::{FromBytes, IntoBytes};

use super::{Call, FORM, Faults, KIND, Outbox, Place};
use crate::error::Fault;
use crate::layout::{Arrival, Choice, LowKind, MASKED, RESULT_HEADER, RowHeader, UnitChoice, UnitRow};
use crate::machine::Machine;
use crate::plant::Plant;
use crate::port::{LaneId, Need, Offset, Port, Span, Tag, Ticket, UNIT_DATA, Units};
use crate::roles::{Attended, HeaderBytes};
use crate::topology::Rank;

/// Bytes of what says how many rows come: an arrival's value, and the tokens of a dispatch.
const HEAD: u64 = UNIT_DATA;

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

    /// Puts a row or result as units; the header of a row in this form lies behind it.
    pub(super) async fn put_row_as_units(
        &self,
        port: &mut Attended<M::Port>,
        peer: Rank,
        from: Offset,
        (op, place): (u64, Place),
    ) -> Result<(LaneId, Ticket), Fault> {
        let (lane, tag, layout) = (Self::rows_lane(peer), Tag::of(self.serial()), self.layout);
        let (row, results) = (layout.row(), layout.row().results());
        let (payload, to) = match place {
            Place::Row { position, token } => {
                let header = from.plus(row.wire_bytes()).span(layout.low_unit_header_bytes());
                port.put_units(lane, header, layout.low_unit_header(op, self.me, position), tag).await?;
                let payload = from.plus(row.header_bytes()).span(row.payload_bytes());
                (payload, layout.low_unit_row(op, self.me, token))
            }
            Place::Result { token, column, .. } => {
                let payload = from.plus(RESULT_HEADER).span(results.payload_bytes());
                (payload, layout.low_unit_result(op, self.me, token, column))
            }
        };
        port.put_units(lane, payload, to, tag).await.map(|ticket| (lane, ticket))
    }

    /// Puts what says how many rows each of `peer`'s experts gets: `counts`, u32 each.
    pub(super) async fn put_counts(
        &self,
        port: &mut Attended<M::Port>,
        outbox: &mut Outbox,
        faults: &mut Faults,
        peer: Rank,
        counts: &[u8],
    ) -> Result<(), Fault> {
        let slot = outbox.slot(self, port, faults).await?;
        let from = self.layout.low_staging(slot).offset;
        port.write(from, counts)?;
        let to = self.layout.low_unit_counts(self.op, self.me);
        let (lane, counts) = (Self::rows_lane(peer), from.span(counts.len() as u64));
        outbox.sent((lane, port.put_units(lane, counts, to, Tag::of(self.serial())).await?));
        Ok(())
    }

    /// Puts the unit that says what comes.
    pub(super) async fn put_head(
        &self,
        port: &mut Attended<M::Port>,
        outbox: &mut Outbox,
        faults: &mut Faults,
        peer: Rank,
        (value, tokens): (u64, u32),
    ) -> Result<(), Fault> {
        let slot = outbox.slot(self, port, faults).await?;
        let from = self.layout.low_staging(slot).offset;
        port.write(from, &value.to_le_bytes())?;
        let tokens = tokens + u32::from(self.kind == LowKind::Dispatch && self.plants(Plant::TokensOffByOne));
        port.write(from.plus(size_of_val(&value) as u64), &tokens.to_le_bytes())?;
        let to = self.layout.low_unit_head(self.op, self.me);
        let lane = Self::rows_lane(peer);
        outbox.sent((lane, port.put_units(lane, from.span(HEAD), to, Tag::of(self.serial())).await?));
        Ok(())
    }

    /// Waits for that unit of `peer`, and returns what it says; [`MASKED`] when the peer goes on without this rank.
    pub(super) async fn take_head(&self, port: &mut Attended<M::Port>, peer: Rank) -> Result<(u64, u32), Fault> {
        let (mut value, mut tokens) = (0u64, 0u32);
        let mut head = [0; HEAD as usize];
        let at = self.layout.low_unit_head(self.op, peer);
        if !self.take_units(port, peer, at, &mut head, Tag::of(self.serial())).await? {
            return Ok((MASKED, 0));
        }
        value.as_mut_bytes().copy_from_slice(&head[..8]);
        tokens.as_mut_bytes().copy_from_slice(&head[8..]);
        Ok((u64::from_le(value), u32::from_le(tokens)))
    }

    /// Waits for the arrival of `peer`, at least `due`, and returns its value.
    pub(super) async fn take_arrival(&self, port: &mut Attended<M::Port>, peer: Rank, due: u64) -> Result<u64, Fault> {
        let cell = self.arrival_cell(peer);
        // Of many peers most have come while this rank waited for another.
        if port.peek(cell) < due {
            let arrival = Need { cell, at_least: due };
            if self.as_units() {
                // The peer may have begun an operation whose rows travel as units.
                let (lane, at) = (Self::rows_lane(peer), self.layout.low_unit_head(self.op, peer));
                let head = Units { lane, at, len: HEAD, tag: Tag::of(self.serial()) };
                if port.wait_units(&[head], &[arrival]).await? == 0 {
                    return Err(self.other_form(peer, self.take_head(port, peer).await?.0, false));
                }
            } else {
                port.wait_any(&[arrival]).await?;
            }
        }
        Ok(port.peek(cell))
    }

    /// `peer` has begun, as `value` says, what travels in another form than this rank waits for: an operation of another kind; or the two count
    /// differently how large the batch is.
    fn other_form(&self, peer: Rank, value: u64, as_units: bool) -> Fault {
        let theirs = Arrival::decode(value, self.layout.shape()).map_or(value, |arrival| arrival.kind as u64);
        let (field, mine, theirs) = match self.kind as u64 {
            mine if mine == theirs => (FORM, as_units.into(), (!as_units).into()),
            mine => (KIND, mine, theirs),
        };
        Fault::Mismatch { field, mine, theirs, peer }
    }

    /// Waits for all rows of `peer` and looks at none.
    pub(super) async fn skip_units(&self, port: &mut Attended<M::Port>, peer: Rank, rows: u32) -> Result<(), Fault> {
        let mut units = UnitRows::begin(self, port, peer).await?;
        for position in 0..rows {
            units.take(self, port, position).await?;
        }
        units.end()
    }

    /// Waits for the result of `peer` for `token` in `column`.
    pub(super) async fn take_result(
        &self,
        port: &mut Attended<M::Port>,
        peer: Rank,
        (token, column): (u32, u32),
        into: &mut [u8],
    ) -> Result<(), Fault> {
        self.take_due(port, peer, self.layout.low_unit_result(self.op, peer, token, column), into).await?;
        if self.plants(Plant::UnitsLaidOutInSlots) {
            let slot = self.layout.low_result(self.op, peer, token, column).offset;
            port.write(slot.plus(RESULT_HEADER), into)?;
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
        let before = if self.op > 2 && self.plants(Plant::TagOfBefore) { 2 } else { 0 };
        // Between two small batches of a bank may be a large one, whose results lie in slots.
        let last_use = self.op > 4 && self.kind != LowKind::Dispatch && self.plants(Plant::TagOfLastUse);
        let tag = Tag::of(self.serial() - if last_use { 4 } else { before });
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
        // The peer goes on without this rank, or has begun an operation whose rows are announced.
        let cell = self.arrival_cell(peer);
        let other = Need { cell, at_least: Arrival::due(self.op, self.layout.shape()) };
        let first = Units { len: units.len.min(UNIT_DATA), ..units };
        let awaited = if self.plants(Plant::FirstUnitOnly) { first } else { units };
        // Of many payloads most have come while this rank waited for another.
        while !port.poll_units(&units, into)? {
            if port.wait_units(&[awaited], &[other]).await? > 0 {
                let value = port.peek(cell);
                if value == MASKED {
                    return Ok(false);
                }
                return Err(self.other_form(peer, value, true));
            }
            if self.plants(Plant::FirstUnitOnly) {
                port.poll_units(&units, into)?;
                break;
            }
        }
        Ok(true)
    }

    /// Clears this operation's bank, once in each stretch of tags: in the first operation that fills it, but for the first two of a generation.
    /// Peers fill it again after they have seen the publish that follows.
    ///
    /// A generation's first operations leave that to the next ones: what peers put before the recovery may land until they have stopped their
    /// lanes, which no unit says, but the first publish does (their `Received`). There are far fewer generations than operations in a stretch, so
    /// no bank goes without for two.
    pub(super) fn clear_units(&self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        let before = if self.op > 4 { self.serial() - 2 } else { self.cleared };
        let first = self.op <= 2 && !self.plants(Plant::ClearedBeforeAnyPublish);
        if !self.as_units() || first || Tag::era(self.serial()) == Tag::era(before) {
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

/// The rows of one rank that travel as units, as they are taken one after the other.
pub(super) struct UnitRows {
    peer: Rank,
    /// `[local experts]`: rows that the peer says each gets.
    counts: Vec<u32>,
    /// The same, of those taken.
    come: Vec<u32>,
    units: Vec<u8>,
    /// The last row's, in the form of rows in slots.
    pub(super) header: HeaderBytes,
    /// Its payload as it travelled.
    pub(super) payload: Vec<u8>,
}

impl UnitRows {
    /// Waits for what the peer says of its rows.
    pub(super) async fn begin<M: Machine>(
        call: &Call<'_, M>,
        port: &mut Attended<M::Port>,
        peer: Rank,
    ) -> Result<Self, Fault> {
        let layout = call.layout;
        let mut counts = vec![0u32; layout.local_experts() as usize];
        call.take_due(port, peer, layout.low_unit_counts(call.op, peer), counts.as_mut_bytes()).await?;
        Ok(Self {
            peer,
            come: vec![0; counts.len()],
            counts,
            units: vec![0; layout.low_unit_header_bytes() as usize],
            header: HeaderBytes::new(layout.row()),
            payload: vec![0; layout.row().payload_bytes() as usize],
        })
    }

    /// Waits for the row at `position`, the next one.
    pub(super) async fn take<M: Machine>(
        &mut self,
        call: &Call<'_, M>,
        port: &mut Attended<M::Port>,
        position: u32,
    ) -> Result<(), Fault> {
        let (layout, peer, most) = (call.layout, self.peer, call.layout.shape().max_tokens());
        call.take_due(port, peer, layout.low_unit_header(call.op, peer, position), &mut self.units).await?;
        let token = self.read_header(call)?;
        if token >= most {
            return Err(mismatch("tokens of a source", most, token, peer));
        }
        call.take_due(port, peer, layout.low_unit_row(call.op, peer, token), &mut self.payload).await?;
        if call.plants(Plant::UnitsLaidOutInSlots) {
            let slot = layout.low_row(call.op, peer, position).offset;
            port.write(slot.plus(layout.row().header_bytes()), &self.payload)?;
        }
        Ok(())
    }

    /// All rows were taken.
    pub(super) fn end(&self) -> Result<(), Fault> {
        match self.come.iter().zip(&self.counts).find(|(come, said)| come != said) {
            Some((&come, &said)) => Err(mismatch("rows of an expert", come, said, self.peer)),
            None => Ok(()),
        }
    }

    /// Brings the header at hand into the form of rows in slots, and counts its row for each own expert; returns its token.
    fn read_header<M: Machine>(&mut self, call: &Call<'_, M>) -> Result<u32, Fault> {
        let (layout, peer, units) = (call.layout, self.peer, &self.units);
        let unreadable = Fault::Mismatch { field: "header of a row", mine: units.len() as u64, theirs: 0, peer };
        let (row, choices) = UnitRow::read_from_prefix(units).map_err(|_| unreadable)?;
        let choices = <[UnitChoice]>::ref_from_bytes(choices).map_err(|_| unreadable)?;
        for choice in choices {
            let local = u32::try_from(choice.expert).ok().filter(|&expert| expert < layout.shape().experts());
            let local = local.filter(|&expert| layout.rank_of_expert(expert) == call.me);
            let Some(expert) = local else { continue };
            let count = &mut self.come[(expert % layout.local_experts()) as usize];
            if choice.index != *count {
                return Err(mismatch("number of a row of an expert", *count, choice.index, peer));
            }
            *count += 1;
        }
        let UnitRow { source_rank, source_token, op } = row;
        self.header.set(&RowHeader { source_rank, source_token, position: 0, op }, |at| {
            choices.get(at).map_or(Choice::NONE, |choice| Choice { expert: choice.expert, weight: choice.weight })
        });
        Ok(source_token)
    }
}
