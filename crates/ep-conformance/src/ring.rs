//! One ring on the machine contract alone: rank 0 sends messages to rank 1, on any machine.
//!
//! What a role does that fills or empties a ring, without an engine: for examples, and for whoever measures what the verbs of
//! a machine cost. The ring is the first near one, as the layout's settings cut it: it has the slots and publishes the tail and
//! returns credit after the rows that they say.

use ep_core::machine::{Machine, Opening};
use ep_core::port::{Cell, Counter, Duty, LaneId, LaneKind, Need, Offset, Port as _, Role, Span, Ticket};
use ep_core::ring::{Consumer, Producer};
use ep_core::{Fault, Nanos, Rank};

/// Who sends.
pub const SENDER: Rank = Rank(0);
/// Who receives.
pub const RECEIVER: Rank = Rank(1);

const DATA: LaneKind = LaneKind::Data(0);
const CREDIT: LaneKind = LaneKind::Credit(0);
const TAIL: Cell = Cell::new(SENDER, DATA, Counter::Tail);
const HEAD: Cell = Cell::new(RECEIVER, CREDIT, Counter::Head);
const TO_RECEIVER: LaneId = LaneId { peer: RECEIVER, kind: DATA };
const TO_SENDER: LaneId = LaneId { peer: SENDER, kind: CREDIT };

/// Waits of a whole run end after this time, which is for thousands of messages on a busy machine.
const PATIENCE: Nanos = Nanos::from_secs(3600);

fn open<M: Machine>(machine: &M, duty: Duty) -> M::Port {
    let deadline = machine.now() + PATIENCE;
    machine.port(Opening { role: Role::new(duty), op: 1, generation: 1, deadline })
}

/// Rank 0's end. A machine's rings are fresh once: it can make one of these, once.
#[derive(Debug)]
pub struct Sender<'m, M: Machine> {
    machine: &'m M,
    port: M::Port,
    ring: Producer,
    /// Of each slot of the staging memory: the last put that reads it.
    staged: Vec<Ticket>,
    next: usize,
}

impl<'m, M: Machine> Sender<'m, M> {
    /// Opens the ring.
    pub fn new(machine: &'m M) -> Self {
        let near = machine.layout().settings().rings().near;
        let staged = vec![Ticket(0); near.staging_slots() as usize];
        Self { machine, port: open(machine, Duty::Sender), ring: Producer::new(near), staged, next: 0 }
    }

    /// The `bytes` first bytes of slot `slot` of the staging memory.
    pub fn staging(&self, slot: usize, bytes: usize) -> Span {
        let layout = self.machine.layout();
        layout.staging_slot(RECEIVER, &layout.settings().rings(), 0, slot as u32).offset.span(bytes as u64)
    }

    /// Slots of the staging memory.
    pub const fn staging_slots(&self) -> usize {
        self.staged.len()
    }

    /// Writes bytes to a slot of the staging memory, for [`Sender::send_staged`].
    ///
    /// # Errors
    /// Those of the verb.
    pub fn stage(&mut self, slot: usize, message: &[u8]) -> Result<(), Fault> {
        self.port.write(self.staging(slot, message.len()).offset, message)
    }

    /// Sends a message that lies in ordinary memory: copies it to staging memory and puts it from there.
    ///
    /// # Errors
    /// Those of the verbs.
    pub async fn send(&mut self, message: &[u8]) -> Result<(), Fault> {
        let next = self.next;
        self.port.flush(TO_RECEIVER, self.staged[next]).await?;
        self.stage(next, message)?;
        self.next = if next + 1 == self.staged.len() { 0 } else { next + 1 };
        self.send_staged(next, message.len()).await
    }

