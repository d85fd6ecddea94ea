//! The roles of low latency. Each call of the user runs one of them, and that serves all peers:
//!
//! ```text
//! dispatch   send: send_tokens    ==puts into fixed slots, an arrival==>   receive: receive_tokens, received
//! combine    send: return_results ==puts into fixed slots, an arrival==>   receive: reduce_results, received
//! ```
//!
//! What a rank is sent is announced in one of three [forms](Form).
//!
//! An operation that the user drops is *skipped* ([`skip`]): its arrivals are waited for, and it counts as received.
//!
//! There are no counts, grants or credits. A bank may be filled for operation `op` once its owner has *received*
//! operation `op - 2`; that is all that a sender ever waits for.
//!
//! **A peer that fails** fails nothing but what involves it: everything is still sent to the others. What went wrong with
//! whom is kept ([`Faults`]) and told by the receiving half, where the user may mask the peer and go on. What a peer could
//! not be sent because its bank was not free in time is held, and the receiving half tries again: whoever is late may only
//! wait for the one who is dead.
//!
//! **Who is to blame**: a rank that waits long, or is waited for, says for whom ([`lookout`]); the one at the end of that chain is named. Verdicts of
//! throughput mode, and of ranks that recover, end a wait: their reporter comes no more.

mod announced;
mod faults;
mod lookout;
mod outbox;
mod packed;
mod receiver;
mod reducer;
mod returner;
mod sender;
mod units;

use std::rc::Rc;

use zerocopy::{FromZeros, IntoBytes};

pub(crate) use faults::{Faults, deliver};
pub(crate) use lookout::{culprit, last_words, lookout};
pub(crate) use outbox::Outbox;
pub(crate) use packed::{Packed, Packing, pack};
pub(crate) use receiver::{Intake, Pick, Row, receive_tokens, skip};
pub(crate) use reducer::{Asked, reduce_results};
pub(crate) use returner::{Results, return_results};
pub(crate) use sender::{Tokens, send_tokens};

use super::{Attended, Board, Vigil};
use crate::error::Fault;
use crate::layout::{Arrival, Layout, LowKind, MASKED, RESULT_HEADER, RowHeader, low_stamp};
use crate::machine::{Machine, Opening};
use crate::plant::Plant;
use crate::port::{Cell, Counter, Duty, LaneId, LaneKind, Nanos, Need, Offset, Port, Role, Ticket};
use crate::topology::{Rank, RankSet};

/// What ranks differ in that do different things.
const KIND: &str = "kind of the low-latency operation";
/// What ranks differ in that do not agree on how the results for a batch travel: 1 as units, 0 in slots.
const FORM: &str = "form of low-latency results";

/// One half of a low-latency operation on one rank: its sending or its receiving.
pub(crate) struct Call<'a, M> {
    pub(crate) machine: &'a M,
    pub(crate) layout: &'a Layout,
    pub(crate) me: Rank,
    /// The ranks that take no part, and those that this rank has masked.
    pub(crate) mask: &'a RankSet,
    /// The other ranks, ascending.
    pub(crate) peers: &'a [Rank],
    /// The alarms heard of them.
    pub(crate) vigil: &'a Vigil,
    /// Counted from 1 in each generation.
    pub(crate) op: u64,
    /// Operations of earlier generations, at least: tags run on.
    pub(crate) serials: u64,
    /// One of them, as tags count, whose stretch this rank has cleared both banks in.
    pub(crate) cleared: u64,
    pub(crate) generation: u16,
    pub(crate) kind: LowKind,
    pub(crate) started: Nanos,
    pub(crate) deadline: Nanos,
    pub(crate) board: Rc<Board>,
}

/// How what one rank puts to another is announced.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Form {
    /// It lies in slots, and an arrival behind all of it says how much has come.
    #[default]
    Together,
    /// It lies in slots: an arrival ahead says how much comes, and each row, or the results of each token, has a cell of its own.
    EachRow,
    /// It comes as units, which say so themselves: one ahead says how much comes.
    Units,
}

