//! Frees that are deferred: of windows that nobody has any more, but perhaps work that was enqueued. They go when that has ended.

use std::fmt;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::{Device, Moment, Stretch};
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

struct Free {
    stretch: Stretch,
    ask: Ask,
    /// Those that have not come, once they are known.
    moments: Option<Vec<Moment>>,
}

impl fmt::Debug for Free {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Free").field("stretch", &self.stretch).field("moments", &self.moments).finish_non_exhaustive()
    }
}

impl Free {
    /// Whether nothing reads the memory any more.
    fn is_over(&mut self) -> bool {
        if self.moments.is_none() {
            self.moments = (self.ask)().unwrap_or_default();
        }
        let Some(moments) = &mut self.moments else { return false };
        // Where the GPU fails, nothing is known.
        moments.retain(|moment| !moment.has_come().unwrap_or(false));
        moments.is_empty()
    }
}

impl Device {
    /// Frees memory that nobody of this process reads or writes any more, but what `ask` gives moments behind, when that has ended.
    pub(crate) fn free_behind(
        self: &Arc<Self>,
        stretch: Stretch,
        ask: impl Fn() -> Result<Option<Vec<Moment>>, CudaError> + Send + 'static,
    ) {
        let mut deferred = self.deferred();
        let mut free = Free { stretch, ask: Box::new(ask), moments: None };
        if free.is_over() {
            // SAFETY: nobody uses it, and what was enqueued before has ended.
            unsafe { free.stretch.free() };
            return;
        }
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
        for free in deferred.all.extract_if(.., Free::is_over) {
            // SAFETY: as in `free_behind`.
            unsafe { free.stretch.free() };
        }
        deferred.is_watched &= !deferred.all.is_empty();
        !deferred.all.is_empty()
    }

    fn deferred(&self) -> MutexGuard<'_, Deferred> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
