//! How processes give each other their windows: as descriptors, at a [`Door`] each. Over the control plane, which knows who is who, each rank tells where it is.

use std::fmt::Display;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use ep_bootstrap::{DOOR_MESSAGE, Door, DoorAddress, Host, Member, Parts, Visit};
use ep_core::topology::Reach;
use ep_core::{Error, Rank, RankSet, Topology};

/// Time between two attempts.
const PAUSE: Duration = Duration::from_millis(1);

/// What a rank tells the others about itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Told {
    /// Of its layout.
    hash: u64,
    host: Host,
    /// Where it takes in windows.
    door: DoorAddress,
}

impl Told {
    const BYTES: usize = 8 + Host::BYTES + DoorAddress::BYTES;

    fn to_bytes(self) -> Vec<u8> {
        [&self.hash.to_le_bytes()[..], &self.host.to_bytes(), &self.door.to_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (hash, rest) = bytes.split_first_chunk::<8>()?;
        let (host, door) = rest.split_first_chunk()?;
        let (hash, host) = (u64::from_le_bytes(*hash), Host::from_bytes(*host));
        Some(Self { hash, host, door: DoorAddress::from_bytes(door)? })
    }
}

/// What came of an exchange.
pub(crate) struct Exchanged {
    /// The other near ranks' windows, by rank.
    pub(crate) given: Vec<Option<OwnedFd>>,
    /// Ranks that run on this host, whatever their node.
    pub(crate) here: u32,
}

/// What a rank brings to one exchange.
pub(crate) struct Handoff {
    told: Told,
    door: Door,
}

impl Handoff {
    /// Of a rank whose layout has this hash.
    pub(crate) fn open(hash: u64) -> Result<Self, Error> {
        let door = Door::open().map_err(|error| failed("a Unix socket", error))?;
        Ok(Self { told: Told { hash, host: Host::this(), door: door.address() }, door })
    }

    /// What the others are told of it.
    pub(crate) fn told(&self) -> Vec<u8> {
        self.told.to_bytes()
    }
}

/// Gives the descriptor `own` to the other ranks of this one's node but those of `mask`, and returns theirs, by rank; none for all others. `all`: what
/// all ranks told; this one has `handoff`.
pub(crate) fn exchange(
    member: &Member,
    topology: &Topology,
    mask: &RankSet,
    own: BorrowedFd<'_>,
    (handoff, all): (&Handoff, &Parts),
    within: Duration,
) -> Result<Exchanged, Error> {
    let (deadline, Handoff { told, door }) = (Instant::now() + within, handoff);
    let near = |rank| topology.reach(member.rank(), rank) == Reach::Near;
    let read = |(rank, bytes): (Rank, &Option<Vec<u8>>)| {
        let expected = !mask.contains(rank);
        expected.then(|| read(rank, bytes.as_deref(), told, near(rank))).transpose()
    };
    let all: Vec<Option<Told>> = (0..).map(Rank).zip(all).map(read).collect::<Result<_, _>>()?;
    let others = (0..).map(Rank).zip(&all).filter(|&(rank, _)| rank != member.rank() && near(rank));
    let others = others.filter_map(|(rank, told)| Some((rank, (*told)?))).collect();
    let mut exchange = Exchange::new(member.rank(), door, others, all.len());
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

/// An exchange under way.
struct Exchange<'a> {
    me: Rank,
    door: &'a Door,
    /// Ranks that have not been sent to, and what they told.
    unsent: Vec<(Rank, Told)>,
    /// Ranks that have not given theirs.
    awaited: Vec<Rank>,
    given: Vec<Option<OwnedFd>>,
}

impl<'a> Exchange<'a> {
    /// With `others`, of so many `ranks`.
    fn new(me: Rank, door: &'a Door, others: Vec<(Rank, Told)>, ranks: usize) -> Self {
        let awaited = others.iter().map(|&(rank, _)| rank).collect();
        Self { me, door, unsent: others, awaited, given: (0..ranks).map(|_| None).collect() }
    }

    /// The first rank from which something is missing, or to which something is.
    fn missing(&self) -> Option<Rank> {
        self.awaited.first().copied().or_else(|| self.unsent.first().map(|&(rank, _)| rank))
    }

    /// Sends and receives what it can; true when all is done.
    fn advance(&mut self, own: BorrowedFd<'_>) -> Result<bool, Error> {
        let mut unsent = Vec::new();
        for (rank, told) in self.unsent.drain(..) {
            let sent = self.door.send(&told.door, &self.me.0.to_le_bytes(), Some(own)).map_err(|error| {
                let why = format_args!("{error}; it has ended, or its process has another network namespace");
                failed("a Unix socket", format_args!("that of rank {rank}: {why}"))
            })?;
            if !sent {
                unsent.push((rank, told));
            }
        }
        self.unsent = unsent;
        let mut message = [0; DOOR_MESSAGE];
        while let Some(visit) = self.door.receive(&mut message).map_err(|error| failed("a Unix socket", error))? {
            let Visit::Message(bytes, descriptor) = visit else { continue };
            let Ok(rank) = message[..bytes].try_into().map(u32::from_le_bytes).map(Rank) else { continue };
            let descriptor = descriptor.ok_or_else(|| {
                let why = "this process may not have more descriptors; allow more by `ulimit -n`";
                let lost = format_args!("the descriptor of rank {rank} came and was lost: {why}");
                failed("a Unix socket", io::Error::other(lost.to_string()))
            })?;
            if let Some(at) = self.awaited.iter().position(|&awaited| awaited == rank) {
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
        Handoff::open(hash).unwrap().told
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
        let elsewhere = Told { host: Host::from_bytes([1; Host::BYTES]), ..other };
        assert!(complaint(Some(&elsewhere.to_bytes())).contains("rank 1 runs on another host"));
        assert!(read(Rank(1), Some(&elsewhere.to_bytes()), &own, false).is_ok(), "of another node");
    }

    #[test]
    fn more_ranks_than_a_socket_holds_datagrams_exchange_descriptors() {
        const RANKS: u64 = 24;
        let all: Vec<Handoff> = (0..RANKS).map(|_| Handoff::open(0).unwrap()).collect();
        thread::scope(|scope| {
            for (me, handoff) in (0..).map(Rank).zip(&all) {
                let all = &all;
                scope.spawn(move || {
                    let own = window::create(100 + u64::from(me.0)).unwrap();
                    let others = (0..).map(Rank).zip(all.iter().map(|one| one.told)).filter(|&(rank, _)| rank != me);
                    let mut exchange = Exchange::new(me, &handoff.door, others.collect(), all.len());
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
        let (handoff, gone) = (Handoff::open(0).unwrap(), told(0));
        let own = window::create(8).unwrap();
        let mut exchange = Exchange::new(Rank(0), &handoff.door, vec![(Rank(1), gone)], 2);
        let error = exchange.advance(own.as_fd()).unwrap_err().to_string();
        assert!(error.contains("that of rank 1"), "{error}");
    }
}
