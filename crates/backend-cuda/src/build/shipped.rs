//! Kernels that come with a program, so that nothing is compiled on a GPU that is common.
//!
//! Their files are those of the [`Cache`], under keys that name no compiler: text, headers, options and architecture. So a program
//! finds those alone that were made of its own text, and compiles whatever it does not find.

use std::path::Path;

use super::{Cache, Target, is_whole, targets};

/// Those of all that a GPU of `arch` is given that are not in a folder as this program would look for them: absent, damaged, or made
/// of another text.
pub fn absent(folder: &Path, arch: &str) -> Vec<Target> {
    let cache = Cache::at(folder.to_owned()).with_shipped(folder.to_owned());
    let is_there = |target: &Target| cache.shipped(target).is_some_and(|cubin| is_whole(&cubin).is_ok());
    targets(arch).into_iter().filter(|target| !is_there(target)).collect()
}

/// The names of these.
pub fn absent_names(folder: &Path, arch: &str) -> Vec<&'static str> {
    absent(folder, arch).iter().map(|target| target.source.name()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::build::cache::{self, Key};
    use crate::build::{Source, code, codes};
    use crate::error::CudaError;

    /// A folder with something for each target of an architecture.
    fn shipped(arch: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for target in targets(arch) {
            cache::store(folder.path(), &Key::shipped(&target), target.source.name().as_bytes()).unwrap();
        }
        folder
    }

    #[test]
    fn what_came_with_the_program_needs_no_compiler() {
        let folder = shipped("sm_90a");
        let own = tempfile::tempdir().unwrap();
        let cache = Cache::at(own.path().to_owned()).with_shipped(folder.path().to_owned());
        let found = codes(&cache, targets("sm_90a")).unwrap();
        assert_eq!(found.len(), targets("sm_90a").len());
        assert!(found.iter().all(|(target, code)| code == target.source.name().as_bytes()));
        assert_eq!(fs::read_dir(own.path()).unwrap().count(), 0, "nothing was compiled");
    }

    #[test]
    fn another_architecture_option_or_text_is_not_found() {
        let folder = shipped("sm_90a");
        let cache = Cache::at(folder.path().to_owned()).with_shipped(folder.path().to_owned());
        let plain = Target::new(Source::Counts, "sm_90a");
        assert_eq!(cache.shipped(&plain).as_deref(), Some(plain.source.name().as_bytes()));
        for other in [Target::new(Source::Counts, "sm_100a"), plain.clone().for_tests(true), plain.define("X", 1)] {
            assert_eq!(cache.shipped(&other), None, "{other:?}");
        }
        // What this program has compiled for itself is no kernel that came with it, though the text is the same.
        let target = Target::new(Source::Offer, "sm_80");
        cache.store(&Key::compiled(&target, (13, 0)), b"code").unwrap();
        assert_eq!(cache.shipped(&target), None);
    }

    #[test]
    fn a_damaged_file_is_compiled_instead() {
        let folder = shipped("sm_90a");
        let target = Target::new(Source::Offer, "sm_90a");
        let path = folder.path().join(Key::shipped(&target).name());
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, &bytes).unwrap();
        let own = tempfile::tempdir().unwrap();
        let cache = Cache::at(own.path().to_owned()).with_shipped(folder.path().to_owned());
        assert_eq!(cache.shipped(&target), None);
        match code(&cache, &target) {
            Ok(cubin) => is_whole(&cubin).unwrap(),
            Err(error) => assert!(matches!(error, CudaError::LibraryMissing { .. }), "the compiler is asked: {error}"),
        }
    }

    #[test]
    fn what_is_no_kernel_counts_as_absent() {
        let folder = shipped("sm_80");
        assert_eq!(absent(folder.path(), "sm_80"), targets("sm_80"), "these are whole files, and no kernels");
        assert_eq!(absent(Path::new("nowhere"), "sm_80"), targets("sm_80"));
    }
}
