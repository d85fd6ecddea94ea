//! A [`Door`]: where processes of a host give each other descriptors, in datagrams between Unix sockets without a path.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, recvmsg, sendmsg_addr,
};

/// Where a door is, and what one proves oneself by there: other processes of the host may know the name, but not the token. It is told over the control
/// plane, which knows who is who.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DoorAddress {
    name: [u8; 16],
    token: [u8; 16],
}

impl DoorAddress {
    /// Its size when it is told.
    pub const BYTES: usize = 32;

    /// What is told.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (name, token) = bytes.split_at_mut(16);
        name.copy_from_slice(&self.name);
        token.copy_from_slice(&self.token);
        bytes
    }

    /// Whether its process has it open still: not once that has ended. Nothing is sent there.
    pub fn is_there(&self) -> bool {
        let asked = || UnixDatagram::unbound()?.connect_addr(&SocketAddr::from_abstract_name(self.name)?);
        // What else fails says nothing of it.
        !asked().is_err_and(|error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused)
    }

    /// What was told; none where that has another size.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (name, token) = bytes.split_first_chunk()?;
        Some(Self { name: *name, token: token.try_into().ok()? })
    }
}

/// What came to a [`Door`].
#[derive(Debug)]
pub enum Visit {
    /// Of somebody who does not know the token: nothing was taken in.
    Stranger,
    /// A message of so many bytes, and what it brought.
    Message(usize, Option<OwnedFd>),
}

/// The longest message that a [`Door`] takes in.
pub const DOOR_MESSAGE: usize = 64;

/// Where this process takes in messages of others of its host, with a descriptor each or without. It never waits.
#[derive(Debug)]
pub struct Door {
    address: DoorAddress,
    socket: UnixDatagram,
}

impl Door {
    /// Opens one that nobody knows yet.
    ///
    /// # Errors
    /// Where the system has no such socket, or no random numbers.
    pub fn open() -> io::Result<Self> {
        let address = DoorAddress { name: random()?, token: random()? };
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(address.name)?)?;
        socket.set_nonblocking(true)?;
        Ok(Self { address, socket })
    }

    /// Where it is.
    pub const fn address(&self) -> DoorAddress {
        self.address
    }

    /// Sends a message to the door at `to`, with a descriptor or without; false when there is no room for it now.
    ///
    /// # Errors
    /// Where there is no such door any more, or its process has another network namespace.
    pub fn send(&self, to: &DoorAddress, message: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.map(|descriptor| [descriptor]);
        if let Some(descriptors) = &descriptors {
            control.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let address = SocketAddrUnix::new_abstract_name(&to.name)?;
        let parts = [IoSlice::new(&to.token), IoSlice::new(message)];
        match sendmsg_addr(&self.socket, &address, &parts, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(true),
            // Of an ordinary user no more descriptors may be in the air than a process may have open: they become fewer as others take theirs.
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::TOOMANYREFS) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes in one message, into the first bytes of `into`. None when there is none now.
    ///
    /// # Errors
    /// Where the system refuses. A descriptor that this process may not have comes as none.
    pub fn receive(&self, into: &mut [u8; DOOR_MESSAGE]) -> io::Result<Option<Visit>> {
        let mut token = [0; 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut parts = [IoSliceMut::new(&mut token), IoSliceMut::new(into)];
        let bytes = match recvmsg(&self.socket, &mut parts, &mut control, flags) {
            Ok(received) => received.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut descriptors = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let descriptor = descriptors.next().and_then(|mut descriptors| descriptors.next());
        Ok(Some(match bytes.checked_sub(token.len()) {
            Some(bytes) if token == self.address.token => Visit::Message(bytes, descriptor),
            _ => Visit::Stranger,
        }))
    }
}

impl AsFd for Door {
    /// To wait for messages.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn random() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_with_what_they_bring() {
        let (here, there) = (Door::open().unwrap(), Door::open().unwrap());
        let mut into = [0; DOOR_MESSAGE];
        assert!(there.receive(&mut into).unwrap().is_none());
        assert!(here.send(&there.address(), b"one", None).unwrap());
        assert!(here.send(&there.address(), b"", Some(here.as_fd())).unwrap());
        assert!(matches!(there.receive(&mut into).unwrap(), Some(Visit::Message(3, None))));
        assert_eq!(&into[..3], b"one");
        assert!(matches!(there.receive(&mut into).unwrap(), Some(Visit::Message(0, Some(_)))));
    }

    #[test]
    fn strangers_are_not_heard() {
        let (here, there) = (Door::open().unwrap(), Door::open().unwrap());
        let guess = DoorAddress { token: [0; 16], ..there.address() };
        assert!(here.send(&guess, b"let me in", Some(here.as_fd())).unwrap());
        assert!(matches!(there.receive(&mut [0; DOOR_MESSAGE]).unwrap(), Some(Visit::Stranger)));
    }

    #[test]
    fn who_is_gone_is_told_of() {
        let (here, gone) = (Door::open().unwrap(), Door::open().unwrap().address());
        assert!(here.send(&gone, b"", None).is_err());
        assert!(here.address().is_there() && !gone.is_there());
    }

    #[test]
    fn who_takes_nothing_in_has_room_for_so_many() {
        let (here, there) = (Door::open().unwrap(), Door::open().unwrap());
        let sent = (0..10_000).take_while(|_| here.send(&there.address(), b"", None).unwrap()).count();
        assert!((1..10_000).contains(&sent), "{sent} messages that nobody took in");
        assert!(there.receive(&mut [0; DOOR_MESSAGE]).unwrap().is_some());
        assert!(here.send(&there.address(), b"", None).unwrap(), "there is room again");
    }

    #[test]
    fn addresses_of_another_size_are_none() {
        let address = Door::open().unwrap().address();
        assert_eq!(DoorAddress::from_bytes(&address.to_bytes()), Some(address));
        assert_eq!(DoorAddress::from_bytes(&address.to_bytes()[1..]), None);
        assert_eq!(DoorAddress::from_bytes(&[0; 33]), None);
    }
}
