//! One adapter that a GPU plays: its tables in the GPU's memory, and the launches of the kernel that carries out what they say.

use std::sync::Arc;
use std::time::Duration;

use soft_hca::{Progress, Work};
use zerocopy::IntoBytes as _;

use super::Pace;
use super::registers::Registers;
use super::tables::{Tables, is_pending, progress};
use crate::args::{HCA_JOBS, Hca, HcaJob, HcaState};
use crate::build::Source;
use crate::driver::{Device, DeviceMemory, Event, Kernel, Launch, Mapped, Mode, Stream};
use crate::error::CudaError;
use crate::kernels;

/// After so long without anything to do a launch ends.
const IDLE: Duration = Duration::from_millis(1);
/// Bytes of a piece that a warp copies: less brings too few under way, and more makes whoever else waits for the warp wait longer.
const PIECE: std::ops::RangeInclusive<u32> = 512..=8192;
/// A kernel that is told to end does so at once. One that has not after so long never will.
const PATIENCE: Duration = Duration::from_secs(20);

/// The kernel's memory: what it was told, for as long as it may run.
#[derive(Debug)]
struct Told {
    tables: Tables,
    queues: DeviceMemory,
    regions: DeviceMemory,
    registers: DeviceMemory,
    seen: DeviceMemory,
    /// Of `seen`, `[multiprocessors, pages]`.
    last: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct Player {
    card: usize,
    stream: Arc<Stream>,
    kernel: Kernel,
    pace: Pace,
    /// Bytes of a piece, and of a block's shared memory.
    piece: (u32, u32),
    jobs: DeviceMemory,
    state: DeviceMemory,
    halt: Mapped,
    told: Option<Told>,
    /// The end of the launch that runs.
    running: Option<Event>,
    /// What is known of queue pairs was not told to the card.
    has_news: bool,
}

impl Player {
    /// Of a card. Loads the kernel, before any other runs that would have to be waited for.
    pub(super) fn new(card: usize, device: &Arc<Device>, pace: Pace) -> Result<Self, CudaError> {
        let stream = Stream::new(device, 0)?;
        let kernel = kernels::alone_with(device, Source::Hca, device.shared_memory())?;
        let jobs = DeviceMemory::zeroed(&stream, HCA_JOBS as usize * size_of::<HcaJob>())?;
        let state = DeviceMemory::zeroed(&stream, size_of::<HcaState>())?;
        let halt = Mapped::zeroed(device, 8)?;
        stream.synchronize()?;
        let piece = piece(pace.warps - 1, device.shared_memory());
        Ok(Self { card, stream, kernel, pace, piece, jobs, state, halt, told: None, running: None, has_news: false })
    }

    pub(super) const fn card(&self) -> usize {
        self.card
    }

    /// Takes what there is to do for its card; nothing runs.
    pub(super) fn take(&mut self, work: &Work, registers: &Registers) -> Result<(), CudaError> {
        let mut tables = Tables::of(self.card, work);
        // No more than `registers` maps.
        tables.pages.retain(|page| registers.find(*page).is_some());
        let places: Vec<u64> = tables.pages.iter().filter_map(|page| registers.find(*page)).collect();
        let last = vec![0u64; places.len() * self.pace.multiprocessors as usize];
        let put = |bytes: &[u8]| {
            let memory = DeviceMemory::zeroed(&self.stream, bytes.len().max(8))?;
            memory.write(&self.stream, 0, bytes)?;
            // Also where there is nothing to write: whoever takes the memory after this must not find it zeroed later.
            self.stream.synchronize().map(|()| memory)
        };
        self.told = Some(Told {
            queues: put(tables.queues.as_bytes())?,
            regions: put(tables.regions.as_bytes())?,
            registers: put(places.as_bytes())?,
            seen: put(last.as_bytes())?,
            last,
            tables,
        });
        Ok(())
    }

    /// Sees whether the kernel has ended, and launches it where there is something to do.
    pub(super) fn look(&mut self, registers: &Registers) -> Result<(), CudaError> {
        match &self.running {
            Some(end) if !end.has_come()? => return Ok(()),
            Some(_) => self.collect()?,
            None => {}
        }
        let Some(told) = &self.told else { return Ok(()) };
        let pages = told.tables.pages.iter().cycle();
        let is_rung = pages.zip(&told.last).any(|(page, last)| registers.value(*page) != *last);
        if is_rung || told.tables.queues.iter().any(is_pending) { self.launch() } else { Ok(()) }
    }

