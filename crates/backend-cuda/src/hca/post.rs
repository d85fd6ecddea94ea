//! What processes tell each other of something of theirs that changes: each shows it to all others, and takes it back before it changes.
//!
//! ```text
//!  who changes it                                    each of the others
//!  Withdrawn n     -- until all have answered -->    stops to go by it
//!                  <------------------ Answered n
//!  (the change)
//!  Shown n, a file ----------------------------->    goes by it
//! ```
//!
//! So nobody goes by what does not hold. A process that has ended has no door any more: that counts as an answer. One that is stopped is waited for a second.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ep_bootstrap::{DOOR_MESSAGE, Door, DoorAddress, Member, Visit};
use ep_core::{Error, Rank};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use crate::error::CudaError;
use crate::node::PATIENCE as MEETING;

/// How long a process is waited for that does not answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// After how long it is asked again.
const AGAIN: Duration = Duration::from_millis(5);
/// Changes come in bursts: something is shown when none has come for so long.
const BURST: Duration = Duration::from_millis(1);
/// Time between two looks at who has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Bytes of what is shown, at most.
const MOST: u64 = 1 << 26;

type U32 = zerocopy::little_endian::U32;
type U64 = zerocopy::little_endian::U64;

/// What a message says: of what its sender has, or, as an answer, of what its receiver has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, TryFromBytes, IntoBytes, Immutable, Unaligned, KnownLayout)]
#[repr(u8)]
enum Kind {
    /// What was shown before this number does not hold any more.
    Withdrawn,
    /// Nobody here goes by that.
    Answered,
    /// What holds, in a file.
    Shown,
    /// What was shown could not be read: it is to be shown again.
    Again,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, TryFromBytes, IntoBytes, Immutable, Unaligned, KnownLayout)]
#[repr(C)]
struct Message {
    number: U64,
    from: U32,
    kind: Kind,
}

/// What became of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sent {
    There,
    /// The other takes in no more now.
    Full,
    /// The other's process has ended.
    Ended,
}

/// What came in.
#[derive(Debug)]
pub(super) enum Heard {
    /// The process of this rank takes back what it has shown, by the message of this number.
    Withdrawn(usize, u64),
    /// It shows something, by the message of this number.
    Shown(usize, u64, OwnedFd),
    /// Nothing that concerns what others show.
    Else,
}

/// What is known of what a process has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) enum Seen {
    /// It has not shown it, or has taken it back.
    #[default]
    Hidden,
    Shown(Arc<[u8]>),
    /// The process has ended.
    Ended,
}

/// Another process.
#[derive(Debug, Default)]
struct Other {
    /// Of what this process says: how much it has answered, and what it was sent.
    answered: u64,
    sent: Option<u64>,
    /// It was waited for in vain: nobody waits for it before it answers again.
    is_left: bool,
    /// Of what it says: the latest number, and what it has shown with it.
    number: u64,
    seen: Seen,
}

#[derive(Debug)]
struct Said {
    /// How often what this process shows was withdrawn, whether it holds, and when a change came last.
    number: u64,
    holds: bool,
    altered: Instant,
    /// What was made of it for the others.
    file: Option<(u64, File)>,
    /// Changes of what others have shown.
    news: u64,
    /// Of which whoever goes by it was told.
    passed_on: Option<u64>,
    /// `[ranks]`, of which that of this process is not used.
    others: Vec<Other>,
    looked: Instant,
}

/// One process's end.
#[derive(Debug)]
pub(super) struct Post {
    me: usize,
    door: Door,
    /// `[ranks]`; none of this process's own.
    doors: Vec<Option<DoorAddress>>,
    said: Mutex<Said>,
    has_answered: Condvar,
}

impl Post {
    /// Has all processes of `member` tell each other where they hear.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the rank that did not come, or runs elsewhere; [`Error::Broken`] with what the system refuses.
    pub(super) fn met(member: &Member) -> Result<Self, Error> {
        let refused = |error| Error::broken("a Unix socket for an adapter", error, "let the process have more of them");
        let door = Door::open().map_err(refused);
        let told = |door: &Door| door.address().to_bytes().to_vec();
        let (door, told) = member.try_all_gather(door, told, MEETING, CudaError::meeting)?;
        let me = member.rank();
        let address = |(rank, told): (Rank, Option<Vec<u8>>)| {
            let address = told.as_deref().and_then(DoorAddress::from_bytes);
            let problem = || CudaError::Meeting { problem: format!("rank {rank} does not say where it hears") };
            if rank == me { Ok(None) } else { Ok(Some(address.ok_or_else(problem)?)) }
        };
        let doors = (0..).map(Rank).zip(told).map(address).collect::<Result<Vec<_>, CudaError>>()?;
        let this = Self::of(me.index(), door, doors);
        let stranger = (0..this.doors.len()).find(|&rank| this.has_ended(rank));
        let reached = stranger.map_or(Ok(()), |rank| {
            let what = format_args!("the adapter of rank {rank} beside those of other processes");
            Err(Error::unsupported(what, "ranks on one host, in one container: their GPUs play the adapters"))
        });
        // Nobody leaves before all have been reached.
        member.try_all_gather(reached, |()| Vec::new(), MEETING, CudaError::meeting)?;
        Ok(this)
    }

