//! Completions, as the host reads them: after kernels have ended, and to say why a lane broke.

use ep_core::LaneCause;

/// Bytes of one.
pub(crate) const BYTES: usize = 64;
const SYNDROME: usize = 55;
const COUNTER: usize = 60;
const OPCODE_OWNER: usize = 63;
const INVALID: u8 = 15;
const DONE: u8 = 0;
/// The requester's error.
const ERROR: u8 = 13;

/// What became of an element.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Nothing yet.
    UnderWay,
    /// It was carried out, and all before it.
    Done,
    /// It was not, or one before it.
    Failed(LaneCause),
}

/// What the place of the completion of element `index` says, of a queue with `2^log_slots` places.
pub(crate) fn outcome(entry: &[u8; BYTES], index: u64, log_slots: u32) -> Outcome {
    let (opcode, owner) = (entry[OPCODE_OWNER] >> 4, entry[OPCODE_OWNER] & 1);
    if opcode == INVALID || u64::from(owner) != index >> log_slots & 1 {
        return Outcome::UnderWay;
    }
    let counter = u16::from_be_bytes([entry[COUNTER], entry[COUNTER + 1]]);
    match opcode {
        DONE if counter == index as u16 => Outcome::Done,
        ERROR => Outcome::Failed(cause(entry[SYNDROME])),
        // Of another element, or of none that was posted.
        other => Outcome::Failed(LaneCause::Other(u32::from(other) << 8)),
    }
}

/// Why a lane broke, by the adapter's syndrome.
pub(crate) const fn cause(syndrome: u8) -> LaneCause {
    match syndrome {
        0x01 | 0x02 | 0x06 => LaneCause::LocalRequest,
        0x04 | 0x11 => LaneCause::LocalAccess,
        0x05 => LaneCause::Flushed,
        0x12 => LaneCause::RemoteRequest,
        0x13 => LaneCause::RemoteAccess,
        0x10 | 0x14 => LaneCause::RemoteOperation,
        0x15 => LaneCause::NoAnswer,
        0x16 => LaneCause::NotReady,
        other => LaneCause::Other(other as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(opcode: u8, owner: u8, counter: u16, syndrome: u8) -> [u8; BYTES] {
        let mut entry = [0; BYTES];
        entry[SYNDROME] = syndrome;
        entry[COUNTER..COUNTER + 2].copy_from_slice(&counter.to_be_bytes());
        entry[OPCODE_OWNER] = opcode << 4 | owner;
        entry
    }

    #[test]
    fn a_completion_is_there_when_its_owner_is_that_of_the_round() {
        for (index, owner) in [(0, 0), (63, 0), (64, 1), (127, 1), (128, 0), (65_600, 1)] {
            let counter = index as u16;
            assert_eq!(outcome(&entry(DONE, owner, counter, 0), index, 6), Outcome::Done, "{index}");
            assert_eq!(outcome(&entry(DONE, 1 - owner, counter, 0), index, 6), Outcome::UnderWay, "{index}");
            assert_eq!(outcome(&entry(INVALID, owner, counter, 0), index, 6), Outcome::UnderWay, "{index}");
        }
        assert_eq!(outcome(&[0xff; BYTES], 64, 6), Outcome::UnderWay, "memory of completions that was never written");
    }

    #[test]
    fn an_error_is_no_completion_that_is_late_and_one_of_another_element_is_none() {
        assert_eq!(outcome(&entry(ERROR, 0, 3, 0x15), 3, 6), Outcome::Failed(LaneCause::NoAnswer));
        assert_eq!(outcome(&entry(DONE, 0, 4, 0), 3, 6), Outcome::Failed(LaneCause::Other(0)));
        assert_eq!(outcome(&entry(2, 0, 3, 0), 3, 6), Outcome::Failed(LaneCause::Other(0x200)));
    }

    #[test]
    fn every_syndrome_has_its_cause() {
        let causes = [
            (0x01, LaneCause::LocalRequest),
            (0x02, LaneCause::LocalRequest),
            (0x04, LaneCause::LocalAccess),
            (0x05, LaneCause::Flushed),
            (0x10, LaneCause::RemoteOperation),
            (0x11, LaneCause::LocalAccess),
            (0x12, LaneCause::RemoteRequest),
            (0x13, LaneCause::RemoteAccess),
            (0x14, LaneCause::RemoteOperation),
            (0x15, LaneCause::NoAnswer),
            (0x16, LaneCause::NotReady),
            (0x22, LaneCause::Other(0x22)),
        ];
        for (syndrome, expected) in causes {
            assert_eq!(cause(syndrome), expected, "{syndrome:#x}");
        }
    }
}
