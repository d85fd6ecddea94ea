//! What keepers of memory say to each other.

use ep_core::Rank;

/// Of a piece of the speaker's window, or of the hearer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Said {
    /// The speaker's has memory from byte `at` on, which comes with it; under a number of its own.
    Back {
        at: u64,
        bytes: u64,
        number: u64,
    },
    /// The hearer's of that number is mapped here, or it cannot be.
    Backed {
        number: u64,
    },
    Refused {
        number: u64,
    },
    /// The speaker's has none any more.
    Bare {
        at: u64,
    },
}

impl Said {
    const BYTES: usize = 29;

    /// What is sent, by rank `me`.
    pub(super) fn to_bytes(self, me: Rank) -> [u8; Self::BYTES] {
        let (kind, at, bytes, number) = match self {
            Self::Back { at, bytes, number } => (1, at, bytes, number),
            Self::Backed { number } => (2, 0, 0, number),
            Self::Refused { number } => (3, 0, 0, number),
            Self::Bare { at } => (4, at, 0, 0),
        };
        let mut said = [0; Self::BYTES];
        said[0] = kind;
        said[1..5].copy_from_slice(&me.0.to_le_bytes());
        said[5..13].copy_from_slice(&at.to_le_bytes());
        said[13..21].copy_from_slice(&bytes.to_le_bytes());
        said[21..].copy_from_slice(&number.to_le_bytes());
        said
    }

    /// Who said what; none of what is no such thing.
    pub(super) fn from_bytes(said: &[u8]) -> Option<(Rank, Self)> {
        let (&kind, rest) = said.split_first()?;
        let (rank, rest) = rest.split_first_chunk()?;
        let (at, rest) = rest.split_first_chunk()?;
        let (bytes, number) = rest.split_first_chunk()?;
        let [at, bytes, number] = [*at, *bytes, number.try_into().ok()?].map(u64::from_le_bytes);
        let rank = Rank(u32::from_le_bytes(*rank));
        let said = match kind {
            1 => Self::Back { at, bytes, number },
            2 => Self::Backed { number },
            3 => Self::Refused { number },
            4 => Self::Bare { at },
            _ => return None,
        };
        Some((rank, said))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard() {
        let at = 0x0123_4567_89ab_cdef_u64;
        let number = at.rotate_left(8);
        for said in [
            Said::Back { at, bytes: !at, number },
            Said::Backed { number },
            Said::Refused { number },
            Said::Bare { at },
        ] {
            assert_eq!(Said::from_bytes(&said.to_bytes(Rank(7))), Some((Rank(7), said)));
        }
    }

    #[test]
    fn what_is_no_such_thing_is_not_heard() {
        let said = Said::Bare { at: 1 }.to_bytes(Rank(0));
        for wrong in [&said[..28], &[], &[9; Said::BYTES], &[0; Said::BYTES + 1]] {
            assert_eq!(Said::from_bytes(wrong), None);
        }
    }
}
