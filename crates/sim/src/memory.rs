//! Windows as sparse pages: memory exists only where it was written.

use std::cell::Cell;

use crate::pages::Pages;

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

    /// The chunk that a page lies in, and where.
    const fn chunk(self, number: u32) -> (usize, usize) {
        let at = (number as usize) << self.0;
        (at / CHUNK, at % CHUNK)
    }
}

/// Bytes that pages are taken from the allocator by: a whole number of pages.
const CHUNK: usize = 1 << 16;

/// One rank's window.
#[derive(Debug)]
pub(crate) struct Memory {
    /// First byte after the cells, which read zero before they are written.
    cells_end: u64,
    size: PageSize,
    pages: Pages,
    /// The page that was looked for last, and its number: a row's parts lie side by side.
    last: Cell<(u64, u32)>,
    /// Pages by their numbers, in the order in which they were first written.
    chunks: Vec<Box<[u8]>>,
}

impl Memory {
    /// A window that begins with `cells_end` bytes of cells. All windows that are copied between have pages of one size.
    pub(crate) fn new(cells_end: u64, size: PageSize) -> Self {
        Self { cells_end, size, pages: Pages::default(), last: Cell::new((u64::MAX, 0)), chunks: Vec::new() }
    }

    /// Bytes of memory that stand behind the window.
    pub(crate) fn resident(&self) -> u64 {
        u64::from(self.pages.len()) * self.size.bytes() as u64
    }

    /// The number of a page, if it was ever written.
    fn number(&self, page: u64) -> Option<u32> {
        let (last, number) = self.last.get();
        if last == page {
            return Some(number);
        }
        let number = self.pages.number(page)?;
        self.last.set((page, number));
        Some(number)
    }

    /// The number of a page that is about to be written.
    fn number_mut(&mut self, page: u64) -> u32 {
        if let Some(number) = self.number(page) {
            return number;
        }
        let number = self.pages.add(page);
        let (chunk, start) = self.size.chunk(number);
        if chunk == self.chunks.len() {
            self.chunks.push(vec![0; CHUNK].into_boxed_slice());
        }
        let bytes = &mut self.chunks[chunk][start..start + self.size.bytes()];
        fill_untouched(page << self.size.0, self.cells_end, bytes);
        self.last.set((page, number));
        number
    }

    /// Something of what a write to `at` will need.
    pub(crate) fn first_look(&self, at: u64) -> u64 {
        self.pages.first_look(self.size.place(at).0)
    }

    fn page(&self, number: u32) -> &[u8] {
        let (chunk, start) = self.size.chunk(number);
        &self.chunks[chunk][start..start + self.size.bytes()]
    }

    fn page_mut(&mut self, number: u32) -> &mut [u8] {
        let (chunk, start) = self.size.chunk(number);
        &mut self.chunks[chunk][start..start + self.size.bytes()]
    }

    /// Copies bytes out; the range lies inside the window.
    pub(crate) fn read(&self, from: u64, into: &mut [u8]) {
        let mut at = from;
        let mut rest = into;
        while !rest.is_empty() {
            let (page, start) = self.size.place(at);
            let (piece, later) = rest.split_at_mut(rest.len().min(self.size.bytes() - start));
            match self.number(page) {
                Some(number) => piece.copy_from_slice(&self.page(number)[start..start + piece.len()]),
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
            let number = self.number_mut(page);
            self.page_mut(number)[start..start + piece.len()].copy_from_slice(piece);
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
}

/// Copies `len` bytes from one window to another, or within one, page by page and without a buffer in between. What was
/// never written is the same everywhere: copying it to where nothing was written takes no memory.
pub(crate) fn copy(windows: &mut [Memory], source: (usize, u64), target: (usize, u64), len: u64) {
    let (size, cells_end) = (windows[target.0].size, windows[target.0].cells_end);
    let mut done = 0;
    while done < len {
        let (from, to) = (source.1 + done, target.1 + done);
        let ((from_page, from_start), (to_page, to_start)) = (size.place(from), size.place(to));
        let piece = ((len - done) as usize).min(size.bytes() - from_start).min(size.bytes() - to_start);
        done += piece as u64;
        let read = windows[source.0].number(from_page);
        if read.is_none() && from.min(to) >= cells_end && windows[target.0].number(to_page).is_none() {
            continue;
        }
        let written = windows[target.0].number_mut(to_page);
        let into = to_start..to_start + piece;
        let Some(read) = read else {
            fill_untouched(from, cells_end, &mut windows[target.0].page_mut(written)[into]);
            continue;
        };
        let out = from_start..from_start + piece;
        if let Ok([reader, writer]) = windows.get_disjoint_mut([source.0, target.0]) {
            writer.page_mut(written)[into].copy_from_slice(&reader.page(read)[out]);
        } else {
            let own = &mut windows[source.0];
            if read == written {
                own.page_mut(read).copy_within(out, to_start);
            } else {
                // The bytes that are read leave their page while the other one is written.
                let mut bytes = [0; 1 << PageSize::ROWS.0];
                bytes[..piece].copy_from_slice(&own.page(read)[out]);
                own.page_mut(written)[into].copy_from_slice(&bytes[..piece]);
            }
        }
    }
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
    fn what_nobody_wrote_is_copied_as_it_reads() {
        let mut windows = [(); 2].map(|()| Memory::new(128, PageSize::HEADERS));
        copy(&mut windows, (0, 1000), (1, 2000), 5000);
        assert_eq!(windows[1].resident(), 0, "poison is everywhere already");
        windows[1].write(2001, &[7]);
        copy(&mut windows, (0, 1000), (1, 2000), 5000);
        copy(&mut windows, (0, 120), (1, 3000), 16);
        let mut bytes = [1; 16];
        windows[1].read(2000, &mut bytes[..2]);
        assert_eq!(bytes[..2], [POISON; 2]);
        windows[1].read(3000, &mut bytes);
        assert_eq!(bytes, [[0; 8], [POISON; 8]].concat()[..]);
    }

    #[test]
    fn memory_exists_only_where_it_was_written() {
        let mut memory = Memory::new(0, PageSize::HEADERS);
        memory.write((1 << 40) - 1, &[1]);
        assert_eq!(memory.resident(), PageSize::HEADERS.bytes() as u64);
    }
}
