//! The way into a rank's window: which of its connections is up, and who is copying there.
//!
//! A rank that closes its gate knows on return that nothing of an earlier connection arrives any more.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};
use std::{io, process, thread};

use ep_core::Rank;
use ep_core::port::Offset;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::memory::{self, Memory};

/// How long a gate waits for a process that is in the middle of a copy: one that was stopped there, for good.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) enum Gate {
    /// Among threads. Whoever copies into the window holds it meanwhile.
    Threads(RwLock<Option<u32>>),
    /// Among processes.
    Processes(Page),
}

/// Memory that the processes of a host share: a word that tells it from others, the connection that is up (0: none), and for each rank the
/// process by which it is copying (0: it is not).
#[derive(Debug)]
pub(crate) struct Page {
    memory: Memory,
    /// Of the rank whose gate it is: by which others open it.
    file: Option<OwnedFd>,
}

const TOKEN: u64 = 0;
const UP: u64 = 1;
const COPYING: u64 = 2;

impl Page {
    fn bytes(ranks: u32) -> u64 {
        8 * (COPYING + u64::from(ranks))
    }

    /// One of so many ranks.
    pub(crate) fn new(ranks: u32, token: u64) -> io::Result<Self> {
        let file = memfd_create("moexpress loop", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, Self::bytes(ranks))?;
        fcntl_add_seals(&file, SealFlags::SHRINK)?;
        let page = Self { memory: Memory::of(file.as_fd(), Self::bytes(ranks))?, file: Some(file) };
        page.set(TOKEN, token);
        Ok(page)
    }

    /// That of another process of this host.
    pub(crate) fn open(process: u32, file: u32, ranks: u32, token: u64) -> io::Result<Self> {
        let page = Self { memory: memory::of_process(process, file, Self::bytes(ranks))?, file: None };
        if page.get(TOKEN) != token {
            return Err(io::Error::other("it is another process: that of the rank runs on another host"));
        }
        Ok(page)
    }

    /// Its descriptor in this process.
    pub(crate) fn file(&self) -> u32 {
        self.file.as_ref().map_or(0, |file| file.as_raw_fd().unsigned_abs())
    }

    fn get(&self, word: u64) -> u64 {
        self.memory.cell(Offset(8 * word)).map_or(0, |cell| cell.load(SeqCst))
    }

    fn set(&self, word: u64, value: u64) {
        if let Some(cell) = self.memory.cell(Offset(8 * word)) {
            cell.store(value, SeqCst);
        }
    }

    /// Returns when nobody copies any more; one who does not end it is left behind, and named in the log.
    fn wait(&self, patience: Duration) {
        let until = Instant::now() + patience;
        for rank in 0..self.memory.bytes() / 8 - COPYING {
            loop {
                let process = self.get(COPYING + rank);
                if process == 0 || !lives(process) {
                    break;
                }
                if Instant::now() > until {
                    tracing::warn!(rank, process, "a process stands in the middle of a copy and is left behind");
                    break;
                }
                thread::yield_now();
            }
        }
    }
}

/// Whether there is such a process. One that has ended does not live, even where its parent has not asked how.
fn lives(process: u64) -> bool {
    let Some(pid) = i32::try_from(process).ok().and_then(Pid::from_raw) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => {
            let mut ended = [PollFd::new(&process, PollFlags::IN)];
            !poll(&mut ended, Some(&Timespec::default())).is_ok_and(|events| events > 0)
        }
        Err(error) => error != Errno::SRCH,
    }
}

impl Gate {
    /// The connection that is up from now on.
    pub(crate) fn set_up(&self, connection: Option<u32>) {
        self.set_up_within(connection, PATIENCE);
    }

    fn set_up_within(&self, connection: Option<u32>, patience: Duration) {
        match self {
            Self::Threads(up) => *up.write().unwrap_or_else(PoisonError::into_inner) = connection,
            Self::Processes(page) => {
                page.set(UP, connection.unwrap_or(0).into());
                page.wait(patience);
            }
        }
    }

