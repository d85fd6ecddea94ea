//! Kernels and twin, compiled into one library.

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ep_bootstrap::Member;
use ep_core::Rank;
use libloading::Library as Loaded;
use tempfile::TempDir;

use super::compile::{self, Compiler, Unit};
use super::kept::keep;
use super::{QueueView, TwinError};

/// A kernel as the twin calls it: with the address of its parameters.
pub(super) type Kernel = unsafe extern "C" fn(*mut u8);

const TWIN: [(&str, &str); 9] = [
    ("machine.h", include_str!("../../twin/machine.h")),
    ("kernel_operator.h", include_str!("../../twin/kernel_operator.h")),
    ("copies.h", include_str!("../../twin/copies.h")),
    ("vectors.h", include_str!("../../twin/vectors.h")),
    ("network.h", include_str!("../../twin/network.h")),
    ("machine.cpp", include_str!("../../twin/machine.cpp")),
    ("network.cpp", include_str!("../../twin/network.cpp")),
    ("core.cpp", include_str!("../../twin/core.cpp")),
    ("shared.cpp", include_str!("../../twin/shared.cpp")),
];

/// Of the twin's C interface.
#[derive(Debug)]
pub(super) struct Functions {
    pub(super) new: unsafe extern "C" fn(u64, u32, u32) -> *mut c_void,
    pub(super) free: unsafe extern "C" fn(*mut c_void),
    pub(super) alloc: unsafe extern "C" fn(*mut c_void, u32, u64, u32) -> u64,
    pub(super) alloc_shared: unsafe extern "C" fn(*mut c_void, u32, u64, *mut i32) -> u64,
    pub(super) allow: unsafe extern "C" fn(*mut c_void, u64, *const i32, u64) -> i32,
    pub(super) map: unsafe extern "C" fn(*mut c_void, u32, u64, i32, i32, u32) -> u64,
    pub(super) share: unsafe extern "C" fn(*mut c_void),
    pub(super) write: unsafe extern "C" fn(*mut c_void, u64, *const u8, u64) -> i32,
    pub(super) read: unsafe extern "C" fn(*mut c_void, u64, *mut u8, u64) -> i32,
    pub(super) lies_at: unsafe extern "C" fn(*mut c_void, u64, u64) -> *mut u8,
    pub(super) launch: unsafe extern "C" fn(*mut c_void, u32, Kernel, u32, u64),
    pub(super) run: unsafe extern "C" fn(*mut c_void, u64) -> i32,
    pub(super) run_until: unsafe extern "C" fn(*mut c_void, u64, u32, u64) -> i32,
    pub(super) launches_ended: unsafe extern "C" fn(*const c_void, u32) -> u64,
    pub(super) release: unsafe extern "C" fn(*mut c_void, u64) -> i32,
    pub(super) isolate: unsafe extern "C" fn(*mut c_void),
    pub(super) open: unsafe extern "C" fn(*mut c_void, u32, u32),
    pub(super) crash: unsafe extern "C" fn(*mut c_void, u32, u64),
    pub(super) has_crashed: unsafe extern "C" fn(*const c_void, u32) -> i32,
    pub(super) suspend: unsafe extern "C" fn(*mut c_void, u32, u64),
    pub(super) is_suspended: unsafe extern "C" fn(*const c_void, u32) -> i32,
    pub(super) go_on: unsafe extern "C" fn(*mut c_void, u32, u64),
    pub(super) pass_idle_time: unsafe extern "C" fn(*mut c_void, u64),
    pub(super) starve: unsafe extern "C" fn(*mut c_void, u32),
    pub(super) starve_card: unsafe extern "C" fn(*mut c_void, u32),
    pub(super) block: unsafe extern "C" fn(*mut c_void, u32, u32, u64, u64, u64, u64),
    pub(super) key: unsafe extern "C" fn(*mut c_void, u32, u64, u64, u32) -> u32,
    pub(super) queue: unsafe extern "C" fn(*mut c_void, u32, u32, u32, u32, *mut QueueView),
    pub(super) close_queues: unsafe extern "C" fn(*mut c_void, u32),
    pub(super) sent: unsafe extern "C" fn(*const c_void) -> u64,
    pub(super) befallen: unsafe extern "C" fn(*const c_void) -> u64,
    pub(super) hurry: unsafe extern "C" fn(*mut c_void, u64),
    fault: unsafe extern "C" fn(*const c_void) -> *const c_char,
    pub(super) cycles: unsafe extern "C" fn(*const c_void) -> u64,
    pub(super) history: unsafe extern "C" fn(*const c_void) -> u64,
    has: unsafe extern "C" fn(*const c_void) -> i32,
}

