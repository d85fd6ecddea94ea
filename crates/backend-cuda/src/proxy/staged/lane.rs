//! One lane: what it sends by way of the mirror, and what it takes out of it.

use std::collections::VecDeque;

use ep_core::port::{LaneId, Offset, Span, Ticket};
use ep_core::transport::{Lanes, Mirror};
use ep_core::{Error, Fault, LaneCause};

use super::place::{Place, RECORD, RECORDS};

/// What a lane was asked for.
#[derive(Clone, Copy, Debug)]
enum Step {
    Put { from: Span, to: Offset, ticket: u64 },
    Raise { at: Offset, bits: u64 },
}

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) id: LaneId,
    place: Place,
    /// Asked for, and not posted yet.
    gathered: VecDeque<Step>,
    /// Records to the peer, ever: written, posted, counted at the peer, and those whose source may be written again.
    written: u64,
    posted: u64,
    told: u64,
    free: u64,
    /// Puts of records under way, each with how many records there are up to it.
    under_way: VecDeque<(u64, Ticket)>,
    /// Puts under way.
    unsettled: VecDeque<(u64, Ticket)>,
    issued: u64,
    settled: u64,
    /// Records of the peer, ever: carried out, and those that the peer was told of.
    taken: u64,
    credited: u64,
    pub(super) fault: Option<Fault>,
    #[cfg(test)]
    pub(super) plant: super::super::tests::Plant,
}

impl Lane {
    pub(super) const fn new(id: LaneId, place: Place) -> Self {
        Self {
            id,
            place,
            gathered: VecDeque::new(),
            written: 0,
            posted: 0,
            told: 0,
            free: 0,
            under_way: VecDeque::new(),
            unsettled: VecDeque::new(),
            issued: 0,
            settled: 0,
            taken: 0,
            credited: 0,
            fault: None,
            #[cfg(test)]
            plant: super::super::tests::Plant::Nothing,
        }
    }

    /// Begins anew. Nothing arrives now.
    ///
    /// # Errors
    /// As [`Mirror::set_word`].
    pub(super) fn reset(&mut self, mirror: &dyn Mirror) -> Result<(), Error> {
        #[cfg(test)]
        let plant = self.plant;
        *self = Self::new(self.id, self.place);
        #[cfg(test)]
        {
            self.plant = plant;
        }
        [self.place.heard, self.place.credited].into_iter().try_for_each(|at| mirror.set_word(at, 0))
    }

    /// Why it is broken, because the device's memory cannot be reached or the peer told what cannot be.
    pub(super) fn broken(&self, cause: LaneCause) -> Fault {
        Fault::LaneBroken { lane: self.id, cause }
    }

    fn unreachable(&self, error: &Error) -> Fault {
        tracing::error!(lane = %self.id, %error, "staged rows cannot be moved");
        self.broken(LaneCause::LocalAccess)
    }

    /// Whether one more may be asked for.
    pub(super) fn has_room(&self) -> bool {
        self.gathered.len() < RECORDS as usize
    }

    /// The ticket of the last put.
    pub(super) const fn issued(&self) -> u64 {
        self.issued
    }

    /// Takes a put; its source is on the way to the mirror.
    pub(super) fn put(&mut self, from: Span, to: Offset) -> u64 {
        self.issued += 1;
        self.gathered.push_back(Step::Put { from, to, ticket: self.issued });
        self.issued
    }

    /// Takes a raise.
    pub(super) fn raise(&mut self, at: Offset, bits: u64) {
        self.gathered.push_back(Step::Raise { at, bits });
    }

    /// Posts what was asked for, as far as the network and the peer have room. All sources are in the mirror.
    pub(super) fn post<L: Lanes>(&mut self, lanes: &mut L, mirror: &dyn Mirror) -> Result<(), Fault> {
        if self.gathered.is_empty() && self.told == self.written {
            return Ok(());
        }
        self.write(lanes, mirror)?;
        while self.posted < self.written {
            let at = self.posted % RECORDS;
            let count = (self.written - self.posted).min(RECORDS - at);
            let from = self.place.outbox.plus(at * RECORD).span(count * RECORD);
            let Some(ticket) = lanes.put(self.id, from, self.place.arrive.plus(at * RECORD))? else { return Ok(()) };
            self.posted += count;
            self.under_way.push_back((self.posted, ticket));
        }
        if self.told < self.posted && lanes.raise(self.id, self.place.told, self.posted)? {
            self.told = self.posted;
        }
        Ok(())
    }

