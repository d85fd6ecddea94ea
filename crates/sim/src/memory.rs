//! Windows as sparse pages: memory exists only where it was written.

/// Bytes of a page. Small, because a page is filled when it is first written, and most windows of tests use little of
/// each region.
const PAGE: usize = 8 << 10;
/// Pages of one directory.
const DIRECTORY: usize = 1024;
/// What a byte that nobody wrote reads as: no number, no count and no bfloat16 that a protocol would hold by chance.
pub(crate) const POISON: u8 = 0xA5;

type Page = Box<[u8]>;

/// One rank's window.
#[derive(Debug)]
pub(crate) struct Memory {
    /// First byte after the cells, which read zero before they are written.
    cells_end: u64,
    /// Directories of pages; empty until one of their pages is written.
    directories: Vec<Vec<Option<Page>>>,
}

impl Memory {
    /// A window of `bytes` bytes that begins with `cells_end` bytes of cells.
    pub(crate) fn new(bytes: u64, cells_end: u64) -> Self {
        let directories = bytes.div_ceil((PAGE * DIRECTORY) as u64) as usize;
        Self { cells_end, directories: vec![Vec::new(); directories] }
    }

    /// Bytes of memory that stand behind the window.
    pub(crate) fn resident(&self) -> u64 {
        let pages = self.directories.iter().flatten().filter(|page| page.is_some()).count();
        (pages * PAGE) as u64
    }

    /// Copies bytes out; the range lies inside the window.
    pub(crate) fn read(&self, from: u64, into: &mut [u8]) {
        let mut at = from;
        let mut rest = into;
        while !rest.is_empty() {
            let (page, start) = place(at);
            let (piece, later) = rest.split_at_mut(rest.len().min(PAGE - start));
            match self.page(page) {
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
            let (page, start) = place(at);
            let (piece, later) = rest.split_at(rest.len().min(PAGE - start));
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

    fn page(&self, page: usize) -> Option<&Page> {
        self.directories[page / DIRECTORY].get(page % DIRECTORY)?.as_ref()
    }

    fn entry(&mut self, page: usize) -> &mut Option<Page> {
        let directory = &mut self.directories[page / DIRECTORY];
        if directory.is_empty() {
            directory.resize_with(DIRECTORY, || None);
        }
        &mut directory[page % DIRECTORY]
    }

    fn page_mut(&mut self, page: usize) -> &mut Page {
        let cells_end = self.cells_end;
        self.entry(page).get_or_insert_with(|| fresh(page, cells_end))
    }
}

/// Copies `len` bytes from one window to another, or within one, page by page and without a buffer in between.
pub(crate) fn copy(windows: &mut [Memory], source: (usize, u64), target: (usize, u64), len: u64) {
    let mut done = 0;
    while done < len {
        let (from, to) = (source.1 + done, target.1 + done);
        let ((from_page, from_start), (to_page, to_start)) = (place(from), place(to));
        let piece = ((len - done) as usize).min(PAGE - from_start).min(PAGE - to_start);
        if source.0 == target.0 && from_page == to_page {
            windows[source.0].page_mut(to_page).copy_within(from_start..from_start + piece, to_start);
        } else {
            // The target page leaves its window while it is written, so that source and target may be the same window.
            let cells_end = windows[target.0].cells_end;
            let taken = windows[target.0].entry(to_page).take();
            let mut page = taken.unwrap_or_else(|| fresh(to_page, cells_end));
            let into = &mut page[to_start..to_start + piece];
            match windows[source.0].page(from_page) {
                Some(bytes) => into.copy_from_slice(&bytes[from_start..from_start + piece]),
                None => fill_untouched(from, windows[source.0].cells_end, into),
            }
            *windows[target.0].entry(to_page) = Some(page);
        }
        done += piece as u64;
    }
}

fn place(at: u64) -> (usize, usize) {
    ((at / PAGE as u64) as usize, (at % PAGE as u64) as usize)
}

fn fresh(page: usize, cells_end: u64) -> Page {
    let mut bytes = vec![POISON; PAGE].into_boxed_slice();
    fill_untouched((page * PAGE) as u64, cells_end, &mut bytes);
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
        let mut memory = Memory::new(1 << 20, 128);
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
        let mut windows = [Memory::new(1 << 20, 0), Memory::new(1 << 20, 0)];
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
        let mut memory = Memory::new(1 << 40, 0);
        memory.write((1 << 40) - 1, &[1]);
        assert_eq!(memory.resident(), PAGE as u64);
    }
}
