//! The network: its settings, its clock, the ends that are on it, and the faults that were planted.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use ep_core::layout::Queues;
use ep_core::transport::{DevicePlace, Place, Transport, WindowMemory};
use ep_core::{Error, Rank};

use crate::end::End;
use crate::lanes::LoopLanes;
use crate::pace::Pace;

/// The longest latency, delay or timeout.
const LONGEST: Duration = Duration::from_secs(60);
/// The most verbs that a lane may hold.
const DEEPEST: u32 = 65_536;

/// A network made of software. Clones are the same network.
#[derive(Clone, Debug)]
pub struct Loop {
    settings: Settings,
    network: Arc<Network>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    far_lanes: Queues,
    pub(crate) pace: Pace,
    pub(crate) depth: usize,
    pub(crate) processes: bool,
}

/// What clones share.
#[derive(Debug)]
pub(crate) struct Network {
    pub(crate) id: u64,
    clock: Clock,
    next: AtomicU64,
    ends: Mutex<BTreeMap<u64, Weak<End>>>,
    answer_timeout: AtomicU64,
    /// Whether any fault was ever planted: without, nobody looks.
    planted: AtomicBool,
    faults: Mutex<BTreeMap<(Rank, Rank), Planted>>,
}

/// Faults of one direction.
#[derive(Clone, Copy, Debug, Default)]
struct Planted {
    delay: u64,
    lost: bool,
}

#[derive(Debug)]
enum Clock {
    Real(Instant),
    /// As tests set it.
    #[cfg(test)]
    Set(AtomicU64),
}

impl Default for Loop {
    fn default() -> Self {
        Self::new()
    }
}

impl Loop {
    /// As fast as cores copy, without latency. Each role has a queue of its own, which holds 256 verbs.
    pub fn new() -> Self {
        Self::on(Clock::Real(Instant::now()))
    }

    fn on(clock: Clock) -> Self {
        // Where there is no randomness, time will do: it tells processes apart, and a process makes its own ones apart.
        let chance = || std::time::SystemTime::UNIX_EPOCH.elapsed().map_or(1, |since| since.as_nanos() as u64);
        let network = Network {
            id: getrandom::u64().unwrap_or_else(|_| chance()),
            clock,
            next: AtomicU64::new(1),
            ends: Mutex::default(),
            answer_timeout: AtomicU64::new(nanos(Duration::from_millis(100))),
            planted: AtomicBool::new(false),
            faults: Mutex::default(),
        };
        let settings = Settings { far_lanes: Queues::PER_ROLE, pace: Pace::default(), depth: 256, processes: false };
        Self { settings, network: Arc::new(network) }
    }

    /// Between ranks that are processes of one host and one user, each with a loop of its own, of the same settings. A card's way in is then that
    /// from each of its peers, and faults are planted in the process that posts.
    #[must_use]
    pub const fn between_processes(mut self) -> Self {
        self.settings.processes = true;
        self
    }

    /// Which lanes share a queue.
    #[must_use]
    pub fn queues(mut self, queues: Queues) -> Self {
        self.settings.far_lanes = queues;
        self
    }

    /// What each rank's card carries, in bytes a second: so much out, and as much in.
    ///
    /// # Errors
    /// [`Error::Invalid`] for none.
    pub fn bytes_per_second(mut self, rate: u64) -> Result<Self, Error> {
        let rate = NonZeroU64::new(rate).ok_or_else(|| Error::invalid("the loop's bytes a second", 0, "1 or more"))?;
        self.settings.pace.set_rate(rate);
        Ok(self)
    }

    /// How long the last byte of a put is on its way.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than a minute.
    pub fn latency(mut self, latency: Duration) -> Result<Self, Error> {
        self.settings.pace.latency = limited("the loop's latency", latency)?;
        Ok(self)
    }

    /// Verbs that a lane holds: when it is full, its poster waits.
    ///
    /// # Errors
    /// [`Error::Invalid`] for none, and for more than 65,536.
    pub fn queue_depth(mut self, verbs: u32) -> Result<Self, Error> {
        if verbs == 0 || verbs > DEEPEST {
            return Err(Error::invalid("the loop's queue depth", verbs, format_args!("1 to {DEEPEST}")));
        }
        self.settings.depth = verbs as usize;
        Ok(self)
    }

