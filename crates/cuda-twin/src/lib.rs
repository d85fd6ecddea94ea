//! A GPU made of software, for tests of the CUDA backend on machines without one: a driver in place of NVIDIA's, and a
//! compiler in place of NVRTC. What uses the real ones uses these, unchanged.
//!
//! ```text
//!   libcuda.so    driver/   streams are queues with a thread each, device memory is memory of the process, a launch runs
//!                           a kernel on the toy: blocks are threads, their lanes take turns (device/machine.h)
//!   libnvrtc.so   driver/   hands a kernel's text, with the toy's words and near verbs (device/), to a C++ compiler; a module is
//!                           a shared library
//! ```
//!
//! [`Twin::start`] builds both and loads them: whoever opens the driver by its name later in this process gets the twin. It shows
//! GPUs of compute capability 8.0, so kernels do without what came later: bulk copies, clusters. What was built is kept for the next process.
//!
//! | environment | meaning |
//! |---|---|
//! | `EP_CUDA_TWIN_GPUS` | GPUs that it shows; 4 where it is not set |
//! | `EP_CUDA_TWIN_SEED` | what the order of lanes is drawn from |
//! | `EP_CUDA_TWIN_BUILT` | the folder of a twin that another process has built: [`Twin::start`] loads that one |
//! | `EP_CUDA_TWIN_CACHE` | where twins are kept; `moexpress/cuda-twin` in `XDG_CACHE_HOME` or `~/.cache` where it is not set |
//! | `CXX` | the compiler; g++ where it is not set |
//!
//! What it has not, it refuses and says on stderr: captures of more than one stream, for one. Its time is not that of a GPU.
//!
//! For Linux on x86-64.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs, io};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

/// Headers of the toy that the twin's GPUs are: a processor, words and near verbs, by the names by which kernels include them.
const TOY: [(&str, &str); 3] = [
    ("machine.h", include_str!("../device/machine.h")),
    ("ep_device.h", include_str!("../device/ep_device.h")),
    ("ep_near.h", include_str!("../device/ep_near.h")),
];
/// How the processor works.
const MACHINE: (&str, &str) = ("machine.cpp", include_str!("../device/machine.cpp"));
/// What kernels are compiled with besides.
const OWN: [(&str, &str); 3] = [
    ("cuda_words.h", include_str!("../device/cuda_words.h")),
    ("entry.h", include_str!("../device/entry.h")),
    ("ep_bulk.h", include_str!("../device/ep_bulk.h")),
];
/// The text of both libraries.
const DRIVER: [(&str, &str); 10] = [
    ("driver.h", include_str!("../driver/driver.h")),
    ("capture.h", include_str!("../driver/capture.h")),
    ("stream.h", include_str!("../driver/stream.h")),
    ("adapter.cpp", include_str!("../driver/adapter.cpp")),
    ("device.cpp", include_str!("../driver/device.cpp")),
    ("stream.cpp", include_str!("../driver/stream.cpp")),
    ("graph.cpp", include_str!("../driver/graph.cpp")),
    ("module.cpp", include_str!("../driver/module.cpp")),
    ("pages.cpp", include_str!("../driver/pages.cpp")),
    ("nvrtc.cpp", include_str!("../driver/nvrtc.cpp")),
];
/// How kernels and the toy are compiled: every operation rounds, memory is words, whatever the struct that a word is read as, and no library shares
/// a variable with another.
pub const FLAGS: &str =
    "-std=c++17 -O1 -fPIC -pthread -ffp-contract=off -fno-strict-aliasing -fvisibility=hidden -fno-gnu-unique";
/// The libraries, by the names by which they are opened, and what they are made of.
const LIBRARIES: [(&str, &[&str]); 2] = [
    (
        "libcuda.so",
        &[
            "driver/adapter.cpp",
            "driver/device.cpp",
            "driver/stream.cpp",
            "driver/graph.cpp",
            "driver/module.cpp",
            "driver/pages.cpp",
            "device/machine.o",
        ],
    ),
    ("libnvrtc.so", &["driver/nvrtc.cpp"]),
];