    fn launch(&mut self) -> Result<(), CudaError> {
        let Some(told) = &self.told else { return Ok(()) };
        self.state.zero(&self.stream)?;
        let args = Hca {
            queues: told.queues.address(),
            regions: told.regions.address(),
            registers: told.registers.address(),
            seen: told.seen.address(),
            jobs: self.jobs.address(),
            state: self.state.address(),
            halt: self.halt.address(),
            latency: self.pace.latency.as_nanos() as u64,
            idle: IDLE.as_nanos() as u64,
            pace: femtoseconds(self.pace.gigabits),
            queue_count: told.tables.queues.len() as u32,
            register_count: told.tables.pages.len() as u32,
            piece: self.piece.0,
        };
        let shape = Launch {
            blocks: self.pace.multiprocessors,
            threads: 32 * self.pace.warps,
            shared_memory: self.piece.1,
            mode: Mode::Plain,
        };
        // SAFETY: the kernel's one parameter. What it names stays as long as it runs: tables until `collect`, and memory that cards know until
        // they have called `halt`; of other processes, what is mapped here, as long as players run.
        unsafe { self.kernel.launch_alone(self.stream.device(), self.stream.raw() as usize, shape, &args) }?;
        self.running = Some(self.stream.record(false)?);
        Ok(())
    }

    /// Reads how far the kernel has come, which has ended.
    fn collect(&mut self) -> Result<(), CudaError> {
        self.running = None;
        self.halt.set_word(0, 0);
        let Some(told) = &mut self.told else { return Ok(()) };
        told.queues.read(&self.stream, 0, told.tables.queues.as_mut_slice().as_mut_bytes())?;
        told.seen.read(&self.stream, 0, told.last.as_mut_slice().as_mut_bytes())?;
        self.has_news = true;
        Ok(())
    }

    /// A launch of it has not ended, as far as is known.
    pub(super) const fn runs(&self) -> bool {
        self.running.is_some()
    }

    /// Stops it, and waits until it has. One that does not is to end all the same, and nobody else gets its memory.
    pub(super) fn stop(&mut self) {
        let Some(end) = &self.running else { return };
        self.halt.set_word(0, 1);
        let ended = end.wait(PATIENCE).and_then(|has_come| if has_come { self.collect() } else { Ok(()) });
        if let Err(error) = &ended {
            tracing::error!(%error, "how far an adapter has come that a GPU played is not known");
        }
        if self.running.is_some() {
            tracing::error!("a GPU does not end to play an adapter: it may touch memory of its queues yet");
            self.lose();
        }
    }

    /// Nobody else gets what the kernel was given.
    fn lose(&mut self) {
        let told = self
            .told
            .iter_mut()
            .flat_map(|Told { queues, regions, registers, seen, .. }| [queues, regions, registers, seen]);
        told.chain([&mut self.jobs, &mut self.state]).for_each(DeviceMemory::lose);
        self.halt.lose();
    }

    /// What the card has not heard of its queue pairs. What was told them is no longer sure.
    pub(super) fn progress(&mut self) -> Vec<Progress> {
        if !std::mem::take(&mut self.has_news) {
            return Vec::new();
        }
        self.told.iter().flat_map(|told| &told.tables.queues).map(progress).collect()
    }
}

/// What the link takes for a byte. Fine enough for all rates that [`Pace`] admits: of 8000 Gb/s it is 1000. A message of 2^30 bytes at 1 Gb/s
/// takes some 2^53 of them, so the kernel counts them in 64 bits.
const fn femtoseconds(gigabits: u32) -> u32 {
    8_000_000 / gigabits
}

/// Bytes of a piece, of which a block has room for two for each of its warps that copy, and of that room.
fn piece(warps: u32, shared_memory: u32) -> (u32, u32) {
    let unit = *PIECE.start();
    let piece = (shared_memory / (2 * warps) / unit * unit).clamp(unit, *PIECE.end());
    (piece, 2 * warps * piece)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fits_into_shared_memory() {
        for shared_memory in [47 << 10, 98 << 10, 162 << 10, 226 << 10] {
            for warps in 1..16 {
                let (piece, all) = piece(warps, shared_memory);
                assert!(
                    piece % 512 == 0 && piece >= 512 && all == 2 * warps * piece,
                    "{warps} {shared_memory}: {piece}"
                );
                assert!(all <= shared_memory, "{warps} {shared_memory}: {all}");
            }
        }
        assert_eq!(piece(15, 226 << 10), (7680, 230_400));
    }

    /// Within a thousandth, also of rates that divide nothing.
    #[test]
    fn a_link_is_as_fast_as_it_was_asked_for() {
        for gigabits in 1..=8000 {
            let is = 8e6 / f64::from(femtoseconds(gigabits));
            let asked = f64::from(gigabits);
            assert!(is >= asked && is < asked * 1.001, "{gigabits} Gb/s: {is}");
        }
        let longest = (1 << 30) + (1 << 19);
        assert!(u64::from(femtoseconds(1)).checked_mul(longest).is_some());
    }
}
