//! Windows are for the processes that their owner has named, of its own server: nobody else maps them. And what a host does wrong with keys is found.

use std::ffi::{CStr, CString, c_char, c_void};
use std::process::Command;
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use ep_ascend::driver::{Device, Memory, Table};
use ep_ascend::twin::{Host, Library, Machine, Session};
use ep_conformance::processes::started::{PLAN, Start, Started, say};

use super::LIBRARY;

/// The variables with the key that a process is to import, and its device.
const KEY: &str = "EP_TEST_KEY";
const DEVICE: &str = "EP_TEST_DEVICE";
/// How long a process tries.
const TRIES: Duration = Duration::from_secs(3);

/// A twin without kernels: two servers of two devices. `defines`: what is wrong with it.
fn bare(defines: &[&str]) -> Library {
    Library::build(&[], &[], defines).unwrap_or_else(|error| panic!("{error}"))
}

fn twin(library: &Library) -> Session {
    let session =
        Host::install(Machine::new(library, 1, 4, 2).expect("a machine"), "Ascend910B1").expect("the only twin");
    session.share();
    session
}

/// The key of a window of device 0.
fn exported(table: &Table, window: &Memory) -> CString {
    let mut key = [0u8; 65];
    let export = table.export_memory.expect("a function");
    let (at, text) = (window.address() as *mut c_void, key.as_mut_ptr().cast::<c_char>());
    // SAFETY: the key has room for as many bytes as are said, and the twin looks the memory up.
    assert_eq!(unsafe { export(at, window.bytes(), text, key.len(), 0) }, 0);
    CStr::from_bytes_until_nul(&key).expect("a key that ends").to_owned()
}

fn names(table: &Table, key: &CStr, process: u32) {
    let mut process = process as i32;
    // SAFETY: the key ends with zero, and there is one number.
    assert_eq!(unsafe { table.allow_import.expect("a function")(key.as_ptr(), &raw mut process, 1) }, 0);
}

fn imports(table: &Table, key: &CStr) -> (i32, u64) {
    let mut address = ptr::null_mut();
    // SAFETY: the address is written to, and the key ends with zero.
    let code = unsafe { table.import_memory.expect("a function")(&raw mut address, key.as_ptr(), 1) };
    (code, address as u64)
}

fn closes(table: &Table, key: &CStr) -> i32 {
    // SAFETY: the key ends with zero.
    unsafe { table.close_memory.expect("a function")(key.as_ptr()) }
}

/// What a process says that tries to import a key on a device.
fn tried(library: &Library, key: &CStr, device: u32) -> Started {
    let path = library.path();
    let start = Start::new(1, 1, "import").variable(LIBRARY, path.to_str().expect("a path of text"));
    let start = start.variable(KEY, key.to_str().expect("a key of text")).variable(DEVICE, &device.to_string());
    start.body("strangers::a_process_that_imports").start().remove(0)
}

#[test]
#[ignore = "no test by itself: the body of a process that another test starts"]
fn a_process_that_imports() {
    assert_eq!(std::env::var(PLAN).as_deref(), Ok("import"));
    let variable = |name: &str| std::env::var(name).expect("it is set");
    let (key, device) = (CString::new(variable(KEY)).expect("a key"), variable(DEVICE).parse().expect("a device"));
    // SAFETY: the test program, which is this one, has built it.
    let library = unsafe { Library::open(variable(LIBRARY).as_ref()) }.expect("a library");
    let session = twin(&library);
    let table = session.table();
    Device::open(&table, device).expect("a device");
    let until = Instant::now() + TRIES;
    let code = loop {
        match imports(&table, &key) {
            (0, _) => break 0,
            (code, _) if Instant::now() > until => break code,
            _ => thread::sleep(Duration::from_millis(5)),
        }
    };
    if code == 0 {
        assert_eq!(closes(&table, &key), 0);
        assert_ne!(closes(&table, &key), 0, "it is closed once");
    }
    say(format_args!("{code}, {}", session.fault().unwrap_or_default()));
}

/// What a named process, a stranger, and one on a device of another server say.
fn who_maps(library: &Library) -> [String; 3] {
    let session = twin(library);
    let table = session.table();
    let device = Device::open(&table, 0).expect("a device");
    let window = Memory::of_peers(&device, 4096).expect("a window");
    let key = exported(&table, &window);
    let named = tried(library, &key, 1);
    names(&table, &key, named.process.id());
    let said = named.hear();
    drop(named);
    let said = [said, tried(library, &key, 1).hear(), tried(library, &key, 2).hear()];
    assert_eq!(closes(&table, &key), 0);
    drop(window);
    assert_eq!((session.fault(), session.left()), (None, [0, 0, 0]));
    said
}

const CLOSED_TWICE: &str = "calls: aclrtIpcMemClose: a key that was neither exported nor imported";

#[test]
fn a_process_that_was_not_named_cannot_map_a_window() {
    let [named, stranger, far] = who_maps(&bare(&[]));
    assert_eq!(named, format!("0, {CLOSED_TWICE}"));
    assert_eq!(stranger, "107000, ");
    assert!(far.starts_with("107000, ") && far.contains("no other device of its server"), "{far}");
}

/// A twin that lets every process map shows that the test above can fail.
#[test]
fn a_twin_that_does_not_look_who_was_named_is_found_out() {
    let [named, stranger, _] = who_maps(&bare(&["TWIN_LETS_ALL_MAP"]));
    assert_eq!((&named[..2], stranger.as_str()), ("0,", &*format!("0, {CLOSED_TWICE}")));
}

#[test]
fn a_window_is_given_back_only_when_its_key_is_closed() {
    let library = bare(&[]);
    let session = twin(&library);
    let table = session.table();
    let device = Device::open(&table, 0).expect("a device");
    let window = Memory::of_peers(&device, 4096).expect("a window");
    let key = exported(&table, &window);
    drop(window);
    assert_eq!(
        session.fault().as_deref(),
        Some("calls: aclrtFree: the key of memory that others may import is not closed")
    );
    assert_eq!(closes(&table, &key), 0);
}

/// What a process has mapped of a window ends with it, and so does the window: nothing has a name.
#[test]
fn a_key_of_a_process_that_is_gone_maps_nothing() {
    let library = bare(&[]);
    let session = twin(&library);
    let table = session.table();
    Device::open(&table, 0).expect("a device");
    let gone = Command::new("true").spawn().expect("a process that ends");
    let number = gone.id();
    drop(gone.wait_with_output());
    let key = CString::new(format!("twin {number} 5 1 4096")).expect("a key");
    assert_eq!(imports(&table, &key), (107_000, 0));
    assert_eq!(session.fault(), None);
}
