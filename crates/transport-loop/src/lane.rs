//! One lane: what it has accepted and not carried out yet, in order.

use std::collections::VecDeque;

use ep_core::port::{LaneId, Offset, Span};
use ep_core::{Fault, LaneCause};

use crate::gate::Pass;
use crate::window::Window;

/// A verb under way, and when it arrives.
#[derive(Clone, Copy, Debug)]
struct Held {
    due: u64,
    verb: Verb,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Verb {
    Put {
        from: Span,
        to: Offset,
    },
    Raise {
        at: Offset,
        bits: u64,
    },
    /// Changes nothing there: what becomes of it tells whether the peer is in reach.
    Probe,
}

impl Verb {
    /// Bytes that travel.
    pub(crate) const fn bytes(self) -> u64 {
        match self {
            Self::Put { from, .. } => from.len,
            Self::Raise { .. } => 8,
            Self::Probe => 0,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) id: LaneId,
    held: VecDeque<Held>,
    depth: usize,
    /// Puts accepted, ever.
    issued: u64,
    /// Those that were handed to whoever moves bytes.
    delivered: u64,
    /// What is in the air: marks of the peer's window, each with the puts that have been carried out when it is reached.
    flights: VecDeque<(u64, u64)>,
    /// Puts that have been carried out.
    settled: u64,
    pub(crate) broken: Option<LaneCause>,
}

impl Lane {
    /// One that holds at most `depth` verbs. It leads nowhere yet.
    pub(crate) fn new(id: LaneId, depth: usize) -> Self {
        let (held, flights, broken) = (VecDeque::new(), VecDeque::new(), Some(LaneCause::Flushed));
        Self { id, held, depth, issued: 0, delivered: 0, flights, settled: 0, broken }
    }

    /// Begins anew, without what was under way; broken where there is a cause. Nothing is in the air.
    pub(crate) fn renew(&mut self, broken: Option<LaneCause>) {
        self.held.clear();
        self.flights.clear();
        (self.delivered, self.settled) = (self.issued, self.issued);
        self.broken = broken;
    }

    pub(crate) fn fault(&self) -> Option<Fault> {
        self.broken.map(|cause| Fault::LaneBroken { lane: self.id, cause })
    }

    /// What it holds never arrives.
    pub(crate) fn fail(&mut self, cause: LaneCause) {
        self.broken.get_or_insert(cause);
        self.held.clear();
    }

    pub(crate) fn has_room(&self) -> bool {
        self.held.len() < self.depth
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.held.is_empty() && self.flights.is_empty()
    }

    /// Whether something was handed on that may not be there yet.
    pub(crate) fn is_in_the_air(&self) -> bool {
        !self.flights.is_empty()
    }

    pub(crate) const fn issued(&self) -> u64 {
        self.issued
    }

    pub(crate) const fn is_settled(&self, ticket: u64) -> bool {
        self.settled >= ticket
    }

    /// Accepts a verb that arrives at `due`, or behind the verb ahead of it: on a lane nothing overtakes (F3).
    pub(crate) fn accept(&mut self, verb: Verb, due: u64) {
        self.issued += u64::from(matches!(verb, Verb::Put { .. }));
        self.held.push_back(Held { due, verb });
    }

    /// Whether something is to be carried out by now.
    pub(crate) fn is_due(&self, now: u64) -> bool {
        self.held.front().is_some_and(|held| held.due <= now)
    }

    /// Breaks when its oldest verb has had no answer since `before`.
    pub(crate) fn give_up(&mut self, before: u64) {
        if self.is_due(before) {
            self.fail(LaneCause::NoAnswer);
        }
    }

    /// Hands on what is due, at most `room` verbs, as long as `pass` is valid: from the window of the rank that posted it to that of the
    /// peer, by its way. How many it were.
    pub(crate) fn deliver(
        &mut self,
        (way, room): (usize, usize),
        source: &Window,
        sink: &Window,
        now: u64,
        pass: &Pass<'_>,
    ) -> usize {
        let mut verbs = 0;
        while verbs < room
            && pass.is_valid()
            && let Some(Held { verb, .. }) = self.held.pop_front_if(|held| held.due <= now)
        {
            let well = match verb {
                Verb::Put { from, to } => sink.pull(way, source, from, to),
                Verb::Raise { at, bits } => sink.raise(way, at, bits),
                Verb::Probe => true,
            };
            if !well {
                // The peer's window is as large as the own one, against which it was checked.
                self.fail(LaneCause::RemoteAccess);
                break;
            }
            self.delivered += u64::from(matches!(verb, Verb::Put { .. }));
            verbs += 1;
        }
        verbs
    }

    /// All that was delivered is there when the peer's window has reached `mark`; none: something went wrong.
    pub(crate) fn depart(&mut self, mark: Option<u64>) {
        match mark {
            Some(mark) => self.flights.push_back((mark, self.delivered)),
            None => self.fail(LaneCause::RemoteAccess),
        }
    }

    /// The peer's window is so far. Whether something has come down.
    pub(crate) fn land(&mut self, reached: u64) -> bool {
        let before = self.flights.len();
        while let Some((_, puts)) = self.flights.pop_front_if(|(mark, _)| *mark <= reached) {
            self.settled = puts;
        }
        self.flights.len() != before
    }
}
