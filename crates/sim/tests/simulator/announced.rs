//! Low latency whose rows are announced before they come, as the CUDA kernels have it (docs/cuda.md): on the machine contract, under the
//! adversary. What is a block there is a role here.
//!
//! A half of an operation is roles side by side: on the sending side one for each token and one that sends the headers ahead, on the
//! receiving side two that share the rows. A row lies in the slot of its token and has a cell of its own in each bank.

use crate::common::{SEEDS, free};
use ep_core::machine::{Machine as _, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Offset, Port as _, Role};
use ep_core::{Fault, Nanos, Rank, Settings, Shape, Topology};
use ep_sim::{Cluster, Machine, Port, Violation};
use futures_util::future::{join, join_all, try_join_all};

const RANKS: u32 = 3;
const TOKENS: u32 = 3;
const OPS: u64 = 5;
const READERS: u32 = 2;
/// Bytes of a header, and of a row.
const BYTES: u64 = 64;
const DEADLINE: Nanos = Nanos::from_millis(50);

/// What is done wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Plant {
    Nothing,
    /// A row's cell is raised before the row is put.
    RaisedEarly,
    /// The arrival is published before the headers are put.
    AnnouncedEarly,
    /// Rows are put without asking whether their bank is free.
    BankNotAwaited,
    /// A row has one cell for both banks.
    OneCell,
    /// Who has read the headers does not wait for the rows.
    RowsNotAwaited,
}

/// In which order a rank does its halves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Order {
    /// Send and receive, operation by operation.
    AtOnce,
    /// The next operation is sent before the last one is received.
    Ahead,
    /// As [`Order::Ahead`]; rank 0 skips rank 1 in the first operation, as if its bank had not been free, and sends again when it receives.
    Late,
}

/// Whether a token of `source` goes to `to`.
fn goes(op: u64, source: Rank, token: u32, to: Rank) -> bool {
    source != to && !(op + u64::from(source.0 + 2 * token + to.0)).is_multiple_of(3)
}

/// What a row holds.
fn row(op: u64, source: Rank, token: u32) -> [u8; BYTES as usize] {
    let mut bytes = [token as u8; BYTES as usize];
    bytes[0] = op as u8;
    bytes[1] = source.0 as u8;
    bytes
}

/// One rank.
struct Low<'m> {
    machine: &'m Machine,
    plant: Plant,
}

