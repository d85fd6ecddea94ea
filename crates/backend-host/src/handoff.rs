//! How processes give each other their windows: as descriptors in datagrams between Unix sockets without a path.
//!
//! Over the control plane, which knows who is who, each rank tells the name of its socket and a token. Whoever sends a
//! descriptor there sends the token, too: other processes of the host may know the name, but not that.

use std::fmt::Display;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::thread;
use std::time::{Duration, Instant};

use ep_bootstrap::{Member, Parts};
use ep_core::topology::Reach;
use ep_core::{Error, Rank, RankSet, Topology};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, recvmsg, sendmsg_addr,
};

/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(1);

/// What a rank tells the others about itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Told {
    /// Of its layout.
    hash: u64,
    /// Names the running system, the same for all processes and containers of a host.
    host: [u8; 16],
    /// Of its socket.
    name: [u8; 16],
    /// What others prove themselves by.
    token: [u8; 16],
}

impl Told {
    const BYTES: usize = 56;

    fn to_bytes(self) -> Vec<u8> {
        [&self.hash.to_le_bytes()[..], &self.host, &self.name, &self.token].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (hash, rest) = bytes.split_first_chunk::<8>()?;
        let (host, rest) = rest.split_first_chunk()?;
        let (name, rest) = rest.split_first_chunk()?;
        let token = rest.try_into().ok()?;
        Some(Self { hash: u64::from_le_bytes(*hash), host: *host, name: *name, token })
    }
}

/// What came of an exchange.
pub(crate) struct Exchanged {
    /// The other near ranks' windows, by rank.
    pub(crate) given: Vec<Option<OwnedFd>>,
    /// Ranks that run on this host, whatever their node.
    pub(crate) here: u32,
}

/// Where the others ask this rank for its window, for one exchange.
pub(crate) struct Door {
    told: Told,
    socket: Socket,
}

impl Door {
    /// Of a rank whose layout has this hash.
    pub(crate) fn open(hash: u64) -> Result<Self, Error> {
        let told = Told { hash, host: host(), name: random()?, token: random()? };
        let socket = Socket::open(&told).map_err(|error| failed("a Unix socket", error))?;
        Ok(Self { told, socket })
    }

    /// What the others are told of it.
    pub(crate) fn told(&self) -> Vec<u8> {
        self.told.to_bytes()
    }
}

/// Gives the descriptor `own` to the other ranks of this one's node but those of `mask`, and returns theirs, by rank; none for all others. `all`: what
/// all ranks told of their doors; this one has `door`.
pub(crate) fn exchange(
    member: &Member,
    topology: &Topology,
    mask: &RankSet,
    own: BorrowedFd<'_>,
    (door, all): (&Door, &Parts),
    within: Duration,
) -> Result<Exchanged, Error> {
    let (deadline, Door { told, socket }) = (Instant::now() + within, door);
    let near = |rank| topology.reach(member.rank(), rank) == Reach::Near;
    let read = |(rank, bytes): (Rank, &Option<Vec<u8>>)| {
        let expected = !mask.contains(rank);
        expected.then(|| read(rank, bytes.as_deref(), told, near(rank))).transpose()
    };
    let all: Vec<Option<Told>> = (0..).map(Rank).zip(all).map(read).collect::<Result<_, _>>()?;
    let others = (0..).map(Rank).zip(&all).filter(|&(rank, _)| rank != member.rank() && near(rank));
    let others = others.filter_map(|(rank, told)| Some((rank, (*told)?))).collect();
    let mut exchange = Exchange::new(member.rank(), socket, &told.token, others, all.len());
    while !exchange.advance(own)? {
        let late = exchange.missing().filter(|rank| member.lost().contains(*rank) || Instant::now() >= deadline);
        if let Some(rank) = late {
            return Err(failed("the window", format_args!("rank {rank} did not give it")));
        }
        thread::sleep(PAUSE);
    }
    let here = all.iter().flatten().filter(|other| other.host == told.host).count() as u32;
    Ok(Exchanged { given: exchange.given, here })
}

