//! Turns: a rank makes one call at a time, and nobody waits for it for ever.
//!
//! A call takes the rank out of its place and brings it back, so that no lock is held while it waits, and with it Python's signal
//! handlers run. Who comes meanwhile is told what is under way: at once from the thread of the call itself (a signal handler, a
//! destructor), which the call waits for; from another thread after the time that a call may take, or, who closes, after three such times.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::guard::LOOK;

/// Gives a value to one call at a time.
#[derive(Debug)]
pub(crate) struct Turns<T> {
    place: Mutex<Place<T>>,
    /// A call has ended.
    ended: Condvar,
    /// It was closed, or is to be once the call under way has ended.
    closes: AtomicBool,
    /// Time that another thread's call may take.
    limit: Duration,
}

#[derive(Debug)]
struct Place<T> {
    /// Out while a call has it; gone once it was closed.
    value: Option<T>,
    under_way: Option<UnderWay>,
    waiting: u32,
}

/// A call that has not ended.
#[derive(Clone, Copy, Debug)]
struct UnderWay {
    name: &'static str,
    thread: ThreadId,
}

/// Why it is nobody's turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refused {
    /// It was closed.
    Closed,
    /// A call by this name is under way in this thread, which it waits for.
    Within(&'static str),
    /// A call by this name was under way in another thread for all the time that was waited.
    Busy(&'static str, Duration),
    /// The caller would not wait on.
    Stopped,
}

impl<T> Turns<T> {
    pub(crate) const fn new(value: T, limit: Duration) -> Self {
        let place = Place { value: Some(value), under_way: None, waiting: 0 };
        Self { place: Mutex::new(place), ended: Condvar::new(), closes: AtomicBool::new(false), limit }
    }

    /// Makes a call by this name with the value, as soon as it is there.
    pub(crate) fn take<R>(
        &self,
        name: &'static str,
        go_on: &mut dyn FnMut() -> bool,
        call: impl FnOnce(&mut T, &mut dyn FnMut() -> bool) -> R,
    ) -> Result<R, Refused> {
        let thread = thread::current().id();
        let place = self.when_free(self.lock(), thread, self.limit, &mut || !self.closes() && go_on());
        if self.closes() {
            return Err(Refused::Closed);
        }
        let mut place = place?;
        let mut value = place.value.take().ok_or(Refused::Closed)?;
        place.under_way = Some(UnderWay { name, thread });
        drop(place);
        // A value whose call panicked does not come back.
        let mut turn = Turn { turns: self, back: None };
        let answer = call(&mut value, &mut || !self.closes() && go_on());
        turn.back = (!self.closes()).then_some(value);
        Ok(answer)
    }

    /// Whether a call under way is to end, so that the value can be closed.
    pub(crate) fn closes(&self) -> bool {
        self.closes.load(Ordering::Relaxed)
    }

    /// Ends the call under way and drops the value, behind `last`. From within that call it is dropped later, when the call has ended.
    pub(crate) fn close(&self, go_on: &mut dyn FnMut() -> bool, last: impl FnOnce(&mut T)) -> Result<(), Refused> {
        let place = self.lock();
        // With the lock: whoever takes it next sees this.
        self.closes.store(true, Ordering::Relaxed);
        // A rank that ends waits as long for its kernels, and once more for the others to part.
        match self.when_free(place, thread::current().id(), self.limit.saturating_mul(3), go_on) {
            Ok(mut place) => {
                let mut value = place.value.take();
                drop(place);
                value.as_mut().map(last);
                drop(value);
                Ok(())
            }
            Err(Refused::Within(_)) => Ok(()),
            Err(refused) => Err(refused),
        }
    }

    /// Waits until no call is under way, for as long as `limit`.
    fn when_free<'a>(
        &'a self,
        mut place: MutexGuard<'a, Place<T>>,
        thread: ThreadId,
        limit: Duration,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<MutexGuard<'a, Place<T>>, Refused> {
        let mut began = None;
        while let Some(other) = place.under_way {
            if other.thread == thread {
                return Err(Refused::Within(other.name));
            }
            if began.get_or_insert_with(Instant::now).elapsed() > limit {
                return Err(Refused::Busy(other.name, limit));
            }
            place.waiting += 1;
            (place, _) = self.ended.wait_timeout(place, LOOK).unwrap_or_else(PoisonError::into_inner);
            place.waiting -= 1;
            if place.under_way.is_some() {
                // It may run Python, and that another call.
                drop(place);
                if !go_on() {
                    return Err(Refused::Stopped);
                }
                place = self.lock();
            }
        }
        Ok(place)
    }

    fn lock(&self) -> MutexGuard<'_, Place<T>> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call's turn, which ends when this is dropped.
struct Turn<'a, T> {
    turns: &'a Turns<T>,
    /// The value, brought back.
    back: Option<T>,
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        let mut place = self.turns.lock();
        place.value = self.back.take();
        place.under_way = None;
        if place.waiting > 0 {
            self.turns.ended.notify_all();
        }
    }
}