    fn of(me: usize, door: Door, doors: Vec<Option<DoorAddress>>) -> Self {
        let now = Instant::now();
        let said = Said {
            number: 0,
            holds: false,
            altered: now,
            file: None,
            news: 0,
            passed_on: None,
            others: doors.iter().map(|_| Other::default()).collect(),
            looked: now,
        };
        Self { me, door, doors, said: Mutex::new(said), has_answered: Condvar::new() }
    }

    pub(super) const fn me(&self) -> usize {
        self.me
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends to a rank's process, which may have no room for it now. All that matters is sent again.
    fn send(&self, rank: usize, kind: Kind, number: u64, file: Option<&File>) -> Sent {
        let Some(to) = &self.doors[rank] else { return Sent::Full };
        let message = Message { number: U64::new(number), from: U32::new(self.me as u32), kind };
        match self.door.send(to, message.as_bytes(), file.map(|file| file.as_fd())) {
            Ok(true) => Sent::There,
            Ok(false) => Sent::Full,
            Err(_) => Sent::Ended,
        }
    }

    /// Whether the process of a rank has ended. Asked without a message: one that is stopped has room for few.
    fn has_ended(&self, rank: usize) -> bool {
        self.doors[rank].as_ref().is_some_and(|door| !door.is_there())
    }

    // ---- what this process says ----

    /// Takes back what was shown. Returns when nobody goes by it any more.
    pub(super) fn withdraw(&self) {
        self.withdraw_within(PATIENCE);
    }

    fn withdraw_within(&self, patience: Duration) {
        let mut said = self.said();
        if std::mem::take(&mut said.holds) {
            said.number += 1;
            said = self.wait(said, patience);
        }
        // Behind the wait: the next change of the burst comes at once.
        said.altered = Instant::now();
    }

    /// Waits until all have answered but those that have ended, or were left behind before.
    fn wait<'a>(&'a self, mut said: MutexGuard<'a, Said>, patience: Duration) -> MutexGuard<'a, Said> {
        let (number, until) = (said.number, Instant::now() + patience);
        let mut ask_at = Instant::now();
        loop {
            let is_due = Instant::now() >= ask_at;
            let mut silent = None;
            for (rank, _) in self.doors.iter().enumerate().filter(|(_, door)| door.is_some()) {
                let other = &said.others[rank];
                if other.seen == Seen::Ended || other.answered >= number {
                    continue;
                }
                let is_left = other.is_left;
                if is_due && self.send(rank, Kind::Withdrawn, number, None) == Sent::Ended {
                    said.end(rank);
                } else if !is_left {
                    silent = Some(rank);
                }
            }
            let Some(silent) = silent else { return said };
            if Instant::now() > until {
                tracing::warn!(
                    rank = silent,
                    "a process does not say that it has stopped to write here: it is left behind"
                );
                said.others[silent].is_left = true;
            }
            if is_due {
                ask_at = Instant::now() + AGAIN;
            }
            said = self.has_answered.wait_timeout(said, AGAIN).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether what this process has is to be shown: it is not, and has not changed for a while.
    pub(super) fn is_due(&self) -> bool {
        let said = self.said();
        !said.holds && said.altered.elapsed() >= BURST
    }

    /// It could not be shown after all: that is tried again.
    pub(super) fn let_go(&self) {
        let mut said = self.said();
        (said.holds, said.altered) = (false, Instant::now());
    }

    /// What this process has now is shown from here on: it is [withdrawn](Self::withdraw) before it changes. Its number.
    pub(super) fn hold(&self) -> u64 {
        let mut said = self.said();
        said.holds = true;
        said.number
    }

    /// Shows what was held by this number.
    ///
    /// # Errors
    /// Where the system has no file for it.
    pub(super) fn show(&self, number: u64, bytes: &[u8]) -> io::Result<()> {
        let mut file = File::from(memfd_create("moexpress adapter", MemfdFlags::CLOEXEC)?);
        file.write_all(bytes)?;
        self.said().file = Some((number, file));
        Ok(())
    }

    /// Tells the others what is shown, and sees who has ended.
    pub(super) fn tell(&self) {
        let mut said = self.said();
        let looks = said.looked.elapsed() >= LOOK;
        if looks {
            said.looked = Instant::now();
        }
        let number = said.number;
        for rank in (0..self.doors.len()).filter(|rank| *rank != self.me) {
            if said.others[rank].seen == Seen::Ended {
                continue;
            }
            let file = said.file.as_ref().filter(|(of, _)| *of == number && said.holds).map(|(_, file)| file);
            let other = &said.others[rank];
            let shows = file.is_some() && other.sent != Some(number) && !other.is_left;
            let sent = match (shows, looks) {
                (true, _) => self.send(rank, Kind::Shown, number, file),
                // It has room for few messages, and may not have heard that something does not hold.
                (false, true) if other.answered < number => self.send(rank, Kind::Withdrawn, number, None),
                (false, true) if self.has_ended(rank) => Sent::Ended,
                (false, _) => continue,
            };
            match sent {
                Sent::There if shows => said.others[rank].sent = Some(number),
                Sent::There | Sent::Full => {}
                Sent::Ended => said.end(rank),
            }
        }
    }

    // ---- what others say ----

    /// Waits for a message for as long as `wait`.
    pub(super) fn listen(&self, wait: Duration) {
        let wait = Timespec::try_from(wait).expect("less than a second");
        let _ = poll(&mut [PollFd::new(&self.door, PollFlags::IN)], Some(&wait));
    }

    /// Whether a message lies there that nobody has heard.
    pub(super) fn has_mail(&self) -> bool {
        poll(&mut [PollFd::new(&self.door, PollFlags::IN)], Some(&Timespec::default())).is_ok_and(|events| events > 0)
    }

    /// Takes in a message; none where there is none.
    pub(super) fn hear(&self) -> Option<Heard> {
        let mut into = [0; DOOR_MESSAGE];
        let (bytes, file) = match self.door.receive(&mut into) {
            Ok(Some(Visit::Message(bytes, file))) => (bytes, file),
            Ok(Some(Visit::Stranger)) => return Some(Heard::Else),
            Ok(None) | Err(_) => return None,
        };
        let Ok(message) = Message::try_read_from_bytes(into.get(..bytes)?) else { return Some(Heard::Else) };
        let (from, number) = (message.from.get() as usize, message.number.get());
        if self.doors.get(from).is_none_or(Option::is_none) {
            return Some(Heard::Else);
        }
        Some(match (message.kind, file) {
            (Kind::Withdrawn, _) => Heard::Withdrawn(from, number),
            (Kind::Shown, Some(file)) => Heard::Shown(from, number, file),
            (Kind::Answered, _) => {
                let mut said = self.said();
                let latest = said.number;
                let other = &mut said.others[from];
                other.answered = number.max(other.answered);
                other.is_left &= other.answered < latest;
                self.has_answered.notify_all();
                Heard::Else
            }
            (Kind::Again, _) => {
                self.said().others[from].sent = None;
                Heard::Else
            }
            // Of a process that may open no more files.
            (Kind::Shown, None) => {
                self.send(from, Kind::Again, number, None);
                Heard::Else
            }
        })
    }

    /// Whether somebody may go by what the process of a rank has shown.
    pub(super) fn is_known(&self, rank: usize) -> bool {
        matches!(self.said().others[rank].seen, Seen::Shown(_))
    }

    /// Forgets what a rank has shown, and answers. Nobody goes by it.
    pub(super) fn forget(&self, rank: usize, number: u64) {
        let mut said = self.said();
        let other = &mut said.others[rank];
        if number > other.number && other.seen != Seen::Ended {
            (other.number, other.seen) = (number, Seen::Hidden);
            said.news += 1;
        }
        drop(said);
        self.send(rank, Kind::Answered, number, None);
    }

    /// Takes in what a rank shows; false where that holds no more, or cannot be read.
    pub(super) fn see(&self, rank: usize, number: u64, file: OwnedFd) -> bool {
        let bytes = match read(file) {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::warn!(rank, %error, "what another process shows cannot be read");
                self.send(rank, Kind::Again, number, None);
                return false;
            }
        };
        let mut said = self.said();
        let other = &mut said.others[rank];
        let holds = number >= other.number && other.seen != Seen::Ended;
        if holds {
            (other.number, other.seen) = (number, Seen::Shown(bytes.into()));
            said.news += 1;
        }
        holds
    }

    /// What others have shown, `[ranks]`, and how often that has changed.
    pub(super) fn seen(&self) -> (u64, Vec<Seen>) {
        let said = self.said();
        (said.news, said.others.iter().map(|other| other.seen.clone()).collect())
    }

    /// Whether others have shown something else than what was passed on last.
    pub(super) fn has_news(&self) -> bool {
        let said = self.said();
        said.passed_on != Some(said.news)
    }

    /// Takes note that whoever goes by it is told what others had shown; false where they have shown something else than what `news` counts.
    pub(super) fn pass_on(&self, news: u64) -> bool {
        let mut said = self.said();
        said.passed_on = Some(news);
        news == said.news
    }
}

impl Said {
    /// The process of a rank has ended.
    fn end(&mut self, rank: usize) {
        self.others[rank].seen = Seen::Ended;
        self.news += 1;
    }
}

/// All of a file that another process has written.
fn read(file: OwnedFd) -> io::Result<Vec<u8>> {
    let file = File::from(file);
    let len = file.metadata()?.len();
    if len > MOST {
        return Err(io::Error::other(format!("it has {len} bytes, at most {MOST} are read")));
    }
    let mut bytes = vec![0; len as usize];
    // Other processes read it at the same time, and all descriptors have one place in common.
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
