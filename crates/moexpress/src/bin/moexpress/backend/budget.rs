//! How long a rank of a run may go on when another has stopped for good.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A part of the deadline, for what comes after a call that has taken all of it: telling the others, and being told.
const REST: u32 = 25;

/// One deadline for whatever is under way, from the last thing that went well. Who has waited for a rank in vain for most
/// of it does not wait for that rank's account for as long again.
#[derive(Debug)]
pub(super) struct Budget {
    deadline: Duration,
    since: Mutex<Instant>,
}

impl Budget {
    /// Begins now.
    pub(super) fn new(deadline: Duration) -> Self {
        Self { deadline, since: Mutex::new(Instant::now()) }
    }

    /// Something went well.
    pub(super) fn renew(&self) {
        *self.since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// What is left of the deadline and 4 % of it.
    pub(super) fn left(&self) -> Duration {
        let since = *self.since.lock().unwrap_or_else(PoisonError::into_inner);
        (self.deadline + self.deadline / REST).saturating_sub(since.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_took_the_deadline_leaves_a_twenty_fifth_of_it() {
        let deadline = Duration::from_secs(100);
        let taken = |time| Budget { deadline, since: Mutex::new(Instant::now().checked_sub(time).unwrap()) };
        let late = taken(deadline);
        assert!(late.left() <= Duration::from_secs(4) && late.left() > Duration::from_secs(3), "{:?}", late.left());
        assert_eq!(taken(deadline * 2).left(), Duration::ZERO);
        late.renew();
        assert!(late.left() > deadline);
    }
}
