//! The part of libibverbs' binary interface that transports use: declarations of our own, or with the feature `ibverbs` those of the crate
//! `ibverbs-sys`. Either way the library's functions are looked up when they are needed.

use std::ffi::c_uint;

#[cfg(feature = "ibverbs")]
mod bound;
#[cfg(any(not(feature = "ibverbs"), test))]
#[cfg_attr(feature = "ibverbs", allow(dead_code, unreachable_pub))] // Only compared.
mod own;
#[cfg(test)]
mod tests;

#[cfg(feature = "ibverbs")]
pub use bound::*;
#[cfg(not(feature = "ibverbs"))]
pub use own::*;

/// The part of a request that differs from one to another: of writes the first two, of atomics all.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Remote {
    /// Where it goes.
    pub addr: u64,
    /// Of writes, the key in its lower half (little-endian machines) and nothing in the upper.
    pub add_or_key: u64,
    /// Not used by fetch-adds.
    pub swap: u64,
    /// Of atomics, the key.
    pub key_of_atomic: u32,
}

/// A request with one entry, which names its bytes.
pub fn request(opcode: c_uint, flags: c_uint, remote: Remote) -> SendRequest {
    let mut request = SendRequest::zeroed();
    (request.num_sge, request.opcode, request.send_flags) = (1, opcode, flags);
    set_remote(&mut request, remote);
    request
}

/// A structure of zeros.
pub trait Zeroed: Sized {
    /// All of it, its unused parts too.
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
zeroed!(AddressHandle, DeviceAttr, PortAttr, QpInitAttr, QpAttr, SendRequest, ReceiveRequest, WorkCompletion);
