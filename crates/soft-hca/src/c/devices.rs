//! libibverbs: devices and ports.

use std::ffi::{c_char, c_int};

use super::{EINVAL, ENODEV, EOPNOTSUPP, errno, in_use, null, object};
use crate::Link;
use crate::abi::{Context, Device, PortAttr};
use crate::complaint::Rule;
use crate::handles::{self, Kind};
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
