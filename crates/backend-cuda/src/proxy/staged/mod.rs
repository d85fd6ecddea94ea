//! Rows staged through pinned memory of the host, for a network that does not reach memory of the device.
//!
//! ```text
//!   the window of A      its mirror             the mirror of B        the window of B
//!   rows        fetch--> rows       --put-->    rows        --store--> rows
//!                        records    --put-->    records                cells
//!                                   --raise-->  their count --raise------^
//! ```
//!
//! [`Staged`] is a [`Transport`] around any other. Beside each window lies a [`Mirror`]: pinned memory of the host with the same offsets, which is
//! all that the network knows. A put is fetched into the own mirror and posted from there to the same place in the peer's. A record of
//! 32 bytes says what was put, another one which cell is to have which value, in the lane's order. The peer's proxy reads records in their
//! order: it stores rows into its window, and then raises the cell.
//!
//! # What holds
//!
//! - Records are counted by one cell of the mirror for each lane, which the network raises behind them and behind the rows (F3). So whoever
//!   sees the count has all rows that the records name, and the window's cell is raised behind the copies of these.
//! - A record's place is used again when the network has read it and the peer has carried it out: 64 of a lane at the most. The peer counts
//!   those in a second cell.
//! - A put is settled when the network has read its mirror (F5): the next put may have the same source.
//! - A row's place in a mirror is written again when the window's was read: the protocol's own credit says so (F9), as the store ended before the
//!   cell was raised.
//! - Memory is bounded by the layout: a mirror is as long as a window and 4 KiB of records for each queue to each rank.
//! - A rank whose rows are staged and one whose rows are not do not meet: they refuse each other by name.

mod lane;
mod place;

use std::sync::Arc;

use ep_core::layout::Queues;
use ep_core::port::{LaneId, Offset, Scope, Span, Ticket};
use ep_core::transport::{DevicePlace, Lanes, Mirror, Place, Transport, WindowMemory};
use ep_core::{Error, Fault, LaneCause, Rank};

use self::lane::Lane;
use self::place::Mirrored;

/// What every offer begins with.
const MARK: &[u8] = b"staged 1";

/// A transport of hosts for windows in memory of devices that it cannot reach.
#[derive(Clone, Debug)]
pub(crate) struct Staged<T>(pub(crate) T);

impl<T: Transport> Transport for Staged<T> {
    type Lanes = StagedLanes<T::Lanes>;

    fn far_lanes(&self) -> Queues {
        self.0.far_lanes()
    }

    /// Memory of the host needs no staging.
    fn open(&self, place: Place<'_>) -> Result<Self::Lanes, Error> {
        Err(Error::unsupported(format_args!("staging on rank {}", place.me), "a window in memory of a device"))
    }

    fn open_for_device(&self, place: DevicePlace<'_>) -> Result<Self::Lanes, Error> {
        let DevicePlace { me, layout, window } = place;
        let WindowMemory::Device { copies: Some(copies), .. } = window else {
            return Err(Error::unsupported(format_args!("staging on rank {me}"), "a window that its backend copies"));
        };
        let mirrored = Mirrored::new(layout, &self.0);
        let mirror = copies.mirror(mirrored.layout.window_bytes())?;
        let inner = self.0.open(Place { me, layout: &mirrored.layout, window: mirror.file() })?;
        let lanes = mirrored.places(me).into_iter().map(|(id, place)| Lane::new(id, place)).collect();
        let cells = layout.regions().into_iter().filter(|region| region.name.ends_with("cells"));
        let (bytes, cells) = (layout.window_bytes(), cells.map(|region| region.span).collect());
        Ok(StagedLanes { inner, mirror, lanes, bytes, cells, fetching: false })
    }
}

