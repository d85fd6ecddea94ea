//! Operations that were sent and not received: how many there may be, which is the next, and what becomes of those that were dropped.
//!
//! A rank that drops an operation still owes its peers that it was received: their banks, and its own next operations, wait for
//! that. So whoever drops a [`Flight`] leaves it to the endpoint, whose next call *skips* it: waits for what the operation brings,
//! throws that away, and says that it was received. To drop never waits and never fails.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::engine::Mark;
use crate::error::Error;
use crate::layout::Arrival;
use crate::shape::Shape;

/// Operations that may be sent and not received.
const BANKS: u64 = 2;

/// What an endpoint shares with the operations that it has sent.
#[derive(Debug)]
struct Shared<W> {
    /// The last operation that was received.
    received: u64,
    /// Operations that were dropped before they were received, and what it takes to skip them.
    dropped: BTreeMap<u64, W>,
}

type Home<W> = Mutex<Shared<W>>;

fn lock<W>(home: &Home<W>) -> MutexGuard<'_, Shared<W>> {
    home.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<W> Shared<W> {
    /// The oldest operation that is neither received nor dropped.
    fn oldest(&self) -> u64 {
        let first = self.received + 1;
        first + (first..).take_while(|op| self.dropped.contains_key(op)).count() as u64
    }
}

/// The low-latency operations of an endpoint in one generation, counted from 1. `W` is what it takes to skip one.
#[derive(Debug)]
pub struct Flights<W> {
    sent: u64,
    home: Arc<Home<W>>,
}

impl<W> Default for Flights<W> {
    fn default() -> Self {
        Self { sent: 0, home: Arc::new(Mutex::new(Shared { received: 0, dropped: BTreeMap::new() })) }
    }
}

/// An operation that was sent. Dropped before it was received, it is left to its endpoint, to be skipped.
#[derive(Debug)]
pub struct Flight<W: Clone> {
    mark: Mark,
    op: u64,
    work: W,
    /// Gone with the generation: then nobody waits for it any more.
    home: Weak<Home<W>>,
}

impl<W: Clone> Flight<W> {
    /// Its endpoint and generation.
    pub const fn mark(&self) -> &Mark {
        &self.mark
    }

    /// Its number.
    pub const fn op(&self) -> u64 {
        self.op
    }

    /// What it takes to skip it.
    pub const fn work(&self) -> &W {
        &self.work
    }
}

impl<W: Clone> Drop for Flight<W> {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade() else { return };
        let mut shared = lock(&home);
        if self.op > shared.received {
            shared.dropped.insert(self.op, self.work.clone());
        }
    }
}

impl<W: Clone> Flights<W> {
    /// Operations that were sent so far.
    pub const fn sent(&self) -> u64 {
        self.sent
    }

    /// Operations that were received so far, skipped ones among them.
    pub fn received(&self) -> u64 {
        lock(&self.home).received
    }

    /// Operations that were sent and are neither received nor skipped.
    pub fn in_flight(&self) -> u64 {
        self.sent - self.received()
    }

    /// Operations that will be in flight once those are skipped that can be.
    fn remaining(&self) -> u64 {
        self.sent + 1 - lock(&self.home).oldest()
    }

    /// Refuses to send the next operation where that cannot be. Its number.
    ///
    /// # Errors
    /// [`Error::TooManyInFlight`]; [`Error::Invalid`] when the generation has no numbers left.
    pub fn check_send(&self, shape: &Shape) -> Result<u64, Error> {
        let op = self.sent + 1;
        if self.remaining() >= BANKS {
            return Err(Error::TooManyInFlight { op });
        }
        let last = Arrival::last_op(shape);
        if op > last {
            return Err(Error::invalid("low-latency operation", op, format_args!("at most {last}; rejoin to go on")));
        }
        Ok(op)
    }

