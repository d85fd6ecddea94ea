//! The coordinator: posts to one queue to a rank of another node what this rank's roles hand over, where their lanes
//! share that queue ([`Queues`]).
//!
//! ```text
//! far sender, gatherer      --staged-->                ===> rows, tails
//!                           <--sent----   coordinator                     one queue to the rail peer
//! forwarder, far reducer    --owed---->                ===> credits
//! control                   --control->                ===> counts, done
//! ```
//!
//! A coordinator does of that what its queue carries, and there is one for each shared queue: with a queue for rows and
//! another for credit there are two to each peer. One role with two queues would hold credit back whenever it waits for
//! room in the queue of the rows, which is what the second queue is there to prevent.
//!
//! Hand-overs are counters, as everything else is: *mailboxes*, lanes of the rank to itself, each with one poster. A role
//! that fills a ring writes its rows into staging memory and says how many slots lie there (`Tail`); so the staging memory is
//! a ring in front of the ring, and what the coordinator has sent is its head (`Head` of the mailbox back). A role that empties
//! a ring says how much credit is due. The control role says that its counts lie ready (`Counts`). `Done` says that
//! nothing more will come in this operation.
//!
//! Nobody waits in a circle: a coordinator waits for hand-overs only when it has nothing to post and nothing to free,
//! and otherwise for its queue alone; which peer's credit a row needs is its sender's wait, before it is handed over.
//!
//! On a device the roles are warps, each coordinator is one warp more, and mailboxes are counters in shared memory:
//! stores with release order, loads with acquire, no atomics, as each has one writer.

use super::{Attended, Operation};
use crate::error::Fault;
use crate::layout::{Kind, OpHeader, Queues, Share};
use crate::machine::Machine;
use crate::plant::Plant;
use crate::port::{Cell, Counter, LaneId, LaneKind, Mail, Need, Offset, Port, Span, Ticket};
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

/// What a queue carries.
#[derive(Clone, Copy, Debug)]
struct Carried {
    rows: bool,
    credit: bool,
    control: bool,
}

/// A coordinator at work.
struct Coordinator<'a, 'o, M: Machine> {
    operation: &'a Operation<'o, M>,
    port: Attended<M::Port>,
    peer: Rank,
    carried: Carried,
    tracks: Vec<Track>,
    /// Whether the counts of this operation were sent.
    counted: bool,
    /// The last put, if sources have not been flushed up to it.
    unflushed: Option<(LaneId, Ticket)>,
    needs: Vec<Need>,
}

impl<M: Machine> Operation<'_, M> {
    /// Which lanes to ranks of other nodes share a queue.
    pub(crate) fn queues(&self) -> Queues {
        self.machine.capabilities().far_lanes
    }

    /// The number of the mailboxes by which what belongs to `lane` reaches a coordinator; none where roles post
    /// themselves.
    pub(crate) fn mailbox(&self, lane: LaneId) -> Option<u16> {
        self.queues().coordinator(self.layout, self.me, lane)?;
        let channel = match lane.kind {
            LaneKind::Data(track) | LaneKind::Credit(track) => u32::from(track - self.layout.far_track(0)),
            _ => 0,
        };
        Some(self.layout.mailbox(self.layout.topology().node_of(lane.peer), channel))
    }

    /// A mailbox as a lane, and one of its cells.
    pub(crate) const fn mail(&self, mail: Mail, mailbox: u16, counter: Counter) -> (LaneId, Cell) {
        let kind = LaneKind::Mailbox(mail, mailbox);
        (LaneId { peer: self.me, kind }, Cell::new(self.me, kind, counter))
    }
}

/// Posts to the shared queue `queue` to `peer` what is handed over for it, until all roles have said that nothing more
/// will come. `standings` are `[channels]`.
pub(crate) async fn coordinate<M: Machine>(
    operation: &Operation<'_, M>,
    port: Attended<M::Port>,
    (queue, peer): (u8, Rank),
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
    let needs = Vec::with_capacity(4 * tracks.len() + 2);
    let carries = |kind| operation.queues().carries(queue, kind);
    let carried = Carried {
        rows: carries(LaneKind::Data(layout.far_track(0))),
        credit: carries(LaneKind::Credit(layout.far_track(0))),
        control: carries(LaneKind::Control),
    };
    Coordinator { operation, port, peer, carried, tracks, counted: false, unflushed: None, needs }.run().await
}

impl<M: Machine> Coordinator<'_, '_, M> {
    async fn run(&mut self) -> Result<(), Fault> {
        loop {
            // Asked first: what was handed over before the end is seen below.
            let over = self.is_over();
            let mut moved = self.send_counts().await?;
            for at in 0..self.tracks.len() {
                moved |= self.return_credit(at).await?;
                moved |= self.send_chunk(at).await?;
            }
            if moved || self.free_staging().await? {
                continue;
            }
            if over {
                return self.tell_done().await;
            }
            self.await_mail().await?;
        }
    }

    fn cell(&self, mailbox: u16, mail: Mail, counter: Counter) -> Cell {
        self.operation.mail(mail, mailbox, counter).1
    }

    const fn lane(&self, kind: LaneKind) -> LaneId {
        LaneId { peer: self.peer, kind }
    }

    fn has_ended(&self, mailbox: u16, mail: Mail) -> bool {
        self.port.peek(self.cell(mailbox, mail, Counter::Done)) >= self.operation.op
    }

    /// The number of the mailboxes of the control lane.
    fn control_mailbox(&self) -> u16 {
        self.operation.layout.mailbox(self.operation.layout.topology().node_of(self.peer), 0)
    }