/// A library of kernels and the twin that they run on.
#[derive(Clone, Debug)]
pub struct Library(Arc<Parts>);

#[derive(Debug)]
struct Parts {
    functions: Functions,
    loaded: Loaded,
    path: PathBuf,
    /// Removed with the library, in the process that has built it.
    _folder: Option<TempDir>,
}

impl Library {
    /// Compiles kernels with the twin, and loads them. `headers` and `sources` are files by name; `defines` are macros for all of them, as
    /// `EP_TEST` is for kernels with planted faults.
    ///
    /// What was compiled before of the same is taken from `EP_NPU_TWIN_CACHE`, or from `moexpress/npu-twin` in the user's folder of caches.
    ///
    /// # Errors
    /// [`TwinError::Compiler`] with what the compiler says, [`TwinError::Library`] where its result cannot be loaded.
    pub fn build(headers: &[(&str, String)], sources: &[(&str, &str)], defines: &[&str]) -> Result<Self, TwinError> {
        let compiler = Compiler::usual()?;
        let problem = |error: std::io::Error| TwinError::Library(error.to_string());
        let (own_sources, own_headers): (Vec<_>, Vec<_>) =
            TWIN.into_iter().partition(|(name, _)| name.ends_with(".cpp"));
        let headers = headers.iter().map(|(name, text)| (*name, &text[..])).chain(own_headers.iter().copied());
        let headers: Vec<_> = headers.collect();
        let kernels = sources.iter().map(|&source| Unit { source, headers: &headers, defines });
        let own = own_sources.iter().map(|&source| Unit { source, headers: &own_headers, defines });
        let units: Vec<_> = kernels.chain(own).collect();
        let place = compiler.place_of_library(&units);
        if let Some(place) = place.as_ref().filter(|place| place.exists()) {
            // SAFETY: the file was put there whole, compiled from this text by this compiler, in a folder of the user's or one that he
            // has named for it.
            match unsafe { Self::load(place.clone(), None) } {
                Ok(kept) => return Ok(kept),
                Err(problem) => {
                    tracing::warn!(%problem, place = %place.display(), "the compiled twin that was kept is damaged: it is compiled anew");
                    let _ = fs::remove_file(place);
                }
            }
        }
        let folder = tempfile::tempdir().map_err(problem)?;
        for (name, text) in headers.iter().chain(sources).chain(&own_sources) {
            fs::write(folder.path().join(name), text).map_err(problem)?;
        }
        let path = compiler.library(folder.path(), &units)?;
        if let Some(Err(problem)) = place.map(|place| keep(&path, &place)) {
            tracing::debug!(%problem, "the compiled twin is not kept");
        }
        // SAFETY: the library was compiled from the twin's and the kernels' text just now.
        unsafe { Self::load(path, Some(folder)) }
    }

    /// The same for ranks that are processes of one host: rank 0 compiles, and the others load what it has built. All wait for each other, `within`
    /// so long.
    ///
    /// # Errors
    /// Those of [`Library::build`] at rank 0, of all ranks; [`TwinError::Library`] with what became of the meeting, too.
    pub fn build_for_all(
        headers: &[(&str, String)],
        sources: &[(&str, &str)],
        defines: &[&str],
        member: &Member,
        within: Duration,
    ) -> Result<Self, TwinError> {
        let own = (member.rank() == Rank(0)).then(|| Self::build(headers, sources, defines));
        let built = own.as_ref().and_then(|own| own.as_ref().ok()).map(Self::path).unwrap_or_default();
        let met = |error: ep_bootstrap::Error| TwinError::Library(error.to_string());
        let built = member.broadcast(Rank(0), built.as_os_str().as_bytes(), within).map_err(met)?;
        if let Some(own) = own {
            return own;
        }
        if built.is_empty() {
            return Err(TwinError::Library("rank 0 has not built it, and says why".to_owned()));
        }
        // SAFETY: rank 0 is this very program, as the meeting has made sure, and has built the file just now.
        unsafe { Self::open(Path::new(OsStr::from_bytes(&built))) }
    }

