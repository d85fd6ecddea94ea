//! A port that counts verbs and bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Decorate, LaneClass, Opening, VerbKind};
use crate::error::Fault;
use crate::layout::CELL_BYTES;
use crate::port::{Cell, LaneId, Nanos, Need, Offset, Port, Span, Tag, Ticket, Units, Work, unit_bytes};
use crate::topology::Rank;

/// What went over one class of lanes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LaneCounts {
    /// Puts accepted.
    pub puts: u64,
    /// Bytes of these puts.
    pub put_bytes: u64,
    /// Gets accepted.
    pub gets: u64,
    /// Bytes of these gets.
    pub got_bytes: u64,
    /// Cells published.
    pub publishes: u64,
    /// Bytes of these cells.
    pub published_bytes: u64,
}

#[derive(Debug, Default)]
struct LaneCounters {
    puts: AtomicU64,
    put_bytes: AtomicU64,
    gets: AtomicU64,
    got_bytes: AtomicU64,
    publishes: AtomicU64,
}

#[derive(Debug, Default)]
struct Counters {
    verbs: [AtomicU64; VerbKind::ALL.len()],
    lanes: [LaneCounters; LaneClass::ALL.len()],
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

/// What the ports that share this handle did. Cheap to clone; may be read from any thread at any time.
///
/// Verbs that failed are not counted. As a [`Decorate`] it makes every port of a machine count here.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    counters: Arc<Counters>,
}

impl Counts {
    /// All zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Verbs of one kind.
    pub fn verbs(&self, kind: VerbKind) -> u64 {
        self.counters.verbs[kind as usize].load(Relaxed)
    }

    /// What went over the lanes of one class.
    pub fn lanes(&self, class: LaneClass) -> LaneCounts {
        let counters = &self.counters.lanes[class as usize];
        let publishes = counters.publishes.load(Relaxed);
        LaneCounts {
            puts: counters.puts.load(Relaxed),
            put_bytes: counters.put_bytes.load(Relaxed),
            gets: counters.gets.load(Relaxed),
            got_bytes: counters.got_bytes.load(Relaxed),
            publishes,
            published_bytes: publishes * CELL_BYTES,
        }
    }

    /// Bytes read out of the own window.
    pub fn read_bytes(&self) -> u64 {
        self.counters.read_bytes.load(Relaxed)
    }

    /// Bytes written into the own window.
    pub fn written_bytes(&self) -> u64 {
        self.counters.written_bytes.load(Relaxed)
    }

    fn verb(&self, kind: VerbKind) {
        self.counters.verbs[kind as usize].fetch_add(1, Relaxed);
    }

    fn lane(&self, lane: LaneId) -> &LaneCounters {
        &self.counters.lanes[LaneClass::of(lane.kind) as usize]
    }
}

impl Decorate for Counts {
    type Port<P: Port> = Counted<P>;

    fn decorate<P: Port>(&self, port: P, _rank: Rank, _opening: &Opening) -> Counted<P> {
        Counted::new(port, self.clone())
    }
}

/// A port that counts its verbs and their bytes in a [`Counts`]. Counting allocates nothing.
#[derive(Debug)]
pub struct Counted<P> {
    port: P,
    counts: Counts,
}

impl<P: Port> Counted<P> {
    /// `port`, counted in `counts`.
    pub const fn new(port: P, counts: Counts) -> Self {
        Self { port, counts }
    }
}

impl<P: Port> Port for Counted<P> {
    fn now(&self) -> Nanos {
        self.port.now()
    }

