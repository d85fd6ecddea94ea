//! The meeting place: a thread of rank 0's process, or of one that is no rank, to which all ranks connect.
//!
//! [`Connection`](connection::Connection) and [`Hall`](hall::Hall) decide everything, without sockets; the
//! [`Reactor`](reactor::Reactor) carries bytes between them and the network.

mod connection;
#[cfg(test)]
mod flood;
#[cfg(test)]
mod fuzz;
mod hall;
mod reactor;
mod room;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use ep_core::Rank;
use mio::Waker;

use self::hall::Terms;
use self::reactor::{Orders, Reactor};
use crate::error::Error;
use crate::identity::Identity;
use crate::member::check_world;
use crate::program::Program;
use crate::secret::Secret;

/// An open meeting place. Dropping it closes it: what is owed is still written, for a second at most.
///
/// Mostly rank 0's [`Member`](crate::Member) opens and holds it, and nobody can agree on anything once rank 0's process has ended. A
/// launcher that outlives all ranks may hold it instead, so that ranks recover whoever of them ended; it tells them where it is
/// by [`MEETING_VARIABLE`](crate::MEETING_VARIABLE).
///
/// ```
/// use std::net::TcpListener;
/// use ep_bootstrap::{Member, MeetingPlace, Settings};
/// use ep_core::Rank;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let listener = TcpListener::bind("127.0.0.1:0")?;
/// let address = listener.local_addr()?.to_string();
/// let place = MeetingPlace::hold(listener, 1, None)?;
/// let member = Member::join(Settings::new(Rank(0), 1, address).held_elsewhere(true))?;
/// drop(member);
/// drop(place);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MeetingPlace {
    orders: Arc<Orders>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl MeetingPlace {
    /// Opens one that no rank holds, on `listener`, for `world` ranks. What they must have in common is what the first one
    /// to join says.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a number of ranks that no communicator has; [`Error::SecretNeeded`] without secret on an address in
    /// reach of other machines; [`Error::Bind`] when the listener cannot be used.
    pub fn hold(listener: TcpListener, world: u32, secret: Option<Secret>) -> Result<Self, Error> {
        check_world(Rank(0), world)?;
        let address =
            listener.local_addr().map_err(|error| Error::Bind { address: "?".to_owned(), why: error.to_string() })?;
        if secret.is_none() && !address.ip().is_loopback() {
            return Err(Error::SecretNeeded { address: address.to_string() });
        }
        Self::open(listener, world, secret, None)
    }

    /// Opens it on `listener` for `world` ranks that have `identity` in common, or what the first one says.
    pub(crate) fn open(
        listener: TcpListener,
        world: u32,
        secret: Option<Secret>,
        identity: Option<Identity>,
    ) -> Result<Self, Error> {
        let address = listener.local_addr();
        let failed = |error: io::Error| Error::Bind {
            address: address.as_ref().map_or_else(|_| "?".to_owned(), SocketAddr::to_string),
            why: error.to_string(),
        };
        let orders = Arc::new(Orders::default());
        let said_by = identity.is_some().then_some(0);
        let identity = identity.unwrap_or_default();
        let terms = Terms { said_by, world, program: Program::this(), identity };
        let (reactor, waker) = Reactor::new(listener, terms, secret, Arc::clone(&orders)).map_err(failed)?;
        let thread = thread::Builder::new().name("meeting place".to_owned());
        let thread = thread.spawn(move || reactor.run()).map_err(failed)?;
        Ok(Self { orders, waker, thread: Some(thread) })
    }

    /// Says that the process of `rank` has ended. If it has not joined the others need not wait for it: they are told at once, by [`Verdict::Ended`](crate::Verdict::Ended). Otherwise
    /// nothing happens, as its connection says it.
    pub fn has_ended(&self, rank: Rank) {
        self.orders.has_ended(rank);
        // As in `drop`: if it fails, the thread hears of it with the next message or deadline.
        let _ = self.waker.wake();
    }
}

impl Drop for MeetingPlace {
    fn drop(&mut self) {
        self.orders.stop();
        // A thread that cannot be woken wakes by itself at the next deadline or message; waiting for it could last.
        if let (Ok(()), Some(thread)) = (self.waker.wake(), self.thread.take()) {
            let _ = thread.join();
        }
    }
}