impl Form {
    /// Whether a peer is told how much comes before it comes.
    fn says_ahead(self) -> bool {
        self != Self::Together
    }
}

/// Where a row goes: which one it is of those to its rank.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// A row of a dispatch.
    Row {
        /// Among those of its rank.
        position: u32,
        token: u32,
    },
    /// A result.
    Result {
        token: u32,
        column: u32,
        /// Whether it is the last one of its token.
        last: bool,
    },
}

/// What goes ahead of rows, or behind them, to say how many there are.
#[derive(Clone, Debug, Default)]
struct Notice {
    said: Said,
    form: Form,
    /// Of a dispatch: as units how many rows each of the peer's experts gets, u32 each; where each row is announced, their headers.
    details: Vec<u8>,
}

/// What an operation brings from one rank to another, as it is announced.
#[derive(Clone, Copy, Default, Debug)]
struct Said {
    rows: u32,
    /// Of a dispatch as units: tokens of its source, which decide how their results come back.
    tokens: u32,
}

impl<M: Machine> Call<'_, M> {
    pub(crate) fn port(&self, duty: Duty) -> Attended<M::Port> {
        let Self { op, generation, deadline, .. } = *self;
        let port = self.machine.port(Opening { role: Role::new(duty), op, generation, deadline });
        Attended::new(port, &self.board, op)
    }

    /// What the headers of this operation's rows have.
    const fn stamp(&self) -> u32 {
        low_stamp(self.generation, self.op)
    }

    const fn rows_lane(peer: Rank) -> LaneId {
        LaneId { peer, kind: LaneKind::LowRows }
    }

    /// What counts in this operation's bank.
    const fn counter(&self) -> Counter {
        if self.op.is_multiple_of(2) { Counter::Even } else { Counter::Odd }
    }

    /// The cell of this operation's bank that `writer` publishes its arrival to.
    const fn arrival_cell(&self, writer: Rank) -> Cell {
        Cell::new(writer, LaneKind::LowRows, self.counter())
    }

    /// What must be seen before this operation's bank at `peer` may be filled.
    fn bank_need(&self, peer: Rank) -> Need {
        let cell = Cell::new(peer, LaneKind::LowDone, Counter::Received);
        Need { cell, at_least: self.op.saturating_sub(2) }
    }

    /// The peers, beginning with the one after this rank: not all ranks serve rank 0 at once.
    fn rotated(&self) -> Vec<Rank> {
        let after = self.peers.partition_point(|&rank| rank < self.me);
        self.peers[after..].iter().chain(&self.peers[..after]).copied().collect()
    }

    /// Waits until this operation's bank at `peer` may be filled.
    async fn bank(&self, port: &mut Attended<M::Port>, peer: Rank) -> Result<(), Fault> {
        let need = self.bank_need(peer);
        port.wait_any(&[need]).await?;
        if port.peek(need.cell) == MASKED { Err(Fault::MaskedBy { peer }) } else { Ok(()) }
    }

    /// Whether the results of a combine travel as units to a rank whose dispatch said so many tokens. Both sides ask that: the rank itself, of its
    /// own batch, and each rank that owes it results.
    fn results_as_units(&self, tokens: u32) -> bool {
        self.as_units() && tokens <= self.layout.low_unit_tokens(self.kind)
    }

    /// How what lies in slots, or `as_units` travels as units, is announced between this rank and `peer`.
    fn form(&self, peer: Rank, as_units: bool) -> Form {
        match as_units {
            true => Form::Units,
            false if self.announces_rows(peer) => Form::EachRow,
            false => Form::Together,
        }
    }

    /// Tells `peer` how many rows of this operation come, or have come.
    async fn announce(
        &self,
        port: &mut Attended<M::Port>,
        outbox: &mut Outbox,
        faults: &mut Faults,
        peer: Rank,
        notice: &Notice,
    ) -> Result<(), Fault> {
        let Notice { said, form, details } = notice;
        let late = self.plants(Plant::HeadersLate);
        match form {
            Form::Units if !details.is_empty() => self.put_counts(port, outbox, faults, peer, details).await?,
            Form::EachRow if !late => self.put_headers(port, outbox, faults, peer, details).await?,
            _ => {}
        }
        let op = self.op + 2 * u64::from(self.plants(Plant::ArrivalOfAnotherOp));
        let another = self.kind == LowKind::Dispatch && self.plants(Plant::ArrivalOfAnotherKind);
        let kind = if another { LowKind::PerChoice } else { self.kind };
        let arrival = Arrival { op, kind, rows: said.rows };
        let value = arrival.encode(self.layout.shape());
        if *form == Form::Units {
            return self.put_head(port, outbox, faults, peer, (value, said.tokens)).await;
        }
        port.publish(Self::rows_lane(peer), self.arrival_cell(self.me), value).await?;
        if *form == Form::EachRow && late {
            self.put_headers(port, outbox, faults, peer, details).await
        } else {
            Ok(())
        }
    }

    /// Puts a row or result that lies at `from`, with its header in front, to its place at `peer`, in the bank of `op`.
    async fn put_row(
        &self,
        port: &mut Attended<M::Port>,
        peer: Rank,
        from: Offset,
        (op, place, form): (u64, Place, Form),
    ) -> Result<(LaneId, Ticket), Fault> {
        match form {
            Form::Units => self.put_row_as_units(port, peer, from, (op, place)).await,
            Form::EachRow => self.put_and_raise(port, peer, from, (op, place)).await,
            Form::Together => {
                let (lane, row) = (Self::rows_lane(peer), self.layout.row());
                let (bytes, to) = match place {
                    Place::Row { position, .. } => {
                        (row.header_bytes() + row.payload_bytes(), self.layout.low_row(op, self.me, position))
                    }
                    Place::Result { token, column, .. } => {
                        let bytes = RESULT_HEADER + row.results().payload_bytes();
                        (bytes, self.layout.low_result(op, self.me, token, column))
                    }
                };
                port.put(lane, from.span(bytes), to.offset).await.map(|ticket| (lane, ticket))
            }
        }
    }

    /// Waits until `peer` has said how many of its rows come. Where that comes behind them, they have come then.
    async fn arrival(&self, port: &mut Attended<M::Port>, peer: Rank, as_units: bool) -> Result<Said, Fault> {
        let shape = self.layout.shape();
        let due = Arrival::due(self.op, shape);
        let (value, tokens) =
            if as_units { self.take_head(port, peer).await? } else { (self.take_arrival(port, peer, due).await?, 0) };
        if value == MASKED {
            return Err(Fault::MaskedBy { peer });
        }
        let mismatch = |field, mine, theirs| Fault::Mismatch { field, mine, theirs, peer };
        let arrival = Arrival::decode(value, shape);
        let arrival = arrival.ok_or(mismatch("value of an arrival", due, value))?;
        for (field, mine, theirs) in [
            ("number of the low-latency operation", self.op, arrival.op),
            (KIND, self.kind as u64, arrival.kind as u64),
        ] {
            if mine != theirs {
                return Err(mismatch(field, mine, theirs));
            }
        }
        Ok(Said { rows: arrival.rows, tokens })
    }

    /// Reads the header of a result.
    fn result_header(&self, port: &Attended<M::Port>, at: Offset) -> Result<RowHeader, Fault> {
        let mut header = RowHeader::new_zeroed();
        port.read(at, header.as_mut_bytes())?;
        Ok(header)
    }

    /// Refuses a row that is not the one due here.
    fn check(&self, header: &RowHeader, peer: Rank, token: Option<u32>) -> Result<(), Fault> {
        for (field, mine, theirs) in [
            ("generation of a low-latency row", self.stamp() >> 16, header.op >> 16),
            ("operation of a low-latency row", self.stamp() & 0xffff, header.op & 0xffff),
            ("source of a low-latency row", peer.0, header.source_rank),
            ("token of a low-latency row", token.unwrap_or(header.source_token), header.source_token),
        ] {
            if mine != theirs {
                return Err(Fault::Mismatch { field, mine: mine.into(), theirs: theirs.into(), peer });
            }
        }
        Ok(())
    }

    /// Tells every peer that this rank has read all that it was given for this operation.
    pub(crate) async fn received(&self, port: &mut Attended<M::Port>) -> Result<(), Fault> {
        self.clear_units(port)?;
        let cell = Cell::new(self.me, LaneKind::LowDone, Counter::Received);
        for (left, &peer) in (0..self.peers.len()).rev().zip(self.peers) {
            port.only_posts(left > 0);
            match port.publish(LaneId { peer, kind: LaneKind::LowDone }, cell, self.op).await {
                // Everything is here: whoever is gone will be missed in the next operation.
                Ok(()) => {}
                Err(fault) if fault.gone().is_some() => {}
                Err(fault) => return Err(fault),
            }
        }
        Ok(())
    }

    /// Tells `peer` that this rank goes on without it.
    pub(crate) async fn mask(&self, peer: Rank) {
        let mut port = self.port(Duty::Control);
        for (kind, counter) in [
            (LaneKind::LowRows, Counter::Even),
            (LaneKind::LowRows, Counter::Odd),
            (LaneKind::LowDone, Counter::Received),
        ] {
            // Whether it can still hear that is its own trouble.
            let _ = port.publish(LaneId { peer, kind }, Cell::new(self.me, kind, counter), MASKED).await;
        }
    }

    /// Whether tests planted this fault.
    fn plants(&self, plant: Plant) -> bool {
        self.layout.settings().plants(plant)
    }
}