impl Low<'_> {
    fn port(&self, op: u64, track: u32) -> Port {
        let role = Role { track: track as u16, ..Role::new(Duty::Probe) };
        self.machine.port(Opening { role, op, generation: 1, deadline: DEADLINE })
    }

    fn me(&self) -> Rank {
        self.machine.rank()
    }

    fn others(&self) -> impl Iterator<Item = Rank> {
        let me = self.me();
        (0..RANKS).map(Rank).filter(move |&rank| rank != me)
    }

    /// The `at`-th piece of the window's part `part` in the bank of `op`.
    fn place(&self, part: u64, op: u64, rank: Rank, at: u32) -> Offset {
        let in_part = (op % 2 * u64::from(RANKS) + u64::from(rank.0)) * u64::from(TOKENS) + u64::from(at);
        free(self.machine, (part * 2 * u64::from(RANKS * TOKENS) + in_part) * BYTES)
    }

    fn header(&self, op: u64, source: Rank, position: u32) -> Offset {
        self.place(0, op, source, position)
    }

    fn slot(&self, op: u64, source: Rank, token: u32) -> Offset {
        self.place(1, op, source, token)
    }

    /// Where puts come from.
    fn staging(&self, part: u64, op: u64, to: Rank, at: u32) -> Offset {
        self.place(2 + part, op, to, at)
    }

    fn cell(&self, op: u64, writer: Rank, token: u32) -> Cell {
        let even = op.is_multiple_of(2) || self.plant == Plant::OneCell;
        Cell::new(writer, LaneKind::Data(token as u16), if even { Counter::Tail } else { Counter::Placed })
    }

    fn arrival(op: u64, writer: Rank) -> Cell {
        Cell::new(writer, LaneKind::LowRows, if op.is_multiple_of(2) { Counter::Even } else { Counter::Odd })
    }

    async fn bank(&self, port: &mut Port, op: u64, to: Rank) -> Result<(), Fault> {
        if self.plant == Plant::BankNotAwaited || op <= 2 {
            return Ok(());
        }
        let cell = Cell::new(to, LaneKind::LowDone, Counter::Received);
        port.wait_any(&[Need { cell, at_least: op - 2 }]).await.map(drop)
    }

    /// Sends the headers of what goes to `to`, and says how many.
    async fn tell(&self, op: u64, to: &[Rank]) -> Result<(), Fault> {
        let mut port = self.port(op, TOKENS);
        for &to in to {
            self.bank(&mut port, op, to).await?;
            let lane = LaneId { peer: to, kind: LaneKind::LowRows };
            let tokens: Vec<u32> = (0..TOKENS).filter(|&token| goes(op, self.me(), token, to)).collect();
            let announced = op * 16 + tokens.len() as u64;
            if self.plant == Plant::AnnouncedEarly {
                port.publish(lane, Self::arrival(op, self.me()), announced).await?;
            }
            let mut last = None;
            for (position, &token) in (0..).zip(&tokens) {
                let from = self.staging(0, op, to, position);
                port.write(from, &row(op, self.me(), token))?;
                last = Some(port.put(lane, from.span(BYTES), self.header(op, self.me(), position)).await?);
            }
            if self.plant != Plant::AnnouncedEarly {
                port.publish(lane, Self::arrival(op, self.me()), announced).await?;
            }
            if let Some(last) = last {
                port.flush(lane, last).await?;
            }
        }
        Ok(())
    }

    /// Puts the row of a token to those of `to` that it goes to.
    async fn put(&self, op: u64, token: u32, to: &[Rank]) -> Result<(), Fault> {
        let mut port = self.port(op, token);
        for &to in to.iter().filter(|&&to| goes(op, self.me(), token, to)) {
            self.bank(&mut port, op, to).await?;
            let lane = LaneId { peer: to, kind: LaneKind::Data(token as u16) };
            let (from, cell) = (self.staging(1, op, to, token), self.cell(op, self.me(), token));
            port.write(from, &row(op, self.me(), token))?;
            if self.plant == Plant::RaisedEarly {
                port.publish(lane, cell, op).await?;
            }
            let ticket = port.put(lane, from.span(BYTES), self.slot(op, self.me(), token)).await?;
            if self.plant != Plant::RaisedEarly {
                port.publish(lane, cell, op).await?;
            }
            port.flush(lane, ticket).await?;
        }
        Ok(())
    }

    async fn send(&self, op: u64, to: &[Rank]) -> Result<(), Fault> {
        let rows = try_join_all((0..TOKENS).map(|token| self.put(op, token, to)));
        let (told, rows) = join(self.tell(op, to), rows).await;
        told.and(rows.map(drop))
    }

    /// Reads this reader's share of the rows; how many were as they must be, and how many not.
    async fn read(&self, op: u64, reader: u32) -> Result<(u64, u64), Fault> {
        let mut port = self.port(op, TOKENS + 1 + reader);
        let (mut right, mut wrong, mut number) = (0, 0, 0);
        for source in self.others() {
            let cell = Self::arrival(op, source);
            port.wait_any(&[Need { cell, at_least: op * 16 }]).await?;
            let rows = (port.peek(cell) - op * 16) as u32;
            for position in 0..rows {
                number += 1;
                let mut header = [0; BYTES as usize];
                port.read(self.header(op, source, position), &mut header)?;
                if number % READERS != reader {
                    continue;
                }
                let token = u32::from(header[2]);
                if token >= TOKENS || header != row(op, source, token) {
                    wrong += 1;
                    continue;
                }
                if self.plant != Plant::RowsNotAwaited {
                    port.wait_any(&[Need { cell: self.cell(op, source, token), at_least: op }]).await?;
                }
                let mut bytes = [0; BYTES as usize];
                port.read(self.slot(op, source, token), &mut bytes)?;
                if bytes == row(op, source, token) { right += 1 } else { wrong += 1 }
            }
        }
        Ok((right, wrong))
    }

    async fn receive(&self, op: u64) -> Result<(u64, u64), Fault> {
        let read = join_all((0..READERS).map(|reader| self.read(op, reader))).await;
        let mut sum = (0, 0);
        for read in read {
            let (right, wrong) = read?;
            sum = (sum.0 + right, sum.1 + wrong);
        }
        // The block that ends last.
        let mut port = self.port(op, TOKENS + 1 + READERS);
        for peer in self.others() {
            let lane = LaneId { peer, kind: LaneKind::LowDone };
            port.publish(lane, Cell::new(self.me(), LaneKind::LowDone, Counter::Received), op).await?;
        }
        Ok(sum)
    }

    /// All operations; rows that came right, and wrong.
    async fn run(&self, order: Order) -> Result<(u64, u64), Fault> {
        let all: Vec<Rank> = self.others().collect();
        let mut sum = (0, 0);
        let late = order == Order::Late && self.me() == Rank(0);
        if order != Order::AtOnce {
            let free: Vec<Rank> = all.iter().copied().filter(|&to| !late || to != Rank(1)).collect();
            self.send(1, &free).await?;
        }
        for op in 1..=OPS {
            let next = if order == Order::AtOnce { op } else { op + 1 };
            if next <= OPS {
                self.send(next, &all).await?;
            }
            if late && op == 1 {
                self.send(1, &[Rank(1)]).await?;
            }
            let (right, wrong) = self.receive(op).await?;
            sum = (sum.0 + right, sum.1 + wrong);
        }
        Ok(sum)
    }
}

