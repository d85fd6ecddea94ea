//! Windows as sparse pages: memory exists only where it was written.

use rustc_hash::FxHashMap;

/// What a byte that nobody wrote reads as: no number, no count and no bfloat16 that a protocol would hold by chance.
pub(crate) const POISON: u8 = 0xA5;

/// Bytes of a page, a power of two, as its exponent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PageSize(u32);

impl PageSize {
    /// For rows with payload. Small, because a page is filled when it is first written, and most windows of tests use
    /// little of each region.
    pub(crate) const ROWS: Self = Self(13);
    /// For rows without payload, which may lie far apart.
    pub(crate) const HEADERS: Self = Self(8);

    const fn bytes(self) -> usize {
        1 << self.0
    }

    /// The page of a byte, and its place there.
    const fn place(self, at: u64) -> (u64, usize) {
        (at >> self.0, at as usize & (self.bytes() - 1))
    }
}

type Page = Box<[u8]>;

/// One rank's window.
#[derive(Debug)]
pub(crate) struct Memory {
    /// First byte after the cells, which read zero before they are written.
    cells_end: u64,
    size: PageSize,
    pages: FxHashMap<u64, Page>,
}

impl Memory {
    /// A window that begins with `cells_end` bytes of cells. All windows that are copied between have pages of one size.
    pub(crate) fn new(cells_end: u64, size: PageSize) -> Self {
        Self { cells_end, size, pages: FxHashMap::default() }
    }

    /// Bytes of memory that stand behind the window.
    pub(crate) fn resident(&self) -> u64 {
        (self.pages.len() * self.size.bytes()) as u64
    }

    /// Copies bytes out; the range lies inside the window.
    pub(crate) fn read(&self, from: u64, into: &mut [u8]) {
        let mut at = from;
        let mut rest = into;
        while !rest.is_empty() {
            let (page, start) = self.size.place(at);
            let (piece, later) = rest.split_at_mut(rest.len().min(self.size.bytes() - start));
            match self.pages.get(&page) {
                Some(bytes) => piece.copy_from_slice(&bytes[start..start + piece.len()]),
                None => fill_untouched(at, self.cells_end, piece),
            }
            at += piece.len() as u64;
            rest = later;
        }
    }

    /// Copies bytes in; the range lies inside the window.
    pub(crate) fn write(&mut self, to: u64, bytes: &[u8]) {
        let mut at = to;
        let mut rest = bytes;
        while !rest.is_empty() {
            let (page, start) = self.size.place(at);
            let (piece, later) = rest.split_at(rest.len().min(self.size.bytes() - start));
            self.page_mut(page)[start..start + piece.len()].copy_from_slice(piece);
            at += piece.len() as u64;
            rest = later;
        }
    }

    /// The bits of the cell at `at`.
    pub(crate) fn load(&self, at: u64) -> u64 {
        let mut bits = [0; 8];
        self.read(at, &mut bits);
        u64::from_le_bytes(bits)
    }

    /// Sets the bits of the cell at `at`.
    pub(crate) fn store(&mut self, at: u64, bits: u64) {
        self.write(at, &bits.to_le_bytes());
    }

    fn page_mut(&mut self, page: u64) -> &mut Page {
        let (cells_end, size) = (self.cells_end, self.size);
        self.pages.entry(page).or_insert_with(|| fresh(page, size, cells_end))
    }
}

/// Copies `len` bytes from one window to another, or within one, page by page and without a buffer in between.
pub(crate) fn copy(windows: &mut [Memory], source: (usize, u64), target: (usize, u64), len: u64) {
    let (size, cells_end) = (windows[target.0].size, windows[target.0].cells_end);
    let mut done = 0;
    while done < len {
        let (from, to) = (source.1 + done, target.1 + done);
        let ((from_page, from_start), (to_page, to_start)) = (size.place(from), size.place(to));
        let piece = ((len - done) as usize).min(size.bytes() - from_start).min(size.bytes() - to_start);
        let into = to_start..to_start + piece;
        if let Ok([reader, writer]) = windows.get_disjoint_mut([source.0, target.0]) {
            reader.read(from, &mut writer.page_mut(to_page)[into]);
        } else if from_page == to_page {
            windows[source.0].page_mut(to_page).copy_within(from_start..from_start + piece, to_start);
        } else {
            // The target page leaves its window while it is written.
            let taken = windows[target.0].pages.remove(&to_page);
            let mut page = taken.unwrap_or_else(|| fresh(to_page, size, cells_end));
            windows[source.0].read(from, &mut page[into]);
            windows[target.0].pages.insert(to_page, page);
        }
        done += piece as u64;
    }
}

fn fresh(page: u64, size: PageSize, cells_end: u64) -> Page {
    let mut bytes = vec![POISON; size.bytes()].into_boxed_slice();
    let first = page << size.0;
    if first < cells_end {
        fill_untouched(first, cells_end, &mut bytes);
    }
    bytes
}

/// Fills `into` with what was never written at `at`.
fn fill_untouched(at: u64, cells_end: u64, into: &mut [u8]) {
    let cells = (cells_end.saturating_sub(at) as usize).min(into.len());
    into[..cells].fill(0);
    into[cells..].fill(POISON);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untouched_cells_are_zero_and_untouched_bytes_poison() {
        let mut memory = Memory::new(128, PageSize::ROWS);
        let mut bytes = [1; 4];
        memory.read(126, &mut bytes);
        assert_eq!(bytes, [0, 0, POISON, POISON]);
        memory.write(70_000, &[7]);
        memory.write(200, &[7]);
        memory.read(126, &mut bytes);
        assert_eq!(bytes, [0, 0, POISON, POISON]);
    }

    #[test]
    fn copies_cross_pages_and_windows() {
        let mut windows = [(); 2].map(|()| Memory::new(0, PageSize::ROWS));
        let bytes: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        windows[0].write(60_001, &bytes);
        copy(&mut windows, (0, 60_001), (1, 3), 100_000);
        copy(&mut windows, (1, 3), (1, 300_000), 100_000);
        let mut seen = vec![0; 100_000];
        windows[1].read(300_000, &mut seen);
        assert!(seen == bytes);
    }

    #[test]
    fn memory_exists_only_where_it_was_written() {
        let mut memory = Memory::new(0, PageSize::HEADERS);
        memory.write((1 << 40) - 1, &[1]);
        assert_eq!(memory.resident(), PageSize::HEADERS.bytes() as u64);
    }
}
