//! Cards of other processes. Each process shows the others what peers may know of its own card, and takes that back before it changes.
//!
//! ```text
//!  whose card changes                                each of the others
//!  Withdrawn n     -- until all have answered -->    stops its kernel, forgets what it was shown
//!                  <------------------ Answered n
//!  (the change)
//!  Shown n, a file ----------------------------->    maps the memory, tells its kernel
//! ```
//!
//! So nothing is written to a process behind a queue pair that it has destroyed. A process that has ended has no door any more: that counts as an answer,
//! and its card does not answer from then on. One that is stopped is waited for a second. Its kernel ends meanwhile, and it launches none before it has
//! heard what came; one that was stopped in the middle of a launch may carry out what it had been told.
//!
//! Locks are taken in this order: the fabric's, the players', that of what was said.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
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
use soft_hca::{Fabric, Face};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

use crate::driver::{Block, Device, Imported, MemoryHandle};
use crate::error::CudaError;
use crate::node::PATIENCE as MEETING;

/// How long a process is waited for that does not answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// After how long it is asked again.
const AGAIN: Duration = Duration::from_millis(5);
/// Commands come in bursts: what they change is shown when there was none for so long.
const BURST: Duration = Duration::from_millis(1);
/// Time between two looks at who has ended.
const LOOK: Duration = Duration::from_millis(20);

type U32 = zerocopy::little_endian::U32;
type U64 = zerocopy::little_endian::U64;

/// What a message says of the card of whoever sends it, or, as an answer, of the card of whoever gets it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, TryFromBytes, IntoBytes, Immutable, Unaligned, KnownLayout)]
#[repr(u8)]
enum Kind {
    /// Nothing: whoever can send it knows that the other has not ended.
    Alive,
    /// What was shown before this number does not hold any more.
    Withdrawn,
    /// Nobody here goes by that.
    Answered,
    /// What holds, in a file.
    Shown,
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
    /// The card of this number was withdrawn, by the message of this number.
    Withdrawn(usize, u64),
    /// Something was shown of a card, by the message of this number.
    Shown(usize, u64, OwnedFd),
    /// Nothing that concerns a player.
    Else,
}

/// What is known of a card of another process.
#[derive(Debug, Default)]
struct Other {
    /// Of what this process says: how much it has answered, and what it was sent.
    answered: u64,
    sent: Option<u64>,
    has_ended: bool,
    /// Of what it says: the latest number, and what it has shown with it.
    number: u64,
    shown: Option<Arc<Shown>>,
}

/// What a process shows.
#[derive(Debug)]
struct Shown {
    face: Face,
    blocks: Vec<Block>,
}

/// What was said, by all.
#[derive(Debug)]
struct Said {
    /// How often what this process shows was withdrawn, whether it holds, and when a command came last.
    number: u64,
    holds: bool,
    altered: Instant,
    /// What was made of it for the others.
    file: Option<(u64, File)>,
    /// Changes of what others have shown.
    news: u64,
    /// Of which players were told.
    passed_on: Option<u64>,
    /// `[cards]`, of which that of this process is not used.
    others: Vec<Other>,
    looked: Instant,
}

#[derive(Debug)]
pub(super) struct Others {
    me: usize,
    device: Arc<Device>,
    door: Door,
    /// `[cards]`; none of this process's own.
    doors: Vec<Option<DoorAddress>>,
    said: Mutex<Said>,
    has_answered: Condvar,
    /// Blocks of other processes.
    mapped: Mutex<HashMap<MemoryHandle, Imported>>,
}

