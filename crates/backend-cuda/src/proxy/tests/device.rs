//! A device of CPU threads: the header of the verbs, compiled by g++ and loaded.

use std::env;
use std::fs;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use ep_core::device::{FarStatus, headers};
use ep_core::transport::DeviceSource;
use libloading::Library;
use tempfile::TempDir;

use crate::proxy::source;

/// What stands in the header of the verbs, and what is put in its place.
pub(super) type Mutation = (&'static str, &'static str);

type Put = unsafe extern "C" fn(u64, u64, u64, u64, u64, *mut u64) -> u32;
type Publish = unsafe extern "C" fn(u64, u64, u64, u64) -> u32;
type Flush = unsafe extern "C" fn(u64, u64, u64) -> u32;
type Stream = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64) -> u32;

/// The verbs, as functions of this process.
#[derive(Debug)]
pub(super) struct Device {
    now: unsafe extern "C" fn() -> u64,
    put: Put,
    publish: Publish,
    flush: Flush,
    poll: unsafe extern "C" fn(u64) -> u32,
    pulse: unsafe extern "C" fn(u64) -> u64,
    stream: Stream,
    _library: Library,
    _folder: TempDir,
}

fn compiler() -> Option<String> {
    let usual = ["g++", "clang++", "c++"].map(String::from);
    let named = env::var("CXX").ok().into_iter().chain(usual);
    let found = named.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    if found.is_none() {
        let left_out = env::var_os("EP_WITHOUT_CXX").is_some();
        assert!(
            left_out,
            "no C++ compiler: install g++ or clang++, set CXX, or leave out what needs one by EP_WITHOUT_CXX=1"
        );
    }
    found
}

/// The variable that names a file where the verbs lie compiled, for machines without a compiler.
pub(super) const COMPILED: &str = "EP_FAR_DEVICE";

/// The verbs as a library, with one change of their header. None where there is no compiler.
pub(super) fn compiled(mutation: Option<Mutation>) -> Option<Vec<u8>> {
    let compiler = compiler()?;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut text = source().text;
    if let Some((from, to)) = mutation {
        assert_eq!(text.matches(from).count(), 1, "the header has it once: {from}");
        text = text.replace(from, to);
    }
    let own = [
        (DeviceSource::NAME, text),
        ("words.h", include_str!("words.h").to_owned()),
        ("device.cpp", include_str!("device.cpp").to_owned()),
    ];
    for (name, text) in headers().into_iter().chain(own) {
        fs::write(folder.path().join(name), text).expect("the file can be written");
    }
    let mut command = Command::new(&compiler);
    command.args(["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]);
    // Memory is words, whatever struct a word is read as. Of the words of a device only those of far verbs are defined.
    command.args(["-fno-strict-aliasing", "-o", "device.so", "device.cpp"]).current_dir(folder.path());
    let said = command.output().expect("the compiler runs");
    assert!(said.status.success(), "{compiler}: {}", String::from_utf8_lossy(&said.stderr));
    Some(fs::read(folder.path().join("device.so")).expect("it was written"))
}

fn status(number: u32) -> FarStatus {
    FarStatus::of(number).unwrap_or_else(|| panic!("{number} is no status"))
}

impl Device {
    /// As the header stands; compiled once. None where there is no compiler.
    pub(super) fn usual() -> Option<&'static Self> {
        static USUAL: OnceLock<Option<Device>> = OnceLock::new();
        USUAL.get_or_init(|| Self::with(None)).as_ref()
    }

    /// With one change of the header.
    pub(super) fn with(mutation: Option<Mutation>) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let library = match env::var_os(COMPILED) {
            Some(path) if mutation.is_none() => path.into(),
            _ => {
                let path = folder.path().join("device.so");
                fs::write(&path, compiled(mutation)?).expect("the file can be written");
                path
            }
        };
        // SAFETY: `compiled` made it; nothing in it runs when it is loaded.
        let library = unsafe { Library::new(library) }.expect("the library loads");
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: device.cpp defines this function with these parameters; the library is kept beside the pointer.
                *unsafe { library.get($name) }.expect("the function is there")
            };
        }
        Some(Self {
            now: function!(b"device_now"),
            put: function!(b"device_put"),
            publish: function!(b"device_publish"),
            flush: function!(b"device_flush"),
            poll: function!(b"device_poll"),
            pulse: function!(b"device_pulse"),
            stream: function!(b"device_stream"),
            _library: library,
            _folder: folder,
        })
    }

    /// The time so long from now.
    fn after(&self, time: Duration) -> u64 {
        // SAFETY: it reads a clock.
        unsafe { (self.now)() + time.as_nanos() as u64 }
    }

    /// The thread that posts to a lane.
    ///
    /// # Safety
    /// `lane` is the state of a lane whose memory outlives the value, and no other thread posts to it meanwhile.
    pub(super) const unsafe fn poster(&self, lane: u64) -> Poster<'_> {
        Poster { device: self, lane }
    }
}

/// One thread of the device, which posts to one lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Poster<'a> {
    device: &'a Device,
    lane: u64,
}

impl Poster<'_> {
    /// The ticket of a put of so many bytes, from one place to another.
    pub(super) fn put(&self, [from, to, bytes]: [u64; 3], allowed: Duration) -> Result<u64, FarStatus> {
        let (mut ticket, until) = (0, self.device.after(allowed));
        // SAFETY: of this and all below: this thread alone posts to the lane, whose memory lives, as `poster` was told.
        match status(unsafe { (self.device.put)(self.lane, from, to, bytes, until, &raw mut ticket) }) {
            FarStatus::Ok => Ok(ticket),
            other => Err(other),
        }
    }

    pub(super) fn publish(&self, cell: u64, bits: u64, allowed: Duration) -> FarStatus {
        // SAFETY: as above.
        status(unsafe { (self.device.publish)(self.lane, cell, bits, self.device.after(allowed)) })
    }

    pub(super) fn flush(&self, ticket: u64, allowed: Duration) -> FarStatus {
        // SAFETY: as above.
        status(unsafe { (self.device.flush)(self.lane, ticket, self.device.after(allowed)) })
    }

    pub(super) fn poll(&self) -> FarStatus {
        // SAFETY: as above.
        status(unsafe { (self.device.poll)(self.lane) })
    }

    pub(super) fn pulse(&self) -> u64 {
        // SAFETY: as above.
        unsafe { (self.device.pulse)(self.lane) }
    }

    /// So many puts of `bytes` bytes at `at`, a publish to `cell` behind each `every` of them, of values after `first`, and a flush.
    pub(super) fn stream(&self, [at, bytes, cell]: [u64; 3], [first, puts, every]: [u64; 3]) -> FarStatus {
        let until = self.device.after(Duration::from_secs(60));
        // SAFETY: as above.
        status(unsafe { (self.device.stream)(self.lane, at, bytes, cell, first, puts, every, until) })
    }
}
