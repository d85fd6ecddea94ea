//! libmlx5: opening, doorbell pages, the memory of queues.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;

use super::devices::open;
use super::domains::AhShell;
use super::{EINVAL, ENODEV, EOPNOTSUPP, errno, finish, in_use, null, object};
use crate::abi::{self, AhOut, Context, ContextAttr, Device, DvObj, PdOut, Uar, Umem, UmemIn};
use crate::complaint::Rule;
use crate::handles::{self, Handle, Kind};
use crate::memory::Memory;
use crate::objects::{self, CardState, UarKind};

pub(super) extern "C" fn mlx5dv_is_supported(device: *mut Device) -> bool {
    handles::device(device).is_some_and(|(handle, ..)| handle.with(|state| state.cards[handle.card].model.mlx5))
}

/// # Safety
/// `attr` is null or a `mlx5dv_context_attr`.
pub(super) unsafe extern "C" fn mlx5dv_open_device(device: *mut Device, attr: *mut ContextAttr) -> *mut Context {
    let Some((handle, ..)) = handles::device(device) else { return null(ENODEV) };
    if !handle.with(|state| state.cards[handle.card].model.mlx5) {
        return null(EOPNOTSUPP);
    }
    // SAFETY: the caller's promise.
    let (flags, mask) = if attr.is_null() { (0, 0) } else { unsafe { ((*attr).flags, (*attr).comp_mask) } };
    if flags & !abi::CONTEXT_FLAGS_DEVX != 0 || mask != 0 {
        return null(EOPNOTSUPP);
    }
    open(device, "mlx5dv_open_device", flags == abi::CONTEXT_FLAGS_DEVX)
}

/// # Safety
/// `obj` is a `mlx5dv_obj`, of which what `kinds` names is filled in.
pub(super) unsafe extern "C" fn mlx5dv_init_obj(obj: *mut DvObj, kinds: u64) -> c_int {
    if kinds & !(abi::OBJ_AH | abi::OBJ_PD) != 0 {
        return errno(EOPNOTSUPP);
    }
    if kinds & abi::OBJ_PD != 0 {
        // SAFETY: the caller's promise.
        let (input, output) = unsafe { ((*obj).pd.input, (*obj).pd.output) };
        match object(input.cast(), &[Kind::Pd]) {
            // SAFETY: the caller's promise.
            Ok(handle) => unsafe { output.write(PdOut { pdn: handle.id, comp_mask: 0 }) },
            Err(value) => return errno(value),
        }
    }
    if kinds & abi::OBJ_AH != 0 {
        // SAFETY: the caller's promise.
        let (input, output) = unsafe { ((*obj).ah.input, (*obj).ah.output) };
        if let Err(value) = object(input.cast(), &[Kind::Ah]) {
            return errno(value);
        }
        // SAFETY: the lookup found it, and all address handles are made with their vector.
        let av = unsafe { &raw mut (*input.cast::<AhShell>()).av };
        // SAFETY: the caller's promise.
        unsafe { output.write(AhOut { av, comp_mask: 0 }) };
    }
    0
}

/// A context that has firmware commands, and its card.
fn devx<R>(
    context: *mut Context,
    function: &str,
    f: impl FnOnce(&Handle, &mut CardState) -> Result<R, c_int>,
) -> Result<R, c_int> {
    let handle = object(context.cast(), &[Kind::Context])?;
    handle.card(function, |card| {
        let has = card.contexts.get(&handle.id).is_some_and(|context| context.devx);
        if has { f(&handle, card) } else { Err(EOPNOTSUPP) }
    })
}

/// # Safety
/// `eqn` is writable.
pub(super) unsafe extern "C" fn mlx5dv_devx_query_eqn(context: *mut Context, vector: u32, eqn: *mut u32) -> c_int {
    let answer = devx(context, "mlx5dv_devx_query_eqn", |_, card| match vector {
        0 => Ok(card.eqn),
        vector => {
            card.complain(Rule::Command, format!("mlx5dv_devx_query_eqn: vector is {vector}, 0 is the only one"));
            Err(EINVAL)
        }
    });
    match answer {
        Ok(answer) => {
            // SAFETY: the caller's promise.
            unsafe { eqn.write(answer) };
            0
        }
        Err(value) => errno(value),
    }
}

pub(super) extern "C" fn mlx5dv_devx_alloc_uar(context: *mut Context, flags: u32) -> *mut Uar {
    let made = devx(context, "mlx5dv_devx_alloc_uar", |handle, card| {
        let kind = match flags {
            0 => UarKind::Bf,
            1 => UarKind::Nc,
            0x8000_0000 if card.model.nc_dedicated => UarKind::NcDedicated,
            0x8000_0000 => return Err(EOPNOTSUPP),
            flags => {
                card.complain(Rule::Command, format!("mlx5dv_devx_alloc_uar: flags are {flags:#x}"));
                return Err(EINVAL);
            }
        };
        // One page of this kind a context: who asks again gets the same.
        let shared =
            card.uars.iter_mut().find(|(_, uar)| kind == UarKind::Nc && uar.kind == kind && uar.context == handle.id);
        if let Some((&id, uar)) = shared {
            uar.holders += 1;
            return Ok((handle.sibling(Kind::Uar, id), uar.page.base()));
        }
        let page = Memory::anonymous(4096).map_err(|error| error.raw_os_error())?;
        let (id, base) = (card.number(), page.base());
        card.uars.insert(id, objects::Uar { context: handle.id, kind, page, holders: 1 });
        Ok((handle.sibling(Kind::Uar, id), base))
    });
    match made {
        Ok((handle, base)) => {
            let uar = Uar {
                reg_addr: (base + crate::engine::bell::REGISTER) as *mut c_void,
                base_addr: base as *mut c_void,
                page_id: handle.id,
                mmap_off: i64::from(handle.id) << 12,
                comp_mask: 0,
            };
            handles::give(handle, uar)
        }
        Err(value) => null(value),
    }
}

