//! Cards that reach one another, and what a test sees and does of them.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::carrier::{self, Carrier, Work};
use crate::complaint::Complaint;
use crate::devx::qp::QpState;
use crate::engine::{self, At};
use crate::handles;
use crate::model::{Link, Model};
use crate::mood::Mood;
use crate::objects::{CardState, Counts, Failure, Sight};
use crate::rng::Rng;

/// Everything of a fabric that changes.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) rng: Rng,
    pub(crate) mood: Mood,
    /// Nanoseconds: real ones where a thread drives, otherwise one thousand a step.
    pub(crate) clock: u64,
    pub(crate) cards: Vec<CardState>,
    /// All queue pairs of living cards, and the sum of `changes` when they were listed.
    pub(crate) roster: (u64, Vec<At>),
}

#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
}

impl Shared {
    /// The state. A test that panicked while it held the lock takes nothing from others.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Cards on one network. They are in `ibv_get_device_list` until this is dropped.
#[derive(Debug)]
pub struct Fabric {
    shared: Arc<Shared>,
    names: Vec<String>,
    engine: Option<Engine>,
}

/// The thread that drives the cards.
#[derive(Debug)]
struct Engine {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What a fabric is made with.
#[derive(Debug, Clone)]
pub struct Builder {
    cards: u8,
    model: Model,
    mood: Mood,
    seed: u64,
}

impl Builder {
    /// The model of all cards.
    pub fn model(mut self, model: Model) -> Self {
        self.model = model;
        self
    }

    /// The orders that cards choose.
    pub fn mood(mut self, mood: Mood) -> Self {
        self.mood = mood;
        self
    }

    /// The seed of all draws.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Cards that do something when [`Fabric::step`] is called, and nothing otherwise.
    pub fn stepped(self) -> Fabric {
        self.made(None)
    }

    /// `own`: the one card that is of this process; all are, where it is none.
    fn made(self, own: Option<usize>) -> Fabric {
        static NAMES: AtomicU32 = AtomicU32::new(0);
        let mut rng = Rng::new(self.seed);
        let mut cards: Vec<CardState> = (0..self.cards)
            .map(|number| {
                let name = format!("soft_hca{}", NAMES.fetch_add(1, Ordering::Relaxed));
                let first = 0x4200 + rng.below(0x10_0000) as u32;
                CardState::new(name, number, self.model.clone(), first)
            })
            .collect();
        let names: Vec<String> = cards.iter().map(|card| card.name.clone()).collect();
        for (_, card) in cards.iter_mut().enumerate().filter(|(card, _)| own.is_some_and(|own| own != *card)) {
            card.sight = Sight::Hidden;
        }
        let shared = Arc::new(Shared {
            state: Mutex::new(State { rng, mood: self.mood, clock: 0, cards, roster: (0, Vec::new()) }),
        });
        handles::plug(&shared, &names, |card| own.is_none_or(|own| own == card));
        Fabric { shared, names, engine: None }
    }

    /// Cards whose elements `carrier` carries out. They do nothing themselves, and take no dmabuf: a carrier knows memory by its address.
    pub fn carried(self, carrier: &Arc<dyn Carrier>) -> Fabric {
        self.plugged(carrier, None)
    }

    /// The same of which `own` alone is of this process, and in its device list. Of the others nothing is known at first ([`Fabric::see`]).
    ///
    /// # Panics
    /// Where there is no such card.
    pub fn carried_for(self, own: usize, carrier: &Arc<dyn Carrier>) -> Fabric {
        assert!(own < usize::from(self.cards), "card {own} of {}", self.cards);
        self.plugged(carrier, Some(own))
    }

    fn plugged(mut self, carrier: &Arc<dyn Carrier>, own: Option<usize>) -> Fabric {
        self.model.dmabuf = false;
        let fabric = self.made(own);
        fabric.shared.lock().cards.iter_mut().for_each(|card| card.carrier = Some(Arc::clone(carrier)));
        fabric
    }

    /// Cards that a thread drives, in real time.
    pub fn running(self) -> Fabric {
        let mut fabric = self.stepped();
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, until) = (Arc::clone(&fabric.shared), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("soft-hca".into()).spawn(move || drive(&shared, &until));
        fabric.engine = Some(Engine { stop, thread: Some(thread.expect("a thread for the cards")) });
        fabric
    }
}

/// Steps until told to stop. Idle cards look less often, so that a test's own threads have the processor.
fn drive(shared: &Shared, stop: &AtomicBool) {
    let begun = Instant::now();
    let mut idle = 0u32;
    while !stop.load(Ordering::Relaxed) {
        let moved = {
            let mut state = shared.lock();
            state.clock = begun.elapsed().as_nanos() as u64;
            (0..64).fold(false, |moved, _| engine::step(&mut state) || moved)
        };
        idle = if moved { 0 } else { idle.saturating_add(1) };
        match idle {
            0..100 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(20)),
        }
    }
}

impl Fabric {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }

    /// A fabric of so many cards, mild and of seed 0 unless told otherwise.
    ///
    /// # Panics
    /// With more than 200 cards.
    pub fn builder(cards: u8, link: Link) -> Builder {
        assert!(cards <= 200, "cards is {cards}, at most 200");
        Builder { cards, model: Model::new(link), mood: Mood::mild(), seed: 0 }
    }

