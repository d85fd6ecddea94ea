//! How a window ends of which nobody of this process has anything any more: its memory goes when nothing reads it.

use std::sync::Arc;

use super::Readers;
use crate::driver::{DeviceMemory, Freed, Stretch};

/// What is known of who may use a window yet.
#[derive(Debug)]
pub(super) struct Users<'a> {
    /// Others may, or kernels, for ever.
    pub(super) is_left: bool,
    /// What may have enqueued reads of it, where something may.
    pub(super) readers: Option<&'a Arc<Readers>>,
}

/// Of a window whose memory stays for as long as it lives: others get it afterwards.
pub(super) fn fixed(window: DeviceMemory, users: &Users<'_>) {
    // What its ranks enqueued has ended; without readers nothing else reads it.
    end(Freed::Block(window), users);
}

/// Of a window whose memory comes and goes.
pub(super) fn growing(window: Arc<Stretch>, users: &Users<'_>) {
    match Arc::try_unwrap(window) {
        Ok(window) => end(Freed::Stretch(window), users),
        // Somebody has it still, and does not let go of it.
        Err(_) => tracing::warn!("memory of a window is not given back: it is in use"),
    }
}

fn end(window: Freed, users: &Users<'_>) {
    let device = Arc::clone(window.device());
    match users.readers {
        _ if users.is_left => window.stay(),
        // SAFETY: kernels of this process have ended, and nobody has had results in it whose readers may not have.
        None => unsafe { device.free_behind(window, || Ok(Some(Vec::new()))) },
        Some(readers) if readers.may_have_ended() => {
            tracing::warn!(
                "memory of a window is never given back: a call was made on a stream that may have ended, and nobody can ask what that holds"
            );
            window.stay();
        }
        Some(readers) => {
            let readers = Arc::clone(readers);
            // SAFETY: nobody of this process has the window, and these streams hold all that reads it. No stream is named that would have to live.
            unsafe { device.free_behind(window, move || readers.moments(None)) };
        }
    }
}