/// How it ends under one adversary: an error for a violation of the contract, a fault, or rows that came wrong.
fn run(seed: u64, order: Order, plant: Plant) -> Result<(), String> {
    let topology = Topology::new(1, RANKS).unwrap();
    let shape = Shape::builder().experts(3).topk(1).hidden(64).max_tokens(TOKENS).build().unwrap();
    let settings = Settings::builder(&shape, &topology)
        .channels(TOKENS)
        .low_latency(true)
        .arena_bytes(1 << 16)
        .deadline(DEADLINE)
        .build()
        .unwrap();
    let cluster = Cluster::builder(topology).settings(settings).seed(seed).build(shape).unwrap();
    let ran = cluster.run_machines(async |machine| Low { machine: &machine, plant }.run(order).await);
    let ranks = ran.map_err(|violation: Violation| violation.to_string())?.finished();
    let due = |to| {
        let of = |op, source| (0..TOKENS).filter(move |&token| goes(op, source, token, to)).count();
        (1..=OPS).flat_map(|op| (0..RANKS).map(move |source| of(op, Rank(source)) as u64)).sum::<u64>()
    };
    for (rank, outcome) in (0..).zip(ranks) {
        let (right, wrong) = outcome.map_err(|fault| format!("rank {rank}: {fault}"))?;
        let due = due(Rank(rank));
        if (right, wrong) != (due, 0) {
            return Err(format!("rank {rank}: {right} rows right, {wrong} wrong, {due} due"));
        }
    }
    Ok(())
}

#[test]
fn announced_rows_come_whole_in_any_order() {
    for order in [Order::AtOnce, Order::Ahead, Order::Late] {
        for seed in 0..SEEDS {
            run(seed, order, Plant::Nothing).unwrap_or_else(|error| panic!("{order:?}, seed {seed}: {error}"));
        }
    }
}

#[test]
fn what_is_planted_is_caught() {
    let plants = [
        (Plant::RaisedEarly, Order::AtOnce),
        (Plant::AnnouncedEarly, Order::AtOnce),
        (Plant::BankNotAwaited, Order::Ahead),
        (Plant::OneCell, Order::Late),
        (Plant::RowsNotAwaited, Order::AtOnce),
    ];
    for (plant, order) in plants {
        let caught = (0..SEEDS).filter(|&seed| run(seed, order, plant).is_err()).count() as u64;
        assert!(caught > SEEDS / 2, "{plant:?} was caught under {caught} of {SEEDS} adversaries");
    }
}