/// The lanes of one rank, over those of a transport of hosts.
#[derive(Debug)]
pub(crate) struct StagedLanes<L> {
    // The network lets go of the mirror before it ends.
    inner: L,
    mirror: Arc<dyn Mirror>,
    lanes: Vec<Lane>,
    /// Of the window.
    bytes: u64,
    /// Where its cells lie: those of lanes, and those that announce rows of kernels.
    cells: Vec<Span>,
    /// Sources are on the way to the mirror.
    fetching: bool,
}

/// The lane for a verb, unless it is broken.
fn lane<'a>(lanes: &'a mut [Lane], verb: &'static str, id: LaneId) -> Result<&'a mut Lane, Fault> {
    let found = lanes.iter_mut().find(|lane| lane.id == id).ok_or(Fault::NotOffered { verb, lane: id })?;
    found.fault.map_or(Ok(found), Err)
}

impl<L: Lanes> StagedLanes<L> {
    /// Sources are in the mirror when this returns.
    fn fetched(&mut self) -> Result<(), Error> {
        if std::mem::take(&mut self.fetching) {
            #[cfg(test)]
            if self.lanes.iter().any(|lane| lane.plant == super::tests::Plant::PostedEarly) {
                return Ok(());
            }
            self.mirror.finish()?;
        }
        Ok(())
    }

    /// Breaks all lanes, as the device's memory is out of reach; what that means for one.
    fn fail(&mut self, id: LaneId, error: &Error) -> Fault {
        self.fail_all(error);
        Fault::LaneBroken { lane: id, cause: LaneCause::LocalAccess }
    }

    fn fail_all(&mut self, error: &Error) {
        tracing::error!(%error, "staged rows cannot be moved");
        for lane in self.lanes.iter_mut().filter(|lane| lane.fault.is_none()) {
            lane.fault = Some(lane.broken(LaneCause::LocalAccess));
        }
    }

    /// Posts what one lane was asked for.
    fn post(&mut self, id: LaneId) -> Result<(), Fault> {
        self.fetched().map_err(|error| self.fail(id, &error))?;
        let Self { inner, mirror, lanes, .. } = self;
        let lane = lane(lanes, "a verb", id)?;
        let posted = lane.post(inner, &**mirror);
        posted.inspect_err(|fault| lane.fault = Some(*fault))
    }

    /// Carries out what peers told, and tells them so.
    fn hear(&mut self) {
        let Self { inner, mirror, lanes, .. } = self;
        let mut moved = false;
        for lane in lanes.iter_mut().filter(|lane| lane.fault.is_none()) {
            match lane.hear(&**mirror) {
                Ok(heard) => moved |= heard,
                Err(fault) => lane.fault = Some(fault),
            }
        }
        if moved && let Err(error) = mirror.finish() {
            return self.fail_all(&error);
        }
        for lane in lanes.iter_mut().filter(|lane| lane.fault.is_none()) {
            lane.fault = lane.credit(inner).err();
        }
    }

    #[cfg(test)]
    pub(super) fn plant(&mut self, plant: super::tests::Plant) {
        self.lanes.iter_mut().for_each(|lane| lane.plant = plant);
    }
}

impl<L: Lanes> Lanes for StagedLanes<L> {
    fn offer(&mut self) -> Result<Vec<u8>, Error> {
        let offer = self.inner.offer()?;
        // Nothing arrives from here on; what had come is in the window, or is dropped.
        self.mirror.finish()?;
        self.fetching = false;
        self.lanes.iter_mut().try_for_each(|lane| lane.reset(&*self.mirror))?;
        Ok([MARK, &offer].concat())
    }

    fn connect(&mut self, offers: &[Option<Vec<u8>>]) -> Result<(), Error> {
        let strip = |(rank, offer): (Rank, &Option<Vec<u8>>)| {
            let Some(offer) = offer else { return Ok(None) };
            let inner = offer.strip_prefix(MARK).ok_or_else(|| {
                let what = format_args!(
                    "rank {rank}, whose rows are not staged through memory of the host as this rank's are,"
                );
                Error::unsupported(
                    what,
                    "the same on all ranks: ask all for staging, or give all GPUs a way to their adapter",
                )
            })?;
            Ok(Some(inner.to_vec()))
        };
        let inner = (0..).map(Rank).zip(offers).map(strip).collect::<Result<Vec<_>, Error>>()?;
        self.inner.connect(&inner)
    }

