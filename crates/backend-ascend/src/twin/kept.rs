//! What was compiled before of kernels and twin, on disk: a compiler takes seconds for it, and the next process needs it again.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, io, process};

use sha2::{Digest, Sha256};

/// A file for each text, compiler and set of options. Any number of processes may use the folder at the same time.
#[derive(Debug)]
pub(super) struct Kept(Option<PathBuf>);

impl Kept {
    /// The user's: `EP_NPU_TWIN_CACHE`, or `moexpress/npu-twin` in `XDG_CACHE_HOME` or `~/.cache`; nothing is kept when none of them is set.
    pub(super) fn of_user() -> Self {
        let var = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = || var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
        Self(var("EP_NPU_TWIN_CACHE").or_else(|| base().map(|base| base.join("moexpress").join("npu-twin"))))
    }

    /// Where what is made of these parts lies, or would, by a name that ends in its `kind`.
    pub(super) fn place<'a>(&self, kind: &str, parts: impl IntoIterator<Item = &'a [u8]>) -> Option<PathBuf> {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let name: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        self.0.as_ref().map(|folder| folder.join(format!("{name}.{kind}")))
    }
}

/// Puts a copy of `built` at `place`. Others see the whole file or none.
pub(super) fn keep(built: &Path, place: &Path) -> io::Result<()> {
    static COPIES: AtomicU32 = AtomicU32::new(0);
    let folder = place.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(folder)?;
    let aside = folder.join(format!(".{}-{}", process::id(), COPIES.fetch_add(1, Ordering::Relaxed)));
    // It is whole before it has its name, whenever the machine stops.
    let copied = fs::copy(built, &aside).and_then(|_| fs::File::open(&aside)?.sync_all());
    let copied = copied.and_then(|()| fs::rename(&aside, place));
    copied.inspect_err(|_| drop(fs::remove_file(&aside)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_in_any_part_lies_elsewhere_and_what_is_kept_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let kept = Kept(Some(folder.path().join("npu-twin")));
        let place = |parts: &[&str]| kept.place("so", parts.iter().map(|part| part.as_bytes())).unwrap();
        let own = place(&["g++ 12", "-O1", "text"]);
        assert_eq!(own, place(&["g++ 12", "-O1", "text"]));
        for other in [&["g++ 13", "-O1", "text"][..], &["g++ 12", "-O1t", "ext"], &["g++ 12", "-O1"]] {
            assert_ne!(own, place(other), "{other:?}");
        }
        let built = folder.path().join("built");
        fs::write(&built, [7; 1000]).unwrap();
        keep(&built, &own).unwrap();
        keep(&built, &own).unwrap();
        assert_eq!(fs::read(&own).unwrap(), [7; 1000]);
        assert_eq!(fs::read_dir(own.parent().unwrap()).unwrap().count(), 1, "nothing is left aside");
        assert!(keep(&folder.path().join("none"), &own).is_err());
        assert!(Kept(None).place("so", []).is_none());
    }
}
