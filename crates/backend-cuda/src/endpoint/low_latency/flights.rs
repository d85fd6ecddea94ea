//! Operations that were sent and not received: of calls that ran, and of a capture, which counts for itself.

use std::sync::Arc;

use ep_core::engine::Mark;
use ep_core::layout::Arrival;
use ep_core::{Endpoint as _, Error, RankSet};

use super::super::CudaEndpoint;
use crate::driver::{Capture, Scratch};

/// Operations that may be sent and not received.
const BANKS: u64 = 2;

/// Low latency's part of an endpoint.
#[derive(Debug, Default)]
pub(in crate::endpoint) struct Low {
    /// Of calls in this generation.
    pub(super) called: Flights,
    /// Of the last capture, and its number.
    captured: (u64, Flights),
    /// The ranks that take no part, and those masked here.
    pub(super) mask: RankSet,
    /// What [`CudaEndpoint::low_latency_combine_buffer`] gives out.
    pub(super) buffer: Option<Arc<Scratch>>,
}

/// Operations so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Flights {
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl Flights {
    const fn in_flight(self) -> u32 {
        (self.sent - self.received) as u32
    }
}

impl Low {
    /// Begins a generation.
    pub(in crate::endpoint) fn restart(&mut self, mask: &RankSet) {
        (self.called, self.captured, self.mask) = (Flights::default(), Default::default(), mask.clone());
    }

    /// Those of calls that run, or that go to a capture.
    pub(super) fn flights(&mut self, capture: Option<&Capture>) -> &mut Flights {
        let Some(capture) = capture else { return &mut self.called };
        if self.captured.0 != capture.id {
            self.captured = (capture.id, Flights::default());
        }
        &mut self.captured.1
    }
}

/// An operation that was sent.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) mark: Mark,
    pub(super) op: u64,
    /// The capture that it was sent in.
    capture: Option<u64>,
}

impl CudaEndpoint {
    /// Refuses to send when that cannot be; the operation's number, and how many are in flight.
    pub(super) fn check_send(&mut self, capture: Option<&Capture>) -> Result<(u64, u32), Error> {
        self.layout().check_low_latency()?;
        let flights = *self.low.flights(capture);
        let op = flights.sent + 1;
        if op - flights.received > BANKS {
            return Err(Error::TooManyInFlight { op });
        }
        let last = Arrival::last_op(self.shape());
        if op > last {
            return Err(Error::invalid("low-latency operation", op, format_args!("at most {last}; rejoin to go on")));
        }
        Ok((op, flights.in_flight()))
    }

    /// Refuses to receive what is not the next in turn; how many are in flight.
    pub(super) fn check_receive(&mut self, sent: &Sent, capture: Option<&Capture>) -> Result<u32, Error> {
        sent.mark.check("low-latency operation", &self.mark())?;
        let here = capture.map(|capture| capture.id);
        if sent.capture != here {
            let name = |capture: Option<u64>| match capture {
                Some(_) => "sent in a capture",
                None => "sent by a call that ran",
            };
            let limit = if here.is_some() { "sent in this capture" } else { "sent by a call that ran" };
            return Err(Error::invalid("low-latency operation to receive", name(sent.capture), limit));
        }
        let flights = *self.low.flights(capture);
        let next = flights.received + 1;
        if sent.op != next {
            let limit = format_args!("{next}, the oldest that was not received");
            return Err(Error::invalid("low-latency operation to receive", sent.op, limit));
        }
        Ok(flights.in_flight())
    }

    /// What this endpoint sends now.
    pub(super) fn sent(&self, op: u64, capture: Option<&Capture>) -> Sent {
        Sent { mark: self.mark(), op, capture: capture.map(|capture| capture.id) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capture_counts_for_itself_from_nothing_in_flight() {
        let mut low = Low::default();
        low.flights(None).sent = 3;
        low.flights(None).received = 2;
        let (one, other) = (Capture::of_nothing(1), Capture::of_nothing(2));
        assert_eq!(low.flights(Some(&one)).in_flight(), 0);
        low.flights(Some(&one)).sent = 2;
        assert_eq!(low.flights(Some(&one)).in_flight(), 2);
        assert_eq!(low.flights(Some(&other)).in_flight(), 0);
        assert_eq!(low.flights(None).in_flight(), 1);
        low.restart(&RankSet::new());
        assert_eq!(low.flights(None).in_flight(), 0);
    }
}
