//! Runs: all partitions on one thread, or on several.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::{Barrier, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use ep_core::Layout;

use super::crew::{Closed, Company, Crew, Ended, Outcomes, Outlook, Stop, caught};
use super::mail::Bag;
use super::{Partitions, Timing};
use crate::cluster::{Begin, Outcome, Root, Run};
use crate::explore::Config;
use crate::machine::Machine;
use crate::violation::Violation;

/// Runs all partitions on this thread.
pub(crate) fn run(layout: &Layout, config: &Config, timing: &Timing, begin: &Begin<'_>) -> Result<Run<()>, Violation> {
    let partitions = Partitions::new(layout.topology(), &timing.model);
    let crew = Crew::new(layout, (config, timing), (partitions, 0..partitions.count()), begin);
    conclude(vec![crew.run(&mut Alone)])
}

/// Runs the partitions on `threads` threads, or fewer where there are fewer partitions or the system has no more threads
/// (`ulimit -u`): it comes out the same.
pub(crate) fn run_on<'a>(
    threads: NonZeroUsize,
    layout: &Layout,
    (config, timing): (&Config, &Timing),
    begin: &(dyn Fn(Machine) -> Root<'a> + Sync + 'a),
) -> Result<Run<()>, Violation> {
    let partitions = Partitions::new(layout.topology(), &timing.model);
    let count = partitions.count();
    let mut threads = threads.get().min(count);
    while threads > 1 {
        let crews = (0..threads).map(|thread| thread * count / threads..(thread + 1) * count / threads);
        let post = PostOffice::new(crews.collect(), count);
        let work = |number: usize| {
            let mut company = Among { post: &post, number };
            let numbers = post.crews[number].clone();
            let crew = caught(|| Ok(Crew::new(layout, (config, timing), (partitions, numbers), begin)));
            if crew.is_err() {
                company.outlook(None);
            }
            crew?.run(&mut company)
        };
        match on_threads(threads, |_| thread::Builder::new(), work) {
            Ok(ended) => return conclude(ended),
            Err(started) => threads = started,
        }
    }
    run(layout, config, timing, begin)
}

/// Does `work` on all of so many threads; or, where the system has fewer, on none, and says how many it has. Crews wait for
/// each other: none begins before all threads have started.
fn on_threads(
    threads: usize,
    thread: impl Fn(usize) -> thread::Builder,
    work: impl Fn(usize) -> Outcomes + Sync,
) -> Result<Vec<Outcomes>, usize> {
    let all_started = &OnceLock::new();
    let work = &work;
    thread::scope(|scope| {
        let begin = |number| move || if *all_started.wait() { work(number) } else { Ok(None) };
        let start = |number| thread(number).spawn_scoped(scope, begin(number)).ok();
        let started: Vec<_> = (0..threads).map_while(start).collect();
        let all = started.len() == threads;
        // It is set here alone. Where a thread is missing it lets go those that have started.
        let _ = all_started.set(all);
        let ended = |handle: thread::ScopedJoinHandle<'_, Outcomes>| {
            handle.join().unwrap_or_else(|panic| Err(Stop::Panicked(panic)))
        };
        if all { Ok(started.into_iter().map(ended).collect()) } else { Err(started.len()) }
    })
}