    fn put(&mut self, id: LaneId, from: Span, to: Offset) -> Result<Option<Ticket>, Fault> {
        if from.len == 0 {
            return lane(&mut self.lanes, "put", id).map(|lane| Some(Ticket(lane.issued())));
        }
        from.within(self.bytes)?;
        to.span(from.len).within(self.bytes)?;
        if !lane(&mut self.lanes, "put", id)?.has_room() {
            self.post(id)?;
        }
        let lane = lane(&mut self.lanes, "put", id)?;
        if !lane.has_room() {
            return Ok(None);
        }
        let fetched = self.mirror.fetch(from);
        fetched.map_err(|error| self.fail(id, &error))?;
        let lane = self::lane(&mut self.lanes, "put", id)?;
        self.fetching = true;
        Ok(Some(Ticket(lane.put(from, to))))
    }

    fn raise(&mut self, id: LaneId, at: Offset, bits: u64) -> Result<bool, Fault> {
        at.span(8).within(self.bytes)?;
        let is_cell = |cells: &Span| cells.offset.0 <= at.0 && at.0 + 8 <= cells.end();
        if !at.0.is_multiple_of(8) || !self.cells.iter().any(is_cell) {
            return Err(Fault::NotOffered { verb: "publish to no cell", lane: id });
        }
        if !lane(&mut self.lanes, "publish", id)?.has_room() {
            self.post(id)?;
        }
        let lane = lane(&mut self.lanes, "publish", id)?;
        let room = lane.has_room();
        if room {
            lane.raise(at, bits);
            self.post(id)?;
        }
        Ok(room)
    }

    fn flush(&mut self, id: LaneId, upto: Ticket) -> Result<bool, Fault> {
        self.post(id)?;
        let lane = lane(&mut self.lanes, "flush", id)?;
        let settled = lane.settle(&mut self.inner, upto.0);
        settled.inspect_err(|fault| lane.fault = Some(*fault))
    }

    fn progress(&mut self) {
        self.inner.progress();
        self.hear();
        if let Err(error) = self.fetched() {
            self.fail_all(&error);
        }
        let Self { inner, mirror, lanes, .. } = self;
        for lane in lanes.iter_mut().filter(|lane| lane.fault.is_none()) {
            lane.fault = lane.post(inner, &**mirror).err();
        }
    }

    fn probe(&mut self, peer: Rank) {
        self.inner.probe(peer);
    }

    fn broken(&self, peer: Rank) -> Option<Fault> {
        let own = self.lanes.iter().filter(|lane| lane.id.peer == peer).find_map(|lane| lane.fault);
        own.or_else(|| self.inner.broken(peer))
    }

    fn drain(&mut self, scope: Scope) -> bool {
        self.progress();
        // Of broken lanes nothing arrives any more.
        let Self { inner, mirror, lanes, .. } = self;
        let mut arrived = true;
        for lane in lanes.iter_mut().filter(|lane| scope.covers(lane.id) && lane.fault.is_none()) {
            lane.fault = lane.settle(inner, 0).err();
            arrived &= lane.fault.is_some() || inner.broken(lane.id.peer).is_some() || lane.is_idle(&**mirror);
        }
        inner.drain(scope) && arrived
    }

    fn cut(&mut self, scope: Scope) {
        self.inner.cut(scope);
        for lane in self.lanes.iter_mut().filter(|lane| scope.covers(lane.id) && lane.fault.is_none()) {
            if !lane.is_idle(&*self.mirror) {
                lane.fault = Some(lane.broken(LaneCause::Cut));
            }
        }
    }

    fn is_copied(&self) -> bool {
        true
    }

    fn is_staged(&self) -> bool {
        true
    }
}
