//! What keepers of memory say to each other.

use ep_core::Rank;

/// Of a piece of the speaker's window, or of the hearer's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Said {
    /// The speaker's has memory from byte `at` on, which comes with it.
    Back {
        at: u64,
        bytes: u64,
    },
    /// The hearer's is mapped here, or it cannot be.
    Backed {
        at: u64,
    },
    Refused {
        at: u64,
    },
    /// The speaker's has none any more.
    Bare {
        at: u64,
    },
}

impl Said {
    /// What is sent, by rank `me`.
    pub(super) fn to_bytes(self, me: Rank) -> [u8; 21] {
        let (kind, at, bytes) = match self {
            Self::Back { at, bytes } => (1, at, bytes),
            Self::Backed { at } => (2, at, 0),
            Self::Refused { at } => (3, at, 0),
            Self::Bare { at } => (4, at, 0),
        };
        let mut said = [0; 21];
        said[0] = kind;
        said[1..5].copy_from_slice(&me.0.to_le_bytes());
        said[5..13].copy_from_slice(&at.to_le_bytes());
        said[13..].copy_from_slice(&bytes.to_le_bytes());
        said
    }

    /// Who said what; none of what is no such thing.
    pub(super) fn from_bytes(said: &[u8]) -> Option<(Rank, Self)> {
        let (&kind, rest) = said.split_first()?;
        let (rank, rest) = rest.split_first_chunk()?;
        let (at, rest) = rest.split_first_chunk()?;
        let (rank, at, bytes) = (Rank(u32::from_le_bytes(*rank)), u64::from_le_bytes(*at), rest.try_into().ok()?);
        let said = match kind {
            1 => Self::Back { at, bytes: u64::from_le_bytes(bytes) },
            2 => Self::Backed { at },
            3 => Self::Refused { at },
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
        let at = 0x0123_4567_89ab_cdef;
        for said in [Said::Back { at, bytes: !at }, Said::Backed { at }, Said::Refused { at }, Said::Bare { at }] {
            assert_eq!(Said::from_bytes(&said.to_bytes(Rank(7))), Some((Rank(7), said)));
        }
    }

    #[test]
    fn what_is_no_such_thing_is_not_heard() {
        let said = Said::Bare { at: 1 }.to_bytes(Rank(0));
        for wrong in [&said[..20], &[], &[9; 21], &[0; 22]] {
            assert_eq!(Said::from_bytes(wrong), None);
        }
    }
}