/// The ranks of a host did not get each other's memory.
pub(crate) fn failed(what: impl Display, why: impl Display) -> Error {
    let what = format_args!("shared memory between processes: {what}");
    Error::broken(what, why, "start all ranks of a host in one container, as one user")
}

fn random() -> Result<[u8; 16], Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| failed("random numbers", error))?;
    Ok(bytes)
}

/// The system's own identifier of this boot; zeroes where it tells none.
fn host() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
}

/// What `rank` told, which must agree with what this rank, `own`, did. Where it is `near`, it must run on this host.
fn read(rank: Rank, bytes: Option<&[u8]>, own: &Told, near: bool) -> Result<Told, Error> {
    let bytes = bytes.ok_or_else(|| failed("a meeting of all ranks", format_args!("rank {rank} was given up")))?;
    let told = Told::from_bytes(bytes).ok_or_else(|| {
        let why = format_args!("rank {rank} told {} bytes, expected {}", bytes.len(), Told::BYTES);
        let remedy =
            format_args!("see what rank {rank} says: it makes another call, or had failed before it came here");
        Error::broken("a meeting of all ranks", why, remedy)
    })?;
    if near && told.host != own.host {
        let needs = format_args!("a topology with a node for each; rank {rank} runs on another host than this one");
        return Err(Error::unsupported("a node on several hosts", needs));
    }
    if told.hash != own.hash {
        let what = format_args!("hash of shape, topology and settings of rank {rank}");
        let limit = format_args!("{:016x}, as here: all ranks are given the same", own.hash);
        return Err(Error::invalid(what, format_args!("{:016x}", told.hash), limit));
    }
    Ok(told)
}

/// The own end.
struct Socket(UnixDatagram);

impl Socket {
    fn open(told: &Told) -> io::Result<Self> {
        let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(told.name)?)?;
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }

    /// Sends the descriptor `own` of rank `me`; false when there is no room for it now.
    fn send(&self, to: &Told, me: Rank, own: BorrowedFd<'_>) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [own];
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let address = SocketAddrUnix::new_abstract_name(&to.name)?;
        let message = [&to.token[..], &me.0.to_le_bytes()].concat();
        match sendmsg_addr(&self.0, &address, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(true),
            // Of an ordinary user no more descriptors may be in the air than a process may have open: they become fewer as others take theirs.
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::TOOMANYREFS) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Takes in one datagram: a rank and its descriptor, if it holds that and the token. None when there is none now.
    fn receive(&self, token: &[u8; 16]) -> io::Result<Option<Option<(Rank, OwnedFd)>>> {
        let mut message = [0; 32];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let bytes = match recvmsg(&self.0, &mut [IoSliceMut::new(&mut message)], &mut control, flags) {
            Ok(received) => received.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut descriptors = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let descriptor = descriptors.next().and_then(|mut descriptors| descriptors.next());
        let rank = message[..bytes].strip_prefix(token).and_then(|rank| rank.try_into().ok());
        let rank = rank.map(u32::from_le_bytes).map(Rank);
        if let (Some(rank), None) = (rank, &descriptor) {
            let why = "this process may not have more descriptors; allow more by `ulimit -n`";
            return Err(io::Error::other(format!("the descriptor of rank {rank} came and was lost: {why}")));
        }
        Ok(Some(rank.zip(descriptor)))
    }
}

/// An exchange under way.
struct Exchange<'a> {
    me: Rank,
    socket: &'a Socket,
    /// What this rank told the others to prove themselves by.
    token: &'a [u8; 16],
    /// Ranks that have not been sent to, and what they told.
    unsent: Vec<(Rank, Told)>,
    /// Ranks that have not given theirs.
    awaited: Vec<Rank>,
    given: Vec<Option<OwnedFd>>,
}

impl<'a> Exchange<'a> {
    /// With `others`, of so many `ranks`.
    fn new(me: Rank, socket: &'a Socket, token: &'a [u8; 16], others: Vec<(Rank, Told)>, ranks: usize) -> Self {
        let awaited = others.iter().map(|&(rank, _)| rank).collect();
        Self { me, socket, token, unsent: others, awaited, given: (0..ranks).map(|_| None).collect() }
    }

