//! The partitions of one thread, and how far all partitions may go before they tell each other what they did.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ep_core::trace::Record;
use ep_core::{Layout, Nanos, Rank};

use super::mail::Bag;
use super::{NEVER, Partitions, Timing, World};
use crate::cluster::{Begin, Root, StoryOnPanic};
use crate::explore::Config;
use crate::home::Home;
use crate::machine::Machine;
use crate::violation::{Report, Violation};
use crate::wakers::Woken;

/// What is to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outlook {
    /// When the next thing happens.
    pub(super) next: Nanos,
    /// No wait ends at a deadline before.
    pub(super) deadline: Nanos,
    /// Whether time may jump to a deadline when nothing else happens.
    pub(super) deadlines: bool,
    /// Ranks whose future has not ended.
    pub(super) running: u32,
    /// So far.
    pub(super) events: u64,
}

impl Outlook {
    const NOTHING: Self = Self { next: NEVER, deadline: NEVER, deadlines: false, running: 0, events: 0 };

    /// That of both.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            next: self.next.min(other.next),
            deadline: self.deadline.min(other.deadline),
            deadlines: self.deadlines || other.deadlines,
            running: self.running + other.running,
            events: self.events + other.events,
        }
    }

    /// What all do next: the same for whoever asks.
    fn course(self, partitions: Partitions, max_events: u64) -> Course {
        let Self { next, deadline, deadlines, running, events } = self;
        if events > max_events {
            return Course::End(Ended::Livelock);
        }
        if running == 0 {
            return Course::End(Ended::Finished);
        }
        if next == NEVER && (deadline == NEVER || !deadlines) {
            return Course::End(Ended::Deadlock);
        }
        if next < deadline {
            return Course::Go(Stretch { end: partitions.end_of_stretch(next).min(deadline), expired: None });
        }
        Course::Go(Stretch { end: partitions.end_of_stretch(deadline), expired: Some(deadline) })
    }
}

/// A stretch of time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    /// All that happens before.
    pub(super) end: Nanos,
    /// Waits end whose deadline is not later.
    pub(super) expired: Option<Nanos>,
}

/// How a run ended, if it was not by a violation or a panic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ended {
    Finished,
    Deadlock,
    Livelock,
}

enum Course {
    Go(Stretch),
    End(Ended),
}

/// What stopped a partition.
pub(super) enum Stop {
    Found(Violation),
    Panicked(Box<dyn Any + Send>),
}

/// Does `work`, and returns if it panics: other threads wait for this one, which tells them before it unwinds.
pub(super) fn caught<T>(work: impl FnOnce() -> Result<T, Violation>) -> Result<T, Stop> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => outcome.map_err(Stop::Found),
        Err(panic) => Err(Stop::Panicked(panic)),
    }
}

/// One partition: its world, and the futures of its ranks.
struct Member<'a> {
    world: Rc<RefCell<World>>,
    woken: Arc<Woken>,
    wakers: Vec<Waker>,
    roots: Vec<Option<Root<'a>>>,
    seed: u64,
}

impl<'a> Member<'a> {
    fn new(
        layout: &Rc<Layout>,
        (config, timing): (&Config, &Timing),
        place: (Partitions, usize),
        begin: &Begin<'a>,
    ) -> Self {
        let world = World::new(layout, config, timing, place);
        let ranks = world.its_ranks();
        let (woken, wakers) = Woken::new(ranks.len() as u32);
        let world = Rc::new(RefCell::new(world));
        let home = Home::Timed(Rc::clone(&world));
        let machine = |rank| Machine::new(&home, layout, Rank(rank), config.far_lanes);
        let roots = ranks.map(|rank| Some(begin(machine(rank)))).collect();
        Self { world, woken, wakers, roots, seed: config.seed }
    }

