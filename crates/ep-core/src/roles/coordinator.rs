//! The coordinator: posts to one rank of another node what this rank's roles hand over, where the lane to it admits one
//! poster ([`FarLanes::One`]: a queue pair).
//!
//! ```text
//! far sender, gatherer      --staged-->                ===> rows, tails
//!                           <--sent----   coordinator                     one lane to the rail peer
//! forwarder, far reducer    --owed---->                ===> credits
//! ```
//!
//! Hand-overs are counters, as everything else is: *mailboxes*, lanes of the rank to itself, each with one poster. A role
//! that fills a ring writes its rows into staging memory and says how many slots lie there (`Tail`); so the staging memory is
//! a ring in front of the ring, and what the coordinator has sent is its head (`Head` of the mailbox back). A role that empties
//! a ring says how much credit is due. `Done` says that nothing more will come in this operation.
//!
//! Nobody waits in a circle: the coordinator waits for hand-overs only when it has nothing to post and nothing to free, and
//! otherwise for its lane alone; which peer's credit a row needs is its sender's wait, before it is handed over.
//!
//! On a device the roles are warps, the coordinator is one warp more, and mailboxes are counters in shared memory: stores
//! with release order, loads with acquire, no atomics, as each has one writer.

use super::{Attended, Operation};
use crate::error::Fault;
use crate::layout::{Kind, OpHeader, Share};
use crate::machine::{FarLanes, Machine};
use crate::port::{Cell, Counter, LaneId, LaneKind, Mail, Need, Port, Ticket};
use crate::topology::Rank;

/// Where the two rings with a rail peer on one channel stand when an operation begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    /// Slots filled so far, ever, of the ring to the peer; and since its geometry changed.
    pub(crate) tail: u64,
    pub(crate) index: u64,
    /// Slots consumed so far, ever, of the ring from the peer.
    pub(crate) head: u64,
}

/// One channel of a coordinator.
#[derive(Debug)]
struct Track {
    track: u16,
    /// The number of its mailboxes.
    mailbox: u16,
    first: u64,
    /// Slots put so far, ever, and since the geometry changed.
    put: u64,
    index: u64,
    /// Slots that its sender knows to have left.
    sent: u64,
    /// Credit returned.
    head: u64,
}

/// A coordinator at work.
struct Coordinator<'a, 'o, M: Machine> {
    operation: &'a Operation<'o, M>,
    port: Attended<M::Port>,
    /// The one lane.
    lane: LaneId,
    tracks: Vec<Track>,
    /// The last put.
    last: Ticket,
    needs: Vec<Need>,
}

impl<M: Machine> Operation<'_, M> {
    /// Whether the lane to a rank of another node admits one poster, a coordinator.
    pub(crate) fn is_coordinated(&self) -> bool {
        self.machine.capabilities().far_lanes == FarLanes::One
    }

    /// The number of the mailboxes by which the rings with `peer` on `track` reach its coordinator; none where roles post
    /// themselves.
    pub(crate) fn mailbox(&self, peer: Rank, track: u16) -> Option<u16> {
        let far = self.layout.is_far(track) && self.is_coordinated();
        let channel = || u32::from(track - self.layout.far_track(0));
        far.then(|| self.layout.mailbox(self.layout.topology().node_of(peer), channel()))
    }

    /// A mailbox as a lane, and one of its cells.
    pub(crate) const fn mail(&self, mail: Mail, mailbox: u16, counter: Counter) -> (LaneId, Cell) {
        let kind = LaneKind::Mailbox(mail, mailbox);
        (LaneId { peer: self.me, kind }, Cell::new(self.me, kind, counter))
    }
}

/// Posts to `peer` what is handed over on any channel, until all roles have said that nothing more will come.
/// `standings` are `[channels]`.
pub(crate) async fn coordinate<M: Machine>(
    operation: &Operation<'_, M>,
    port: Attended<M::Port>,
    peer: Rank,
    standings: &[Standing],
) -> Result<(), Fault> {
    let layout = operation.layout;
    let node = layout.topology().node_of(peer);
    let track = |(channel, standing): (u32, &Standing)| Track {
        track: layout.far_track(channel),
        mailbox: layout.mailbox(node, channel),
        first: standing.tail,
        put: standing.tail,
        index: standing.index,
        sent: standing.tail,
        head: standing.head,
    };
    let tracks: Vec<Track> = (0..).zip(standings).map(track).collect();
    let needs = Vec::with_capacity(4 * tracks.len());
    let lane = LaneId { peer, kind: layout.rail_lane() };
    Coordinator { operation, port, lane, tracks, last: Ticket(0), needs }.run().await
}

