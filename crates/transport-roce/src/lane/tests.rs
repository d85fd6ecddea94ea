//! Of lanes without a network.

use std::cell::Cell;

use ep_core::Rank;
use ep_core::port::LaneKind;

use super::*;

#[test]
fn a_core_copies_nothing_that_lies_in_a_device() {
    let inside = |opcode, apart, bytes| travels_inside(opcode, Place { apart, ..Place::default() }, bytes, 64);
    assert!(inside(sys::WR_RDMA_WRITE, false, 64) && !inside(sys::WR_RDMA_WRITE, false, 65));
    assert!(!inside(sys::WR_RDMA_WRITE, true, 8) && !inside(sys::WR_FETCH_ADD, false, 8));
}

#[test]
fn identifiers_survive_the_adapter() {
    let lane = 12345;
    for event in [Event::Sent { last: true }, Event::Sent { last: false }, Event::Received { slot: 32767 }] {
        let identifier = Identifier { lane, connection: 0xabcde, event };
        assert_eq!(Identifier::of(identifier.bits()), identifier);
    }
}

/// A queue that takes what it is given, and counts how often it was rung.
#[derive(Default)]
struct Rung(Cell<u32>);

impl Queue for Rung {
    fn inline(&self) -> u32 {
        0
    }

    unsafe fn post_send(&self, _: *mut SendRequest) -> Result<(), (*mut SendRequest, i32)> {
        self.0.set(self.0.get() + 1);
        Ok(())
    }

    unsafe fn post_receive(&self, _: &mut sys::ReceiveRequest) -> Result<(), i32> {
        Ok(())
    }
}

fn lane() -> Lane<Rung> {
    let id = LaneId { peer: Rank(1), kind: LaneKind::Control };
    Lane::new(id, 0, Signal::Counting, Scratch { offset: 0, sends: 2 * BATCH as u32, receives: 4 })
}

/// Its first parts are posted before it is whole: their completion must not tell of it, or its source would be overwritten
/// while the last part is read.
#[test]
fn a_put_that_goes_with_two_doorbells_is_settled_by_the_second() {
    let mut lane = lane();
    lane.pair = Some(Rung::default());
    let rung = |lane: &Lane<Rung>| lane.pair.as_ref().map(|queue| queue.0.get());
    let ticket = lane.put(Place::default(), BATCH as u64 + 1, 0, 1);
    assert_eq!(rung(&lane), Some(1), "all parts but the last");
    lane.account.complete();
    assert!(!lane.is_settled(ticket), "its last part is not even posted");
    lane.post();
    assert!(rung(&lane) == Some(2) && !lane.is_settled(ticket));
    lane.account.complete();
    assert!(lane.is_settled(ticket) && lane.is_idle());
}

/// Where nothing is ordered, writes and records may come in any order.
#[test]
fn records_wait_for_writes_and_for_earlier_records() {
    let record = |number, after, bits| Record { number, after, at: 64, bits };
    let mut lane = lane();
    let mut raised = Vec::new();
    lane.waiting = vec![record(3, 2, 30), record(2, 2, 20)];
    lane.arrived = 2;
    lane.apply(|_, bits| raised.push(bits));
    assert!(raised.is_empty(), "the first has not come");
    lane.waiting.push(record(1, 1, 10));
    lane.apply(|_, bits| raised.push(bits));
    assert_eq!(raised, [10, 20, 30]);
    lane.waiting.push(record(4, 3, 40));
    lane.apply(|_, bits| raised.push(bits));
    assert_eq!(raised.len(), 3, "a write is missing");
    lane.arrived = 3;
    lane.apply(|_, bits| raised.push(bits));
    assert_eq!(raised, [10, 20, 30, 40]);
}

/// The peer's cells are zero again when a connection begins: a difference to what was raised on an earlier one would be
/// too small.
#[test]
fn nothing_of_a_connection_is_remembered_on_the_next() {
    let mut lane = lane();
    lane.remember(64, 5);
    (lane.writes, lane.records, lane.arrived, lane.applied) = (3, 1, 3, 1);
    lane.waiting.push(Record { number: 2, after: 3, at: 64, bits: 9 });
    lane.forget(7);
    assert_eq!(lane.remember(64, 5), 0);
    assert_eq!((lane.writes, lane.records, lane.arrived, lane.applied, lane.connection), (0, 0, 0, 0, 7));
    assert!(lane.waiting.is_empty() && lane.broken.is_none());
}

#[test]
fn differences_are_counted_from_what_was_raised_last() {
    let mut lane = lane();
    assert_eq!(lane.remember(64, 5), 0);
    assert_eq!(lane.remember(64, 9), 5);
    assert_eq!(lane.remember(128, 1), 0);
    assert_eq!(lane.remember(64, 9), 9);
}
