//! Compiled kernels on disk: one file for each key, written aside and renamed, with a checksum.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use super::{Target, headers};
use crate::error::CudaError;

/// Begins every file: what it is, and the version of its form.
const MAGIC: &[u8; 8] = b"epcubin1";
const DIGEST: usize = 32;

/// Names the code of one target: a hash of everything that it depends on.
pub(super) struct Key(String);

impl Key {
    pub(super) fn new(target: &Target, options: &[String], nvrtc: (u32, u32)) -> Self {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(target.source.name().as_bytes());
        part(target.source.text().as_bytes());
        for (name, text) in headers() {
            part(name.as_bytes());
            part(text.as_bytes());
        }
        options.iter().for_each(|option| part(option.as_bytes()));
        part(format!("{nvrtc:?}").as_bytes());
        let digest: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Self(format!("{}-{}-{digest}.cubin", target.source.name(), target.arch))
    }
}

/// A folder of compiled kernels. Any number of processes may use it at the same time.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// The user's: `EP_CUDA_CACHE`, or `moexpress/cuda` in `XDG_CACHE_HOME` or `~/.cache`; none when neither is set.
    pub fn of_user() -> Self {
        let var = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = || var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
        Self { folder: var("EP_CUDA_CACHE").or_else(|| base().map(|base| base.join("moexpress").join("cuda"))) }
    }

    /// A folder of its own; it is made when something is stored.
    pub const fn at(folder: PathBuf) -> Self {
        Self { folder: Some(folder) }
    }

    /// What is stored under a key, if it is whole.
    pub(super) fn load(&self, key: &Key) -> Option<Vec<u8>> {
        let bytes = fs::read(self.folder.as_ref()?.join(&key.0)).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?;
        let (digest, cubin) = rest.split_at_checked(DIGEST)?;
        if Sha256::digest(cubin).as_slice() == digest {
            return Some(cubin.to_vec());
        }
        tracing::warn!(file = key.0, "a compiled kernel is damaged and is compiled again");
        None
    }

    /// Stores code. Readers see the whole file or none.
    pub(super) fn store(&self, key: &Key, cubin: &[u8]) -> Result<(), CudaError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let Some(folder) = &self.folder else { return Ok(()) };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let aside = folder.join(format!("{}.{}.{number}", key.0, std::process::id()));
        let written = fs::create_dir_all(folder).and_then(|()| {
            let mut file = fs::File::create(&aside)?;
            file.write_all(MAGIC)?;
            file.write_all(&Sha256::digest(cubin))?;
            file.write_all(cubin)?;
            file.sync_all()?;
            fs::rename(&aside, folder.join(&key.0))
        });
        written.map_err(|problem| {
            let _ = fs::remove_file(&aside);
            CudaError::Cache { path: aside, problem: problem.to_string() }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Source;

    fn key(arch: &str, version: (u32, u32)) -> Key {
        let target = Target::new(Source::Layout, arch);
        Key::new(&target, &target.options(), version)
    }

    #[test]
    fn what_was_stored_is_found_under_its_key_alone() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("new"));
        let mine = key("sm_90a", (13, 0));
        assert_eq!(cache.load(&mine), None);
        cache.store(&mine, b"code").unwrap();
        assert_eq!(cache.load(&mine).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.load(&key("sm_80", (13, 0))), None);
        assert_eq!(cache.load(&key("sm_90a", (13, 1))), None);
    }

    #[test]
    fn damaged_and_cut_files_are_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().to_owned());
        let key = key("sm_90a", (13, 0));
        cache.store(&key, b"some code").unwrap();
        let path = folder.path().join(&key.0);
        let whole = fs::read(&path).unwrap();
        for cut in [0, 5, 20, whole.len() - 1] {
            fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(cache.load(&key), None, "cut to {cut} bytes");
        }
        let mut flipped = whole;
        *flipped.last_mut().unwrap() ^= 1;
        fs::write(&path, &flipped).unwrap();
        assert_eq!(cache.load(&key), None);
    }

    #[test]
    fn nothing_but_the_file_stays_behind() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().to_owned());
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| cache.store(&key("sm_90a", (13, 0)), &[7; 10_000]).unwrap());
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(cache.load(&key("sm_90a", (13, 0))).unwrap(), [7; 10_000]);
    }
}
