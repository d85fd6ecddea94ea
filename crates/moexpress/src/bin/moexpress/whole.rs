//! Files that exist whole or not at all: a full disk leaves no half of one behind.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::failure::Failure;

/// A file that appears under its name when it is [kept](Whole::keep).
#[derive(Debug)]
pub(crate) struct Whole {
    path: PathBuf,
    out: Out,
}

#[derive(Debug)]
enum Out {
    /// Beside its name.
    Beside(NamedTempFile),
    /// What is no file, a pipe or a link for instance: it stays what it is.
    There(File),
}

impl Whole {
    /// Begins a file, before the work whose outcome would be lost where it cannot be written.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        let fail = |error| Failure::bad_input(format_args!("cannot create {}: {error}", path.display()));
        Self::begin(path).map_err(fail)
    }

    /// Begins a file after the work.
    pub(crate) fn begin(path: &Path) -> io::Result<Self> {
        let there = path.symlink_metadata();
        let special = there.as_ref().is_ok_and(|data| !data.is_file());
        let out = if special { Out::There(File::create(path)?) } else { Out::Beside(beside(path)?) };
        if let (Out::Beside(file), Ok(there)) = (&out, there) {
            // Who may read it does not change.
            file.as_file().set_permissions(there.permissions())?;
        }
        Ok(Self { path: path.to_owned(), out })
    }

    /// The file, to be written.
    pub(crate) fn file(&mut self) -> &mut File {
        match &mut self.out {
            Out::Beside(file) => file.as_file_mut(),
            Out::There(file) => file,
        }
    }

    /// Gives the file its name.
    pub(crate) fn keep(self) -> Result<(), Failure> {
        let kept = match self.out {
            Out::Beside(file) => file.persist(&self.path).map(drop).map_err(|error| error.error),
            Out::There(_) => Ok(()),
        };
        kept.map_err(|error| cannot_write(&self.path, &error))
    }

    /// Writes all of it, and keeps it.
    pub(crate) fn write(mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.file().write_all(bytes).map_err(|error| cannot_write(&self.path, &error))?;
        self.keep()
    }
}

/// A file under a passing name, with the permissions of one that stays.
fn beside(path: &Path) -> io::Result<NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".moexpress-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}

/// Why a file is not there.
pub(crate) fn cannot_write(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::failed(format_args!("cannot write {}: {error}", path.display()))
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn links_and_permissions_stay_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| folder.path().join(name));
        fs::write(&file, "before").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        symlink("file", &link).unwrap();
        Whole::create(&link).unwrap().write(b"through the link").unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "through the link");
        Whole::create(&file).unwrap().write(b"anew").unwrap();
        assert_eq!(fs::read_to_string(&link).unwrap(), "anew");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
