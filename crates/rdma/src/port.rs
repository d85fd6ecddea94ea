//! Ports of adapters, and their addresses (GIDs).

use std::ffi::c_int;
use std::fmt;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};

use crate::device::Device;
use crate::error::Error;
use crate::sys::{self, Zeroed as _};

/// A port of an adapter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Port {
    device: String,
    /// Counted from 1.
    pub number: u8,
    state: u32,
    /// The active one, as verbs number it: 1 is 256 bytes, 5 is 4096.
    pub mtu: u32,
    /// Its address in an InfiniBand subnet.
    pub lid: u16,
    gids: c_int,
    /// Bytes of the longest message.
    pub max_message: u32,
    /// Its packets are RoCE; otherwise InfiniBand.
    pub ethernet: bool,
}

/// An address of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gid {
    /// Its place in the port's table.
    pub index: u8,
    /// An IPv6 address, or an IPv4 one in its form.
    pub bytes: [u8; 16],
    /// RoCE version 2, whose packets are UDP; other kinds serve InfiniBand only.
    routable: bool,
}

/// Room for what newer libraries may have behind the structure.
#[repr(C)]
struct Told {
    port: sys::PortAttr,
    more: [u32; 8],
}

impl Device {
    /// What the adapter says of a port.
    ///
    /// # Errors
    /// [`Error::Call`] where it has none of that number.
    pub fn port(&self, number: u8) -> Result<Port, Error> {
        let mut told = Told { port: sys::PortAttr::zeroed(), more: [0; 8] };
        // SAFETY: an opened device and a place for the structure, of which the function fills a part.
        let code = unsafe { (self.verbs().functions.ibv_query_port)(self.raw(), number, &mut told.port) };
        self.outcome("ibv_query_port", code)?;
        let found = told.port;
        Ok(Port {
            device: self.name().to_owned(),
            number,
            state: found.state,
            mtu: found.active_mtu,
            lid: found.lid,
            gids: found.gid_tbl_len.clamp(0, 255),
            max_message: found.max_msg_sz,
            ethernet: found.link_layer == sys::LINK_ETHERNET,
        })
    }

    /// The addresses of a port; unused places of the table are left out.
    pub fn gids(&self, port: &Port) -> Vec<Gid> {
        let read = |index: c_int| {
            let mut gid = sys::gid([0; 16]);
            // SAFETY: an opened device and a place for the address.
            let code = unsafe { (self.verbs().functions.ibv_query_gid)(self.raw(), port.number, index, &mut gid) };
            let bytes = sys::bytes_of(&gid);
            let routable = || self.gid_kind(port, index).is_none_or(|kind| kind.trim() == "RoCE v2");
            (code == 0 && bytes != [0; 16]).then(|| Gid { index: index as u8, bytes, routable: routable() })
        };
        // A library that does not say how long the table is has one place at least.
        (0..port.gids.max(1)).filter_map(read).collect()
    }

    /// What the kernel says of an address; none where it says nothing.
    fn gid_kind(&self, port: &Port, index: c_int) -> Option<String> {
        let (name, number) = (self.name(), port.number);
        fs::read_to_string(format!("/sys/class/infiniband/{name}/ports/{number}/gid_attrs/types/{index}")).ok()
    }

    /// The best address of a port that can be used; otherwise what is wrong with the port.
    ///
    /// # Errors
    /// In words, with the names of adapter and port.
    pub fn usable(&self, port: &Port) -> Result<Gid, String> {
        port.check().and_then(|()| port.best(self.gids(port)))
    }
}

impl Port {
    /// Whether it is active.
    ///
    /// # Errors
    /// In words, if not.
    pub fn check(&self) -> Result<(), String> {
        let Self { device, number, state, .. } = self;
        if *state == sys::PORT_ACTIVE {
            return Ok(());
        }
        Err(format!("port {number} of {device} is not active (state {state})"))
    }

    /// Whether its packets can have this address.
    pub const fn carries(&self, gid: &Gid) -> bool {
        gid.routable || !self.ethernet
    }

    fn best(&self, gids: Vec<Gid>) -> Result<Gid, String> {
        let usable = gids.into_iter().filter(|gid| self.carries(gid));
        usable.min_by_key(|gid| (gid.order(), gid.index)).ok_or_else(|| {
            let Self { device, number, .. } = self;
            format!("port {number} of {device} has no RoCEv2 address (GID): give its interface an IP address")
        })
    }
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

    /// Whether it is this IP address.
    pub fn is(&self, wanted: IpAddr) -> bool {
        let wanted = match wanted {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        self.address() == wanted
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
        let port =
            Port { device: "x".into(), number: 1, state: 4, mtu: 3, lid: 0, gids: 4, max_message: 1, ethernet: true };
        assert_eq!(port.best(gids[..2].to_vec()).unwrap().index, 1);
        assert_eq!(port.best(gids.clone()).unwrap().index, 3);
        assert_eq!(gids[3].to_string(), "10.9.0.1");
        assert!(gids[3].is("10.9.0.1".parse().unwrap()) && gids[0].is("fe80::1".parse().unwrap()));
        assert!(port.best(vec![gids[2]]).unwrap_err().contains("no RoCEv2 address"));
        assert_eq!(Port { ethernet: false, ..port }.best(vec![gids[2]]).unwrap().index, 2);
    }

    #[test]
    fn a_port_that_is_down_is_named_with_its_state() {
        let down =
            Port { device: "x".into(), number: 2, state: 1, mtu: 3, lid: 0, gids: 0, max_message: 1, ethernet: true };
        assert_eq!(down.check().unwrap_err(), "port 2 of x is not active (state 1)");
        assert!(Port { state: 4, ..down }.check().is_ok());
    }
}