    /// Goes through a stretch.
    fn run(&mut self, stretch: &Stretch, bags: &mut Vec<Bag>) -> Result<(), Violation> {
        let _story = StoryOnPanic { seed: self.seed, home: Home::Timed(Rc::clone(&self.world)) };
        let first = self.world.borrow().its_ranks().start;
        std::mem::swap(&mut self.world.borrow_mut().bags, bags);
        loop {
            let next = self.world.borrow_mut().next(&self.woken, stretch)?;
            let Some(rank) = next else { break };
            let place = (rank.0 - first) as usize;
            if let Some(root) = &mut self.roots[place]
                && let Poll::Ready(()) = root.as_mut().poll(&mut Context::from_waker(&self.wakers[place]))
            {
                self.roots[place] = None;
                self.world.borrow_mut().finish(rank);
            }
        }
        let mut world = self.world.borrow_mut();
        world.mail_departed(stretch.end);
        std::mem::swap(&mut world.bags, bags);
        Ok(())
    }

    fn close(self, ended: Ended) -> Closed {
        let mut world = self.world.borrow_mut();
        Closed {
            finished: self.roots.iter().filter(|root| root.is_none()).count(),
            events: world.events(),
            time: world.end(),
            resident: world.resident(),
            records: world.take_records(),
            report: (ended != Ended::Finished).then(|| world.report()),
        }
    }
}

/// A partition at the end of a run.
pub(super) struct Closed {
    /// Ranks that ended.
    pub(super) finished: usize,
    pub(super) events: u64,
    pub(super) time: Nanos,
    pub(super) resident: u64,
    pub(super) records: Vec<Record>,
    /// Who waits for what, where it did not finish.
    pub(super) report: Option<Box<Report>>,
}

/// What every partition of a crew has to say at the end, unless it stopped, or none when another crew did.
pub(super) type Outcomes = Result<Option<(Ended, Vec<Closed>)>, Stop>;

/// How a crew hears of the others.
pub(super) trait Company {
    /// What all see together; none when one of them stopped.
    fn outlook(&mut self, own: Option<Outlook>) -> Option<Outlook>;

    /// Sends the bags, and hands the partitions of this crew those that came for them: the number of the partition among the
    /// crew's, and what came, in the order of the senders.
    fn exchange(&mut self, bags: &mut [Bag], receive: impl FnMut(usize, &mut Bag));
}

/// The partitions of one thread.
pub(super) struct Crew<'a> {
    partitions: Partitions,
    max_events: u64,
    members: Vec<Member<'a>>,
    /// To every partition.
    bags: Vec<Bag>,
}

impl<'a> Crew<'a> {
    /// Those with such numbers.
    pub(super) fn new(
        layout: &Layout,
        (config, timing): (&Config, &Timing),
        (partitions, numbers): (Partitions, std::ops::Range<usize>),
        begin: &Begin<'a>,
    ) -> Self {
        let layout = Rc::new(layout.clone());
        let member = |number| Member::new(&layout, (config, timing), (partitions, number), begin);
        Self {
            partitions,
            max_events: config.max_events,
            members: numbers.map(member).collect(),
            bags: (0..partitions.count()).map(|_| Bag::default()).collect(),
        }
    }

    /// Goes through time, together with the others, to the end.
    pub(super) fn run(mut self, company: &mut impl Company) -> Outcomes {
        let mut stop = None;
        loop {
            let outlook = |member: &mut Member<'a>| member.world.borrow_mut().outlook(&member.woken);
            let own = stop.is_none().then(|| self.members.iter_mut().map(outlook).fold(Outlook::NOTHING, Outlook::and));
            let all = company.outlook(own);
            if let Some(stop) = stop {
                return Err(stop);
            }
            let Some(all) = all else { return Ok(None) };
            let stretch = match all.course(self.partitions, self.max_events) {
                Course::Go(stretch) => stretch,
                Course::End(ended) => {
                    return Ok(Some((ended, self.members.into_iter().map(|member| member.close(ended)).collect())));
                }
            };
            stop = self.members.iter_mut().find_map(|member| caught(|| member.run(&stretch, &mut self.bags)).err());
            let members = &self.members;
            company.exchange(&mut self.bags, |at, bag| {
                if stop.is_none() {
                    stop = caught(|| {
                        members[at].world.borrow_mut().receive(bag);
                        Ok(())
                    })
                    .err();
                }
            });
        }
    }
}
