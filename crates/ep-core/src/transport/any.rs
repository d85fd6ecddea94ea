//! A transport that is chosen at run time: whoever takes it is compiled once for all networks. A verb costs a call through a table more.

use std::fmt;

use super::{DevicePlace, Lanes, Place, Transport};
use crate::error::{Error, Fault};
use crate::layout::Queues;
use crate::port::{LaneId, Offset, Scope, Span, Ticket};
use crate::topology::Rank;

/// Any [`Transport`].
///
/// ```
/// use ep_core::layout::Queues;
/// use ep_core::transport::{AnyTransport, NoTransport, Transport};
///
/// let networks = [AnyTransport::new(NoTransport)];
/// assert_eq!(networks[0].far_lanes(), Queues::PER_ROLE);
/// ```
pub struct AnyTransport(Box<dyn Opens>);

/// The lanes of any transport.
pub type AnyLanes = Box<dyn Lanes>;

/// A transport without the type of its lanes.
trait Opens {
    fn far_lanes(&self) -> Queues;
    fn open(&self, place: Place<'_>) -> Result<AnyLanes, Error>;
    fn open_for_device(&self, place: DevicePlace<'_>) -> Result<AnyLanes, Error>;
}

impl<T: Transport<Lanes: 'static>> Opens for T {
    fn far_lanes(&self) -> Queues {
        Transport::far_lanes(self)
    }

    fn open(&self, place: Place<'_>) -> Result<AnyLanes, Error> {
        Ok(Box::new(Transport::open(self, place)?))
    }

    fn open_for_device(&self, place: DevicePlace<'_>) -> Result<AnyLanes, Error> {
        Ok(Box::new(Transport::open_for_device(self, place)?))
    }
}

impl AnyTransport {
    /// This one.
    pub fn new(transport: impl Transport<Lanes: 'static> + 'static) -> Self {
        Self(Box::new(transport))
    }
}

impl fmt::Debug for AnyTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyTransport").field("far_lanes", &self.0.far_lanes()).finish_non_exhaustive()
    }
}

impl Transport for AnyTransport {
    type Lanes = AnyLanes;

    fn far_lanes(&self) -> Queues {
        self.0.far_lanes()
    }

    fn open(&self, place: Place<'_>) -> Result<AnyLanes, Error> {
        self.0.open(place)
    }

    fn open_for_device(&self, place: DevicePlace<'_>) -> Result<AnyLanes, Error> {
        self.0.open_for_device(place)
    }
}

impl Lanes for AnyLanes {
    fn offer(&mut self) -> Result<Vec<u8>, Error> {
        (**self).offer()
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        (**self).connect(offers)
    }

    fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Option<Ticket>, Fault> {
        (**self).put(lane, from, to)
    }

    fn raise(&mut self, lane: LaneId, at: Offset, bits: u64) -> Result<bool, Fault> {
        (**self).raise(lane, at, bits)
    }

    fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<bool, Fault> {
        (**self).flush(lane, upto)
    }

    fn landed(&self, peer: Rank) -> Option<u64> {
        (**self).landed(peer)
    }

    fn progress(&mut self) {
        (**self).progress();
    }

    fn probe(&mut self, peer: Rank) {
        (**self).probe(peer);
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        (**self).broken(peer)
    }

    fn drain(&mut self, scope: Scope) -> bool {
        (**self).drain(scope)
    }

    fn cut(&mut self, scope: Scope) {
        (**self).cut(scope);
    }

    fn is_copied(&self) -> bool {
        (**self).is_copied()
    }

    fn is_staged(&self) -> bool {
        (**self).is_staged()
    }
}
