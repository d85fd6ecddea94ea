//! Scripts of verbs as kernels execute them: the machine contract, tested with the primitives that a device's kernels move rows with.

use zerocopy::FromZeros as _;

use crate::error::Error;
use crate::port::Nanos;
use crate::topology::Rank;
use crate::{c_enum, c_struct};

c_enum! {
    /// What a step does.
    pub enum Verb = "EP_VERB" {
        /// Writes `len` bytes of `fill` to `to` in the own window.
        Write = 0,
        /// Reads `len` bytes at `from` in the own window.
        Read = 1,
        /// Puts `len` bytes from `from` in the own window to `to` in that of `peer`.
        Put = 2,
        /// Gets `len` bytes from `from` in the window of `peer` to `to` in the own.
        Get = 3,
        /// Publishes `value` in the probe cell of `lane` at `peer`.
        Publish = 4,
        /// Waits until the probe cell of `lane` of `peer` is at least `value`.
        Wait = 5,
        /// Looks at that cell.
        Peek = 6,
        /// Waits until all puts are complete.
        Flush = 7,
        /// Puts `len` bytes from `from` in the own window to `to` in that of `peer`, as units of operation `value`.
        PutUnits = 8,
        /// Waits until all units of `len` bytes have come from `peer` to `from` in the own window, of operation `value`, and reads their data.
        Units = 9,
    }
}

c_enum! {
    /// How a step ended.
    pub enum Ended = "EP_SAW" {
        /// It did what it says.
        Done = 0,
        /// The time was up.
        Timeout = 1,
        /// Bytes at `from` are outside the window.
        OutsideFrom = 2,
        /// Bytes at `to` are.
        OutsideTo = 3,
        /// The rank that was waited for is gone.
        Gone = 4,
    }
}

c_struct! {
    /// A step of a script of verbs. What it does not name is 0.
    pub struct Step = "EpStep" {
        /// EP_VERB_...
        pub verb: u32,
        /// The other rank: reader or writer.
        pub peer: u32,
        /// Index of the lane.
        pub lane: u32,
        /// Byte of a write.
        pub fill: u32,
        /// Place in the window.
        pub from: u64,
        /// As from.
        pub to: u64,
        /// Bytes.
        pub len: u64,
        /// Published or awaited; of units, their operation.
        pub value: u64,
        /// Address that what is read is copied to: the backend's to say.
        pub out: u64,
    }
}

c_struct! {
    /// What a step saw, as the kernel says it.
    pub struct StepSaw = "EpSaw" {
        /// EP_SAW_...
        pub status: u64,
        /// Of the cell.
        pub value: u64,
        /// Nanoseconds: how long it waited; on GPUs how long it took.
        pub waited: u64,
    }
}

impl Step {
    /// A step that names nothing yet.
    pub fn new(verb: Verb) -> Self {
        Self { verb: verb as u32, ..Self::new_zeroed() }
    }

    /// Bytes that it reads out. None where it is refused for its length alone.
    fn read_bytes(&self) -> u64 {
        const MOST: u64 = 1 << 24;
        let reads = [Verb::Read as u32, Verb::Units as u32].contains(&self.verb);
        if reads && self.len <= MOST { self.len } else { 0 }
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
    /// How long it waited; on GPUs how long it took.
    pub waited: Nanos,
    /// What a read copied.
    pub bytes: Vec<u8>,
}

/// The scripts of one rank, one behind the other, as its kernel takes them.
#[derive(Clone, Debug)]
pub struct Rolls {
    /// Steps of all scripts.
    pub steps: Vec<Step>,
    /// `[scripts + 1]`: the first step of each script.
    pub first_of: Vec<u32>,
    /// `[scripts]`: nanoseconds.
    pub allowed: Vec<u64>,
    /// Bytes that all reads copy.
    pub read_bytes: u64,
}

impl Rolls {
    /// Of these scripts.
    pub fn new<'a>(scripts: impl Iterator<Item = &'a Script>) -> Self {
        let mut rolls = Self { steps: Vec::new(), first_of: vec![0], allowed: Vec::new(), read_bytes: 0 };
        for script in scripts {
            rolls.steps.extend(&script.steps);
            rolls.first_of.push(rolls.steps.len() as u32);
            rolls.allowed.push(script.allowed.0);
            rolls.read_bytes += script.steps.iter().map(Step::read_bytes).sum::<u64>();
        }
        rolls
    }

    /// Says where reads copy to: [`Rolls::read_bytes`] of memory at this address.
    pub fn read_to(&mut self, mut address: u64) {
        for step in &mut self.steps {
            step.out = address;
            address += step.read_bytes();
        }
    }

    /// What each step of each script saw, of what the kernel says and of what its reads copied.
    pub fn seen(&self, raw: &[StepSaw], mut bytes: &[u8]) -> Vec<Vec<Saw>> {
        let saw = |(step, raw): (&Step, &StepSaw)| {
            let (read, rest) = bytes.split_at(step.read_bytes() as usize);
            bytes = rest;
            let ended = u32::try_from(raw.status).ok().and_then(Ended::of).unwrap_or(Ended::OutsideTo);
            Saw { ended, value: raw.value, waited: Nanos(raw.waited), bytes: read.to_vec() }
        };
        let all: Vec<Saw> = self.steps.iter().zip(raw).map(saw).collect();
        self.first_of.windows(2).map(|part| all[part[0] as usize..part[1] as usize].to_vec()).collect()
    }
}

/// Refuses scripts of ranks, or with peers, that are none of so many.
///
/// # Errors
/// [`Error::Invalid`] with the rank.
pub fn check(scripts: &[Script], ranks: u32) -> Result<(), Error> {
    if let Some(script) = scripts.iter().find(|script| script.rank.0 >= ranks) {
        return Err(Error::invalid("rank of a script", script.rank, format_args!("below {ranks}")));
    }
    if let Some(step) = scripts.iter().flat_map(|script| &script.steps).find(|step| step.peer >= ranks) {
        return Err(Error::invalid("peer of a step", step.peer, format_args!("below {ranks}")));
    }
    Ok(())
}
