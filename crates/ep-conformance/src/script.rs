//! Scripts of verbs: the rules F1 to F11 as data, so that devices can execute them too.

pub mod device;

use ep_core::machine::{Machine, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Nanos, Need, Offset, Port, Role, Tag, Ticket, Units};
use ep_core::{Fault, Rank};

/// One verb of a script. Places are absolute offsets in a window; cells are [`Counter::Probe`] of the named lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Writes `len` bytes of `fill` into the own window.
    Write {
        /// Where.
        at: u64,
        /// How many bytes.
        len: u64,
        /// What byte.
        fill: u8,
    },
    /// Reads the own window. Sees [`Seen::Bytes`].
    Read {
        /// Where.
        at: u64,
        /// How many bytes.
        len: u64,
    },
    /// Puts bytes of the own window into the peer's.
    Put {
        /// The lane.
        lane: LaneId,
        /// Where they lie.
        from: u64,
        /// Where they go.
        to: u64,
        /// How many bytes.
        len: u64,
    },
    /// Gets bytes of the peer's window into the own.
    Get {
        /// The lane.
        lane: LaneId,
        /// Where they lie.
        from: u64,
        /// Where they go.
        to: u64,
        /// How many bytes.
        len: u64,
    },
    /// Publishes the lane's probe cell.
    Publish {
        /// The lane.
        lane: LaneId,
        /// The value.
        value: u64,
    },
    /// Waits for the probe cell of the lane `kind` of `writer`.
    Wait {
        /// Who publishes it.
        writer: Rank,
        /// On which lane.
        kind: LaneKind,
        /// The value awaited.
        at_least: u64,
    },
    /// Looks at that cell. Sees [`Seen::Value`].
    Peek {
        /// Who publishes it.
        writer: Rank,
        /// On which lane.
        kind: LaneKind,
    },
    /// Puts bytes of the own window as units into the peer's.
    PutUnits {
        /// The lane.
        lane: LaneId,
        /// Where the bytes lie.
        from: u64,
        /// Where the units go.
        to: u64,
        /// How many bytes of data.
        len: u64,
        /// The operation that they are tagged as.
        serial: u64,
    },
    /// Waits for units in the own window. Sees their data, as [`Seen::Bytes`].
    Units {
        /// Who puts them, and on which lane.
        lane: LaneId,
        /// Where they come.
        at: u64,
        /// How many bytes of data.
        len: u64,
        /// The operation that they are tagged as.
        serial: u64,
    },
    /// Flushes the lane up to the script's last put or get on it.
    Flush {
        /// The lane.
        lane: LaneId,
    },
}

/// What one role of one rank does. A step that fails does not end the script.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Script {
    /// The rank.
    pub rank: Rank,
    /// Time allowed to the whole script.
    pub allowed: Nanos,
    /// Its verbs, in order.
    pub steps: Vec<Step>,
}

impl Script {
    /// An empty script of `rank` that may take a minute: nobody waits for it where nothing is lost.
    pub const fn new(rank: Rank) -> Self {
        Self { rank, allowed: Nanos::from_secs(60), steps: Vec::new() }
    }

    /// It may take no longer.
    #[must_use]
    pub const fn within(mut self, allowed: Nanos) -> Self {
        self.allowed = allowed;
        self
    }

    /// Adds a step.
    #[must_use]
    pub fn then(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }

    /// Adds steps.
    #[must_use]
    pub fn all(mut self, steps: impl IntoIterator<Item = Step>) -> Self {
        self.steps.extend(steps);
        self
    }
}

/// What one step saw.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// It did what it says.
    Done,
    /// A read's bytes.
    Bytes(Vec<u8>),
    /// A peek's value.
    Value(u64),
    /// It failed.
    Fault(Fault),
}

/// Runs a script on a machine whose roles run on a CPU. `number` distinguishes the scripts of one rank.
pub async fn execute<M: Machine>(machine: &M, script: &Script, number: u16) -> Vec<Seen> {
    let role = Role { duty: Duty::Probe, peer: None, track: number };
    let deadline = machine.now() + script.allowed;
    let mut port = machine.port(Opening { role, op: 1, generation: 1, deadline });
    let mut tickets: Vec<(LaneId, Ticket)> = Vec::new();
    let mut log = Vec::with_capacity(script.steps.len());
    for step in &script.steps {
        log.push(take(&mut port, step, machine.rank(), &mut tickets).await.unwrap_or_else(Seen::Fault));
    }
    log
}

async fn take<P: Port>(
    port: &mut P,
    step: &Step,
    me: Rank,
    tickets: &mut Vec<(LaneId, Ticket)>,
) -> Result<Seen, Fault> {
    match *step {
        Step::Write { at, len, fill } => port.write(Offset(at), &vec![fill; len as usize])?,
        Step::Read { at, len } => {
            let mut bytes = vec![0; len as usize];
            port.read(Offset(at), &mut bytes)?;
            return Ok(Seen::Bytes(bytes));
        }
        Step::Put { lane, from, to, len } => {
            let ticket = port.put(lane, Offset(from).span(len), Offset(to)).await?;
            tickets.push((lane, ticket));
        }
        Step::Get { lane, from, to, len } => {
            let ticket = port.get(lane, Offset(from).span(len), Offset(to)).await?;
            tickets.push((lane, ticket));
        }
        Step::Publish { lane, value } => {
            port.publish(lane, Cell::new(me, lane.kind, Counter::Probe), value).await?;
        }
        Step::Wait { writer, kind, at_least } => {
            let cell = Cell::new(writer, kind, Counter::Probe);
            port.wait_any(&[Need { cell, at_least }]).await?;
        }
        Step::Peek { writer, kind } => {
            return Ok(Seen::Value(port.peek(Cell::new(writer, kind, Counter::Probe))));
        }
        Step::PutUnits { lane, from, to, len, serial } => {
            let ticket = port.put_units(lane, Offset(from).span(len), Offset(to), Tag::of(serial)).await?;
            tickets.push((lane, ticket));
        }
        Step::Units { lane, at, len, serial } => {
            let units = Units { lane, at: Offset(at), len, tag: Tag::of(serial) };
            port.wait_units(&[units], &[]).await?;
            let mut bytes = vec![0; len as usize];
            port.poll_units(&units, &mut bytes)?;
            return Ok(Seen::Bytes(bytes));
        }
        Step::Flush { lane } => {
            let last = tickets.iter().rev().find(|(posted, _)| *posted == lane);
            if let Some(&(_, ticket)) = last {
                port.flush(lane, ticket).await?;
            }
        }
    }
    Ok(Seen::Done)
}
