//! A queue pair and its completion queue: made, connected, asked, ended. What the firmware is told stands here alone.

use ep_rdma::{Connection, Gid, Port};

use super::storage::{PAGE, Storage};
use super::{Context, Domain, Object, Register};
use crate::command::{Message, Opcode, cq, qp};
use crate::error::Error;
use ep_core::transport::PostingDevice;

/// The path's state when there is only one path: "migrated".
const PM_MIGRATED: u64 = 3;
/// Atomics of 8 bytes and less.
const ATOMIC_MODE: u64 = 3;
/// No receive queue.
const NO_RECEIVES: u64 = 3;
/// The longest message, as the power of two.
const LOG_MESSAGE: u64 = 30;
/// Atomics under way, of either end, as the power of two.
const LOG_ATOMICS: u64 = 4;
/// How long a peer that is not ready asks to be spared: 0.64 ms. Writes and atomics take no receives, so it never is.
const MIN_RNR: u64 = 12;
/// How often a request is repeated at a receiver that is not ready: for ever. A dead one answers nothing, which ends it.
const RNR_FOR_EVER: u64 = 7;
/// Routers that a packet may pass.
const HOPS: u8 = 255;
/// Source ports of RoCEv2 begin there.
const UDP_PORTS: u32 = 0xc000;
/// Bytes of what QUERY_QP answers.
const QUERIED: usize = 0x110;

/// Bytes of an element, and of a completion.
pub(crate) const PLACE: u64 = 64;

/// Where the parts of a queue lie in the memory of queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub(crate) elements: u64,
    pub(crate) completions: u64,
    records: u64,
}

impl Place {
    /// Those of queue `number` of `count`, of `2^log_slots` elements each: first all queues, then a line of records for each.
    pub(crate) const fn of(number: u64, count: u64, log_slots: u32) -> Self {
        let each = PLACE << log_slots;
        let records = 2 * each * count + PLACE * number;
        Self { elements: 2 * each * number, completions: 2 * each * number + each, records }
    }

    /// Bytes of all.
    pub(crate) const fn bytes(count: u64, log_slots: u32) -> u64 {
        (2 * (PLACE << log_slots) + PLACE) * count
    }

    /// The queue pair's record: how many may be received, then how many were sent, 4 bytes each.
    pub(crate) const fn record(&self) -> u64 {
        self.records
    }

    /// The word of it that counts elements.
    pub(crate) const fn sent(&self) -> u64 {
        self.records + 4
    }

    /// The completion queue's record: how many were read, then what wakes somebody up, 4 bytes each.
    pub(crate) const fn read(&self) -> u64 {
        self.records + 16
    }

    /// Where fetch-adds return what was there.
    pub(crate) const fn returned(&self) -> u64 {
        self.records + 32
    }
}

/// What the commands that make queues name.
#[derive(Clone, Copy, Debug)]
struct Names {
    domain: u32,
    umem: u32,
    page: u32,
    events: u32,
}

fn create_completions(names: Names, place: Place, log_slots: u32) -> Message {
    Message::new(Opcode::CreateCq)
        .with(cq::DBR_UMEM_VALID, 1)
        .with(cq::DBR_UMEM_ID, names.umem.into())
        .with(cq::LOG_CQ_SIZE, log_slots.into())
        .with(cq::UAR_PAGE, names.page.into())
        .with(cq::C_EQN, names.events.into())
        .with(cq::DBR_ADDR, place.read())
        .with(cq::UMEM_OFFSET, place.completions)
        .with(cq::UMEM_ID, names.umem.into())
        .with(cq::UMEM_VALID, 1)
}

fn create_pair(names: Names, place: Place, log_slots: u32, completions: u32) -> Message {
    Message::new(Opcode::CreateQp)
        .with(qp::PM_STATE, PM_MIGRATED)
        .with(qp::PD, names.domain.into())
        .with(qp::LOG_SQ_SIZE, log_slots.into())
        .with(qp::UAR_PAGE, names.page.into())
        .with(qp::RQ_TYPE, NO_RECEIVES)
        .with(qp::CQN_SND, completions.into())
        .with(qp::CQN_RCV, completions.into())
        .with(qp::DBR_UMEM_VALID, 1)
        .with(qp::DBR_UMEM_ID, names.umem.into())
        .with(qp::DBR_ADDR, place.record())
        .with(qp::WQ_UMEM_OFFSET, place.elements)
        .with(qp::WQ_UMEM_ID, names.umem.into())
        .with(qp::WQ_UMEM_VALID, 1)
}

/// Others may write, and add.
fn to_init(number: u32, port: u8) -> Message {
    Message::about(Opcode::Rst2Init, number)
        .with(qp::PM_STATE, PM_MIGRATED)
        .with(qp::VHCA_PORT_NUM, port.into())
        .with(qp::RWE, 1)
        .with(qp::RAE, 1)
        .with(qp::ATOMIC_MODE, ATOMIC_MODE)
}

/// Where the peer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Target {
    Ethernet { address: [u8; 6], own_gid: u8, source_port: u32 },
    InfiniBand { lid: u16 },
}

