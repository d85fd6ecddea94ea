//! RoCE of which one rank tells the others a wrong key for its window when they meet for the first time.

use ep_core::layout::Queues;
use ep_core::port::{LaneId, Offset, Scope, Span, Ticket};
use ep_core::transport::{Lanes, Place, Transport};
use ep_core::{Error, Fault, Rank};
use ep_roce::{Offer, Roce, RoceLanes};

/// The transport.
#[derive(Clone, Debug)]
pub(crate) struct Wrong {
    pub(crate) roce: Roce,
    /// Who tells a wrong key.
    pub(crate) liar: Rank,
}

/// Lanes of a rank.
#[derive(Debug)]
pub(crate) struct WrongLanes {
    inner: RoceLanes,
    me: Rank,
    lies: bool,
}

impl Transport for Wrong {
    type Lanes = WrongLanes;

    fn far_lanes(&self) -> Queues {
        self.roce.far_lanes()
    }

    fn open(&self, place: Place<'_>) -> Result<WrongLanes, Error> {
        Ok(WrongLanes { inner: self.roce.open(place)?, me: place.me, lies: place.me == self.liar })
    }
}

impl Lanes for WrongLanes {
    fn offer(&mut self) -> Result<Vec<u8>, Error> {
        let right = self.inner.offer()?;
        if !std::mem::take(&mut self.lies) {
            return Ok(right);
        }
        let mut offer = Offer::from_bytes(self.me, &right).expect("the own offer");
        offer.header.rows_key = (offer.header.rows_key.get() ^ 0x5a5a).into();
        Ok(offer.to_bytes())
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        self.inner.connect(offers)
    }

    fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<Option<Ticket>, Fault> {
        self.inner.put(lane, from, to)
    }

    fn raise(&mut self, lane: LaneId, at: Offset, bits: u64) -> Result<bool, Fault> {
        self.inner.raise(lane, at, bits)
    }

    fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<bool, Fault> {
        self.inner.flush(lane, upto)
    }

    fn progress(&mut self) {
        self.inner.progress();
    }

    fn probe(&mut self, peer: Rank) {
        self.inner.probe(peer);
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        self.inner.broken(peer)
    }

    fn drain(&mut self, scope: Scope) -> bool {
        self.inner.drain(scope)
    }

    fn cut(&mut self, scope: Scope) {
        self.inner.cut(scope);
    }
}
