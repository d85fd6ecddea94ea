//! What a lane has gathered, posted and got back: how much room its queue has, and which tickets are settled.

use std::collections::VecDeque;

/// Requests posted with one doorbell.
#[derive(Clone, Copy, Debug)]
struct Posted {
    requests: u32,
    /// The last ticket that lies whole among or before them.
    upto: u64,
}

/// The account of one lane. Its queue never holds more than `depth` requests.
#[derive(Debug)]
pub(crate) struct Account {
    depth: u32,
    /// Requests gathered and not posted.
    gathered: u32,
    /// Requests posted and not completed.
    under_way: u32,
    posted: VecDeque<Posted>,
    issued: u64,
    settled: u64,
}

impl Account {
    pub(crate) fn new(depth: u32) -> Self {
        let posted = VecDeque::with_capacity(depth as usize);
        Self { depth, gathered: 0, under_way: 0, posted, issued: 0, settled: 0 }
    }

    /// The queue ended: nothing is under way any more, and nothing more is settled.
    pub(crate) fn clear(&mut self) {
        (self.gathered, self.under_way) = (0, 0);
        self.posted.clear();
    }

    /// One more request is gathered.
    pub(crate) const fn gather(&mut self) {
        self.gathered += 1;
    }

    /// Requests gathered.
    pub(crate) const fn gathered(&self) -> usize {
        self.gathered as usize
    }

    /// A put has been gathered whole; its ticket. What is posted with the first of its parts does not tell of it.
    pub(crate) const fn issue(&mut self) -> u64 {
        self.issued += 1;
        self.issued
    }

    /// The last ticket.
    pub(crate) const fn issued(&self) -> u64 {
        self.issued
    }

    /// What is gathered goes out with one doorbell.
    pub(crate) fn post(&mut self) {
        self.under_way += self.gathered;
        self.posted.push_back(Posted { requests: self.gathered, upto: self.issued });
        self.gathered = 0;
    }

    /// The last request of the oldest doorbell has completed, and with it all before.
    pub(crate) fn complete(&mut self) {
        if let Some(Posted { requests, upto }) = self.posted.pop_front() {
            self.under_way -= requests;
            self.settled = upto;
        }
    }

    /// Whether the queue takes `more` requests now.
    pub(crate) const fn has_room(&self, more: u32) -> bool {
        self.under_way + self.gathered + more <= self.depth
    }

    pub(crate) const fn is_idle(&self) -> bool {
        self.gathered == 0 && self.under_way == 0
    }

    pub(crate) const fn is_settled(&self, ticket: u64) -> bool {
        self.settled >= ticket
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gathered_and_what_is_under_way_take_room() {
        let mut account = Account::new(4);
        (0..3).for_each(|_| account.gather());
        assert!(account.has_room(1) && !account.has_room(2) && !account.is_idle());
        account.post();
        assert!(account.has_room(1) && !account.has_room(2) && account.gathered() == 0 && !account.is_idle());
        account.gather();
        assert!(!account.has_room(1));
        account.complete();
        assert!(account.has_room(3) && !account.has_room(4) && !account.is_idle(), "one is gathered");
        account.post();
        account.complete();
        assert!(account.has_room(4) && account.is_idle());
    }

    #[test]
    fn a_completion_settles_what_was_posted_with_it_and_no_more() {
        let mut account = Account::new(8);
        for _ in 0..3 {
            account.gather();
            account.issue();
            account.post();
        }
        assert!(!account.is_settled(1));
        for ticket in 1..=3 {
            account.complete();
            assert!(account.is_settled(ticket) && !account.is_settled(ticket + 1), "ticket {ticket}");
        }
    }

    /// A put of more parts than a doorbell takes: its first parts are posted before it is whole.
    #[test]
    fn a_put_is_settled_when_its_last_part_is() {
        let mut account = Account::new(8);
        account.gather();
        account.post();
        account.gather();
        let ticket = account.issue();
        account.post();
        account.complete();
        assert!(!account.is_settled(ticket), "its last part is under way");
        account.complete();
        assert!(account.is_settled(ticket));
    }

    #[test]
    fn a_queue_that_ended_holds_nothing_and_settles_nothing() {
        let mut account = Account::new(2);
        account.gather();
        let ticket = account.issue();
        account.post();
        account.gather();
        account.clear();
        assert!(account.is_idle() && account.has_room(2) && account.issued() == ticket);
        account.complete();
        assert!(!account.is_settled(ticket));
    }
}
