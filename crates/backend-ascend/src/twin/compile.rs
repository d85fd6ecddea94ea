//! Files compiled, and linked to a library. Both are kept: most libraries differ from another one in a file or in none.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, iter, thread};

use super::TwinError;
use super::kept::{Kept, keep};

/// How files are compiled. Structs are read as words; sums round after every operation; fibers leave their stacks by longjmp.
const OPTIONS: [&str; 11] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-Wno-clobbered",
];

/// How their objects are linked.
const LINKED: [&str; 2] = ["-shared", "-ldl"];

/// A file to compile, and all that it may include, by name; macros for all of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unit<'a> {
    pub(super) source: (&'a str, &'a str),
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) defines: &'a [&'a str],
}

impl<'a> Unit<'a> {
    /// What its object is made of.
    fn parts(self) -> impl Iterator<Item = &'a [u8]> {
        let texts = self.headers.iter().copied().chain([self.source]);
        self.defines.iter().copied().chain(texts.flat_map(|(name, text)| [name, text])).map(str::as_bytes)
    }
}

/// A compiler, and where what it makes is kept.
#[derive(Debug)]
pub(super) struct Compiler {
    program: String,
    version: Vec<u8>,
    kept: Kept,
}

impl Compiler {
    /// The usual one, and the user's place.
    pub(super) fn usual() -> Result<Self, TwinError> {
        let program = compiler()?;
        let said = Command::new(&program).arg("--version").output();
        let version = said.map_err(|error| TwinError::Compiler(format!("{program}: {error}")))?.stdout;
        Ok(Self { program, version, kept: Kept::of_user() })
    }

    /// Where the library of these files is kept.
    pub(super) fn place_of_library(&self, units: &[Unit<'_>]) -> Option<PathBuf> {
        self.place("so", units.iter().flat_map(|unit| unit.parts()))
    }

    /// Where what is made of these parts is kept.
    fn place<'a>(&'a self, kind: &str, parts: impl Iterator<Item = &'a [u8]>) -> Option<PathBuf> {
        let options = OPTIONS.iter().chain(&LINKED).map(|option| option.as_bytes());
        self.kept.place(kind, iter::once(&self.version[..]).chain(options).chain(parts))
    }

    /// The library of these files, which lie in `folder`, in the same. As many are compiled at a time as the machine has cores.
    pub(super) fn library(&self, folder: &Path, units: &[Unit<'_>]) -> Result<PathBuf, TwinError> {
        let next = AtomicUsize::new(0);
        let some = || {
            let mut objects = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(unit) = units.get(at) else { return Ok(objects) };
                objects.push((at, self.object(folder, unit)?));
            }
        };
        let threads = thread::available_parallelism().map_or(1, |count| count.get().min(units.len()));
        let mut objects = thread::scope(|scope| {
            let all: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
            let ended = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            all.into_iter().map(ended).collect::<Result<Vec<_>, _>>()
        })?
        .concat();
        objects.sort_unstable();
        let mut command = Command::new(&self.program);
        command.args(["-o", "twin.so"]).args(objects.iter().map(|(_, object)| object));
        run(command.args(LINKED).current_dir(folder))?;
        Ok(folder.join("twin.so"))
    }

    /// The object of a file of `folder`: the kept one, or one in the same folder.
    fn object(&self, folder: &Path, unit: &Unit<'_>) -> Result<PathBuf, TwinError> {
        let place = self.place("o", unit.parts());
        if let Some(place) = place.as_ref().filter(|place| place.exists()) {
            return Ok(place.clone());
        }
        let object = folder.join(format!("{}.o", unit.source.0));
        let mut command = Command::new(&self.program);
        command.args(OPTIONS).args(unit.defines.iter().map(|define| format!("-D{define}")));
        run(command.args(["-c", unit.source.0, "-o"]).arg(&object).current_dir(folder))?;
        if let Some(Err(problem)) = place.map(|place| keep(&object, &place)) {
            tracing::debug!(%problem, "what was compiled is not kept");
        }
        Ok(object)
    }
}

/// Runs a compiler.
fn run(command: &mut Command) -> Result<(), TwinError> {
    let said = command.output();
    let program = command.get_program().to_string_lossy();
    let said = said.map_err(|error| TwinError::Compiler(format!("{program}: {error}")))?;
    if said.status.success() {
        return Ok(());
    }
    Err(TwinError::Compiler(format!("{program}: {}", String::from_utf8_lossy(&said.stderr))))
}

/// The first C++ compiler that runs: `$CXX`, or what systems usually have.
pub(super) fn compiler() -> Result<String, TwinError> {
    let named = env::var("CXX").ok();
    let usual = ["g++", "clang++", "c++"].map(String::from);
    let found = named.into_iter().chain(usual).find(|name| Command::new(name).arg("--version").output().is_ok());
    found.ok_or_else(|| TwinError::Compiler("none was found".to_owned()))
}
