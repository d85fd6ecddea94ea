//! Incidents on ranks that are threads or processes: some end at a verb, some are slow.

use std::cell::Cell as Count;
use std::future::{pending, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::thread;
use std::time::Duration;

use ep_core::incident::Incident;
use ep_core::machine::{Decorate, Opening};
use ep_core::port::{Cell, LaneId, Need, Offset, Span, Ticket, Work};
use ep_core::{Fault, Nanos, Port, Rank};

/// What a verb of a slow rank takes longer.
const SLOWLY: Duration = Duration::from_micros(50);

/// Bytes of a row in the case that broken processes run.
const MISREAD: usize = 80;

/// What becomes of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Fate {
    slow: bool,
    /// Verbs it still does, if it is to crash.
    left: Rc<Count<Option<u64>>>,
    crashed: Rc<Count<bool>>,
    /// What it reads of the size of a row is not what is there.
    misreads: bool,
    /// The rank is a process, which ends when the rank crashes.
    alone: bool,
}

impl Fate {
    /// That of `rank` under `incidents`. Exits need nothing: a rank leaves when its endpoint is dropped. `alone`: the rank is a
    /// process, which ends when it crashes, as processes end that are killed.
    pub(crate) fn new(rank: Rank, incidents: &[Incident], alone: bool) -> Self {
        let slow = incidents.contains(&Incident::Starve { rank });
        let crash = incidents.iter().find_map(|incident| match *incident {
            Incident::Crash { rank: victim, after, noticed: true } if victim == rank => Some(after),
            _ => None,
        });
        Self { slow, left: Rc::new(Count::new(crash)), crashed: Rc::default(), misreads: false, alone }
    }

    /// The same, of a rank that misreads rows of [`MISREAD`] bytes.
    pub(crate) fn misreading(self, misreads: bool) -> Self {
        Self { misreads, ..self }
    }

    /// Does `work` to its end, or until the rank crashes: then it is dropped, and with it the rank's endpoint.
    pub(crate) async fn befall<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending if self.crashed.get() => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    /// Before each verb.
    async fn verb(&self) {
        if self.slow {
            thread::sleep(SLOWLY);
        }
        match self.left.get() {
            None => {}
            Some(0) if self.alone => std::process::exit(1),
            Some(0) => {
                self.crashed.set(true);
                pending().await
            }
            Some(left) => self.left.set(Some(left - 1)),
        }
    }
}

impl Decorate for Fate {
    type Port<P: Port> = Fated<P>;

    fn decorate<P: Port>(&self, port: P, _rank: Rank, _opening: &Opening) -> Fated<P> {
        Fated { port, fate: self.clone() }
    }
}

/// A port of a rank with a fate.
#[derive(Debug)]
pub(crate) struct Fated<P> {
    port: P,
    fate: Fate,
}

impl<P: Port> Port for Fated<P> {
    fn now(&self) -> Nanos {
        self.port.now()
    }

    fn peek(&self, cell: Cell) -> u64 {
        self.port.peek(cell)
    }

    async fn wait_any(&mut self, needs: &[Need]) -> Result<usize, Fault> {
        self.fate.verb().await;
        self.port.wait_any(needs).await
    }

    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.fate.verb().await;
        self.port.put(lane, from, to).await
    }

    async fn get(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Ticket, Fault> {
        self.fate.verb().await;
        self.port.get(lane, from, to).await
    }

    async fn publish(&mut self, lane: LaneId, cell: Cell, value: u64) -> Result<(), Fault> {
        self.fate.verb().await;
        self.port.publish(lane, cell, value).await
    }

    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        self.fate.verb().await;
        self.port.flush(lane, upto).await
    }

    fn read(&self, from: Offset, into: &mut [u8]) -> Result<(), Fault> {
        self.port.read(from, into)?;
        if self.fate.misreads && into.len() == MISREAD {
            into[0] ^= 1;
        }
        Ok(())
    }

    fn write(&mut self, to: Offset, bytes: &[u8]) -> Result<(), Fault> {
        self.port.write(to, bytes)
    }

    fn charge(&self, work: Work) {
        self.port.charge(work);
    }
}