    /// The first rank from which something is missing, or to which something is.
    fn missing(&self) -> Option<Rank> {
        self.awaited.first().copied().or_else(|| self.unsent.first().map(|&(rank, _)| rank))
    }

    /// Sends and receives what it can; true when all is done.
    fn advance(&mut self, own: BorrowedFd<'_>) -> Result<bool, Error> {
        let mut unsent = Vec::new();
        for (rank, told) in self.unsent.drain(..) {
            let sent = self.socket.send(&told, self.me, own).map_err(|error| {
                let why = format_args!("{error}; it has ended, or its process has another network namespace");
                failed("a Unix socket", format_args!("that of rank {rank}: {why}"))
            })?;
            if !sent {
                unsent.push((rank, told));
            }
        }
        self.unsent = unsent;
        while let Some(taken) = self.socket.receive(self.token).map_err(|error| failed("a Unix socket", error))? {
            if let Some((rank, descriptor)) = taken
                && let Some(at) = self.awaited.iter().position(|&awaited| awaited == rank)
            {
                self.awaited.remove(at);
                self.given[rank.index()] = Some(descriptor);
            }
        }
        Ok(self.missing().is_none())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::window;

    fn told(hash: u64) -> Told {
        Told { hash, host: host(), name: random().unwrap(), token: random().unwrap() }
    }

    #[test]
    fn what_others_tell_is_checked() {
        let (own, other) = (told(7), told(7));
        assert_eq!(read(Rank(1), Some(&other.to_bytes()), &own, true), Ok(other));
        let complaint = |bytes: Option<&[u8]>| read(Rank(1), bytes, &own, true).unwrap_err().to_string();
        assert!(complaint(None).contains("rank 1 was given up"));
        assert!(complaint(Some(&[0; 55])).contains("rank 1 told 55 bytes, expected 56"));
        let hash = "of rank 1 is 0000000000000008, allowed: 0000000000000007, as here: all ranks are given the same";
        assert!(complaint(Some(&told(8).to_bytes())).contains(hash));
        let elsewhere = Told { host: [1; 16], ..other };
        assert!(complaint(Some(&elsewhere.to_bytes())).contains("rank 1 runs on another host"));
        assert!(read(Rank(1), Some(&elsewhere.to_bytes()), &own, false).is_ok(), "of another node");
    }

    #[test]
    fn more_ranks_than_a_socket_holds_datagrams_exchange_descriptors() {
        const RANKS: u64 = 24;
        let all: Vec<Told> = (0..RANKS).map(|_| told(0)).collect();
        let sockets: Vec<Socket> = all.iter().map(|told| Socket::open(told).unwrap()).collect();
        // A stranger who does not know the token is not heard.
        let stranger = window::create(99).unwrap();
        let guess = Told { token: [0; 16], ..all[0] };
        assert!(Socket::open(&told(0)).unwrap().send(&guess, Rank(1), stranger.as_fd()).unwrap());
        thread::scope(|scope| {
            for (me, socket) in (0..).map(Rank).zip(&sockets) {
                let all = &all;
                scope.spawn(move || {
                    let own = window::create(100 + u64::from(me.0)).unwrap();
                    let others = (0..).map(Rank).zip(all.iter().copied()).filter(|&(rank, _)| rank != me).collect();
                    let mut exchange = Exchange::new(me, socket, &all[me.index()].token, others, all.len());
                    while !exchange.advance(own.as_fd()).unwrap() {
                        thread::sleep(PAUSE);
                    }
                    for (rank, given) in exchange.given.iter().enumerate() {
                        match given {
                            None => assert_eq!(rank, me.index()),
                            Some(given) => window::check(given, 100 + rank as u64).unwrap(),
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_socket_that_is_not_there_is_named() {
        let all = [told(0), told(0)];
        let socket = Socket::open(&all[0]).unwrap();
        let own = window::create(8).unwrap();
        let mut exchange = Exchange::new(Rank(0), &socket, &all[0].token, vec![(Rank(1), all[1])], 2);
        let error = exchange.advance(own.as_fd()).unwrap_err().to_string();
        assert!(error.contains("that of rank 1"), "{error}");
    }
}
