//! The windows that one process reaches: of the ranks of a node, or of all ranks where they are threads.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ep_bootstrap::{Member, Parts};
use ep_core::{Error, Layout, Rank, RankSet};
use rustix::io::Errno;

use crate::handoff::{self, Handoff};
use crate::meeting;
use crate::memory::Mapping;
use crate::pace;
use crate::roll::Roll;
use crate::window;

/// The windows of near ranks, zeroed at first, and who is gone.
#[derive(Debug)]
pub(crate) struct Node {
    /// `[ranks]`: none for ranks of other nodes, where ranks are processes.
    windows: Vec<Option<Mapping>>,
    /// The own window, where ranks are processes and all of one node.
    own: Mutex<Option<OwnedFd>>,
    roll: Roll,
}

impl Node {
    /// Of ranks that are threads of this process: `own` are the windows of all, by rank.
    pub(crate) fn here(layout: &Layout, own: &[OwnedFd]) -> Result<Arc<Self>, Error> {
        let windows = layout.topology().all().zip(own);
        let windows = windows.map(|(rank, own)| map(own.as_fd(), layout, rank).map(Some));
        Ok(Arc::new(Self::of(windows.collect::<Result<_, _>>()?)))
    }

    /// Of ranks that are processes: the ranks of a node give each other their windows; that of this rank is `own`. `handoff`: what this rank
    /// brings to the exchange, and what all ranks told.
    pub(crate) fn met(
        layout: &Layout,
        own: OwnedFd,
        member: &Member,
        handoff: (&Handoff, &Parts),
        within: Duration,
    ) -> Result<Arc<Self>, Error> {
        let given = handoff::exchange(member, layout.topology(), &RankSet::new(), own.as_fd(), handoff, within)?;
        let handoff::Exchanged { given, here } = given;
        pace::expect(here);
        let windows = layout.topology().all().zip(given).map(|(rank, given)| match given {
            Some(given) => theirs(&given, layout, rank).map(Some),
            None if rank == member.rank() => map(own.as_fd(), layout, rank).map(Some),
            None => Ok(None),
        });
        let node = Self::of(windows.collect::<Result<_, _>>()?);
        // A node is lost as a whole: where there are several, no survivor has a neighbour that is lost.
        let kept = layout.topology().nodes() == 1;
        Ok(Arc::new(Self { own: Mutex::new(kept.then_some(own)), ..node }))
    }

    fn of(windows: Vec<Option<Mapping>>) -> Self {
        let roll = Roll::new(windows.len() as u32);
        Self { windows, own: Mutex::new(None), roll }
    }

    /// Moves the windows of all but `lost` to memory that these do not have: what they still write, nobody reads. All others call this after they
    /// have agreed; none has a verb under way. What lies in the windows stays, at its address.
    ///
    /// A rank that has no memory for its window twice says so in the log, and keeps the one that it has.
    pub(crate) fn fence(
        &self,
        layout: &Layout,
        lost: &RankSet,
        member: &Member,
        within: Duration,
    ) -> Result<(), Error> {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(old) = own.as_ref() else { return Ok(()) };
        let copied = window::copy(old, layout.window_bytes()).inspect_err(|error| {
            tracing::warn!(%error, rank = member.rank().0, ?lost, "a window stays where ranks that were lost can write: there is no memory for another");
        });
        let copied = copied.ok();
        let (window, handoff) = (copied.as_ref().unwrap_or(old), Handoff::open(hash(layout))?);
        let all = meeting::gather(member, &handoff.told(), within)?;
        let given = handoff::exchange(member, layout.topology(), lost, window.as_fd(), (&handoff, &all), within)?.given;
        for (rank, given) in layout.topology().all().zip(&given) {
            let (Some(window), Some(given)) = (self.window(rank), given) else { continue };
            window::check(given, layout.window_bytes()).map_err(|why| of_rank(rank, why))?;
            window.replace(given.as_fd()).map_err(|error| not_mapped(layout, rank, error))?;
        }
        // Until it lies in the old one's place, the old one is what the next attempt copies.
        if let Some(copied) = copied {
            let me = member.rank();
            self.own(me).replace(copied.as_fd()).map_err(|error| not_mapped(layout, me, error))?;
            *own = Some(copied);
        }
        Ok(())
    }

    /// The window of a near rank.
    #[inline]
    pub(crate) fn window(&self, rank: Rank) -> Option<&Mapping> {
        self.windows.get(rank.index())?.as_ref()
    }

    /// The window of a rank of this process.
    #[inline]
    pub(crate) fn own(&self, me: Rank) -> &Mapping {
        self.window(me).expect("a rank's own window is mapped when its node is made")
    }

    pub(crate) const fn roll(&self) -> &Roll {
        &self.roll
    }
}

/// A window as `layout` cuts it.
pub(crate) fn create(layout: &Layout) -> Result<OwnedFd, Error> {
    let bytes = layout.window_bytes();
    window::create(bytes).map_err(|error| {
        let what = format_args!("a window of {bytes} bytes, a file in memory,");
        let remedy = match Errno::from_io_error(&error) {
            Some(Errno::MFILE) => "allow this process more open files (`ulimit -n`): each rank has one here",
            Some(Errno::NFILE) => "allow the system more open files (fs.file-max)",
            _ => "let the system have more memory, or take a smaller arena or shallower rings",
        };
        Error::broken(what, error, remedy)
    })
}

/// Of what all ranks of a node must have alike.
pub(crate) fn hash(layout: &Layout) -> u64 {
    layout.hash_at_start()
}

/// What `rank`, a process of its own, gave as its window: refused where it is another size or may lose its pages.
fn theirs(given: &OwnedFd, layout: &Layout, rank: Rank) -> Result<Mapping, Error> {
    window::check(given, layout.window_bytes()).map_err(|why| of_rank(rank, why))?;
    map(given.as_fd(), layout, rank)
}

fn of_rank(rank: Rank, why: String) -> Error {
    handoff::failed(format_args!("the window of rank {rank}"), why)
}

fn map(window: BorrowedFd<'_>, layout: &Layout, rank: Rank) -> Result<Mapping, Error> {
    Mapping::of(window, layout.window_bytes()).map_err(|error| not_mapped(layout, rank, error))
}

fn not_mapped(layout: &Layout, rank: Rank, error: io::Error) -> Error {
    let what = format_args!("the mapping of the {} bytes of rank {rank}'s window", layout.window_bytes());
    Error::broken(what, error, "raise the limit of the address space (ulimit -v), or take a smaller arena")
}

#[cfg(all(test, not(ep_loom)))]
mod tests {
    use ep_core::{Settings, Shape, Topology};

    use super::*;

    /// Whoever mapped a shorter file would end at the first page that is missing.
    #[test]
    fn a_window_that_a_peer_gives_is_checked_before_it_is_mapped() {
        let (topology, shape) = (Topology::new(1, 2).unwrap(), Shape::builder().experts(2).topk(1).hidden(8).build());
        let shape = shape.unwrap();
        let settings = Settings::builder(&shape, &topology).arena_bytes(4096).build().unwrap();
        let layout = Layout::new(&shape, &topology, &settings).unwrap();
        let given = |bytes| theirs(&window::create(bytes).unwrap(), &layout, Rank(1)).map(drop);
        assert_eq!(given(layout.window_bytes()), Ok(()));
        for bytes in [1, layout.window_bytes() - 1, layout.window_bytes() + 1] {
            let refusal = given(bytes).unwrap_err().to_string();
            assert!(refusal.contains("the window of rank 1") && refusal.contains(&bytes.to_string()), "{refusal}");
        }
    }
}
