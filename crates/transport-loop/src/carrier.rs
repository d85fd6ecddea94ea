//! Who carries between processes of CPU ranks what is not due when it is posted: a thread of the rank that posted it. Nobody else can, and
//! that rank may do something else for as long as it likes.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::end::End;
use crate::network::Network;

/// How long it sleeps while something is under way.
const PAUSE: Duration = Duration::from_micros(20);

/// The thread. Dropped, it ends before that returns.
#[derive(Debug)]
pub(crate) struct Carrier {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// As connected, in the order of the own end's links.
    peers: Vec<Option<Arc<End>>>,
    /// Whether something was left under way since it last looked.
    called: bool,
    over: bool,
}

impl Carrier {
    /// Starts one for the rank whose end is `own`.
    pub(crate) fn start(own: Arc<End>, network: Arc<Network>) -> io::Result<Self> {
        let shared = Arc::new(Shared { state: Mutex::default(), wake: Condvar::new() });
        let seen = Arc::clone(&shared);
        let thread = thread::Builder::new().name(format!("loop of rank {}", own.me));
        let thread = thread.spawn(move || seen.work(&own, &network))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// What it carries to from now on.
    pub(crate) fn connect(&self, peers: Vec<Option<Arc<End>>>) {
        self.shared.lock().peers = peers;
    }

    /// Something is under way.
    pub(crate) fn call(&self) {
        self.shared.lock().called = true;
        self.shared.wake.notify_one();
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        self.shared.lock().over = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            // Whether it panicked matters to nobody any more.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, own: &End, network: &Network) {
        let mut state = self.lock();
        while !state.over {
            if !state.called {
                state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.called = false;
            let peers = state.peers.clone();
            drop(state);
            let mut busy = false;
            for (link, peer) in own.links.iter().zip(&peers) {
                if let Some(peer) = peer {
                    busy |= link.carry(network, own, peer, true);
                }
            }
            if busy {
                thread::sleep(PAUSE);
            }
            state = self.lock();
            state.called |= busy;
        }
    }
}
