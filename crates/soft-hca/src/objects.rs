//! What a card holds for its users.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::abi;
use crate::carrier::Carrier;
use crate::complaint::{Complaint, Rule};
use crate::devx::qp::QpState;
use crate::engine::cqe::{Cqe, Writing};
use crate::engine::message::Message;
use crate::face::Face;
use crate::memory::Memory;
use crate::model::Model;

/// Objects by number. Ordered, so that a seed replays.
pub(crate) type Table<T> = BTreeMap<u32, T>;

/// A device that was opened.
#[derive(Debug)]
pub(crate) struct Context {
    /// Whether it was opened for firmware commands, and the card has them.
    pub(crate) devx: bool,
}

#[derive(Debug)]
pub(crate) struct Pd {
    pub(crate) context: u32,
}

/// Memory that elements may name.
#[derive(Debug)]
pub(crate) struct Mr {
    pub(crate) pd: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
    /// The address that stands for its first byte.
    pub(crate) iova: u64,
    pub(crate) memory: Memory,
    pub(crate) access: u32,
}

impl Mr {
    pub(crate) fn is_relaxed(&self) -> bool {
        self.access & abi::RELAXED_ORDERING != 0
    }

    /// The bytes at an address, if it holds all of them.
    pub(crate) fn range(&self, addr: u64, len: usize) -> Option<Memory> {
        self.memory.part(addr.checked_sub(self.iova)?, len)
    }
}

/// Memory that queues lie in.
#[derive(Debug)]
pub(crate) struct Umem {
    pub(crate) context: u32,
    pub(crate) memory: Memory,
    pub(crate) access: u32,
}

#[derive(Debug)]
pub(crate) struct Ah {
    pub(crate) pd: u32,
}

/// How a doorbell page was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UarKind {
    /// Its own page.
    Bf,
    /// The context's one page without write combining.
    Nc,
    /// A page of its own without write combining.
    NcDedicated,
}

#[derive(Debug)]
pub(crate) struct Uar {
    pub(crate) context: u32,
    pub(crate) kind: UarKind,
    pub(crate) page: Memory,
    /// How many times it was handed out.
    pub(crate) holders: u32,
}

#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) context: u32,
    pub(crate) umems: [u32; 2],
    pub(crate) uar: u32,
    pub(crate) entries: Memory,
    pub(crate) record: Memory,
    pub(crate) log_size: u32,
    pub(crate) collapsed: bool,
    pub(crate) overrun_ignore: bool,
    /// Completions written, ever.
    pub(crate) written: u64,
    /// The completion of which all but the last word is written.
    pub(crate) writing: Option<Writing>,
    /// It ran over.
    pub(crate) broken: bool,
}

/// What a bell said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bell {
    /// A producer index.
    Index(u16),
    /// Perhaps something: a bell of another queue pair on the same page may have overwritten one.
    Perhaps,
}

/// An element that was carried out and not yet reported.
#[derive(Debug)]
pub(crate) struct Unreported {
    pub(crate) index: u64,
    pub(crate) bytes: Vec<u8>,
}

#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) context: u32,
    pub(crate) pd: u32,
    pub(crate) uar: u32,
    pub(crate) cq: u32,
    pub(crate) umems: [u32; 2],
    pub(crate) queue: Memory,
    pub(crate) record: Memory,
    pub(crate) depth: u64,
    pub(crate) state: QpState,
    /// The context as commands have left it, laid out as in a command.
    pub(crate) image: Vec<u8>,
    /// The syndrome of what broke it.
    pub(crate) syndrome: Option<u8>,
    /// How often a command has ended what it was doing: what peers sent before then arrives no more.
    pub(crate) epoch: u64,

    pub(crate) bells: VecDeque<Bell>,
    /// The producer index, as far as the card knows it.
    pub(crate) produced: u64,
    /// Elements read.
    pub(crate) fetched: u64,
    /// Elements carried out.
    pub(crate) retired: u64,
    /// Elements of whose completion the driver can know.
    pub(crate) reported: u64,
    /// Messages under way, oldest first.
    pub(crate) flight: VecDeque<Message>,
    pub(crate) unreported: VecDeque<Unreported>,
    /// Completions that are due.
    pub(crate) completions: VecDeque<Cqe>,
    /// Since when its oldest message has had no answer.
    pub(crate) silent_since: Option<u64>,
    /// Its peer has answered: from then on silence is no fault of how it was connected.
    pub(crate) answered: bool,
    /// Its packets are lost.
    pub(crate) cut: bool,
    /// A syndrome on demand: elements until then.
    pub(crate) planted: Option<(u64, u8)>,
    /// Elements read since it was made.
    pub(crate) elements: u64,
}

