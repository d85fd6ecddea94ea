//! Cards whose elements someone else carries out: a kernel of a GPU, which reads queues in the GPU's own memory. The cards decode commands and keep
//! objects as ever; what a carrier must know of them it is told by [`Fabric::hand_over`](crate::Fabric::hand_over).

use std::fmt;

use crate::abi;
use crate::complaint::Rule;
use crate::devx::qp::QpState;
use crate::devx::tables::qp::{ACK_TIMEOUT, LOG_MSG_MAX, RAE, RETRY_COUNT, RWE, USER_INDEX};
use crate::engine::layout::syndrome;
use crate::engine::network;
use crate::fabric::State;
use crate::memory::Memory;
use crate::objects::{CardState, Qp};

/// Who carries out elements.
///
/// Its calls come while the fabric is locked: an implementation calls nothing of the fabric from within.
pub trait Carrier: Send + Sync + fmt::Debug {
    /// Stops. On return this process reads or writes nothing of any card's queues or memory any more until the next
    /// [`Fabric::hand_over`](crate::Fabric::hand_over); others may, until [`alters`](Self::alters). Says how far the queue pairs of this card have come, and each time it has come only once.
    fn halt(&self, card: usize) -> Vec<Progress>;

    /// Something of a card is about to change that peers see of it ([`Fabric::show`](crate::Fabric::show)). Where these are other processes, none of them
    /// goes by what it was told when this returns.
    fn alters(&self, card: usize) {
        let _ = card;
    }

    /// Reads memory that queues lie in. False: it cannot be read.
    fn read(&self, address: u64, into: &mut [u8]) -> bool;
}

/// How far a queue pair has come, as its carrier knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Its number.
    pub number: u32,
    /// Elements that the card was told of, ever.
    pub produced: u64,
    /// Of those, carried out or flushed.
    pub retired: u64,
    /// Completions written to its queue, ever.
    pub written: u64,
    /// The syndrome of what broke it; 0 for none.
    pub syndrome: u8,
}

/// What a carrier needs to know.
#[derive(Debug, Clone, Default)]
pub struct Work {
    /// Queue pairs that send, or flush.
    pub queues: Vec<Queue>,
    /// Memory that elements may name.
    pub regions: Vec<Region>,
    /// Doorbell pages that queue pairs are rung on: the card, and where the page lies in this process's memory.
    pub pages: Vec<(usize, u64)>,
}

/// A queue pair that sends, or that is broken and flushes.
#[derive(Debug, Clone, Copy)]
pub struct Queue {
    /// The card.
    pub card: usize,
    /// How far it had come, with a syndrome where it is broken: everything is flushed.
    pub progress: Progress,
    /// Its protection domain: own keys are of regions of it.
    pub domain: u32,
    /// Where its elements lie.
    pub elements: u64,
    /// As the power of two, units of 64 bytes.
    pub log_elements: u32,
    /// Where its doorbell record lies: the send half is the second word.
    pub record: u64,
    /// Where the completions lie.
    pub completions: u64,
    /// As the power of two.
    pub log_completions: u32,
    /// The user index, which completions carry.
    pub user: u32,
    /// The longest message, as the power of two.
    pub log_longest: u32,
    /// Nanoseconds after which a peer that does not answer is given up; none: never.
    pub patience: Option<u64>,
    /// The peer's card and domain, and the rights ([`Region::access`]) that its queue pair gives; none: it does not answer.
    pub to: Option<(usize, u32, u32)>,
    /// The element, counted from 0, that is to fail, and how.
    pub planted: Option<(u64, u8)>,
}

/// Memory that elements may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The card.
    pub card: usize,
    /// Its protection domain.
    pub domain: u32,
    /// Its key at the card.
    pub local_key: u32,
    /// Its key for peers.
    pub remote_key: u32,
    /// The address that stands for its first byte.
    pub iova: u64,
    /// Where that lies.
    pub base: u64,
    /// Bytes.
    pub bytes: u64,
    /// [`Region::LOCAL_WRITE`] and the others.
    pub access: u32,
}

impl Region {
    /// The card may write to it for its own side.
    pub const LOCAL_WRITE: u32 = abi::LOCAL_WRITE;
    /// Peers may write to it.
    pub const REMOTE_WRITE: u32 = abi::REMOTE_WRITE;
    /// Peers may add to it.
    pub const REMOTE_ATOMIC: u32 = abi::REMOTE_ATOMIC;
    /// What peers may do, whatever that is.
    pub(crate) const REMOTE: u32 = abi::REMOTE_WRITE | abi::REMOTE_READ | abi::REMOTE_ATOMIC;
}