impl Others {
    /// Has all processes of `member`, each of which plays its rank's card on `device`, tell each other where they hear.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with the rank that did not come, or runs elsewhere; [`Error::Broken`] with what the system refuses.
    pub(super) fn met(device: &Arc<Device>, member: &Member) -> Result<Self, Error> {
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
        let this = Self {
            me: me.index(),
            device: Arc::clone(device),
            door,
            doors,
            said: Mutex::new(said),
            has_answered: Condvar::new(),
            mapped: Mutex::default(),
        };
        let stranger = (0..this.doors.len()).find(|&card| this.send(card, Kind::Alive, 0, None) == Sent::Ended);
        let reached = stranger.map_or(Ok(()), |rank| {
            let what = format_args!("the adapter of rank {rank} beside those of other processes");
            Err(Error::unsupported(what, "ranks on one host, in one container: their GPUs play the adapters"))
        });
        // Nobody leaves before all have been reached.
        member.try_all_gather(reached, |()| Vec::new(), MEETING, CudaError::meeting)?;
        Ok(this)
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends to a card's process, which may have no room for it now. All that matters is sent again.
    fn send(&self, card: usize, kind: Kind, number: u64, file: Option<&File>) -> Sent {
        let Some(to) = &self.doors[card] else { return Sent::Full };
        let message = Message { number: U64::new(number), from: U32::new(self.me as u32), kind };
        match self.door.send(to, message.as_bytes(), file.map(|file| file.as_fd())) {
            Ok(true) => Sent::There,
            Ok(false) => Sent::Full,
            Err(_) => Sent::Ended,
        }
    }

    // ---- what this process says ----

    /// Takes back what was shown of the own card. Returns when nobody goes by it any more.
    pub(super) fn withdraw(&self) {
        let mut said = self.said();
        said.altered = Instant::now();
        if !std::mem::take(&mut said.holds) {
            return;
        }
        said.number += 1;
        let (number, until) = (said.number, Instant::now() + PATIENCE);
        let mut ask_at = Instant::now();
        loop {
            let is_due = Instant::now() >= ask_at;
            let mut silent = None;
            for (card, _) in self.doors.iter().enumerate().filter(|(_, door)| door.is_some()) {
                if said.others[card].has_ended || said.others[card].answered >= number {
                    continue;
                }
                if is_due && self.send(card, Kind::Withdrawn, number, None) == Sent::Ended {
                    said.end(card);
                } else {
                    silent = Some(card);
                }
            }
            let Some(silent) = silent else { return };
            if Instant::now() > until {
                tracing::warn!(
                    rank = silent,
                    "a process does not say that it has stopped to write here: it is left behind"
                );
                return;
            }
            if is_due {
                ask_at = Instant::now() + AGAIN;
            }
            said = self.has_answered.wait_timeout(said, AGAIN).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Shows the own card where it is not shown, and sees who has ended.
    ///
    /// # Errors
    /// Where memory that peers may name cannot be named to them, or the system has no file for it.
    pub(super) fn tell(&self, fabric: &Fabric) -> Result<(), CudaError> {
        let mut said = self.said();
        let is_due = !said.holds && said.altered.elapsed() >= BURST;
        let looks = said.looked.elapsed() >= LOOK;
        if is_due {
            drop(said);
            // Under the fabric's lock: it is withdrawn before anything of it changes.
            let (face, number) = fabric.show(self.me, |face| {
                let mut said = self.said();
                said.holds = true;
                (face, said.number)
            });
            let file = self.file(&face)?;
            said = self.said();
            said.file = Some((number, file));
        }
        if looks {
            said.looked = Instant::now();
        }
        for card in (0..self.doors.len()).filter(|card| *card != self.me) {
            if said.others[card].has_ended {
                continue;
            }
            let number = said.number;
            let file = said.file.as_ref().filter(|(of, _)| *of == number && said.holds).map(|(_, file)| file);
            let shows = file.is_some() && said.others[card].sent != Some(number);
            let sent = match (shows, looks) {
                (true, _) => self.send(card, Kind::Shown, number, file),
                (false, true) => self.send(card, Kind::Alive, 0, None),
                (false, false) => continue,
            };
            match sent {
                Sent::There if shows => said.others[card].sent = Some(number),
                Sent::There | Sent::Full => {}
                Sent::Ended => said.end(card),
            }
        }
        Ok(())
    }

    /// A file of what the others are shown.
    fn file(&self, face: &Face) -> Result<File, CudaError> {
        let mut blocks: Vec<Block> = Vec::new();
        for region in face.regions() {
            if !blocks.iter().any(|block| block.holds(region.base, region.bytes)) {
                blocks.push(self.device.block(region.base)?);
            }
        }
        written(&[&to_bytes(&blocks)[..], &face.to_bytes()].concat())
            .map_err(|error| CudaError::Meeting { problem: format!("a file for what an adapter is like: {error}") })
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
                let answered = &mut self.said().others[from].answered;
                *answered = number.max(*answered);
                self.has_answered.notify_all();
                Heard::Else
            }
            (Kind::Alive | Kind::Shown, _) => Heard::Else,
        })
    }

    /// Whether a player may go by something that the process of a card has shown.
    pub(super) fn is_known(&self, card: usize) -> bool {
        self.said().others[card].shown.is_some()
    }

    /// Forgets what was shown of a card, and answers. No player goes by it.
    pub(super) fn forget(&self, card: usize, number: u64) {
        let mut said = self.said();
        let other = &mut said.others[card];
        let is_news = other.shown.is_some() && number > other.number;
        if number > other.number {
            (other.number, other.shown) = (number, None);
        }
        said.news += u64::from(is_news);
        drop(said);
        self.send(card, Kind::Answered, number, None);
    }

    /// Takes in what was shown of a card; false where that holds no more, or is nothing.
    pub(super) fn see(&self, card: usize, number: u64, file: OwnedFd) -> bool {
        let Some(shown) = read(file).ok().and_then(|bytes| Shown::from_bytes(card, &bytes)) else {
            tracing::warn!(rank = card, "what an adapter of another process is like cannot be read");
            return false;
        };
        let mut said = self.said();
        let other = &mut said.others[card];
        let holds = number >= other.number && !other.has_ended;
        if holds {
            (other.number, other.shown) = (number, Some(Arc::new(shown)));
            said.news += 1;
        }
        holds
    }

    /// Whether others have shown something else than what was passed on last.
    pub(super) fn has_news(&self) -> bool {
        let said = self.said();
        said.passed_on != Some(said.news)
    }