    fn peek(&self, cell: Cell) -> u64 {
        self.counts.verb(VerbKind::Peek);
        self.port.peek(cell)
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        let met = self.port.wait_any(needs).await?;
        self.counts.verb(VerbKind::Wait);
        Ok(met)
    }

    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let ticket = self.port.put(lane, from, to).await?;
        self.counts.verb(VerbKind::Put);
        self.counts.lane(lane).puts.fetch_add(1, Relaxed);
        self.counts.lane(lane).put_bytes.fetch_add(from.len, Relaxed);
        Ok(ticket)
    }

    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        let ticket = self.port.get(lane, from, to).await?;
        self.counts.verb(VerbKind::Get);
        self.counts.lane(lane).gets.fetch_add(1, Relaxed);
        self.counts.lane(lane).got_bytes.fetch_add(from.len, Relaxed);
        Ok(ticket)
    }

    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        self.port.publish(lane, cell, value).await?;
        self.counts.verb(VerbKind::Publish);
        self.counts.lane(lane).publishes.fetch_add(1, Relaxed);
        Ok(())
    }

    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        self.port.flush(lane, upto).await?;
        self.counts.verb(VerbKind::Flush);
        Ok(())
    }

    async fn put_units(&mut self, lane: LaneId, from: Span, to: Offset, tag: Tag) -> Result<Ticket, Fault> {
        let ticket = self.port.put_units(lane, from, to, tag).await?;
        self.counts.verb(VerbKind::Put);
        self.counts.lane(lane).puts.fetch_add(1, Relaxed);
        self.counts.lane(lane).put_bytes.fetch_add(unit_bytes(from.len), Relaxed);
        Ok(ticket)
    }

    fn poll_units(&self, units: &Units, into: &mut [u8]) -> Result<bool, Fault> {
        let come = self.port.poll_units(units, into)?;
        self.counts.verb(VerbKind::Peek);
        Ok(come)
    }

    async fn wait_units(&mut self, units: &[Units], or: &[Need]) -> Result<usize, Fault> {
        let met = self.port.wait_units(units, or).await?;
        self.counts.verb(VerbKind::Wait);
        Ok(met)
    }

    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.port.read(from, into)?;
        self.counts.verb(VerbKind::Read);
        self.counts.counters.read_bytes.fetch_add(into.len() as u64, Relaxed);
        Ok(())
    }

    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.port.write(to, bytes)?;
        self.counts.verb(VerbKind::Write);
        self.counts.counters.written_bytes.fetch_add(bytes.len() as u64, Relaxed);
        Ok(())
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
    use super::*;
    use crate::machine::loopback::{Loopback, PROBE, PROBE_LANE, WINDOW, finish};
    use crate::port::LaneKind;

    #[test]
    fn verbs_and_bytes_are_counted_by_kind_and_lane() {
        let counts = Counts::new();
        let mut port = Counted::new(Loopback::new(), counts.clone());
        let credit = LaneId { peer: Rank(0), kind: LaneKind::Credit(3) };
        port.write(Offset(0), &[7; 24]).unwrap();
        let ticket = finish(port.put(PROBE_LANE, Offset(0).span(16), Offset(64))).unwrap();
        finish(port.put(PROBE_LANE, Offset(0).span(8), Offset(80))).unwrap();
        finish(port.get(credit, Offset(64).span(24), Offset(128))).unwrap();
        finish(port.publish(PROBE_LANE, PROBE, 5)).unwrap();
        finish(port.wait_any(&[Need { cell: PROBE, at_least: 5 }])).unwrap();
        finish(port.flush(PROBE_LANE, ticket)).unwrap();
        let mut bytes = [0; 24];
        port.read(Offset(128), &mut bytes).unwrap();
        assert_eq!((bytes, port.peek(PROBE)), ([7; 24], 5), "the port underneath did its work");

        let verbs = VerbKind::ALL.map(|kind| counts.verbs(kind));
        assert_eq!(verbs, [1, 1, 2, 1, 1, 1, 1, 1]);
        let data = LaneCounts { puts: 2, put_bytes: 24, publishes: 1, published_bytes: 8, ..LaneCounts::default() };
        assert_eq!(counts.lanes(LaneClass::Data), data);
        assert_eq!(counts.lanes(LaneClass::Credit), LaneCounts { gets: 1, got_bytes: 24, ..LaneCounts::default() });
        assert_eq!(counts.lanes(LaneClass::Control), LaneCounts::default());
        assert_eq!((counts.read_bytes(), counts.written_bytes()), (24, 24));
    }

    #[test]
    fn failed_verbs_do_not_count() {
        let counts = Counts::new();
        let mut port = Counted::new(Loopback::new(), counts.clone());
        assert!(finish(port.put(PROBE_LANE, Offset(0).span(1), Offset(WINDOW))).is_err());
        assert!(port.write(Offset(WINDOW), &[1]).is_err());
        assert!(finish(port.wait_any(&[Need { cell: PROBE, at_least: 1 }])).is_err());
        assert!(VerbKind::ALL.iter().all(|&kind| counts.verbs(kind) == 0));
        assert_eq!(counts.lanes(LaneClass::Data), LaneCounts::default());
    }
}
