//! Devices, memory, streams, events and launches, safely, over a [`Table`] of functions.
//!
//! A thread has one device at a time: every call here names its device first, so that ranks may share a thread. Nothing here panics or waits.

mod context;
mod device;
mod errors;
mod ipc;
mod memory;
mod network;
mod stream;
mod table;

pub(crate) use context::{
    Completions, Context, Detail, ELEMENT, Info, LOCAL_OUTPUT, MEMORIES, Memories, REMOTE_INPUT, Route, Routes,
    VECTOR_CORES, WorkQueue,
};
pub use device::Device;
pub use errors::AscendError;
pub(crate) use errors::*;
pub(crate) use ipc::{Exported, Imported, KEY, Key, PEER_ACCESS};
pub use memory::Memory;
pub(crate) use network::{Admitted, done};
pub use network::{Connect, DESCRIBED, Described, Network, QueueView, Remote};
pub(crate) use stream::Kernel;
pub use stream::{Event, Stream};
pub(crate) use table::{
    BATCH, DEVICE_TO_DEVICE, DEVICE_TO_HOST, EVENT_COMPLETE, HOST_TO_DEVICE, MALLOC_HUGE_FIRST, MALLOC_HUGE_FIRST_P2P,
    SCHEDULE_MODE, STOP_ON_FAILURE, TIMEOUT,
};
pub use table::{LIBRARIES, LaunchAttribute, LaunchConfig, Table, is_present};

use std::ffi::CStr;

/// Makes an error of what a function returned.
fn check(table: &Table, call: &'static str, code: Code) -> Result<(), AscendError> {
    if code == SUCCESS {
        return Ok(());
    }
    let mut cause = name_of(code);
    // SAFETY: the function takes nothing, and gives null or a string that lives until the thread's next call.
    let said = table.recent_error.map(|recent_error| unsafe { recent_error() }).filter(|said| !said.is_null());
    if let Some(said) = said {
        // SAFETY: as above; it ends with zero.
        let said = unsafe { CStr::from_ptr(said) }.to_string_lossy();
        cause = format!("{cause}; {}", said.trim());
    }
    Err(AscendError::Call { call, cause, code })
}
