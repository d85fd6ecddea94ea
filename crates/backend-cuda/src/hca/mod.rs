//! Adapters that GPUs play: mlx5 cards whose commands `soft-hca` decodes and whose elements a kernel carries out, on a multiprocessor or two of a
//! GPU. So kernels that post to adapters run on hosts that have none, between GPUs of one host that play several nodes. For tests, and for
//! whoever develops; it says nothing about what a real adapter does.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use ep_core::{Error, Rank, Shape, Topology};
//! use ep_cuda::hca::{Hca, Pace};
//! use ep_ibgda::{Ibgda, Library, Settings};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let shape = Shape::builder().experts(8).topk(2).hidden(128).max_tokens(16).build()?;
//! let hca = Hca::new(&[0, 1], Pace::default())?; // an adapter for each rank, and the GPU that plays it: the rank's own
//! // SAFETY: the cards' functions are those of the interface.
//! let library = unsafe { Library::from(soft_hca::symbol) }?;
//! let settings = Settings::new();
//! let cluster = ep_cuda::Cluster::builder(Topology::new(2, 1)?).leaves(1).posted(ep_ibgda::source(&settings), move |me: Rank, gpu| {
//!     let settings = settings.clone().devices([hca.adapter(me.index())]);
//!     Ibgda::new(library.clone(), gpu.beside(&hca), settings)
//! });
//! # let _ = cluster.build(shape)?;
//! # Ok(())
//! # }
//! ```
//!
//! ```text
//!   host side of the transport  -->  soft-hca: commands, objects  -->  tables.rs: what there is to do, in the GPU's memory
//!   kernels that post  -->  queues, records, registers.rs         -->  kernels/far/hca.cu: reads, completes; ep_hca_copy.h: copies
//!                                                                       player.rs: its launches; mod.rs: a thread that looks after them
//! ```
//!
//! A kernel that never ended would hold up whoever calls the driver (docs/cuda.md, "What waits inside the driver"). So it ends when nothing has
//! happened for a millisecond, and a thread launches it again when a register was written to. Before anything changes that it was told of, it is
//! stopped. What was not carried out then begins anew: nobody was told of it, and its sources are as they were.
//!
//! Its blocks have as much shared memory as there is, up to 16 KiB for each warp that copies. With 15 of them none shares a multiprocessor with another
//! block that has much of it: see [`Builder::leaves`](crate::Builder::leaves).
//!
//! # Limits
//!
//! Elements of at most 64 bytes; a completion queue for each queue pair; 32 doorbell pages a GPU. Of writes only inline ones wait for
//! earlier ones, as fetch-adds do. The producer index is always the record's. A request that the peer refuses breaks the queue pair
//! of whoever sent it alone. GPUs of one host.

mod others;
mod player;
mod post;
mod registers;
mod tables;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ep_bootstrap::Member;
use ep_core::Error;
use soft_hca::{Fabric, Link, Model, Progress, Work};

use crate::driver::{Device, Stream};
use crate::error::CudaError;
use others::Others;
use player::Player;
use post::Heard;
pub(crate) use registers::Registers;

/// How fast adapters are, and how much of a GPU each takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct Pace {
    /// The link's rate, gigabits a second.
    pub gigabits: u32,
    /// From when the link has sent a message until it has arrived, and is known to have.
    pub latency: Duration,
    /// Multiprocessors: 1 or 2. A queue pair is served by one of them, and both copy what it names.
    pub multiprocessors: u32,
    /// Warps on each, 2 to 16. One listens, the others serve queue pairs, and copy what all of them name.
    pub warps: u32,
}

impl Default for Pace {
    /// 400 Gb/s, 3 us, a multiprocessor of 16 warps.
    fn default() -> Self {
        Self { gigabits: 400, latency: Duration::from_micros(3), multiprocessors: 1, warps: 16 }
    }
}

impl Pace {
    fn check(&self) -> Result<(), Error> {
        let nanoseconds = self.latency.as_nanos();
        let limits = [
            ("gigabits a second of an adapter", u128::from(self.gigabits), 1, 8000),
            ("nanoseconds of an adapter's latency", nanoseconds, 0, 1_000_000_000),
            ("multiprocessors of an adapter", self.multiprocessors.into(), 1, 2),
            ("warps of an adapter's multiprocessor", self.warps.into(), 2, 16),
        ];
        match limits.into_iter().find(|(_, value, least, most)| !(least..=most).contains(&value)) {
            Some((what, value, least, most)) => Err(Error::invalid(what, value, format_args!("{least} to {most}"))),
            None => Ok(()),
        }
    }
}

/// How long processes wait for one that lacks something.
const PATIENCE: Duration = crate::node::PATIENCE;
/// How often the thread looks whether a kernel has ended and a register was written to.
const TICK: Duration = Duration::from_micros(50);
/// How often the thread that hears other processes looks whether it is to end.
const LISTENS: Duration = Duration::from_millis(20);

