//! CREATE_CQ.

use super::{BAD_PARAM, BAD_RESOURCE, Command, LIMIT, Refusal, tables};
use crate::complaint::Rule;
use crate::engine::layout::{UNIT, cqe};
use crate::objects::Cq;
use tables::cq::*;

/// Makes a completion queue, and answers its number.
pub(crate) fn create(command: &mut Command<'_>) -> Result<u32, Refusal> {
    command.shape(BYTES, 0x10, &[ALL])?;
    command.must_be(&tables::OP_MOD, 0)?;
    for valid in [DBR_UMEM_VALID, CQ_UMEM_VALID] {
        command.must_be(&valid, 1)?;
    }
    command.must_be(&CQE_SZ, 0)?;
    let log_size = command.get(&LOG_CQ_SIZE) as u32;
    let limit = u32::from(command.card.model.log_max_cq_size);
    if log_size > limit {
        return command.refuse(Rule::Command, LIMIT, format_args!("log_cq_size is {log_size}, at most {limit}"));
    }
    let (collapsed, overrun_ignore) = (command.get(&CC) == 1, command.get(&OI) == 1);
    if overrun_ignore && !command.card.model.cq_overrun_ignore {
        return command.refuse(Rule::Command, BAD_PARAM, "oi is 1: this card has no cq_oi");
    }
    let eqn = command.get(&C_EQN);
    let own = u64::from(command.card.eqn);
    if eqn != own {
        return command.refuse(
            Rule::Unknown,
            BAD_RESOURCE,
            format_args!("event queue {eqn:#x} does not exist, {own:#x} does"),
        );
    }
    let uar = command.get(&UAR_PAGE) as u32;
    command.uar(uar)?;
    let page = 4096 << command.get(&LOG_PAGE_SIZE);
    let within = command.get(&PAGE_OFFSET) * 64;
    let bytes = 64_usize << log_size;
    let ids = [&CQ_UMEM_ID, &DBR_UMEM_ID].map(|id| command.get(id) as u32);
    let offset = command.get(&CQ_UMEM_OFFSET);
    let whole = command.umem(ids[0], offset, bytes + within as usize, page, "entries")?;
    let entries = whole.part(within, bytes).expect("a part of what was measured");
    let at = command.get(&DBR_ADDR);
    let record = command.umem(ids[1], at, 8, 8, "record")?;
    let seen = command.card.bytes(&entries, 0, bytes);
    if let Some(slot) = (0..1_usize << log_size).find(|slot| seen[slot * UNIT + cqe::OPCODE_OWNER] >> 4 != cqe::INVALID)
    {
        let text = format_args!("entry {slot} is not filled with ffh: it may be taken for a completion");
        return command.refuse(Rule::Filled, BAD_PARAM, text);
    }
    if command.card.bytes(&record, 0, 8) != [0; 8] {
        return command.refuse(Rule::Filled, BAD_PARAM, "the record is not zero");
    }
    let context = command.context;
    let cq = Cq {
        context,
        umems: ids,
        uar,
        entries,
        record,
        log_size,
        collapsed,
        overrun_ignore,
        written: 0,
        writing: None,
        broken: false,
    };
    let number = command.card.number();
    command.card.cqs.insert(number, cq);
    tables::NUMBER.set(command.output, number.into());
    Ok(number)
}
