//! What a rank tells its peers when it cannot go on: one 48-bit cell value.

use crate::error::Phase;
use crate::topology::Rank;

/// A suspicion or a verdict about one operation, as a value of [`crate::port::Counter::Alarm`].
///
/// Bits, high to low: `serial` 15, `verdict` 1, `op` 12 (its low bits: ranks are never that far apart), `phase` 4,
/// `in_circle` 1, `peer` 15. The serial rises with every alarm of a rank in a generation, so the value does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Alarm {
    /// Counts this rank's alarms, from 1.
    pub serial: u16,
    /// Whether the sender has failed, or still waits.
    pub verdict: bool,
    /// Low bits of the operation.
    pub op: u16,
    /// What the sender waited for.
    pub phase: Phase,
    /// Of a suspicion, whether that rank waits itself, in a circle ([`Wait`](crate::blame::Wait)). Of a verdict, that the sender has recovered without
    /// that rank, and has come through all operations before `op`.
    pub in_circle: bool,
    /// The rank it waited for, or blames.
    pub peer: Rank,
}

const SERIALS: u16 = 1 << 15;
const OPS: u64 = 1 << 12;

impl Alarm {
    /// The most alarms of one rank in one generation; further suspicions are not sent.
    pub const MAX_SERIAL: u16 = SERIALS - 1;

    /// Whether its sender has recovered without rank `me`.
    pub const fn leaves(&self, me: Rank) -> bool {
        self.verdict && self.in_circle && self.peer.0 == me.0
    }

    /// Whether it ends operation `op` of rank `me`: a verdict, but for one of who goes on without `me` and has come through `op`.
    pub const fn ends(&self, op: u64, me: Rank) -> bool {
        let ahead = (self.op as u64 + OPS - op % OPS) % OPS;
        let came_through = ahead > 0 && ahead < OPS / 2;
        self.verdict && !(self.leaves(me) && came_through)
    }

    /// The bits of `op` that an alarm carries.
    pub const fn op_bits(op: u64) -> u16 {
        (op % OPS) as u16
    }

    /// The cell value.
    pub const fn encode(self) -> u64 {
        (self.serial as u64) << 33
            | (self.verdict as u64) << 32
            | (self.op as u64) << 20
            | (self.phase as u64) << 16
            | (self.in_circle as u64) << 15
            | self.peer.0 as u64
    }

    /// Reads a cell value; none when it is no alarm.
    pub const fn decode(value: u64) -> Option<Self> {
        let serial = (value >> 33) as u16 & Self::MAX_SERIAL;
        if serial == 0 {
            return None;
        }
        Some(Self {
            serial,
            verdict: value >> 32 & 1 == 1,
            op: (value >> 20) as u16 & (OPS - 1) as u16,
            phase: Phase::of((value >> 16 & 15) as u32),
            in_circle: value >> 15 & 1 == 1,
            peer: Rank((value & 0x7fff) as u32),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_survive_the_cell() {
        for phase in Phase::ALL {
            for (verdict, in_circle) in [(false, false), (false, true), (true, false)] {
                let op = Alarm::op_bits(70_001);
                let alarm = Alarm { serial: 77, verdict, op, phase, in_circle, peer: Rank(16_383) };
                assert_eq!(Alarm::decode(alarm.encode()), Some(alarm));
                assert!(alarm.encode() < 1 << super::super::VALUE_BITS);
            }
        }
        assert_eq!(Alarm::decode(0), None);
    }

    #[test]
    fn who_has_come_through_an_operation_and_leaves_a_rank_does_not_end_it() {
        let (me, other) = (Rank(3), Rank(4));
        for (verdict, in_circle, peer, op, ends) in [
            (true, true, me, 5001, false),
            (true, true, me, 5000, true),
            (true, true, me, 4999, true),
            (true, false, me, 5001, true),
            (true, true, other, 5001, true),
            (false, true, me, 5000, false),
        ] {
            let alarm = Alarm { serial: 1, verdict, op: Alarm::op_bits(op), phase: Phase::Alarm, in_circle, peer };
            assert_eq!(alarm.ends(5000, me), ends, "{alarm:?}");
            assert_eq!(alarm.leaves(me), verdict && in_circle && peer == me, "{alarm:?}");
        }
    }
}
