//! Files that exist whole or not at all: a full disk leaves no half of one behind.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::failure::Failure;

/// A file that will be written: all of it at once, or what has its name stays as it is.
#[derive(Debug)]
pub(crate) struct Whole {
    path: PathBuf,
    /// What is no file, a pipe or a link for instance: it stays what it is, and is open until it is written.
    there: Option<File>,
}

impl Whole {
    /// Sees to it that the file can be written, before the work whose outcome would be lost otherwise. Nothing is changed.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        let fail = |error| Failure::bad_input(format_args!("cannot create {}: {error}", path.display()));
        let there = try_out(path).map_err(fail)?;
        Ok(Self { path: path.to_owned(), there })
    }

    /// Writes all of it.
    pub(crate) fn write(self, bytes: &[u8]) -> Result<(), Failure> {
        self.write_with(|file| file.write_all(bytes))
    }

    /// Has `write` write all of it.
    pub(crate) fn write_with(self, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<(), Failure> {
        let written = match self.there {
            Some(file) => overwrite(file, write),
            None => replace(&self.path, write),
        };
        written.map_err(|error| cannot_write(&self.path, &error))
    }
}

/// Refuses two names of one file among `files` that are read and written, each with what a user calls it: one of them would be lost. What is no file,
/// a pipe for instance, may have several.
pub(crate) fn apart(files: &[(String, PathBuf)]) -> Result<(), Failure> {
    let mut taken: HashMap<Place, &str> = HashMap::new();
    for (name, path) in files {
        let Some(place) = place(path) else { continue };
        if let Some(other) = taken.insert(place, name) {
            let path = path.display();
            return Err(Failure::bad_input(format_args!(
                "{name} is {path}, which is {other}, too, allowed: another file"
            )));
        }
    }
    Ok(())
}

/// What tells files apart.
#[derive(PartialEq, Eq, Hash)]
enum Place {
    /// Device and number of one that is there.
    There(u64, u64),
    /// Folder and name of one that is not.
    New(PathBuf),
}

/// None of what is no file, and where there is no such folder: that is said when it is opened.
fn place(path: &Path) -> Option<Place> {
    match path.metadata() {
        Ok(data) => data.is_file().then(|| Place::There(data.dev(), data.ino())),
        Err(_) => Some(Place::New(folder_of(path).canonicalize().ok()?.join(path.file_name()?))),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether a file can be written: by its permissions, and beside it. What is no file comes back open.
fn try_out(path: &Path) -> io::Result<Option<File>> {
    match path.symlink_metadata() {
        Ok(data) if data.is_file() => {
            File::options().write(true).open(path)?;
            beside(path)?;
            Ok(None)
        }
        Ok(_) => File::options().write(true).create(true).truncate(false).open(path).map(Some),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            File::create_new(path)?;
            fs::remove_file(path)?;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Writes to what stays what it is.
fn overwrite(mut file: File, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    // A pipe has no length, a file at the end of a link has.
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    write(&mut file)
}

/// Writes a file, and gives it its name once it is whole.
fn replace(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let mut file = beside(path)?;
    if let Ok(there) = path.symlink_metadata() {
        // Who may read it does not change.
        file.as_file().set_permissions(there.permissions())?;
    }
    write(file.as_file_mut())?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// A file under a passing name, with the permissions of one that stays.
fn beside(path: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".moexpress-");
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder_of(path))
}

/// Why a file is not there.
fn cannot_write(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::failed(format_args!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
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

    #[test]
    fn one_file_by_two_names_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link, hard, new] = ["file", "link", "hard", "new"].map(|name| folder.path().join(name));
        fs::write(&file, "").unwrap();
        symlink("file", &link).unwrap();
        fs::hard_link(&file, &hard).unwrap();
        let refused = |one: &Path, other: &Path| {
            let names = [("--html".to_owned(), one.to_owned()), ("--trace".to_owned(), other.to_owned())];
            apart(&names).map_err(|failure| failure.text)
        };
        for other in [&file, &link, &hard, &folder.path().join(".").join("file")] {
            let shown = other.display();
            assert_eq!(
                refused(&file, other),
                Err(format!("--trace is {shown}, which is --html, too, allowed: another file"))
            );
        }
        assert!(refused(&new, &folder.path().join(".").join("new")).is_err());
        for (one, other) in [(&file, &new), (&new, &folder.path().join("newer"))] {
            assert_eq!(refused(one, other), Ok(()));
        }
        assert_eq!(refused(Path::new("/dev/null"), Path::new("/dev/null")), Ok(()));
        assert_eq!(refused(Path::new("/no/such/folder"), Path::new("/no/such/folder")), Ok(()));
    }

    #[test]
    fn nothing_changes_before_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link, new] = ["file", "link", "new"].map(|name| folder.path().join(name));
        fs::write(&file, "before").unwrap();
        symlink("file", &link).unwrap();
        for path in [&file, &link, &new] {
            drop(Whole::create(path).unwrap());
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "before");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        let refused = |path: &Path| Whole::create(path).unwrap_err().text;
        assert!(refused(&folder.path().join("new/")).ends_with("/new/: Is a directory (os error 21)"));
        assert!(refused(folder.path()).contains("Is a directory"));
        assert!(refused(&file.join("below")).contains("Not a directory"));
    }
}
