//! Scripts of verbs on NPUs ([`ep_core::device::probe`]): the machine contract, tested with the primitives that the kernels move rows with.
//! Their kernel is no part of what ships: [`source`] is compiled with the others for tests.

use std::mem::forget;

use ep_core::device::probe::{Rolls, Saw, Script, StepSaw, check};
use ep_core::layout::Kind;
use ep_core::{Error, Rank};
use zerocopy::IntoBytes;

use crate::args;
use crate::driver::{AscendError, Event, Memory, RT_LOST_HEARTBEAT};
use crate::rank::{Call, RankDevice};

/// How much longer than its kernel a script is waited for, in nanoseconds.
const GRACE: u64 = 1_000_000_000;

/// Steps of a script, at most: `EP_PROBE_STEPS` of the kernel.
pub(crate) const MOST_STEPS: u32 = 128;

/// The kernel that executes scripts: a file's name and text.
pub const fn source() -> (&'static str, &'static str) {
    ("probe.cpp", include_str!("../kernels/probe.cpp"))
}

/// The scripts of one rank on its device.
struct Loaded<'a> {
    rank: &'a RankDevice,
    me: Rank,
    /// Which of all scripts.
    numbers: Vec<usize>,
    rolls: Rolls,
    saw: Memory,
    bytes: Memory,
    /// Steps, their beginnings, times and parameters: what the kernel reads.
    given: Vec<Memory>,
    ended: Option<Event>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Runs,
    Ended,
    /// Its cores have stopped.
    Crashed,
}

/// Runs all scripts at the same time: `[scripts][steps]`, none for those of ranks that crashed.
pub(crate) fn run(ranks: &[&RankDevice], scripts: &[Script]) -> Result<Vec<Option<Vec<Saw>>>, Error> {
    check(scripts, ranks.len() as u32)?;
    if let Some(long) = scripts.iter().map(|script| script.steps.len()).find(|&steps| steps > MOST_STEPS as usize) {
        return Err(Error::invalid("steps of a script", long, format_args!("up to {MOST_STEPS}")));
    }
    let all = ranks.iter().enumerate().map(|(me, rank)| Loaded::new(rank, Rank(me as u32), scripts));
    let mut all = all.collect::<Result<Vec<_>, AscendError>>()?;
    all.iter_mut().try_for_each(Loaded::launch)?;
    let clock = ranks.first().map(|rank| rank.device().table().clock);
    let longest = scripts.iter().map(|script| script.allowed.0).max().unwrap_or(0);
    let until = clock.map_or(0, |clock| clock().saturating_add(longest).saturating_add(GRACE));
    while all.iter().any(|loaded| loaded.state == State::Runs) && clock.is_some_and(|clock| clock() < until) {
        for at in 0..all.len() {
            if all[at].look()? == State::Crashed {
                let gone = all[at].me;
                all.iter().filter(|other| other.me != gone).try_for_each(|other| other.rank.notice_gone(gone))?;
            }
        }
    }
    let mut logs = vec![None; scripts.len()];
    for loaded in all {
        loaded.collect(&mut logs)?;
    }
    Ok(logs)
}

impl<'a> Loaded<'a> {
    fn new(rank: &'a RankDevice, me: Rank, scripts: &[Script]) -> Result<Self, AscendError> {
        let own = || scripts.iter().enumerate().filter(|(_, script)| script.rank == me);
        let (numbers, mut rolls) = (own().map(|(at, _)| at).collect(), Rolls::new(own().map(|(_, script)| script)));
        let device = rank.device();
        let bytes = Memory::new(device, (rolls.read_bytes as usize).max(1))?;
        rolls.read_to(bytes.address());
        let saw = Memory::zeroed(device, (rolls.steps.len() * size_of::<StepSaw>()).max(1))?;
        Ok(Self { rank, me, numbers, rolls, saw, bytes, given: Vec::new(), ended: None, state: State::Ended })
    }

    fn launch(&mut self) -> Result<(), Error> {
        if self.numbers.is_empty() {
            return Ok(());
        }
        let Rolls { steps, first_of, allowed, .. } = &self.rolls;
        for bytes in [steps.as_bytes(), first_of.as_bytes(), allowed.as_bytes()] {
            let memory = Memory::new(self.rank.device(), bytes.len())?;
            memory.write(0, bytes)?;
            self.given.push(memory);
        }
        let rings = self.rank.layout().settings().rings();
        let args = args::Probe {
            launch: self.rank.prepared(&Call { kind: Kind::Dispatch, rings, alike: 0 }, false),
            steps: self.given[0].address(),
            saw: self.saw.address(),
            first_of: self.given[1].address(),
            allowed: self.given[2].address(),
        };
        let memory = Memory::new(self.rank.device(), size_of::<args::Probe>())?;
        memory.write(0, args.as_bytes())?;
        // SAFETY: what this value has, with room for its scripts; it is kept until the launch has ended, or for ever.
        unsafe { self.rank.probe(self.numbers.len() as u32, &memory) }?;
        self.given.push(memory);
        self.ended = Some(self.rank.record()?);
        self.state = State::Runs;
        Ok(())
    }

    /// Looks whether it has ended: the state that it came to just now.
    fn look(&mut self) -> Result<State, AscendError> {
        let Some(ended) = self.ended.as_ref().filter(|_| self.state == State::Runs) else { return Ok(State::Ended) };
        self.state = match ended.has_come() {
            Ok(true) => State::Ended,
            Ok(false) => State::Runs,
            Err(AscendError::Call { code: RT_LOST_HEARTBEAT, .. }) => State::Crashed,
            Err(error) => return Err(error),
        };
        Ok(self.state)
    }

    fn collect(self, logs: &mut [Option<Vec<Saw>>]) -> Result<(), AscendError> {
        if self.state != State::Ended {
            // A device that does not answer may still write there.
            forget((self.saw, self.bytes, self.given));
            return Ok(());
        }
        let raw = self.saw.values::<StepSaw>(0, self.rolls.steps.len())?;
        let bytes = self.bytes.values::<u8>(0, self.rolls.read_bytes as usize)?;
        for (number, log) in self.numbers.iter().zip(self.rolls.seen(&raw, &bytes)) {
            logs[*number] = Some(log);
        }
        Ok(())
    }
}
