//! Which memory a device may be asked to read and write.

use std::sync::{Mutex, PoisonError};

use crate::Error;

/// Ranges of a device's memory that live, by address. A safe [`PostingDevice`](super::PostingDevice) looks at no other memory.
#[derive(Debug, Default)]
pub struct Ranges(Mutex<Vec<(u64, u64)>>);

impl Ranges {
    /// None yet.
    pub const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// `bytes` bytes at `address` live from now on.
    pub fn add(&self, address: u64, bytes: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push((address, bytes));
    }

    /// What begins at `address` is about to end. On return nobody looks at it any more.
    pub fn remove(&self, address: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|&(known, _)| known != address);
    }

    /// Does something with `len` bytes at `address` that lie in one of the ranges, which stays meanwhile.
    ///
    /// # Errors
    /// [`Error::Invalid`] for bytes that lie in none; those of `act`.
    pub fn within<T>(&self, address: u64, len: usize, act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = |&(begin, bytes): &(u64, u64)| {
            address.checked_sub(begin).and_then(|at| at.checked_add(len as u64)).is_some_and(|end| end <= bytes)
        };
        if !all.iter().any(holds) {
            let value = format_args!("{len} bytes at {address:#x}");
            return Err(Error::invalid("memory of a device", value, "bytes of a rank's window or of its queues"));
        }
        act()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ranges_that_live_are_looked_at() {
        let ranges = Ranges::new();
        ranges.add(0x1000, 0x100);
        ranges.add(0x4000, 0x10);
        let asked = |address, len| ranges.within(address, len, || Ok(())).map_err(|error| error.to_string());
        assert_eq!([asked(0x1000, 0x100), asked(0x10f8, 8), asked(0x4000, 0)], [Ok(()), Ok(()), Ok(())]);
        for (address, len) in
            [(0xfff, 2), (0x1000, 0x101), (0x10f9, 8), (0x2000, 1), (u64::MAX, 8), (0x1001, usize::MAX)]
        {
            assert!(asked(address, len).is_err_and(|said| said.contains("window or of its queues")), "{address:#x}");
        }
        ranges.remove(0x4000);
        assert!(asked(0x4000, 8).is_err(), "given back");
    }
}