impl<M: Machine> Coordinator<'_, '_, M> {
    async fn run(&mut self) -> Result<(), Fault> {
        loop {
            let (mut moved, mut open) = (false, false);
            for at in 0..self.tracks.len() {
                // Asked first: what was handed over before the end is seen below.
                open |= !(self.has_ended(at, Mail::Staged) && self.has_ended(at, Mail::Owed));
                moved |= self.return_credit(at).await?;
                moved |= self.send_chunk(at).await?;
            }
            if moved || self.free_staging().await? {
                continue;
            }
            if !open {
                return Ok(());
            }
            self.await_mail().await?;
        }
    }

    fn cell(&self, at: usize, mail: Mail, counter: Counter) -> Cell {
        self.operation.mail(mail, self.tracks[at].mailbox, counter).1
    }

    fn has_ended(&self, at: usize, mail: Mail) -> bool {
        self.port.peek(self.cell(at, mail, Counter::Done)) >= self.operation.op
    }

    /// Returns the credit that a track's role owes; whether there was any.
    async fn return_credit(&mut self, at: usize) -> Result<bool, Fault> {
        let owed = self.port.peek(self.cell(at, Mail::Owed, Counter::Head));
        let track = &mut self.tracks[at];
        if owed <= track.head {
            return Ok(false);
        }
        track.head = owed;
        let cell = Cell::new(self.operation.me, LaneKind::Credit(track.track), Counter::Head);
        self.port.publish(self.lane, cell, owed).await?;
        Ok(true)
    }

    /// Puts the rows that are staged on a track, a chunk at most so that the others get their turn, and publishes the tail;
    /// whether there were any.
    async fn send_chunk(&mut self, at: usize) -> Result<bool, Fault> {
        let Operation { layout, me, ref rings, .. } = *self.operation;
        let staged = self.port.peek(self.cell(at, Mail::Staged, Counter::Tail));
        let (opening, row) = slot_bytes(self.operation);
        let track = &mut self.tracks[at];
        let upto = staged.min(track.put + u64::from(rings.far.chunk));
        if track.put >= upto {
            return Ok(false);
        }
        let depth = u64::from(layout.staging_slots(rings, track.track));
        while track.put < upto {
            let place = |slots: u64| (track.index % slots) as u32;
            let from = layout.staging_slot(self.lane.peer, rings, track.track, place(depth)).offset;
            let to = layout.ring_slot(me, rings, track.track, place(rings.far.slots.into())).offset;
            let len = if track.put == track.first { opening } else { row };
            self.last = self.port.put(self.lane, from.span(len), to).await?;
            track.put += 1;
            track.index += 1;
        }
        let cell = Cell::new(me, LaneKind::Data(track.track), Counter::Tail);
        self.port.publish(self.lane, cell, upto).await?;
        Ok(true)
    }

    /// Gives staging memory back to the roles that fill it, once the lane does not read it any more; whether there was any.
    async fn free_staging(&mut self) -> Result<bool, Fault> {
        if self.tracks.iter().all(|track| track.sent == track.put) {
            return Ok(false);
        }
        self.flush().await?;
        for track in &mut self.tracks {
            if track.sent < track.put {
                track.sent = track.put;
                let (lane, cell) = self.operation.mail(Mail::Sent, track.mailbox, Counter::Head);
                self.port.publish(lane, cell, track.sent).await?;
            }
        }
        Ok(true)
    }

    async fn flush(&mut self) -> Result<(), Fault> {
        #[cfg(feature = "plant")]
        if self.operation.plants(crate::plant::Plant::StagingFreedEarly) {
            return Ok(());
        }
        self.port.flush(self.lane, self.last).await
    }

    /// Waits until anything more is handed over.
    async fn await_mail(&mut self) -> Result<(), Fault> {
        self.needs.clear();
        for at in 0..self.tracks.len() {
            let Track { put, head, .. } = self.tracks[at];
            for (mail, counter, seen) in [(Mail::Staged, Counter::Tail, put), (Mail::Owed, Counter::Head, head)] {
                if !self.has_ended(at, mail) {
                    self.needs.push(Need { cell: self.cell(at, mail, counter), at_least: seen + 1 });
                    self.needs.push(Need { cell: self.cell(at, mail, Counter::Done), at_least: self.operation.op });
                }
            }
        }
        // An end that came just now is news as well.
        if self.needs.is_empty() {
            return Ok(());
        }
        self.port.wait_any(&self.needs).await.map(drop)
    }
}

/// Bytes of the header slot and of a row between nodes in this operation, as their roles write them.
fn slot_bytes<M: Machine>(operation: &Operation<'_, M>) -> (u64, u64) {
    let (layout, row) = (operation.layout, operation.row());
    let opening = size_of::<OpHeader>() as u64;
    match operation.kind {
        Kind::Combine => (opening, row.header_bytes() + row.payload_bytes()),
        _ => {
            let shares = size_of::<Share>() as u64 * u64::from(layout.topology().ranks_per_node());
            (opening + shares, row.wire_bytes() + layout.mask_bytes())
        }
    }
}