/// Adapters that GPUs play. They last as long as this value and all [`PostingGpu`](crate::PostingGpu)s beside it.
#[derive(Debug)]
pub struct Hca {
    fabric: Arc<Fabric>,
    carrier: Arc<Carrier>,
    ends: Arc<AtomicBool>,
    /// Looks after players; hears other processes.
    threads: Vec<JoinHandle<()>>,
}

impl Hca {
    /// An adapter for each of `gpus`, which plays it. On Ethernet (RoCEv2).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a pace, and for more than 200 adapters; [`Error::Unsupported`] with what is missing: driver, NVRTC, GPU, peer
    /// access; [`Error::Broken`] with what the driver refuses.
    pub fn new(gpus: &[usize], pace: Pace) -> Result<Arc<Self>, Error> {
        pace.check()?;
        let builder = cards(gpus.len())?;
        let devices = gpus.iter().map(|&gpu| Device::open(gpu)).collect::<Result<Vec<_>, _>>()?;
        for from in &devices {
            devices.iter().try_for_each(|to| from.reach(to))?;
        }
        let players = devices.iter().enumerate().map(|(card, device)| Player::new(card, device, pace));
        let aside = devices.first().map(|device| Stream::new(device, 0)).transpose()?;
        let carrier = Carrier::new(players.collect::<Result<_, _>>()?, aside, None);
        let carries: Arc<dyn soft_hca::Carrier> = carrier.clone();
        Self::started(builder.carried(&carries), carrier)
    }

    /// The same for ranks that are processes of one host, all of which call this: an adapter for each, of which `gpu` plays this process's. They show each
    /// other their queue pairs and windows. Adapters have the ranks' numbers.
    ///
    /// # Errors
    /// Those of [`new`](Self::new), and [`Error::Unsupported`] with the rank that did not come, runs on another host, or whose GPU is out of reach.
    pub fn between_processes(gpu: usize, pace: Pace, member: &Member) -> Result<Arc<Self>, Error> {
        let (own, ranks) = (member.rank().index(), member.world() as usize);
        let made = || {
            pace.check()?;
            let (builder, device) = (cards(ranks)?, Device::open(gpu)?);
            let (player, aside) = (Player::new(own, &device, pace)?, Stream::new(&device, 0)?);
            Ok((builder, device, player, aside))
        };
        let (builder, others, player, aside) = match made() {
            Ok((builder, device, player, aside)) => (builder, Others::met(&device, member)?, player, aside),
            Err(error) => {
                member.tell_failed(&error, PATIENCE);
                return Err(error);
            }
        };
        let carrier = Carrier::new(vec![player], Some(aside), Some(others));
        let carries: Arc<dyn soft_hca::Carrier> = carrier.clone();
        Self::started(builder.carried_for(own, &carries), carrier)
    }

    fn started(fabric: Fabric, carrier: Arc<Carrier>) -> Result<Arc<Self>, Error> {
        let (fabric, ends) = (Arc::new(fabric), Arc::new(AtomicBool::new(false)));
        let mut this = Self { fabric, carrier, ends, threads: Vec::new() };
        let (fabric, carrier, ends) = (Arc::clone(&this.fabric), Arc::clone(&this.carrier), Arc::clone(&this.ends));
        this.spawn("hca", move || carrier.keep(&fabric, &ends))?;
        if this.carrier.others.is_some() {
            let (carrier, ends) = (Arc::clone(&this.carrier), Arc::clone(&this.ends));
            this.spawn("hca hears", move || carrier.hear(&ends))?;
        }
        Ok(Arc::new(this))
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let refused =
            |error| Error::broken("a thread for adapters that GPUs play", error, "let the process have more threads");
        self.threads.push(std::thread::Builder::new().name(name.into()).spawn(work).map_err(refused)?);
        Ok(())
    }

    /// The name of an adapter, for `ep_ibgda::Settings::devices`.
    ///
    /// # Panics
    /// Where there is no such adapter.
    pub fn adapter(&self, index: usize) -> String {
        self.fabric.card(index).name()
    }

    /// The cards: what they complain of, what they have done, and faults on demand.
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    pub(crate) fn registers(&self) -> &Registers {
        &self.carrier.registers
    }
}

impl Drop for Hca {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
        let mut players = self.carrier.players();
        players.iter_mut().for_each(Player::stop);
        if let Some(others) = self.carrier.others.as_ref().filter(|_| players.iter().any(Player::runs)) {
            others.keep_mapped();
        }
    }
}

/// So many cards.
fn cards(count: usize) -> Result<soft_hca::Builder, Error> {
    let admitted = u8::try_from(count).ok().filter(|count| *count <= 200);
    let count = admitted.ok_or_else(|| Error::invalid("adapters that GPUs play", count, "at most 200"))?;
    let model = Model { dmabuf: false, relaxed_ordering: true, max_element: 64, ..Model::new(Link::Ethernet) };
    Ok(Fabric::builder(count, Link::Ethernet).model(model))
}

