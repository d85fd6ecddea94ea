//! libmlx5: firmware commands.

use std::ffi::{c_int, c_void};

use super::{EINVAL, EOPNOTSUPP, EREMOTEIO, errno, finish, in_use, null, object};
use crate::abi::{Context, Obj};
use crate::bits::Field;
use crate::complaint::Rule;
use crate::devx::{self, BAD_OP, BAD_RESOURCE, Command, Refusal, tables};
use crate::engine::bell;
use crate::handles::{self, Handle, Kind};
use crate::objects::CardState;

/// The caller's message and room for its answer.
///
/// # Safety
/// Both are as long as they say.
unsafe fn messages<'a>(
    input: *const c_void,
    inlen: usize,
    out: *mut c_void,
    outlen: usize,
) -> (&'a [u8], &'a mut [u8]) {
    // SAFETY: the caller's promise.
    unsafe { (std::slice::from_raw_parts(input.cast(), inlen), std::slice::from_raw_parts_mut(out.cast(), outlen)) }
}

/// Carries out a command of one of the opcodes that a function takes.
fn command<R>(
    handle: &Handle,
    function: &str,
    opcodes: &[u16],
    (input, output): (&[u8], &mut [u8]),
    context: impl FnOnce(&CardState) -> u32,
    f: impl FnOnce(&mut Command<'_>, u16) -> Result<R, Refusal>,
) -> Result<R, c_int> {
    if input.len() < 16 || output.len() < 16 {
        return Err(EINVAL);
    }
    output.fill(0);
    let opcode = tables::OPCODE.u32(input) as u16;
    let done = handle.card(function, |card| {
        if let Some((status, syndrome)) =
            card.failure(&format!("command {opcode:#x}")).and_then(|failure| failure.status)
        {
            return Ok(Err(Refusal { status, syndrome }));
        }
        let context = context(card);
        if !card.contexts.get(&context).is_some_and(|context| context.devx) {
            return Err(EOPNOTSUPP);
        }
        let name = devx::name(opcode).unwrap_or("a command");
        let mut command = Command { card, context, name, input, output };
        Ok(if opcodes.contains(&opcode) {
            f(&mut command, opcode)
        } else {
            command.refuse(Rule::Command, BAD_OP, format_args!("opcode {opcode:#x} is none that {function} takes"))
        })
    })?;
    done.map_err(|Refusal { status, syndrome }| {
        let fields: [(Field, u32); 2] = [(tables::out::STATUS, status.into()), (tables::out::SYNDROME, syndrome)];
        output.fill(0);
        for (field, value) in fields {
            field.set(output, value.into());
        }
        EREMOTEIO
    })
}

/// # Safety
/// `input` and `out` are as long as they say.
pub(super) unsafe extern "C" fn mlx5dv_devx_obj_create(
    context: *mut Context,
    input: *const c_void,
    inlen: usize,
    out: *mut c_void,
    outlen: usize,
) -> *mut Obj {
    // SAFETY: the caller's promise.
    let messages = unsafe { messages(input, inlen, out, outlen) };
    let made = object(context.cast(), &[Kind::Context]).and_then(|handle| {
        let opcodes = [devx::CREATE_CQ, devx::CREATE_QP];
        command(
            &handle,
            "mlx5dv_devx_obj_create",
            &opcodes,
            messages,
            |_| handle.id,
            |command, opcode| {
                Ok(match opcode {
                    devx::CREATE_CQ => handle.sibling(Kind::Cq, devx::cq::create(command)?),
                    _ => handle.sibling(Kind::Qp, devx::qp::create(command)?),
                })
            },
        )
    });
    match made {
        Ok(handle) => handles::give(handle, Obj { opaque: 0 }),
        Err(value) => null(value),
    }
}

/// The context of a queue.
fn owner(card: &CardState, handle: &Handle) -> u32 {
    match handle.kind {
        Kind::Qp => card.qps.get(&handle.id).map_or(0, |qp| qp.context),
        _ => card.cqs.get(&handle.id).map_or(0, |cq| cq.context),
    }
}

/// # Safety
/// `input` and `out` are as long as they say.
pub(super) unsafe extern "C" fn mlx5dv_devx_obj_query(
    obj: *mut Obj,
    input: *const c_void,
    inlen: usize,
    out: *mut c_void,
    outlen: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let messages = unsafe { messages(input, inlen, out, outlen) };
    let done = object(obj.cast(), &[Kind::Qp, Kind::Cq]).and_then(|handle| {
        let owner = |card: &CardState| owner(card, &handle);
        command(&handle, "mlx5dv_devx_obj_query", &[devx::QUERY_QP], messages, owner, |command, _| match handle.kind {
            Kind::Qp => devx::qp::query(command, handle.id),
            _ => command.refuse(Rule::Unknown, BAD_RESOURCE, "the object is a completion queue"),
        })
    });
    done.map_or_else(errno, |()| 0)
}

/// # Safety
/// `input` and `out` are as long as they say.
pub(super) unsafe extern "C" fn mlx5dv_devx_obj_modify(
    obj: *mut Obj,
    input: *const c_void,
    inlen: usize,
    out: *mut c_void,
    outlen: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let messages = unsafe { messages(input, inlen, out, outlen) };
    let opcodes = [devx::RST2INIT, devx::INIT2RTR, devx::RTR2RTS, devx::TO_ERR, devx::TO_RST];
    let done = object(obj.cast(), &[Kind::Qp, Kind::Cq]).and_then(|handle| {
        let owner = |card: &CardState| owner(card, &handle);
        command(&handle, "mlx5dv_devx_obj_modify", &opcodes, messages, owner, |command, opcode| match handle.kind {
            Kind::Qp => devx::qp::modify(command, opcode, handle.id),
            _ => command.refuse(Rule::Unknown, BAD_RESOURCE, "the object is a completion queue"),
        })
    });
    done.map_or_else(errno, |()| 0)
}

pub(super) extern "C" fn mlx5dv_devx_obj_destroy(obj: *mut Obj) -> c_int {
    let gone = object(obj.cast(), &[Kind::Qp, Kind::Cq]).and_then(|handle| {
        handle.with(|state| {
            // What was rung before this command reaches the card before it.
            bell::look(state);
            let (card, id) = (&mut state.cards[handle.card], handle.id);
            if let Some(failure) = card.failure("mlx5dv_devx_obj_destroy") {
                return Err(failure.errno);
            }
            if handle.kind == Kind::Qp {
                card.halt();
                if card.qps.get(&id).is_some_and(|qp| qp.state.receives()) {
                    card.changes_face();
                }
                card.qps.remove(&id);
                card.silence(id);
                card.gone.insert(id);
                card.changes += 1;
                return Ok(());
            }
            let users = card.qps.values().filter(|qp| qp.cq == id).count();
            if users > 0 {
                return in_use(card, format!("completion queue {id:#x} is destroyed under {users} queue pairs"));
            }
            card.cqs.remove(&id);
            Ok(())
        })
    });
    finish(gone, obj.cast())
}

/// # Safety
/// `input` and `out` are as long as they say.
pub(super) unsafe extern "C" fn mlx5dv_devx_general_cmd(
    context: *mut Context,
    input: *const c_void,
    inlen: usize,
    out: *mut c_void,
    outlen: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let messages = unsafe { messages(input, inlen, out, outlen) };
    let done = object(context.cast(), &[Kind::Context]).and_then(|handle| {
        let opcodes = [devx::QUERY_HCA_CAP];
        command(
            &handle,
            "mlx5dv_devx_general_cmd",
            &opcodes,
            messages,
            |_| handle.id,
            |command, _| devx::cap::query(command),
        )
    });
    done.map_or_else(errno, |()| 0)
}