/// What there is to be done, as commands have left it.
pub(crate) fn work(state: &State) -> Work {
    let mut work = Work::default();
    for (card, held) in state.cards.iter().enumerate().filter(|(_, held)| !held.dead) {
        let all = held.qps.iter().filter(|(_, qp)| qp.hears());
        work.queues.extend(all.filter_map(|(&number, qp)| queue(state, card, number, qp)));
        work.regions.extend(held.regions(card));
        let rung = |page: u32| held.qps.values().any(|qp| qp.uar == page && qp.hears());
        let pages = held.uars.iter().filter(|(number, _)| rung(**number));
        work.pages.extend(pages.map(|(_, uar)| (card, uar.page.base() as u64)));
    }
    work
}

fn queue(state: &State, card: usize, number: u32, qp: &Qp) -> Option<Queue> {
    let cq = state.cards[card].cqs.get(&qp.cq)?;
    let to = network::end(state, (card, number)).ok().map(|(card, end)| {
        let right = |field, right| if end.get(&field) == 1 { right } else { 0 };
        (card, end.domain, right(RWE, abi::REMOTE_WRITE) | right(RAE, abi::REMOTE_ATOMIC))
    });
    let timeout = qp.get(&ACK_TIMEOUT);
    let syndrome = if qp.state == QpState::Error { qp.syndrome.unwrap_or(syndrome::FLUSH) } else { 0 };
    Some(Queue {
        card,
        progress: Progress { number, produced: qp.produced, retired: qp.retired, written: cq.written, syndrome },
        domain: qp.pd,
        elements: qp.queue.base() as u64,
        log_elements: qp.depth.ilog2(),
        record: qp.record.base() as u64,
        completions: cq.entries.base() as u64,
        log_completions: cq.log_size,
        user: qp.get(&USER_INDEX) as u32,
        log_longest: qp.get(&LOG_MSG_MAX) as u32,
        patience: (timeout > 0 && !network::is_hidden(state, (card, number)))
            .then(|| (4096 << timeout) * (qp.get(&RETRY_COUNT) + 1)),
        to,
        planted: qp.planted.map(|(after, syndrome)| (qp.retired + after, syndrome)),
    })
}

impl CardState {
    /// Before anything changes that its carrier or its peers were told of.
    pub(crate) fn alters(&mut self) {
        self.halt();
        self.changes_face();
    }

    /// Before what peers may see of it changes.
    pub(crate) fn changes_face(&self) {
        if let Some(carrier) = &self.carrier {
            carrier.alters(usize::from(self.number));
        }
    }

    /// Stops the carrier, where there is one, and takes over how far it has come.
    pub(crate) fn halt(&mut self) {
        let Some(carrier) = self.carrier.clone() else { return };
        let all = carrier.halt(usize::from(self.number));
        let breaks = |progress: &Progress| {
            progress.syndrome != 0 && self.qps.get(&progress.number).is_some_and(|qp| qp.state == QpState::ReadyToSend)
        };
        if all.iter().any(breaks) {
            // A queue pair that is broken takes nothing any more.
            self.changes_face();
        }
        for progress in all {
            let Some(qp) = self.qps.get_mut(&progress.number) else { continue };
            let done = progress.retired.saturating_sub(qp.retired);
            self.counts.elements += done;
            self.counts.completions += self.cqs.get_mut(&qp.cq).map_or(0, |cq| {
                let more = progress.written.saturating_sub(cq.written);
                cq.written = progress.written;
                more
            });
            if let Some((after, _)) = &mut qp.planted {
                *after = after.saturating_sub(done);
            }
            (qp.produced, qp.retired) = (progress.produced, progress.retired);
            if progress.syndrome != 0 && qp.state == QpState::ReadyToSend {
                (qp.state, qp.syndrome, qp.planted) = (QpState::Error, Some(progress.syndrome), None);
            }
        }
    }

    /// Bytes of memory that queues lie in, which a carrier may have where this process does not reach it.
    pub(crate) fn bytes(&mut self, memory: &Memory, offset: usize, len: usize) -> Vec<u8> {
        let Some(carrier) = &self.carrier else { return memory.bytes(offset, len) };
        let mut bytes = vec![0; len];
        if !carrier.read((memory.base() + offset) as u64, &mut bytes) {
            self.complain(Rule::Memory, format!("{len:#x} bytes at {:#x} cannot be read", memory.base() + offset));
        }
        bytes
    }
}