    /// After how long without an answer a [lost](Self::lose) lane breaks: 100 ms otherwise. For all clones.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than a minute.
    pub fn answer_timeout(self, timeout: Duration) -> Result<Self, Error> {
        let timeout = limited("the loop's answer timeout", timeout)?;
        self.network.answer_timeout.store(timeout, Ordering::Relaxed);
        Ok(self)
    }

    /// Plants a delay: what `from` posts to `to` from now on takes so much longer. Zero takes it away.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than a minute.
    pub fn delay(&self, from: Rank, to: Rank, by: Duration) -> Result<(), Error> {
        let delay = limited("the loop's delay", by)?;
        self.network.plant(from, to, |planted| planted.delay = delay);
        Ok(())
    }

    /// Plants a loss: nothing that `from` posted to `to` arrives from now on, until that is [mended](Self::mend).
    pub fn lose(&self, from: Rank, to: Rank) {
        self.network.plant(from, to, |planted| planted.lost = true);
    }

    /// Takes a loss away: what is still under way arrives. Lanes that have broken stay so until all ranks connect anew.
    pub fn mend(&self, from: Rank, to: Rank) {
        self.network.plant(from, to, |planted| planted.lost = false);
    }

    #[cfg(test)]
    pub(crate) fn with_set_clock() -> Self {
        Self::on(Clock::Set(AtomicU64::new(0)))
    }

    #[cfg(test)]
    pub(crate) fn set_clock(&self, now: u64) {
        let Clock::Set(clock) = &self.network.clock else { panic!("a real clock") };
        clock.store(now, Ordering::Relaxed);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn limited(what: &str, duration: Duration) -> Result<u64, Error> {
    if duration > LONGEST {
        return Err(Error::invalid(what, format_args!("{duration:?}"), format_args!("at most {LONGEST:?}")));
    }
    Ok(nanos(duration))
}

impl Network {
    pub(crate) fn now(&self) -> u64 {
        match &self.clock {
            Clock::Real(origin) => nanos(origin.elapsed()),
            #[cfg(test)]
            Clock::Set(now) => now.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn answer_timeout(&self) -> u64 {
        self.answer_timeout.load(Ordering::Relaxed)
    }

    fn ends(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<End>>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes an end known, and gives its number.
    pub(crate) fn add(&self, end: &Arc<End>) -> u64 {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.ends().insert(number, Arc::downgrade(end));
        number
    }

    pub(crate) fn end(&self, number: u64) -> Option<Arc<End>> {
        self.ends().get(&number)?.upgrade()
    }

    pub(crate) fn remove(&self, number: u64) {
        self.ends().remove(&number);
    }

    fn plant(&self, from: Rank, to: Rank, how: impl FnOnce(&mut Planted)) {
        how(self.faults.lock().unwrap_or_else(PoisonError::into_inner).entry((from, to)).or_default());
        self.planted.store(true, Ordering::Release);
    }

    fn planted(&self, from: Rank, to: Rank) -> Planted {
        if !self.planted.load(Ordering::Acquire) {
            return Planted::default();
        }
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        faults.get(&(from, to)).copied().unwrap_or_default()
    }

    pub(crate) fn has_lost(&self, from: Rank, to: Rank) -> bool {
        self.planted(from, to).lost
    }

    pub(crate) fn delay(&self, from: Rank, to: Rank) -> u64 {
        self.planted(from, to).delay
    }
}

impl Transport for Loop {
    type Lanes = LoopLanes;

    fn far_lanes(&self) -> Queues {
        self.settings.far_lanes()
    }

    fn open(&self, place: Place<'_>) -> Result<LoopLanes, Error> {
        let Place { me, layout, window } = place;
        self.open_for_device(DevicePlace { me, layout, window: WindowMemory::File(window) })
    }

    fn open_for_device(&self, place: DevicePlace<'_>) -> Result<LoopLanes, Error> {
        LoopLanes::open(self.settings, Arc::clone(&self.network), place)
    }
}

impl Settings {
    pub(crate) const fn far_lanes(&self) -> Queues {
        self.far_lanes
    }
}
