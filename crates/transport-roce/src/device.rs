//! Which device, port and address (GID) a rank uses.

use std::net::IpAddr;
use std::str::FromStr;

use ep_rdma::{Gid, Port};

use crate::error::Error;
use crate::verbs::Context;

/// How one rank's device is chosen.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// Of all active ports the one whose number is the rank's local index, in turn: each rail has its own.
    #[default]
    Automatic,
    /// By name, with a port; without one, the first that is active.
    Named {
        /// As `rdma link` lists it.
        device: String,
        /// Counted from 1.
        port: Option<u8>,
    },
    /// By the IP address that one of its GIDs is.
    Address(IpAddr),
}

impl FromStr for Choice {
    type Err = ep_core::Error;

    /// `auto`, an address, `NAME` or `NAME:PORT`.
    fn from_str(text: &str) -> Result<Self, ep_core::Error> {
        let invalid = || ep_core::Error::invalid("RDMA device", text, "auto, an IP address, NAME or NAME:PORT");
        if text == "auto" {
            return Ok(Self::Automatic);
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Address(address));
        }
        let (device, port) = text.split_once(':').map_or((text, None), |(device, port)| (device, Some(port)));
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if device.is_empty() || !device.chars().all(plain) {
            return Err(invalid());
        }
        let port = port.map(|port| port.parse().ok().filter(|&port| port > 0).ok_or_else(invalid)).transpose()?;
        Ok(Self::Named { device: device.to_owned(), port })
    }
}

/// The choices of all ranks: `[nodes][ranks of a node]`, each list used in turn where it is shorter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choices(Vec<Vec<Choice>>);

impl Default for Choices {
    fn default() -> Self {
        Self(vec![vec![Choice::Automatic]])
    }
}

impl Choices {
    /// That of the rank with the index `local` in `node`.
    pub(crate) fn of(&self, node: u32, local: u32) -> Choice {
        let in_turn = |count: usize, index: u32| index as usize % count.max(1);
        let list = self.0.get(in_turn(self.0.len(), node));
        list.and_then(|list| list.get(in_turn(list.len(), local))).cloned().unwrap_or_default()
    }
}

impl FromStr for Choices {
    type Err = ep_core::Error;

    /// Choices of the ranks of a node with commas between, and those of different nodes, where they differ, with `/` between:
    /// `mlx5_0,mlx5_1` or `10.9.0.1/10.9.0.2`.
    fn from_str(text: &str) -> Result<Self, ep_core::Error> {
        let node = |node: &str| node.split(',').map(str::parse).collect();
        Ok(Self(text.split('/').map(node).collect::<Result<_, _>>()?))
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

/// An active port of a device that is not open.
struct Candidate {
    device: String,
    port: u8,
    gid: Gid,
}

/// Opens the port that `choice` names for a rank with the local index `local`.
pub(crate) fn choose(choice: &Choice, local: u32) -> Result<Chosen, Error> {
    let names = Context::names()?;
    if names.is_empty() {
        return Err(Error::NoDevice);
    }
    let mut why = Vec::new();
    match choice {
        Choice::Automatic => {
            let all: Vec<Candidate> = names.iter().flat_map(|name| candidates(name, None, &mut why)).collect();
            let Some(found) = all.get(local as usize % all.len().max(1)) else {
                return Err(Error::NoPort { why: why.join("; ") });
            };
            let Candidate { device, port, gid } = found;
            let reason = format!(
                "device {device}, port {port}, address {gid} (GID {}): chosen automatically for local rank {local} among {} active port(s)",
                gid.index,
                all.len()
            );
            open(device, *port, *gid, reason)
        }
        Choice::Named { device, port } => {
            if !names.contains(device) {
                return Err(Error::NoSuchDevice { name: device.clone(), found: names.join(", ") });
            }
            let Some(found) = candidates(device, *port, &mut why).into_iter().next() else {
                return Err(Error::NoPort { why: why.join("; ") });
            };
            let reason = format!(
                "device {device}, as asked for, port {}, address {} (GID {})",
                found.port, found.gid, found.gid.index
            );
            open(device, found.port, found.gid, reason)
        }
        Choice::Address(address) => {
            let mut found = Vec::new();
            for name in &names {
                let context = Context::open(name)?;
                for port in context.ports()? {
                    let gids = context.gids(&port);
                    if let Some(gid) = gids.iter().find(|gid| gid.is(*address) && port.carries(gid)) {
                        port.check().map_err(|why| Error::NoPort { why })?;
                        let reason = format!(
                            "address {address}, as asked for: device {name}, port {}, GID {}",
                            port.number, gid.index
                        );
                        let gid = *gid;
                        return Ok(Chosen { context, port, gid, reason });
                    }
                    found.extend(gids.iter().map(|gid| format!("{gid} ({name})")));
                }
            }
            found.dedup();
            Err(Error::NoSuchAddress { address: address.to_string(), found: found.join(", ") })
        }
    }
}

fn open(device: &str, port: u8, gid: Gid, reason: String) -> Result<Chosen, Error> {
    let context = Context::open(device)?;
    let port = context.port(port)?;
    Ok(Chosen { context, port, gid, reason })
}

/// The ports of a device that can be used, or the one that was asked for; what is wrong with the others is added to `why`.
fn candidates(device: &str, wanted: Option<u8>, why: &mut Vec<String>) -> Vec<Candidate> {
    let mut found = Vec::new();
    let looked = Context::open(device).and_then(|context| {
        let ports = context.ports()?;
        if let Some(number) = wanted.filter(|&number| ports.iter().all(|port| port.number != number)) {
            why.push(format!("{device} has no port {number}, it has {}", ports.len()));
        }
        for port in ports.into_iter().filter(|port| wanted.is_none_or(|wanted| wanted == port.number)) {
            match context.usable(&port) {
                Ok(gid) => found.push(Candidate { device: device.to_owned(), port: port.number, gid }),
                Err(reason) => why.push(reason),
            }
        }
        Ok(())
    });
    why.extend(looked.err().map(|error| error.to_string()));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_they_are_written() {
        let named = |device: &str, port| Choice::Named { device: device.to_owned(), port };
        assert_eq!("mlx5_0".parse(), Ok(named("mlx5_0", None)));
        assert_eq!("mlx5_0:2".parse(), Ok(named("mlx5_0", Some(2))));
        assert_eq!("10.9.0.1".parse(), Ok(Choice::Address("10.9.0.1".parse().unwrap())));
        assert_eq!("fd00::1".parse(), Ok(Choice::Address("fd00::1".parse().unwrap())));
        assert_eq!("auto".parse(), Ok(Choice::Automatic));
        for wrong in ["", "a b", "mlx5_0:0", "mlx5_0:x", "mlx5_0:256"] {
            assert!(wrong.parse::<Choice>().unwrap_err().to_string().contains("NAME:PORT"), "{wrong}");
        }
    }

    #[test]
    fn lists_are_used_in_turn() {
        let choices: Choices = "a,b/c".parse().unwrap();
        let name = |node, local| match choices.of(node, local) {
            Choice::Named { device, .. } => device,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            [name(0, 0), name(0, 1), name(0, 2), name(1, 0), name(1, 1), name(2, 1)],
            ["a", "b", "a", "c", "c", "b"]
        );
        assert_eq!(Choices::default().of(3, 3), Choice::Automatic);
    }
}