/// What came of it, crews in the order of their partitions.
fn conclude(crews: Vec<Outcomes>) -> Result<Run<()>, Violation> {
    let mut all = Vec::new();
    let mut how = Ended::Finished;
    for crew in crews {
        match crew {
            Ok(Some((ended, closed))) => {
                how = ended;
                all.extend(closed);
            }
            Ok(None) => {}
            Err(Stop::Found(violation)) => return Err(violation),
            Err(Stop::Panicked(panic)) => std::panic::resume_unwind(panic),
        }
    }
    let reports = all.iter_mut().filter_map(|closed: &mut Closed| closed.report.take());
    if let Some(report) = reports.reduce(|one, other| Box::new(one.and(*other))) {
        return Err(if how == Ended::Livelock { Violation::Livelock(report) } else { Violation::Deadlock(report) });
    }
    let mut run = Run { outcomes: Vec::new(), events: 0, time: ep_core::Nanos(0), resident: 0, records: Vec::new() };
    for closed in all {
        run.outcomes.extend(std::iter::repeat_n(Outcome::Finished(()), closed.finished));
        run.events += closed.events;
        run.time = run.time.max(closed.time);
        run.resident += closed.resident;
        run.records.extend(closed.records);
    }
    run.records.sort_by_key(|record| record.at);
    Ok(run)
}

/// The only crew.
struct Alone;

impl Company for Alone {
    fn outlook(&mut self, own: Option<Outlook>) -> Option<Outlook> {
        own
    }

    fn exchange(&mut self, bags: &mut [Bag], mut receive: impl FnMut(usize, &mut Bag)) {
        bags.iter_mut().enumerate().for_each(|(at, bag)| receive(at, bag));
    }
}

/// Where crews on several threads meet. Between two meetings each has its own part of everything, so that no lock is ever
/// waited for.
struct PostOffice {
    /// The partitions of each.
    crews: Vec<Range<usize>>,
    /// `[crews][partitions]`: the bags from each crew.
    bags: Vec<Vec<Mutex<Bag>>>,
    /// `[crews]`
    outlooks: Vec<Mutex<Option<Outlook>>>,
    meeting: Barrier,
}

impl PostOffice {
    fn new(crews: Vec<Range<usize>>, partitions: usize) -> Self {
        Self {
            bags: crews.iter().map(|_| (0..partitions).map(|_| Mutex::default()).collect()).collect(),
            outlooks: crews.iter().map(|_| Mutex::default()).collect(),
            meeting: Barrier::new(crews.len()),
            crews,
        }
    }
}

/// A crew with others on other threads.
struct Among<'a> {
    post: &'a PostOffice,
    number: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Company for Among<'_> {
    fn outlook(&mut self, own: Option<Outlook>) -> Option<Outlook> {
        *lock(&self.post.outlooks[self.number]) = own;
        self.post.meeting.wait();
        self.post.outlooks.iter().map(|outlook| *lock(outlook)).reduce(|one, other| Some(one?.and(other?))).flatten()
    }

    fn exchange(&mut self, bags: &mut [Bag], mut receive: impl FnMut(usize, &mut Bag)) {
        // What it takes back was emptied: by the same meeting a round before.
        let own = &self.post.bags[self.number];
        own.iter().zip(bags).for_each(|(place, bag)| std::mem::swap(&mut *lock(place), bag));
        self.post.meeting.wait();
        for (at, partition) in self.post.crews[self.number].clone().enumerate() {
            self.post.bags.iter().for_each(|from| receive(at, &mut lock(&from[partition])));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// How many threads have begun, of four of which one cannot be started.
    fn begun_without(missing: Option<usize>) -> (Result<usize, usize>, usize) {
        // No address space holds such a stack.
        let stack = |number| if Some(number) == missing { 1 << 60 } else { 1 << 20 };
        let (begun, all) = (AtomicUsize::new(0), Barrier::new(4));
        let work = |_| {
            begun.fetch_add(1, Ordering::Relaxed);
            all.wait();
            Ok(None)
        };
        let ran = on_threads(4, |number| thread::Builder::new().stack_size(stack(number)), work);
        (ran.map(|ended| ended.len()), begun.into_inner())
    }

    #[test]
    fn where_a_thread_cannot_be_started_none_begins_and_none_is_waited_for() {
        assert_eq!(begun_without(None), (Ok(4), 4));
        assert_eq!(begun_without(Some(2)), (Err(2), 0));
        assert_eq!(begun_without(Some(0)), (Err(0), 0));
    }
}
