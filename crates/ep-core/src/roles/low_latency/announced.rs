//! Low latency whose rows are announced one by one: how many come is said ahead, with the headers of a dispatch's rows, and each row, or the
//! results of each token, has a cell of its own, by bank, writer and token.
//!
//! So a receiver knows all places while the rows are under way, and takes each as it comes. A row lies in the slot of its token, which its sender
//! knows without counting. Rows are not ordered among themselves, nor behind the arrival: each has a lane of its own
//! ([`LaneKind::LowRow`]), as on a device each may be put by another block.
//!
//! Within a node alone: there a cell costs next to nothing.

use zerocopy::{FromZeros, IntoBytes};

use super::{Call, Faults, Outbox, Place};
use crate::error::Fault;
use crate::layout::{MASKED, RESULT_HEADER, RowHeader};
use crate::machine::Machine;
use crate::plant::Plant;
use crate::port::{Cell, Counter, LaneId, LaneKind, Need, Offset, Port, Ticket};
use crate::roles::Attended;
use crate::topology::{Rank, Reach};

impl<M: Machine> Call<'_, M> {
    /// Whether what lies in slots is announced row by row between this rank and `peer`.
    pub(super) fn announces_rows(&self, peer: Rank) -> bool {
        self.layout.settings().low_latency_announced() && self.layout.topology().reach(self.me, peer) == Reach::Near
    }

    /// The cell that says that the row, or all results, of `writer` for `token` are there.
    fn row_cell(&self, writer: Rank, token: u32) -> Cell {
        let counter = if self.plants(Plant::OneRowCell) { Counter::Even } else { self.counter() };
        Cell::new(writer, LaneKind::LowRow(token as u16), counter)
    }

    /// Puts the headers of all rows for `peer`, in their order.
    pub(super) async fn put_headers(
        &self,
        port: &mut Attended<M::Port>,
        outbox: &mut Outbox,
        faults: &mut Faults,
        peer: Rank,
        headers: &[u8],
    ) -> Result<(), Fault> {
        let (lane, bytes) = (Self::rows_lane(peer), self.layout.row().header_bytes());
        let at_once = self.layout.low_staging(0).len / bytes;
        for (chunk, headers) in (0..).zip(headers.chunks((at_once * bytes) as usize)) {
            let slot = outbox.slot(self, port, faults).await?;
            let from = self.layout.low_staging(slot).offset;
            port.write(from, headers)?;
            let to = self.layout.low_head(self.op, self.me, chunk * at_once as u32).offset;
            outbox.sent((lane, port.put(lane, from.span(headers.len() as u64), to).await?));
        }
        Ok(())
    }

    /// Puts a row or result that lies at `from`, with its header in front, and says that it is there: of results with the last of the token.
    pub(super) async fn put_and_raise(
        &self,
        port: &mut Attended<M::Port>,
        peer: Rank,
        from: Offset,
        (op, place): (u64, Place),
    ) -> Result<(LaneId, Ticket), Fault> {
        let row = self.layout.row();
        let (token, from, to, last) = match place {
            Place::Row { token, .. } => {
                let (header, to) = (row.header_bytes(), self.layout.low_row(op, self.me, token).offset);
                (token, from.plus(header).span(row.payload_bytes()), to.plus(header), true)
            }
            Place::Result { token, column, last } => {
                let from = from.span(RESULT_HEADER + row.results().payload_bytes());
                (token, from, self.layout.low_result(op, self.me, token, column).offset, last)
            }
        };
        let lane = LaneId { peer, kind: LaneKind::LowRow(token as u16) };
        let (cell, early) = (self.row_cell(self.me, token), self.plants(Plant::RowRaisedEarly));
        if last && early {
            port.publish(lane, cell, self.op).await?;
        }
        let ticket = port.put(lane, from, to).await?;
        if last && !early {
            port.publish(lane, cell, self.op).await?;
        }
        Ok((lane, ticket))
    }

    /// Waits until the row, or all results, of `peer` for `token` are there, where that is said of each.
    pub(super) async fn await_row(&self, port: &mut Attended<M::Port>, peer: Rank, token: u32) -> Result<(), Fault> {
        if peer == self.me || !self.announces_rows(peer) || self.plants(Plant::RowNotAwaited) {
            return Ok(());
        }
        let cell = self.row_cell(peer, token);
        // Of many rows most have come while this rank waited for another.
        if port.peek(cell) >= self.op {
            return Ok(());
        }
        let masked = Need { cell: self.arrival_cell(peer), at_least: MASKED };
        match port.wait_any(&[Need { cell, at_least: self.op }, masked]).await? {
            0 => Ok(()),
            _ => Err(Fault::MaskedBy { peer }),
        }
    }

    /// Waits for all rows of `peer`, of a dispatch, and looks at none.
    pub(super) async fn skip_announced(
        &self,
        port: &mut Attended<M::Port>,
        peer: Rank,
        rows: u32,
    ) -> Result<(), Fault> {
        for position in 0..rows {
            let mut header = RowHeader::new_zeroed();
            port.read(self.layout.low_head(self.op, peer, position).offset, header.as_mut_bytes())?;
            let token = header.source_token;
            let most = self.layout.shape().max_tokens();
            if token >= most {
                let (mine, theirs) = (most.into(), token.into());
                return Err(Fault::Mismatch { field: "tokens of a source", mine, theirs, peer });
            }
            self.await_row(port, peer, token).await?;
        }
        Ok(())
    }
}
