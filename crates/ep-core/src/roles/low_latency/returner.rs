//! Combine: puts the experts' results back to the tokens' ranks.

use zerocopy::IntoBytes;

use super::faults::Held;
use super::{Banks, Call, Faults, Notice, Outbox, Pick, Place, Row, Said};
use crate::buffers::HostRows;
use crate::error::Fault;
use crate::layout::{LowKind, RESULT_HEADER, RowHeader};
use crate::machine::{Machine, Window};
use crate::plant::Plant;
use crate::port::{Duty, Offset, Port, Work};
use crate::roles::{Accumulator, Attended};
use crate::topology::Rank;

/// The experts' results, and what they were made of.
pub(crate) struct Results<'a, W: Window> {
    /// `[local experts, ranks * max_tokens, hidden]` bf16.
    pub(crate) y: &'a HostRows<W>,
    /// `[ranks]`: the received rows of each rank, a range of `rows`.
    pub(crate) sources: &'a [std::ops::Range<u32>],
    /// `[ranks]`: tokens that each dispatched, where rows travel as units.
    pub(crate) tokens: &'a [u32],
    pub(crate) rows: &'a [Row],
    pub(crate) picks: &'a [Pick],
}

/// One row of results.
struct Parcel<'a> {
    token: u32,
    /// Its number among those of the token that this rank returns.
    column: u32,
    /// Whether it is the last of them.
    last: bool,
    /// What it is made of: one choice's result, or all of a rank's.
    picks: &'a [Pick],
}

impl<'a, W: Window> Results<'a, W> {
    /// What `source` is owed, in the order of its tokens.
    fn parcels(&self, kind: LowKind, source: Rank) -> impl Iterator<Item = Parcel<'a>> + use<'a, W> {
        let range = &self.sources[source.index()];
        let (rows, picks) = (&self.rows[range.start as usize..range.end as usize], self.picks);
        rows.iter().flat_map(move |row| {
            let picks = &picks[row.picks.start as usize..row.picks.end as usize];
            let step = if kind == LowKind::PerChoice { 1 } else { picks.len().max(1) };
            let parcels = picks.chunks(step);
            let left = (0..parcels.len()).rev();
            (0..).zip(left.zip(parcels)).map(move |(column, (left, picks))| Parcel {
                token: row.token,
                column,
                last: left == 0,
                picks,
            })
        })
    }
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
    // Who is owed nothing does not wait for an arrival.
    let mut banks = Banks::new(call, |peer| results.parcels(call.kind, peer).next().is_some());
    loop {
        let free = banks.free(call, &returner.port, faults)?;
        for (left, peer) in (0..free.len()).rev().zip(free) {
            returner.port.only_posts(left > 0);
            let notice = returner.notice(peer);
            if notice.form.says_ahead() {
                returner.tell(peer, &notice, faults).await?;
            }
            returner.give_back(peer, faults).await?;
            if !notice.form.says_ahead() {
                returner.tell(peer, &notice, faults).await?;
            }
        }
        if !banks.wait(call, &mut returner.port, faults).await? {
            break;
        }
    }
    for peer in faults.late() {
        let held = returner.hold(peer)?;
        faults.hold(peer, held);
    }
    returner.give_back(call.me, faults).await
}

impl<M: Machine, W: Window> Returner<'_, '_, M, W> {
    /// Whether what `source` is owed travels as units.
    fn as_units(&self, source: Rank) -> bool {
        let rank = if self.call.plants(Plant::FormOfTheOwnBatch) { self.call.me } else { source };
        let fewer = u32::from(self.call.plants(Plant::UnitLimitOffByOne));
        self.call.results_as_units(self.results.tokens[rank.index()].saturating_sub(fewer))
    }

    /// What `source` is told of its results.
    fn notice(&self, source: Rank) -> Notice {
        let rows = self.results.parcels(self.call.kind, source).count() as u32;
        let form = self.call.form(source, self.as_units(source));
        Notice { said: Said { rows, tokens: 0 }, form, details: Vec::new() }
    }

    async fn tell(&mut self, peer: Rank, notice: &Notice, faults: &mut Faults) -> Result<(), Fault> {
        if faults.involve(peer) {
            return Ok(());
        }
        let told = self.call.announce(&mut self.port, self.outbox, faults, peer, notice).await;
        told.or_else(|fault| faults.note(peer, fault))
    }

    /// Keeps the results that `source` is owed.
    fn hold(&mut self, source: Rank) -> Result<Held, Fault> {
        let mut held = Held { notice: self.notice(source), ..Held::default() };
        for Parcel { token, column, last, picks } in self.results.parcels(self.call.kind, source) {
            self.load(picks)?;
            let mut bytes = self.header(token, column).as_bytes().to_vec();
            bytes.extend_from_slice(&self.payload);
            held.rows.push((Place::Result { token, column, last }, bytes));
        }
        Ok(held)
    }

    /// Puts the results that `source` is owed.
    async fn give_back(&mut self, source: Rank, faults: &mut Faults) -> Result<(), Fault> {
        for Parcel { token, column, last, picks } in self.results.parcels(self.call.kind, source) {
            self.load(picks)?;
            self.put(source, (token, column, last), faults).await?;
        }
        Ok(())
    }

    /// Makes a result: that of one choice, or the weighted sum of a rank's, choices ascending, rounded to bf16.
    fn load(&mut self, picks: &[Pick]) -> Result<(), Fault> {
        if self.call.kind == LowKind::PerChoice {
            for pick in picks {
                self.payload.copy_from_slice(self.results.y.borrow(pick.row, &mut self.scratch)?);
            }
            return Ok(());
        }
        self.sum.clear();
        for pick in picks {
            let result = self.results.y.borrow(pick.row, &mut self.scratch)?;
            self.port.charge(Work::Reduce { bytes: result.len() as u64 });
            self.sum.add_scaled(pick.weight, result);
        }
        self.sum.finish(&mut self.payload);
        Ok(())
    }

    fn header(&self, token: u32, column: u32) -> RowHeader {
        RowHeader { source_rank: self.call.me.0, source_token: token, position: column, op: self.call.stamp() }
    }

    /// Puts the result at hand.
    async fn put(
        &mut self,
        to: Rank,
        (token, column, last): (u32, u32, bool),
        faults: &mut Faults,
    ) -> Result<(), Fault> {
        let call = self.call;
        if to == call.me {
            return self.write(call.layout.low_result(call.op, call.me, token, column).offset, token, column);
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
        let op = call.op + u64::from(call.plants(Plant::OpInWrongBank));
        let form = call.form(to, self.as_units(to));
        match call.put_row(&mut self.port, to, from, (op, Place::Result { token, column, last }, form)).await {
            Ok(posted) => self.outbox.sent(posted),
            Err(fault) => faults.note(to, fault)?,
        }
        Ok(())
    }

    /// Writes the result at hand into the own window.
    fn write(&mut self, to: Offset, token: u32, column: u32) -> Result<(), Fault> {
        self.port.charge(Work::Row { bytes: self.payload.len() as u64 });
        self.port.write(to, self.header(token, column).as_bytes())?;
        self.port.write(to.plus(RESULT_HEADER), &self.payload)
    }
}
