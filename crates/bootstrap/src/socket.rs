//! What both ends of a connection ask of the system.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use crate::error::Error;

/// Small messages go out at once, and a machine that vanished without a word is noticed within half a minute or so
/// (after the system's own number of probes where it cannot be set).
#[cfg(unix)]
pub(crate) fn prepare(stream: &impl std::os::fd::AsFd) -> io::Result<()> {
    set(&SockRef::from(stream))
}

/// Small messages go out at once, and a machine that vanished without a word is noticed within half a minute or so
/// (after the system's own number of probes where it cannot be set).
#[cfg(windows)]
pub(crate) fn prepare(stream: &impl std::os::windows::io::AsSocket) -> io::Result<()> {
    set(&SockRef::from(stream))
}

fn set(socket: &SockRef<'_>) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(10)).with_interval(Duration::from_secs(5));
    #[cfg(any(target_os = "linux", target_os = "macos", target_os = "freebsd", target_os = "windows"))]
    let keepalive = keepalive.with_retries(3);
    socket.set_tcp_keepalive(&keepalive)
}

/// Whether the system refused for lack of file descriptors, the process's or its own.
pub(crate) fn is_out_of_descriptors(error: &io::Error) -> bool {
    // ENFILE and EMFILE of Unix, WSAEMFILE.
    matches!(error.raw_os_error(), Some(23 | 24 | 10_024))
}

/// The addresses that `address`, `host:port`, stands for. Without a secret they must all be loopback addresses.
pub(crate) fn resolve(address: &str, has_secret: bool) -> Result<Vec<SocketAddr>, Error> {
    let found = address.to_socket_addrs().map(Vec::from_iter);
    let addresses = match found {
        Ok(addresses) if !addresses.is_empty() => addresses,
        found => {
            let why = found.err().map_or_else(|| "unknown host".to_owned(), |error| error.to_string());
            let limit = format_args!("host:port of a known host ({why})");
            return Err(Error::invalid("address of the meeting place", format_args!("'{address}'"), limit));
        }
    };
    if !has_secret && addresses.iter().any(|address| !address.ip().is_loopback()) {
        return Err(Error::SecretNeeded { address: address.to_owned() });
    }
    Ok(addresses)
}

/// Listens on the first of `addresses` that belongs to this host; if none does (rank 0 behind another address than its
/// own), on all of this host.
pub(crate) fn listen(addresses: &[SocketAddr]) -> Result<TcpListener, Error> {
    let failed =
        |address: SocketAddr, error: &io::Error| Error::Bind { address: address.to_string(), why: error.to_string() };
    let mut foreign = None;
    for &address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => foreign = Some(address),
            Err(error) => return Err(failed(address, &error)),
        }
    }
    let Some(address) = foreign else {
        return Err(Error::invalid("addresses of the meeting place", 0, "at least 1"));
    };
    // Loopback only stays loopback only.
    if address.ip().is_loopback() {
        return Err(failed(address, &io::ErrorKind::AddrNotAvailable.into()));
    }
    let any = SocketAddr::new(any(address.ip()), address.port());
    TcpListener::bind(any).map_err(|error| failed(any, &error))
}

const fn any(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// Where a process reaches a listener of its own.
pub(crate) fn own(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_secret_only_loopback_addresses_are_allowed() {
        assert!(resolve("127.0.0.1:1", false).is_ok() && resolve("[::1]:1", false).is_ok());
        let error = resolve("192.0.2.1:1", false).unwrap_err();
        assert!(error.to_string().contains("192.0.2.1:1") && error.to_string().contains("MOEXPRESS_SECRET"));
        assert!(resolve("192.0.2.1:1", true).is_ok());
    }

    #[test]
    fn an_address_that_says_nothing_is_named() {
        let error = resolve("nowhere", true).unwrap_err().to_string();
        assert!(error.starts_with("address of the meeting place is 'nowhere', allowed: host:port"), "{error}");
    }

    #[test]
    fn a_foreign_address_is_met_on_all_of_this_host() {
        let listener = listen(&["192.0.2.1:0".parse().unwrap()]).unwrap();
        assert!(listener.local_addr().unwrap().ip().is_unspecified());
        assert!(own(listener.local_addr().unwrap()).ip().is_loopback());
    }

    #[test]
    fn a_port_in_use_is_named() {
        let first = listen(&["127.0.0.1:0".parse().unwrap()]).unwrap();
        let address = first.local_addr().unwrap();
        let error = listen(&[address]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot open the meeting place at {address}")), "{error}");
    }
}