    /// Takes note that players are told what others had shown; false where that was other than what `news` counts.
    pub(super) fn takes(&self, news: Option<u64>) -> bool {
        let mut said = self.said();
        said.passed_on = news;
        news == Some(said.news)
    }

    /// Tells the fabric what others have shown, and maps their memory.
    ///
    /// # Errors
    /// [`CudaError::Driver`], where a block cannot be mapped.
    pub(super) fn pass_on(&self, fabric: &Fabric) -> Result<u64, CudaError> {
        let (news, shown) = {
            let said = self.said();
            let known = |other: &Other| (other.shown.clone(), other.has_ended);
            (said.news, said.others.iter().map(known).collect::<Vec<_>>())
        };
        for (card, (shown, has_ended)) in shown.into_iter().enumerate().filter(|(card, _)| *card != self.me) {
            for block in shown.iter().flat_map(|shown| &shown.blocks) {
                let mut mapped = self.mapped();
                if let Entry::Vacant(place) = mapped.entry(block.handle) {
                    place.insert(Imported::open(&self.device, block.handle)?);
                }
            }
            let face = shown.map(|shown| shown.face.clone());
            // Of what has ended nothing answers any more.
            fabric.see(card, face.or_else(|| has_ended.then(Face::default)));
        }
        Ok(news)
    }

    fn mapped(&self) -> MutexGuard<'_, HashMap<MemoryHandle, Imported>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where this process sees memory of a card that lies there in the card's own; the same for the own card. None where it was not shown.
    pub(super) fn place(&self, card: usize, base: u64, bytes: u64) -> Option<u64> {
        if card == self.me {
            return Some(base);
        }
        let shown = self.said().others[card].shown.clone()?;
        let block = shown.blocks.iter().find(|block| block.holds(base, bytes))?;
        Some(self.mapped().get(&block.handle)?.address() + (base - block.base))
    }
}

impl Said {
    /// The process of a card has ended.
    fn end(&mut self, card: usize) {
        let other = &mut self.others[card];
        (other.has_ended, other.shown) = (true, None);
        self.news += 1;
    }
}

impl Block {
    fn holds(&self, base: u64, bytes: u64) -> bool {
        base.checked_sub(self.base).and_then(|at| at.checked_add(bytes)).is_some_and(|end| end <= self.bytes)
    }
}

/// A block as it is told.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, Unaligned, KnownLayout)]
#[repr(C)]
struct ToldBlock {
    base: U64,
    bytes: U64,
    handle: [u8; MemoryHandle::BYTES],
}

fn to_bytes(blocks: &[Block]) -> Vec<u8> {
    let told = |block: &Block| ToldBlock {
        base: U64::new(block.base),
        bytes: U64::new(block.bytes),
        handle: block.handle.to_bytes(),
    };
    let count = U32::new(blocks.len() as u32);
    let blocks = blocks.iter().flat_map(|block| told(block).as_bytes().to_vec());
    count.as_bytes().iter().copied().chain(blocks).collect()
}

impl Shown {
    fn from_bytes(card: usize, told: &[u8]) -> Option<Self> {
        let (count, told) = U32::read_from_prefix(told).ok()?;
        let (blocks, told) = <[ToldBlock]>::ref_from_prefix_with_elems(told, count.get() as usize).ok()?;
        let block = |told: &ToldBlock| Block {
            base: told.base.get(),
            bytes: told.bytes.get(),
            handle: MemoryHandle::from_bytes(told.handle),
        };
        Some(Self { face: Face::from_bytes(card, told)?, blocks: blocks.iter().map(block).collect() })
    }
}

/// A file in memory.
fn written(bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create("moexpress adapter", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

/// All of a file that another process has written.
fn read(file: OwnedFd) -> io::Result<Vec<u8>> {
    let file = File::from(file);
    let mut bytes = vec![0; file.metadata()?.len() as usize];
    // Other processes read it at the same time, and all descriptors have one place in common.
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_read_as_it_was_written() {
        let block = |base| Block { base, bytes: 1 << 20, handle: MemoryHandle::from_bytes([base as u8; 72]) };
        let blocks = [block(7), block(9)];
        let bytes = [&to_bytes(&blocks)[..], &Face::default().to_bytes()].concat();
        let file = written(&bytes).unwrap();
        for _ in 0..2 {
            let shown = read(file.try_clone().unwrap().into()).unwrap();
            let shown = Shown::from_bytes(1, &shown).unwrap();
            assert_eq!((shown.blocks, shown.face), (blocks.to_vec(), Face::default()));
        }
        for len in 0..bytes.len() {
            assert!(Shown::from_bytes(1, &bytes[..len]).is_none(), "{len} bytes");
        }
    }

    #[test]
    fn a_block_holds_what_lies_in_it_whole() {
        let block = Block { base: 100, bytes: 10, handle: MemoryHandle::from_bytes([0; 72]) };
        assert!(block.holds(100, 10) && block.holds(109, 1));
        assert!(
            !block.holds(99, 1) && !block.holds(109, 2) && !block.holds(u64::MAX, 1) && !block.holds(101, u64::MAX)
        );
    }
}
