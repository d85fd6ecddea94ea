//! A rank that has joined: collectives, agreement, and who is gone.

mod agree;
mod handshake;
mod link;
mod part;
mod settings;

pub use part::Parts;
pub use settings::Settings;

use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ep_core::topology::MAX_RANKS;
use ep_core::{Nanos, Rank, RankSet};
use serde_bytes::ByteBuf;

use self::link::{Link, Links, Wait};
use crate::error::{Call, Error};
use crate::meeting::MeetingPlace;
use crate::program::Program;
use crate::secret::random;
use crate::socket;
use crate::verdict::Verdict;
use crate::wire::{Collective, MAX_MESSAGE, Reply, Request};

/// Bytes of a message beside a rank's contribution, generously.
const OVERHEAD: usize = 1 << 10;

/// The most bytes that one rank contributes to a collective. All ranks together contribute at most [`crate::MAX_MESSAGE`],
/// less 16 bytes each and 16 more.
pub const MAX_CONTRIBUTION: usize = MAX_MESSAGE - OVERHEAD;

/// One rank of a communicator whose ranks have met.
///
/// May be shared by threads. Collectives ([`barrier`](Self::barrier), [`all_gather`](Self::all_gather),
/// [`broadcast`](Self::broadcast)) are called by all ranks in the same order; one that fails anywhere fails on all
/// ranks, and so does every later one, with the same verdict, until the survivors agreed on how to go on
/// ([`agree`](ep_core::machine::Bootstrap::agree)).
///
/// Dropping it leaves: the others are told that this rank is gone. Rank 0's member holds the meeting place, so rank 0
/// leaves last, for instance after a barrier.
#[derive(Debug)]
pub struct Member {
    rank: Rank,
    world: u32,
    address: String,
    origin: Instant,
    /// Held for as long as a collective lasts: they are called one after another.
    collective: Mutex<()>,
    // Fields drop in this order: rank 0 first leaves as everybody does, then closes the place.
    link: Links,
    _place: Option<MeetingPlace>,
}

impl Member {
    /// Joins the other ranks, and returns when all have joined. Rank 0 opens the meeting place, unless it is
    /// [held elsewhere](Settings::held_elsewhere).
    ///
    /// # Errors
    /// [`Error`] says what kept the ranks from meeting: among others, without secret an address in reach of other
    /// machines; at the deadline the ranks that are missing; a rank with another identity.
    pub fn join(settings: Settings) -> Result<Self, Error> {
        if settings.rank == Rank(0) && !settings.held_elsewhere {
            settings.check()?;
            let addresses = socket::resolve(&settings.address, settings.secret.is_some())?;
            return Self::host(socket::listen(&addresses)?, settings);
        }
        Self::enter(settings, None)
    }