    /// Sends the message of `bytes` bytes that lies ready in slot `slot` of the staging memory.
    ///
    /// # Errors
    /// Those of the verbs.
    pub async fn send_staged(&mut self, slot: usize, bytes: usize) -> Result<(), Fault> {
        if self.ring.slot().is_none() {
            self.room().await?;
        }
        let (from, to) = (self.staging(slot, bytes), self.target());
        self.staged[slot] = self.port.put(TO_RECEIVER, from, to).await?;
        if let Some(tail) = self.ring.push() {
            self.port.publish(TO_RECEIVER, TAIL, tail).await?;
        }
        Ok(())
    }

    /// The next slot of the ring, which has room.
    fn target(&self) -> Offset {
        let (layout, slot) = (self.machine.layout(), self.ring.slot().unwrap_or_default());
        layout.ring_slot(SENDER, &layout.settings().rings(), 0, slot).offset
    }

    /// Waits for a free slot of the ring.
    async fn room(&mut self) -> Result<(), Fault> {
        while self.ring.slot().is_none() {
            // Who waits lets the other go on.
            self.announce().await?;
            self.port.wait_any(&[Need { cell: HEAD, at_least: self.ring.awaited_head() }]).await?;
            let seen = self.port.peek(HEAD);
            self.ring.saw_head(seen).map_err(|overrun| miscounted("head of the ring", overrun, RECEIVER))?;
        }
        Ok(())
    }

    async fn announce(&mut self) -> Result<(), Fault> {
        match self.ring.pending() {
            Some(tail) => self.port.publish(TO_RECEIVER, TAIL, tail).await,
            None => Ok(()),
        }
    }

    /// Publishes what is pending and waits until nothing of the staging memory is read any more.
    ///
    /// # Errors
    /// Those of the verbs.
    pub async fn finish(&mut self) -> Result<(), Fault> {
        self.announce().await?;
        let last = self.staged.iter().copied().max().unwrap_or_default();
        self.port.flush(TO_RECEIVER, last).await
    }
}

/// Rank 1's end. A machine's rings are fresh once: it can make one of these, once.
#[derive(Debug)]
pub struct Receiver<'m, M: Machine> {
    machine: &'m M,
    port: M::Port,
    ring: Consumer,
}

impl<'m, M: Machine> Receiver<'m, M> {
    /// Opens the ring.
    pub fn new(machine: &'m M) -> Self {
        let ring = Consumer::new(machine.layout().settings().rings().near);
        Self { machine, port: open(machine, Duty::Receiver), ring }
    }

    /// Copies the next message out, once it is there.
    ///
    /// # Errors
    /// Those of the verbs.
    pub async fn receive(&mut self, into: &mut [u8]) -> Result<(), Fault> {
        if self.ring.slot().is_none() {
            self.message().await?;
        }
        let (layout, slot) = (self.machine.layout(), self.ring.slot().unwrap_or_default());
        self.port.read(layout.ring_slot(SENDER, &layout.settings().rings(), 0, slot).offset, into)?;
        match self.ring.pop() {
            Some(head) => self.port.publish(TO_SENDER, HEAD, head).await,
            None => Ok(()),
        }
    }

    /// Waits for a message.
    async fn message(&mut self) -> Result<(), Fault> {
        while self.ring.slot().is_none() {
            self.finish().await?;
            self.port.wait_any(&[Need { cell: TAIL, at_least: self.ring.awaited_tail() }]).await?;
            let seen = self.port.peek(TAIL);
            self.ring.saw_tail(seen).map_err(|overrun| miscounted("tail of the ring", overrun, SENDER))?;
        }
        Ok(())
    }

    /// Returns the credit that is pending.
    ///
    /// # Errors
    /// Those of the verb.
    pub async fn finish(&mut self) -> Result<(), Fault> {
        match self.ring.pending() {
            Some(head) => self.port.publish(TO_SENDER, HEAD, head).await,
            None => Ok(()),
        }
    }
}

fn miscounted(field: &'static str, overrun: ep_core::ring::Overrun, peer: Rank) -> Fault {
    Fault::Mismatch { field, mine: overrun.limit, theirs: overrun.seen, peer }
}
