//! CREATE_QP, the transitions of a queue pair, and QUERY_QP.

use std::collections::VecDeque;

use super::{
    BAD_PARAM, BAD_RESOURCE, BAD_STATE, Command, INIT2RTR, LIMIT, RST2INIT, RTR2RTS, Refusal, TO_ERR, TO_RST, tables,
};
use crate::Link;
use crate::bits::Field;
use crate::complaint::Rule;
use crate::engine::bell;
use crate::fabric::QpView;
use crate::objects::Qp;
use tables::qp::*;

/// The state of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpState {
    /// Made, or made anew.
    Reset,
    /// It has a port and rights.
    Init,
    /// It has a peer, and receives.
    ReadyToReceive,
    /// It sends, too.
    ReadyToSend,
    /// It is broken, or told to be: everything is flushed.
    Error,
}

impl QpState {
    /// Its code in commands.
    fn code(self) -> u128 {
        match self {
            QpState::Reset => 0,
            QpState::Init => 1,
            QpState::ReadyToReceive => 2,
            QpState::ReadyToSend => 3,
            QpState::Error => 6,
        }
    }

    /// Whether it takes what its peer sends.
    pub(crate) fn receives(self) -> bool {
        matches!(self, QpState::ReadyToReceive | QpState::ReadyToSend)
    }
}

impl Qp {
    /// A field of the context.
    pub(crate) fn get(&self, field: &Field) -> u64 {
        field.u64(&self.image)
    }

    pub(crate) fn view(&self, number: u32) -> QpView {
        QpView {
            number,
            state: self.state,
            remote: self.get(&REMOTE_QPN) as u32,
            produced: self.produced,
            retired: self.retired,
            syndrome: self.syndrome,
        }
    }

    /// Whether it has something to do when a bell rings: it sends, or flushes.
    pub(crate) fn hears(&self) -> bool {
        matches!(self.state, QpState::ReadyToSend | QpState::Error)
    }

    /// Nothing under way, indices zero.
    fn restart(&mut self) {
        self.bells.clear();
        self.flight.clear();
        self.unreported.clear();
        self.completions.clear();
        (self.produced, self.fetched, self.retired, self.reported) = (0, 0, 0, 0);
        (self.silent_since, self.syndrome, self.answered) = (None, None, false);
    }
}

/// Optional parameters of transitions that have a bit in the mask.
const OPTIONAL: u64 = 0x23f_f7ff;

