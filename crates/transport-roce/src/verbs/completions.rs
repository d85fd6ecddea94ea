//! Completion queues.

use std::ffi::c_int;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ep_rdma::{Error, sys};

use super::Context;

/// A completion queue.
#[derive(Clone, Debug)]
pub(crate) struct Completions(Arc<OwnedCompletions>);

#[derive(Debug)]
struct OwnedCompletions {
    context: Context,
    raw: NonNull<sys::Cq>,
}

// SAFETY: libibverbs allows any thread to use a completion queue.
unsafe impl Send for OwnedCompletions {}
// SAFETY: as above.
unsafe impl Sync for OwnedCompletions {}

impl Completions {
    /// With room for `entries`.
    pub(crate) fn new(context: &Context, entries: u32) -> Result<Self, Error> {
        let null = ptr::null_mut();
        // SAFETY: an opened device; no context, no channel, the first vector.
        let raw = unsafe { (context.functions().ibv_create_cq)(context.raw(), entries as c_int, null, null, 0) };
        Ok(Self(Arc::new(OwnedCompletions { context: context.clone(), raw: context.made("ibv_create_cq", raw)? })))
    }

    pub(super) fn raw(&self) -> *mut sys::Cq {
        self.0.raw.as_ptr()
    }

    /// Takes what has completed, and returns how much of `into` it filled.
    pub(crate) fn poll(&self, into: &mut [sys::WorkCompletion]) -> Result<usize, Error> {
        let cq = self.raw();
        // SAFETY: the queue lives, and its first field is its device, which lives as well.
        let poll = unsafe { (*(*cq).context).ops.poll_cq };
        let Some(poll) = poll else { return Err(Error::Symbol { name: "poll_cq" }) };
        // SAFETY: room for as many entries as are asked for.
        let count = unsafe { poll(cq, into.len() as c_int, into.as_mut_ptr()) };
        counted(count).map_err(|error| Error::call("ibv_poll_cq", self.0.context.name(), error))
    }
}

/// How many there were. A negative number is no error of the system: providers give what they like, many -1 for any.
fn counted(count: c_int) -> Result<usize, io::Error> {
    usize::try_from(count).map_err(|_| io::Error::other(format!("it gave {count}")))
}

impl Drop for OwnedCompletions {
    fn drop(&mut self) {
        // SAFETY: made by `Completions::new`; its queue pairs have been destroyed, as they held it.
        unsafe { (self.context.functions().ibv_destroy_cq)(self.raw.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_provider_gives_that_is_no_count_is_no_error_of_the_system() {
        assert_eq!(counted(3).unwrap(), 3);
        let said = Error::call("ibv_poll_cq", "rxe0", counted(-1).unwrap_err()).to_string();
        assert_eq!(said, "ibv_poll_cq on rxe0 failed: it gave -1 (see the system's log (dmesg))");
    }
}
