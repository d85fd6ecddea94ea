//! Frees that are deferred: of windows that nobody has any more, but perhaps work that was enqueued. They go when that has ended.

use std::fmt;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::{Device, DeviceMemory, Moment, Stretch};
use crate::error::CudaError;

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(250);

/// Gives moments behind what may read some memory; none where nobody can tell now.
type Ask = Box<dyn Fn() -> Result<Option<Vec<Moment>>, CudaError> + Send>;

/// All of a GPU.
#[derive(Debug, Default)]
pub(super) struct Deferred {
    all: Vec<Free>,
    /// Whether a thread looks.
    is_watched: bool,
}

/// A window's memory.
#[derive(Debug)]
pub(crate) enum Freed {
    /// Which the system gets back.
    Stretch(Stretch),
    /// Which is kept, and handed out again.
    Block(DeviceMemory),
}

impl Freed {
    pub(crate) const fn device(&self) -> &Arc<Device> {
        match self {
            Self::Stretch(stretch) => stretch.device(),
            Self::Block(block) => block.device(),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Stretch(stretch) => stretch.bytes(),
            Self::Block(block) => block.bytes() as u64,
        }
    }

    /// # Safety
    /// Nobody uses it, and nothing that was enqueued does.
    unsafe fn free(self) {
        match self {
            // SAFETY: as the caller promises.
            Self::Stretch(stretch) => unsafe { stretch.free() },
            Self::Block(block) => drop(block),
        }
    }

    /// It stays as it is for as long as the process lives.
    pub(crate) fn stay(self) {
        match self {
            Self::Stretch(stretch) => std::mem::forget(stretch),
            Self::Block(mut block) => block.lose(),
        }
    }
}

struct Free {
    freed: Freed,
    ask: Ask,
    /// Those that have not come, once they are known.
    moments: Option<Vec<Moment>>,
}

impl fmt::Debug for Free {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Free").field("freed", &self.freed).field("moments", &self.moments).finish_non_exhaustive()
    }
}

impl Free {
    /// Whether nothing reads the memory any more.
    ///
    /// # Errors
    /// The GPU has failed: nobody will ever know.
    fn is_over(&mut self) -> Result<bool, CudaError> {
        if self.moments.is_none() {
            self.moments = (self.ask)()?;
        }
        let Some(moments) = &mut self.moments else { return Ok(false) };
        *moments = Moment::to_come(std::mem::take(moments))?;
        Ok(moments.is_empty())
    }

    /// Frees it if nothing reads it any more. Gives it back where something may.
    fn go_on(mut self) -> Option<Self> {
        match self.is_over() {
            // SAFETY: nobody has it, and what may have read it has ended.
            Ok(true) => unsafe { self.freed.free() },
            Ok(false) => return Some(self),
            Err(error) => {
                tracing::warn!(%error, bytes = self.freed.bytes(), "memory of a window is never given back: a GPU has failed");
                self.freed.stay();
            }
        }
        None
    }
}

impl Device {
    /// Frees memory when what `ask` gives moments behind has ended; never, where that fails.
    ///
    /// # Safety
    /// Nobody of this process has the memory any more, and work that reads or writes it lies before what `ask` gives.
    pub(crate) unsafe fn free_behind(
        self: &Arc<Self>,
        freed: Freed,
        ask: impl Fn() -> Result<Option<Vec<Moment>>, CudaError> + Send + 'static,
    ) {
        let mut deferred = self.deferred();
        let Some(free) = (Free { freed, ask: Box::new(ask), moments: None }).go_on() else { return };
        deferred.all.push(free);
        if !deferred.is_watched {
            let device = Arc::clone(self);
            let watch = move || {
                while device.sweep() {
                    thread::sleep(LOOK)
                }
            };
            // Where the system has no thread for it, whoever asks what is left looks.
            deferred.is_watched = thread::Builder::new().name("moexpress memory".to_owned()).spawn(watch).is_ok();
        }
    }

    /// Frees what nothing reads any more of what was deferred. Whether some is left to look at.
    pub(crate) fn sweep(&self) -> bool {
        let mut deferred = self.deferred();
        deferred.all = std::mem::take(&mut deferred.all).into_iter().filter_map(Free::go_on).collect();
        deferred.is_watched &= !deferred.all.is_empty();
        !deferred.all.is_empty()
    }

    fn deferred(&self) -> MutexGuard<'_, Deferred> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
