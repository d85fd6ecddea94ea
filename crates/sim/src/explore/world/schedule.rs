//! Who runs next, and when time passes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use ep_core::{Nanos, Rank};

use super::World;
use super::ports::Slot;
use super::suspend::SUSPENDED;
use crate::violation::Violation;

/// What the executor does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// Poll the future of this rank.
    Poll(Rank),
    /// All ranks have ended.
    Finished,
}

/// Which ranks' futures were woken. Wakers must be `Send`, hence atomics; everything runs on one thread.
#[derive(Debug)]
pub(crate) struct Wakes {
    count: AtomicUsize,
    flags: Vec<AtomicBool>,
}

/// Wakes the future of one rank.
#[derive(Debug)]
struct RootWaker {
    wakes: Arc<Wakes>,
    rank: usize,
}

impl Wake for RootWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.wakes.flags[self.rank].swap(true, Ordering::Relaxed) {
            self.wakes.count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Wakes {
    /// All ranks' flags, set, and a waker for each.
    pub(crate) fn new(ranks: usize) -> (Arc<Self>, Vec<Waker>) {
        let flags = (0..ranks).map(|_| AtomicBool::new(true)).collect();
        let wakes = Arc::new(Self { count: AtomicUsize::new(ranks), flags });
        let waker = |rank| Waker::from(Arc::new(RootWaker { wakes: Arc::clone(&wakes), rank }));
        let wakers = (0..ranks).map(waker).collect();
        (wakes, wakers)
    }

    /// Whether the rank was woken; it counts as not woken from then on.
    pub(crate) fn take(&self, rank: Rank) -> bool {
        let woken = self.flags[rank.index()].swap(false, Ordering::Relaxed);
        if woken {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        woken
    }
}

impl World {
    /// Delivers effects and lets time pass until a future has to be polled.
    ///
    /// # Errors
    /// What the run has found so far, or that nothing can run.
    pub(crate) fn next(&mut self, wakes: &Wakes) -> Result<Step, Violation> {
        loop {
            if let Some(violation) = &self.verdict {
                return Err(violation.clone());
            }
            if self.running == 0 {
                self.drain();
                return Ok(Step::Finished);
            }
            self.wake_zombies();
            self.list_woken(wakes);
            let [roles, victims] = [0, 1].map(|class| self.ready[class].len() + self.woken[class].len());
            let effects = self.lanes.active().len();
            let class = if victims > 0 && self.adversary.pities() {
                1
            } else if effects > 0 && (roles == 0 || self.adversary.delivers()) {
                let lane = self.adversary.below(effects);
                if self.deliver(lane, roles == 0) {
                    self.count_event();
                    continue;
                }
                0
            } else if roles > 0 {
                0
            } else if victims > 0 {
                1
            } else {
                self.pass_time()?;
                self.count_event();
                continue;
            };
            if let Some(rank) = self.choose(class, wakes) {
                self.count_event();
                return Ok(Step::Poll(rank));
            }
        }
    }

    /// Lists the ranks that were woken by something else than a port.
    fn list_woken(&mut self, wakes: &Wakes) {
        self.woken.iter_mut().for_each(Vec::clear);
        if wakes.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        for (rank, (flag, state)) in wakes.flags.iter().zip(&self.ranks).enumerate() {
            if flag.load(Ordering::Relaxed) {
                let class = if state.suspension.is_on() { SUSPENDED } else { usize::from(state.starved) };
                self.woken[class].push(rank as u32);
            }
        }
    }

    /// Draws someone of a class who can run; none when that one's role no longer exists.
    fn choose(&mut self, class: usize, wakes: &Wakes) -> Option<Rank> {
        let ready = self.ready[class].len();
        let pick = self.adversary.below(ready + self.woken[class].len());
        let rank = match pick.checked_sub(ready) {
            None => self.grant(class, pick),
            Some(woken) => Rank(self.woken[class][woken]),
        };
        wakes.take(rank).then_some(rank)
    }

    /// Lets time jump to the next moment at which anything can happen.
    fn pass_time(&mut self) -> Result<(), Violation> {
        let may_pass = self.disturbed || self.deadlines || self.meeting.first_deadline().is_some();
        let now = self.now;
        let due = (0..self.lanes.len()).filter_map(|number| self.lanes.lane(number).next_due(now)).min();
        let deadlines = [due, self.first_deadline(), self.meeting.first_deadline()];
        let next = deadlines.into_iter().flatten().filter(|&time| time < Nanos(u64::MAX)).min();
        let Some(next) = next.filter(|_| may_pass) else {
            return if self.let_all_go_on() { Ok(()) } else { Err(Violation::Deadlock(self.report())) };
        };
        self.now = self.now.max(next);
        for number in 0..self.lanes.len() {
            self.lanes.update(number, self.now);
        }
        self.notify_where(|world: &Self, slot: &Slot| slot.deadline <= world.now);
        self.meeting.expire(self.now);
        Ok(())
    }
}