/// What a card has done, for tests of how a driver drives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Bells seen in doorbell registers.
    pub bells: u64,
    /// Elements carried out.
    pub elements: u64,
    /// RDMA writes among them.
    pub writes: u64,
    /// Fetch-adds among them.
    pub fetch_adds: u64,
    /// Bytes written to peers.
    pub bytes: u64,
    /// Completions written.
    pub completions: u64,
}

/// A card, with everything it holds.
#[derive(Debug)]
pub(crate) struct CardState {
    pub(crate) name: String,
    pub(crate) model: Model,
    pub(crate) number: u8,
    pub(crate) dead: bool,
    /// How often its queue pairs have become others.
    pub(crate) changes: u64,
    /// Queue pairs that were destroyed.
    pub(crate) gone: BTreeSet<u32>,
    pub(crate) next: u32,
    pub(crate) eqn: u32,
    pub(crate) contexts: Table<Context>,
    pub(crate) pds: Table<Pd>,
    pub(crate) mrs: Table<Mr>,
    pub(crate) umems: Table<Umem>,
    pub(crate) uars: Table<Uar>,
    pub(crate) ahs: Table<Ah>,
    pub(crate) cqs: Table<Cq>,
    pub(crate) qps: Table<Qp>,
    pub(crate) complaints: Vec<Complaint>,
    pub(crate) counts: Counts,
    /// Functions that fail on demand: calls until then, errno, and the firmware's status and syndrome where it has them.
    pub(crate) failures: Vec<Failure>,
    /// Who carries its elements out, where it does not itself.
    pub(crate) carrier: Option<Arc<dyn Carrier>>,
    pub(crate) sight: Sight,
}

/// How a fabric knows of a card.
#[derive(Debug)]
pub(crate) enum Sight {
    /// It is this process's own.
    Own,
    /// It is another process's, which has not shown it, or has taken back what it had shown.
    Hidden,
    /// It is another process's, which has shown it.
    Seen(Face),
}

/// A function that fails on demand.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) function: String,
    pub(crate) after: u32,
    pub(crate) errno: i32,
    pub(crate) status: Option<(u8, u32)>,
}

impl CardState {
    pub(crate) fn new(name: String, number: u8, model: Model, first: u32) -> Self {
        Self {
            name,
            model,
            number,
            dead: false,
            changes: 0,
            gone: BTreeSet::new(),
            next: first,
            eqn: first % 50 + 3,
            contexts: Table::new(),
            pds: Table::new(),
            mrs: Table::new(),
            umems: Table::new(),
            uars: Table::new(),
            ahs: Table::new(),
            cqs: Table::new(),
            qps: Table::new(),
            complaints: Vec::new(),
            counts: Counts::default(),
            failures: Vec::new(),
            carrier: None,
            sight: Sight::Own,
        }
    }

    /// A number that no other object of the card has had: one kind's numbers are never another's.
    pub(crate) fn number(&mut self) -> u32 {
        self.next += 0x1d;
        self.next
    }

    pub(crate) fn complain(&mut self, rule: Rule, text: impl Into<String>) {
        // Of a rule that is broken at every element, the first hundred say enough.
        if self.complaints.len() < 100 {
            self.complaints.push(Complaint { rule, text: text.into() });
        }
    }

    /// No completion of a queue pair comes any more: one of which a part is written stays so.
    pub(crate) fn silence(&mut self, qp: u32) {
        for cq in self.cqs.values_mut() {
            cq.writing = cq.writing.filter(|writing| writing.qpn != qp);
        }
    }

    /// Whether this call of a function is to fail.
    pub(crate) fn failure(&mut self, function: &str) -> Option<Failure> {
        let at = self.failures.iter().position(|failure| failure.function == function)?;
        if self.failures[at].after > 0 {
            self.failures[at].after -= 1;
            return None;
        }
        Some(self.failures.remove(at))
    }

    /// The port's GIDs: link-local, and for RoCE the IPv4 address 10.9.0.(number + 1), mapped.
    pub(crate) fn gids(&self) -> Vec<[u8; 16]> {
        let mut local = [0; 16];
        local[..2].copy_from_slice(&[0xfe, 0x80]);
        local[8..].copy_from_slice(&[2, 0, 0, 0xff, 0xfe, 0, 9, self.number + 1]);
        let mut mapped = [0; 16];
        mapped[10..].copy_from_slice(&[0xff, 0xff, 10, 9, 0, self.number + 1]);
        match self.model.link {
            crate::Link::Ethernet => vec![local, mapped],
            crate::Link::InfiniBand => vec![local],
        }
    }

    pub(crate) fn mac(&self) -> [u8; 6] {
        [2, 0, 0, 0, 9, self.number + 1]
    }

    /// 0 on Ethernet.
    pub(crate) fn lid(&self) -> u16 {
        match self.model.link {
            crate::Link::Ethernet => 0,
            crate::Link::InfiniBand => 0x21 + u16::from(self.number),
        }
    }
}