/// Opens a library only where it is loaded already, on Linux.
const RTLD_NOLOAD: i32 = 4;

/// Names the folder of a twin that another process has built, and keeps for as long as this one lives.
pub const BUILT: &str = "EP_CUDA_TWIN_BUILT";

/// The twin, in a folder. Its compiler needs it for as long as kernels are compiled.
#[derive(Debug)]
pub struct Twin {
    folder: PathBuf,
    /// Where it is not kept.
    _own: Option<TempDir>,
}

impl Twin {
    /// Builds it, unless it is kept.
    ///
    /// # Errors
    /// Where the machine is no Linux on x86-64, has no compiler or no room, or the compiler refuses: what it says.
    pub fn build() -> io::Result<Self> {
        if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            return Err(io::Error::other("the twin of a GPU runs on Linux on x86-64"));
        }
        let kept = kept()?;
        if let Some(folder) = kept.as_ref().filter(|folder| folder.is_dir()) {
            return Ok(Self { folder: folder.clone(), _own: None });
        }
        // Beside where it is kept. Without such a place, or where nothing can be written there, it is this process's.
        let beside = kept.as_ref().and_then(|folder| folder.parent());
        let beside = beside.filter(|beside| fs::create_dir_all(beside).is_ok());
        let own = beside.and_then(|beside| tempfile::tempdir_in(beside).ok()).map_or_else(tempfile::tempdir, Ok)?;
        write_to(own.path())?;
        // Others see all of it or nothing; who comes second finds what is the same.
        let folder = kept.filter(|folder| fs::rename(own.path(), folder).is_ok() || folder.is_dir());
        Ok(match folder {
            Some(folder) => Self { folder, _own: None },
            None => Self { folder: own.path().to_owned(), _own: Some(own) },
        })
    }

    /// Builds it, unless another process [has](BUILT), and loads it into this process, for as long as that lives.
    ///
    /// # Errors
    /// As [`Twin::build`]; and where a library cannot be loaded.
    pub fn start() -> io::Result<Self> {
        let twin = match env::var_os(BUILT) {
            Some(folder) => Self { folder: folder.into(), _own: None },
            None => Self::build()?,
        };
        for (name, _) in LIBRARIES {
            let path = twin.folder().join(name);
            // SAFETY: the libraries are those just built; what they do when they are loaded is to make some empty maps.
            let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
            // Who opens that name from now on gets this one.
            std::mem::forget(library.map_err(io::Error::other)?);
        }
        Ok(twin)
    }

    /// Where the libraries lie: on `LD_LIBRARY_PATH`, they are those of a process.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where the toy lies, for programs of kernels' text: the headers, and `machine.o`, which they are linked with.
    pub fn toy(&self) -> PathBuf {
        self.folder.join("device")
    }
}

/// Of launches that this thread enqueues from now on so many blocks run at a time, in an order that is drawn; all of them with 0, as before.
/// Those that ask for all of their blocks beside each other (cooperative ones) have them. A kernel whose blocks wait for others that have not begun
/// stands still then.
///
/// # Errors
/// Where this process has no twin.
pub fn run_at_a_time(blocks: u32) -> io::Result<()> {
    set(b"twin_run_at_a_time", blocks)
}

/// The next launches of this thread, so many, are refused, as a driver refuses them that has not what they need.
///
/// # Errors
/// Where this process has no twin.
pub fn refuse_launches(launches: u32) -> io::Result<()> {
    set(b"twin_refuse_launches", launches)
}

/// Sets a number that the twin keeps for each thread, by the function of this name.
fn set(name: &[u8], number: u32) -> io::Result<()> {
    // SAFETY: nothing is loaded that was not before, so nothing is run.
    let driver = unsafe { Library::open(Some(LIBRARIES[0].0), RTLD_NOW | RTLD_NOLOAD) }.map_err(io::Error::other)?;
    // SAFETY: of the twin's driver all functions that are named here are of this kind; another driver has none of these names.
    let set = unsafe { driver.get::<unsafe extern "C" fn(u32)>(name) }.map_err(io::Error::other)?;
    // SAFETY: it keeps a number of this thread.
    unsafe { set(number) };
    Ok(())
}