/// Makes a queue pair, and answers its number.
pub(crate) fn create(command: &mut Command<'_>) -> Result<u32, Refusal> {
    // Fields of later transitions are no fault here; they say nothing yet.
    command.shape(BYTES, 0x10, &[&[OPT_PARAM_MASK, STATE], CREATED, CREATE_ONLY, INIT, RTR, RTS])?;
    for zero in [tables::OP_MOD, OPT_PARAM_MASK, STATE, ST, LOG_RQ_SIZE, NO_SQ, SEND_DBR_MODE, SRQN] {
        command.must_be(&zero, 0)?;
    }
    for one in [DBR_UMEM_VALID, WQ_UMEM_VALID] {
        command.must_be(&one, 1)?;
    }
    // Without a receive queue, a shared one or none must be said: a zero means one that has no memory.
    command.must_be(&RQ_TYPE, 3)?;
    let log_size = command.get(&LOG_SQ_SIZE);
    let limit = u64::from(command.card.model.log_max_qp_size);
    if log_size > limit {
        return command.refuse(Rule::Command, LIMIT, format_args!("log_sq_size is {log_size}, at most {limit}"));
    }
    let context = command.context;
    let (pd, uar) = (command.get(&PD) as u32, command.get(&UAR_PAGE) as u32);
    if command.card.pds.get(&pd).is_none_or(|pd| pd.context != context) {
        return command.refuse(Rule::Unknown, BAD_RESOURCE, format_args!("pd {pd:#x} does not exist in this context"));
    }
    command.uar(uar)?;
    let (cq, receive) = (command.get(&CQN_SND) as u32, command.get(&CQN_RCV) as u32);
    for (field, number) in [(CQN_SND, cq), (CQN_RCV, receive)] {
        let known = command.card.cqs.get(&number).is_some_and(|cq| cq.context == context);
        let unused = field == CQN_RCV && number == 0;
        if !known && !unused {
            let text = format_args!("{} {number:#x} does not exist in this context", field.name);
            return command.refuse(Rule::Unknown, BAD_RESOURCE, text);
        }
    }
    // A carrier counts completions by queue pair.
    if command.card.carrier.is_some() && command.card.qps.values().any(|qp| qp.cq == cq) {
        let text =
            format_args!("completion queue {cq:#x} is another queue pair's, which cards do not share that are carried");
        return command.refuse(Rule::Command, BAD_PARAM, text);
    }
    let page = 4096 << command.get(&LOG_PAGE_SIZE);
    let within = command.get(&PAGE_OFFSET) * 64;
    let bytes = 64_usize << log_size;
    let umems = [&WQ_UMEM_ID, &DBR_UMEM_ID].map(|id| command.get(id) as u32);
    let offset = command.get(&WQ_UMEM_OFFSET);
    let whole = command.umem(umems[0], offset, bytes + within as usize, page, "work queue")?;
    let queue = whole.part(within, bytes).expect("a part of what was measured");
    let at = command.get(&DBR_ADDR);
    let record = command.umem(umems[1], at, 8, 8, "record")?;
    let mut image = vec![0; BYTES];
    keep(&mut image, command.input, CREATED);
    let qp = Qp {
        context,
        pd,
        uar,
        cq,
        umems,
        queue,
        record,
        depth: 1 << log_size,
        state: QpState::Reset,
        image,
        syndrome: None,
        epoch: 0,
        bells: VecDeque::new(),
        produced: 0,
        fetched: 0,
        retired: 0,
        reported: 0,
        flight: VecDeque::new(),
        unreported: VecDeque::new(),
        completions: VecDeque::new(),
        silent_since: None,
        answered: false,
        cut: false,
        planted: None,
        elements: 0,
    };
    let number = command.card.number();
    command.card.qps.insert(number, qp);
    command.card.changes += 1;
    tables::NUMBER.set(command.output, number.into());
    Ok(number)
}

fn keep(image: &mut [u8], message: &[u8], fields: &[Field]) {
    for field in fields {
        field.set(image, field.get(message));
    }
}

/// The transition of an opcode: from which state, to which, and what it sets.
fn transition(opcode: u16) -> (Option<QpState>, QpState, &'static [Field]) {
    match opcode {
        RST2INIT => (Some(QpState::Reset), QpState::Init, INIT),
        INIT2RTR => (Some(QpState::Init), QpState::ReadyToReceive, RTR),
        RTR2RTS => (Some(QpState::ReadyToReceive), QpState::ReadyToSend, RTS),
        TO_ERR => (None, QpState::Error, &[]),
        TO_RST => (None, QpState::Reset, &[]),
        opcode => unreachable!("{opcode:#x} is no transition"),
    }
}

/// Changes the state of a queue pair.
pub(crate) fn modify(command: &mut Command<'_>, opcode: u16, number: u32) -> Result<(), Refusal> {
    let (from, to, sets) = transition(opcode);
    match opcode {
        TO_ERR | TO_RST => command.shape(0x10, 0x10, &[&[tables::NUMBER]])?,
        _ => command.shape(BYTES, 0x10, &[&[tables::NUMBER, OPT_PARAM_MASK, STATE], CREATED, INIT, RTR, RTS])?,
    }
    command.must_be(&tables::OP_MOD, 0)?;
    command.must_be(&tables::NUMBER, number.into())?;
    let state = command.card.qps[&number].state;
    if from.is_some_and(|from| from != state) {
        let text = format_args!("queue pair {number:#x} is {state:?}, must be {:?}", from.unwrap_or(state));
        return command.refuse(Rule::State, BAD_STATE, text);
    }
    if from.is_some() {
        let mask = command.get(&OPT_PARAM_MASK);
        if mask & !OPTIONAL != 0 {
            return command.refuse(Rule::Command, BAD_PARAM, format_args!("opt_param_mask is {mask:#x}"));
        }
    }
    match opcode {
        RST2INIT => init(command)?,
        INIT2RTR => receive(command)?,
        RTR2RTS => send(command, number)?,
        _ => {}
    }
    if to == QpState::Reset {
        // What was rung before this command reaches the card before it, and is forgotten with the rest.
        bell::look_at(command.card);
    }
    command.card.halt();
    // What takes nothing is not shown.
    if state.receives() || to.receives() {
        command.card.changes_face();
    }
    let input = command.input;
    let qp = command.card.qps.get_mut(&number).expect("looked up above");
    keep(&mut qp.image, input, sets);
    qp.state = to;
    qp.epoch += u64::from(matches!(to, QpState::Reset | QpState::Error));
    match to {
        QpState::Reset => {
            qp.restart();
            command.card.silence(number);
        }
        QpState::Error => qp.flight.clear(),
        _ => {}
    }
    Ok(())
}

