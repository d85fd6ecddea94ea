//! Combine: puts the experts' results back to the tokens' ranks.

use zerocopy::IntoBytes;

use super::{Banks, Call, Faults, Outbox, Pick, Row};
use crate::engine::rows::HostRows;
use crate::error::Fault;
use crate::layout::{LowKind, RESULT_HEADER, RowHeader};
use crate::machine::{Machine, Window};
use crate::port::{Duty, Offset, Port, Work};
use crate::roles::{Accumulator, Attended};
use crate::topology::Rank;

/// The experts' results, and what they were made of.
pub(crate) struct Results<'a, W: Window> {
    /// `[local experts, ranks * max_tokens, hidden]` bf16.
    pub(crate) y: &'a HostRows<W>,
    /// `[ranks]`: the received rows of each rank, a range of `rows`.
    pub(crate) sources: &'a [std::ops::Range<u32>],
    pub(crate) rows: &'a [Row],
    pub(crate) picks: &'a [Pick],
}

/// Results on their way, one after the other.
struct Returner<'a, 'b, M: Machine, W: Window> {
    call: &'a Call<'b, M>,
    port: Attended<M::Port>,
    results: &'a Results<'a, W>,
    outbox: &'a mut Outbox,
    sum: Accumulator,
    payload: Vec<u8>,
    scratch: Vec<u8>,
}

/// Returns all results: to the peers whose banks are free at once, to the others as theirs become free.
pub(crate) async fn return_results<M: Machine, W: Window>(
    call: &Call<'_, M>,
    results: &Results<'_, W>,
    outbox: &mut Outbox,
    faults: &mut Faults,
) -> Result<(), Fault> {
    let bytes = call.layout.row().results().payload_bytes() as usize;
    let mut returner = Returner {
        call,
        port: call.port(Duty::Returner),
        results,
        outbox,
        sum: Accumulator::new(call.layout.shape().hidden(), 0),
        payload: vec![0; bytes],
        scratch: vec![0; bytes],
    };
    let mut banks = Banks::new(call);
    loop {
        for peer in banks.free(call, &returner.port, faults)? {
            let rows = returner.give_back(peer, faults).await?;
            // Who is owed nothing does not wait for an arrival.
            if rows > 0 && !faults.involve(peer) {
                let sent = call.announce(&mut returner.port, peer, rows).await;
                sent.or_else(|fault| faults.note(peer, fault))?;
            }
        }
        if !banks.wait(call, &mut returner.port, faults).await? {
            break;
        }
    }
    returner.give_back(call.me, faults).await.map(drop)
}

impl<M: Machine, W: Window> Returner<'_, '_, M, W> {
    /// Puts the results that `source` is owed; returns how many.
    async fn give_back(&mut self, source: Rank, faults: &mut Faults) -> Result<u32, Fault> {
        let results = self.results;
        let range = &results.sources[source.index()];
        let mut sent = 0;
        for row in &results.rows[range.start as usize..range.end as usize] {
            let picks = &results.picks[row.picks.start as usize..row.picks.end as usize];
            if self.call.kind == LowKind::PerRank {
                self.sum(picks)?;
                self.put(source, row.token, row.column, faults).await?;
                sent += 1;
                continue;
            }
            for pick in picks {
                let result = results.y.borrow(pick.row, &mut self.scratch)?;
                self.payload.copy_from_slice(result);
                self.put(source, row.token, pick.choice, faults).await?;
                sent += 1;
            }
        }
        Ok(sent)
    }

    /// The weighted sum of a row's results, choices ascending, rounded to bf16.
    fn sum(&mut self, picks: &[Pick]) -> Result<(), Fault> {
        self.sum.clear();
        for pick in picks {
            let result = self.results.y.borrow(pick.row, &mut self.scratch)?;
            self.port.charge(Work::Reduce { bytes: result.len() as u64 });
            self.sum.add_scaled(pick.weight, result);
        }
        self.sum.finish(&mut self.payload);
        Ok(())
    }

    async fn put(&mut self, to: Rank, token: u32, column: u32, faults: &mut Faults) -> Result<(), Fault> {
        let call = self.call;
        let place = |op| call.layout.low_result(op, token, column).offset;
        if to == call.me {
            return self.write(place(call.op), token, column);
        }
        if faults.involve(to) {
            return Ok(());
        }
        let slot = self.outbox.slot(call, &mut self.port, faults).await?;
        let from = call.layout.low_staging(slot).offset;
        self.write(from, token, column)?;
        if faults.involve(to) {
            return Ok(());
        }
        #[cfg(feature = "plant")]
        let op = call.op + u64::from(call.plants(crate::plant::Plant::OpInWrongBank));
        #[cfg(not(feature = "plant"))]
        let op = call.op;
        let span = from.span(RESULT_HEADER + self.payload.len() as u64);
        match self.port.put(Call::<M>::rows_lane(to), span, place(op)).await {
            Ok(ticket) => self.outbox.sent(to, ticket),
            Err(fault) => faults.note(to, fault)?,
        }
        Ok(())
    }

    /// Writes the result at hand into the own window.
    fn write(&mut self, to: Offset, token: u32, column: u32) -> Result<(), Fault> {
        let Call { me, op, .. } = *self.call;
        let header = RowHeader { source_rank: me.0, source_token: token, position: column, op: op as u32 };
        self.port.charge(Work::Row { bytes: self.payload.len() as u64 });
        self.port.write(to, header.as_bytes())?;
        self.port.write(to.plus(RESULT_HEADER), &self.payload)
    }
}
