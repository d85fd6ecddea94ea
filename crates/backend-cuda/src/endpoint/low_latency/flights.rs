//! Operations that were sent and not received: of calls that ran, and of a capture, which counts for itself.
//!
//! An operation that was dropped is skipped by the next call, which receives it into memory of nobody's ([`CudaEndpoint::skip`]). Where
//! a peer was late, that reads the rows again. So a dropped operation keeps them, if they are the endpoint's; a caller who drops it
//! may take his memory back.

use std::sync::Arc;

use ep_core::engine::low_latency::{Flight, Flights};
use ep_core::{Endpoint as _, Error, Rank, RankSet};

use super::super::CudaEndpoint;
use super::combine::Sums;
use super::dispatch::Batch;
use crate::driver::{Capture, Scratch};

/// Low latency's part of an endpoint.
#[derive(Debug)]
pub(in crate::endpoint) struct Low<W = Work> {
    /// Of calls in this generation.
    called: Flights<W>,
    /// Of the last capture, and its number.
    captured: (u64, Flights<W>),
    /// The ranks that take no part, and those masked here.
    pub(super) mask: RankSet,
    /// Whom the last failure of this generation blames.
    pub(in crate::endpoint) failed: Option<Rank>,
    /// What [`CudaEndpoint::low_latency_combine_buffer`] gives out.
    pub(super) buffer: Option<Arc<Scratch>>,
}

impl<W> Default for Low<W> {
    fn default() -> Self {
        Self {
            called: Flights::default(),
            captured: (0, Flights::default()),
            mask: RankSet::new(),
            failed: None,
            buffer: None,
        }
    }
}

impl<W: Clone> Low<W> {
    /// Begins a generation.
    pub(in crate::endpoint) fn restart(&mut self, mask: &RankSet) {
        (self.called, self.captured, self.mask) = (Flights::default(), (0, Flights::default()), mask.clone());
        self.failed = None;
    }

    /// Those of calls that run, or that go to a capture.
    pub(super) fn flights(&mut self, capture: Option<&Capture>) -> &mut Flights<W> {
        let Some(capture) = capture else { return &mut self.called };
        if self.captured.0 != capture.id {
            self.captured = (capture.id, Flights::default());
        }
        &mut self.captured.1
    }

    /// The next operation to be received, of calls that ran.
    pub(super) fn next(&self) -> u64 {
        self.called.received() + 1
    }
}

/// What it takes to skip an operation.
#[derive(Clone, Debug)]
pub(in crate::endpoint) enum Work {
    Dispatch(Batch),
    Combine(Sums),
}

impl Work {
    /// Whether it has what its sending half read: the caller's memory may be gone.
    const fn is_whole(&self) -> bool {
        match self {
            Self::Dispatch(batch) => batch.is_whole(),
            Self::Combine(sums) => sums.is_whole(),
        }
    }
}

/// An operation that was sent.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) flight: Flight<Work>,
    /// The capture that it was sent in.
    capture: Option<u64>,
}

impl Sent {
    pub(super) const fn op(&self) -> u64 {
        self.flight.op()
    }
}

/// How many are in flight, as kernels count them.
pub(super) fn in_flight(flights: &Flights<Work>) -> u32 {
    flights.in_flight() as u32
}

impl CudaEndpoint {
    /// Refuses to send when that cannot be; the operation's number.
    pub(super) fn check_send(&mut self, capture: Option<&Capture>) -> Result<u64, Error> {
        self.layout().check_low_latency()?;
        let shape = *self.shape();
        self.low.flights(capture).check_send(&shape)
    }

    /// Refuses to send both halves at once when that cannot be; the operation's number, once everything is skipped that can be.
    pub(super) fn check_both(&mut self, capture: Option<&Capture>) -> Result<u64, Error> {
        let op = self.check_send(capture)?;
        self.low.flights(capture).check_at_once().map(|()| op)
    }

    /// Refuses to receive what is not the next in turn.
    pub(super) fn check_receive(&mut self, sent: &Sent, capture: Option<&Capture>) -> Result<(), Error> {
        let own = self.desk.mark();
        sent.flight.mark().check("low-latency operation", &own)?;
        let here = capture.map(|capture| capture.id);
        if sent.capture != here {
            let name = |capture: Option<u64>| match capture {
                Some(_) => "sent in a capture",
                None => "sent by a call that ran",
            };
            let limit = if here.is_some() { "sent in this capture" } else { "sent by a call that ran" };
            return Err(Error::invalid("low-latency operation to receive", name(sent.capture), limit));
        }
        self.low.flights(capture).check_receive(&sent.flight, &own)
    }

    /// The next operation was sent.
    pub(super) fn sent(&mut self, work: Work, capture: Option<&Capture>) -> Sent {
        let mark = self.desk.mark();
        let flight = self.low.flights(capture).send(mark, work);
        Sent { flight, capture: capture.map(|capture| capture.id) }
    }

    /// Skips the oldest operations, as far as they were dropped: receives them into memory of nobody's. What fails here may be tried
    /// again, like a receiving half.
    pub(super) async fn skip(&mut self, capture: Option<&Capture>) -> Result<(), Error> {
        while let Some((op, work)) = self.low.flights(capture).dropped() {
            // What a capture reads is there as long as the graph is.
            if capture.is_none() && !work.is_whole() && self.device.low_is_late(op, &self.low.mask)? {
                // A rank that is owed rows will not get them, and nobody knows them any more.
                let failure = self.desk.abandoned(op);
                return Err(self.fail(Error::Failed(failure)));
            }
            match &work {
                Work::Dispatch(batch) => self.skip_dispatch(op, batch, capture).await?,
                Work::Combine(sums) => self.skip_combine(op, sums, capture).await?,
            }
            self.low.flights(capture).receive();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ep_core::engine::Mark;

    use super::*;

    #[test]
    fn a_capture_counts_for_itself_from_nothing_in_flight() {
        let mut low = Low::<()>::default();
        let mark = Mark::new(&Arc::new(()), 1);
        let send = |flights: &mut Flights<()>| drop(flights.send(mark.clone(), ()));
        (0..3).for_each(|_| send(low.flights(None)));
        (0..2).for_each(|_| low.flights(None).receive());
        let (one, other) = (Capture::of_nothing(1), Capture::of_nothing(2));
        assert_eq!(low.flights(Some(&one)).in_flight(), 0);
        (0..2).for_each(|_| send(low.flights(Some(&one))));
        assert_eq!(low.flights(Some(&one)).in_flight(), 2);
        assert_eq!(low.flights(Some(&other)).in_flight(), 0);
        assert_eq!((low.flights(None).in_flight(), low.next()), (1, 3));
        low.restart(&RankSet::new());
        assert_eq!(low.flights(None).in_flight(), 0);
    }
}