fn init(command: &mut Command<'_>) -> Result<(), Refusal> {
    command.must_be(&PM_STATE, 3)?;
    command.must_be(&PKEY_INDEX, 0)?;
    command.must_be(&VHCA_PORT_NUM, 1)?;
    if command.get(&RAE) == 1 {
        if !command.card.model.atomics {
            return command.refuse(Rule::Command, BAD_PARAM, "rae is 1: this card has no atomics");
        }
        command.must_be(&ATOMIC_MODE, 3)?;
    }
    Ok(())
}

fn receive(command: &mut Command<'_>) -> Result<(), Refusal> {
    let limit = command.card.model.mtu.into();
    command.at_most(&MTU, limit)?;
    if command.get(&MTU) == 0 {
        return command.refuse(Rule::Command, BAD_PARAM, format_args!("mtu is 0, 1 to {limit}"));
    }
    command.at_most(&LOG_MSG_MAX, 30)?;
    if command.get(&LOG_MSG_MAX) == 0 {
        return command.refuse(Rule::Command, BAD_PARAM, "log_msg_max is 0: no message would be short enough");
    }
    if command.get(&REMOTE_QPN) == 0 {
        return command.refuse(Rule::Connection, BAD_PARAM, "remote_qpn is 0");
    }
    match command.card.model.link {
        Link::InfiniBand if command.get(&RLID) == 0 => {
            command.refuse(Rule::Connection, BAD_PARAM, "rlid is 0 on InfiniBand")
        }
        Link::InfiniBand => Ok(()),
        Link::Ethernet => routed(command),
    }
}

/// What RoCE needs: MAC address, GIDs, hops and a UDP port.
fn routed(command: &mut Command<'_>) -> Result<(), Refusal> {
    if RMAC.get(command.input) == 0 || RGID.get(command.input) == 0 {
        return command.refuse(Rule::Connection, BAD_PARAM, "rmac or rgid is 0 on Ethernet");
    }
    if command.get(&HOP_LIMIT) == 0 {
        return command.refuse(Rule::Command, BAD_PARAM, "hop_limit is 0");
    }
    let (index, gids) = (command.get(&SRC_ADDR_INDEX), command.card.gids().len() as u64);
    if index >= gids {
        let text = format_args!("src_addr_index is {index}, of {gids} GIDs");
        return command.refuse(Rule::Command, BAD_PARAM, text);
    }
    let port = command.get(&UDP_SPORT);
    if port < 0xc000 {
        return command.refuse(Rule::Command, BAD_PARAM, format_args!("udp_sport is {port:#x}, at least 0xc000"));
    }
    Ok(())
}

fn send(command: &mut Command<'_>, number: u32) -> Result<(), Refusal> {
    // What the peer's context says of its own end is compared when the first message comes.
    command.at_most(&LOG_SRA_MAX, 7)?;
    // From now on the card may look at the record.
    let record = command.card.qps[&number].record.clone();
    if command.card.bytes(&record, 0, 8) != [0; 8] {
        return command.refuse(Rule::Filled, BAD_PARAM, "the record is not zero, and the queue begins at zero");
    }
    Ok(())
}

/// Answers the context.
pub(crate) fn query(command: &mut Command<'_>, number: u32) -> Result<(), Refusal> {
    command.card.halt();
    command.shape(0x10, CONTEXT.end, &[&[tables::NUMBER]])?;
    command.must_be(&tables::NUMBER, number.into())?;
    let qp = &command.card.qps[&number];
    let mut image = qp.image.clone();
    STATE.set(&mut image, qp.state.code());
    for (field, index) in COUNTERS.iter().zip([qp.retired, qp.produced]) {
        field.set(&mut image, u128::from(index & 0xffff));
    }
    command.output[CONTEXT].copy_from_slice(&image[CONTEXT]);
    Ok(())
}
