//! What both ends of rings did on devices, held against the cursors of [`ep_core::ring`].
//!
//! Each end's events are in the order in which it acted. They are replayed on the cursors that the protocol has for that end: a slot is
//! filled only where the cursor knows of a free one, published is what was filled, read what was seen, and credited what was
//! read. What one end says it saw, the other must have said.

use std::collections::BTreeMap;

use ep_core::Rank;
use ep_core::ring::{Consumer, Geometry, Producer};

use super::{RingEvent, Step};

/// A ring on which something happened that the rules do not allow.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("ring of rank {writer} into rank {owner}, track {track}: {what}")]
pub struct RingFault {
    /// Who fills it.
    pub writer: Rank,
    /// In whose window it lies.
    pub owner: Rank,
    /// Its number.
    pub track: u32,
    /// What happened.
    pub what: String,
}

/// Slots that were filled and read, by writer, owner, track and operation.
pub type SlotsOfRings = BTreeMap<(Rank, Rank, u32, u64), u64>;

/// Writer, owner, track.
type Ring = (Rank, Rank, u32);

/// What is known of one ring.
#[derive(Default)]
struct Ends {
    filling: Vec<RingEvent>,
    emptying: Vec<RingEvent>,
}

/// Checks the events of all ranks, `[ranks]`, of rings of `geometry` that were empty before the first, and counts what
/// they carried.
///
/// # Errors
/// The first [`RingFault`].
pub fn check_rings(events: &[Vec<RingEvent>], geometry: Geometry) -> Result<SlotsOfRings, RingFault> {
    let mut rings: BTreeMap<Ring, Ends> = BTreeMap::new();
    for (me, events) in (0..).map(Rank).zip(events) {
        for event in events {
            match event.step {
                None => {
                    let what = "an event that is none".to_owned();
                    return Err(RingFault { writer: me, owner: event.peer, track: event.track, what });
                }
                Some(Step::Fills | Step::Filled | Step::Published | Step::SawHead) => {
                    rings.entry((me, event.peer, event.track)).or_default().filling.push(*event);
                }
                Some(_) => rings.entry((event.peer, me, event.track)).or_default().emptying.push(*event),
            }
        }
    }
    let mut rows = BTreeMap::new();
    for ((writer, owner, track), ends) in rings {
        let fault = |what| RingFault { writer, owner, track, what };
        let filled = check_filling(&ends.filling, geometry).map_err(fault)?;
        let read = check_emptying(&ends.emptying, geometry).map_err(fault)?;
        check_both(&ends, &filled, &read).map_err(fault)?;
        rows.extend(filled.into_iter().map(|(op, slots)| ((writer, owner, track, op), slots)));
    }
    Ok(rows)
}

/// Slots of each operation.
type Slots = BTreeMap<u64, u64>;

/// Replays the filling end.
fn check_filling(events: &[RingEvent], geometry: Geometry) -> Result<Slots, String> {
    let (mut cursor, mut published, mut slots) = (Producer::new(geometry), 0, Slots::new());
    for event in events {
        let RingEvent { count, op, .. } = *event;
        match event.step {
            Some(Step::Fills) => {
                expect("slots filled before", count, cursor.tail())?;
                slots.entry(op).or_default();
            }
            Some(Step::SawHead) => cursor.saw_head(count).map_err(|overrun| overrun.to_string())?,
            Some(Step::Filled) => {
                if cursor.slot().is_none() {
                    return Err(format!("slot {count} was filled while the ring was full"));
                }
                let _due = cursor.push();
                expect("slots filled", count, cursor.tail())?;
                *slots.entry(op).or_default() += 1;
                if cursor.tail() - published > u64::from(geometry.chunk) {
                    return Err(format!("{} slots filled and not published", cursor.tail() - published));
                }
            }
            _ => {
                expect("tail published", count, cursor.tail())?;
                published = count;
            }
        }
    }
    expect("tail published at the end", published, cursor.tail())?;
    Ok(slots)
}

/// Replays the emptying end.
fn check_emptying(events: &[RingEvent], geometry: Geometry) -> Result<Slots, String> {
    let (mut cursor, mut returned, mut slots) = (Consumer::new(geometry), 0, Slots::new());
    for event in events {
        let RingEvent { count, op, .. } = *event;
        match event.step {
            Some(Step::Empties) => {
                expect("slots read before", count, cursor.head())?;
                slots.entry(op).or_default();
            }
            Some(Step::SawTail) => cursor.saw_tail(count).map_err(|overrun| overrun.to_string())?,
            Some(Step::Read) => {
                if cursor.slot().is_none() {
                    return Err(format!("slot {count} was read before it was known to be filled"));
                }
                let _due = cursor.pop();
                expect("slots read", count, cursor.head())?;
                *slots.entry(op).or_default() += 1;
                if cursor.head() - returned > u64::from(geometry.credit) {
                    return Err(format!("{} slots read and not credited", cursor.head() - returned));
                }
            }
            _ => {
                expect("head published", count, cursor.head())?;
                returned = count;
            }
        }
    }
    expect("head published at the end", returned, cursor.head())?;
    Ok(slots)
}

