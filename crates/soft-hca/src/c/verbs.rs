//! libibverbs.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::BorrowedFd;

use super::{EHOSTUNREACH, EINVAL, ENODEV, EOPNOTSUPP, errno, in_use, null, object};
use crate::Link;
use crate::abi::{self, Ah, AhAttr, Context, Device, Mr, Pd, PortAttr};
use crate::complaint::Rule;
use crate::handles::{self, Handle, Kind};
use crate::memory::Memory;
use crate::objects;

/// # Safety
/// `count` is null or writable.
pub(super) unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut Device {
    let mut list: Vec<*mut Device> = handles::devices().iter().map(|device| device.as_ptr()).collect();
    if !count.is_null() {
        // SAFETY: the caller's promise.
        unsafe { count.write(list.len() as c_int) };
    }
    list.push(std::ptr::null_mut());
    Box::leak(list.into_boxed_slice()).as_mut_ptr()
}

/// # Safety
/// `list` came from `ibv_get_device_list` and was not freed, or is null.
pub(super) unsafe extern "C" fn ibv_free_device_list(list: *mut *mut Device) {
    if list.is_null() {
        return;
    }
    let mut len = 0;
    loop {
        // SAFETY: the list ends with a null pointer, at which this stops.
        let device = unsafe { *list.add(len) };
        len += 1;
        if device.is_null() {
            break;
        }
        handles::release_device(device);
    }
    // SAFETY: `ibv_get_device_list` leaked a boxed slice of this length at this address.
    drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, len)) });
}

pub(super) extern "C" fn ibv_get_device_name(device: *mut Device) -> *const c_char {
    match handles::device(device) {
        Some((_, _, name)) => name,
        None => null::<c_char>(ENODEV),
    }
}

pub(super) extern "C" fn ibv_open_device(device: *mut Device) -> *mut Context {
    open(device, "ibv_open_device", false)
}

/// Opens a device. A plain open has firmware commands where the card has, and says nothing where it has not.
pub(super) fn open(device: *mut Device, function: &str, devx: bool) -> *mut Context {
    let Some((handle, ..)) = handles::device(device) else { return null(ENODEV) };
    let made = handle.card(function, |card| {
        if devx && !(card.model.devx && card.model.mlx5) {
            return Err(EOPNOTSUPP);
        }
        let id = card.number();
        card.contexts.insert(id, objects::Context { devx: card.model.devx && card.model.mlx5 });
        Ok(id)
    });
    match made {
        Ok(id) => {
            handles::hold_device(device);
            handles::give(handle.sibling(Kind::Context, id), Context { device })
        }
        Err(value) => null(value),
    }
}

/// # Safety
/// `context` is null, or a pointer that may be read where it came from these functions.
pub(super) unsafe extern "C" fn ibv_close_device(context: *mut Context) -> c_int {
    let closed = object(context.cast(), &[Kind::Context]).and_then(|handle| {
        handle.with(|state| {
            let card = &mut state.cards[handle.card];
            let left = [
                ("protection domains", card.pds.values().filter(|pd| pd.context == handle.id).count()),
                ("memories of queues", card.umems.values().filter(|umem| umem.context == handle.id).count()),
                ("doorbell pages", card.uars.values().filter(|uar| uar.context == handle.id).count()),
                ("completion queues", card.cqs.values().filter(|cq| cq.context == handle.id).count()),
                ("queue pairs", card.qps.values().filter(|qp| qp.context == handle.id).count()),
            ];
            let left: Vec<_> =
                left.iter().filter(|(_, count)| *count > 0).map(|(what, count)| format!("{count} {what}")).collect();
            if !left.is_empty() {
                return in_use(card, format!("context {:#x} is closed with {}", handle.id, left.join(", ")));
            }
            card.contexts.remove(&handle.id);
            Ok(())
        })
    });
    match closed {
        Ok(()) => {
            // SAFETY: the lookup above found it: these functions made it, and it is still there.
            handles::release_device(unsafe { (*context).device });
            handles::forget(context.cast());
            0
        }
        Err(value) => errno(value),
    }
}

/// # Safety
/// `attr` has room for 48 bytes.
pub(super) unsafe extern "C" fn ibv_query_port(context: *mut Context, port: u8, attr: *mut PortAttr) -> c_int {
    let answer = object(context.cast(), &[Kind::Context]).and_then(|handle| {
        handle.card("ibv_query_port", |card| {
            if port != 1 {
                card.complain(Rule::Command, format!("port is {port}, 1 is the only one"));
                return Err(EINVAL);
            }
            Ok(PortAttr {
                state: if card.model.up { 4 } else { 1 },
                max_mtu: 5,
                active_mtu: card.model.mtu.into(),
                gid_tbl_len: 255,
                max_msg_sz: 1 << 30,
                pkey_tbl_len: 1,
                lid: card.lid(),
                sm_lid: if card.model.link == Link::InfiniBand { 1 } else { 0 },
                max_vl_num: 1,
                subnet_timeout: 18,
                active_width: 2,
                active_speed: 128,
                phys_state: if card.model.up { 5 } else { 3 },
                link_layer: if card.model.link == Link::InfiniBand { 1 } else { 2 },
                ..PortAttr::default()
            })
        })
    });
    match answer {
        Ok(answer) => {
            // SAFETY: the caller's promise.
            unsafe { attr.write(answer) };
            0
        }
        Err(value) => errno(value),
    }
}

/// # Safety
/// `gid` has room for 16 bytes.
pub(super) unsafe extern "C" fn ibv_query_gid(
    context: *mut Context,
    port: u8,
    index: c_int,
    gid: *mut [u8; 16],
) -> c_int {
    let answer = object(context.cast(), &[Kind::Context]).and_then(|handle| {
        handle.card("ibv_query_gid", |card| {
            if port != 1 || !(0..255).contains(&index) {
                card.complain(Rule::Command, format!("GID {index} of port {port}: 0 to 254 of port 1"));
                return Err(EINVAL);
            }
            Ok(card.gids().get(index as usize).copied().unwrap_or_default())
        })
    });
    match answer {
        Ok(answer) => {
            // SAFETY: the caller's promise; bytes have no alignment.
            unsafe { gid.write(answer) };
            0
        }
        Err(value) => {
            errno(value);
            -1
        }
    }
}

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

/// The end of what gives a pointer back.
pub(super) fn finish(gone: Result<(), c_int>, at: *const c_void) -> c_int {
    match gone {
        Ok(()) => {
            handles::forget(at);
            0
        }
        Err(value) => errno(value),
    }
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
