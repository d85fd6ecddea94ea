//! libibverbs: protection domains, with memory and addresses.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;

use super::{EHOSTUNREACH, EINVAL, EOPNOTSUPP, finish, in_use, null, object};
use crate::Link;
use crate::abi::{self, Ah, AhAttr, Context, Mr, Pd};
use crate::carrier::Region;
use crate::complaint::Rule;
use crate::handles::{self, Handle, Kind};
use crate::memory::Memory;
use crate::objects;

pub(super) extern "C" fn ibv_alloc_pd(context: *mut Context) -> *mut Pd {
    let made = object(context.cast(), &[Kind::Context]).and_then(|handle| {
        handle.card("ibv_alloc_pd", |card| {
            let id = card.number();
            card.pds.insert(id, objects::Pd { context: handle.id });
            Ok(handle.sibling(Kind::Pd, id))
        })
    });
    match made {
        // The kernel numbers what a process holds: not as the card does.
        Ok(handle) => handles::give(handle, Pd { context, handle: 1 }),
        Err(value) => null(value),
    }
}

pub(super) extern "C" fn ibv_dealloc_pd(pd: *mut Pd) -> c_int {
    let gone = object(pd.cast(), &[Kind::Pd]).and_then(|handle| {
        handle.with(|state| {
            let (card, id) = (&mut state.cards[handle.card], handle.id);
            let mrs = card.mrs.values().filter(|mr| mr.pd == id).count();
            let qps = card.qps.values().filter(|qp| qp.pd == id).count();
            let ahs = card.ahs.values().filter(|ah| ah.pd == id).count();
            if mrs + qps + ahs > 0 {
                return in_use(
                    card,
                    format!("domain {id:#x} is freed with {mrs} regions, {qps} queue pairs, {ahs} address handles"),
                );
            }
            card.pds.remove(&id);
            Ok(())
        })
    });
    finish(gone, pd.cast())
}

/// Registers memory.
fn register(
    pd: *mut Pd,
    function: &str,
    iova: u64,
    access: u32,
    at: *mut c_void,
    memory: impl FnOnce() -> Result<Memory, c_int>,
) -> *mut Mr {
    let made = object(pd.cast(), &[Kind::Pd]).and_then(|handle| {
        handle.card(function, |card| {
            let known =
                abi::LOCAL_WRITE | abi::REMOTE_WRITE | abi::REMOTE_READ | abi::REMOTE_ATOMIC | abi::RELAXED_ORDERING;
            if access & !known != 0 {
                card.complain(Rule::Memory, format!("{function}: access is {access:#x}, known bits are {known:#x}"));
                return Err(EINVAL);
            }
            if access & (abi::REMOTE_WRITE | abi::REMOTE_ATOMIC) != 0 && access & abi::LOCAL_WRITE == 0 {
                card.complain(
                    Rule::Memory,
                    format!("{function}: access is {access:#x}, remote writes need local ones"),
                );
                return Err(EINVAL);
            }
            if access & abi::RELAXED_ORDERING != 0 && !card.model.relaxed_ordering {
                return Err(EOPNOTSUPP);
            }
            let memory = memory()?;
            if memory.len() == 0 {
                card.complain(Rule::Memory, format!("{function}: length is 0"));
                return Err(EINVAL);
            }
            if access & Region::REMOTE != 0 {
                card.changes_face();
            }
            let id = card.number();
            // Keys of the two kinds differ, so that one taken for the other is found out.
            let (lkey, rkey) = (id << 8 | 0x51, (id ^ 0x80_0000) << 8 | 0xa2);
            let len = memory.len();
            card.mrs.insert(id, objects::Mr { pd: handle.id, lkey, rkey, iova, memory, access });
            Ok((handle.sibling(Kind::Mr, id), lkey, rkey, len))
        })
    });
    match made {
        Ok((handle, lkey, rkey, length)) => {
            // SAFETY: the lookup above found it: these functions made it, and it is still there.
            let context = unsafe { (*pd).context };
            handles::give(handle, Mr { context, pd, addr: at, length, handle: 2, lkey, rkey })
        }
        Err(value) => null(value),
    }
}

/// # Safety
/// The range stays mapped until `ibv_dereg_mr`.
pub(super) unsafe extern "C" fn ibv_reg_mr(pd: *mut Pd, addr: *mut c_void, length: usize, access: c_int) -> *mut Mr {
    // SAFETY: the caller's promise.
    let memory = || Ok(unsafe { Memory::of(addr as usize, length) });
    register(pd, "ibv_reg_mr", addr as u64, access as u32, addr, memory)
}

/// # Safety
/// The range stays mapped until `ibv_dereg_mr`.
pub(super) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut Mr {
    // SAFETY: the caller's promise.
    let memory = || Ok(unsafe { Memory::of(addr as usize, length) });
    let relaxed = object(pd.cast(), &[Kind::Pd])
        .is_ok_and(|handle| handle.with(|state| state.cards[handle.card].model.relaxed_ordering));
    let access = if relaxed { access } else { access & !abi::RELAXED_ORDERING };
    register(pd, "ibv_reg_mr_iova2", iova, access, addr, memory)
}