/// The C++ compiler: `$CXX`, or g++.
fn compiler() -> String {
    env::var("CXX").ok().filter(|named| !named.is_empty()).unwrap_or_else(|| "g++".to_owned())
}

/// Of all that makes a twin: its text, and how this file has it compiled.
fn digest() -> Sha256 {
    let mut hash = Sha256::new();
    let texts = TOY.into_iter().chain([MACHINE]).chain(OWN).chain(DRIVER);
    for part in texts.flat_map(|(name, text)| [name, text]).chain([include_str!("lib.rs")]) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash
}

/// A number of the twin: kernels of one are none of another's.
fn version() -> u32 {
    let digest = digest().finalize();
    u32::from_le_bytes([digest[0], digest[1], digest[2], digest[3] & 0x7f])
}

/// Where such a twin, made by this compiler, is kept; nowhere, where the environment names no place.
fn kept() -> io::Result<Option<PathBuf>> {
    let var = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = || var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
    let all = var("EP_CUDA_TWIN_CACHE").or_else(|| base().map(|base| base.join("moexpress").join("cuda-twin")));
    let Some(all) = all else { return Ok(None) };
    let compiler = output(Command::new(compiler()).arg("--version"))?;
    let digest = digest().chain_update(compiler).finalize();
    let name: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    Ok(Some(all.join(name)))
}

/// Makes both libraries, and what kernels are compiled with, in an empty folder.
fn write_to(folder: &Path) -> io::Result<()> {
    let (device, driver) = (folder.join("device"), folder.join("driver"));
    for folder in [&device, &driver] {
        fs::create_dir(folder)?;
    }
    let write = |folder: &Path, (name, text): (&str, &str)| fs::write(folder.join(name), text);
    TOY.into_iter().chain([MACHINE]).chain(OWN).try_for_each(|file| write(&device, file))?;
    DRIVER.into_iter().try_for_each(|file| write(&driver, file))?;
    prepare(&device)?;
    LIBRARIES.iter().try_for_each(|(name, sources)| link(folder, name, sources))
}

/// Makes a library.
fn link(folder: &Path, name: &str, sources: &[&str]) -> io::Result<()> {
    let mut command = Command::new(compiler());
    command.args([
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-pthread",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]);
    command.arg(format!("-Wl,-soname,{name}"));
    command.arg(format!("-DTWIN_VERSION={}", version())).arg(format!("-DTWIN_FLAGS=\"{FLAGS} -w\""));
    command.arg("-o").arg(folder.join(name));
    command.args(sources.iter().map(|source| folder.join(source)));
    compile(command, name)
}

/// Compiles once how the processor works, and what all kernels include first, as g++ finds it beside the header.
fn prepare(device: &Path) -> io::Result<()> {
    // In this order: optimised otherwise than kernels, the first must not find what the second makes.
    for words in
        [["-c", "-O2", "machine.cpp", "-o", "machine.o"], ["-x", "c++-header", "machine.h", "-o", "machine.h.gch"]]
    {
        let mut command = Command::new(compiler());
        command.args(FLAGS.split(' ')).args(words).current_dir(device);
        compile(command, words[2])?;
    }
    Ok(())
}

/// Runs the compiler on what is called `name`.
fn compile(mut command: Command, name: &str) -> io::Result<()> {
    output(&mut command).map(|_| ()).map_err(|error| match error.kind() {
        io::ErrorKind::Other => io::Error::other(format!("{name} does not compile:\n{error}")),
        _ => error,
    })
}

/// What the compiler prints; what it says where it refuses.
fn output(command: &mut Command) -> io::Result<Vec<u8>> {
    let said = command
        .output()
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}; install g++, or set CXX", compiler())))?;
    if said.status.success() {
        return Ok(said.stdout);
    }
    Err(io::Error::other(String::from_utf8_lossy(&said.stderr).into_owned()))
}
