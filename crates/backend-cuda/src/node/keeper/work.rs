//! What a keeper's thread does: it hears the others, makes pieces and takes them away.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ep_bootstrap::{DOOR_MESSAGE, Visit};
use ep_core::engine::{Age, Ages, Arena, Piece};
use ep_core::port::Offset;
use ep_core::{Rank, RankSet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::said::Said;
use super::{Fixed, Kept, LOOK, Shared, locked};
use crate::driver::{Device, LINGER, PIECE, Pages};
use crate::error::CudaError;
use crate::rank::RankDevice;

/// Time between two attempts to tell somebody who takes in nothing.
const PAUSE: Duration = Duration::from_millis(1);
/// How long it is before memory that was not to be had is asked for again.
const AGAIN: Duration = Duration::from_secs(1);
/// What is left of a GPU's free memory: one part of so many of all that it has.
const SHARE: u64 = 16;
/// Messages that are taken in at a time: whoever sends more holds up nothing.
const AT_A_TIME: usize = 64;

/// A piece that the others are to map.
struct Coming {
    number: u64,
    at: u64,
    bytes: u64,
    awaited: Vec<Rank>,
}

/// What the thread does.
pub(super) struct Work {
    shared: Arc<Shared>,
    kept: Kept,
    arena: Arena,
    unsent: Vec<(Rank, Said, Option<Arc<OwnedFd>>)>,
    /// Of the last piece that the others were told of.
    number: u64,
    coming: Option<Coming>,
    /// Since when pieces are spare, and their age, by where they lie.
    spare: BTreeMap<u64, (Age, Instant)>,
    /// When memory that was not to be had is asked for again.
    again: Option<Instant>,
    ages: Arc<Ages>,
    rank: Arc<RankDevice>,
    /// Whether the log says that messages cannot be taken in.
    is_deaf: bool,
}

impl Work {
    pub(super) fn new(
        shared: Arc<Shared>,
        kept: Kept,
        (arena, ages): (Arena, Arc<Ages>),
        rank: Arc<RankDevice>,
    ) -> Self {
        let (unsent, spare) = (Vec::new(), BTreeMap::new());
        Self { shared, kept, arena, unsent, number: 0, coming: None, spare, again: None, ages, rank, is_deaf: false }
    }

    pub(super) fn go_on(mut self) {
        for Fixed { at, len, descriptor } in std::mem::take(&mut self.kept.fixed) {
            self.number += 1;
            self.tell_all(Said::Back { at, bytes: len, number: self.number }, descriptor.as_ref());
        }
        let mut look_at = Instant::now() + LOOK;
        loop {
            self.send();
            let wait = if self.unsent.is_empty() { LOOK } else { PAUSE };
            let wait = Timespec::try_from(wait).expect("less than a second");
            let _ = poll(&mut [PollFd::new(&self.shared.door, PollFlags::IN)], Some(&wait));
            self.hear();
            if self.shared.stops.load(Ordering::Acquire) {
                return;
            }
            self.leave();
            self.finish();
            self.grow();
            if Instant::now() >= look_at {
                look_at = Instant::now() + LOOK;
                self.reach();
                self.shrink();
            }
        }
    }

    /// Takes in what has come.
    fn hear(&mut self) {
        let mut message = [0; DOOR_MESSAGE];
        for _ in 0..AT_A_TIME {
            match self.shared.door.receive(&mut message) {
                Ok(None) => return,
                Ok(Some(Visit::Stranger)) => {}
                Ok(Some(Visit::Message(bytes, descriptor))) => {
                    if let Some((from, said)) = Said::from_bytes(&message[..bytes]) {
                        self.answer(from, said, descriptor);
                    }
                }
                Err(error) => {
                    // It may last: then this is no reason for a turn without a pause.
                    if !std::mem::replace(&mut self.is_deaf, true) {
                        tracing::warn!(%error, "a keeper of memory hears nothing");
                    }
                    std::thread::sleep(PAUSE);
                    return;
                }
            }
        }
    }

    /// Lets go of what ranks had that were given up: else their GPUs' memory would be taken for as long as this rank lives, whoever has ended.
    fn leave(&mut self) {
        let left = std::mem::take(&mut *locked(&self.shared.left));
        for (_, theirs, _) in self.kept.theirs.iter().filter(|(rank, ..)| left.contains(*rank)) {
            // SAFETY: nothing of this rank touches it any more, as whoever called `Keeper::leave` promised.
            unsafe { theirs.bare_all() };
        }
    }

    fn answer(&mut self, from: Rank, said: Said, descriptor: Option<OwnedFd>) {
        // Who was given up may be alive, and has nothing here any more.
        if locked(&self.shared.lost).contains(from) {
            return;
        }
        match said {
            Said::Back { at, bytes, number } => {
                let mapped = self.map(from, at, bytes, descriptor);
                let answer = if mapped.is_ok() { Said::Backed { number } } else { Said::Refused { number } };
                if let Err(error) = &mapped {
                    tracing::warn!(%error, rank = from.0, bytes, "memory of another rank cannot be mapped");
                }
                let mut met = locked(&self.shared.met);
                match (&mut *met, mapped) {
                    (Ok(met), Ok(())) => *met += 1,
                    (Ok(_), Err(error)) => *met = Err(format!("the window of rank {from}: {error}")),
                    (Err(_), _) => {}
                }
                drop(met);
                self.shared.has_met.notify_all();
                self.unsent.push((from, answer, None));
            }
            Said::Backed { number } => {
                if let Some(coming) = self.coming.as_mut().filter(|coming| coming.number == number) {
                    coming.awaited.retain(|rank| *rank != from);
                }
            }
            Said::Refused { number } => {
                if let Some(Coming { at, .. }) = self.coming.take_if(|coming| coming.number == number) {
                    self.tell_all(Said::Bare { at }, None);
                    self.bare(at);
                    self.put_off();
                }
            }
            Said::Bare { at } => {
                if let Some((_, theirs, _)) = self.kept.theirs.iter().find(|(rank, ..)| *rank == from) {
                    // SAFETY: its owner says so when nobody has been told of it whose kernels have not ended.
                    let bared = unsafe { theirs.bare(at) };
                    bared.unwrap_or_else(|error| tracing::warn!(%error, "memory of another rank stays mapped"));
                }
            }
        }
    }

    fn map(&self, from: Rank, at: u64, bytes: u64, descriptor: Option<OwnedFd>) -> Result<(), CudaError> {
        let problem = |problem: &str| CudaError::Meeting { problem: problem.to_owned() };
        let theirs = self.kept.theirs.iter().find(|(rank, ..)| *rank == from);
        let (_, theirs, _) = theirs.ok_or_else(|| problem("no rank of this node"))?;
        let lost = "its descriptor was lost: this process may not have more; allow more by `ulimit -n`";
        let descriptor = descriptor.ok_or_else(|| problem(lost))?;
        let pages = Pages::given(theirs.device(), descriptor.as_fd(), bytes)?;
        theirs.back(at, pages, &[theirs.device()])
    }

    /// Hands out a piece that all have mapped.
    fn finish(&mut self) {
        let lost = locked(&self.shared.lost).clone();
        let done = self.coming.take_if(|coming| coming.awaited.iter().all(|rank| lost.contains(*rank)));
        if let Some(Coming { at, bytes, .. }) = done {
            self.shared.backed.fetch_add(bytes, Ordering::Relaxed);
            self.arena.came(Offset(at).span(bytes));
            self.is_answered();
            tracing::debug!(rank = self.kept.me.0, bytes, "an arena has grown");
        }
    }

    /// Makes what is asked for.
    fn grow(&mut self) {
        let asked = self.shared.asked.load(Ordering::Acquire);
        if asked == 0 || self.coming.is_some() {
            return;
        }
        if let Some(again) = self.again {
            if Instant::now() >= again {
                self.again = None;
                self.shared.is_refused.store(false, Ordering::Release);
                self.is_answered();
            }
            return;
        }
        match self.made(asked) {
            Ok(coming) => {
                self.coming = Some(coming);
                self.finish();
            }
            Err(error) => {
                tracing::debug!(%error, rank = self.kept.me.0, asked, "an arena does not grow");
                self.put_off();
            }
        }
    }

    /// More may be asked for.
    fn is_answered(&self) {
        self.shared.is_overdue.store(false, Ordering::Relaxed);
        self.shared.asked.store(0, Ordering::Release);
    }

    fn put_off(&mut self) {
        self.shared.is_refused.store(true, Ordering::Release);
        self.again = Some(Instant::now() + AGAIN);
    }

    /// A piece of so many bytes, or of the least that is of use.
    fn made(&mut self, asked: u64) -> Result<Coming, CudaError> {
        let (own, between) = (&self.kept.own, &self.kept.between);
        // Others of this process may take some of the same GPU.
        let device = Arc::clone(own.device());
        let _alone = locked(&device.takes);
        let (free, all) = device.memory()?;
        let allowed = free.saturating_sub(all / SHARE) / PIECE * PIECE;
        let least = self.shared.least.load(Ordering::Relaxed).next_multiple_of(PIECE);
        // Half of what may be taken is left for others than the batch at hand.
        let bytes = asked.next_multiple_of(PIECE).min((allowed / 2 / PIECE * PIECE).max(least)).min(allowed);
        let (at, bytes) = own.gap(between.start, between.end, bytes);
        if bytes < least || bytes == 0 {
            let room = between.end - between.start;
            let problem = format!(
                "its next piece needs {least} bytes, {allowed} may be taken, and there are addresses for {room}"
            );
            return Err(CudaError::NoGrowth { problem });
        }
        self.shared.is_short.store(bytes < asked.next_multiple_of(PIECE), Ordering::Relaxed);
        let pages = Pages::new(&device, bytes)?;
        let descriptor = if self.kept.theirs.is_empty() { None } else { Some(Arc::new(pages.descriptor()?)) };
        let reach: Vec<&Device> = self.kept.reach.iter().map(|device| &**device).collect();
        own.back(at, pages, &reach)?;
        let awaited = self.kept.theirs.iter().map(|(rank, ..)| *rank).collect();
        self.number += 1;
        let number = self.number;
        self.tell_all(Said::Back { at, bytes, number }, descriptor.as_ref());
        Ok(Coming { number, at, bytes, awaited })
    }

    /// Learns which marks are reached.
    fn reach(&self) {
        locked(&self.shared.marks).retain(|(mark, moment)| {
            let has_come = moment.has_come();
            // Peers may come late to an operation that has failed here, and touch what it has told them of. Kernels report before they end.
            fence(Ordering::Acquire);
            if matches!(has_come, Ok(true)) && !self.rank.has_failed() {
                self.ages.reach(*mark);
            }
            matches!(has_come, Ok(false))
        });
    }

    /// Takes away what has been spare for long.
    fn shrink(&mut self) {
        let (now, spare) = (Instant::now(), self.arena.spare());
        self.spare.retain(|at, _| spare.iter().any(|piece| piece.span.offset.0 == *at));
        for piece in spare {
            let Piece { span, given } = piece;
            let since = self.spare.entry(span.offset.0).or_insert((given, now));
            // What is needed at any look is so for as long again.
            if since.0 != given || self.arena.needs(&piece, self.shared.ahead.load(Ordering::Relaxed)) {
                *since = (given, now);
            }
            let is_over = now.duration_since(since.1) >= LINGER;
            if is_over && self.arena.withdraw(&piece) {
                self.shared.is_short.store(false, Ordering::Relaxed);
                self.spare.remove(&span.offset.0);
                self.shared.backed.fetch_sub(span.len, Ordering::Relaxed);
                self.tell_all(Said::Bare { at: span.offset.0 }, None);
                self.bare(span.offset.0);
                tracing::debug!(rank = self.kept.me.0, bytes = span.len, "an arena has shrunk");
            }
        }
    }

    fn bare(&self, at: u64) {
        // SAFETY: no block of it was handed out yet, or none is and what was enqueued while one was has ended (`Arena::withdraw`).
        let bared = unsafe { self.kept.own.bare(at) };
        bared.unwrap_or_else(|error| tracing::warn!(%error, "memory of an arena stays"));
    }

    fn tell_all(&mut self, said: Said, descriptor: Option<&Arc<OwnedFd>>) {
        let others = self.kept.theirs.iter().map(|(rank, ..)| (*rank, said, descriptor.cloned()));
        self.unsent.extend(others);
    }

    /// Sends what can be sent, to each in order.
    fn send(&mut self) {
        let (shared, kept) = (&self.shared, &self.kept);
        let lost = locked(&shared.lost).clone();
        let (mut full, mut unreachable) = (RankSet::new(), None);
        self.unsent.retain(|(to, said, descriptor)| {
            let Some((.., door)) = kept.theirs.iter().find(|(rank, ..)| rank == to) else { return false };
            if lost.contains(*to) || full.contains(*to) {
                return !lost.contains(*to);
            }
            let descriptor = descriptor.as_ref().map(|descriptor| descriptor.as_fd());
            match shared.door.send(door, &said.to_bytes(kept.me), descriptor) {
                Ok(true) => false,
                Ok(false) => {
                    full.insert(*to);
                    true
                }
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound) => {
                    unreachable = Some(*to);
                    false
                }
                Err(error) => {
                    tracing::debug!(%error, rank = to.0, "a rank is not told of memory now");
                    full.insert(*to);
                    true
                }
            }
        });
        if let Some(rank) = unreachable {
            // Of matter before the first call alone: who goes later is heard of in other ways.
            let problem =
                format!("rank {rank} is told nothing: it has ended, or its process has another network namespace");
            let mut met = locked(&shared.met);
            *met = met.clone().and(Err(problem));
            shared.has_met.notify_all();
        }
    }
}