    /// Refuses both halves at once while an operation is in flight: that one would have to be received first.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_at_once(&self) -> Result<(), Error> {
        match self.remaining() {
            0 => Ok(()),
            flying => {
                let oldest = lock(&self.home).oldest();
                let limit = format_args!("0 for both halves at once; receive operation {oldest} first");
                Err(Error::invalid("low-latency operations in flight", flying, limit))
            }
        }
    }

    /// Refuses to receive `flight` unless it is the next in turn of the endpoint that bears `own` now.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it is of another endpoint or an earlier generation, was received before, or is not the oldest.
    pub fn check_receive(&self, flight: &Flight<W>, own: &Mark) -> Result<(), Error> {
        flight.mark.check("low-latency operation", own)?;
        let shared = lock(&self.home);
        let (oldest, what) = (shared.oldest(), "low-latency operation to receive");
        if flight.op <= shared.received {
            return Err(Error::invalid(what, format_args!("{}, received before", flight.op), "once"));
        }
        if flight.op != oldest {
            let limit = format_args!("{oldest}, the oldest that was not received");
            return Err(Error::invalid(what, flight.op, limit));
        }
        Ok(())
    }

    /// The oldest operation, if it was dropped: it must be skipped before anything is sent or received.
    pub fn dropped(&self) -> Option<(u64, W)> {
        let shared = lock(&self.home);
        let first = shared.received + 1;
        shared.dropped.get(&first).map(|work| (first, work.clone()))
    }

    /// The next operation, which takes its number: it is sent by an endpoint that bears `mark`.
    pub fn send(&mut self, mark: Mark, work: W) -> Flight<W> {
        self.sent += 1;
        Flight { mark, op: self.sent, work, home: Arc::downgrade(&self.home) }
    }

    /// The oldest operation was received or skipped.
    pub fn receive(&mut self) {
        let mut shared = lock(&self.home);
        shared.received += 1;
        let received = shared.received;
        let skipped = shared.dropped.remove(&received);
        // What a backend keeps for it may go back to the driver.
        drop(shared);
        drop(skipped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape::builder().experts(4).topk(1).hidden(16).max_tokens(8).build().unwrap()
    }

    fn flights() -> (Flights<&'static str>, Mark) {
        (Flights::default(), Mark::new(&Arc::new(()), 1))
    }

    fn said<T>(result: Result<T, Error>) -> String {
        result.map(|_| "nothing refused".to_owned()).unwrap_or_else(|error| error.to_string())
    }

    #[test]
    fn two_may_be_in_flight_and_the_oldest_is_received_first() {
        let (mut flights, mark) = flights();
        let [one, two] = [flights.send(mark.clone(), "one"), flights.send(mark.clone(), "two")];
        assert_eq!(flights.check_send(&shape()), Err(Error::TooManyInFlight { op: 3 }));
        let early = "low-latency operation to receive is 2, allowed: 1, the oldest that was not received";
        assert_eq!(said(flights.check_receive(&two, &mark)), early);
        flights.check_receive(&one, &mark).unwrap();
        flights.receive();
        let again = "low-latency operation to receive is 1, received before, allowed: once";
        assert_eq!(said(flights.check_receive(&one, &mark)), again);
        flights.check_receive(&two, &mark).unwrap();
        assert_eq!(flights.check_send(&shape()), Ok(3));
    }

    #[test]
    fn what_was_dropped_is_skipped_in_turn() {
        let (mut flights, mark) = flights();
        let one = flights.send(mark.clone(), "one");
        drop(flights.send(mark.clone(), "two"));
        assert_eq!(flights.dropped(), None, "an older one is to be received first");
        assert_eq!(flights.check_send(&shape()), Err(Error::TooManyInFlight { op: 3 }));
        drop(one);
        assert_eq!(flights.check_send(&shape()), Ok(3), "both will be skipped");
        flights.check_at_once().unwrap();
        for due in [(1, "one"), (2, "two")] {
            assert_eq!((flights.dropped(), flights.dropped()), (Some(due), Some(due)), "until it was skipped");
            flights.receive();
        }
        assert_eq!((flights.dropped(), flights.in_flight()), (None, 0));
    }

    #[test]
    fn one_behind_a_dropped_one_is_next() {
        let (mut flights, mark) = flights();
        drop(flights.send(mark.clone(), "one"));
        let two = flights.send(mark.clone(), "two");
        flights.check_receive(&two, &mark).unwrap();
        let first =
            "low-latency operations in flight is 1, allowed: 0 for both halves at once; receive operation 2 first";
        assert_eq!(said(flights.check_at_once()), first);
    }

    #[test]
    fn what_was_received_or_is_of_before_leaves_nothing() {
        let (mut flights, mark) = flights();
        let one = flights.send(mark.clone(), "one");
        flights.receive();
        drop(one);
        let of_before = flights.send(mark.clone(), "two");
        assert_eq!(flights.dropped(), None);
        flights = Flights::default();
        drop(of_before);
        assert_eq!((flights.dropped(), flights.check_send(&shape())), (None, Ok(1)));
    }

    #[test]
    fn those_of_others_and_of_before_are_refused() {
        let (mut flights, mark) = flights();
        let one = flights.send(mark, "one");
        let other = Mark::new(&Arc::new(()), 1);
        assert!(said(flights.check_receive(&one, &other)).starts_with("low-latency operation is of another endpoint"));
    }
}
