//! Scripts of verbs on GPUs: the machine contract, tested with the primitives that the kernels move rows with.

use std::thread;

use ep_core::device::probe::{Rolls, StepSaw, check};
pub use ep_core::device::probe::{Saw, Script};
use ep_core::{Error, Rank};
use zerocopy::IntoBytes;

use crate::args;
use crate::build::Source;
use crate::checks::TestDevice;
use crate::driver::{Event, Scratch};
use crate::error::CudaError;
use crate::rank::RankDevice;

/// The scripts of one rank on its device.
struct Loaded<'a> {
    rank: &'a RankDevice,
    /// Which of all scripts.
    numbers: Vec<usize>,
    rolls: Rolls,
    steps: Scratch,
    saw: Scratch,
    first_of: Scratch,
    allowed: Scratch,
    bytes: Scratch,
}

/// Runs all scripts at the same time: `[scripts][steps]`.
pub(crate) fn run(ranks: &[&RankDevice], scripts: &[Script]) -> Result<Vec<Vec<Saw>>, Error> {
    check(scripts, ranks.len() as u32)?;
    let loaded: Vec<Loaded<'_>> = ranks
        .iter()
        .enumerate()
        .map(|(me, rank)| {
            let own = scripts.iter().enumerate().filter(|(_, script)| script.rank.index() == me);
            Loaded::new(rank, own.collect())
        })
        .collect::<Result<_, CudaError>>()?;
    loaded.iter().try_for_each(Loaded::launch)?;
    notice_crashes(ranks)?;
    let mut all = vec![Vec::new(); scripts.len()];
    for loaded in &loaded {
        loaded.collect(&mut all)?;
    }
    Ok(all)
}

/// While scripts run: tells the others of ranks that have crashed, where they are to learn it.
fn notice_crashes(ranks: &[&RankDevice]) -> Result<(), CudaError> {
    let due = |rank: &RankDevice| rank.test.as_ref().is_some_and(|test| test.is_noticed);
    let Some(at) = ranks.iter().position(|rank| due(rank)) else { return Ok(()) };
    let ended: Vec<_> = ranks.iter().map(|rank| rank.stream.record(false)).collect::<Result<_, _>>()?;
    let crashed = || ranks[at].test.as_ref().is_some_and(TestDevice::has_crashed);
    while !crashed() {
        if ended.iter().map(Event::has_come).collect::<Result<Vec<_>, _>>()?.into_iter().all(|come| come) {
            return Ok(());
        }
        thread::yield_now();
    }
    let others = ranks.iter().enumerate().filter(|(rank, _)| *rank != at);
    others.map(|(_, rank)| rank).try_for_each(|rank| rank.notice_gone(Rank(at as u32)))
}

impl<'a> Loaded<'a> {
    fn new(rank: &'a RankDevice, scripts: Vec<(usize, &Script)>) -> Result<Self, CudaError> {
        let stream = &rank.stream;
        rank.prepare(&[Source::Probe])?;
        let mut rolls = Rolls::new(scripts.iter().map(|(_, script)| *script));
        let bytes = Scratch::new(stream, rolls.read_bytes as usize)?;
        rolls.read_to(bytes.address());
        Ok(Self {
            steps: Scratch::from_bytes(stream, rolls.steps.as_bytes())?,
            saw: Scratch::new(stream, rolls.steps.len() * size_of::<StepSaw>())?,
            first_of: Scratch::from_bytes(stream, rolls.first_of.as_bytes())?,
            allowed: Scratch::from_bytes(stream, rolls.allowed.as_bytes())?,
            rank,
            numbers: scripts.iter().map(|(number, _)| *number).collect(),
            rolls,
            bytes,
        })
    }

    fn launch(&self) -> Result<(), CudaError> {
        if self.numbers.is_empty() {
            return Ok(());
        }
        let args = args::Probe {
            steps: self.steps.address(),
            saw: self.saw.address(),
            first_of: self.first_of.address(),
            allowed: self.allowed.address(),
        };
        // SAFETY: what this value has; read and written by so many scripts.
        unsafe { self.rank.probe(self.numbers.len() as u32, &args) }
    }

    fn collect(&self, all: &mut [Vec<Saw>]) -> Result<(), CudaError> {
        let mut raw = vec![StepSaw::default(); self.rolls.steps.len()];
        let mut bytes = vec![0; self.bytes.bytes()];
        self.saw.read(0, raw.as_mut_bytes())?;
        self.bytes.read(0, &mut bytes)?;
        for (number, log) in self.numbers.iter().zip(self.rolls.seen(&raw, &bytes)) {
            all[*number] = log;
        }
        Ok(())
    }
}
