//! Scripts of verbs on GPUs: the machine contract, tested with the primitives that the kernels move rows with.

use std::thread;

use ep_core::port::Nanos;
use ep_core::{Error, Rank};
use zerocopy::IntoBytes;

use crate::args;
pub use crate::args::{Ended, Verb};
use crate::build::Source;
use crate::checks::TestDevice;
use crate::driver::{Event, Scratch};
use crate::error::CudaError;
use crate::rank::RankDevice;

/// One verb; what it does not name is 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Step {
    /// A [`Verb`].
    pub verb: u32,
    /// The other rank.
    pub peer: u32,
    /// Dense index of a lane's kind.
    pub lane: u32,
    /// Of a write.
    pub fill: u32,
    /// A place in a window.
    pub from: u64,
    /// A place in a window.
    pub to: u64,
    /// In bytes.
    pub len: u64,
    /// Published or awaited.
    pub value: u64,
}

impl Step {
    /// A step that names nothing yet.
    pub fn new(verb: Verb) -> Self {
        Self { verb: verb as u32, ..Self::default() }
    }
}

/// What one role of a rank does.
#[derive(Clone, Debug)]
pub struct Script {
    /// The rank.
    pub rank: Rank,
    /// Time allowed to the whole script.
    pub allowed: Nanos,
    /// In this order; a step that fails does not end the script.
    pub steps: Vec<Step>,
}

/// What a step saw.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Saw {
    /// How it ended.
    pub ended: Ended,
    /// The value of a cell.
    pub value: u64,
    /// How long it waited.
    pub waited: Nanos,
    /// What a read copied.
    pub bytes: Vec<u8>,
}

/// The scripts of one rank on its device.
struct Loaded<'a> {
    rank: &'a RankDevice,
    scripts: Vec<(usize, &'a Script)>,
    steps: Scratch,
    saw: Scratch,
    first_of: Scratch,
    allowed: Scratch,
    bytes: Scratch,
}

/// Runs all scripts at the same time: `[scripts][steps]`.
pub(crate) fn run(ranks: &[&RankDevice], scripts: &[Script]) -> Result<Vec<Vec<Saw>>, Error> {
    let most = ranks.len();
    if let Some(script) = scripts.iter().find(|script| script.rank.index() >= most) {
        return Err(Error::invalid("rank of a script", script.rank, format_args!("below {most}")));
    }
    if let Some(step) = scripts.iter().flat_map(|script| &script.steps).find(|step| step.peer as usize >= most) {
        return Err(Error::invalid("peer of a step", step.peer, format_args!("below {most}")));
    }
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
    fn new(rank: &'a RankDevice, scripts: Vec<(usize, &'a Script)>) -> Result<Self, CudaError> {
        let stream = &rank.stream;
        rank.prepare(&[Source::Probe])?;
        let read: u64 = scripts.iter().flat_map(|(_, script)| &script.steps).map(read_bytes).sum();
        let bytes = Scratch::new(stream, read as usize)?;
        let (mut steps, mut first_of, mut out) = (Vec::new(), vec![0u32], bytes.address());
        for (_, script) in &scripts {
            for step in &script.steps {
                let Step { verb, peer, lane, fill, from, to, len, value } = *step;
                steps.push(args::Step { verb, peer, lane, fill, from, to, len, value, out });
                out += read_bytes(step);
            }
            first_of.push(steps.len() as u32);
        }
        let allowed: Vec<u64> = scripts.iter().map(|(_, script)| script.allowed.0).collect();
        Ok(Self {
            steps: Scratch::from_bytes(stream, steps.as_bytes())?,
            saw: Scratch::new(stream, steps.len() * size_of::<args::Saw>())?,
            first_of: Scratch::from_bytes(stream, first_of.as_bytes())?,
            allowed: Scratch::from_bytes(stream, allowed.as_bytes())?,
            rank,
            scripts,
            bytes,
        })
    }

    fn launch(&self) -> Result<(), CudaError> {
        if self.scripts.is_empty() {
            return Ok(());
        }
        let args = args::Probe {
            steps: self.steps.address(),
            saw: self.saw.address(),
            first_of: self.first_of.address(),
            allowed: self.allowed.address(),
        };
        // SAFETY: what this value has; read and written by so many scripts.
        unsafe { self.rank.probe(self.scripts.len() as u32, &args) }
    }

    fn collect(&self, all: &mut [Vec<Saw>]) -> Result<(), CudaError> {
        let mut raw = vec![args::Saw::default(); self.saw.bytes() / size_of::<args::Saw>()];
        let mut bytes = vec![0; self.bytes.bytes()];
        self.saw.read(0, raw.as_mut_bytes())?;
        self.bytes.read(0, &mut bytes)?;
        let mut saw = raw.iter();
        let mut bytes = &bytes[..];
        for (number, script) in &self.scripts {
            for (step, raw) in script.steps.iter().zip(&mut saw) {
                let (read, rest) = bytes.split_at(read_bytes(step) as usize);
                bytes = rest;
                let ended = u32::try_from(raw.status).ok().and_then(Ended::of).unwrap_or(Ended::OutsideTo);
                all[*number].push(Saw { ended, value: raw.value, waited: Nanos(raw.waited), bytes: read.to_vec() });
            }
        }
        Ok(())
    }
}

/// Bytes that a step reads out. None where it is refused for its length alone.
fn read_bytes(step: &Step) -> u64 {
    const MOST: u64 = 1 << 24;
    if step.verb == Verb::Read as u32 && step.len <= MOST { step.len } else { 0 }
}