    /// Whether all roles have said that nothing more will come.
    fn is_over(&self) -> bool {
        let Carried { rows, credit, control } = self.carried;
        let ended = |track: &Track| {
            (!rows || self.has_ended(track.mailbox, Mail::Staged))
                && (!credit || self.has_ended(track.mailbox, Mail::Owed))
        };
        self.tracks.iter().all(ended) && (!control || self.has_ended(self.control_mailbox(), Mail::Control))
    }

    /// Sends the counts of this operation when they lie ready, once; whether it did. They lie at the same place
    /// everywhere.
    async fn send_counts(&mut self) -> Result<bool, Fault> {
        let Operation { layout, op, me, .. } = *self.operation;
        if !self.carried.control || self.counted || !self.has_counts() {
            return Ok(false);
        }
        self.counted = true;
        let (lane, counts) = (self.lane(LaneKind::Control), layout.counts(op, me));
        self.put(lane, counts, counts.offset).await?;
        self.port.publish(lane, Cell::new(me, lane.kind, Counter::Counts), op).await?;
        Ok(true)
    }

    fn has_counts(&self) -> bool {
        if self.operation.plants(Plant::CountsUnasked) {
            return true;
        }
        self.port.peek(self.cell(self.control_mailbox(), Mail::Control, Counter::Counts)) >= self.operation.op
    }

    /// Tells the peer that this rank is done, where it is the control role that said so: behind all else.
    async fn tell_done(&mut self) -> Result<(), Fault> {
        if !self.carried.control {
            return Ok(());
        }
        let lane = self.lane(LaneKind::Control);
        let cell = Cell::new(self.operation.me, lane.kind, Counter::Done);
        self.port.publish(lane, cell, self.operation.op).await
    }

    /// Returns the credit that a track's role owes; whether there was any.
    async fn return_credit(&mut self, at: usize) -> Result<bool, Fault> {
        if !self.carried.credit {
            return Ok(false);
        }
        let owed = self.port.peek(self.cell(self.tracks[at].mailbox, Mail::Owed, Counter::Head));
        let track = &mut self.tracks[at];
        if owed <= track.head {
            return Ok(false);
        }
        track.head = owed;
        let lane = LaneId { peer: self.peer, kind: LaneKind::Credit(track.track) };
        self.port.publish(lane, Cell::new(self.operation.me, lane.kind, Counter::Head), owed).await?;
        Ok(true)
    }

    /// Puts the rows that are staged on a track, a chunk at most so that the others get their turn, and publishes the tail;
    /// whether there were any.
    async fn send_chunk(&mut self, at: usize) -> Result<bool, Fault> {
        if !self.carried.rows {
            return Ok(false);
        }
        let Operation { layout, me, ref rings, .. } = *self.operation;
        let Track { track, mailbox, first, put, .. } = self.tracks[at];
        let staged = self.port.peek(self.cell(mailbox, Mail::Staged, Counter::Tail));
        let upto = staged.min(put + u64::from(rings.far.chunk));
        if put >= upto {
            return Ok(false);
        }
        let (opening, row) = slot_bytes(self.operation);
        let (lane, depth) = (self.lane(LaneKind::Data(track)), u64::from(layout.staging_slots(rings, track)));
        for slot in put..upto {
            let index = self.tracks[at].index;
            let place = |slots: u64| (index % slots) as u32;
            let from = layout.staging_slot(self.peer, rings, track, place(depth)).offset;
            let to = layout.ring_slot(me, rings, track, place(rings.far.slots.into())).offset;
            let len = if slot == first { opening } else { row };
            self.put(lane, from.span(len), to).await?;
            self.tracks[at].put += 1;
            self.tracks[at].index += 1;
        }
        self.port.publish(lane, Cell::new(me, lane.kind, Counter::Tail), upto).await?;
        Ok(true)
    }

    async fn put(&mut self, lane: LaneId, from: Span, to: Offset) -> Result<(), Fault> {
        self.unflushed = Some((lane, self.port.put(lane, from, to).await?));
        Ok(())
    }

    /// Gives staging memory back to the roles that fill it, once the queue does not read it any more; whether there was
    /// any.
    async fn free_staging(&mut self) -> Result<bool, Fault> {
        let Some((lane, upto)) = self.unflushed.take() else { return Ok(false) };
        self.flush(lane, upto).await?;
        for track in &mut self.tracks {
            if track.sent < track.put {
                track.sent = track.put;
                let (lane, cell) = self.operation.mail(Mail::Sent, track.mailbox, Counter::Head);
                self.port.publish(lane, cell, track.sent).await?;
            }
        }
        Ok(true)
    }

    async fn flush(&mut self, lane: LaneId, upto: Ticket) -> Result<(), Fault> {
        if self.operation.plants(Plant::StagingFreedEarly) {
            return Ok(());
        }
        self.port.flush(lane, upto).await
    }

    /// Waits until anything more is handed over.
    async fn await_mail(&mut self) -> Result<(), Fault> {
        let mut needs = std::mem::take(&mut self.needs);
        needs.clear();
        let Carried { rows, credit, control } = self.carried;
        let mut await_one = |mailbox, mail, counter, at_least| {
            if !self.has_ended(mailbox, mail) {
                needs.push(Need { cell: self.cell(mailbox, mail, counter), at_least });
                needs.push(Need { cell: self.cell(mailbox, mail, Counter::Done), at_least: self.operation.op });
            }
        };
        for &Track { mailbox, put, head, .. } in &self.tracks {
            if rows {
                await_one(mailbox, Mail::Staged, Counter::Tail, put + 1);
            }
            if credit {
                await_one(mailbox, Mail::Owed, Counter::Head, head + 1);
            }
        }
        if control {
            // Counts that were sent already are no news.
            let next = self.operation.op + u64::from(self.counted);
            await_one(self.control_mailbox(), Mail::Control, Counter::Counts, next);
        }
        self.needs = needs;
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
