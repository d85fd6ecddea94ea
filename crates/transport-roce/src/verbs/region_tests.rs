//! By which way memory is registered, with a library that says what it is asked.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};

use ep_rdma::sys::{self, Mr, Pd};
use ep_rdma::{Device, Verbs};
use rustix::fs::{MemfdFlags, memfd_create};

use super::*;

const FROM: u64 = 0x7f00_0000_0000;
const BYTES: usize = 1 << 16;

thread_local! {
    /// What was called, in order, with its arguments; by which way a call has success.
    static SAID: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static TAKES: RefCell<&'static str> = const { RefCell::new("") };
}

fn call(name: &'static str, arguments: &str) -> *mut Mr {
    SAID.with_borrow_mut(|said| said.push(format!("{name} {arguments}")));
    if TAKES.with_borrow(|takes| *takes == name) { ptr::dangling_mut() } else { ptr::null_mut() }
}
extern "C" fn plain(_: *mut Pd, address: *mut c_void, bytes: usize, access: c_int) -> *mut Mr {
    call("plain", &format!("{address:p} {bytes} {access:#x}"))
}
extern "C" fn relaxed(_: *mut Pd, address: *mut c_void, bytes: usize, known: u64, access: c_uint) -> *mut Mr {
    call("relaxed", &format!("{address:p} {bytes} {known:#x} {access:#x}"))
}
extern "C" fn dmabuf(_: *mut Pd, at: u64, bytes: usize, known: u64, file: c_int, access: c_int) -> *mut Mr {
    call("dmabuf", &format!("{at} {bytes} {known:#x} {} {access:#x}", file >= 0))
}
extern "C" fn domain(_: *mut sys::Context) -> *mut Pd {
    ptr::dangling_mut()
}
/// All that ends something, and what is not called here.
extern "C" fn done(_: *mut c_void) -> c_int {
    0
}

/// A library with these functions; an older one does not know descriptors.
fn library(knows_files: bool) -> Verbs {
    let lookup = |name: &str| {
        NonNull::new(match name {
            "ibv_reg_mr" => plain as *mut c_void,
            "ibv_reg_mr_iova2" => relaxed as *mut c_void,
            "ibv_reg_dmabuf_mr" if knows_files => dmabuf as *mut c_void,
            "ibv_reg_dmabuf_mr" => ptr::null_mut(),
            "ibv_alloc_pd" => domain as *mut c_void,
            _ => done as *mut c_void,
        })
    };
    // SAFETY: those that are called have these arguments, or one pointer, and look at none of what they point to.
    unsafe { Verbs::from(&lookup) }.unwrap()
}

/// Registers bytes 4096 to 4608 of a device's memory; what was called, and the way.
fn registered(takes: &'static str, file: bool, knows_files: bool, access: c_uint) -> (Vec<String>, Option<Way>) {
    TAKES.set(takes);
    SAID.take();
    let file = file.then(|| -> OwnedFd { memfd_create("window", MemfdFlags::CLOEXEC).unwrap() });
    let memory = Arc::new(Memory::of_device(FROM, BYTES, file, None).unwrap());
    // SAFETY: no function of this library looks at the device.
    let device = unsafe { Device::new(&library(knows_files), "mlx5_0", NonNull::dangling()) };
    let made = Region::of_part(&Domain::new(&device).unwrap(), memory, 4096..4608, access);
    (SAID.take(), made.ok().map(|region| region.way()))
}

const WRITE: c_uint = sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE;

#[test]
fn memory_with_a_descriptor_is_registered_by_it() {
    let (said, way) = registered("dmabuf", true, true, WRITE);
    assert_eq!((said, way), (vec!["dmabuf 4096 512 0x7f0000001000 true 0x3".to_owned()], Some(Way::Dmabuf)));
    let relaxed = WRITE | sys::ACCESS_RELAXED_ORDERING;
    let (said, way) = registered("dmabuf", true, true, relaxed);
    assert_eq!((said.len(), way), (1, Some(Way::Dmabuf)));
    assert!(said[0].ends_with(&format!("{relaxed:#x}")), "{said:?}");
}

#[test]
fn where_that_is_refused_or_unknown_it_is_registered_by_its_address() {
    let plain = || "plain 0x7f0000001000 512 0x3".to_owned();
    let (said, way) = registered("plain", true, true, WRITE);
    assert_eq!((said.last(), said.len(), way), (Some(&plain()), 2, Some(Way::PeerMemory)));
    for (file, knows_files) in [(true, false), (false, true), (false, false)] {
        assert_eq!(registered("plain", file, knows_files, WRITE), (vec![plain()], Some(Way::PeerMemory)));
    }
    let (said, way) = registered("relaxed", false, true, WRITE | sys::ACCESS_RELAXED_ORDERING);
    assert!(said[0].starts_with("relaxed 0x7f0000001000 512 0x7f0000001000"), "{said:?}");
    assert_eq!(way, Some(Way::PeerMemory));
}

#[test]
fn what_no_way_takes_is_refused() {
    assert_eq!(registered("", true, true, WRITE).1, None);
}