/// The peers whose banks may not be filled yet.
struct Banks {
    waiting: Vec<Rank>,
}

impl Banks {
    /// Those of peers that something is for.
    fn new<M: Machine>(call: &Call<'_, M>, is_for: impl Fn(Rank) -> bool) -> Self {
        Self { waiting: call.rotated().into_iter().filter(|&peer| is_for(peer)).collect() }
    }

    /// The peers whose banks are free now; each is returned once.
    fn free<M: Machine>(
        &mut self,
        call: &Call<'_, M>,
        port: &Attended<M::Port>,
        faults: &mut Faults,
    ) -> Result<Vec<Rank>, Fault> {
        let mut free = Vec::new();
        let mut still = Vec::new();
        for peer in self.waiting.drain(..) {
            let need = call.bank_need(peer);
            let seen = port.peek(need.cell);
            if seen == MASKED {
                faults.note(peer, Fault::MaskedBy { peer })?;
            } else if seen >= need.at_least || call.plants(Plant::BankReusedWithoutDone) {
                free.push(peer);
            } else {
                still.push(peer);
            }
        }
        self.waiting = still;
        Ok(free)
    }

    /// Waits until something has changed for one of the peers that are waited for; false when there is none.
    async fn wait<M: Machine>(
        &mut self,
        call: &Call<'_, M>,
        port: &mut Attended<M::Port>,
        faults: &mut Faults,
    ) -> Result<bool, Fault> {
        if self.waiting.is_empty() {
            return Ok(false);
        }
        let needs: Vec<Need> = self.waiting.iter().map(|&peer| call.bank_need(peer)).collect();
        if let Err(fault) = port.wait_any(&needs).await {
            let Some(peer) = fault.peer().filter(|peer| self.waiting.contains(peer)) else { return Err(fault) };
            faults.note(peer, fault)?;
            self.waiting.retain(|&rank| rank != peer);
        }
        Ok(true)
    }
}