pub(super) extern "C" fn mlx5dv_devx_free_uar(uar: *mut Uar) {
    let gone = object(uar.cast(), &[Kind::Uar]).and_then(|handle| {
        handle.with(|state| {
            let (card, id) = (&mut state.cards[handle.card], handle.id);
            let last = card.uars.get(&id).is_some_and(|uar| uar.holders == 1);
            let users = card.qps.values().filter(|qp| qp.uar == id).count()
                + card.cqs.values().filter(|cq| cq.uar == id).count();
            if last && users > 0 {
                return in_use(card, format!("doorbell page {id:#x} is freed with {users} queues on it"));
            }
            let beside = card.uars.get(&id).and_then(|uar| beside(&uar.page));
            if let Some(at) = beside {
                card.complain(
                    Rule::Bell,
                    format!("doorbell page {id:#x}: something was written at {at:#x}, beside the register"),
                );
            }
            match card.uars.get_mut(&id) {
                Some(uar) if !last => uar.holders -= 1,
                _ => drop(card.uars.remove(&id)),
            }
            Ok(())
        })
    });
    finish(gone, uar.cast());
}

/// The first byte of a doorbell page that was written to and is not the register's.
fn beside(page: &Memory) -> Option<usize> {
    let register = crate::engine::bell::REGISTER..crate::engine::bell::REGISTER + 8;
    let bytes = page.bytes(0, page.len());
    (0..bytes.len()).find(|at| bytes[*at] != 0 && !register.contains(at))
}

fn register(
    context: *mut Context,
    function: &str,
    access: u32,
    memory: impl FnOnce(&CardState) -> Result<Memory, c_int>,
) -> *mut Umem {
    let made = devx(context, function, |handle, card| {
        let known = abi::LOCAL_WRITE | abi::REMOTE_WRITE | abi::REMOTE_READ | abi::RELAXED_ORDERING;
        if access & !known != 0 {
            card.complain(Rule::Memory, format!("{function}: access is {access:#x}, known bits are {known:#x}"));
            return Err(EINVAL);
        }
        let memory = memory(card)?;
        if memory.len() == 0 {
            card.complain(Rule::Memory, format!("{function}: size is 0"));
            return Err(EINVAL);
        }
        let id = card.number();
        card.umems.insert(id, objects::Umem { context: handle.id, memory, access });
        Ok(handle.sibling(Kind::Umem, id))
    });
    match made {
        Ok(handle) => {
            let umem_id = handle.id;
            handles::give(handle, Umem { umem_id })
        }
        Err(value) => null(value),
    }
}

/// # Safety
/// The range stays mapped until `mlx5dv_devx_umem_dereg`.
pub(super) unsafe extern "C" fn mlx5dv_devx_umem_reg(
    context: *mut Context,
    addr: *mut c_void,
    size: usize,
    access: u32,
) -> *mut Umem {
    // SAFETY: the caller's promise.
    register(context, "mlx5dv_devx_umem_reg", access, |_| Ok(unsafe { Memory::of(addr as usize, size) }))
}

/// # Safety
/// `input` is a `mlx5dv_devx_umem_in`; its range stays mapped until `mlx5dv_devx_umem_dereg`, its descriptor is open.
pub(super) unsafe extern "C" fn mlx5dv_devx_umem_reg_ex(context: *mut Context, input: *mut UmemIn) -> *mut Umem {
    // SAFETY: the caller's promise.
    let input = unsafe { &*input };
    register(context, "mlx5dv_devx_umem_reg_ex", input.access, |card| match input.comp_mask {
        // SAFETY: the caller's promise.
        0 => Ok(unsafe { Memory::of(input.addr as usize, input.size) }),
        abi::UMEM_MASK_DMABUF if card.model.dmabuf && input.dmabuf_fd >= 0 => {
            // SAFETY: the caller's promise; it is used within this call only.
            let file = unsafe { BorrowedFd::borrow_raw(input.dmabuf_fd) };
            Memory::map(file, input.addr as usize, input.size).map_err(|error| error.raw_os_error())
        }
        abi::UMEM_MASK_DMABUF => Err(EOPNOTSUPP),
        _ => Err(EINVAL),
    })
}

pub(super) extern "C" fn mlx5dv_devx_umem_dereg(umem: *mut Umem) -> c_int {
    let gone = object(umem.cast(), &[Kind::Umem]).and_then(|handle| {
        handle.with(|state| {
            let (card, id) = (&mut state.cards[handle.card], handle.id);
            let qps = card.qps.values().filter(|qp| qp.umems.contains(&id)).count();
            let cqs = card.cqs.values().filter(|cq| cq.umems.contains(&id)).count();
            if qps + cqs > 0 {
                return in_use(
                    card,
                    format!("umem {id:#x} is deregistered under {qps} queue pairs and {cqs} completion queues"),
                );
            }
            card.umems.remove(&id);
            Ok(())
        })
    });
    finish(gone, umem.cast())
}
