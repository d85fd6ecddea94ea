//! How many rows a batch brings, before the counts are there: by what came before. A dispatch takes room for so many, and has its kernels enqueued
//! when the counts come.

/// What dispatches let expect of later ones.
#[derive(Debug)]
pub(super) struct Expected {
    /// Of batches of `2^(k-1)` to `2^k - 1` tokens: the most rows that came, less after a while in which fewer came; 0 before the first.
    most: [u32; 33],
    /// Dispatches whose kernels were enqueued ahead of their counts: those that had room for what came, and those that had not.
    ahead: (u64, u64),
    /// Batches for which nothing is expected.
    rest: u32,
}

/// By how much more than that there is room: a part, and rows.
const MORE: (u32, u32) = (16, 16);
/// Batches for which nothing is expected behind one that went another way, as a rank had no room.
const REST: u32 = 8;
/// After a batch with fewer rows, how much of the difference is forgotten: a part.
const FORGOTTEN: u32 = 8;

impl Default for Expected {
    fn default() -> Self {
        Self { most: [0; 33], ahead: (0, 0), rest: 0 }
    }
}

impl Expected {
    /// Whether the next batch is one of those for which nothing is expected.
    pub(super) const fn rests(&mut self) -> bool {
        let rests = self.rest > 0;
        self.rest = self.rest.saturating_sub(1);
        rests
    }

    /// Rows to have room for with a batch of so many tokens; none where nothing is known.
    pub(super) const fn rows(&self, tokens: u32) -> Option<u32> {
        match self.most[class(tokens)] {
            0 => None,
            most => Some(most.saturating_add(most / MORE.0).saturating_add(MORE.1)),
        }
    }

    /// So many came.
    pub(super) fn came(&mut self, tokens: u32, rows: u32) {
        let most = &mut self.most[class(tokens)];
        let now = if rows >= *most { rows } else { *most - (*most - rows).div_ceil(FORGOTTEN) };
        *most = now.max(1);
    }

    /// A batch went another way, as a rank had no room for it: so may the next ones.
    pub(super) const fn had_no_room(&mut self) {
        self.rest = REST;
    }

    /// Dispatches whose kernels were enqueued ahead: those that had room for what came, and those that had not.
    pub(super) const fn ahead(&self) -> (u64, u64) {
        self.ahead
    }

    /// A dispatch was enqueued ahead, and had room for what came, or not.
    pub(super) const fn went(&mut self, has_room: bool) {
        match has_room {
            true => self.ahead.0 += 1,
            false => self.ahead.1 += 1,
        }
    }
}

const fn class(tokens: u32) -> usize {
    (u32::BITS - tokens.leading_zeros()) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_is_expected_and_a_little_more() {
        let mut expected = Expected::default();
        assert_eq!(expected.rows(4096), None);
        expected.came(4096, 8000);
        assert_eq!((expected.rows(4096), expected.rows(8191)), (Some(8516), Some(8516)));
        assert_eq!((expected.rows(4095), expected.rows(8192)), (None, None), "batches of other sizes");
        expected.came(5000, 8100);
        assert_eq!(expected.rows(4096), Some(8622));
        for _ in 0..100 {
            expected.came(4096, 100);
        }
        assert_eq!(expected.rows(4096), Some(122), "one large batch is forgotten");
    }

    #[test]
    fn nothing_is_expected_for_a_while_behind_a_batch_without_room() {
        let mut expected = Expected::default();
        assert!(!expected.rests());
        expected.had_no_room();
        let rests = (0..100).take_while(|_| expected.rests()).count();
        assert_eq!(rests, REST as usize);
    }

    #[test]
    fn any_batch_has_a_class() {
        let mut expected = Expected::default();
        for (tokens, rows) in [(0, 0), (1, 5), (u32::MAX, u32::MAX)] {
            expected.came(tokens, rows);
            assert!(expected.rows(tokens).unwrap() >= rows);
        }
        for tokens in [0, 1, u32::MAX] {
            expected.came(tokens, 0);
            assert!(expected.rows(tokens).is_some(), "batches of {tokens} tokens are known");
        }
    }
}
