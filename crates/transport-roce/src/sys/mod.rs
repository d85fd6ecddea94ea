//! The part of libibverbs' binary interface that this crate uses: our own declarations of it ([`own`]), or with the feature `ibverbs` those that the
//! crate of that name was built with ([`bound`]). Either way the library's functions are looked up when they are needed.

use std::ffi::c_uint;
use std::fmt;

#[cfg(feature = "ibverbs")]
mod bound;
#[cfg(any(not(feature = "ibverbs"), test))]
#[cfg_attr(feature = "ibverbs", allow(dead_code))] // Only compared.
mod own;
#[cfg(test)]
mod tests;

#[cfg(feature = "ibverbs")]
pub(crate) use bound::*;
#[cfg(not(feature = "ibverbs"))]
pub(crate) use own::*;

/// The part of a request that differs from one to another: of writes the first two, of atomics all.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Remote {
    pub(crate) addr: u64,
    /// Of writes, the key in its lower half (little-endian machines) and nothing in the upper.
    pub(crate) add_or_key: u64,
    pub(crate) swap: u64,
    pub(crate) key_of_atomic: u32,
}

/// A request with one entry, which names its bytes.
pub(crate) fn request(opcode: c_uint, flags: c_uint, remote: Remote) -> SendRequest {
    let mut request = SendRequest::zeroed();
    (request.num_sge, request.opcode, request.send_flags) = (1, opcode, flags);
    set_remote(&mut request, remote);
    request
}

/// Requests side by side.
pub(crate) struct Requests(pub(crate) Box<[SendRequest]>);

impl fmt::Debug for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} requests", self.0.len())
    }
}

/// A structure of zeros.
pub(crate) trait Zeroed: Sized {
    fn zeroed() -> Self;
}

macro_rules! zeroed {
    ($($kind:ty),*) => {$(
        impl Zeroed for $kind {
            fn zeroed() -> Self {
                // SAFETY: the structure has integers, pointers and unions of these only, for which zero is a value.
                unsafe { std::mem::zeroed() }
            }
        }
    )*};
}
zeroed!(DeviceAttr, PortAttr, QpInitAttr, QpAttr, SendRequest, ReceiveRequest, WorkCompletion);
