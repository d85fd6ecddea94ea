//! A cluster and its runs.

use std::cell::RefCell;
use std::future::Future;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};

use ep_core::engine::Engine;
use ep_core::layout::Queues;
use ep_core::machine::Machine as _;
use ep_core::memory::Estimate;
use ep_core::trace::Record;
use ep_core::{Error, Layout, Nanos, Rank, Settings, Shape, Topology};

use crate::explore::{Config, Step, Wakes, World};
use crate::footprint;
use crate::home::Home;
use crate::machine::Machine;
use crate::timed::{self, Model, Timing, stand_in};
use crate::violation::Violation;
use ep_core::incident::Incident;

/// Events after which a run counts as one that does not end.
const MAX_EVENTS: u64 = 200_000_000;
/// The largest window: windows are sparse, but their directories of pages (24 bytes per 32 MiB) are not.
const MAX_WINDOW: u64 = 1 << 46;

/// What makes a cluster smaller.
const REMEDY: &str =
    "fewer ranks, channels or slots; the timed scheduler takes less than the adversary, low latency the least";

/// Collects what a [`Cluster`] needs to know.
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    topology: Topology,
    settings: Option<Settings>,
    config: Config,
    model: Option<Model>,
    elide_payload: bool,
}

impl Builder {
    /// Everything random derives from it. Automatic: 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.config.seed = seed;
        self
    }

    /// How the window is cut. Automatic: [`Settings::auto`].
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// Makes something go wrong; any number may be.
    pub fn incident(mut self, incident: Incident) -> Self {
        self.config.incidents.push(incident);
        self
    }

    /// Whether accesses that nothing orders are found. Automatic: yes.
    pub fn race_tracking(mut self, on: bool) -> Self {
        self.config.race_tracking = on;
        self
    }

    /// Whether every verb is recorded. Automatic: no.
    pub fn record(mut self, on: bool) -> Self {
        self.config.record = on;
        self
    }

    /// Whether time jumps to deadlines when nothing can run although no fault has acted, for tests that time out on
    /// purpose. Automatic: no, that is a [`Violation::Deadlock`].
    pub fn deadlines(mut self, on: bool) -> Self {
        self.config.deadlines = on;
        self
    }

    /// Whether units land in halves, as on a machine that must not offer them: to show that checks see it. Automatic: no. Explore
    /// only.
    pub fn torn_units(mut self, on: bool) -> Self {
        self.config.torn_units = on;
        self
    }

    /// Events (verbs, deliveries, polls) after which a run is a [`Violation::Livelock`]. Automatic: 200 million.
    pub fn max_events(mut self, events: u64) -> Self {
        self.config.max_events = events;
        self
    }

    /// Which lanes between nodes share a queue. That has one poster; another one is a [`Violation::Rule`]. Automatic:
    /// [`Queues::PER_ROLE`].
    pub fn far_lanes(mut self, far_lanes: Queues) -> Self {
        self.config.far_lanes = far_lanes;
        self
    }

    /// Runs under the timed scheduler, on machines like this, instead of under the adversary: for times, not for faults.
    /// There is no adversary, no race tracking and no seed then.
    pub fn timed(mut self, model: Model) -> Self {
        self.model = Some(model);
        self
    }

    /// Whether payload takes time but no memory, under the timed scheduler: ranks see a shape with the least hidden size
    /// that serves, usually 1, and all that is put, got, copied or summed counts as for the shape that was asked for.
    /// Sums are not those of that shape, and an arena holds more rows than it would. Automatic: no.
    pub fn elide_payload(mut self, on: bool) -> Self {
        self.elide_payload = on;
        self
    }

    /// Cuts the window.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the shape does not suit the ranks, when an incident names a rank that does not exist or is
    /// to happen under the timed scheduler, when payload is to be elided without it, when a window would exceed 2^46
    /// bytes, or when the simulator alone would take more memory than this machine has left, whatever the batches.
    pub fn build(self, shape: Shape) -> Result<Cluster, Error> {
        let ranks = self.topology.ranks();
        let cluster = self.cut(&shape)?;
        let of = format_args!("{ranks} simulated ranks");
        ep_memory::admit(&cluster.footprint(), of, REMEDY)?;
        Ok(cluster)
    }

    /// About what the simulator takes of memory besides the rows that it moves, whether this machine has as much or not.
    ///
    /// # Errors
    /// Those of [`build`](Self::build), but for memory.
    pub fn footprint(self, shape: &Shape) -> Result<Estimate, Error> {
        Ok(self.cut(shape)?.footprint())
    }

    /// The layout that the ranks would see, whether this machine has the memory or not.
    ///
    /// # Errors
    /// As [`footprint`](Self::footprint).
    pub fn layout(self, shape: &Shape) -> Result<Layout, Error> {
        Ok(self.cut(shape)?.layout)
    }

    fn cut(self, shape: &Shape) -> Result<Cluster, Error> {
        let ranks = self.topology.ranks();
        let named = self.config.incidents.iter().flat_map(Incident::ranks);
        if let Some(stranger) = named.into_iter().find(|rank| rank.0 >= ranks) {
            return Err(Error::invalid("rank of an incident", stranger, format_args!("0 to {}", ranks - 1)));
        }
        let settings = self.settings.unwrap_or_else(|| Settings::auto(shape, &self.topology));
        let mut config = self.config;
        if let Some(incident) = config.incidents.first().filter(|_| self.model.is_some()) {
            let name = format!("{incident:?}");
            return Err(Error::invalid("incident under the timed scheduler", name, "none"));
        }
        if self.elide_payload && self.model.is_none() {
            return Err(Error::invalid("scheduler", "explore", "timed, to elide payload"));
        }
        let (layout, elision) = if self.elide_payload {
            stand_in(shape, &self.topology, &settings)?
        } else {
            (Layout::new(shape, &self.topology, &settings)?, Default::default())
        };
        if layout.window_bytes() > MAX_WINDOW {
            let limit = format_args!("at most {MAX_WINDOW} in the simulator");
            return Err(Error::invalid("bytes of a window", layout.window_bytes(), limit));
        }
        config.timed = self.model.map(|model| Timing { model, elision });
        Ok(Cluster { layout, config })
    }
}