/// # Safety
/// `fd` is open.
pub(super) unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut Pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut Mr {
    let dmabuf =
        object(pd.cast(), &[Kind::Pd]).is_ok_and(|handle| handle.with(|state| state.cards[handle.card].model.dmabuf));
    let memory = || {
        if !dmabuf {
            return Err(EOPNOTSUPP);
        }
        // SAFETY: the caller's promise; it is used within this call only.
        let file = (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) }).ok_or(EINVAL)?;
        Memory::map(file, offset as usize, length).map_err(|error| error.raw_os_error())
    };
    register(pd, "ibv_reg_dmabuf_mr", iova, access as u32, std::ptr::null_mut(), memory)
}

pub(super) extern "C" fn ibv_dereg_mr(mr: *mut Mr) -> c_int {
    let gone = object(mr.cast(), &[Kind::Mr]).and_then(|handle| {
        handle.with(|state| {
            let (card, id) = (&mut state.cards[handle.card], handle.id);
            let Some(pd) = card.mrs.get(&id).map(|mr| mr.pd) else { return Err(EINVAL) };
            if let Some((number, qp)) = card.qps.iter().find(|(_, qp)| qp.pd == pd && qp.state.receives() && !card.dead)
            {
                let text = format!("region {id:#x} is deregistered while queue pair {number:#x} is {:?}", qp.state);
                return in_use(card, text);
            }
            card.halt();
            if card.mrs.get(&id).is_some_and(|mr| mr.access & Region::REMOTE != 0) {
                card.changes_face();
            }
            card.mrs.remove(&id);
            Ok(())
        })
    });
    finish(gone, mr.cast())
}

/// # Safety
/// `attr` is an `ibv_ah_attr`.
pub(super) unsafe extern "C" fn ibv_create_ah(pd: *mut Pd, attr: *mut AhAttr) -> *mut Ah {
    // SAFETY: the caller's promise.
    let attr = unsafe { *attr };
    let made = object(pd.cast(), &[Kind::Pd]).and_then(|handle| {
        let macs = handle.with(|state| {
            state.cards.iter().filter(|card| !card.dead).map(|card| (card.gids(), card.mac())).collect::<Vec<_>>()
        });
        handle.card("ibv_create_ah", |card| {
            let av = address(card, &attr, &macs)?;
            let id = card.number();
            card.ahs.insert(id, objects::Ah { pd: handle.id });
            Ok((handle.sibling(Kind::Ah, id), av))
        })
    });
    match made {
        Ok((handle, av)) => {
            // SAFETY: the lookup above found it: these functions made it, and it is still there.
            let context = unsafe { (*pd).context };
            handles::give(handle, AhShell { ah: Ah { context, pd, handle: 3 }, av }).cast()
        }
        Err(value) => null(value),
    }
}

/// An address handle with its vector.
#[repr(C)]
pub(super) struct AhShell {
    ah: Ah,
    pub(super) av: abi::Av,
}

/// The vector of an address.
fn address(card: &mut objects::CardState, attr: &AhAttr, macs: &[(Vec<[u8; 16]>, [u8; 6])]) -> Result<abi::Av, c_int> {
    if attr.port_num != 1 {
        card.complain(Rule::Command, format!("ibv_create_ah: port is {}, 1 is the only one", attr.port_num));
        return Err(EINVAL);
    }
    let mut av = abi::Av { stat_rate_sl: attr.sl, rlid: attr.dlid.to_be_bytes(), ..abi::Av::default() };
    if attr.is_global != 0 {
        av.rgid = attr.grh.dgid;
        (av.tclass, av.hop_limit) = (attr.grh.traffic_class, attr.grh.hop_limit);
        av.grh_gid_fl = (1 << 30 | u32::from(attr.grh.sgid_index) << 20 | attr.grh.flow_label & 0xf_ffff).to_be_bytes();
    }
    if card.model.link == Link::InfiniBand {
        return if attr.dlid == 0 { Err(EINVAL) } else { Ok(av) };
    }
    if attr.is_global == 0 || usize::from(attr.grh.sgid_index) >= card.gids().len() {
        card.complain(Rule::Command, "ibv_create_ah: on Ethernet an address is global, with an own GID that exists");
        return Err(EINVAL);
    }
    let found = macs.iter().find(|(gids, _)| gids.contains(&attr.grh.dgid));
    av.rmac = found.ok_or(EHOSTUNREACH)?.1;
    Ok(av)
}

pub(super) extern "C" fn ibv_destroy_ah(ah: *mut Ah) -> c_int {
    let gone = object(ah.cast(), &[Kind::Ah]).map(|handle: Handle| {
        handle.with(|state| {
            state.cards[handle.card].ahs.remove(&handle.id);
        })
    });
    finish(gone, ah.cast())
}
