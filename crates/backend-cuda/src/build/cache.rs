//! Compiled kernels on disk: those that came with the program, and those that were compiled here. One file for each key, written
//! aside and renamed, with a checksum.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::Target;
use crate::error::CudaError;

/// Begins every file: what it is, and the version of its form.
const MAGIC: &[u8; 8] = b"epcubin1";
const DIGEST: usize = 32;

/// How long another process may take to compile a kernel before this one does, too.
const PATIENCE: Duration = Duration::from_secs(180);
/// Time between two looks at whether it has.
const PAUSE: Duration = Duration::from_millis(5);

/// Kernels that come with the program.
static SHIPPED: OnceLock<PathBuf> = OnceLock::new();

/// Names the folder of kernels that come with the program, made by `ep-cuda-kernels --ship`: a GPU whose kernels are there needs no
/// compiler. `EP_CUDA_KERNELS` in the environment names another one, or none where it is empty. A second call changes nothing.
pub fn come_from(folder: PathBuf) {
    // The first caller is the program itself.
    let _ = SHIPPED.set(folder);
}

/// Names the code of one target: a hash of everything that it depends on.
pub(super) struct Key(String);

impl Key {
    /// Of code that this host's compiler makes.
    pub(super) fn compiled(target: &Target, nvrtc: (u32, u32)) -> Self {
        Self::new(target, &format!("{nvrtc:?}"))
    }

    /// Of code that comes with the program: whichever compiler made it, it is the same text, options and architecture.
    pub(super) fn shipped(target: &Target) -> Self {
        Self::new(target, "shipped")
    }

    /// That of its file.
    #[cfg(test)]
    pub(super) fn name(&self) -> &str {
        &self.0
    }

    fn new(target: &Target, maker: &str) -> Self {
        Self::of_text(target, target.source.text(), &target.headers(), maker)
    }

    fn of_text(target: &Target, text: &str, headers: &[(&str, String)], maker: &str) -> Self {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(target.source.name().as_bytes());
        part(text.as_bytes());
        for (name, text) in headers {
            part(name.as_bytes());
            part(text.as_bytes());
        }
        target.options().iter().for_each(|option| part(option.as_bytes()));
        part(maker.as_bytes());
        let digest: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Self(format!("{}-{}-{digest}.cubin", target.source.kernel(), target.arch))
    }
}

/// A folder of compiled kernels, and perhaps one of those that came with the program. Any number of processes may use them at the
/// same time.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    shipped: Option<PathBuf>,
}

impl Cache {
    /// The user's: `EP_CUDA_CACHE`, or `moexpress/cuda` in `XDG_CACHE_HOME` or `~/.cache`; none when neither is set. With the kernels
    /// that [came with the program](come_from).
    pub fn of_user() -> Self {
        let var = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = || var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
        let shipped = match std::env::var_os("EP_CUDA_KERNELS") {
            Some(named) => Some(PathBuf::from(named)).filter(|folder| !folder.as_os_str().is_empty()),
            None => SHIPPED.get().cloned(),
        };
        Self {
            folder: var("EP_CUDA_CACHE").or_else(|| base().map(|base| base.join("moexpress").join("cuda"))),
            shipped,
        }
    }

    /// A folder of its own; it is made when something is stored.
    pub const fn at(folder: PathBuf) -> Self {
        Self { folder: Some(folder), shipped: None }
    }

    /// With kernels of `folder`, made by [`ship`](super::ship), before its own.
    #[must_use]
    pub fn with_shipped(self, folder: PathBuf) -> Self {
        Self { shipped: Some(folder), ..self }
    }

    /// What came with the program for a target, if it is there and whole.
    pub(super) fn shipped(&self, target: &Target) -> Option<Vec<u8>> {
        load(self.shipped.as_ref()?, &Key::shipped(target))
    }

    /// What is stored under a key, if it is whole.
    pub(super) fn load(&self, key: &Key) -> Option<Vec<u8>> {
        load(self.folder.as_ref()?, key)
    }

    /// Lets one process of a host, and one thread of it, make what is stored under a key; others wait, as long as it lives and does not take
    /// too long. Dropped, the next one has it.
    pub(super) fn claim(&self, key: &Key) -> Claim {
        Claim(self.folder.as_ref().and_then(|folder| claim(folder, key, PATIENCE)))
    }

