//! The meeting place: a thread of rank 0's process to which all ranks connect.
//!
//! [`Connection`](connection::Connection) and [`Hall`](hall::Hall) decide everything, without sockets; the
//! [`Reactor`](reactor::Reactor) carries bytes between them and the network.

mod connection;
#[cfg(test)]
mod fuzz;
mod hall;
mod reactor;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use mio::Waker;

use self::hall::Terms;
use self::reactor::Reactor;
use crate::error::Error;
use crate::identity::Identity;
use crate::secret::Secret;

/// An open meeting place. Dropping it closes it: what is owed is still written, for a second at most.
#[derive(Debug)]
pub(crate) struct MeetingPlace {
    stop: Arc<AtomicBool>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl MeetingPlace {
    /// Opens it on `listener` for `world` ranks that have `identity` in common.
    pub(crate) fn open(
        listener: TcpListener,
        world: u32,
        secret: Option<Secret>,
        identity: Identity,
    ) -> Result<Self, Error> {
        let address = listener.local_addr();
        let failed = |error: io::Error| Error::Bind {
            address: address.as_ref().map_or_else(|_| "?".to_owned(), SocketAddr::to_string),
            why: error.to_string(),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let terms = Terms { world, crate_version: crate::VERSION.to_owned(), identity };
        let (reactor, waker) = Reactor::new(listener, terms, secret, Arc::clone(&stop)).map_err(failed)?;
        let thread = thread::Builder::new().name("meeting place".to_owned());
        let thread = thread.spawn(move || reactor.run()).map_err(failed)?;
        Ok(Self { stop, waker, thread: Some(thread) })
    }
}

impl Drop for MeetingPlace {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // A thread that cannot be woken wakes by itself at the next deadline or message; waiting for it could last.
        if let (Ok(()), Some(thread)) = (self.waker.wake(), self.thread.take()) {
            let _ = thread.join();
        }
    }
}