/// What one end saw, the other published; both moved the same.
fn check_both(ends: &Ends, filled: &Slots, read: &Slots) -> Result<(), String> {
    if filled != read {
        return Err(format!("by operation {filled:?} slots were filled, {read:?} read"));
    }
    let said = |events: &[RingEvent], step: Step, seen: &[RingEvent], saw: Step| {
        let said: Vec<u64> = events.iter().filter(|event| event.step == Some(step)).map(|event| event.count).collect();
        let unsaid =
            seen.iter().find(|event| event.step == Some(saw) && event.count > 0 && !said.contains(&event.count));
        unsaid.map_or(Ok(()), |event| Err(format!("{} was seen ({saw:?}) and never published", event.count)))
    };
    said(&ends.filling, Step::Published, &ends.emptying, Step::SawTail)?;
    said(&ends.emptying, Step::Credited, &ends.filling, Step::SawHead)
}

fn expect(what: &str, seen: u64, right: u64) -> Result<(), String> {
    if seen == right { Ok(()) } else { Err(format!("{what}: {seen}, expected {right}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { slots: 2, chunk: 1, credit: 2 };

    fn events(peer: u32, steps: &[(Step, u64)]) -> Vec<RingEvent> {
        let event = |&(step, count): &(Step, u64)| RingEvent {
            step: Some(step),
            peer: Rank(peer),
            track: 0,
            block: 0,
            count,
            op: 1,
        };
        steps.iter().map(event).collect()
    }

    /// Rank 0 fills three slots of rank 1's ring of two.
    fn right() -> [Vec<(Step, u64)>; 2] {
        let filling = [
            (Step::Fills, 0),
            (Step::SawHead, 0),
            (Step::Filled, 1),
            (Step::Published, 1),
            (Step::Filled, 2),
            (Step::Published, 2),
            (Step::SawHead, 2),
            (Step::Filled, 3),
            (Step::Published, 3),
        ];
        let emptying = [
            (Step::Empties, 0),
            (Step::SawTail, 2),
            (Step::Read, 1),
            (Step::Read, 2),
            (Step::Credited, 2),
            (Step::SawTail, 3),
            (Step::Read, 3),
            (Step::Credited, 3),
        ];
        [filling.to_vec(), emptying.to_vec()]
    }

    fn check(ends: &[Vec<(Step, u64)>; 2]) -> Result<u64, String> {
        let rows = check_rings(&[events(1, &ends[0]), events(0, &ends[1])], GEOMETRY);
        rows.map(|rows| rows[&(Rank(0), Rank(1), 0, 1)]).map_err(|fault| fault.to_string())
    }

    #[test]
    fn what_the_rules_allow_is_counted() {
        assert_eq!(check(&right()), Ok(3));
    }

    #[test]
    fn every_rule_is_looked_at() {
        let broken = |end: usize, at: usize, step: Option<(Step, u64)>| {
            let mut ends = right();
            match step {
                Some(step) => ends[end].insert(at, step),
                None => drop(ends[end].remove(at)),
            }
            check(&ends).unwrap_err()
        };
        assert!(broken(0, 6, None).contains("slot 3 was filled while the ring was full"));
        assert!(broken(0, 2, Some((Step::Published, 1))).contains("tail published: 1, expected 0"));
        assert!(broken(0, 3, None).contains("2 slots filled and not published"));
        assert!(broken(0, 8, None).contains("tail published at the end: 2, expected 3"));
        assert!(broken(0, 1, Some((Step::SawHead, 1))).contains("a ring counter stands at 1, at most 0"));
        assert!(broken(1, 1, None).contains("slot 1 was read before it was known to be filled"));
        assert!(broken(1, 3, Some((Step::Credited, 2))).contains("head published: 2, expected 1"));
        assert!(broken(1, 7, None).contains("head published at the end: 2, expected 3"));
        assert!(broken(1, 1, Some((Step::SawTail, 3))).contains("at most 2"));
        let mut ends = right();
        ends[1].truncate(5);
        assert!(check(&ends).unwrap_err().contains("slots were filled"));
        let mut ends = right();
        ends[0][6].1 = 1;
        assert!(check(&ends).unwrap_err().contains("1 was seen (SawHead) and never published"));
    }
}