    /// Lets `rank` copy by `connection`, until it [leaves](Self::leave); none where that is not up.
    pub(crate) fn enter(&self, rank: Rank, connection: Option<u32>) -> Option<Pass<'_>> {
        let pass = match self {
            Self::Threads(up) => Pass::Thread { up: up.read().unwrap_or_else(PoisonError::into_inner), connection },
            Self::Processes(page) => {
                // Before the look at what is up: whoever closes the gate looks in the other order.
                page.set(COPYING + u64::from(rank.0), process::id().into());
                Pass::Process { page, connection }
            }
        };
        pass.is_valid().then_some(pass)
    }

    /// Whether a process copies by it now.
    #[cfg(test)]
    pub(crate) fn is_held_by(&self, rank: Rank) -> bool {
        matches!(self, Self::Processes(page) if page.get(COPYING + u64::from(rank.0)) != 0)
    }

    /// All that `rank` has copied is there. Among threads a gate that has closed waits for its own window.
    pub(crate) fn leave(&self, rank: Rank) {
        if let Self::Processes(page) = self {
            page.set(COPYING + u64::from(rank.0), 0);
        }
    }
}

/// Somebody copies.
#[derive(Debug)]
pub(crate) enum Pass<'a> {
    Thread { up: RwLockReadGuard<'a, Option<u32>>, connection: Option<u32> },
    Process { page: &'a Page, connection: Option<u32> },
}

impl Pass<'_> {
    /// Whether the connection is up still. A process asks before each copy, so that one that stood still goes on with none.
    pub(crate) fn is_valid(&self) -> bool {
        match self {
            Self::Thread { up, connection } => connection.is_some() && **up == *connection,
            Self::Process { page, connection } => {
                connection.is_some_and(|connection| page.get(UP) == u64::from(connection))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than a busy machine stands still.
    const LONG: Duration = Duration::from_secs(60);

    fn other(page: &Page) -> Page {
        Page::open(process::id(), page.file(), 2, 7).unwrap()
    }

    #[test]
    fn who_enters_by_an_earlier_connection_is_kept_out() {
        let own = Page::new(2, 7).unwrap();
        let (theirs, own) = (Gate::Processes(other(&own)), Gate::Processes(own));
        assert!(theirs.enter(Rank(1), Some(1)).is_none(), "nothing is up");
        own.set_up(Some(1));
        let pass = theirs.enter(Rank(1), Some(1)).unwrap();
        assert!(pass.is_valid() && theirs.enter(Rank(0), Some(2)).is_none());
        theirs.leave(Rank(1));
        own.set_up(None);
        assert!(theirs.enter(Rank(1), Some(1)).is_none());
    }

    #[test]
    fn a_gate_is_closed_when_the_copy_under_way_has_ended_and_for_one_that_never_does_it_waits_a_while() {
        let own = Page::new(2, 7).unwrap();
        let (theirs, own) = (Gate::Processes(other(&own)), Gate::Processes(own));
        own.set_up(Some(1));
        let _pass = theirs.enter(Rank(1), Some(1)).unwrap();
        let ended = Instant::now() + Duration::from_millis(50);
        thread::scope(|scope| {
            let closer = scope.spawn(|| {
                own.set_up_within(None, LONG);
                Instant::now()
            });
            thread::sleep(ended.saturating_duration_since(Instant::now()));
            assert!(!closer.is_finished(), "closed in the middle of a copy");
            theirs.leave(Rank(1));
            assert!(closer.join().unwrap() >= ended);
        });
        own.set_up(Some(2));
        let pass = theirs.enter(Rank(1), Some(2)).unwrap();
        let began = Instant::now();
        own.set_up(None);
        assert!(began.elapsed() >= PATIENCE && !pass.is_valid());
    }

    #[test]
    fn a_process_that_ended_in_the_middle_of_a_copy_is_not_waited_for() {
        let mut child = process::Command::new("true").stdout(process::Stdio::piped()).spawn().unwrap();
        let process = child.id();
        let closed = || {
            let own = Page::new(2, 7).unwrap();
            own.set(COPYING, process.into());
            let (gate, began) = (Gate::Processes(own), Instant::now());
            gate.set_up_within(None, LONG);
            began.elapsed() < LONG
        };
        // Its end of the pipe closes when it ends, a moment before it has ended.
        io::Read::read_to_end(&mut child.stdout.take().unwrap(), &mut Vec::new()).unwrap();
        assert!(closed(), "nobody has asked how it ended");
        child.wait().unwrap();
        assert!(closed());
    }

    #[test]
    fn a_page_of_another_process_is_refused() {
        let own = Page::new(2, 7).unwrap();
        let said = |file, token| Page::open(process::id(), file, 2, token).unwrap_err().to_string();
        assert!(said(own.file(), 8).contains("another process"));
        assert!(Page::open(process::id(), own.file(), 3, 7).is_err(), "it is shorter");
        assert!(said(u32::MAX >> 1, 7).contains("No such file"));
    }
}