fn to_receive(number: u32, port: u8, path: &Connection, target: Target) -> Message {
    let message = Message::about(Opcode::Init2Rtr, number)
        .with(qp::PM_STATE, PM_MIGRATED)
        .with(qp::MTU, path.mtu.into())
        .with(qp::LOG_MSG_MAX, LOG_MESSAGE)
        .with(qp::REMOTE_QPN, path.number.into())
        .with(qp::VHCA_PORT_NUM, port.into())
        .with(qp::LOG_RRA_MAX, LOG_ATOMICS)
        .with(qp::ATOMIC_MODE, ATOMIC_MODE)
        .with(qp::RWE, 1)
        .with(qp::RAE, 1)
        .with(qp::MIN_RNR_NAK, MIN_RNR)
        .with(qp::NEXT_RCV_PSN, path.their_psn.into());
    match target {
        Target::Ethernet { address, own_gid, source_port } => {
            let [a, b, c, d, e, f] = address;
            let [upper, lower] = *path.gid.as_chunks::<8>().0 else { unreachable!("sixteen bytes") };
            message
                .with(qp::SRC_ADDR_INDEX, own_gid.into())
                .with(qp::HOP_LIMIT, HOPS.into())
                .with(qp::TCLASS, path.wire.traffic_class.into())
                .with(qp::RGID[0], u64::from_be_bytes(upper))
                .with(qp::RGID[1], u64::from_be_bytes(lower))
                .with(qp::DSCP, u64::from(path.wire.traffic_class >> 2))
                .with(qp::UDP_SPORT, source_port.into())
                .with(qp::ETH_PRIO, u64::from(path.wire.service_level & 7))
                .with(qp::RMAC, u64::from_be_bytes([0, 0, a, b, c, d, e, f]))
        }
        Target::InfiniBand { lid } => {
            let message = message.with(qp::RLID, lid.into()).with(qp::SL, path.wire.service_level.into());
            // Without the global header: within a subnet the local address serves.
            message.with(qp::GRH, 0)
        }
    }
}

fn to_send(number: u32, path: &Connection) -> Message {
    Message::about(Opcode::Rtr2Rts, number)
        .with(qp::PM_STATE, PM_MIGRATED)
        .with(qp::ACK_TIMEOUT, path.wire.ack_timeout.into())
        .with(qp::LOG_SRA_MAX, LOG_ATOMICS)
        .with(qp::RETRY_COUNT, path.wire.retries.into())
        .with(qp::RNR_RETRY, RNR_FOR_EVER)
        .with(qp::NEXT_SEND_PSN, path.our_psn.into())
}

/// The state of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// It sends.
    Ready,
    /// It failed, or was told to.
    Error,
    /// It was not connected.
    Other(u8),
}

/// A queue pair that a device posts to, and its completion queue.
#[derive(Debug)]
pub(crate) struct Queue {
    // It ends before the queue that tells of it.
    pair: Object,
    _completions: Object,
    domain: Domain,
}

impl Queue {
    /// Both, in memory at `place`: no elements, no completions.
    pub(crate) fn new<D: PostingDevice>(
        domain: &Domain,
        register: &Register<D>,
        storage: &Storage<D::Memory>,
        place: Place,
        log_slots: u32,
    ) -> Result<Self, Error> {
        debug_assert!(place.elements.is_multiple_of(PAGE) && place.completions.is_multiple_of(PAGE));
        let context: &Context = domain.context();
        let events = context.event_queue()?;
        let names = Names { domain: domain.number(), umem: storage.number(), page: register.page(), events };
        let message = create_completions(names, place, log_slots);
        let completions = Object::new(context, Opcode::CreateCq.name(), &message)?;
        let message = create_pair(names, place, log_slots, completions.number());
        let pair = Object::new(context, Opcode::CreateQp.name(), &message)?;
        Ok(Self { pair, _completions: completions, domain: domain.clone() })
    }

    /// By which the peer and the elements name it.
    pub(crate) const fn number(&self) -> u32 {
        self.pair.number()
    }

    /// Others may connect to it.
    pub(crate) fn init(&self, port: &Port) -> Result<(), Error> {
        self.change(Opcode::Rst2Init, &to_init(self.number(), port.number))
    }

    /// Connects it: from here on elements may be posted.
    pub(crate) fn connect(&self, port: &Port, gid: &Gid, path: &Connection) -> Result<(), Error> {
        let target = if port.ethernet {
            let address = self.domain.ethernet_address(&mut path.address(port, gid, HOPS))?;
            // Another one for each pair, so that switches spread them over paths.
            let source_port = UDP_PORTS | (self.number() ^ path.number) & 0x3fff;
            Target::Ethernet { address, own_gid: gid.index, source_port }
        } else {
            Target::InfiniBand { lid: path.lid }
        };
        self.change(Opcode::Init2Rtr, &to_receive(self.number(), port.number, path, target))?;
        self.change(Opcode::Rtr2Rts, &to_send(self.number(), path))
    }

    /// Breaks it: what it holds never arrives.
    pub(crate) fn fail(&self) -> Result<(), Error> {
        self.change(Opcode::ToError, &Message::about(Opcode::ToError, self.number()))
    }

    /// What the adapter says of it.
    pub(crate) fn state(&self) -> Result<State, Error> {
        let message = Message::about(Opcode::QueryQp, self.number());
        let answer = self.pair.query(Opcode::QueryQp.name(), &message, QUERIED)?;
        Ok(match answer.get(qp::STATE) as u8 {
            3 => State::Ready,
            4 | 6 => State::Error,
            other => State::Other(other),
        })
    }

    fn change(&self, opcode: Opcode, message: &Message) -> Result<(), Error> {
        self.pair.modify(opcode.name(), message)
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
