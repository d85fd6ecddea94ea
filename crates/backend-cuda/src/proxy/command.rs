//! Commands: two words of 64 bits, whose form `ep_far_proxy.h` has, too.

use ep_core::port::{Offset, Span};

const OFFSET_BITS: u32 = 42;
const LOW_BITS: u32 = 19;
const KIND_SHIFT: u32 = 61;
/// The top bit of either word.
const PHASE: u64 = 1 << 63;
/// Of the second word: everything up to this command may be taken.
const BELL: u64 = 1 << 62;
const PUT: u64 = 1;
const PUBLISH: u64 = 2;

/// What a device asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// A copy of own bytes into the peer's window.
    Put {
        /// Of the own window.
        from: Span,
        /// In the peer's.
        to: Offset,
    },
    /// A cell at the peer becomes these bits.
    Publish {
        /// The cell.
        at: Offset,
        /// Stamp and value.
        bits: u64,
    },
}

/// The phase of the command with this number, of a FIFO of `2^log_slots`: 1 in its first round, so that zeroed memory has none.
pub const fn phase(index: u64, log_slots: u32) -> bool {
    (index >> log_slots) & 1 == 0
}

/// Whether both words are there: they have this phase.
pub const fn is_whole(words: [u64; 2], phase: bool) -> bool {
    let wanted = if phase { PHASE } else { 0 };
    words[0] & PHASE == wanted && words[1] & PHASE == wanted
}

/// Whether a command has a bell.
pub const fn rings(words: [u64; 2]) -> bool {
    words[1] & BELL != 0
}

const fn low(word: u64, bits: u32) -> u64 {
    word & ((1 << bits) - 1)
}

impl Command {
    /// What two words say, whatever their phase; none where that is no command.
    pub const fn of(words: [u64; 2]) -> Option<Self> {
        let [first, second] = [words[0] & !PHASE, words[1] & !(PHASE | BELL)];
        let (offset, piece) = (Offset(low(first >> LOW_BITS, OFFSET_BITS)), low(first, LOW_BITS));
        match first >> KIND_SHIFT {
            PUT => {
                let len = (second >> OFFSET_BITS) << LOW_BITS | piece;
                Some(Self::Put { from: Span { offset, len }, to: Offset(low(second, OFFSET_BITS)) })
            }
            PUBLISH => Some(Self::Publish { at: offset, bits: second << LOW_BITS | piece }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_whole_when_both_words_have_the_phase_of_the_round() {
        let [old, new] = [0, PHASE];
        assert!(is_whole([new, new], true) && is_whole([old, old], false));
        for half in [[new, old], [old, new]] {
            assert!(!is_whole(half, true) && !is_whole(half, false), "{half:?}");
        }
        assert!(!is_whole([0, 0], phase(0, 3)), "zeroed memory, in the first round");
        assert_eq!([0, 7, 8, 15, 16].map(|index| phase(index, 3)), [true, true, false, false, true]);
        assert_eq!([0, 1, 2].map(|index| phase(index, 0)), [true, false, true], "one slot");
    }

    #[test]
    fn words_that_are_no_command_are_none() {
        for words in [[0, 0], [PHASE, PHASE], [3 << KIND_SHIFT, 0], [u64::MAX; 2]] {
            assert_eq!(Command::of(words), None, "{words:x?}");
        }
        let put = Command::of([PUT << KIND_SHIFT | 5 << LOW_BITS | 7, 9 | PHASE]);
        assert_eq!(put, Some(Command::Put { from: Offset(5).span(7), to: Offset(9) }));
    }
}