/// Ranks in one process, under a seeded adversary or in virtual time (crate documentation).
#[derive(Clone, Debug)]
pub struct Cluster {
    layout: Layout,
    config: Config,
}

impl Cluster {
    /// Starts a cluster.
    pub fn builder(topology: Topology) -> Builder {
        let config = Config {
            seed: 0,
            incidents: Vec::new(),
            race_tracking: true,
            record: false,
            deadlines: false,
            max_events: MAX_EVENTS,
            far_lanes: Queues::PER_ROLE,
            torn_units: false,
            timed: None,
        };
        Builder { topology, settings: None, config, model: None, elide_payload: false }
    }

    /// The layout of every rank's window: with elided payload, that of the shape which the ranks see.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    fn footprint(&self) -> Estimate {
        footprint::of(&self.layout, self.config.timed.is_some())
    }

    /// The seed of its runs.
    pub fn seed(&self) -> u64 {
        self.config.seed
    }

    /// Runs `each` on every rank, in a fresh world, until all have ended: the same every time.
    ///
    /// # Errors
    /// The first [`Violation`] found.
    ///
    /// # Panics
    /// When `each` panics; the seed is printed, and the violation that came before, if any.
    pub fn run_machines<T, F>(&self, each: F) -> Result<Run<T>, Violation>
    where
        F: AsyncFn(Machine) -> T,
    {
        let results = Results::of(self.layout.topology());
        let begin = |machine: Machine| results.awaited(machine.rank(), each(machine));
        let run = match &self.config.timed {
            Some(timing) => timed::run(&self.layout, &self.config, timing, &begin),
            None => self.explore(&begin),
        };
        Ok(results.into(run?))
    }

    /// As [`Cluster::run_machines`]; under the timed scheduler, where there are several nodes and the link between them has
    /// a latency, on `threads` threads. It comes out the same on any number of them: nodes go through time together, in
    /// stretches as long as that latency. Ranks may wait for each other by their machines only.
    ///
    /// # Errors
    /// As [`Cluster::run_machines`].
    ///
    /// # Panics
    /// As [`Cluster::run_machines`].
    pub fn run_machines_on<T, F>(&self, threads: NonZeroUsize, each: F) -> Result<Run<T>, Violation>
    where
        T: Send,
        F: AsyncFn(Machine) -> T + Sync,
    {
        let results = Results::of(self.layout.topology());
        let begin = |machine: Machine| results.awaited(machine.rank(), each(machine));
        let run = match &self.config.timed {
            Some(timing) => timed::run_on(threads, &self.layout, (&self.config, timing), &begin),
            None => self.explore(&begin),
        };
        Ok(results.into(run?))
    }

    /// Runs under the adversary.
    fn explore(&self, begin: &Begin<'_>) -> Result<Run<()>, Violation> {
        let layout = Rc::new(self.layout.clone());
        let (wakes, wakers) = Wakes::new(layout.topology().ranks() as usize);
        let world = Rc::new(RefCell::new(World::new(&layout, &self.config)));
        let home = Home::Explore(Rc::clone(&world));
        let _story = StoryOnPanic { seed: self.config.seed, home: home.clone() };
        let ranks = self.layout.topology().all();
        let mut roots: Vec<Option<Root<'_>>> =
            ranks.map(|rank| Some(begin(Machine::new(&home, &layout, rank, self.config.far_lanes)))).collect();
        let mut outcomes: Vec<Option<Outcome<()>>> = roots.iter().map(|_| None).collect();
        let next = || world.borrow_mut().next(&wakes);
        while let Step::Poll(rank) = next()? {
            if let Some(root) = &mut roots[rank.index()]
                && let Poll::Ready(()) = root.as_mut().poll(&mut Context::from_waker(&wakers[rank.index()]))
            {
                outcomes[rank.index()] = Some(Outcome::Finished(()));
                roots[rank.index()] = None;
                world.borrow_mut().finish(rank);
            }
            let crashing = world.borrow_mut().take_crashing();
            if let Some(rank) = crashing {
                roots[rank.index()] = None;
                outcomes[rank.index()] = Some(Outcome::Crashed);
            }
        }
        let outcomes = outcomes.into_iter().map(|outcome| outcome.unwrap_or(Outcome::Crashed)).collect();
        let mut world = world.borrow_mut();
        let (events, time, resident) = (world.events(), world.now(), world.resident());
        Ok(Run { outcomes, events, time, resident, records: world.take_records() })
    }
}

