//! A port that records its verbs.

use super::{Decorate, Opening};
use crate::error::Fault;
use crate::port::{Cell, LaneId, Nanos, Need, Offset, Port, Span, Tag, Ticket, Units, Work, unit_bytes};
use crate::topology::Rank;
use crate::trace::{Record, Sink, Verb};

/// Makes every port of a machine record into clones of one sink.
#[derive(Clone, Debug)]
pub struct Tracer<S> {
    sink: S,
}

impl<S: Sink + Clone> Tracer<S> {
    /// Records into `sink`, which is cloned for every port: a reference or an `Rc`.
    pub const fn new(sink: S) -> Self {
        Self { sink }
    }
}

impl<S: Sink + Clone> Decorate for Tracer<S> {
    type Port<P: Port> = Traced<P, S>;

    fn decorate<P: Port>(&self, port: P, rank: Rank, opening: &Opening) -> Traced<P, S> {
        Traced::new(port, self.sink.clone(), rank, opening)
    }
}

/// A port that records its opening, its verbs and its closing (drop).
///
/// Puts, gets, publishes and flushes are recorded once they succeeded; a wait when it begins and when it ends, however
/// it ends. A wait that was dropped before it ended has no [`Verb::Woke`]. Peeks, reads and writes are not recorded.
#[derive(Debug)]
pub struct Traced<P: Port, S: Sink> {
    port: P,
    sink: S,
    rank: Rank,
    opening: Opening,
}

impl<P: Port, S: Sink> Traced<P, S> {
    /// `port`, which rank `rank` opened as `opening` says, recorded into `sink`.
    pub fn new(port: P, sink: S, rank: Rank, opening: &Opening) -> Self {
        let traced = Self { port, sink, rank, opening: *opening };
        traced.record(Verb::Open);
        traced
    }

    fn record(&self, verb: Verb) {
        let Opening { role, op, .. } = self.opening;
        self.sink.record(Record { at: self.port.now(), rank: self.rank, role, op, verb });
    }
}

impl<P: Port, S: Sink> Drop for Traced<P, S> {
    fn drop(&mut self) {
        self.record(Verb::Close);
    }
}

impl<P: Port, S: Sink> Port for Traced<P, S> {
    fn now(&self) -> Nanos {
        self.port.now()
    }

    fn peek(&self, cell: Cell) -> u64 {
        self.port.peek(cell)
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        if let Some(&Need { cell, at_least }) = needs.first() {
            self.record(Verb::Wait { cell, at_least });
        }
        let result = self.port.wait_any(needs).await;
        if !needs.is_empty() {
            self.record(Verb::Woke { index: result.ok() });
        }
        result
    }

    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let ticket = self.port.put(lane, from, to).await?;
        self.record(Verb::Put { lane, to: to.0, len: from.len });
        Ok(ticket)
    }

    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let ticket = self.port.get(lane, from, to).await?;
        self.record(Verb::Get { lane, from: from.offset.0, len: from.len });
        Ok(ticket)
    }

    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        self.port.publish(lane, cell, value).await?;
        self.record(Verb::Publish { lane, cell, value });
        Ok(())
    }

    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        self.port.flush(lane, upto).await?;
        self.record(Verb::Flushed { lane });
        Ok(())
    }

    async fn put_units(&mut self, lane: LaneId, from: Span, to: Offset, tag: Tag) -> Result<Ticket, Fault> {
        let ticket = self.port.put_units(lane, from, to, tag).await?;
        self.record(Verb::Put { lane, to: to.0, len: unit_bytes(from.len) });
        Ok(ticket)
    }

    fn poll_units(&self, units: &Units, into: &mut [u8]) -> Result<bool, Fault> {
        self.port.poll_units(units, into)
    }

    async fn wait_units(&mut self, units: &[Units], or: &[Need]) -> Result<usize, Fault> {
        let began = self.port.now();
        let met = self.port.wait_units(units, or).await?;
        if let Some(units) = units.get(met) {
            self.record(Verb::Units { lane: units.lane, len: units.len, waited: self.port.now() - began });
        }
        Ok(met)
    }

    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.port.read(from, into)
    }

    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.port.write(to, bytes)
    }

    fn charge(&self, work: Work) {
        self.port.charge(work);
    }

    fn only_posts(&mut self, only: bool) {
        self.port.only_posts(only);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::machine::loopback::{DEADLINE, Loopback, PROBE, PROBE_LANE, finish, opening};

    #[test]
    fn every_verb_leaves_its_record() {
        let records = RefCell::new(Vec::new());
        {
            let mut port = Traced::new(Loopback::new(), &records, Rank(0), &opening());
            finish(port.put(PROBE_LANE, Offset(0).span(16), Offset(64))).unwrap();
            let ticket = finish(port.get(PROBE_LANE, Offset(64).span(8), Offset(0))).unwrap();
            finish(port.publish(PROBE_LANE, PROBE, 1)).unwrap();
            finish(port.wait_any(&[Need { cell: PROBE, at_least: 1 }])).unwrap();
            finish(port.flush(PROBE_LANE, ticket)).unwrap();
            assert!(finish(port.wait_any(&[Need { cell: PROBE, at_least: 2 }])).is_err());
            let units = Units { lane: PROBE_LANE, at: Offset(96), len: 20, tag: Tag::of(3) };
            finish(port.put_units(PROBE_LANE, Offset(0).span(20), units.at, units.tag)).unwrap();
            assert_eq!(finish(port.wait_units(&[units], &[])), Ok(0));
            assert_eq!(port.poll_units(&units, &mut [0; 20]), Ok(true));
        }
        let records = records.into_inner();
        let verbs: Vec<_> = records.iter().map(|record| record.verb).collect();
        let lane = PROBE_LANE;
        let expected = [
            Verb::Open,
            Verb::Put { lane, to: 64, len: 16 },
            Verb::Get { lane, from: 64, len: 8 },
            Verb::Publish { lane, cell: PROBE, value: 1 },
            Verb::Wait { cell: PROBE, at_least: 1 },
            Verb::Woke { index: Some(0) },
            Verb::Flushed { lane },
            Verb::Wait { cell: PROBE, at_least: 2 },
            Verb::Woke { index: None },
            Verb::Put { lane, to: 96, len: 32 },
            Verb::Units { lane, len: 20, waited: Nanos(0) },
            Verb::Close,
        ];
        assert_eq!(verbs, expected);
        assert!(records.iter().all(|record| record.op == opening().op && record.role == opening().role));
        assert_eq!(records.last().map(|record| record.at), Some(DEADLINE), "the failed wait lasted to the deadline");
    }
}
