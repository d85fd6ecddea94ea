//! Windows as files in memory, which have no name: when the last process that holds one ends, however it ends, it is gone.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{
    MemfdFlags, SealFlags, SeekFrom, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create, seek, sendfile,
};
use rustix::io::Errno;

/// A file in memory of `bytes` zeroes, which nobody can make shorter or longer: a peer that did would end whoever touches
/// the missing pages.
pub(crate) fn create(bytes: u64) -> io::Result<OwnedFd> {
    let file = memfd_create("ep-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// A file as [`create`] makes it, of `bytes` bytes, that holds what `file` does. Memory is used for what was ever written.
pub(crate) fn copy(file: impl AsFd, bytes: u64) -> io::Result<OwnedFd> {
    let new = create(bytes)?;
    let mut at = 0;
    while at < bytes {
        let from = match seek(&file, SeekFrom::Data(at)) {
            Ok(from) => from,
            Err(Errno::NXIO) => break, // nothing but zeroes from here on
            Err(error) => return Err(error.into()),
        };
        at = seek(&file, SeekFrom::Hole(from))?.min(bytes);
        let mut next = from;
        seek(&new, SeekFrom::Start(next))?;
        while next < at {
            let left = usize::try_from(at - next).unwrap_or(usize::MAX);
            if sendfile(&new, &file, Some(&mut next), left)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
    Ok(new)
}

/// Refuses a file of a peer that has not `bytes` bytes or may lose them.
pub(crate) fn check(file: impl AsFd, bytes: u64) -> Result<(), String> {
    let has = fstat(&file).map_err(|error| format!("its size is not known: {error}"))?.st_size;
    if u64::try_from(has) != Ok(bytes) {
        return Err(format!("it has {has} bytes, expected {bytes}"));
    }
    match fcntl_get_seals(&file) {
        Ok(seals) if seals.contains(SealFlags::SHRINK) => Ok(()),
        Ok(_) => Err("it may shrink".into()),
        Err(error) => Err(format!("it is no file in memory: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::{pread, pwrite};

    use super::*;

    #[test]
    fn a_copy_holds_what_was_written_and_takes_no_memory_for_the_rest() {
        const BYTES: u64 = (64 << 20) + 77;
        let window = create(BYTES).unwrap();
        let written = [(0, 3), (5_000_001, 9_000), (BYTES - 5, 5)];
        for (at, len) in written {
            pwrite(&window, &vec![at as u8 | 1; len], at).unwrap();
        }
        let copy = copy(&window, BYTES).unwrap();
        check(&copy, BYTES).unwrap();
        for (at, len) in written {
            let mut seen = vec![0; len];
            pread(&copy, &mut seen, at).unwrap();
            assert_eq!(seen, vec![at as u8 | 1; len]);
        }
        let mut between = [1; 9];
        pread(&copy, &mut between, 40 << 20).unwrap();
        assert_eq!(between, [0; 9]);
        // In units of 512 bytes; pages may be large.
        assert!(fstat(&copy).unwrap().st_blocks < 32 << 20 >> 9);
    }

    #[test]
    fn windows_of_peers_are_checked() {
        let window = create(5000).unwrap();
        check(&window, 5000).unwrap();
        assert_eq!(check(&window, 5001).unwrap_err(), "it has 5000 bytes, expected 5001");
        assert!(ftruncate(&window, 10).is_err(), "sealed");
        let unsealed = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&unsealed, 8).unwrap();
        // Without the permission to seal a file is sealed against sealing only.
        assert_eq!(check(&unsealed, 8).unwrap_err(), "it may shrink");
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let bytes = file.metadata().unwrap().len();
        assert!(check(&file, bytes).unwrap_err().starts_with("it is no file in memory"));
    }
}
