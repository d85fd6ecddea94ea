//! Which adapter, port and address (GID) a rank uses.

use std::ffi::c_int;
use std::fmt;
use std::fs;
use std::net::Ipv6Addr;

use super::Context;
use crate::error::Error;
use crate::library::Library;
use crate::sys;

/// A port of an adapter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Port {
    /// Counted from 1. A card with several ports is as many adapters.
    pub(crate) number: u8,
    pub(crate) lid: u16,
    /// The active one, as verbs number it: 1 is 256 bytes, 5 is 4096.
    pub(crate) mtu: u32,
    pub(crate) ethernet: bool,
    active: bool,
    gids: c_int,
}

/// An address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Gid {
    pub(crate) index: u8,
    pub(crate) bytes: [u8; 16],
    /// RoCE version 2, whose packets are UDP; other kinds serve InfiniBand only.
    routable: bool,
}

impl Gid {
    fn address(&self) -> Ipv6Addr {
        self.bytes.into()
    }

    /// Better ones first: of addresses that name the same port, those that more networks carry.
    fn order(&self) -> u8 {
        let address = self.address();
        match () {
            () if address.to_ipv4_mapped().is_some() => 0,
            () if !address.is_unicast_link_local() => 1,
            () => 2,
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address().to_ipv4_mapped() {
            Some(address) => address.fmt(f),
            None => self.address().fmt(f),
        }
    }
}

/// A port that was chosen, opened.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) context: Context,
    pub(crate) port: Port,
    pub(crate) gid: Gid,
    /// Why this one, in words.
    pub(crate) reason: String,
}

/// Opens an active port for a rank with the local index `local`: of the adapters of these names, or of all where there are none.
pub(crate) fn choose(library: &Library, names: &[String], local: u32) -> Result<Chosen, Error> {
    let found = Context::names(library)?;
    if let Some(name) = names.iter().find(|name| !found.contains(name)) {
        return Err(Error::NoSuchDevice { name: name.clone(), found: found.join(", ") });
    }
    let (asked, mut why) = (!names.is_empty(), Vec::new());
    let mut usable = Vec::new();
    for name in if asked { names } else { &found } {
        match usable_port(library, name) {
            Ok(Ok(found)) => usable.push(found),
            Ok(Err(reason)) => why.push(reason),
            Err(error) => why.push(error.to_string()),
        }
    }
    let count = usable.len();
    let Some((context, port, gid)) = usable.into_iter().nth(local as usize % count.max(1)) else {
        return Err(Error::NoPort { why: why.join("; ") });
    };
    let how = if asked { "asked for" } else { "active" };
    let reason = format!(
        "adapter {}, address {gid} (GID {}): for local rank {local}, among {count} {how}",
        context.name(),
        gid.index
    );
    Ok(Chosen { context, port, gid, reason })
}

/// The port of an adapter with its best address, or what is wrong with it.
fn usable_port(library: &Library, name: &str) -> Result<Result<(Context, Port, Gid), String>, Error> {
    let context = Context::open(library, name)?;
    let port = port(&context, 1)?;
    if !port.active {
        return Ok(Err(format!("the port of {name} is not active")));
    }
    let missing = || format!("the port of {name} has no RoCEv2 address (GID): give its interface an IP address");
    let best = best(&port, gids(&context, &port)).ok_or_else(missing);
    Ok(best.map(|gid| (context, port, gid)))
}

fn port(context: &Context, number: u8) -> Result<Port, Error> {
    let mut found = sys::PortAttr::default();
    // SAFETY: an opened device and a place for the structure, of which the function fills a part.
    let code = unsafe { context.library().ibv_query_port()(context.raw(), number, &mut found) };
    context.outcome("ibv_query_port", code)?;
    let sys::PortAttr { state, active_mtu, lid, link_layer, gid_tbl_len, .. } = found;
    let ethernet = link_layer == sys::LINK_ETHERNET;
    Ok(Port {
        number,
        lid,
        mtu: active_mtu,
        ethernet,
        active: state == sys::PORT_ACTIVE,
        gids: gid_tbl_len.clamp(0, 255),
    })
}

/// The addresses of a port; unused places of the table are left out.
fn gids(context: &Context, port: &Port) -> Vec<Gid> {
    // A library that does not say how long the table is has one place at least.
    let read = |index: c_int| {
        let mut gid = sys::Gid::default();
        // SAFETY: an opened device and a place for the address.
        let code = unsafe { context.library().ibv_query_gid()(context.raw(), port.number, index, &mut gid) };
        let kind = || {
            let path =
                format!("/sys/class/infiniband/{}/ports/{}/gid_attrs/types/{index}", context.name(), port.number);
            fs::read_to_string(path).ok()
        };
        let used = code == 0 && gid.0 != [0; 16];
        used.then(|| Gid {
            index: index as u8,
            bytes: gid.0,
            routable: kind().is_none_or(|kind| kind.trim() == "RoCE v2"),
        })
    };
    (0..port.gids.max(1)).filter_map(read).collect()
}

fn best(port: &Port, gids: Vec<Gid>) -> Option<Gid> {
    gids.into_iter().filter(|gid| gid.routable || !port.ethernet).min_by_key(|gid| (gid.order(), gid.index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_addresses_ipv4_comes_first_and_version_1_never() {
        let gid = |index, address: &str, routable| Gid {
            index,
            bytes: address.parse::<Ipv6Addr>().unwrap().octets(),
            routable,
        };
        let gids = vec![
            gid(0, "fe80::1", true),
            gid(1, "fd00::1", true),
            gid(2, "::ffff:10.9.0.1", false),
            gid(3, "::ffff:10.9.0.1", true),
        ];
        let port = Port { number: 1, lid: 0, mtu: 5, ethernet: true, active: true, gids: 4 };
        assert_eq!(best(&port, gids[..2].to_vec()).map(|gid| gid.index), Some(1));
        assert_eq!(best(&port, gids.clone()).map(|gid| gid.index), Some(3));
        assert_eq!(gids[3].to_string(), "10.9.0.1");
        assert_eq!(best(&port, vec![gids[2]]), None);
        assert_eq!(best(&Port { ethernet: false, ..port }, vec![gids[2]]).map(|gid| gid.index), Some(2));
    }
}
