//! What may still read results that nobody has any more, when their ranks have ended: what certain streams hold.

use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::{Device, Moment, Stream};
use crate::error::CudaError;

/// Streams that results of a process's ranks are read on.
#[derive(Debug, Default)]
pub(crate) struct Readers(Mutex<Streams>);

/// By GPU and the driver's handle, but for those of the ranks' calls.
#[derive(Debug, Default)]
struct Streams {
    own: Vec<Arc<Stream>>,
    /// That live as long as the process.
    lasting: Vec<(usize, usize)>,
    /// That calls have followed.
    followed: Vec<(Arc<Device>, usize)>,
}

impl Readers {
    /// A rank's calls go to this one.
    pub(crate) fn add(&self, own: &Arc<Stream>) {
        self.with(|streams| streams.own.push(Arc::clone(own)));
    }

    /// `stream` is never destroyed.
    ///
    /// # Safety
    /// It is a stream of `device`, and never destroyed: it is asked for long after.
    pub(crate) unsafe fn lasts(&self, device: &Device, stream: usize) {
        self.with(|Streams { lasting, .. }| {
            if !lasting.contains(&(device.ordinal(), stream)) {
                lasting.push((device.ordinal(), stream));
            }
        });
    }

    /// A call follows `stream`.
    pub(crate) fn follow(&self, device: &Arc<Device>, stream: usize) {
        self.with(|Streams { own, followed, .. }| {
            let is_own = own.iter().any(|own| own.raw() as usize == stream);
            let is = |(of, other): &(Arc<Device>, usize)| (of.ordinal(), *other) == (device.ordinal(), stream);
            if !is_own && !followed.iter().any(is) {
                followed.push((Arc::clone(device), stream));
            }
        });
    }

    /// Whether one of them may have ended: nobody may ask what that holds, ever.
    pub(crate) fn may_have_ended(&self) -> bool {
        self.with(|streams| streams.followed.iter().any(|(device, stream)| !streams.lasts(device, *stream)))
    }

    /// Moments behind all that these streams hold now; none where one of them is captured, or may have ended and is not the one that `lives`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// `lives`, of any of the GPUs, does.
    pub(crate) unsafe fn moments(&self, lives: Option<usize>) -> Result<Option<Vec<Moment>>, CudaError> {
        self.with(|streams| {
            let may_have_ended =
                |(device, stream): &(Arc<Device>, usize)| lives != Some(*stream) && !streams.lasts(device, *stream);
            if streams.followed.iter().any(may_have_ended) {
                return Ok(None);
            }
            let own = streams.own.iter().map(|own| (own.device(), own.raw() as usize));
            let all = own.chain(streams.followed.iter().map(|(device, stream)| (device, *stream)));
            // SAFETY: streams that live as long as the process, that this value keeps, and one of which the caller promises it.
            all.map(|(device, stream)| unsafe { Moment::behind(device, stream) }).collect()
        })
    }

    fn with<T>(&self, work: impl FnOnce(&mut Streams) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Streams {
    fn lasts(&self, device: &Device, stream: usize) -> bool {
        self.lasting.contains(&(device.ordinal(), stream))
    }
}
