//! Which pages of a window exist.

/// Bits of an entry that hold a page's number, counted from 1; its place in the window lies above them.
const NUMBER: u32 = 26;
/// An entry of no page.
const FREE: u64 = 0;

/// From a page's place to its number: a table with open addressing, one word a page, so that a look mostly costs one cache
/// line. Pages are never removed.
#[derive(Debug, Default)]
pub(crate) struct Pages {
    /// A power of two, at least 4/3 of the pages; or none.
    entries: Vec<u64>,
    len: u32,
}

impl Pages {
    /// Pages that there are.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The number of the page at `place`, if it exists.
    pub(crate) fn number(&self, place: u64) -> Option<u32> {
        if self.entries.is_empty() {
            return None;
        }
        let entry = self.entries[self.find(place)];
        (entry != FREE).then_some((entry as u32 & ((1 << NUMBER) - 1)).wrapping_sub(1))
    }

    /// The word where a look for the page at `place` begins.
    pub(crate) fn first_look(&self, place: u64) -> u64 {
        self.entries.get(self.start(place)).copied().unwrap_or(FREE)
    }

    /// Gives the next number to the page at `place`, which did not exist.
    ///
    /// # Panics
    /// Beyond 2^26 pages: 16 GiB of one window.
    pub(crate) fn add(&mut self, place: u64) -> u32 {
        if 3 * self.entries.len() <= 4 * self.len as usize {
            self.grow();
        }
        let number = self.len;
        self.len += 1;
        assert!(self.len < 1 << NUMBER, "a window has more than 2^{NUMBER} pages of memory");
        let at = self.find(place);
        self.entries[at] = place << NUMBER | u64::from(self.len);
        number
    }

    /// Where the entry of the page at `place` lies, unless others lie there.
    fn start(&self, place: u64) -> usize {
        (spread(place / LINE) * LINE as usize + (place % LINE) as usize) & self.entries.len().wrapping_sub(1)
    }

    /// The entry of the page at `place`, or the free one where it would be.
    fn find(&self, place: u64) -> usize {
        let mask = self.entries.len() - 1;
        let mut at = self.start(place);
        while self.entries[at] != FREE && self.entries[at] >> NUMBER != place {
            at = (at + 1) & mask;
        }
        at
    }

    fn grow(&mut self) {
        let size = (2 * self.entries.len()).max(16);
        let entries = std::mem::replace(&mut self.entries, vec![FREE; size]);
        for entry in entries.into_iter().filter(|&entry| entry != FREE) {
            let at = self.find(entry >> NUMBER);
            self.entries[at] = entry;
        }
    }
}

/// Entries in a cache line: neighbours share one.
const LINE: u64 = 8;

/// Rows lie at regular distances: the upper half of a product has all of their bits in it.
const fn spread(line: u64) -> usize {
    (line.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_keep_the_numbers_they_were_given() {
        let mut pages = Pages::default();
        // The last page of the largest window, neighbours, and pages far apart.
        let places: Vec<u64> = (0..1000).chain((1..1000).map(|at| at << 20)).chain([(1 << 38) - 1]).collect();
        for (at, &place) in (0u32..).zip(&places) {
            assert_eq!((pages.number(place), pages.add(place)), (None, at));
        }
        for (at, &place) in (0u32..).zip(&places) {
            assert_eq!(pages.number(place), Some(at));
        }
        assert_eq!((pages.len(), pages.number(1_000_000)), (places.len() as u32, None));
    }
}