    /// A card, by its place in this fabric.
    ///
    /// # Panics
    /// Where there is no such card.
    pub fn card(&self, index: usize) -> Card {
        assert!(index < self.names.len(), "card {index} of {}", self.names.len());
        Card { shared: Arc::clone(&self.shared), index }
    }

    /// Does one thing that a card may do now. False: there is nothing to do, or what there is was put off.
    pub fn step(&self) -> bool {
        let mut state = self.shared.lock();
        if state.cards.iter().any(|card| card.carrier.is_some()) {
            return false;
        }
        state.clock += 1000;
        engine::step(&mut state)
    }

    /// Steps until nothing has been left to do for some time. With draws that put things off, nothing done once means little.
    pub fn settle(&self) {
        let mut quiet = 0;
        for _ in 0..1_000_000 {
            quiet = if self.step() { 0 } else { quiet + 1 };
            if quiet > 50 {
                return;
            }
        }
    }

    /// Tells a carrier what there is to do, once it has halted. Right until its [`Carrier::halt`] is called, which it is not while `take` runs.
    pub fn hand_over<R>(&self, take: impl FnOnce(Work) -> R) -> R {
        let mut state = self.shared.lock();
        state.cards.iter_mut().for_each(CardState::halt);
        take(carrier::work(&state))
    }

    /// Lets time pass for a stepped fabric: peers that do not answer are given up after
    /// 4.096 us x 2^(ack timeout) x (retries + 1).
    pub fn pass(&self, time: Duration) {
        self.shared.lock().clock += time.as_nanos() as u64;
    }

    /// Changes the orders that cards choose.
    pub fn set_mood(&self, mood: Mood) {
        self.shared.lock().mood = mood;
    }

    /// What all cards complain of.
    pub fn complaints(&self) -> Vec<Complaint> {
        self.shared.lock().cards.iter().flat_map(|card| card.complaints.clone()).collect()
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        self.engine = None;
        handles::unplug(&self.names);
    }
}

/// A queue pair, as a test sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QpView {
    /// Its number.
    pub number: u32,
    /// Its state.
    pub state: QpState,
    /// The number of the queue pair that it is connected to.
    pub remote: u32,
    /// Elements that the card knows of, ever.
    pub produced: u64,
    /// Elements carried out, ever.
    pub retired: u64,
    /// The syndrome of what broke it.
    pub syndrome: Option<u8>,
}

/// A card of a fabric.
#[derive(Debug, Clone)]
pub struct Card {
    shared: Arc<Shared>,
    index: usize,
}

impl Card {
    fn with<R>(&self, f: impl FnOnce(&mut CardState) -> R) -> R {
        f(&mut self.shared.lock().cards[self.index])
    }

    /// Its name in the device list.
    pub fn name(&self) -> String {
        self.with(|card| card.name.clone())
    }

    /// What it has to say of its driver.
    pub fn complaints(&self) -> Vec<Complaint> {
        self.with(|card| card.complaints.clone())
    }

    /// The same, forgotten afterwards.
    pub fn take_complaints(&self) -> Vec<Complaint> {
        self.with(|card| std::mem::take(&mut card.complaints))
    }

    /// What it has done.
    pub fn counts(&self) -> Counts {
        self.with(|card| {
            card.halt();
            card.counts
        })
    }

    /// Its queue pairs.
    pub fn queue_pairs(&self) -> Vec<QpView> {
        self.with(|card| {
            card.halt();
            card.qps.iter().map(|(&number, qp)| qp.view(number)).collect()
        })
    }

    /// How many objects (contexts, domains, regions, memories, pages, queues, handles) have not been given back.
    pub fn objects(&self) -> usize {
        self.with(|card| {
            let queues = card.cqs.len() + card.qps.len() + card.uars.len() + card.umems.len();
            queues + card.contexts.len() + card.pds.len() + card.mrs.len() + card.ahs.len()
        })
    }

    /// Makes a call of a function fail with `errno`: the next one, or one that comes `after` others.
    pub fn fail(&self, function: &str, after: u32, errno: i32) {
        let failure = Failure { function: function.into(), after, errno, status: None };
        self.with(|card| card.failures.push(failure));
    }

    /// Makes the firmware refuse a command (by opcode) with a status and a syndrome.
    pub fn refuse(&self, opcode: u16, after: u32, status: u8, syndrome: u32) {
        let function = format!("command {opcode:#x}");
        let failure = Failure { function, after, errno: crate::c::EREMOTEIO, status: Some((status, syndrome)) };
        self.with(|card| card.failures.push(failure));
    }

    /// The card dies: it does nothing from now on, and its peers hear nothing.
    pub fn kill(&self) {
        self.with(|card| {
            card.alters();
            card.dead = true;
            card.changes += 1;
        });
    }

    /// Loses all packets of a queue pair, or none any more.
    ///
    /// # Panics
    /// Where the card has no such queue pair.
    pub fn cut(&self, qp: u32, cut: bool) {
        self.with(|card| {
            card.alters();
            card.qps.get_mut(&qp).expect("a queue pair of this card").cut = cut;
        });
    }

    /// The element that comes `after` others from now on ends with this syndrome, and so breaks its queue pair.
    ///
    /// # Panics
    /// Where the card has no such queue pair.
    pub fn break_element(&self, qp: u32, after: u64, syndrome: u8) {
        self.with(|card| {
            card.halt();
            card.qps.get_mut(&qp).expect("a queue pair of this card").planted = Some((after, syndrome));
        });
    }
}
