//! Agreements: all ranks meet in the first partition; those of others write there and are written to.

use std::task::{Context, Poll, Waker};

use ep_core::machine::{Agreement, Proposal};
use ep_core::{Error, Nanos, Rank};

use super::World;
use super::mail::Matter;
use crate::wakers::keep_waker;

/// Where ranks meet: in the world of this one.
const HOST: Rank = Rank(0);

/// A rank that came to agree.
#[derive(Debug, Default)]
pub(super) struct Attendance {
    /// How often it came.
    visit: u64,
    waits: bool,
    waker: Option<Waker>,
    answer: Option<Result<Agreement, Error>>,
}

impl World {
    /// A rank comes to agree with the others: all go on when the last has come.
    pub(crate) fn arrive(&mut self, rank: Rank, proposal: Proposal, deadline: Nanos) {
        let visit = self.attendances[rank].visit + 1;
        self.attendances[rank] = Attendance { visit, waits: true, ..Attendance::default() };
        self.tell_host(rank, Matter::Come { rank, visit, proposal, deadline });
    }

    /// Lets the host know at a rank's own time, or a latency later.
    fn tell_host(&mut self, rank: Rank, matter: Matter) {
        let at = self.now_of(rank);
        if self.windows.has(HOST) {
            self.expect(at, matter);
        } else {
            self.mail(HOST, at + self.partitions.delay(), matter);
        }
    }

    /// The answer to a rank that came.
    pub(crate) fn poll_answer(&mut self, rank: Rank, context: &Context<'_>) -> Poll<Result<Agreement, Error>> {
        let attendance = &mut self.attendances[rank];
        match attendance.answer.take() {
            Some(answer) => Poll::Ready(answer),
            None => {
                keep_waker(&mut attendance.waker, context);
                Poll::Pending
            }
        }
    }

    /// A rank stops waiting for an answer, or has it.
    pub(crate) fn leave_meeting(&mut self, rank: Rank) {
        if std::mem::take(&mut self.attendances[rank].waits) {
            self.tell_host(rank, Matter::Gone { rank });
        }
    }

    /// Where ranks meet: one has come.
    pub(super) fn meet(&mut self, (rank, visit): (Rank, u64), proposal: Proposal, deadline: Nanos) {
        self.no_deadline_before = self.no_deadline_before.min(deadline);
        self.visits[rank.index()] = visit;
        self.meeting.arrive(rank, proposal, deadline, self.now);
        self.answer_all();
    }

    /// Where ranks meet: one waits no longer.
    pub(super) fn leaves(&mut self, rank: Rank) {
        self.meeting.leave(rank);
    }

    /// Where ranks meet: those who have an answer are told, all at the same time.
    pub(super) fn answer_all(&mut self) {
        let at = self.now + self.partitions.delay();
        for (rank, answer) in self.meeting.answers() {
            let answer = Matter::Answer { rank, visit: self.visits[rank.index()], answer };
            if self.windows.has(rank) { self.expect(at, answer) } else { self.mail(rank, at, answer) }
        }
    }

    /// A rank is told the answer.
    pub(super) fn answered(&mut self, (rank, visit): (Rank, u64), answer: Result<Agreement, Error>) {
        let attendance = &mut self.attendances[rank];
        // It may have stopped waiting since, and come again.
        if attendance.visit == visit && std::mem::take(&mut attendance.waits) {
            attendance.answer = Some(answer);
            attendance.waker.iter().for_each(Waker::wake_by_ref);
            self.ranks[rank].main = self.now_of(rank);
        }
    }
}
