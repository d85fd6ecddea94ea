//! QUERY_HCA_CAP.

use super::{BAD_PARAM, Command, Refusal, tables};
use crate::Link;
use crate::bits::Field;
use crate::complaint::Rule;
use tables::cap::*;

/// General capabilities and those of atomics, now and at most.
pub(crate) fn query(command: &mut Command<'_>) -> Result<(), Refusal> {
    command.shape(0x10, 0x10 + BYTES, &[])?;
    let which = command.get(&tables::OP_MOD);
    let model = command.card.model.clone();
    let answer: Vec<(Field, u64)> = match which >> 1 {
        0 => vec![
            (LOG_MAX_QP_SZ, model.log_max_qp_size.into()),
            (LOG_MAX_CQ_SZ, model.log_max_cq_size.into()),
            (RELAXED_ORDERING_WRITE, model.relaxed_ordering.into()),
            (PORT_TYPE, u64::from(model.link == Link::Ethernet)),
            (CQE_VERSION, model.cqe_version.into()),
            (ROCE, u64::from(model.link == Link::Ethernet)),
            (ATOMIC, model.atomics.into()),
            (CQ_OI, model.cq_overrun_ignore.into()),
            (RC, 1),
            (BF, 1),
            (MAX_WQE_SZ_SQ, model.max_element.into()),
        ],
        // Compare-and-swap and fetch-add, of 8 bytes.
        3 if model.atomics => vec![(ATOMIC_OPERATIONS, 3), (ATOMIC_SIZE_QP, 8)],
        3 => vec![],
        page => {
            return command.refuse(
                Rule::Command,
                BAD_PARAM,
                format_args!("page {page:#x} of capabilities is not known"),
            );
        }
    };
    for (field, value) in answer {
        field.set(&mut command.output[0x10..], value.into());
    }
    Ok(())
}