    /// Loads a library that another process has built, from [`Library::path`]. That process may end when this has returned.
    ///
    /// # Errors
    /// [`TwinError::Library`] where it cannot be loaded.
    ///
    /// # Safety
    /// [`Library::build`] of the same version has made the file.
    pub unsafe fn open(path: &Path) -> Result<Self, TwinError> {
        // SAFETY: as the caller promises.
        unsafe { Self::load(path.to_owned(), None) }
    }

    /// # Safety
    /// As [`Library::open`].
    unsafe fn load(path: PathBuf, folder: Option<TempDir>) -> Result<Self, TwinError> {
        let problem = |error: libloading::Error| TwinError::Library(error.to_string());
        // SAFETY: as the caller promises; nothing in it runs when it is loaded.
        let loaded = unsafe { Loaded::new(&path) }.map_err(problem)?;
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: machine.cpp defines this function with these parameters. The pointer is kept beside the library, which outlives it.
                *unsafe { loaded.get($name) }.map_err(problem)?
            };
        }
        let functions = Functions {
            new: function!(b"twin_new"),
            free: function!(b"twin_free"),
            alloc: function!(b"twin_alloc"),
            alloc_shared: function!(b"twin_alloc_shared"),
            allow: function!(b"twin_allow"),
            map: function!(b"twin_map"),
            share: function!(b"twin_share"),
            write: function!(b"twin_write"),
            read: function!(b"twin_read"),
            lies_at: function!(b"twin_lies_at"),
            launch: function!(b"twin_launch"),
            run: function!(b"twin_run"),
            run_until: function!(b"twin_run_until"),
            launches_ended: function!(b"twin_launches_ended"),
            release: function!(b"twin_release"),
            isolate: function!(b"twin_isolate"),
            open: function!(b"twin_open"),
            crash: function!(b"twin_crash"),
            has_crashed: function!(b"twin_has_crashed"),
            suspend: function!(b"twin_suspend"),
            is_suspended: function!(b"twin_is_suspended"),
            go_on: function!(b"twin_go_on"),
            pass_idle_time: function!(b"twin_pass_idle_time"),
            starve: function!(b"twin_starve"),
            starve_card: function!(b"twin_starve_card"),
            block: function!(b"twin_block"),
            key: function!(b"twin_key"),
            queue: function!(b"twin_queue"),
            close_queues: function!(b"twin_close_queues"),
            sent: function!(b"twin_sent"),
            befallen: function!(b"twin_befallen"),
            hurry: function!(b"twin_hurry"),
            fault: function!(b"twin_fault"),
            cycles: function!(b"twin_cycles"),
            history: function!(b"twin_history"),
            has: function!(b"twin_has"),
        };
        Ok(Self(Arc::new(Parts { functions, loaded, path, _folder: folder })))
    }

    /// The compiler that it takes: `$CXX`, or what systems usually have.
    ///
    /// # Errors
    /// [`TwinError::Compiler`] where there is none.
    pub fn compiler() -> Result<String, TwinError> {
        compile::compiler()
    }

    /// Where the library lies: the file that a host loads kernels from.
    pub fn path(&self) -> PathBuf {
        self.0.path.clone()
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.0.functions
    }

    /// The kernel of this name.
    pub(super) fn kernel(&self, name: &str) -> Result<Kernel, TwinError> {
        let refused = || TwinError::Invalid(format!("kernel is {name}, allowed: a kernel of the library"));
        if name.starts_with("twin_") {
            return Err(refused());
        }
        // SAFETY: only the address is taken here.
        let found = unsafe { self.0.loaded.get::<Kernel>(name.as_bytes()) }.map_err(|_| refused())?;
        // SAFETY: the function looks up whose code lies at the address, and does not call it.
        let own = unsafe { (self.functions().has)(*found as *const c_void) };
        // The library exports kernels, which take one address, and the twin's own functions, which were refused.
        if own == 0 { Err(refused()) } else { Ok(*found) }
    }

    /// Whether it has a kernel of this name.
    pub fn has_kernel(&self, name: &str) -> bool {
        self.kernel(name).is_ok()
    }

    /// The fault of a machine.
    ///
    /// # Safety
    /// `machine` was made by this library and not freed.
    pub(super) unsafe fn fault(&self, machine: *const c_void) -> String {
        // SAFETY: the machine is one of the library's, by the caller's word. The text lives as long as the machine, and is copied.
        unsafe { CStr::from_ptr((self.functions().fault)(machine)) }.to_string_lossy().into_owned()
    }
}
