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
    /// What is no file, a pipe for instance.
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
        let special = path.metadata().is_ok_and(|data| !data.is_file());
        let out = if special { Out::There(File::create(path)?) } else { Out::Beside(beside(path)?) };
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