    /// As [`join`](Self::join) for rank 0, with a listener that the caller opened: to meet at a port that the system
    /// chose. The settings' address is not used.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn host(listener: TcpListener, settings: Settings) -> Result<Self, Error> {
        settings.check()?;
        if settings.rank != Rank(0) {
            return Err(Error::invalid("rank of the process that holds the meeting place", settings.rank, "0"));
        }
        let address = listener
            .local_addr()
            .map_err(|error| Error::Bind { address: settings.address.clone(), why: error.to_string() })?;
        if settings.secret.is_none() && !address.ip().is_loopback() {
            return Err(Error::SecretNeeded { address: address.to_string() });
        }
        let (world, secret, identity) = (settings.world, settings.secret.clone(), settings.identity.clone());
        let place = MeetingPlace::open(listener, world, secret, Some(identity))?;
        let settings = Settings { address: socket::own(address).to_string(), ..settings };
        Self::enter(settings, Some(place))
    }

    fn enter(settings: Settings, place: Option<MeetingPlace>) -> Result<Self, Error> {
        settings.check()?;
        let start = Instant::now();
        let wait = Wait::new(Call::Join, settings.within);
        let (stream, session) = handshake::meet(&settings, random()?, wait.deadline)?;
        let host = (!settings.held_elsewhere).then_some(Rank(0));
        let link = Link::open(stream, &session, settings.address.clone(), host)?;
        let request = Request::Join {
            rank: settings.rank.0,
            world: settings.world,
            program: Program::this(),
            identity: settings.identity,
            within: wait.left(),
        };
        link.send(&request, &wait)?;
        let reply = link.answer(&wait, |inbox| inbox.joined.take())?;
        if let Reply::NotJoined(verdict) = reply {
            return Err(Error::Refused { call: Call::Join, waited: start.elapsed(), verdict });
        }
        tracing::debug!(rank = settings.rank.0, world = settings.world, "joined");
        Ok(Self {
            rank: settings.rank,
            world: settings.world,
            address: settings.address,
            origin: settings.origin,
            collective: Mutex::new(()),
            link,
            _place: place,
        })
    }

    /// This rank.
    pub const fn rank(&self) -> Rank {
        self.rank
    }

    /// Ranks of the communicator, those gone included.
    pub const fn world(&self) -> u32 {
        self.world
    }

    /// Where this rank reached the meeting place, `host:port`.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The time on this rank's clock, on which deadlines of agreements are given: time since the settings' origin.
    pub fn now(&self) -> Nanos {
        Nanos(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Ranks whose connection to the meeting place is closed: their process ended, or dropped its member. When the
    /// connection from here is closed, that is rank 0; nobody, where the place is held elsewhere.
    pub fn lost(&self) -> RankSet {
        self.link.lost()
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// [`Error::Refused`] with [`Verdict::Missing`] at the first deadline of any rank, [`Verdict::Lost`] as soon as a
    /// rank that has not come is gone; [`Error::Gone`] and [`Error::Silent`] when the meeting place is.
    pub fn barrier(&self, within: Duration) -> Result<(), Error> {
        self.meet(Call::Barrier, Collective::Barrier, Vec::new(), within).map(drop)
    }

    /// Gives `bytes` to all ranks and returns everybody's, by rank: none for a rank that an agreement went on without.
    /// Contributions may differ in length.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier); [`Error::Invalid`] for more than [`MAX_CONTRIBUTION`] bytes, and
    /// [`Verdict::TooLong`] when all contributions together do not fit a message.
    pub fn all_gather(&self, bytes: &[u8], within: Duration) -> Result<Parts, Error> {
        let parts = self.meet(Call::AllGather, Collective::AllGather, self.contribution(bytes)?, within)?;
        Ok(parts.into_iter().map(|part| part.map(ByteBuf::into_vec)).collect())
    }

    /// Returns the bytes of `root` on all ranks. Those of the other ranks are not sent.
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier); [`Error::Invalid`] for more than [`MAX_CONTRIBUTION`] bytes, or a root that is no
    /// rank or was masked out.
    pub fn broadcast(&self, root: Rank, bytes: &[u8], within: Duration) -> Result<Vec<u8>, Error> {
        if root.0 >= self.world {
            return Err(Error::invalid("root of a broadcast", root, format_args!("below {}", self.world)));
        }
        let bytes = if root == self.rank { self.contribution(bytes)? } else { Vec::new() };
        let mut parts = self.meet(Call::Broadcast, Collective::Broadcast { root: root.0 }, bytes, within)?;
        let masked_out = || Error::invalid("root of a broadcast", root, "a rank that was not masked out");
        parts.pop().flatten().map(ByteBuf::into_vec).ok_or_else(masked_out)
    }

    fn contribution(&self, bytes: &[u8]) -> Result<Vec<u8>, Error> {
        if bytes.len() > MAX_CONTRIBUTION {
            let what = format_args!("bytes that rank {} contributes", self.rank);
            return Err(Error::invalid(what, bytes.len(), format_args!("at most {MAX_CONTRIBUTION}")));
        }
        Ok(bytes.to_vec())
    }

    fn meet(
        &self,
        call: Call,
        collective: Collective,
        bytes: Vec<u8>,
        within: Duration,
    ) -> Result<Vec<Option<ByteBuf>>, Error> {
        let _one_at_a_time: MutexGuard<'_, ()> = self.collective.lock().unwrap_or_else(PoisonError::into_inner);
        let start = Instant::now();
        let wait = Wait::new(call, within);
        let request = Request::Meet { collective, bytes: ByteBuf::from(bytes), within: wait.left() };
        self.link.send(&request, &wait)?;
        let verdict = match self.link.answer(&wait, |inbox| inbox.met.take())? {
            Reply::Met(parts) => return Ok(parts),
            Reply::NotMet(verdict) => verdict,
            // The inbox holds nothing else under `met`.
            _ => Verdict::Interrupted,
        };
        Err(Error::Refused { call, waited: start.elapsed(), verdict })
    }

    fn link(&self) -> &Arc<Link> {
        &self.link
    }
}

/// Refuses numbers of ranks that no communicator has.
pub(crate) fn check_world(rank: Rank, world: u32) -> Result<(), Error> {
    if !(1..=MAX_RANKS).contains(&world) {
        return Err(Error::invalid("world size", world, format_args!("1 to {MAX_RANKS}")));
    }
    if rank.0 >= world {
        return Err(Error::invalid("rank", rank, format_args!("below the world size, {world}")));
    }
    Ok(())
}
