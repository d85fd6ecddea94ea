//! Whom a rank says, to all ranks, that it waits for. Low latency lives by that; where it is on, throughput mode says and hears it, too:
//! the one that a rank waits for in one mode may wait in the other.

use crate::port::{Cell, Counter, LaneId, LaneKind, Port};
use crate::topology::Rank;

/// What a rank has said, for the life of a generation.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Voice {
    serial: u64,
    /// Whom it last said that it waits for.
    waits_for: Option<Rank>,
}

/// The cell in which `writer` says it.
pub(crate) const fn word_of(writer: Rank) -> Cell {
    Cell::new(writer, LaneKind::Watch, Counter::Waiting)
}

/// Whom a cell's value names.
pub(crate) const fn named(value: u64) -> Option<Rank> {
    if value == 0 { None } else { Some(Rank((value & 0xffff) as u32)) }
}

impl Voice {
    /// Whether it has said that it waits.
    pub(crate) const fn has_named(&self) -> bool {
        self.waits_for.is_some()
    }

    /// Tells `peers` that `me` waits for `rank`, or, by its own name, that it goes on; unless that is what it said last.
    pub(crate) async fn say(&mut self, me: Rank, peers: &[Rank], port: &mut impl Port, rank: Rank) {
        let waits_for = (rank != me).then_some(rank);
        if self.waits_for == waits_for {
            return;
        }
        self.waits_for = waits_for;
        self.serial += 1;
        let value = self.serial << 16 | u64::from(rank.0);
        for &peer in peers {
            // Who cannot hear it is somebody else's trouble.
            let _ = port.publish(LaneId { peer, kind: LaneKind::Watch }, word_of(me), value).await;
        }
    }
}