impl Cluster {
    /// Runs `each` on an endpoint of every rank; else as [`Cluster::run_machines`].
    ///
    /// # Errors
    /// The first [`Violation`] found.
    ///
    /// # Panics
    /// As [`Cluster::run_machines`], and for a topology that the engine does not support.
    pub fn run<T, F>(&self, each: F) -> Result<Run<T>, Violation>
    where
        F: AsyncFn(Engine<Machine>) -> T,
    {
        self.run_machines(async |machine| each(Engine::new(machine).expect("checked by build")).await)
    }

    /// Runs `each` on an endpoint of every rank; else as [`Cluster::run_machines_on`].
    ///
    /// # Errors
    /// The first [`Violation`] found.
    ///
    /// # Panics
    /// As [`Cluster::run`].
    pub fn run_on<T, F>(&self, threads: NonZeroUsize, each: F) -> Result<Run<T>, Violation>
    where
        T: Send,
        F: AsyncFn(Engine<Machine>) -> T + Sync,
    {
        self.run_machines_on(threads, async |machine| each(Engine::new(machine).expect("checked by build")).await)
    }
}

/// The work of a rank. Its result has a place elsewhere ([`Results`]), so that schedulers are compiled once, not for each caller.
pub(crate) type Root<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Begins the work of a rank on its machine.
pub(crate) type Begin<'a> = dyn Fn(Machine) -> Root<'a> + 'a;

/// `[ranks]`: what ranks return.
struct Results<T>(Vec<Mutex<Option<T>>>);

impl<T> Results<T> {
    fn of(topology: &Topology) -> Self {
        Self(topology.all().map(|_| Mutex::new(None)).collect())
    }

    /// Puts what `work` gives where the rank's result belongs.
    fn awaited<'a>(&'a self, rank: Rank, work: impl Future<Output = T> + 'a) -> Root<'a> {
        Box::pin(async move {
            let result = work.await;
            *self.0[rank.index()].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        })
    }

    /// A run with the results of those that finished.
    fn into(self, run: Run<()>) -> Run<T> {
        let results = self.0.into_iter().map(|place| place.into_inner().unwrap_or_else(PoisonError::into_inner));
        let outcome = |(outcome, result): (Outcome<()>, Option<T>)| match (outcome, result) {
            (Outcome::Finished(()), Some(result)) => Outcome::Finished(result),
            _ => Outcome::Crashed,
        };
        Run {
            outcomes: run.outcomes.into_iter().zip(results).map(outcome).collect(),
            events: run.events,
            time: run.time,
            resident: run.resident,
            records: run.records,
        }
    }
}

/// Tells what is known when a rank's code panics: an assertion knows neither the seed nor that a race came before it.
pub(crate) struct StoryOnPanic {
    pub(crate) seed: u64,
    pub(crate) home: Home,
}

impl Drop for StoryOnPanic {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        eprintln!("the simulated cluster ran with seed {}", self.seed);
        if let Some(violation) = self.home.verdict() {
            eprintln!("before the panic: {violation}");
        }
    }
}

/// How a rank ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome<T> {
    /// With its result.
    Finished(T),
    /// By a [`Incident::Crash`].
    Crashed,
}

impl<T> Outcome<T> {
    /// The result, if the rank finished.
    pub fn finished(self) -> Option<T> {
        match self {
            Self::Finished(value) => Some(value),
            Self::Crashed => None,
        }
    }
}

/// A run in which nothing was found.
#[derive(Clone, Debug)]
pub struct Run<T> {
    /// `[ranks]`: how each rank ended.
    pub outcomes: Vec<Outcome<T>>,
    /// Verbs, deliveries and polls; under the timed scheduler, all that happens in virtual time: a role goes on, a
    /// transfer leaves or reaches its target, a publish arrives.
    pub events: u64,
    /// The virtual time at the end: of the last rank.
    pub time: Nanos,
    /// Bytes of memory that stood behind the windows.
    pub resident: u64,
    /// Every verb, if they were recorded; times are event counts, under the timed scheduler those of the roles.
    pub records: Vec<Record>,
}

impl<T> Run<T> {
    /// `[ranks]`: every rank's result.
    ///
    /// # Panics
    /// When a rank crashed.
    pub fn finished(self) -> Vec<T> {
        let result = |(rank, outcome): (u32, Outcome<T>)| match outcome {
            Outcome::Finished(value) => value,
            Outcome::Crashed => panic!("rank {} crashed", Rank(rank)),
        };
        (0..).zip(self.outcomes).map(result).collect()
    }
}
