//! What partitions tell each other between two stretches of time.

use ep_core::machine::{Agreement, Proposal};
use ep_core::port::{Cell, LaneId, Offset};
use ep_core::{Error, Nanos, Rank};

use super::World;
use super::events::{Event, Notice};

/// One thing that happens in a partition and comes from another.
#[derive(Debug)]
enum Letter {
    /// The bytes of a put, which lie in the bag. They are there long before anybody may look.
    Bytes {
        to: Rank,
        at: Offset,
        len: usize,
    },
    /// A put has left: when its first byte comes, and how many count.
    Put {
        at: Nanos,
        from: Rank,
        lane: LaneId,
        bytes: u64,
    },
    Publish(Publish),
    Matter(Nanos, Box<Matter>),
}

/// A publish to a rank of another partition.
#[derive(Clone, Copy, Debug)]
pub(super) struct Publish {
    /// When it arrives.
    pub(super) at: Nanos,
    pub(super) from: Rank,
    pub(super) lane: LaneId,
    pub(super) cell: Cell,
    pub(super) generation: u16,
    /// How many puts of the lane come before, if it ever had any.
    pub(super) after: Option<u32>,
    pub(super) bits: u64,
}

/// What seldom happens.
#[derive(Debug)]
pub(super) enum Matter {
    /// A rank wants to know when so many of its puts and publishes have come.
    Inquiry { from: Rank, posted: u64 },
    /// They have.
    Landed { to: Rank },
    /// A rank comes to agree with the others.
    Come { rank: Rank, visit: u64, proposal: Proposal, deadline: Nanos },
    /// It waits no longer.
    Gone { rank: Rank },
    /// What it is told.
    Answer { rank: Rank, visit: u64, answer: Result<Agreement, Error> },
}

/// Letters to one partition, in the order in which they were written.
#[derive(Debug, Default)]
pub(crate) struct Bag {
    letters: Vec<Letter>,
    bytes: Vec<u8>,
}

impl World {
    /// The bag for the partition of a rank.
    fn bag(&mut self, to: Rank) -> &mut Bag {
        &mut self.bags[self.partitions.of(to)]
    }

    /// Writes what is put to a rank of another partition.
    pub(super) fn mail_bytes(&mut self, from: (Rank, Offset), to: (Rank, Offset), len: u64) {
        let bag = &mut self.bags[self.partitions.of(to.0)];
        let start = bag.bytes.len();
        bag.bytes.resize(start + len as usize, 0);
        self.windows[from.0].read(from.1.0, &mut bag.bytes[start..]);
        bag.letters.push(Letter::Bytes { to: to.0, at: to.1, len: len as usize });
    }

    pub(super) fn mail_publish(&mut self, publish: Publish) {
        self.bag(publish.lane.peer).letters.push(Letter::Publish(publish));
    }

    /// Tells the partition of `to` something that happens there at `at`.
    pub(super) fn mail(&mut self, to: Rank, at: Nanos, matter: Matter) {
        self.bag(to).letters.push(Letter::Matter(at, Box::new(matter)));
    }

    /// Mails the puts that have left before `end`, when the stretch ends.
    pub(super) fn mail_departed(&mut self, end: Nanos) {
        let Self { partitions, sides, bags, .. } = self;
        let reached = partitions.end_of_stretch(end);
        for (place, sides) in sides.as_mut_slice().iter_mut().enumerate() {
            let from = Rank(partitions.ranks(self.partition).start + place as u32);
            let abroad = sides.abroad();
            while let Some((at, departure)) = abroad.pop_front_if(|(at, _)| *at < reached) {
                let bag = &mut bags[partitions.of(departure.lane.peer)];
                bag.letters.push(Letter::Put { at, from, lane: departure.lane, bytes: departure.bytes });
            }
        }
    }

    /// When the next put departs that was not mailed yet.
    pub(super) fn next_departure(&mut self) -> Option<Nanos> {
        let delay = self.partitions.delay();
        let fronts = self.sides.as_mut_slice().iter_mut().filter_map(|sides| sides.abroad().front());
        fronts.map(|&(at, _)| at - delay).min()
    }

    /// Takes the letters out of a bag from another partition.
    pub(super) fn receive(&mut self, bag: &mut Bag) {
        let Bag { letters, bytes } = bag;
        let mut rest = bytes.as_slice();
        for letter in letters.drain(..) {
            match letter {
                Letter::Bytes { to, at, len } => {
                    let (piece, later) = rest.split_at(len);
                    self.windows[to].write(at.0, piece);
                    rest = later;
                }
                Letter::Put { at, from, lane, bytes } => {
                    let number = self.lanes.reached_number(&self.layout, from, lane);
                    self.agenda.enter(at, Event::Enter { from, to: lane.peer, lane: number, bytes });
                }
                Letter::Publish(Publish { at, from, lane, cell, generation, after, bits }) => {
                    let cell = self.cells.number(&self.layout, lane.peer, cell, generation);
                    let number = match after {
                        Some(_) => self.lanes.reached_number(&self.layout, from, lane),
                        None => Notice::NO_LANE,
                    };
                    let notice = Notice { from, lane: number, cell, after: after.unwrap_or(0), bits };
                    self.agenda.enter(at, Event::Arrive(notice));
                }
                Letter::Matter(at, matter) => self.expect(at, *matter),
            }
        }
        bytes.clear();
    }

    /// Something seldom is to happen here.
    pub(super) fn expect(&mut self, at: Nanos, matter: Matter) {
        let number = self.last_matter.wrapping_add(1);
        self.last_matter = number;
        self.matters.insert(number, matter);
        self.agenda.enter(at, Event::Matter(number));
    }

    /// Something seldom happens.
    pub(super) fn happens(&mut self, number: u32) {
        match self.matters.remove(&number) {
            Some(Matter::Inquiry { from, posted }) => self.inquired(from, posted),
            Some(Matter::Landed { to }) => self.told_landed(to),
            Some(Matter::Come { rank, visit, proposal, deadline }) => {
                self.meet((rank, visit), proposal, deadline);
            }
            Some(Matter::Gone { rank }) => self.leaves(rank),
            Some(Matter::Answer { rank, visit, answer }) => self.answered((rank, visit), answer),
            None => {}
        }
    }
}
