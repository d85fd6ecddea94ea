//! Memory of windows that nobody has any more, but perhaps work that was enqueued: it goes when that has ended.

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
pub(super) struct Buried {
    all: Vec<Grave>,
    /// Whether a thread looks.
    is_watched: bool,
}

struct Grave {
    stretch: Stretch,
    ask: Ask,
    /// Those that have not come, once they are known.
    moments: Option<Vec<Moment>>,
}

impl fmt::Debug for Grave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grave").field("stretch", &self.stretch).field("moments", &self.moments).finish_non_exhaustive()
    }
}

impl Grave {
    /// Whether nothing reads it any more.
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
    /// Lets memory go that nobody of this process reads or writes any more, but what `ask` gives moments behind.
    pub(crate) fn bury(
        self: &Arc<Self>,
        stretch: Stretch,
        ask: impl Fn() -> Result<Option<Vec<Moment>>, CudaError> + Send + 'static,
    ) {
        let mut buried = self.buried();
        let mut grave = Grave { stretch, ask: Box::new(ask), moments: None };
        if grave.is_over() {
            // SAFETY: nobody uses it, and what was enqueued before has ended.
            unsafe { grave.stretch.free() };
            return;
        }
        buried.all.push(grave);
        if !buried.is_watched {
            let device = Arc::clone(self);
            let watch = move || {
                while device.sweep() {
                    thread::sleep(LOOK)
                }
            };
            // Where the system has no thread for it, whoever asks what is left looks.
            buried.is_watched = thread::Builder::new().name("moexpress memory".to_owned()).spawn(watch).is_ok();
        }
    }

    /// Lets go what nothing reads any more of what was buried. Whether some is left to look at.
    pub(crate) fn sweep(&self) -> bool {
        let mut buried = self.buried();
        for grave in buried.all.extract_if(.., Grave::is_over) {
            // SAFETY: as in `bury`.
            unsafe { grave.stretch.free() };
        }
        buried.is_watched &= !buried.all.is_empty();
        !buried.all.is_empty()
    }

    fn buried(&self) -> MutexGuard<'_, Buried> {
        self.buried.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