    /// Posts rows, and writes a record of each put and raise.
    fn write<L: Lanes>(&mut self, lanes: &mut L, mirror: &dyn Mirror) -> Result<(), Fault> {
        while let Some(&(upto, ticket)) = self.under_way.front()
            && lanes.flush(self.id, ticket)?
        {
            self.free = upto;
            self.under_way.pop_front();
        }
        let read = mirror.word(self.place.credited).map_err(|error| self.unreachable(&error))?;
        while let Some(&step) = self.gathered.front()
            && self.written < read.min(self.free).saturating_add(RECORDS)
        {
            let number = self.written + 1;
            let words = match step {
                Step::Put { from, to, ticket } => {
                    let Some(posted) = lanes.put(self.id, from, to)? else { break };
                    self.unsettled.push_back((ticket, posted));
                    [number, to.0, from.len, 0]
                }
                Step::Raise { at, bits } => [number, at.0, 0, bits],
            };
            let at = self.place.outbox.plus(self.written % RECORDS * RECORD);
            for (word, bits) in (0..).zip(words) {
                mirror.set_word(at.plus(8 * word), bits).map_err(|error| self.unreachable(&error))?;
            }
            self.written = number;
            self.gathered.pop_front();
        }
        Ok(())
    }

    /// Whether the sources of all puts up to `upto` may be overwritten: they have left the mirror, too.
    pub(super) fn settle<L: Lanes>(&mut self, lanes: &mut L, upto: u64) -> Result<bool, Fault> {
        while let Some(&(ticket, posted)) = self.unsettled.front()
            && lanes.flush(self.id, posted)?
        {
            self.settled = ticket;
            self.unsettled.pop_front();
        }
        Ok(self.settled >= upto)
    }

    /// Asks for what the peer's records say: rows into the window, then cells. Whether there was anything.
    pub(super) fn hear(&mut self, mirror: &dyn Mirror) -> Result<bool, Fault> {
        let heard = mirror.word(self.place.heard).map_err(|error| self.unreachable(&error))?;
        if heard == self.taken {
            return Ok(false);
        }
        if heard < self.taken || heard - self.taken > RECORDS {
            return Err(self.broken(LaneCause::RemoteRequest));
        }
        #[cfg(test)]
        self.raise_early(mirror, heard);
        while self.taken < heard {
            let [number, at, len, bits] = self.record(mirror, self.taken)?;
            if number != self.taken + 1 {
                return Err(self.broken(LaneCause::RemoteRequest));
            }
            let done = if len > 0 { mirror.store(Offset(at).span(len)) } else { mirror.raise(Offset(at), bits) };
            done.map_err(|error| self.unreachable(&error))?;
            self.taken = number;
        }
        Ok(true)
    }

    fn record(&self, mirror: &dyn Mirror, number: u64) -> Result<[u64; 4], Fault> {
        let at = self.place.inbox.plus(number % RECORDS * RECORD);
        let mut words = [0; 4];
        for (word, bits) in (0..).zip(&mut words) {
            *bits = mirror.word(at.plus(8 * word)).map_err(|error| self.unreachable(&error))?;
        }
        Ok(words)
    }

    /// Tells the peer how many of its records were carried out.
    pub(super) fn credit<L: Lanes>(&mut self, lanes: &mut L) -> Result<(), Fault> {
        #[cfg(test)]
        if self.plant == super::super::tests::Plant::ReadEarly && self.credited == 0 {
            self.credited = u64::MAX >> 1;
            return lanes.raise(self.id, self.place.credit, self.credited).map(drop);
        }
        if self.credited < self.taken && lanes.raise(self.id, self.place.credit, self.taken)? {
            self.credited = self.taken;
        }
        Ok(())
    }

    /// Whether all that was asked for has arrived in the peer's window, and nothing of the peer's waits here.
    pub(super) fn is_idle(&self, mirror: &dyn Mirror) -> bool {
        let read = mirror.word(self.place.credited).unwrap_or(0);
        self.gathered.is_empty() && self.unsettled.is_empty() && self.credited >= self.taken && read >= self.written
    }

    /// A planted fault: cells are raised before the rows before them are there.
    #[cfg(test)]
    fn raise_early(&self, mirror: &dyn Mirror, heard: u64) {
        if self.plant != super::super::tests::Plant::RaisedEarly {
            return;
        }
        for number in self.taken..heard {
            if let Ok([_, at, 0, bits]) = self.record(mirror, number) {
                mirror.raise(Offset(at), bits).and_then(|()| mirror.finish()).expect("the test's window");
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
        }
    }
}
