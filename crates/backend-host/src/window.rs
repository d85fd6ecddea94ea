//! Windows as files in memory, which have no name: when the last process that holds one ends, however it ends, it is gone.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};

/// A file in memory of `bytes` zeroes, which nobody can make shorter or longer: a peer that did would end whoever touches
/// the missing pages.
pub(crate) fn create(bytes: u64) -> io::Result<OwnedFd> {
    let file = memfd_create("ep-window", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
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
    use super::*;

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
