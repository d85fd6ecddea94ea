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
//! of whoever sent it alone. GPUs of one process.

mod player;
mod registers;
mod tables;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ep_core::Error;
use soft_hca::{Fabric, Link, Model, Progress, Work};

use crate::driver::{Device, Stream};
use crate::error::CudaError;
use player::Player;
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

/// How often the thread looks whether a kernel has ended and a register was written to.
const TICK: Duration = Duration::from_micros(50);

/// Adapters that GPUs play. They last as long as this value and all [`PostingGpu`](crate::PostingGpu)s beside it.
#[derive(Debug)]
pub struct Hca {
    fabric: Arc<Fabric>,
    carrier: Arc<Carrier>,
    ends: Arc<AtomicBool>,
    keeper: Option<JoinHandle<()>>,
}

impl Hca {
    /// An adapter for each of `gpus`, which plays it. On Ethernet (RoCEv2).
    ///
    /// # Errors
    /// [`Error::Invalid`] for a pace, and for more than 200 adapters; [`Error::Unsupported`] with what is missing: driver, NVRTC, GPU, peer
    /// access; [`Error::Broken`] with what the driver refuses.
    pub fn new(gpus: &[usize], pace: Pace) -> Result<Arc<Self>, Error> {
        pace.check()?;
        let count = u8::try_from(gpus.len()).ok().filter(|count| *count <= 200);
        let count = count.ok_or_else(|| Error::invalid("adapters that GPUs play", gpus.len(), "at most 200"))?;
        let devices = gpus.iter().map(|&gpu| Device::open(gpu)).collect::<Result<Vec<_>, _>>()?;
        for from in &devices {
            devices.iter().try_for_each(|to| from.reach(to))?;
        }
        let registers = Arc::new(Registers::default());
        let players = devices.iter().map(|device| Player::new(device, pace)).collect::<Result<Vec<_>, _>>()?;
        let aside = devices.first().map(|device| Stream::new(device, 0)).transpose()?;
        let carrier =
            Arc::new(Carrier { players: Mutex::new(players), aside, registers, is_stale: AtomicBool::new(true) });
        let carries: Arc<dyn soft_hca::Carrier> = carrier.clone();
        let model = Model { dmabuf: false, relaxed_ordering: true, max_element: 64, ..Model::new(Link::Ethernet) };
        let fabric = Arc::new(Fabric::builder(count, Link::Ethernet).model(model).carried(&carries));
        let ends = Arc::new(AtomicBool::new(false));
        let (kept, looked_after, until) = (Arc::clone(&fabric), Arc::clone(&carrier), Arc::clone(&ends));
        let keeper = std::thread::Builder::new().name("hca".into()).spawn(move || looked_after.keep(&kept, &until));
        let refused =
            |error| Error::broken("a thread for adapters that GPUs play", error, "let the process have more threads");
        Ok(Arc::new(Self { fabric, carrier, ends, keeper: Some(keeper.map_err(refused)?) }))
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
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
        self.carrier.players().iter_mut().for_each(Player::stop);
    }
}

/// Who carries out the cards' elements.
#[derive(Debug)]
struct Carrier {
    players: Mutex<Vec<Player>>,
    /// For copies beside kernels; none where there are no adapters.
    aside: Option<Arc<Stream>>,
    registers: Arc<Registers>,
    /// What players were told may be wrong.
    is_stale: AtomicBool,
}

impl Carrier {
    fn players(&self) -> MutexGuard<'_, Vec<Player>> {
        self.players.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks after players until told to end.
    fn keep(&self, fabric: &Fabric, ends: &AtomicBool) {
        while !ends.load(Ordering::Relaxed) {
            let kept = self.look().unwrap_or_else(|| fabric.hand_over(|work| self.take(&work)));
            if let Err(error) = kept {
                // Who posts hears nothing any more, and ends by its deadline.
                tracing::error!(%error, "adapters that GPUs play do nothing any more");
                return;
            }
            std::thread::sleep(TICK);
        }
    }

    /// Has players look; none where what they were told may be wrong. `halt` says so under the same lock: none is launched after it has returned.
    fn look(&self) -> Option<Result<(), CudaError>> {
        let mut players = self.players();
        let is_known = !self.is_stale.load(Ordering::Acquire);
        is_known.then(|| players.iter_mut().try_for_each(|player| player.look(&self.registers)))
    }

    /// What there is to do now. The fabric is locked, so nothing changes meanwhile. While a kernel runs that was to stop, its tables stay, and all
    /// is taken later.
    fn take(&self, work: &Work) -> Result<(), CudaError> {
        let mut players = self.players();
        if players.iter().any(Player::runs) {
            return Ok(());
        }
        self.is_stale.store(false, Ordering::Release);
        (0..).zip(players.iter_mut()).try_for_each(|(card, player)| player.take(card, work, &self.registers))
    }
}

impl soft_hca::Carrier for Carrier {
    fn halt(&self, card: usize) -> Vec<Progress> {
        let mut players = self.players();
        self.is_stale.store(true, Ordering::Release);
        players.iter_mut().for_each(Player::stop);
        players[card].progress()
    }

    fn read(&self, address: u64, into: &mut [u8]) -> bool {
        let Some(aside) = &self.aside else { return false };
        // SAFETY: memory that was registered for queues, which stays until it is deregistered.
        unsafe { aside.download(address, into) }.is_ok()
    }
}