/// Who carries out the cards' elements.
#[derive(Debug)]
struct Carrier {
    /// Of the cards of this process.
    players: Mutex<Vec<Player>>,
    /// Where other processes have the other cards.
    others: Option<Others>,
    /// For copies beside kernels; none where there are no adapters.
    aside: Option<Arc<Stream>>,
    registers: Arc<Registers>,
    /// What players were told may be wrong.
    is_stale: AtomicBool,
}

impl Carrier {
    fn new(players: Vec<Player>, aside: Option<Arc<Stream>>, others: Option<Others>) -> Arc<Self> {
        let (registers, is_stale) = (Arc::default(), AtomicBool::new(true));
        Arc::new(Self { players: Mutex::new(players), others, aside, registers, is_stale })
    }

    fn players(&self) -> MutexGuard<'_, Vec<Player>> {
        self.players.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks after players until told to end.
    fn keep(&self, fabric: &Fabric, ends: &AtomicBool) {
        while !ends.load(Ordering::Relaxed) {
            if let Err(error) = self.step(fabric) {
                // Who posts hears nothing any more, and ends by its deadline.
                tracing::error!(%error, "adapters that GPUs play do nothing any more");
                return;
            }
            std::thread::sleep(TICK);
        }
    }

    fn step(&self, fabric: &Fabric) -> Result<(), CudaError> {
        if let Some(others) = &self.others {
            others.tell(fabric);
        }
        if let Some(looked) = self.look() {
            return looked;
        }
        let news = self.others.as_ref().map(|others| others.learn(fabric));
        fabric.hand_over(|work| self.take(&work, news))
    }

    /// Has players look; none where what they were told may be wrong. Whoever says so does it under the same lock: none is launched afterwards.
    fn look(&self) -> Option<Result<(), CudaError>> {
        let mut players = self.players();
        if let Some(others) = &self.others {
            if others.post.has_mail() {
                // It may say so.
                return Some(Ok(()));
            }
            if others.post.has_news() {
                self.is_stale.store(true, Ordering::Release);
            }
        }
        let is_known = !self.is_stale.load(Ordering::Acquire);
        is_known.then(|| players.iter_mut().try_for_each(|player| player.look(&self.registers)))
    }

    /// Hears other processes until told to end.
    fn hear(&self, ends: &AtomicBool) {
        let Some(others) = &self.others else { return };
        while !ends.load(Ordering::Relaxed) {
            others.post.listen(LISTENS);
            // Before a message is taken in: nobody launches what it takes back.
            let mut players = self.players();
            while let Some(heard) = others.post.hear() {
                match heard {
                    Heard::Withdrawn(card, number) => {
                        if others.post.is_known(card) {
                            self.is_stale.store(true, Ordering::Release);
                            players.iter_mut().for_each(Player::stop);
                        }
                        // Whoever asks does so again.
                        if !players.iter().any(Player::runs) {
                            others.post.forget(card, number);
                        }
                    }
                    Heard::Shown(card, number, file) => {
                        if others.post.see(card, number, file) {
                            self.is_stale.store(true, Ordering::Release);
                        }
                    }
                    Heard::Else => {}
                }
            }
        }
    }

    /// What there is to do now. The fabric is locked, so nothing changes meanwhile. While a kernel runs that was to stop, its tables stay, and all
    /// is taken later, as it is where others have shown something else since then than what `news` counts.
    fn take(&self, work: &Work, news: Option<u64>) -> Result<(), CudaError> {
        let mut players = self.players();
        let is_old = self.others.as_ref().zip(news).is_some_and(|(others, news)| !others.post.pass_on(news));
        if is_old || players.iter().any(Player::runs) {
            return Ok(());
        }
        self.is_stale.store(false, Ordering::Release);
        let placed = self.others.as_ref().map(|others| others.placed(work));
        let work = placed.as_ref().unwrap_or(work);
        players.iter_mut().try_for_each(|player| player.take(work, &self.registers))
    }
}

impl soft_hca::Carrier for Carrier {
    fn halt(&self, card: usize) -> Vec<Progress> {
        let mut players = self.players();
        self.is_stale.store(true, Ordering::Release);
        players.iter_mut().for_each(Player::stop);
        players.iter_mut().filter(|player| player.card() == card).flat_map(Player::progress).collect()
    }

    fn alters(&self, card: usize) {
        let is_own = |player: &Player| player.card() == card;
        if let Some(others) = self.others.as_ref().filter(|_| self.players().iter().any(is_own)) {
            others.post.withdraw();
        }
    }

    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        let Some(aside) = &self.aside else { return false };
        // SAFETY: memory that was registered for queues, which stays until it is deregistered.
        unsafe { aside.download(address, into) }.is_ok()
    }
}
