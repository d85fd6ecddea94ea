//! Memory whose size somebody asked for: where the system does not have it, that is an error, and not the end of the process.

use zerocopy::FromZeros;

use crate::error::{Error, Fault};

/// The system did not give so many bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoMemory {
    bytes: usize,
}

impl NoMemory {
    const fn of<T>(len: usize) -> Self {
        Self { bytes: len.saturating_mul(size_of::<T>()) }
    }
}

impl From<NoMemory> for Error {
    fn from(NoMemory { bytes }: NoMemory) -> Self {
        Self::invalid("bytes of memory that a call needs", bytes, "what the system gives")
    }
}

impl From<NoMemory> for Fault {
    fn from(NoMemory { bytes }: NoMemory) -> Self {
        Self::NoMemory { bytes: bytes as u64 }
    }
}

/// `len` zeroes. Pages that nobody writes are not taken.
///
/// # Errors
/// [`NoMemory`].
pub fn zeroed<T: FromZeros>(len: usize) -> Result<Vec<T>, NoMemory> {
    T::new_vec_zeroed(len).map_err(|_| NoMemory::of::<T>(len))
}

/// `len` times `value`.
///
/// # Errors
/// [`NoMemory`].
pub(crate) fn filled<T: Clone>(len: usize, value: T) -> Result<Vec<T>, NoMemory> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| NoMemory::of::<T>(len))?;
    values.resize(len, value);
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_has_not_is_an_error() {
        assert_eq!((zeroed::<u16>(3), filled(2, -1)), (Ok(vec![0; 3]), Ok(vec![-1; 2])));
        for len in [usize::MAX, usize::MAX / 4, 1 << 55] {
            let bytes = len.saturating_mul(8);
            assert_eq!(zeroed::<u64>(len), Err(NoMemory { bytes }));
            assert_eq!(filled(len, 0i64), Err(NoMemory { bytes }));
        }
        let error = Error::from(NoMemory { bytes: 7 }).to_string();
        assert_eq!(error, "bytes of memory that a call needs is 7, allowed: what the system gives");
    }
}
