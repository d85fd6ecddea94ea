//! What a kernel that plays an adapter is told: the card's queue pairs, and the memory that their elements may name.

use soft_hca::{Progress, Queue, Region, Work};

use crate::args::{HcaQueue, HcaRegion};

/// All bits: never, none.
const NEVER: u64 = u64::MAX;

/// The tables of one card.
#[derive(Debug, Default)]
pub(super) struct Tables {
    pub(super) queues: Vec<HcaQueue>,
    pub(super) regions: Vec<HcaRegion>,
    /// Doorbell pages: where the card has them.
    pub(super) pages: Vec<u64>,
}

impl Tables {
    pub(super) fn of(card: usize, work: &Work) -> Self {
        let mut tables = Self {
            pages: work.pages.iter().filter(|page| page.0 == card).map(|page| page.1).collect(),
            ..Self::default()
        };
        for queue in work.queues.iter().filter(|queue| queue.card == card) {
            let (own, own_count) = tables.domain(work, card, queue.domain);
            let ((peer, peer_count), rights) = match queue.to {
                Some((card, domain, rights)) => (tables.domain(work, card, domain), rights),
                None => ((0, 0), 0),
            };
            let known = row(queue);
            tables.queues.push(HcaQueue {
                own,
                own_count,
                peer,
                peer_count,
                rights,
                answers: queue.to.is_some().into(),
                ..known
            });
        }
        tables
    }

    /// Adds the regions of a domain: the first, and how many.
    fn domain(&mut self, work: &Work, card: usize, domain: u32) -> (u32, u32) {
        let first = self.regions.len();
        let all = work.regions.iter().filter(|region| (region.card, region.domain) == (card, domain));
        self.regions.extend(all.map(region));
        (first as u32, (self.regions.len() - first) as u32)
    }
}

fn row(queue: &Queue) -> HcaQueue {
    let Progress { number, produced, retired, written, syndrome } = queue.progress;
    let (planted, planted_syndrome) = queue.planted.unwrap_or((NEVER, 0));
    HcaQueue {
        elements: queue.elements,
        record: queue.record,
        completions: queue.completions,
        patience: queue.patience.unwrap_or(NEVER),
        produced,
        retired,
        written,
        planted,
        planted_syndrome: planted_syndrome.into(),
        number,
        log_elements: queue.log_elements,
        log_completions: queue.log_completions,
        user: queue.user,
        log_longest: queue.log_longest,
        syndrome: syndrome.into(),
        ..HcaQueue::default()
    }
}

fn region(region: &Region) -> HcaRegion {
    HcaRegion {
        iova: region.iova,
        base: region.base,
        bytes: region.bytes,
        local_key: region.local_key,
        remote_key: region.remote_key,
        access: region.access,
        reserved: 0,
    }
}

/// How far a queue pair has come, by its row.
pub(super) fn progress(row: &HcaQueue) -> Progress {
    Progress {
        number: row.number,
        produced: row.produced,
        retired: row.retired,
        written: row.written,
        syndrome: row.syndrome as u8,
    }
}

/// Whether something is left to be done that needs no bell.
pub(super) const fn is_pending(row: &HcaQueue) -> bool {
    row.retired < row.produced
}