    /// Stores code. Readers see the whole file or none.
    pub(super) fn store(&self, key: &Key, cubin: &[u8]) -> Result<(), CudaError> {
        self.folder.as_ref().map_or(Ok(()), |folder| store(folder, key, cubin))
    }
}

/// The right to make something: a locked file, and where it lies. None where files cannot be locked, or whoever has it took too long.
#[derive(Debug)]
pub(super) struct Claim(Option<(fs::File, PathBuf)>);

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some((_, path)) = &self.0 {
            // Whoever has opened it gets it next, and finds what was made.
            let _ = fs::remove_file(path);
        }
    }
}

/// Locks a file for a key, within so long.
fn claim(folder: &Path, key: &Key, within: Duration) -> Option<(fs::File, PathBuf)> {
    fs::create_dir_all(folder).ok()?;
    let path = folder.join(format!("{}.lock", key.0));
    let file = fs::File::options().create(true).truncate(false).write(true).open(&path).ok()?;
    let until = Instant::now() + within;
    loop {
        match file.try_lock() {
            Ok(()) => return Some((file, path)),
            Err(fs::TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(PAUSE),
            Err(_) => return None,
        }
    }
}

/// The code of a file, if it is there and whole.
fn load(folder: &Path, key: &Key) -> Option<Vec<u8>> {
    let bytes = fs::read(folder.join(&key.0)).ok()?;
    let rest = bytes.strip_prefix(MAGIC).and_then(|rest| rest.split_at_checked(DIGEST));
    match rest {
        Some((digest, cubin)) if Sha256::digest(cubin).as_slice() == digest => Some(cubin.to_vec()),
        _ => {
            tracing::warn!(file = key.0, "a compiled kernel is damaged and is compiled again");
            None
        }
    }
}

/// Writes a file: readers see all of it or none.
pub(super) fn store(folder: &Path, key: &Key, cubin: &[u8]) -> Result<(), CudaError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::Source;
    use ep_core::transport::DeviceSource;

    fn key(arch: &str, version: (u32, u32)) -> Key {
        Key::compiled(&Target::new(Source::Positions, arch), version)
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
    fn another_text_has_another_key() {
        let target = Target::new(Source::Counts, "sm_90a");
        let (text, headers) = (target.source.text(), target.headers());
        let name = |text: &str, headers: &[(&str, String)]| Key::of_text(&target, text, headers, "shipped").0;
        assert_eq!(name(text, &headers), Key::shipped(&target).0);
        assert_ne!(name(&format!("{text} "), &headers), Key::shipped(&target).0, "the kernel's");
        for at in 0..headers.len() {
            let mut others = headers.clone();
            others[at].1.push(' ');
            assert_ne!(name(text, &others), Key::shipped(&target).0, "{}", others[at].0);
        }
    }

    #[test]
    fn lanes_between_nodes_have_keys_of_their_own() {
        let over = |text: &str, defines: &[(&'static str, String)]| {
            let source = DeviceSource { text: text.to_owned(), defines: defines.to_vec(), state_bytes: 64 };
            Key::shipped(&Target::new(Source::DispatchRing, "sm_90a").over(&source)).0
        };
        let plain = Key::shipped(&Target::new(Source::DispatchRing, "sm_90a")).0;
        let names = [plain, over("a", &[]), over("b", &[]), over("a", &[("DEPTH", "1".to_owned())])];
        let different: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(different.len(), names.len(), "{names:?}");
        assert_eq!(over("a", &[]), over("a", &[]));
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
    fn one_at_a_time_makes_what_is_missing_and_whoever_waits_too_long_makes_it_too() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().to_owned());
        let key = key("sm_90a", (13, 0));
        let made = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let _claim = cache.claim(&key);
                    if cache.load(&key).is_none() {
                        made.fetch_add(1, Ordering::Relaxed);
                        thread::sleep(Duration::from_millis(20));
                        cache.store(&key, b"code").unwrap();
                    }
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "the code");
        let _held = claim(folder.path(), &key, Duration::ZERO).unwrap();
        assert!(claim(folder.path(), &key, Duration::from_millis(1)).is_none());
    }

    #[test]
    fn nothing_but_the_file_stays_behind() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().to_owned());
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| cache.store(&key("sm_90a", (13, 0)), &[7; 10_000]).unwrap());
            }
        });
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert_eq!(cache.load(&key("sm_90a", (13, 0))).unwrap(), [7; 10_000]);
    }
}
